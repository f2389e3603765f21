#include <llmmem/sharding/staleness_clock.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

TEST_CASE("a worker starts an iteration when all have finished those before the bound") {
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint32_t workers = 1 + random.below(6U);
    const std::uint64_t bound =
        random.once_in(5) ? staleness_clock::unbounded : random.below(std::uint64_t{4});
    staleness_clock clock(rank_count{workers}, bound);
    std::vector<std::optional<std::uint64_t>> finished(workers, 0);  // none: retired
    std::uint64_t widest = 0;
    for (int event = 0; event < 300; ++event) {
      const std::uint32_t w = random.below(workers);
      if (!finished[w]) continue;
      std::uint64_t slowest = *finished[w];
      for (const auto& each : finished) {
        if (each) slowest = std::min(slowest, *each);
      }
      REQUIRE(clock.slowest() == slowest);
      REQUIRE(clock.finished(rank_id{w}) == *finished[w]);
      for (std::uint64_t t = 0; t < *finished[w] + 3; ++t) {
        bool may = t == *finished[w];
        // By the definition: iterations before t - bound are finished by all.
        for (std::uint64_t before = 0; bound <= t && before + bound < t; ++before) {
          for (const auto& each : finished)
            may = may && (!each || *each > before);
        }
        REQUIRE(clock.may_start(rank_id{w}, t) == may);
      }
      if (random.once_in(150)) {
        clock.retire(rank_id{w});
        finished[w].reset();
        continue;
      }
      if (!clock.may_start(rank_id{w}, *finished[w])) continue;
      clock.finish(rank_id{w});
      ++*finished[w];
      widest = std::max(widest, *finished[w] - slowest);
    }
    // One runs ahead by the bound, and finishes one more.
    if (bound != staleness_clock::unbounded) REQUIRE(widest <= bound + 1);
  }
}

TEST_CASE("a bound of 0 is lock step, and a bound of 1 is one iteration ahead") {
  staleness_clock strict(rank_count{2}, 0);
  CHECK(strict.may_start(rank_id{0}, 0));
  strict.finish(rank_id{0});
  CHECK(!strict.may_start(rank_id{0}, 1));
  strict.finish(rank_id{1});
  CHECK(strict.may_start(rank_id{0}, 1));
  staleness_clock loose(rank_count{2}, 1);
  loose.finish(rank_id{0});
  CHECK(loose.may_start(rank_id{0}, 1));
  loose.finish(rank_id{0});
  CHECK(!loose.may_start(rank_id{0}, 2));
  CHECK(!loose.may_start(rank_id{0}, 1));  // it has been
  loose.retire(rank_id{1});
  CHECK(loose.may_start(rank_id{0}, 2));
  CHECK(loose.bound() == 1);
}

TEST_CASE("a clock without workers is refused") {
  CHECK_THROWS_WITH_AS(staleness_clock(rank_count{0}, 1), "staleness_clock: 0 workers; there is at least one",
                       argument_error);
}
