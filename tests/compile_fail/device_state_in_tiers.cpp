// expect: pieces in tiers begin as zeros that the host writes: a state on a device keeps resident pieces
// Whole tensors on a device, and their pieces in tiers.
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
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
using pieces_type = llmmem::resident_pieces<device_memory>;
#else
using pieces_type = llmmem::leased_pieces<llmmem::tiered_buffer<llmmem::host_space, llmmem::host_space> >;
#endif

std::size_t size() {
  return sizeof(
      llmmem::sharded_state<llmmem::sharding::replicated, stream_ranks, device_memory, pieces_type>);
}
