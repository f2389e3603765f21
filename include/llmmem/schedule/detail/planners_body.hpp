/// @file
/// The planners, as uses of the engine. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/bounds.hpp>
#include <llmmem/schedule/detail/bodies.hpp>
#include <llmmem/schedule/detail/planner_engine.hpp>
#include <llmmem/schedule/planners.hpp>
#include <llmmem/schedule/simulate.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Refuses inputs that no plan can serve.
inline void check_planned(const schedule_trace& trace, const schedule_machine& machine) {
  machine.check();
  const auto refuse = [](std::size_t tier, std::uint64_t budget, const std::string& needs) {
    throw argument_error("planner: tier " + std::to_string(tier) + " has " + std::to_string(budget) +
                         " bytes; " + needs);
  };
  if (trace.max_leased_bytes() > machine.budgets[0]) {
    refuse(0, machine.budgets[0],
           "the trace leases " + std::to_string(trace.max_leased_bytes()) + " bytes at once");
  }
  std::uint64_t largest = 0;
  for (const std::uint64_t size : trace.sizes())
    largest = std::max(largest, size);
  for (std::size_t tier = 1; tier < machine.budgets.size(); ++tier) {
    if (machine.budgets[tier] / 2 < largest) {
      refuse(tier, machine.budgets[tier],
             "a middle tier needs space for two chunks, one on its way up and one on its way down, and the "
             "largest has " +
                 std::to_string(largest));
    }
  }
}

/// Makes a first iteration and a steady one that end in the same state.
[[nodiscard]] inline schedule_plan make_plan(const schedule_trace& trace, const schedule_machine& machine,
                                             const use_table& uses, const engine_options& options,
                                             const char* name, std::size_t rehearsals) {
  schedule_plan plan{.planner = name,
                     .trace_fingerprint = trace.fingerprint(),
                     .events = static_cast<std::uint32_t>(trace.events().size()),
                     .chunks = static_cast<std::uint32_t>(trace.sizes().size()),
                     .machine = machine};
  if (!options.cyclic) {
    planner_engine engine(trace, machine, uses, options);
    plan.first = engine.run(nullptr);
    plan.start = engine.placements();
    return plan;
  }
  const bool large = trace.events().size() > 100'000;
  // The transfers in flight at the beginning of the steady iteration are those of the first one, so the
  // steady iteration runs again until they are its own. A state cleaner than the earlier one is sufficient,
  // but wastes write-backs, so it is the last resort.
  const auto repeats = [&](planner_engine& engine, const engine_goal& goal, bool exactly) {
    const bool settles = !large;
    plan.start = engine.placements();
    plan.steady = engine.run(&goal);
    for (int again = 0; again < 6 && settles && engine.placements() == plan.start; ++again) {
      plan_iteration next = engine.run(&goal);
      const bool settled = next == plan.steady;
      plan.steady = std::move(next);
      if (settled) break;
    }
    if (exactly ? engine.placements() != plan.start : !as_good(engine.placements(), plan.start)) return false;
    if (settles) plan.steady.forecast = simulate(trace, plan, 4).iterations.back();
    return true;
  };
  planner_engine rehearsal(trace, machine, uses, options);
  plan.first = rehearsal.run(nullptr);
  if (rehearsals == 0 &&
      repeats(rehearsal, engine_goal(rehearsal.placements(), trace.sizes().size(), machine.tiers()), !large))
    return plan;
  for (std::size_t i = 1; i < rehearsals; ++i)
    static_cast<void>(rehearsal.run(nullptr));
  std::vector<plan_placement> wished = rehearsal.placements();
  // The contents settle at once. Their dirty states settle in one more round; otherwise all chunks are
  // cleaned, or finally none stays.
  for (int attempt = 0; attempt < 4; ++attempt) {
    engine_goal goal(wished, trace.sizes().size(), machine.tiers());
    if (attempt == 2) goal.all_home();
    planner_engine engine(trace, machine, uses, options);
    engine.learn(rehearsal);
    plan.first = engine.run(&goal);
    if (repeats(engine, goal, attempt == 0 && !large)) return plan;
    wished = engine.placements();
    if (attempt == 2) wished.clear();
  }
  throw error("planner: no state repeats itself");
}

/// Adds the bounds that hold for every plan.
[[nodiscard]] inline schedule_plan bounded(schedule_plan plan, const schedule_trace& trace, plan_span span) {
  plan.first.bound = lower_bound(trace, plan.machine, bounded_iteration::first);
  if (span == plan_span::cyclic)
    plan.steady.bound = lower_bound(trace, plan.machine, bounded_iteration::steady);
  return plan;
}

[[nodiscard]] inline bool better(const plan_forecast& a, const plan_forecast& b,
                                 plan_objective objective) noexcept {
  const bool same_time = a.iteration_ns == b.iteration_ns;
  const bool same_bytes = a.bytes() == b.bytes();
  if (objective == plan_objective::time ? !same_time : same_bytes) return a.iteration_ns < b.iteration_ns;
  return a.bytes() < b.bytes();
}

