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
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The target on which steps are executed; it knows chunks by their numbers in the trace.
template <class T>
concept plan_target = requires(const T& target, chunk_id chunk, plan_operation operation, std::size_t tier) {
  target.progress();
  { target.execute(chunk, operation, tier) } -> std::same_as<tiering::step_outcome>;
  { target.blocker() } noexcept -> std::same_as<tiering::step_blocker>;
  { target.now_ns() } noexcept -> std::convertible_to<std::uint64_t>;
  target.prefetch(chunk);
};

/// Walks the steps of one iteration. A step becomes *pending* when the program reaches its event (`issue`),
/// and leaves the window when the target has begun it (`begin_pending`) or when it is late (`give_up_late`).
/// Steps begin in the plan's order: a step that must wait delays all later ones.
///
/// The window keeps a record of each step. The caller reports leases of fetched chunks by `leased`.
///
/// @par Complexity      `issue` O(steps that become pending), the others O(pending); no allocation after
///                      `start`.
/// @par Thread safety   one thread at a time.
/// @par Errors          passes on exceptions of the target; pending steps stay pending.
class step_window {
 public:
  /// Begins with no pending steps. The window has space for twice the steps of the plan's longer iteration;
  /// when it is full, it drops the step that has waited longest.
  void start(const schedule_plan& plan);
  /// Walks `iteration` from its first step. Pending steps stay pending. `iteration` outlives its use here.
  void begin_iteration(const plan_iteration& iteration) noexcept {
    iteration_ = &iteration;
    records_of_ = &iteration == first_ ? &records_.first : &records_.steady;
    next_ = 0;
  }
  /// The steps of `event` up to the moment `until`, and all steps before them, become pending.
  /// @pre `start` was called.
  /// @param now_ns  returns the time; called only when a step becomes pending.
  template <class Now>
  void issue(std::uint32_t event, plan_moment until, Now now_ns);
  /// Begins pending steps in their order, up to the first that must wait.
  template <plan_target Target>
  void begin_pending(const Target& target, prefetch_stats& stats);
  /// Removes the steps up to `event`, because they are late. For a late fetch, the target begins a prefetch.
  template <plan_target Target>
  void give_up_late(std::uint32_t event, const Target& target, prefetch_stats& stats);
  /// Drops the pending steps. Fetches that no lease has used yet count as unused.
  void clear() noexcept;

  /// Returns whether a step has begun to fetch the chunk, or was too late to begin, and no lease has used it
  /// yet.
  [[nodiscard]] bool is_expected(chunk_id chunk) const noexcept {
    return to_index(chunk) < fetched_.size() && fetched_[to_index(chunk)].record != nullptr;
  }
  /// Records a lease of a chunk that `is_expected`, and how long it waited until `now_ns`.
  void leased(chunk_id chunk, std::uint64_t waited_ns, std::uint64_t now_ns) noexcept;

  [[nodiscard]] std::size_t pending() const noexcept { return pending_.size(); }
  [[nodiscard]] const step_records& records() const noexcept { return records_; }

 private:
  struct pending_step {
    plan_step step;
    step_record* record = nullptr;
    std::uint64_t due_ns = 0;
  };
  struct fetched {  // a fetch to tier 0 that no lease has used yet
    step_record* record = nullptr;
    std::uint64_t due_ns = 0;
    std::uint64_t begun_ns = 0;
    std::uint64_t planned_ns = 0;  // planned time of its transfer
    step_cause delay = step_cause::link_busy;
    bool was_late = false;  // it never began: the lease fetches the chunk
  };

  [[nodiscard]] step_cause delay() const noexcept {
    switch (blocker_) {
      case tiering::step_blocker::space:
        return step_cause::no_room;
      case tiering::step_blocker::lease:
        return step_cause::leased;
      case tiering::step_blocker::none:
      case tiering::step_blocker::transfer:
        break;
    }
    return step_cause::link_busy;
  }
  void note_unused(chunk_id chunk) noexcept {
    step_record*& record = fetched_[to_index(chunk)].record;
    if (record != nullptr && !fetched_[to_index(chunk)].was_late) ++record->unused;
    record = nullptr;
  }
  void note_fetch(const pending_step& each, std::uint64_t now_ns, bool was_late) noexcept;

  const plan_iteration* first_ = nullptr;
  const plan_iteration* iteration_ = nullptr;
  std::vector<step_record>* records_of_ = nullptr;
  std::size_t next_ = 0;  // the first step of `iteration_` that was not issued yet
  std::vector<pending_step> pending_;
  std::vector<fetched> fetched_;  // by chunk
  step_records records_;
  tiering::step_blocker blocker_ = tiering::step_blocker::none;  // of the first pending step
};

