#include <llmmem/eviction/detail/frequency_sketch.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <map>

#include "support/counting_metadata.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::detail::frequency_sketch;

TEST_CASE("the sketch may overestimate until it ages, and never counts past 15") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t capacity = 1 + seed % 300;
    frequency_sketch sketch(slot_count{capacity}, {}, "sketch");
    std::map<std::uint64_t, std::uint64_t> exact;
    // No word is halved before as many additions as words are due one of.
    const std::uint64_t ageless = (10 * capacity - 1) / std::max<std::uint64_t>(8, capacity * 2);
    for (std::uint64_t i = 0; i < ageless; ++i) {
      const std::uint64_t content = 1 + random.below(capacity);
      sketch.add(content);
      ++exact[content];
      for (const auto& [each, uses] : exact)
        REQUIRE(sketch.estimate(each) >= std::min(uses, frequency_sketch::most));
    }
    for (int i = 0; i < 100; ++i) {
      sketch.add(1);
      REQUIRE(sketch.estimate(1) <= frequency_sketch::most);
    }
    CHECK(sketch.estimate(1) >= frequency_sketch::most / 2);
  }
}

TEST_CASE("the sketch distinguishes frequent from rare") {
  frequency_sketch sketch(slot_count{1000}, {}, "sketch");
  for (int round = 0; round < 8; ++round) {
    for (std::uint64_t often = 1; often <= 100; ++often)
      sketch.add(often);
  }
  for (std::uint64_t seldom = 101; seldom <= 1000; ++seldom)
    sketch.add(seldom);
  std::uint64_t mistaken = 0;
  for (std::uint64_t seldom = 101; seldom <= 1000; ++seldom) {
    if (sketch.estimate(seldom) >= 7) ++mistaken;
  }
  CHECK(mistaken <= 9);
}

TEST_CASE("contents that are no longer used are forgotten within four periods of ageing") {
  frequency_sketch sketch(slot_count{64}, {}, "sketch");
  for (int i = 0; i < 15; ++i)
    sketch.add(7);
  for (std::uint64_t i = 0; i < 4 * 640; ++i)
    sketch.add(i % 2 == 0 ? 100 : 200);
  CHECK(sketch.estimate(7) <= 1);
}

TEST_CASE("unnamed contents are not counted") {
  frequency_sketch sketch(slot_count{8}, {}, "sketch");
  sketch.add(0);
  CHECK(sketch.estimate(0) == 0);
  CHECK(sketch.estimate(1) == 0);
}

TEST_CASE("the sketch takes at least a cache line and at most 16 bytes per slot") {
  for (const std::uint64_t capacity : std::initializer_list<std::uint64_t>{1, 8, 9, 1000, 1024, 1025}) {
    const std::size_t bytes = frequency_sketch(slot_count{capacity}, {}, "sketch").bytes();
    CHECK(bytes >= std::max<std::uint64_t>(64, capacity * 8));
    CHECK(bytes <= std::max<std::uint64_t>(64, capacity * 16));
  }
  CHECK(fail_each_allocation(
            [](const metadata_source& source) { frequency_sketch(slot_count{5}, source, "sketch"); }) == 1);
}
