/// @file
/// The calls of a program in one iteration, and the computing between them. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/tiering/access.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Records one iteration while the program runs: its calls and times (`begin_recording`), or only the times
/// of an iteration that follows a trace (`begin_timing`).
///
/// Computing is the time from `call_ended` to the next call; the time inside a call is waiting and does not
/// count. The caller reads the clock, so an iteration that is not recorded reads no clock.
///
/// @par Complexity      each call O(1) amortised, and without allocation while timing; `freeze` and `retimed`
///                      O(events + chunks).
/// @par Thread safety   one thread at a time.
/// @par Errors          as `trace_recorder`.
class iteration_recorder {
 public:
  /// @name Recording
  /// @{
  /// Begins an iteration. `knowing` is a recorder with the chunks and no events.
  void begin_recording(trace_recorder knowing, std::uint64_t now_ns) {
    recorder_ = std::move(knowing);
    last_ns_ = now_ns;
  }
  /// Records that the program calls `what`, except an acquire, which is recorded when it is `granted`.
  void note_call(trace_call what, chunk_id chunk, std::uint64_t now_ns) {
    recorder_.compute(computed(now_ns));
    if (what == trace_call::release) recorder_.release(chunk);
    if (what == trace_call::discard) recorder_.discard(chunk);
  }
  void granted(chunk_id chunk, access_mode mode) { recorder_.acquire(chunk, mode); }
  /// As `trace_recorder::also_changes`.
  void also_changes(chunk_id chunk) noexcept { recorder_.also_changes(chunk); }
  /// Returns whether no event was recorded yet.
  [[nodiscard]] bool empty() const noexcept { return recorder_.events() == 0; }
  /// Returns the iteration up to now. @throws argument_error that names the impossible event.
  [[nodiscard]] schedule_trace freeze(std::uint64_t now_ns) {
    recorder_.compute(computed(now_ns));
    return recorder_.freeze();
  }
  /// @}

  /// @name Timing
  /// @{
  /// Begins an iteration of `events` events. With 0, it keeps the memory of the previous iteration.
  void begin_timing(std::size_t events, std::uint64_t now_ns) {
    times_.clear();
    times_.reserve(events);
    last_ns_ = now_ns;
  }
  /// Records `ns` of computing before event `index`. Events count from 0; after a missing event, it records
  /// none.
  void note_time(std::uint32_t index, std::uint64_t ns) {
    if (times_.size() == index) times_.push_back(ns);
  }
  /// Returns `trace` with the times of this iteration, which ends now; nothing when an event's time is
  /// missing.
  [[nodiscard]] std::optional<schedule_trace> retimed(const schedule_trace& trace,
                                                      std::uint64_t now_ns) const;
  /// @}

  /// Records that the program computes from here on.
  void call_ended(std::uint64_t now_ns) noexcept { last_ns_ = now_ns; }
  /// Returns the computing time since the last call ended, or since the iteration began.
  [[nodiscard]] std::uint64_t computed(std::uint64_t now_ns) const noexcept { return now_ns - last_ns_; }

 private:
  trace_recorder recorder_;
  std::uint64_t last_ns_ = 0;         // when computing began
  std::vector<std::uint64_t> times_;  // computing before each event
};

inline std::optional<schedule_trace> iteration_recorder::retimed(const schedule_trace& trace,
                                                                 std::uint64_t now_ns) const {
  const auto events = trace.events();
  if (times_.size() != events.size()) return {};
  trace_recorder timed;
  for (const std::uint64_t bytes : trace.sizes())
    timed.add_chunk(bytes);
  for (std::size_t i = 0; i < events.size(); ++i) {
    timed.compute(times_[i]);
    if (events[i].call == trace_call::acquire) timed.acquire(events[i].chunk, events[i].mode);
    if (events[i].call == trace_call::release) timed.release(events[i].chunk);
    if (events[i].call == trace_call::discard) timed.discard(events[i].chunk);
  }
  timed.compute(computed(now_ns));
  return timed.freeze();
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
