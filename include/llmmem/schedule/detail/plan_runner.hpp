/// @file
/// Executes a plan during the calls of a program. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/cursor.hpp>
#include <llmmem/schedule/detail/step_window.hpp>
#include <llmmem/schedule/prefetch_types.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/plan.hpp>

#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Tracks the program's position in its trace, and begins the steps that are due there. The caller calls
/// `call` before it serves a call, then `reach` with the call's event, and `call_ended` afterwards.
///
/// @par Complexity      as `schedule_cursor` and `step_window`.
/// @par Thread safety   one thread at a time. The trace and the plan outlive their use here.
/// @par Errors          passes on exceptions of the target.
class plan_runner {
 public:
  /// Follows `plan` from the beginning of its first iteration. The caller then begins its steps with
  /// `begin_due`.
  void start(const schedule_trace& trace, const schedule_plan& plan, schedule_cursor::options follow) {
    window_.start(plan);
    cursor_.emplace(trace, follow);
    iterations_ended_ = 0;
    trace_ = &trace;
    plan_ = &plan;
  }
  /// Records that the program has left its iteration early, and begins the next one, as after `start`.
  void restart() noexcept {
    cursor_->restart();
    iterations_ended_ = cursor_->iterations();
    window_.clear();
    window_.begin_iteration(plan_->steady);
  }

  /// Reports that the program is about to do `what` to `chunk`.
  cursor_step call(trace_call what, chunk_id chunk, access_mode mode) noexcept {
    return cursor_->call(what, chunk, mode);
  }
  /// Returns whether the last call belongs to a later iteration than the one that `call_ended` knows, because
  /// the program skipped the events at the end of an iteration. The caller ends that iteration with
  /// `call_ended`.
  [[nodiscard]] bool has_wrapped() const noexcept {
    return cursor_->iterations() != iterations_ended_ && cursor_->next() != 0;
  }
  /// The program's call is `event`: begins the steps of this event that can begin, and leaves the others to
  /// the lease.
  template <plan_target Target>
  void reach(std::uint32_t event, const Target& target, prefetch_stats& stats) {
    window_.issue(event, plan_moment::at_call, [&] { return target.now_ns(); });
    window_.begin_pending(target, stats);
    window_.give_up_late(event, target, stats);
  }
  /// The call was served: begins the steps ahead of the next event. Returns true if the call was the last of
  /// its iteration; the steady iteration follows.
  template <plan_target Target>
  bool call_ended(const Target& target, prefetch_stats& stats) {
    const bool iteration_ended = cursor_->iterations() != iterations_ended_;
    if (iteration_ended) {
      iterations_ended_ = cursor_->iterations();
      window_.issue(plan_->events, plan_moment::at_call, [&] { return target.now_ns(); });
      window_.begin_iteration(plan_->steady);
    }
    begin_due(target, stats);
    return iteration_ended;
  }
  /// Begins the steps ahead of the next event that can begin.
  template <plan_target Target>
  void begin_due(const Target& target, prefetch_stats& stats) {
    window_.issue(cursor_->next(), plan_moment::ahead, [&] { return target.now_ns(); });
    window_.begin_pending(target, stats);
  }
  /// Begins the waiting steps that can begin.
  template <plan_target Target>
  void progress(const Target& target, prefetch_stats& stats) {
    window_.begin_pending(target, stats);
  }
  /// Drops the steps that have not begun.
  void forget_pending() noexcept { window_.clear(); }

  /// The records of the steps and of the leases: see `step_window`.
  [[nodiscard]] const step_records& records() const noexcept { return window_.records(); }
  [[nodiscard]] bool is_expected(chunk_id chunk) const noexcept { return window_.is_expected(chunk); }
  void leased(chunk_id chunk, std::uint64_t waited_ns, std::uint64_t now_ns) noexcept {
    window_.leased(chunk, waited_ns, now_ns);
  }

  /// Returns whether the next event is the first of an iteration.
  [[nodiscard]] bool is_at_beginning() const noexcept { return cursor_->next() == 0; }
  /// Returns the next expected event, or null for a trace without events.
  [[nodiscard]] const trace_event* next_event() const noexcept {
    return trace_->events().empty() ? nullptr : &trace_->events()[cursor_->next()];
  }
  /// Returns the position of `event` of this iteration, in events since `start`.
  [[nodiscard]] std::uint64_t position_of(std::uint32_t event) const noexcept {
    return cursor_->iterations() * trace_->events().size() + event;
  }

 private:
  const schedule_trace* trace_ = nullptr;
  const schedule_plan* plan_ = nullptr;
  std::optional<schedule_cursor> cursor_;
  std::uint64_t iterations_ended_ = 0;  // of the cursor's iterations
  step_window window_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
