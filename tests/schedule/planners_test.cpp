#include <llmmem/schedule/bounds.hpp>
#include <llmmem/schedule/planners.hpp>
#include <llmmem/schedule/simulate.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>

#include "support/random.hpp"
#include "support/schedule_world.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr link_model thousand_a_us{.bytes_per_second = 1'000'000'000};

schedule_machine over_one_link(std::uint64_t budget, link_model link = thousand_a_us) {
  return {.budgets = {budget}, .links = {link}};
}

}  // namespace

TEST_CASE("next use by bytes fetches exactly what brute force needs, for equal clean sizes") {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto trace = random_trace(random, {.chunks = 2 + random.below(std::uint32_t{5}),
                                             .accesses = 4 + random.below(std::uint32_t{14}),
                                             .overlaps = random.once_in(2)});
    const std::uint64_t slots = trace.most_leased_bytes() / 1'000 + random.below(std::uint64_t{3});
    const auto machine = over_one_link(slots * 1'000);
    const auto plan = next_use{plan_objective::bytes, plan_span::once}(trace, machine);
    least_fetched oracle(trace, slots * 1'000);
    REQUIRE(plan.first.forecast.bytes() == oracle.once());
    REQUIRE(plan.first.bound.bytes() == oracle.once());
  }
}

TEST_CASE("the cyclic plan by bytes against brute force") {
  int worse = 0;
  int all = 0;
  int loose = 0;
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto trace = random_trace(random, {.chunks = 2 + random.below(std::uint32_t{5}),
                                             .accesses = 4 + random.below(std::uint32_t{14}),
                                             .overlaps = random.once_in(2)});
    const std::uint64_t slots = trace.most_leased_bytes() / 1'000 + random.below(std::uint64_t{3});
    const auto machine = over_one_link(slots * 1'000);
    const auto plan = next_use{plan_objective::bytes}(trace, machine);
    least_fetched oracle(trace, slots * 1'000);
    const auto best = oracle.cyclic();
    REQUIRE(plan.steady.forecast.bytes() >= best);
    REQUIRE(plan.steady.bound.bytes() <= best);
    ++all;
    worse += plan.steady.forecast.bytes() > best;
    loose += plan.steady.bound.bytes() < best;
  }
  MESSAGE("worse " << worse << " loose " << loose << " of " << all);
}

TEST_CASE("time against brute force") {
  int worse = 0;
  int all = 0;
  int loose = 0;
  double ratio = 0;
  double most = 1;
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto trace = random_trace(random, {.chunks = 2 + random.below(std::uint32_t{4}),
                                             .accesses = 4 + random.below(std::uint32_t{7}),
                                             .overlaps = random.once_in(2)});
    const std::uint64_t slots = trace.most_leased_bytes() / 1'000 + random.below(std::uint64_t{3});
    const auto machine = over_one_link(slots * 1'000);
    const auto plan = next_use{plan_objective::time, plan_span::once}(trace, machine);
    least_time oracle(trace, machine);
    const auto best = oracle.once();
    REQUIRE(plan.first.forecast.iteration_ns >= best);
    REQUIRE(plan.first.bound.stall_ns <= best - trace.compute_ns());
    ++all;
    worse += plan.first.forecast.iteration_ns > best;
    loose += plan.first.bound.stall_ns < best - trace.compute_ns();
    if (best > 0) {
      double r = double(plan.first.forecast.iteration_ns) / double(best);
      ratio += r;
      most = std::max(most, r);
    }
  }
  MESSAGE("worse " << worse << " loose " << loose << " of " << all << " mean ratio " << ratio / all
                   << " most " << most);
}
