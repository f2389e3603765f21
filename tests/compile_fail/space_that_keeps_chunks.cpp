// expect: rename its `keeps_chunks`
// A space that says it by the old name only would be ignored, and its chunks lost.
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>

struct own_space : llmmem::host_space {
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  static constexpr bool persists_chunks = true;
#endif
  static constexpr bool keeps_chunks = true;  // beside the new name, for older versions of the library
};

static_assert(llmmem::detail::persists_chunks<own_space>());
