// expect: pieces in tiers begin as zeros that the host writes: a state on a device keeps resident pieces
// Whole tensors on a device, and their pieces in tiers.
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <cstddef>

#include "device_doubles.hpp"

#ifdef LLMMEM_COMPILE_FAIL_CONTROL
using pieces_type = llmmem::resident_pieces<device_memory>;
#else
using pieces_type = llmmem::leased_pieces<llmmem::tiered_buffer<llmmem::host_space, llmmem::host_space> >;
#endif

std::size_t size() {
  return sizeof(
      llmmem::sharded_state<llmmem::sharding::replicated, stream_ranks, device_memory, pieces_type>);
}
