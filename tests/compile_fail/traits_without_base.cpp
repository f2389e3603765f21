// expect: Traits lacks a policy: inherit from llmmem::paged_traits
// Traits that were written from nothing are told what to inherit from.
#include <llmmem/paged_allocator.hpp>

#ifdef LLMMEM_COMPILE_FAIL_CONTROL
struct my_traits : llmmem::paged_traits {
#else
struct my_traits {
#endif
  using eviction = llmmem::lru_eviction;
};

int main() {
  const llmmem::paged_allocator<my_traits> cache({.blocks = 16});
}
