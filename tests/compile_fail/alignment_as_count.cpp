// expect: takes its alignment by type; elements are
// Two numbers could be bytes and their alignment, or elements and the bytes of each.
#include <llmmem/space/buffer.hpp>
#include <llmmem/space/host.hpp>

void engine(llmmem::host_space& host) {
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  const llmmem::space_buffer<llmmem::host_space> one_element(host, 1, 1 << 20, std::align_val_t{64});
  const llmmem::space_buffer<llmmem::host_space> bytes(host, 1 << 20, std::align_val_t{64});
#else
  const llmmem::space_buffer<llmmem::host_space> one_element(host, 1, 1 << 20);
#endif
}
