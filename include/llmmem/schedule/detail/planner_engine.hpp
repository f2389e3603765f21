/// @file
/// The common base of all planners: it runs one iteration after another in virtual time, and records every
/// decision as a step. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/evicting_engine.hpp>
#include <llmmem/tiering/plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Runs iterations: serves their events, brings in chunks ahead, and ends them in a given state.
class planner_engine : private evicting_engine {
 public:
  planner_engine(const schedule_trace& trace, const schedule_machine& machine, const use_table& uses,
                 const engine_options& options)
      : evicting_engine(trace, machine, uses, options), uses_(&uses), served_ns_(trace.events().size()) {
    if (options.within_ns == never) return;
    std::uint64_t sum = 0;
    for (const trace_event& each : trace.events())
      computed_ns_.push_back(sum += each.compute_ns);
  }

  /// Runs one iteration, from the state that the previous one left. With a goal, it ends in the goal's state.
  [[nodiscard]] plan_iteration run(const engine_goal* goal) {
    plan_iteration made;
    steps_ = &made.steps;
    used_.clear();
    if (bounded_ > 1) {
      // The set of copies that no access needs has changed, and with it the order in which copies leave.
      leaves_ = left_;
      for (std::uint32_t i = 0; i < chunks_.size(); ++i)
        offer(chunk_id{i}, 1);
    }
    goal_ = goal;
    machine_.begin_iteration();
    const auto events = trace_->events();
    end_ = base_ + events.size();
    for (std::uint64_t& pointer : pointers_)
      pointer = base_;
    for (std::uint32_t i = 0; i < events.size(); ++i)
      live_through(i);
    event_ = static_cast<std::uint32_t>(events.size());
    when_ = plan_moment::ahead;
    position_ = end_;
    if (goal != nullptr) {
      close();
    } else if (options_.cyclic) {
      if (options_.ahead != engine_options::prefetch::none) prefetch(later_by(trace_->tail_ns()));
      tidy();
    }
    machine_.compute(trace_->tail_ns(), event_);
    made.forecast = machine_.end_iteration();
    set_latest(made);
    base_ = end_;
    return made;
  }

  /// Begins with another engine's observations of evicted chunks.
  void learn(const planner_engine& other) {
    evicted_ = other.evicted_;
    left_ = other.left_;
  }

  [[nodiscard]] std::vector<plan_placement> placements() const { return machine_.placements(); }

 private:
  [[nodiscard]] std::uint64_t later_by(std::uint64_t ns) const noexcept { return machine_.now() + ns; }
  void live_through(std::uint32_t index) {
    const trace_event& event = trace_->events()[index];
    event_ = index;
    position_ = base_ + index;
    when_ = plan_moment::ahead;
    const bool acquires = event.call == trace_call::acquire;
    const bool wanted =
        acquires && (tiering::reads(event.mode) ? !has(event.chunk, 0) : !machine_.at(event.chunk, 0).held);
    if (wanted && !tiering::reads(event.mode) && options_.ahead != engine_options::prefetch::none)
      allocate(event.chunk);
    std::uint64_t until = later_by(event.compute_ns);
    if (acquires && machine_.at(event.chunk, 0).held)
      until = std::max(until, machine_.at(event.chunk, 0).ready_ns);
    if (options_.ahead != engine_options::prefetch::none) prefetch(until);
    machine_.compute(event.compute_ns, index);
    when_ = plan_moment::at_call;
    if (acquires && tiering::reads(event.mode) && !has(event.chunk, 0)) bring(event.chunk, 0, 0);
    if (acquires && !tiering::reads(event.mode) && !machine_.at(event.chunk, 0).held) allocate(event.chunk);
    if (machine_.serve(index) != refusal::none) throw error("planner: an event could not be served");
    served_ns_[index] = machine_.now() - machine_.began();
    chunk_state& chunk = of(event.chunk);
    if (acquires) {
      const std::uint32_t next = uses_->after(index);
      chunk.next = next > index ? base_ + next : options_.cyclic ? end_ + next : never;
      chunk.acquired = index;
      left_[index] = false;
      for (std::size_t tier = 0; tier < bounded_; ++tier)
        count_used(event.chunk, tier);
      offer(event.chunk, 1);
    } else {
      chunk.recent = ++releases_;
      event_ = index + 1;
      when_ = plan_moment::ahead;
      if (options_.clean_early && evicted_[chunk.acquired] && event.call == trace_call::release &&
          has(event.chunk, 0) && !machine_.elsewhere(event.chunk, 0))
        write_back(event.chunk, 0);
      offer(event.chunk, 0);
    }
  }

  // Bringing in

