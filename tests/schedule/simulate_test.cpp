#include <llmmem/schedule/planners.hpp>
#include <llmmem/schedule/simulate.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
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
    const std::uint64_t least = i == 0 ? trace.max_leased_bytes() : 8'000;
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
  REQUIRE(run.iterations[3] == plan.steady.forecast);
  REQUIRE(plan.steady.bound.stall_ns <= plan.steady.forecast.stalls.total());
}

}  // namespace

TEST_CASE("every planner's plan runs as predicted, within budgets and above its bounds") {
  for (const auto seed : seeds_within(400, 100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto trace = random_trace(random, {.chunks = 1 + random.below(std::uint32_t{8}),
                                             .accesses = 1 + random.below(std::uint32_t{24}),
                                             .most_units = 1 + random.below(std::uint64_t{4}),
                                             .writes = random.once_in(2),
                                             .discards = random.once_in(2),
                                             .overlaps = random.once_in(2)});
    const auto machine = random_machine(random, trace);
    for (const auto span : {plan_span::cyclic, plan_span::single}) {
      const bool cyclic = span == plan_span::cyclic;
      CAPTURE(cyclic);
      holds_its_promises(trace, schedule::on_demand{span}(trace, machine), cyclic);
      holds_its_promises(trace, schedule::lookahead{2, span}(trace, machine), cyclic);
      holds_its_promises(trace, schedule::next_use{plan_objective::bytes, span}(trace, machine), cyclic);
      holds_its_promises(trace, schedule::next_use{plan_objective::time, span}(trace, machine), cyclic);
    }
  }
}

namespace {

/// Two chunks of which one fits, read in turn.
schedule_trace two_by_turns() {
  trace_recorder record;
  const chunk_id a = record.add_chunk(1'000);
  const chunk_id b = record.add_chunk(1'000);
  for (const chunk_id chunk : {a, b}) {
    record.acquire(chunk, access_mode::read_write);
    record.compute(500);
    record.release(chunk);
  }
  return record.freeze();
}

/// A plan for it, by hand.
schedule_plan by_hand(const schedule_trace& trace, std::vector<plan_step> steps) {
  for (plan_step& step : steps)
    step.bytes = 1'000;
  return {.planner = "hand",
          .trace_fingerprint = trace.fingerprint(),
          .events = 4,
          .chunks = 2,
          .machine = {.budgets = {1'000}, .links = {{.bytes_per_second = 1'000'000'000}}},
          .first = {.steps = std::move(steps)}};
}

plan_step at(std::uint32_t event, plan_operation operation, std::uint32_t chunk, std::uint8_t from,
             std::uint8_t to) {
  return {.at_event = event, .chunk = chunk_id{chunk}, .operation = operation, .from = from, .to = to};
}

std::string why(const schedule_trace& trace, const schedule_plan& plan) {
  try {
    static_cast<void>(simulate(trace, plan, 1));
  } catch (const argument_error& wrong) {
    return wrong.what();
  }
  return "runs";
}

}  // namespace

TEST_CASE("a plan written by hand runs, and its stalls are reported by cause") {
  using enum plan_operation;
  const auto trace = two_by_turns();
  const auto plan = by_hand(trace, {at(0, fetch, 0, 1, 0), at(2, write_back, 0, 0, 1), at(2, drop, 0, 0, 0),
                                    at(2, fetch, 1, 1, 0), at(4, write_back, 1, 0, 1), at(4, drop, 1, 0, 0)});
  const auto run = simulate(trace, plan, 1);
  const plan_forecast& seen = run.iterations[0];
  CHECK(seen.compute_ns == 1'000);
  CHECK(seen.stalls[stall_cause::prefetch_late] == 2'000);  // 1000 each
  CHECK(seen.stalls[stall_cause::write_back] == 1'000);     // the room that chunk 0 left behind
  CHECK(seen.iteration_ns == 4'000);
  CHECK(seen.edges[0] == link_flow{{2'000, 2}, {2'000, 2}});
  CHECK(run.most_bytes[0] == 1'000);
}

TEST_CASE("an invalid plan is refused by iteration, step and reason") {
  using enum plan_operation;
  const auto trace = two_by_turns();
  const auto one = [&](std::vector<plan_step> steps) { return why(trace, by_hand(trace, std::move(steps))); };
  const plan_step bring = at(0, fetch, 0, 1, 0);
  CHECK(one({}) == "simulate: iteration 0, event 0, acquire of chunk 0: no step has brought it to tier 0");
  CHECK(one({bring, bring}) ==
        "simulate: iteration 0, step 1, fetch of chunk 0 in tier 1: the newest contents are there already");
  CHECK(one({bring, at(1, drop, 0, 0, 0)}) ==
        "simulate: iteration 0, step 1, drop of chunk 0 in tier 0: the program holds it");
  CHECK(one({bring, at(1, write_back, 0, 0, 1)}) ==
        "simulate: iteration 0, step 1, write_back of chunk 0 in tier 0: the program holds it");
  CHECK(one({bring, at(2, drop, 0, 0, 0)}) ==
        "simulate: iteration 0, step 1, drop of chunk 0 in tier 0: no other tier has the newest contents");
  CHECK(
      one({bring, at(2, fetch, 1, 1, 0)}) ==
      "simulate: iteration 0, step 1, fetch of chunk 1 in tier 1: it waits for memory for ever, and event 2 "
      "for it");
  CHECK(one({bring, at(2, allocate, 1, 0, 0)}) ==
        "simulate: iteration 0, step 1, allocate of chunk 1 in tier 0: no space, and none that will be free");
  CHECK(one({at(0, drop, 0, 1, 1)}) ==
        "simulate: iteration 0, step 0, drop of chunk 0 in tier 1: the last tier keeps its copies");
  CHECK(one({at(0, fetch, 0, 0, 0)}) ==
        "simulate: iteration 0, step 0, fetch of chunk 0 in tier 0: no transfer between these tiers is "
        "possible");
  CHECK(one({at(0, fetch, 7, 1, 0)}) ==
        "simulate: iteration 0, step 0, fetch of chunk 7 in tier 1: there is no such chunk");
  CHECK(one({bring, at(2, write_back, 0, 0, 1), at(2, drop, 0, 0, 0), at(2, fetch, 1, 1, 0),
             at(1, drop, 1, 0, 0)}) ==
        "simulate: iteration 0, step 4, drop of chunk 1 in tier 0: it is out of order; steps are sorted by "
        "event and "
        "moment");
  CHECK(one({bring, at(2, write_back, 0, 0, 1), at(2, drop, 0, 0, 0), at(2, fetch, 1, 1, 0)}) ==
        "simulate: iteration 0, its chunks end in other tiers than the plan's start says");
  auto other = by_hand(trace, {bring});
  other.trace_fingerprint ^= 1;
  CHECK(
      why(trace, other) ==
      "simulate: the plan was made for another trace, of 4 events and 2 chunks; make a plan for this trace");
}

TEST_CASE("a step waits for memory that a later step frees") {
  using enum plan_operation;
  const auto trace = two_by_turns();
  // The fetch of chunk 1 is issued while chunk 0 is leased, and starts when that has gone.
  const auto plan = by_hand(trace, {at(0, fetch, 0, 1, 0), at(1, fetch, 1, 1, 0), at(2, write_back, 0, 0, 1),
                                    at(2, drop, 0, 0, 0), at(4, write_back, 1, 0, 1), at(4, drop, 1, 0, 0)});
  const auto run = simulate(trace, plan, 1);
  CHECK(run.iterations[0].iteration_ns == 4'000);
  // Asked for at 1000, started at 2500: with room it would have come at 2000, and the program waited from
  // 1500.
  CHECK(run.iterations[0].stalls[stall_cause::budget] == 1'500);
  CHECK(run.most_bytes[0] == 1'000);
}
