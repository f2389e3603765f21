/// @file
/// `device_runtime`: what spaces and queues of a device need from the library that drives it. CUDA's is
/// `cuda_runtime` of device/cuda.hpp.
#pragma once

#include <llmmem/config.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// The status that a call of a device's library returns; 0 is success. For CUDA: a `cudaError_t`.
using device_status = std::uint32_t;

/// A device of a process, as its library counts them.
enum class device_id : std::uint32_t {};

/// Returns the number in it, because an explicit conversion would be more noise than help.
[[nodiscard]] constexpr std::uint32_t to_index(device_id device) noexcept {
  return static_cast<std::uint32_t>(device);
}

/// An argument that is a stream: the library's handle, or an object that has one, such as `cuda::stream_ref`,
/// `cuda::stream` or `rmm::cuda_stream_view` (by their `get()` or `value()`). Owns nothing.
template <class Stream>
class stream_argument {
 public:
  constexpr stream_argument(Stream handle) noexcept  // NOLINT(google-explicit-constructor)
      : handle_(handle) {}
  template <class Owner>
    requires requires(const Owner& owner) {
      { owner.get() } -> std::same_as<Stream>;
    }
  constexpr stream_argument(const Owner& owner) noexcept  // NOLINT(google-explicit-constructor)
      : handle_(owner.get()) {}
  template <class Owner>
    requires requires(const Owner& owner) {
      { owner.value() } -> std::same_as<Stream>;
    } && (!requires(const Owner& owner) { owner.get(); })
  constexpr stream_argument(const Owner& owner) noexcept  // NOLINT(google-explicit-constructor)
      : handle_(owner.value()) {}

  [[nodiscard]] constexpr Stream get() const noexcept { return handle_; }

 private:
  Stream handle_;
};

/// The calls of a device's library, one by one. Cheap to copy: it owns nothing. No call depends on the
/// current device, or changes it; nor does it end a graph that another thread captures. (In CUDA, the stream
/// handles 0, 1 and 2 identify no stream by themselves: their meaning depends on the current device, and for
/// 2, cudaStreamPerThread, on the thread. Pass streams that were created.)
///
/// - `why_no_device(device)`: null if the device can be used, else the reason, as text that stays valid.
/// - `text(status)` names a status.
/// - `not_ready`: what `query` returns for an event that has not passed, or that cannot be queried now.
/// - A `pool` gives out memory of its device, in the order of a stream: `allocate(&bytes, count, pool,
///   stream)`; `release(bytes, stream)`. It keeps released memory for the next request, until
///   `trim_pool(pool, keep)`, which returns to the system all free bytes but `keep`. A release can be
///   refused: then the bytes are unchanged. `share_pool(pool, device)`: another device may read and write all
///   of it from now on.
/// - An `event` passes when the work that its stream was given before `record` is done: `query`, `wait_event`
///   on the host, `stream_waits` on a device.
/// - `is_capturing(stream)`: whether work submitted now becomes part of a graph instead of running. Also true
///   if that cannot be determined: for the default stream while another stream is captured.
/// - `copy(to, from, count, stream)`: either end in memory of the host or of any device.
/// - `lock_pages(bytes, count, device)` prepares host memory so that all devices copy from and to it
///   themselves; the context of `device` does it, or if empty that of the current device.
///   `device_address(&there, bytes)` returns the address that devices use.
template <class R>
concept device_runtime =
    std::copyable<R> && requires(const R& run, device_id device, device_status status, typename R::pool pool,
                                 typename R::stream stream, typename R::event event, void* bytes,
                                 const void* from, std::size_t count) {
      { run.why_no_device(device) } noexcept -> std::same_as<const char*>;
      { run.text(status) } noexcept -> std::same_as<const char*>;
      { R::not_ready } -> std::convertible_to<device_status>;
      { run.make_pool(&pool, device) } noexcept -> std::same_as<device_status>;
      { run.share_pool(pool, device) } noexcept -> std::same_as<device_status>;
      { run.trim_pool(pool, count) } noexcept -> std::same_as<device_status>;
      { run.end_pool(pool) } noexcept -> std::same_as<device_status>;
      { run.allocate(&bytes, count, pool, stream) } noexcept -> std::same_as<device_status>;
      { run.release(bytes, stream) } noexcept -> std::same_as<device_status>;
      { run.make_stream(&stream, device) } noexcept -> std::same_as<device_status>;
      { run.end_stream(stream) } noexcept -> std::same_as<device_status>;
      { run.wait_stream(stream) } noexcept -> std::same_as<device_status>;
      { run.make_event(&event, device) } noexcept -> std::same_as<device_status>;
      { run.end_event(event) } noexcept -> std::same_as<device_status>;
      { run.record(event, stream) } noexcept -> std::same_as<device_status>;
      { run.query(event) } noexcept -> std::same_as<device_status>;
      { run.wait_event(event) } noexcept -> std::same_as<device_status>;
      { run.stream_waits(stream, event) } noexcept -> std::same_as<device_status>;
      { run.is_capturing(stream) } noexcept -> std::same_as<bool>;
      { run.copy(bytes, from, count, stream) } noexcept -> std::same_as<device_status>;
      { run.lock_pages(bytes, count, std::optional(device)) } noexcept -> std::same_as<device_status>;
      { run.unlock_pages(bytes) } noexcept -> std::same_as<device_status>;
      { run.device_address(&bytes, bytes) } noexcept -> std::same_as<device_status>;
    };

}  // namespace v0
}  // namespace llmmem
