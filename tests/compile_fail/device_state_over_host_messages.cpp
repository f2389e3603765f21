// expect: need a transport of device memory, whose stream can wait
// Pieces on a device, over a transport that sends memory of the host.
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

/// A device's memory that works on its bytes.
struct device_memory : llmmem::file_space<> {
  llmmem::result<void> clear(std::byte* at, std::uint64_t bytes);
  llmmem::result<void> copy(std::span<const llmmem::copy_task> tasks);
  llmmem::result<void> add(llmmem::dtype elements, std::span<const std::byte* const> parts, std::byte* into,
                           std::uint64_t bytes);
  llmmem::result<void> finish() noexcept;
  llmmem::result<void> precede(int stream);
};
/// Messages on a stream.
struct stream_ranks : llmmem::communicator<llmmem::thread_endpoint> {
  int stream() const noexcept;
};

#ifdef LLMMEM_COMPILE_FAIL_CONTROL
using ranks_type = stream_ranks;
#else
using ranks_type = llmmem::communicator<llmmem::thread_endpoint>;
#endif

std::size_t size() {
  return sizeof(llmmem::sharded_state<llmmem::sharding::replicated, ranks_type, device_memory>);
}
