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
/// of an iteration whose calls are those of a trace (`begin_timing`).
///
/// Computing is the time from `call_ended` to the next call; the time inside a call is waiting, and is not
/// counted. The caller reads the clock, so that an iteration that is not recorded reads none.
///
/// @par Complexity      each call O(1) amortised, while timing without allocation; `freeze` and `retimed`
///                      O(events + chunks).
/// @par Thread safety   one thread at a time.
/// @par Errors          as `trace_recorder`.
class iteration_recorder {
 public:
  /// @name Recording
  /// @{
  /// Begins an iteration. `knowing` has the chunks and no events.
  void begin_recording(trace_recorder knowing, std::uint64_t now_ns) {
    recorder_ = std::move(knowing);
    last_ns_ = now_ns;
  }
  /// The program calls. Notes `what`, except an acquire, which is noted when it is `granted`.
  void note_call(trace_call what, chunk_id chunk, std::uint64_t now_ns) {
    recorder_.compute(computed(now_ns));
    if (what == trace_call::release) recorder_.release(chunk);
    if (what == trace_call::discard) recorder_.discard(chunk);
  }
  void granted(chunk_id chunk, access_mode mode) { recorder_.acquire(chunk, mode); }
  /// As `trace_recorder::also_changes`.
  void also_changes(chunk_id chunk) noexcept { recorder_.also_changes(chunk); }
  /// Returns whether no event was noted yet.
  [[nodiscard]] bool empty() const noexcept { return recorder_.events() == 0; }
  /// Returns the iteration up to now. @throws argument_error naming the impossible event.
  [[nodiscard]] schedule_trace freeze(std::uint64_t now_ns) {
    recorder_.compute(computed(now_ns));
    return recorder_.freeze();
  }
  /// @}

  /// @name Timing
  /// @{
  /// Begins an iteration of `events` events. 0 keeps the memory of the previous iteration.
  void begin_timing(std::size_t events, std::uint64_t now_ns) {
    times_.clear();
    times_.reserve(events);
    last_ns_ = now_ns;
  }
  /// Notes `ns` of computing before event `index`. Events count from 0; if one was left out, none after it is
  /// noted.
  void note_time(std::uint32_t index, std::uint64_t ns) {
    if (times_.size() == index) times_.push_back(ns);
  }
  /// Returns `trace` with the times of this iteration, which ends now; nothing when an event's time is
  /// missing.
  [[nodiscard]] std::optional<schedule_trace> retimed(const schedule_trace& trace,
                                                      std::uint64_t now_ns) const;
  /// @}

  /// Notes that the program computes from here on.
  void call_ended(std::uint64_t now_ns) noexcept { last_ns_ = now_ns; }
  /// Returns the computing since the last call ended, or the iteration began.
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
