// `paged_allocator<>`, once for all programs of tests and examples: see LLMMEM_EXTERN_PAGING in
// docs/your_engine.md.
#include <llmmem/instantiate/paged_allocator.hpp>
