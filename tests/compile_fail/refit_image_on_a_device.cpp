// expect: the host cannot touch this space
// A refit writes an image by the host, so its memory is not a device's.
#include <llmmem/refit/refit_image.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/transfer/file_space.hpp>

llmmem::refit_image image_of(const llmmem::refit_layout& layout,
                             const llmmem::memory_range<llmmem::host_space>& pinned,
                             const llmmem::memory_range<llmmem::file_space<>>& elsewhere) {
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  static_cast<void>(elsewhere);
  return {layout, pinned};
#else
  static_cast<void>(pinned);
  return {layout, elsewhere};
#endif
}
