// expect: (no matching (member )?function|cannot convert|could not convert|no viable conversion)
// A slot of an eviction policy is no block of a pool, though both are 32-bit numbers.
#include <llmmem/paging/block_pool.hpp>

void share(llmmem::block_pool<>& pool, llmmem::slot_id slot, llmmem::block_id block) {
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  static_cast<void>(slot);
  static_cast<void>(pool.share(block));
#else
  static_cast<void>(block);
  static_cast<void>(pool.share(slot));
#endif
}
