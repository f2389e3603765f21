// Traces, planners and their bounds, once for all programs of tests and examples: see LLMMEM_EXTERN_SCHEDULE
// in docs/your_engine.md.
#include <llmmem/instantiate/schedule.hpp>
