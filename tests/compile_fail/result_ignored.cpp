// expect: (ignoring returned value|ignoring return value).*nodiscard
#include <llmmem/result.hpp>

llmmem::result<int> allocate();

void engine() {
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  if (!allocate()) return;
#else
  allocate();  // the failure goes unseen
#endif
}
