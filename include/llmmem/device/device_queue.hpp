/// @file
/// `basic_device_queue`: copies between a host and a device, and within the device, on a stream.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/device/device_fence.hpp>
#include <llmmem/device/device_runtime.hpp>
#include <llmmem/device/errors.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/space_ledger.hpp>
#include <llmmem/transfer/errors.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Options of a device queue.
struct device_queue_options {
  std::uint32_t depth = 64;           ///< the most copies and marks in flight: one more waits for the oldest
  std::string name = "device_queue";  ///< the name in error texts
};

/// A stream of a device as a `copy_queue` of a space there: its own stream, or an engine's. Copies start in
/// the order of the calls, each after `after` has passed too; the host waits only for a place among `depth`.
///
///     device_space device(device_pool_source<cuda_runtime>(device_id{0}), {.budget = bytes});
///     device_queue copies(device, device_id{0});
///     const auto there = copies.copy_in_async(range, host, {}).value();
///     there.hold(compute_stream).value();                 // the kernels wait, the host does not
///
/// The driver stages host memory that is not pinned, and the call may wait for it.
///
/// @tparam Space  of device memory; its `holds` checks ranges.
/// @par Complexity      a copy: two calls of the driver, and one for each of `after` that has not passed.
/// @par Thread safety   any number of threads; it outlives its fences.
/// @par Errors          those of `copy_queue`, and `errc::device_failed` if the driver refuses, index its
///      status, or during a capture of the stream: then nothing is in flight. `errc::completion_lost` if the
///      driver took a copy, but neither a mark after it nor a wait for it: the copy may use the memory at
///      both ends at any time. The constructor throws what `device_events` does.
template <memory_space Space, device_runtime Runtime>
  requires requires(const Space& space, typename Space::range_type range) {
    { space.holds(range) } noexcept -> std::same_as<bool>;
  }
class basic_device_queue {
 public:
  using fence_type = device_fence<Runtime>;
  using range_type = typename Space::range_type;

  /// Makes its own stream. @throws system_error  if the driver refuses it.
  basic_device_queue(const Space& space, device_id device, device_queue_options options = {},
                     Runtime runtime = {})
      : runtime_(runtime),
        space_(&space),
        options_(std::move(options)),
        events_(device, options_.depth, runtime) {
    if (const device_status status = runtime_.make_stream(&stream_, device); status != 0) {
      throw system_error(options_.name + ": device " + std::to_string(to_index(device)) +
                         ": cannot create a stream: " + runtime_.text(status) + " (" +
                         std::to_string(status) + ")");
    }
    is_own_ = true;
  }
  /// Uses a stream of the caller's, which outlives it.
  basic_device_queue(const Space& space, device_id device, stream_argument<typename Runtime::stream> stream,
                     device_queue_options options = {}, Runtime runtime = {})
      : runtime_(runtime),
        space_(&space),
        options_(std::move(options)),
        events_(device, options_.depth, runtime),
        stream_(stream.get()) {}
  basic_device_queue(const basic_device_queue&) = delete;
  basic_device_queue& operator=(const basic_device_queue&) = delete;
  /// Waits for its own stream.
  ~basic_device_queue() {
    if (!is_own_) return;
    static_cast<void>(runtime_.wait_stream(stream_));
    static_cast<void>(runtime_.end_stream(stream_));
  }

  [[nodiscard]] result<fence_type> copy_in_async(range_type destination, std::span<const std::byte> source,
                                                 std::span<const fence_type> after) noexcept {
    return copy(destination, destination.data, destination.bytes, source.data(), source.size(), after);
  }
  [[nodiscard]] result<fence_type> copy_out_async(std::span<std::byte> destination, range_type source,
                                                  std::span<const fence_type> after) noexcept {
    return copy(source, destination.data(), destination.size(), source.data, source.bytes, after);
  }
  [[nodiscard]] result<fence_type> copy_within_async(range_type destination, range_type source,
                                                     std::span<const fence_type> after) noexcept {
    if (destination.bytes != 0 && !space_->holds(destination))
      return failure{.code = errc::dead_range, .wanted = destination.bytes, .where = name()};
    return copy(source, destination.data, destination.bytes, source.data, source.bytes, after);
  }

  /// Whether a copy would begin without a wait for a place. Another thread may take the place first.
  [[nodiscard]] bool has_capacity() noexcept { return events_.has_capacity(); }
  [[nodiscard, deprecated("call has_capacity()")]] bool has_room() noexcept { return has_capacity(); }

  /// Returns the point that its stream has reached: after the kernels that the caller gave it, for example.
  [[nodiscard]] result<fence_type> mark() noexcept { return events_.mark(stream_); }
  /// Makes all later work of the stream wait for these.
  [[nodiscard]] result<void> follow(std::span<const fence_type> after) noexcept {
    for (const fence_type& each : after) {
      if (auto held = each.hold(stream_); !held) return held;
    }
    return {};
  }

  /// Waits until its stream has done all that it was given, and memory of that work may be freed.
  /// `errc::device_failed`, index the status: the first wait failed, and no result of that work is reliable,
  /// even if a second wait, which this then makes, has succeeded; memory of the work may be freed after a
  /// call that succeeds. The same, at once, during a capture of the stream.
  [[nodiscard]] result<void> finish() noexcept {
    device_status first = Runtime::not_ready;
    if (!runtime_.is_capturing(stream_)) {
      first = runtime_.wait_stream(stream_);
      if (first == 0) return {};
      // A device may report an error once. The second wait ends the work; it must not hide that error.
      static_cast<void>(runtime_.wait_stream(stream_));
    }
    return failure{errc::device_failed, first, 0, 0, name()};
  }

  [[nodiscard]] typename Runtime::stream stream() const noexcept { return stream_; }

 private:
  [[nodiscard]] const char* name() const noexcept { return options_.name.c_str(); }
  [[nodiscard]] result<fence_type> copy(range_type ours, std::byte* to, std::uint64_t to_bytes,
                                        const std::byte* from, std::uint64_t from_bytes,
                                        std::span<const fence_type> after) noexcept {
    const auto may = detail::check_copy(*space_, name(), ours, to, to_bytes, from, from_bytes);
    if (!may) return may.error();
    // Keeps one copy's waits and its own bytes adjacent in the stream, when other threads use it too.
    const std::lock_guard lock(mutex_);
    // In a graph it would not copy now, and the wait below would end the capture.
    if (runtime_.is_capturing(stream_))
      return failure{errc::device_failed, Runtime::not_ready, to_bytes, 0,
                     "device_queue: the stream is being captured, copy before or after that"};
    if (auto held = follow(after); !held) return held.error();
    if (to_bytes != 0) {
      const device_status status = runtime_.copy(to, from, static_cast<std::size_t>(to_bytes), stream_);
      if (status != 0) return failure{errc::device_failed, status, to_bytes, 0, name()};
    }
    result<fence_type> done = mark();
    // No caller could query its end, so the copy is over before this returns.
    if (!done && runtime_.wait_stream(stream_) != 0)
      return failure{errc::completion_lost, 0, to_bytes, 0, options_.name.c_str()};
    return done;
  }

  Runtime runtime_;
  const Space* space_;
  device_queue_options options_;
  device_events<Runtime> events_;
  std::mutex mutex_;
  typename Runtime::stream stream_{};
  bool is_own_ = false;
};

}  // namespace v0
}  // namespace llmmem
