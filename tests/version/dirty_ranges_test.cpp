#include <llmmem/version/dirty_ranges.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using intervals = std::vector<byte_interval>;

[[nodiscard]] intervals of(const dirty_ranges& ranges) {
  return {ranges.intervals().begin(), ranges.intervals().end()};
}

/// The runs of a bitmap, with the smallest gaps closed, the first of equals first, until they are few enough.
class bitmap {
 public:
  explicit bitmap(std::size_t size) : set_(size, false) {}

  void add(byte_interval more) {
    for (std::uint64_t i = more.begin; i < more.end; ++i)
      set_[i] = true;
    intervals all = runs();
    while (all.size() > dirty_ranges::capacity) {
      std::size_t best = 0;
      for (std::size_t i = 0; i + 1 < all.size(); ++i) {
        if (all[i + 1].begin - all[i].end < all[best + 1].begin - all[best].end) best = i;
      }
      for (std::uint64_t i = all[best].end; i < all[best + 1].begin; ++i)
        set_[i] = true;
      all = runs();
    }
  }

  [[nodiscard]] intervals runs() const {
    intervals all;
    for (std::uint64_t i = 0; i < set_.size(); ++i) {
      if (!set_[i]) continue;
      if (all.empty() || all.back().end != i) all.push_back({i, i});
      all.back().end = i + 1;
    }
    return all;
  }

  [[nodiscard]] std::uint64_t count() const {
    std::uint64_t sum = 0;
    for (const bool each : set_)
      sum += each ? 1 : 0;
    return sum;
  }

 private:
  std::vector<bool> set_;
};

}  // namespace

TEST_CASE("dirty ranges are the runs of a bitmap; beyond eight runs the smallest gaps are closed") {
  constexpr std::uint64_t size = 400;
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    dirty_ranges ranges;
    bitmap oracle(size);
    const std::uint64_t longest = 1 + random.below(40U);
    for (int step = 0; step < 40; ++step) {
      CAPTURE(step);
      const std::uint64_t begin = random.below(size);
      const std::uint64_t end = std::min(begin + random.below(longest), size);
      ranges.add({begin, end});
      oracle.add({begin, end});
      REQUIRE(of(ranges) == oracle.runs());
      REQUIRE(ranges.bytes() == oracle.count());
      REQUIRE(ranges.empty() == (oracle.count() == 0));
    }
    ranges.clear();
    CHECK(ranges.empty());
    CHECK(ranges.bytes() == 0);
  }
}

TEST_CASE("dirty ranges absorb others without losing a byte") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    dirty_ranges all;
    std::vector<bool> added(300, false);
    for (int set = 0; set < 3; ++set) {
      dirty_ranges more;
      for (int i = 0; i < 6; ++i) {
        const std::uint64_t begin = random.below(290U);
        more.add({begin, begin + random.below(10U)});
      }
      for (const byte_interval& each : more.intervals()) {
        for (std::uint64_t at = each.begin; at < each.end; ++at)
          added[at] = true;
      }
      all.add(more);
    }
    for (const byte_interval& each : all.intervals()) {
      for (std::uint64_t at = each.begin; at < each.end; ++at)
        added[at] = false;
    }
    CHECK(std::find(added.begin(), added.end(), true) == added.end());
  }
}

TEST_CASE("adjacent ranges become one, and an empty or reversed one counts as none") {
  dirty_ranges ranges;
  ranges.add({5, 5});
  ranges.add({7, 3});
  CHECK(ranges.empty());
  ranges.add({10, 20});
  ranges.add({30, 40});
  ranges.add({20, 30});
  CHECK(of(ranges) == intervals{{10, 40}});
  ranges.add({0, 9});
  CHECK(of(ranges) == intervals{{0, 9}, {10, 40}});
}

TEST_CASE("aligned ranges consist of whole units, joined if they touch, up to the end of the bytes") {
  dirty_ranges ranges;
  ranges.add({1, 2});
  ranges.add({64, 65});
  ranges.add({300, 301});
  ranges.add({990, 1000});
  CHECK(of(ranges.aligned(64, 1000)) == intervals{{0, 128}, {256, 320}, {960, 1000}});
  CHECK(of(ranges.aligned(1, 1000)) == of(ranges));
  CHECK(of(ranges.aligned(4096, 1000)) == intervals{{0, 1000}});
  CHECK(of(dirty_ranges{}.aligned(64, 1000)).empty());
}

TEST_CASE("dirty ranges work at compile time") {
  constexpr std::uint64_t bytes = [] {
    dirty_ranges ranges;
    ranges.add({0, 10});
    ranges.add({20, 30});
    return ranges.bytes();
  }();
  static_assert(bytes == 20);
}
