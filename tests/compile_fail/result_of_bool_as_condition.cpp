// expect: (deleted function|deleted conversion|function is explicitly deleted|attempt to use a deleted)
// Whether there is an answer is not the answer.
#include <llmmem/result.hpp>

llmmem::result<bool> has_contents();

int engine() {
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  const llmmem::result<bool> has = has_contents();
  if (has.has_value() && *has) return 1;
#else
  if (has_contents()) return 1;
#endif
  return 0;
}
