// expect: a tier is a memory_space
// Memory is no space: it allocates nothing.
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <cstdint>
#include <vector>

#ifdef LLMMEM_COMPILE_FAIL_CONTROL
using top = llmmem::host_space;
#else
using top = std::vector<char>;
#endif

std::uint64_t leases(llmmem::tiered_buffer<top, llmmem::host_space>& buffer) {
  return buffer.stats().leases;
}
