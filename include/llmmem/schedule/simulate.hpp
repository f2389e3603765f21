/// @file
/// Runs a trace on a machine in virtual time, strictly by a plan.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/bodies.hpp>
#include <llmmem/schedule/timeline_span.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/tiering/machine.hpp>
#include <llmmem/tiering/plan.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace schedule {

/// The result of a run in virtual time. Times of all iterations count from the beginning of the first one.
struct simulation {
  std::vector<plan_forecast> iterations{};
  std::vector<timeline_span> spans{};       ///< empty unless requested
  std::vector<std::uint64_t> most_bytes{};  ///< of each tier with a budget: the most bytes it held
};

}  // namespace schedule

using simulation [[deprecated("its name is schedule::simulation")]] = schedule::simulation;

/// Runs `plan` for `iterations` iterations: its first iteration, then the steady one repeatedly. Budgets hold
/// at every instant; bytes in flight count in their destination tier from the start of their transfer. An
/// acquire always gets the newest contents.
///
/// @par Complexity   O((events + steps) log steps) an iteration.
/// @throws argument_error  when the plan was made for another trace, or contains an impossible step; the text
///                         names iteration, step and reason.
[[nodiscard]] schedule::simulation simulate(const schedule_trace& trace, const schedule_plan& plan,
                                            std::size_t iterations = 2,
                                            timeline_detail detail = timeline_detail::none);

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_SCHEDULE_BODIES
#include <llmmem/schedule/detail/simulate_body.hpp>
#endif