  /// Brings `chunk` to `tier` through the tiers below, evicting chunks used later than `limit`. Makes space
  /// from the top down, because chunks that leave one tier may move to the next; the copy that is read stays.
  [[nodiscard]] bool try_bring(chunk_id chunk, std::size_t tier, std::uint64_t limit) {
    std::size_t from = tier + 1;
    while (!has(chunk, from))
      ++from;
    of(chunk).picked = true;
    bool room = true;
    for (std::size_t to = tier; to < from && room; ++to)
      room = machine_.at(chunk, to).held || make_room(to, trace_->size(chunk), limit);
    for (std::size_t to = from; to-- > tier && room;) {
      note(machine_.fetch(chunk, to, when_, event_, number()), plan_operation::fetch, chunk, to + 1, to);
      if (when_ == plan_moment::ahead) count_unused(chunk, to);
    }
    of(chunk).picked = false;
    of(chunk).recent = ++releases_;
    offer(chunk, machine_.leased(chunk) ? 1 : 0);
    return room;
  }
  void bring(chunk_id chunk, std::size_t tier, std::uint64_t limit) {
    if (!try_bring(chunk, tier, limit)) {
      throw argument_error("planner: tier 0 to " + std::to_string(bounded_ - 1) +
                           " have no space for chunk " + std::to_string(to_index(chunk)) + " of " +
                           std::to_string(trace_->size(chunk)) + " bytes in addition to what is leased");
    }
  }
  void allocate(chunk_id chunk) {
    if (!make_room(0, trace_->size(chunk), 0)) {
      if (when_ == plan_moment::ahead) return;
      bring(chunk, 0, 0);  // throws the reason
    }
    note(machine_.allocate(chunk), plan_operation::allocate, chunk, 0, 0);
  }

  /// Brings in, ahead of time, the chunks whose transfers can start before `until`.
  void prefetch(std::uint64_t until) {
    if (options_.ahead == engine_options::prefetch::by_count) return prefetch_by_count();
    for (std::size_t tier = bounded_; tier-- > 0;) {
      if (tier != 0 && options_.ahead_bytes_below == 0) continue;
      while (machine_.lane_free(tier, link_direction::onboard) < std::max(until, machine_.now() + 1)) {
        if (!prefetch_next(tier)) break;
      }
    }
    if (!options_.clean_early && !options_.clean_ahead) return;
    for (std::size_t tier = options_.clean_ahead ? 0 : 1; tier < bounded_; ++tier) {
      while (machine_.lane_free(tier, link_direction::offload) < std::max(until, machine_.now() + 1)) {
        if (!clean_next(tier)) break;
      }
    }
  }
  /// Writes back the copy that would leave `tier` next if it were clean.
  [[nodiscard]] bool clean_next(std::size_t tier) {
    if (machine_.budget(tier).fits(most_bytes_)) return false;
    const entry* cheap = best(tier, false);
    const entry* costly = best(tier, true);
    if (costly == nullptr || (cheap != nullptr && cheap->key >= costly->key)) return false;
    write_back(chunk_id{costly->chunk}, tier);
    return true;
  }
  [[nodiscard]] bool prefetch_next(std::size_t tier) {
    std::uint64_t& pointer = pointers_[tier];
    pointer = std::max(pointer, position_);
    const std::uint64_t stop = options_.cyclic ? position_ + lines() : end_;
    for (; pointer < stop; ++pointer) {
      const trace_event& event = event_at(pointer);
      if (event.call != trace_call::acquire || !tiering::reads(event.mode)) continue;
      if (pointer >= end_ && goal_ != nullptr && !goal_->holds(event.chunk, tier)) continue;
      // A write comes first, or the chunk is leased now, so a fetch is impossible or unnecessary.
      if (of(event.chunk).next != pointer || present(event.chunk, tier)) continue;
      break;
    }
    if (pointer >= stop) return false;
    const chunk_id chunk = event_at(pointer).chunk;
    const std::uint64_t bytes = trace_->size(chunk);
    const std::uint64_t most = tier == 0 ? options_.ahead_bytes : options_.ahead_bytes_below;
    if (unused_[tier] != 0 && (unused_[tier] > most || bytes > most - unused_[tier])) return false;
    if (options_.within_ns != never && computing_until(pointer) > options_.within_ns) return false;
    const std::uint64_t limit = pointer;
    if (!try_bring(chunk, tier, limit)) return false;
    pointer = std::max(pointer, limit);
    return true;
  }
  /// Returns the computing time from the present event to the event at `position`.
  [[nodiscard]] std::uint64_t computing_until(std::uint64_t position) const noexcept {
    const auto since_start = [this](std::uint64_t at) {
      return at < end_ ? computed_ns_[at - base_] : trace_->compute_ns() + computed_ns_[at - end_];
    };
    return since_start(position) - since_start(position_);
  }
  [[nodiscard]] bool present(chunk_id chunk, std::size_t tier) const noexcept {
    for (std::size_t i = 0; i <= tier; ++i) {
      if (has(chunk, i)) return true;
    }
    return false;
  }
  void prefetch_by_count() {
    if (options_.count == 0) return;
    const std::uint64_t stop = options_.cyclic ? position_ + lines() : end_;
    std::uint64_t last = position_;
    std::uint32_t seen = 0;
    for (std::uint64_t i = position_; i < stop && seen < options_.count; ++i) {
      if (event_at(i).call == trace_call::acquire) {
        ++seen;
        last = i;
      }
    }
    for (std::uint64_t i = position_; i <= last && i < stop; ++i) {
      const trace_event& event = event_at(i);
      if (event.call != trace_call::acquire || !tiering::reads(event.mode) || of(event.chunk).next != i)
        continue;
      if (i >= end_ && goal_ != nullptr && !goal_->holds(event.chunk, 0)) continue;
      if (!has(event.chunk, 0) && !try_bring(event.chunk, 0, last)) break;
    }
  }

