// The functions of checkpoints, once for all programs of tests and examples: see LLMMEM_EXTERN_CHECKPOINT in
// docs/your_engine.md.
#include <llmmem/instantiate/checkpoint.hpp>
