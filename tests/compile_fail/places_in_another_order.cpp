// expect: this place names a space of another type than its tier
// The places of a buffer come in the order of its tiers.
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/transfer/file_space.hpp>

void engine(llmmem::host_space& host, llmmem::file_space<>& file) {
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  const llmmem::tiered_buffer<llmmem::host_space, llmmem::file_space<>> buffer({}, {host, 1 << 20},
                                                                               {file, 1 << 22});
#else
  const llmmem::tiered_buffer<llmmem::host_space, llmmem::file_space<>> buffer({}, {file, 1 << 22},
                                                                               {host, 1 << 20});
#endif
}