/// Returns the options to try. Holding more chunks ahead of their use trades bytes for time, because it
/// leaves less space for kept chunks. Early write-backs are for links that have time.
[[nodiscard]] inline std::vector<engine_options> ways_to_prefetch(const schedule_trace& trace,
                                                                  const schedule_machine& machine,
                                                                  bool cyclic) {
  const std::uint64_t largest = size_range(trace).largest;
  const bool dirty = std::any_of(trace.events().begin(), trace.events().end(), [](const trace_event& event) {
    return event.call == trace_call::acquire && tiering::writes(event.mode);
  });
  const std::uint64_t takes = transfer_ns(machine.links[machine.link_below(0)], largest);
  std::vector<engine_options> all;
  for (std::uint64_t ahead = 0;; ahead = std::max(std::min(ahead, max_bytes / 2) * 2, largest)) {
    const bool last = ahead >= machine.budgets[0];
    for (const std::uint64_t within : {~std::uint64_t{0}, 2 * takes, takes}) {
      for (const auto& [early, clean] : {std::pair(true, false), {false, false}, {false, true}}) {
        for (const std::uint64_t below :
             {std::uint64_t{0}, largest, std::min(largest, max_bytes / 4) * 4, max_bytes}) {
          if (((early || clean) && !dirty) || (below != 0 && machine.tiers() == 2)) continue;
          all.push_back({.ahead_bytes = last ? max_bytes : ahead,
                         .ahead_bytes_below = below,
                         .within_ns = within,
                         .clean_early = early,
                         .clean_ahead = clean,
                         .cyclic = cyclic});
        }
      }
    }
    if (last) break;
  }
  all.push_back({.ahead = engine_options::prefetch::none, .cyclic = cyclic});
  return all;
}

}  // namespace detail

LLMMEM_SCHEDULE_BODY schedule_plan schedule::on_demand::operator()(const schedule_trace& trace,
                                                                   const schedule_machine& machine) const {
  detail::check_planned(trace, machine);
  const detail::engine_options options{.evict = detail::engine_options::order::least_recent,
                                       .ahead = detail::engine_options::prefetch::none,
                                       .cyclic = span == plan_span::cyclic};
  const detail::use_table uses(trace);
  return detail::bounded(detail::make_plan(trace, machine, uses, options, "on_demand", 0), trace, span);
}

LLMMEM_SCHEDULE_BODY schedule_plan schedule::lookahead::operator()(const schedule_trace& trace,
                                                                   const schedule_machine& machine) const {
  detail::check_planned(trace, machine);
  const detail::engine_options options{.evict = detail::engine_options::order::least_recent,
                                       .ahead = detail::engine_options::prefetch::by_count,
                                       .count = accesses,
                                       .cyclic = span == plan_span::cyclic};
  const detail::use_table uses(trace);
  return detail::bounded(detail::make_plan(trace, machine, uses, options, "lookahead", 0), trace, span);
}

LLMMEM_SCHEDULE_BODY schedule_plan schedule::next_use::operator()(const schedule_trace& trace,
                                                                  const schedule_machine& machine) const {
  detail::check_planned(trace, machine);
  const detail::use_table uses(trace);
  const bool cyclic = span == plan_span::cyclic;
  const std::size_t rehearsals = cyclic && trace.events().size() <= 100'000 ? 4 : 1;
  std::vector<detail::engine_options> tried;
  if (objective == plan_objective::bytes) {
    tried.push_back({.ahead = detail::engine_options::prefetch::none, .cyclic = cyclic});
  } else {
    tried = detail::ways_to_prefetch(trace, machine, cyclic);
  }
  // All options if the trace is small; otherwise as many as some million events allow, spread evenly.
  const std::size_t affordable =
      std::max<std::size_t>(1, 6'000'000 / ((trace.events().size() + 1) * 12 * rehearsals));
  const std::size_t stride = (tried.size() + affordable - 1) / affordable;
  schedule_plan best;
  bool found = false;
  for (std::size_t i = 0; i < tried.size(); i += stride) {
    // Tries the state after each number of rehearsals as the state to which all iterations return.
    for (std::size_t rehearsed = 0; rehearsed < rehearsals; ++rehearsed) {
      schedule_plan made = detail::make_plan(trace, machine, uses, tried[i], "next_use", rehearsed);
      const plan_forecast& own = cyclic ? made.steady.forecast : made.first.forecast;
      const plan_forecast& least = cyclic ? best.steady.forecast : best.first.forecast;
      if (found && !detail::better(own, least, objective)) continue;
      best = std::move(made);
      found = true;
    }
  }
  return detail::bounded(std::move(best), trace, span);
}

}  // namespace v0
}  // namespace llmmem
