#include <llmmem/training/recompute_plan.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

/// Lives through both passes, byte by byte.
std::uint64_t lived_peak(const std::vector<record_choices>& records, const std::vector<std::uint32_t>& ways) {
  std::uint64_t now = 0;
  std::uint64_t most = 0;
  const auto take = [&](std::uint64_t bytes) {
    now += bytes;
    most = std::max(most, now);
  };
  const auto kept = [&](std::size_t i) { return records[i].ways[ways[i]].kept_bytes; };
  for (std::size_t i = 0; i < records.size(); ++i) {
    take(records[i].bytes);
    if (kept(i) == records[i].bytes) continue;
    take(kept(i));
    now -= records[i].bytes;
  }
  for (std::size_t i = records.size(); i-- > 0;) {
    if (kept(i) != records[i].bytes) {
      take(records[i].bytes);
      now -= kept(i);
    }
    now -= records[i].bytes;
  }
  CHECK(now == 0);
  return most;
}

std::vector<record_choices> random_records(random_numbers& random) {
  std::vector<record_choices> records(1 + random.below(6U));
  for (record_choices& each : records) {
    each.bytes = 1 + random.below(40U);
    if (!random.once_in(4)) each.ways.push_back({each.bytes, 0});
    const std::uint32_t more = random.below(3U) + (each.ways.empty() ? 1 : 0);
    for (std::uint32_t i = 0; i < more; ++i)
      each.ways.push_back({random.below(static_cast<std::uint32_t>(each.bytes) + 1), 1 + random.below(30U)});
  }
  return records;
}

/// Calls `visit` with every choice of ways.
template <class Visit>
void each_choice(const std::vector<record_choices>& records, Visit visit) {
  std::vector<std::uint32_t> ways(records.size());
  for (;;) {
    visit(ways);
    std::size_t i = 0;
    while (i < ways.size() && ++ways[i] == records[i].ways.size())
      ways[i++] = 0;
    if (i == ways.size()) return;
  }
}

}  // namespace

TEST_SUITE("recompute_plan") {
  TEST_CASE("the plan's cost is the minimum of all choices within the budget, for every budget") {
    for (const auto seed : seeds(60)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const auto records = random_records(random);
      std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
      each_choice(records, [&](const std::vector<std::uint32_t>& ways) {
        const std::uint64_t peak = peak_of(records, ways);
        CHECK(peak == lived_peak(records, ways));
        least = std::min(least, peak);
      });
      CHECK(min_recompute_budget(records) == least);
      std::uint64_t before = std::numeric_limits<std::uint64_t>::max();
      for (std::uint64_t budget = least; budget < least + 60; budget += 1 + random.below(9U)) {
        std::uint64_t best = std::numeric_limits<std::uint64_t>::max();
        each_choice(records, [&](const std::vector<std::uint32_t>& ways) {
          if (peak_of(records, ways) > budget) return;
          std::uint64_t cost = 0;
          for (std::size_t i = 0; i < ways.size(); ++i)
            cost += records[i].ways[ways[i]].rebuild_ns;
          best = std::min(best, cost);
        });
        const recompute_plan plan = plan_recompute(records, budget);
        CHECK(plan.rebuild_ns == best);
        CHECK(plan.peak_bytes == peak_of(records, plan.ways));
        CHECK(plan.peak_bytes <= budget);
        CHECK(plan.rebuild_ns <= before);  // a larger budget never costs more
        before = plan.rebuild_ns;
      }
    }
  }

  TEST_CASE("as many of a hundred equal layers are kept as the budget allows") {
    std::vector<record_choices> records(100, {.bytes = 34, .ways = {{34, 0}, {2, 100}, {24, 7}}});
    const recompute_plan plan = plan_recompute(records, 34 * 60);
    CHECK(plan.peak_bytes <= 34 * 60);
    CHECK(plan.rebuild_ns < 40 * 100);
    CHECK(plan_recompute(records, 34 * 100).rebuild_ns == 0);
    CHECK(plan_recompute({}, 0).ways.empty());
  }

  TEST_CASE("an impossible budget is refused with a possible one") {
    const std::vector<record_choices> records{{.bytes = 10, .ways = {{10, 0}, {4, 1}}},
                                              {.bytes = 10, .ways = {{10, 0}, {2, 1}}}};
    CHECK_THROWS_WITH_AS(
        static_cast<void>(plan_recompute(records, 13)),
        "plan_recompute: a budget of 13 bytes of activations at once; the smallest that works is 14",
        argument_error);
    CHECK(plan_recompute(records, 14).ways == std::vector<std::uint32_t>{1, 0});
    const std::vector<record_choices> none{{.bytes = 10, .ways = {}}};
    CHECK_THROWS_WITH_AS(static_cast<void>(plan_recompute(none, 100)),
                         "plan_recompute: record 0 has no way to keep it; give one", argument_error);
    const std::vector<record_choices> more{{.bytes = 10, .ways = {{11, 0}}}};
    CHECK_THROWS_WITH_AS(static_cast<void>(min_recompute_budget(more)),
                         "plan_recompute: record 0 of 10 bytes cannot keep 11", argument_error);
    const std::vector<record_choices> dear(2, {.bytes = 1, .ways = {{1, max_bytes}}});
    CHECK_THROWS_AS(static_cast<void>(plan_recompute(dear, 100)), length_error);
  }
}