  // The end of an iteration

  /// Drops the copies that no later access can use.
  void tidy() {
    for (std::uint32_t i = 0; i < chunks_.size(); ++i) {
      for (std::size_t tier = 0; tier < bounded_; ++tier) {
        const chunk_id chunk{i};
        if (!machine_.at(chunk, tier).held || has(chunk, tier)) continue;
        note(machine_.drop(chunk, tier), plan_operation::drop, chunk, tier, tier);
        count_used(chunk, tier);
      }
    }
  }

  /// Changes the state to the goal's.
  void close() {
    const auto chunk_count = static_cast<std::uint32_t>(chunks_.size());
    for (std::uint32_t i = 0; i < chunk_count; ++i) {
      const chunk_id chunk{i};
      const std::size_t last = bounded_;
      for (std::size_t tier = 0; tier < bounded_; ++tier) {
        const bool refresh = goal_->holds(chunk, tier + 1) && tier + 1 < last;
        const bool home = goal_->home(chunk) && !machine_.worthless(chunk);
        if (has(chunk, tier) &&
            ((refresh && !has(chunk, tier + 1)) || (home && !reaches_home(chunk, tier)))) {
          write_back(chunk, tier);
        }
        if (machine_.at(chunk, tier).held && !(goal_->holds(chunk, tier) && has(chunk, tier))) {
          if (has(chunk, tier) && !machine_.elsewhere(chunk, tier) && !machine_.worthless(chunk))
            write_back(chunk, tier);
          note(machine_.drop(chunk, tier), plan_operation::drop, chunk, tier, tier);
          count_used(chunk, tier);
        }
      }
      offer(chunk, 0);
    }
    // In the order of use, so that the chunks that the next iteration needs first arrive first.
    std::vector<std::pair<std::uint64_t, std::uint32_t>> missing;
    for (std::uint32_t i = 0; i < chunk_count; ++i) {
      for (std::size_t tier = 0; tier < bounded_; ++tier) {
        if (goal_->holds(chunk_id{i}, tier) && !has(chunk_id{i}, tier)) {
          missing.emplace_back(chunks_[i].next, i);
          break;
        }
      }
    }
    std::ranges::sort(missing);
    for (const auto& [next, i] : missing) {
      const chunk_id chunk{i};
      for (std::size_t tier = bounded_; tier-- > 0;) {
        if (!goal_->holds(chunk, tier) || has(chunk, tier)) continue;
        if (tier != 0 && present(chunk, tier - 1)) {
          if (has(chunk, tier - 1)) write_back(chunk, tier - 1);
          continue;
        }
        bring(chunk, tier, 0);
        for (std::size_t below = tier + 1; below < bounded_; ++below) {
          if (!goal_->holds(chunk, below) && machine_.at(chunk, below).held) {
            note(machine_.drop(chunk, below), plan_operation::drop, chunk, below, below);
            count_used(chunk, below);
          }
        }
        offer(chunk, 0);
      }
    }
  }
  [[nodiscard]] bool reaches_home(chunk_id chunk, std::size_t tier) const noexcept {
    for (std::size_t below = tier + 1; below <= bounded_; ++below) {
      if (has(chunk, below)) return true;
    }
    return false;
  }

  /// Sets the latest start of each fetch, from the last to the first: a fetch ends before its chunk is used
  /// and before the next fetch starts.
  void set_latest(plan_iteration& made) const {
    std::uint64_t next_start = never;
    for (std::size_t i = made.steps.size(); i-- > 0;) {
      plan_step& step = made.steps[i];
      const std::uint64_t use = used_[i];
      if (step.operation != plan_operation::fetch || step.to != 0 || use == never) continue;
      const std::uint64_t served =
          use < lines() ? served_ns_[use] : made.forecast.iteration_ns + served_ns_[use - lines()];
      const std::uint64_t finish = std::min(served, next_start);
      const std::uint64_t takes = step.finish_ns - step.start_ns;
      if (finish > takes) step.latest_ns = std::max(step.start_ns, finish - takes);
      next_start = step.latest_ns;
    }
  }

  const use_table* uses_;
  std::vector<std::uint64_t> served_ns_;    // by event
  std::vector<std::uint64_t> computed_ns_;  // by event: computing before it
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
