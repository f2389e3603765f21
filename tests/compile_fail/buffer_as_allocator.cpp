// expect: block_table_source
// Tables are written from something that has sequences.
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_table.hpp>

void write(const llmmem::paged_allocator<>& cache, const llmmem::block_pool<>& pool) {
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  static_cast<void>(pool);
  static_cast<void>(llmmem::measure_tables(cache, {}));
#else
  static_cast<void>(cache);
  static_cast<void>(llmmem::measure_tables(pool, {}));
#endif
}
