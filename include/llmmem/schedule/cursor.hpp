/// @file
/// The position of a running program in its frozen trace, and the response when the program leaves it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/trace.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The response when the program leaves the recorded calls.
enum class on_divergence : std::uint8_t {
  repair,        ///< find where the program continues in the trace, and keep the rest of the plan
  re_record,     ///< drop the plan; record the next whole iteration and plan it
  fall_back,     ///< drop the plan permanently: on demand, least recently used
  by_frequency,  ///< drop the plan permanently: on demand, evicting what iterations use least often
                 ///< (`use_forecast`): for routed experts, and other state chosen by each iteration
};

/// The verdict of a cursor on one call.
enum class cursor_verdict : std::uint8_t {
  on_plan,   ///< it is the event at `index`
  skipped,   ///< it is the event at `index`; the events before it were skipped
  inserted,  ///< the trace lacks it here; the program should continue at `index`
  diverged,  ///< too many calls differ: the plan is useless from here on
};

/// The verdict on a call, and its event.
struct cursor_step {
  cursor_verdict verdict = cursor_verdict::on_plan;
  std::uint32_t index = 0;  ///< of an event of the trace

  friend constexpr bool operator==(const cursor_step&, const cursor_step&) noexcept = default;
};

/// Follows a program's calls along a trace: a pure state machine that receives each call before the caller
/// serves it.
///
/// A call that is the next event is `on_plan`. For any other call, the cursor searches the next `reach`
/// events, also across the end of the iteration. If it finds the call, the verdict is `skipped`, and the
/// cursor moves to the event after it; if not, the verdict is `inserted`, and the cursor stays. After more
/// than `patience` consecutive calls off plan, the verdict is `diverged`, until `restart`. A cursor never
/// says what a chunk contains: the caller serves every call from its own state, so a wrong plan costs time,
/// never data.
///
/// @par Complexity      `call` O(1) on plan, otherwise O(reach); no allocation.
/// @par Thread safety   one caller at a time; the trace outlives the cursor.
class schedule_cursor {
 public:
  struct options {
    std::uint32_t reach = 64;
    std::uint32_t patience = 8;
  };

  explicit schedule_cursor(const schedule_trace& trace) noexcept : schedule_cursor(trace, options{}) {}
  schedule_cursor(const schedule_trace& trace, options with) noexcept : trace_(&trace), options_(with) {}

  /// Reports that the program is about to do `what` to `chunk`; `mode` is the mode of an acquire.
  cursor_step call(trace_call what, chunk_id chunk, access_mode mode = access_mode::read) noexcept;

  /// Returns the next expected event; 0 again after the last.
  [[nodiscard]] std::uint32_t next() const noexcept { return next_; }
  [[nodiscard]] bool diverged() const noexcept { return diverged_; }
  /// Returns the number of iterations followed to their end.
  [[nodiscard]] std::uint64_t iterations() const noexcept { return iterations_; }
  /// Expects the trace from its beginning.
  void restart() noexcept {
    next_ = 0;
    strikes_ = 0;
    diverged_ = false;
  }

 private:
  const schedule_trace* trace_;
  options options_;
  std::uint32_t next_ = 0;
  std::uint32_t strikes_ = 0;
  std::uint64_t iterations_ = 0;
  bool diverged_ = false;
};

inline cursor_step schedule_cursor::call(trace_call what, chunk_id chunk, access_mode mode) noexcept {
  const auto events = trace_->events();
  const auto count = static_cast<std::uint32_t>(events.size());
  if (diverged_ || count == 0) {
    diverged_ = true;
    return {cursor_verdict::diverged, next_};
  }
  const auto is = [&](std::uint32_t at) {
    const trace_event& event = events[at];
    return event.chunk == chunk && event.call == what && (what != trace_call::acquire || event.mode == mode);
  };
  const std::uint32_t reach = options_.reach < count ? options_.reach : count - 1;
  for (std::uint32_t step = 0; step <= reach; ++step) {
    const std::uint32_t to_end = count - next_;
    const std::uint32_t at = step < to_end ? next_ + step : step - to_end;
    if (!is(at)) continue;
    strikes_ = step == 0 ? 0 : strikes_ + 1;
    if (strikes_ > options_.patience) break;
    const bool last = at + 1 == count;
    iterations_ += (step < to_end ? 0U : 1U) + (last ? 1U : 0U);
    next_ = last ? 0 : at + 1;
    return {step == 0 ? cursor_verdict::on_plan : cursor_verdict::skipped, at};
  }
  if (strikes_ <= options_.patience) ++strikes_;
  diverged_ = strikes_ > options_.patience;
  return {diverged_ ? cursor_verdict::diverged : cursor_verdict::inserted, next_};
}

}  // namespace v0
}  // namespace llmmem
