// expect: a refit reads pieces on the host
// A refit whose source keeps its pieces on a device.
#include <llmmem/refit/refit_source.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/space/host.hpp>

#include <cstddef>

#include "device_doubles.hpp"

#ifdef LLMMEM_COMPILE_FAIL_CONTROL
using space_type = llmmem::host_space;
#else
using space_type = device_memory;
#endif

std::size_t size() {
  return sizeof(
      llmmem::refit_state<llmmem::sharded_state<llmmem::sharding::replicated, stream_ranks, space_type>>);
}
