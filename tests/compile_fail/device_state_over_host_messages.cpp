// expect: need a transport of device memory, whose stream can wait
// Pieces on a device, over a transport that sends memory of the host.
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/replicated.hpp>

#include <cstddef>

#include "device_doubles.hpp"

#ifdef LLMMEM_COMPILE_FAIL_CONTROL
using ranks_type = stream_ranks;
#else
using ranks_type = llmmem::communicator<llmmem::thread_endpoint>;
#endif

std::size_t size() {
  return sizeof(llmmem::sharded_state<llmmem::sharding::replicated, ranks_type, device_memory>);
}
