// expect: a refit reads pieces on the host
// A refit whose source keeps its pieces on a device.
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/refit/refit_source.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/space/host.hpp>
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
using space_type = llmmem::host_space;
#else
using space_type = device_memory;
#endif

std::size_t size() {
  return sizeof(
      llmmem::refit_state<llmmem::sharded_state<llmmem::sharding::replicated, stream_ranks, space_type>>);
}
