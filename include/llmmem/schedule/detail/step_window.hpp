/// @file
/// The steps of a plan that are due and have not begun. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/prefetch_types.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/plan.hpp>
#include <llmmem/tiering/tiered_types.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// What steps are executed on: chunks by their numbers in the trace.
template <class T>
concept plan_target = requires(const T& target, chunk_id chunk, plan_operation operation, std::size_t tier) {
  target.progress();
  { target.execute(chunk, operation, tier) } -> std::same_as<tiering::step_outcome>;
  target.prefetch(chunk);
};

/// Walks the steps of one iteration. A step becomes *pending* when the program reaches its event (`issue`),
/// and leaves the window when the target has begun it (`begin_pending`) or when it is late (`give_up_late`).
/// Steps begin in the plan's order: one that must wait delays all after it.
///
/// @par Complexity      `issue` O(steps that become pending), the others O(pending); no allocation after
///                      `start`.
/// @par Thread safety   one thread at a time.
/// @par Errors          what the target throws passes through; the pending steps stay pending.
class step_window {
 public:
  /// Begins with no pending steps. There is space for twice the steps of the longer iteration of `plan`; when
  /// the window is full, the step that has waited longest is dropped.
  void start(const schedule_plan& plan) {
    pending_.clear();
    pending_.reserve(2 * std::max(plan.first.steps.size(), plan.steady.steps.size()));
    begin_iteration(plan.first);
  }
  /// Walks `iteration` from its first step. Pending steps stay pending. `iteration` outlives its use here.
  void begin_iteration(const plan_iteration& iteration) noexcept {
    iteration_ = &iteration;
    next_ = 0;
  }
  /// The steps of `event` up to the moment `until`, and all steps before them, become pending.
  /// @pre `start` was called.
  void issue(std::uint32_t event, plan_moment until);
  /// Begins pending steps in their order, up to the first that must wait.
  template <plan_target Target>
  void begin_pending(const Target& target, prefetch_stats& stats);
  /// Removes the steps up to `event`: they are late. For a late fetch, the target begins a prefetch.
  template <plan_target Target>
  void give_up_late(std::uint32_t event, const Target& target, prefetch_stats& stats);
  /// Drops the pending steps.
  void clear() noexcept { pending_.clear(); }

  [[nodiscard]] std::size_t pending() const noexcept { return pending_.size(); }

 private:
  const plan_iteration* iteration_ = nullptr;
  std::size_t next_ = 0;  // the first step of `iteration_` that was not issued yet
  std::vector<plan_step> pending_;
};

inline void step_window::issue(std::uint32_t event, plan_moment until) {
  const auto& steps = iteration_->steps;
  while (next_ < steps.size() &&
         (steps[next_].at_event < event || (steps[next_].at_event == event && steps[next_].when <= until))) {
    // The oldest step would most likely be late.
    if (!pending_.empty() && pending_.size() == pending_.capacity()) pending_.erase(pending_.begin());
    pending_.push_back(steps[next_++]);
  }
}

template <plan_target Target>
void step_window::begin_pending(const Target& target, prefetch_stats& stats) {
  target.progress();
  std::size_t done = 0;
  for (; done < pending_.size(); ++done) {
    const plan_step& step = pending_[done];
    const std::size_t tier = step.operation == plan_operation::fetch ? step.to : step.from;
    const tiering::step_outcome outcome = target.execute(step.chunk, step.operation, tier);
    if (outcome == tiering::step_outcome::deferred) break;
    if (step.operation == plan_operation::allocate) continue;  // the lease that writes takes its own space
    ++(outcome == tiering::step_outcome::done ? stats.steps : stats.unneeded);
  }
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(done));
}

template <plan_target Target>
void step_window::give_up_late(std::uint32_t event, const Target& target, prefetch_stats& stats) {
  std::size_t kept = 0;
  for (const plan_step& step : pending_) {
    if (step.at_event > event) {
      pending_[kept++] = step;
      continue;
    }
    ++stats.late;
    if (step.operation == plan_operation::fetch) target.prefetch(step.chunk);
  }
  pending_.resize(kept);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
