// expect: the host reads and writes leased bytes, so the store's first tier must be host memory
// Base weights and momentum that the host changes.
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/training/outer_rounds.hpp>
#include <llmmem/transfer/file_space.hpp>

#ifdef LLMMEM_COMPILE_FAIL_CONTROL
using store_type = llmmem::tiered_buffer<llmmem::host_space, llmmem::host_space>;
#else
using store_type = llmmem::tiered_buffer<llmmem::file_space<>, llmmem::host_space>;  // as a device's memory
#endif

std::size_t size() {
  return sizeof(llmmem::outer_rounds<store_type>);
}
