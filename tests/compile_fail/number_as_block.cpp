// expect: (no matching (member )?function|cannot convert|could not convert|no viable conversion)
// A plain number is no block: it may count tokens, slots or bytes.
#include <llmmem/paging/block_pool.hpp>

void release(llmmem::block_pool<>& pool) {
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  static_cast<void>(pool.release(llmmem::block_id{3}));
#else
  static_cast<void>(pool.release(3));
#endif
}
