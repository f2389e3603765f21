// expect: at least two, the fastest first, as in tiered_buffer<host_space, file_space<>>
// Chunks have somewhere to go.
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>

#ifdef LLMMEM_COMPILE_FAIL_CONTROL
using buffer_type = llmmem::tiered_buffer<llmmem::host_space, llmmem::host_space>;
#else
using buffer_type = llmmem::tiered_buffer<llmmem::host_space>;
#endif

std::size_t size() {
  return sizeof(buffer_type);
}
