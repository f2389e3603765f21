// expect: make tier 0 a streamed_space of that device, whose queue the state's work can follow
// Whole tensors on a device, and their pieces in tiers of host memory.
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <cstddef>

#include "device_doubles.hpp"

using store_type = llmmem::tiered_buffer<llmmem::host_space, llmmem::host_space>;
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
using pieces_type = llmmem::resident_pieces<device_memory>;
#else
using pieces_type = llmmem::leased_pieces<store_type, device_memory>;
#endif

std::size_t size() {
  return sizeof(
      llmmem::sharded_state<llmmem::sharding::replicated, stream_ranks, device_memory, pieces_type>);
}
