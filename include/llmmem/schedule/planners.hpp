/// @file
/// Planners: pure functions from a trace and a machine to a plan.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/bodies.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/tiering/machine.hpp>
#include <llmmem/tiering/plan.hpp>

#include <concepts>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Whether the iteration repeats for ever, or runs once.
enum class plan_span : std::uint8_t {
  cyclic,  ///< the next iteration's first chunks are soon used again when this one ends
  single,  ///< no iteration follows: the plan has only a first iteration
  once [[deprecated("its name is single")]] = single
};

/// What to minimise; the other breaks ties.
enum class plan_objective : std::uint8_t { time, bytes };

/// Makes a plan of a trace for a machine. The same trace, machine and planner give the same plan, bit for
/// bit.
/// @par Complexity   O(n log n) for n events and each plan that the planner tries, bounds included;
///                   allocates.
/// @par Thread safety   pure functions.
/// @throws argument_error  when the machine is invalid, tier 0 cannot hold the chunks that the trace leases
///                         at once, or a tier in between cannot hold two of the largest chunk.
template <class P>
concept schedule_planner =
    requires(const P& planner, const schedule_trace& trace, const schedule_machine& machine) {
      { planner(trace, machine) } -> std::same_as<schedule_plan>;
    };

namespace schedule {

/// Fetches a missing chunk when the program asks for it; drops the least recently used one. The baseline.
struct on_demand {
  plan_span span = plan_span::cyclic;
  [[nodiscard]] schedule_plan operator()(const schedule_trace& trace, const schedule_machine& machine) const;
};

/// At every event, fetches the chunks that the next `accesses` acquires lack, if it can make space by
/// dropping other chunks, the least recently used first. It prefetches by count, not by time, like
/// DeepSpeed's bucket of elements and Gemini's bucket of chunks.
struct lookahead {
  std::uint32_t accesses = 1;
  plan_span span = plan_span::cyclic;
  [[nodiscard]] schedule_plan operator()(const schedule_trace& trace, const schedule_machine& machine) const;
};

/// Fetches in the order of use, ahead of time. Drops the chunk whose next use is furthest ahead, counted
/// across the end of the iteration; it prefers a clean chunk to a dirty one unless the clean one is needed
/// again more than twice as soon. The planner for real work: it tries how many bytes to hold ahead, and keeps
/// the best plan (docs/schedules.md).
///
/// With `plan_objective::bytes` it prefetches nothing: a single iteration (`plan_span::single`) of equal
/// clean chunks then moves exactly MIN's bytes. With `plan_objective::time` it may move some chunks in
/// addition.
struct next_use {
  plan_objective objective = plan_objective::time;
  plan_span span = plan_span::cyclic;
  [[nodiscard]] schedule_plan operator()(const schedule_trace& trace, const schedule_machine& machine) const;
};

}  // namespace schedule

using lookahead [[deprecated("its name is schedule::lookahead")]] = schedule::lookahead;
using on_demand [[deprecated("its name is schedule::on_demand")]] = schedule::on_demand;

static_assert(schedule_planner<schedule::on_demand> && schedule_planner<schedule::lookahead> &&
              schedule_planner<schedule::next_use>);

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_SCHEDULE_BODIES
#include <llmmem/schedule/detail/planners_body.hpp>
#endif
