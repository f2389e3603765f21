/// @file
/// `device_fence`: the fence of work on a device's streams, and the events it uses.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/device/device_runtime.hpp>
#include <llmmem/device/errors.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/fence.hpp>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

template <device_runtime Runtime>
class device_events;

/// A point of a stream. It passes when all work that the stream was given before is done. Sixteen bytes,
/// trivially copyable.
///
/// @par Thread safety   any number of threads may query and wait on copies of one fence.
template <device_runtime Runtime>
class device_fence {
 public:
  /// A fence that has passed.
  constexpr device_fence() noexcept = default;

  /// Whether the point has passed, or never will because the device is lost: `wait` reports which. One query
  /// to the driver until it has passed.
  [[nodiscard]] bool ready() const noexcept {
    return events_ == nullptr || events_->status_of(slot_, generation_) != Runtime::not_ready;
  }

  /// Blocks the calling thread until the point has passed.
  /// @throws system_error  if the device reports an error: then none of its results can be relied on.
  void wait() const {
    if (events_ == nullptr) return;
    if (const device_status status = events_->wait(slot_, generation_); status != 0) events_->fail(status);
  }

  /// Makes a stream, of this device or another, wait for the point; the host does not wait.
  /// `errc::device_failed` if the driver refuses, index its status, and for a stream during its capture,
  /// unless the point has passed: call it before the capture begins.
  result<void> hold(stream_argument<typename Runtime::stream> stream) const noexcept {
    if (events_ == nullptr) return {};
    const device_status status = events_->hold(stream.get(), slot_, generation_);
    if (status == 0) return {};
    return failure{errc::device_failed, status, 0, 0,
                   status == Runtime::not_ready
                       ? "device_fence: the stream is being captured, have it wait before that begins"
                       : "device_fence: a stream is to wait"};
  }

  friend constexpr bool operator==(const device_fence&, const device_fence&) noexcept = default;

 private:
  friend class device_events<Runtime>;
  constexpr device_fence(device_events<Runtime>* events, std::uint32_t slot,
                         std::uint32_t generation) noexcept
      : events_(events), slot_(slot), generation_(generation) {}

  device_events<Runtime>* events_ = nullptr;
  std::uint32_t slot_ = 0;
  std::uint32_t generation_ = 0;
};

/// A fixed number of events, and so the most points in flight: a caller that needs one more waits for the
/// oldest. (A fence kept for 2^32 later points of its slot counts as the last of them.)
///
/// @par Complexity      `mark` one call of the driver, or two if all events are in flight.
/// @par Thread safety   any number of threads. It outlives its fences.
/// @par Errors          the constructor throws `length_error` without events, and `system_error` if the
///      driver refuses one.
template <device_runtime Runtime>
class device_events {
 public:
  device_events(device_id device, std::uint32_t most, Runtime runtime = {}) : runtime_(runtime) {
    if (most == 0) throw length_error("device_events: the number of events is 0; it must be at least 1");
    if (const char* const why = runtime_.why_no_device(device); why != nullptr)
      throw system_error("device_events: no device: " + std::string(why));
    slots_.reserve(most);
    for (std::uint32_t i = 0; i < most; ++i) {
      typename Runtime::event event{};
      if (const device_status status = runtime_.make_event(&event, device); status != 0) {
        end();
        throw system_error("device_events: device " + std::to_string(to_index(device)) +
                           ": cannot create an event: " + runtime_.text(status) + " (" +
                           std::to_string(status) + ")");
      }
      slots_.push_back({event, 0, false});
    }
  }
  device_events(const device_events&) = delete;
  device_events& operator=(const device_events&) = delete;
  ~device_events() { end(); }

