#include <llmmem/space/fence.hpp>

#include <doctest/doctest.h>

#include "support/seeds.hpp"

#include <cstdint>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

using namespace llmmem;
using llmmem_tests::seeds;

static_assert(std::is_trivially_copyable_v<host_fence>);
static_assert(sizeof(host_fence) == 16);
static_assert(!fence<int>);

TEST_CASE("a default-constructed fence has passed") {
  const host_fence nothing;
  CHECK(nothing.ready());
  nothing.wait();
  CHECK(all_ready(std::span<const host_fence>{}));
}

TEST_CASE("a fence and all its copies pass when its point does") {
  host_timeline timeline;
  const host_fence f = timeline.issue();
  const host_fence same = f;
  CHECK_FALSE(f.ready());
  REQUIRE(timeline.pass(f));
  CHECK(f.ready());
  CHECK(same.ready());
  CHECK(same == f);
  f.wait();
}

TEST_CASE("a timeline behaves as a count of issued points and the highest that passed") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    host_timeline timeline;
    std::vector<host_fence> fences;
    std::uint64_t highest = 0;  // the oracle: points 1 to `highest` have passed
    for (int step = 0; step < 100; ++step) {
      if (fences.empty() || random() % 2 == 0) {
        fences.push_back(timeline.issue());
      } else {
        const std::uint64_t point = 1 + random() % fences.size();
        REQUIRE(timeline.pass(fences[point - 1]));
        if (point > highest) highest = point;
      }
      REQUIRE(timeline.issued() == fences.size());
      REQUIRE(timeline.passed() == highest);
      for (std::uint64_t point = 1; point <= fences.size(); ++point) {
        REQUIRE(fences[point - 1].ready() == (point <= highest));
      }
      REQUIRE(all_ready(std::span<const host_fence>(fences)) == (highest == fences.size()));
    }
  }
}

TEST_CASE("passing no point or a passed point changes nothing, and another timeline's fence is refused") {
  host_timeline ours;
  host_timeline theirs;
  const host_fence f = theirs.issue();
  CHECK(ours.pass(host_fence{}));
  const auto refused = ours.pass(f);
  CHECK(refused.error().message() ==
        "host_timeline: the handle (slot 0) belongs to another object; use it with the object that made it");
  CHECK_THROWS_AS(refused.value(), handle_error);
  CHECK_FALSE(f.ready());
  CHECK(ours.passed() == 0);
  REQUIRE(theirs.pass(f));
  REQUIRE(theirs.pass(f));
  CHECK(theirs.passed() == 1);
}
