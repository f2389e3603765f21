// expect: (cannot convert|no viable conversion)
#include <llmmem/result.hpp>

llmmem::result<int> allocate();

int engine() {
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  int block = allocate().value();
#else
  int block = allocate();  // would be 1 for every block, were the conversion to bool implicit
#endif
  return block;
}
