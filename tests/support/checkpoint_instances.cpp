// The functions of checkpoints, once for all test programs: see LLMMEM_EXTERN_CHECKPOINT in
// docs/your_engine.md.
#include <llmmem/instantiate/checkpoint.hpp>
