/// @file
/// A trace and its plan. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/plan.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns, for each acquire of a trace, the number of events to the chunk's next acquire, across the end of
/// the iteration.
[[nodiscard]] inline std::vector<std::uint64_t> next_uses(const schedule_trace& trace) {
  const auto events = trace.events();
  std::vector<std::uint64_t> next(events.size(), access_hint::never);
  std::vector<std::uint64_t> seen(trace.sizes().size(), access_hint::never);
  // Walks from the back twice, because the beginning follows the end.
  for (std::uint64_t i = 2 * events.size(); i-- > 0;) {
    const trace_event& event = events[i % events.size()];
    if (event.call != trace_call::acquire) continue;
    std::uint64_t& later = seen[to_index(event.chunk)];
    if (i < events.size()) next[i] = later - i;
    later = i;
  }
  return next;
}

/// The trace of an iteration, the next use at each of its acquires, and its plan. The plan always belongs to
/// the trace.
///
/// A trace or plan keeps its address until it is dropped, also when another replaces it.
///
/// @par Complexity      `set_trace` O(events + chunks), the others O(1).
/// @par Thread safety   one writer at a time; const calls may run together.
class planned_trace {
 public:
  [[nodiscard]] bool has_trace() const noexcept { return trace_.has_value(); }
  [[nodiscard]] bool has_plan() const noexcept { return plan_.has_value(); }
  /// @pre `has_trace()`.
  [[nodiscard]] const schedule_trace& trace() const noexcept LLMMEM_LIFETIMEBOUND { return *trace_; }
  /// @pre `has_plan()`.
  [[nodiscard]] const schedule_plan& plan() const noexcept LLMMEM_LIFETIMEBOUND { return *plan_; }
  /// Returns the events from the acquire `event` to the chunk's next acquire. @pre `has_trace()`.
  [[nodiscard]] std::uint64_t next_use(std::uint32_t event) const noexcept { return next_use_[event]; }

  /// Drops the plan, unless `trace` has the same events as the previous one.
  void set_trace(schedule_trace trace) {
    std::vector<std::uint64_t> next = next_uses(trace);
    if (trace_ && trace_->fingerprint() != trace.fingerprint()) plan_.reset();
    trace_ = std::move(trace);
    next_use_ = std::move(next);
  }
  /// Returns whether `plan` was made for this trace.
  [[nodiscard]] bool fits(const schedule_plan& plan) const noexcept {
    return trace_ && plan.trace_fingerprint == trace_->fingerprint();
  }
  /// @pre `plan` was made for this trace.
  void set_plan(schedule_plan plan) { plan_ = std::move(plan); }
  void drop_plan() noexcept { plan_.reset(); }
  void clear() noexcept {
    plan_.reset();
    trace_.reset();
  }

 private:
  std::optional<schedule_trace> trace_;
  std::vector<std::uint64_t> next_use_;  // by event of the trace
  std::optional<schedule_plan> plan_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
