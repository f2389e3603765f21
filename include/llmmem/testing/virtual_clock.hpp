/// @file
/// A clock that advances only on request, and the fence that depends on it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/space/fence.hpp>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace testing {

/// Nanoseconds since the construction of a virtual clock.
struct virtual_time {
  std::uint64_t ns = 0;
  friend constexpr auto operator<=>(const virtual_time&, const virtual_time&) noexcept = default;
};

/// Returns `time` plus `ns` nanoseconds.
/// @throws length_error  past 2^64 - 1 ns, which is 584 years.
[[nodiscard]] constexpr virtual_time time_after(virtual_time time, std::uint64_t ns) {
  if (ns > ~std::uint64_t{0} - time.ns) {
    throw length_error("virtual clock: " + std::to_string(time.ns) + " + " + std::to_string(ns) +
                       " ns passes the end of time; check the bandwidth and the byte count");
  }
  return {time.ns + ns};
}
/// The former name of `time_after`.
[[nodiscard, deprecated("call time_after()")]] constexpr virtual_time later(virtual_time time,
                                                                            std::uint64_t ns) {
  return time_after(time, ns);
}

/// Time as a value: same calls, same times, on any machine. Simulated spaces schedule the ends of their
/// copies on it.
///
/// @par Complexity      `advance_to` O(e) for each event it passes, `e` events pending.
/// @par Thread safety   none: one thread drives the clock and all that depends on it, so that a run repeats.
/// @par Errors          `time_after` and `at` throw; the clock is then unchanged.
class virtual_clock {
 public:
  /// An action at a time. It may schedule, but not advance the clock.
  using action = void (*)(void* context, std::uint64_t tag) noexcept;

  virtual_clock() = default;
  virtual_clock(const virtual_clock&) = delete;
  virtual_clock& operator=(const virtual_clock&) = delete;

  [[nodiscard]] virtual_time now() const noexcept { return now_; }

  /// Advances by `ns`, through every event on the way. @throws length_error  past the end of time.
  void advance(std::uint64_t ns) { advance_to(time_after(now_, ns)); }

  /// Advances to `time`; does nothing for a time that has passed. Events run in order of their time, those of
  /// one time in the order they were scheduled; the clock shows each event's time while it runs.
  void advance_to(virtual_time time) noexcept {
    for (std::size_t i = next(); i != events_.size() && events_[i].time <= time; i = next()) {
      const event due = events_[i];
      events_.erase(events_.begin() + static_cast<std::ptrdiff_t>(i));
      if (due.time > now_) now_ = due.time;
      due.run(due.context, due.tag);
    }
    if (time > now_) now_ = time;
  }

  /// Runs `run(context, tag)` when the clock reaches `time`; at the next advance if it already has.
  void at(virtual_time time, action run, void* context, std::uint64_t tag) {
    events_.push_back({time, run, context, tag});
  }

  /// Makes space for another `more` events, so that as many calls of `at` cannot fail.
  void reserve(std::size_t more) { events_.reserve(events_.size() + more); }

  /// Drops the events of `context`, before its owner ends.
  void forget(const void* context) noexcept {
    std::erase_if(events_, [context](const event& e) { return e.context == context; });
  }

  /// Returns the number of pending events.
  [[nodiscard]] std::size_t pending() const noexcept { return events_.size(); }

 private:
  struct event {
    virtual_time time;
    action run = nullptr;
    void* context = nullptr;
    std::uint64_t tag = 0;
  };

  /// Returns the earliest event, of several the first scheduled; `size()` if there is none.
  [[nodiscard]] std::size_t next() const noexcept {
    std::size_t best = 0;
    for (std::size_t i = 1; i < events_.size(); ++i) {
      if (events_[i].time < events_[best].time) best = i;
    }
    return best;
  }

  virtual_time now_;
  std::vector<event> events_;
};

/// Passes when a virtual clock reaches a time. A wait advances the clock to it, and costs nothing else.
///
/// @par Thread safety   none, as its clock. The clock outlives it.
class virtual_fence {
 public:
  /// A fence that has passed.
  constexpr virtual_fence() noexcept = default;
  constexpr virtual_fence(virtual_clock& clock, virtual_time time) noexcept : clock_(&clock), time_(time) {}

  [[nodiscard]] bool ready() const noexcept { return clock_ == nullptr || clock_->now() >= time_; }
  void wait() const noexcept {
    if (clock_ != nullptr) clock_->advance_to(time_);
  }

  /// Returns when it passes, and by which clock; null if there is nothing to wait for.
  [[nodiscard]] constexpr virtual_time time() const noexcept { return time_; }
  [[nodiscard]] constexpr const virtual_clock* clock() const noexcept { return clock_; }

 private:
  virtual_clock* clock_ = nullptr;
  virtual_time time_;
};

static_assert(fence<virtual_fence>);

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