inline void step_window::start(const schedule_plan& plan) {
  pending_.clear();
  pending_.reserve(2 * std::max(plan.first.steps.size(), plan.steady.steps.size()));
  std::size_t chunks = 0;
  for (const plan_iteration* each : {&plan.first, &plan.steady}) {
    for (const plan_step& step : each->steps)
      chunks = std::max(chunks, std::size_t{to_index(step.chunk)} + 1);
  }
  fetched_.assign(chunks, {});
  records_.first.assign(plan.first.steps.size(), {});
  records_.steady.assign(plan.steady.steps.size(), {});
  first_ = &plan.first;
  begin_iteration(plan.first);
}

inline void step_window::clear() noexcept {
  pending_.clear();
  for (fetched& each : fetched_) {
    if (each.record != nullptr && !each.was_late) ++each.record->unused;
    each.record = nullptr;
  }
}

inline void step_window::note_fetch(const pending_step& each, std::uint64_t now_ns, bool was_late) noexcept {
  if (each.step.operation == plan_operation::drop && each.step.from == 0) return note_unused(each.step.chunk);
  if (each.step.operation != plan_operation::fetch || each.step.to != 0) return;
  note_unused(each.step.chunk);
  fetched_[to_index(each.step.chunk)] = {
      each.record, each.due_ns, now_ns, each.step.finish_ns - each.step.start_ns, delay(), was_late};
}

inline void step_window::leased(chunk_id chunk, std::uint64_t waited_ns, std::uint64_t now_ns) noexcept {
  fetched& came = fetched_[to_index(chunk)];
  step_record& record = *std::exchange(came.record, nullptr);
  if (came.was_late) {
    record.late_ns += waited_ns;
    return;
  }
  if (waited_ns == 0) return;
  ++record.late;
  record.late_ns += waited_ns;
  // Splits the wait: the delay of the step's beginning, and the extra time of its transfer. The plan caused
  // the rest.
  const std::uint64_t began_late = std::min(waited_ns, came.begun_ns - came.due_ns);
  const std::uint64_t took = now_ns - came.begun_ns;
  const std::uint64_t too_long =
      std::min(waited_ns - began_late, took > came.planned_ns ? took - came.planned_ns : 0);
  const std::uint64_t rest = waited_ns - began_late - too_long;
  const step_cause cause = began_late >= std::max(too_long, rest) ? came.delay
                           : too_long >= rest                     ? step_cause::link_busy
                                                                  : step_cause::issued_late;
  ++record.causes[static_cast<std::size_t>(cause)];
}

template <class Now>
void step_window::issue(std::uint32_t event, plan_moment until, Now now_ns) {
  const auto& steps = iteration_->steps;
  std::uint64_t now = 0;
  bool is_asked = false;
  while (next_ < steps.size() &&
         (steps[next_].at_event < event || (steps[next_].at_event == event && steps[next_].when <= until))) {
    // Drops the oldest step, because it would most likely be late.
    if (!pending_.empty() && pending_.size() == pending_.capacity()) pending_.erase(pending_.begin());
    if (!std::exchange(is_asked, true)) now = now_ns();
    pending_.push_back({steps[next_], &(*records_of_)[next_], now});
    ++next_;
  }
}

template <plan_target Target>
void step_window::begin_pending(const Target& target, prefetch_stats& stats) {
  target.progress();
  std::size_t done = 0;
  for (; done < pending_.size(); ++done) {
    const pending_step& each = pending_[done];
    const plan_step& step = each.step;
    const std::size_t tier = step.operation == plan_operation::fetch ? step.to : step.from;
    const tiering::step_outcome outcome = target.execute(step.chunk, step.operation, tier);
    if (outcome == tiering::step_outcome::deferred) {
      blocker_ = target.blocker();
      break;
    }
    if (step.operation == plan_operation::allocate) continue;  // the lease that writes takes its own space
    if (outcome == tiering::step_outcome::done) {
      ++stats.steps;
      ++each.record->begun;
      note_fetch(each, target.now_ns(), false);
    } else {
      ++stats.unneeded;
      ++each.record->unneeded;
    }
  }
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(done));
}

template <plan_target Target>
void step_window::give_up_late(std::uint32_t event, const Target& target, prefetch_stats& stats) {
  std::size_t kept = 0;
  for (const pending_step& each : pending_) {
    const plan_step& step = each.step;
    if (step.at_event > event) {
      pending_[kept++] = each;
      continue;
    }
    ++stats.late;
    ++each.record->late;
    ++each.record->causes[static_cast<std::size_t>(delay())];
    note_fetch(each, each.due_ns, true);
    if (step.operation == plan_operation::fetch) target.prefetch(step.chunk);
  }
  pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(kept), pending_.end());
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
