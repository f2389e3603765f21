// expect: the host cannot access this space: give the state a kernel_space of it
// Pieces in memory that neither the host nor kernels work on.
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/transfer/file_space.hpp>

using ranks_type = llmmem::communicator<llmmem::thread_endpoint>;
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
using space_type = llmmem::host_space;
#else
using space_type = llmmem::file_space<>;  // as a device_space, neither is accessible
#endif

std::size_t size() {
  return sizeof(llmmem::sharded_state<llmmem::sharding::replicated, ranks_type, space_type>);
}