  /// Returns the point that a stream has reached by now. Refused during a capture of the stream: mark it
  /// after the launch of the graph.
  [[nodiscard]] result<device_fence<Runtime>> mark(stream_argument<typename Runtime::stream> of) noexcept {
    const typename Runtime::stream stream = of.get();
    // An event in a graph never passes as a point.
    if (runtime_.is_capturing(stream))
      return failure{errc::device_failed, Runtime::not_ready, 0, 0,
                     "device_events: the stream is being captured, mark it after the graph's launch"};
    std::unique_lock lock(mutex_);
    while (slots_[next_].is_on_its_way)
      wait_for_oldest(lock);
    const std::uint32_t at = next_;
    slot& its = slots_[at];
    if (const device_status status = lost_ != 0 ? lost_ : runtime_.record(its.event, stream); status != 0)
      return failure{errc::device_failed, status, 0, 0, "device_events: record"};
    its.is_on_its_way = true;
    next_ = (at + 1) % static_cast<std::uint32_t>(slots_.size());
    return device_fence<Runtime>(this, at, ++its.generation);
  }

  /// Whether `mark` would not wait now. Another thread may take the place first.
  [[nodiscard]] bool has_capacity() noexcept {
    const std::lock_guard lock(mutex_);
    slot& oldest = slots_[next_];
    return !oldest.is_on_its_way || note(oldest, runtime_.query(oldest.event)) != Runtime::not_ready;
  }

  /// Returns how many points may be in flight.
  [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(slots_.size()); }

 private:
  friend class device_fence<Runtime>;
  struct slot {
    typename Runtime::event event{};
    std::uint32_t generation = 0;
    bool is_on_its_way = false;
  };

  /// Waits outside the lock, so that other threads can query meanwhile. Another thread may reuse the event
  /// for a later point before this returns.
  void wait_for_oldest(std::unique_lock<std::mutex>& lock) noexcept {
    slot& oldest = slots_[next_];
    const std::uint32_t generation = oldest.generation;
    lock.unlock();
    const device_status status = runtime_.wait_event(oldest.event);
    lock.lock();
    if (oldest.generation == generation) static_cast<void>(note(oldest, status));
  }
  /// Returns the status of a point: 0 once it has passed, `not_ready`, or the device's error.
  [[nodiscard]] device_status status_of(std::uint32_t at, std::uint32_t generation) noexcept {
    const std::lock_guard lock(mutex_);
    slot& its = slots_[at];
    if (its.generation != generation || !its.is_on_its_way) return lost_;
    const device_status status = runtime_.query(its.event);
    return note(its, status);
  }
  [[nodiscard]] device_status wait(std::uint32_t at, std::uint32_t generation) noexcept {
    typename Runtime::event event{};
    {
      const std::lock_guard lock(mutex_);
      const slot& its = slots_[at];
      if (its.generation != generation || !its.is_on_its_way) return lost_;
      event = its.event;
    }
    // Waits outside the lock. A later point, which passes after this one, may reuse the event meanwhile.
    const device_status status = runtime_.wait_event(event);
    const std::lock_guard lock(mutex_);
    if (slots_[at].generation == generation) return note(slots_[at], status);
    lose(status);
    return status;
  }
  /// Returns `not_ready` for a stream during its capture: a wait for work outside its graph would end that.
  [[nodiscard]] device_status hold(typename Runtime::stream stream, std::uint32_t at,
                                   std::uint32_t generation) noexcept {
    const std::lock_guard lock(mutex_);
    const slot& its = slots_[at];
    if (its.generation != generation || !its.is_on_its_way) return lost_;
    if (runtime_.is_capturing(stream)) return Runtime::not_ready;
    return runtime_.stream_waits(stream, its.event);
  }
  [[noreturn]] void fail(device_status status) const {
    throw system_error("device_fence: the device reports " + std::string(runtime_.text(status)) + " (" +
                       std::to_string(status) + "): do not use results that it has computed since");
  }

  device_status note(slot& its, device_status status) noexcept {
    if (status == Runtime::not_ready) return status;
    its.is_on_its_way = false;
    lose(status);
    return status;
  }
  void lose(device_status status) noexcept {
    if (lost_ == 0) lost_ = status;
  }
  void end() noexcept {
    for (const slot& each : slots_)
      static_cast<void>(runtime_.end_event(each.event));
    slots_.clear();
  }

  Runtime runtime_;
  std::mutex mutex_;
  std::vector<slot> slots_;
  std::uint32_t next_ = 0;
  device_status lost_ = 0;  // the first error of the device: no later result is reliable
};

}  // namespace v0
}  // namespace llmmem
