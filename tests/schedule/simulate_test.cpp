#include <llmmem/schedule/planners.hpp>
#include <llmmem/schedule/simulate.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "support/random.hpp"
#include "support/schedule_world.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Two to four tiers, links of either duplex, some shared.
schedule_machine random_machine(random_numbers& random, const schedule_trace& trace) {
  schedule_machine machine;
  const std::size_t tiers = 2 + random.below(std::size_t{3});
  for (std::size_t i = 0; i + 1 < tiers; ++i) {
    const std::uint64_t least = i == 0 ? trace.most_leased_bytes() : 8'000;
    machine.budgets.push_back(least + 500 * random.below(std::uint64_t{12}));
    machine.links.push_back({.bytes_per_second = 300'000'000 + random.below(std::uint64_t{1'000'000'000}),
                             .latency_ns = random.once_in(2) ? 0 : random.below(std::uint64_t{300}),
                             .offload_bytes_per_second = random.once_in(2) ? 0 : 700'000'000U,
                             .duplex = random.once_in(2) ? link_duplex::full : link_duplex::half});
  }
  if (random.once_in(3)) machine.edges.assign(machine.budgets.size(), 0);
  return machine;
}

void holds_its_promises(const schedule_trace& trace, const schedule_plan& plan, bool cyclic) {
  const auto run = simulate(trace, plan, cyclic ? 4 : 1);
  REQUIRE(run.iterations[0] == plan.first.forecast);
  for (std::size_t tier = 0; tier < plan.machine.budgets.size(); ++tier)
    REQUIRE(run.most_bytes[tier] <= plan.machine.budgets[tier]);
  REQUIRE(plan.first.forecast.iteration_ns == trace.compute_ns() + plan.first.forecast.stalls.total());
  REQUIRE(plan.first.bound.stall_ns <= plan.first.forecast.stalls.total());
  for (std::size_t tier = 0; tier < plan.machine.budgets.size(); ++tier) {
    REQUIRE(plan.first.bound.edges[tier].onboard.bytes <= plan.first.forecast.edges[tier].onboard.bytes);
    REQUIRE(plan.first.bound.edges[tier].offload.bytes <= plan.first.forecast.edges[tier].offload.bytes);
  }
  if (!cyclic) return;
  for (std::size_t tier = 0; tier < plan.machine.budgets.size(); ++tier) {
    REQUIRE(plan.steady.bound.edges[tier].onboard.bytes <= plan.steady.forecast.edges[tier].onboard.bytes);
    REQUIRE(plan.steady.bound.edges[tier].offload.bytes <= plan.steady.forecast.edges[tier].offload.bytes);
  }
  REQUIRE(run.iterations[3].edges == plan.steady.forecast.edges);
  REQUIRE(plan.steady.bound.stall_ns <=
          std::max(plan.steady.forecast.stalls.total(), run.iterations[3].stalls.total()));
}

}  // namespace

TEST_CASE("every planner's plan runs as predicted, within budgets, above its bounds") {
  int unsettled = 0;
  int all = 0;
  for (const auto seed : seeds(400)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto trace = random_trace(random, {.chunks = 1 + random.below(std::uint32_t{8}),
                                             .accesses = 1 + random.below(std::uint32_t{24}),
                                             .most_units = 1 + random.below(std::uint64_t{4}),
                                             .writes = random.once_in(2),
                                             .discards = random.once_in(2),
                                             .overlaps = random.once_in(2)});
    const auto machine = random_machine(random, trace);
    for (const auto span : {plan_span::cyclic, plan_span::once}) {
      const bool cyclic = span == plan_span::cyclic;
      CAPTURE(cyclic);
      holds_its_promises(trace, on_demand{span}(trace, machine), cyclic);
      holds_its_promises(trace, lookahead{2, span}(trace, machine), cyclic);
      holds_its_promises(trace, next_use{plan_objective::bytes, span}(trace, machine), cyclic);
      const auto plan = next_use{plan_objective::time, span}(trace, machine);
      holds_its_promises(trace, plan, cyclic);
      if (cyclic) {
        ++all;
        unsettled += !(simulate(trace, plan, 6).iterations[5] == plan.steady.forecast);
      }
    }
  }
  MESSAGE("unsettled " << unsettled << " of " << all);
}
