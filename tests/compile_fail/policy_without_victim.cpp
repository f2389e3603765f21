// expect: Traits::eviction must be an eviction_policy
// A policy that lacks a member is named by the traits it came in with, not by an error deep inside.
#include <llmmem/paged_allocator.hpp>

#ifdef LLMMEM_COMPILE_FAIL_CONTROL
using policy = llmmem::lru_eviction;
#else
struct policy {
  explicit policy(llmmem::slot_count, const llmmem::metadata_source& = {}) {}
  void insert(llmmem::slot_id, llmmem::access_hint = {}) noexcept {}
};
#endif

struct traits : llmmem::paged_traits {
  using eviction = policy;
};

llmmem::paged_allocator<traits>* instantiate() {
  return new llmmem::paged_allocator<traits>({.blocks = 1});
}
