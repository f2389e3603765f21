// expect: Client must be a batch_client, over groups a group_batch_client
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

struct engine {
  std::span<const llmmem::token_id> tokens(std::uint64_t) noexcept { return {}; }
  void copy(const llmmem::block_copy&) noexcept {}
  void exhausted(std::uint64_t, const llmmem::failure&) noexcept {}
};

#ifdef LLMMEM_COMPILE_FAIL_CONTROL
using cache_type = llmmem::paged_allocator<>;
#else
using cache_type = llmmem::hybrid_allocator<>;
#endif

void schedule(cache_type& cache, engine& client) {
  llmmem::batch_scheduler scheduler(cache, client, {});
}
