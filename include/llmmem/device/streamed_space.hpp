/// @file
/// `streamed_space`: a device's memory with a stream for its copies, as a tier of a `tiered_buffer`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/device/device.hpp>
#include <llmmem/device/device_fence.hpp>
#include <llmmem/device/device_queue.hpp>
#include <llmmem/device/device_runtime.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// A `basic_device_space` that is its own queue: one stream carries all copies to and from it.
///
///     streamed_device_space gpu(device_id{0}, {.budget = a});
///     pinned_space host({.budget = b});
///     tiered_buffer<streamed_device_space, pinned_space> buffer({}, {gpu, a}, {host, b});
///
/// `tiered_buffer` waits only for copies, and a lease ends on the host while the kernels that use it may
/// still run. So:
///
/// - Before a kernel uses a lease, its stream must `hold` a `queue().mark()` made after the lease.
/// - Before any lease ends that a kernel has used, read or written, `queue().follow()` a mark after that
///   kernel. This queue stores a copy that was written, and brings the next chunk up into the place of one
///   that was read: both then come after the kernel, and the host waits for neither.
///
///       const auto used = compute.mark().value();          // a device_queue on the kernels' stream
///       gpu.queue().follow(std::span(&used, 1)).value();   // then the leases may end
///
/// - This covers bytes that move through this queue. If the tier below moves the bytes itself, as a
///   `straight_queue`, see its documentation: unless it says otherwise, wait for the kernels before the lease
///   ends.
///
/// @par Thread safety   any number of threads.
/// @par Errors          as `basic_device_space` and `basic_device_queue`.
template <byte_source Source, device_runtime Runtime>
class basic_streamed_space : public basic_device_space<Source> {
 public:
  using space_type = basic_device_space<Source>;
  using range_type = typename space_type::range_type;
  using fence_type = device_fence<Runtime>;
  using queue_type = basic_device_queue<space_type, Runtime>;

  basic_streamed_space(Source source, device_id device, device_options options,
                       device_queue_options queue = {}, Runtime runtime = {})
      : space_type(std::move(source), std::move(options)), queue_(*this, device, std::move(queue), runtime) {}

  /// Takes memory from its own pool on that device.
  basic_streamed_space(device_id device, device_options options, device_queue_options queue = {})
    requires(std::constructible_from<Source, device_id>)
      : basic_streamed_space(Source(device), device, std::move(options), std::move(queue)) {}

  [[nodiscard]] result<fence_type> copy_in_async(range_type destination, std::span<const std::byte> source,
                                                 std::span<const fence_type> after) noexcept {
    return queue_.copy_in_async(destination, source, after);
  }
  [[nodiscard]] result<fence_type> copy_out_async(std::span<std::byte> destination, range_type source,
                                                  std::span<const fence_type> after) noexcept {
    return queue_.copy_out_async(destination, source, after);
  }
  [[nodiscard]] result<fence_type> copy_within_async(range_type destination, range_type source,
                                                     std::span<const fence_type> after) noexcept {
    return queue_.copy_within_async(destination, source, after);
  }

  [[nodiscard]] queue_type& queue() noexcept { return queue_; }

 private:
  queue_type queue_;
};

}  // namespace v0
}  // namespace llmmem
