// expect: eviction_callback
// What is called halfway through an allocation must not throw, and must say so.
#include <llmmem/paging/block_pool.hpp>

#include <span>

void allocate(llmmem::block_pool<>& pool, std::span<llmmem::block_id> out) {
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  static_cast<void>(pool.allocate(out, [](std::span<const llmmem::block_id>) noexcept {}));
#else
  static_cast<void>(pool.allocate(out, [](std::span<const llmmem::block_id>) {}));
#endif
}
