#include <llmmem/testing/virtual_clock.hpp>

#include <doctest/doctest.h>

#include "support/seeds.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

using namespace llmmem;
using llmmem_tests::seeds;
using namespace llmmem::testing;

namespace {

struct journal {
  virtual_clock* clock = nullptr;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> lines;  // time, tag
  static void write(void* self, std::uint64_t tag) noexcept {
    auto* j = static_cast<journal*>(self);
    j->lines.emplace_back(j->clock->now().ns, tag);
  }
};

}  // namespace

TEST_CASE("events run in the order of a stable sort by time") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    virtual_clock clock;
    journal seen{&clock, {}};
    std::vector<std::pair<std::uint64_t, std::uint64_t>> oracle;
    for (std::uint64_t tag = 0; tag < 50; ++tag) {
      const std::uint64_t time = random() % 20;
      clock.at({time}, &journal::write, &seen, tag);
      oracle.emplace_back(time, tag);
    }
    std::sort(oracle.begin(), oracle.end());  // tags rise, so this is the stable order
    while (clock.now().ns < 20)
      clock.advance(1 + random() % 7);
    REQUIRE(seen.lines == oracle);
    REQUIRE(clock.pending() == 0);
  }
}

TEST_CASE("time never goes back, and past events run at the next advance") {
  virtual_clock clock;
  clock.advance_to({10});
  clock.advance_to({5});
  CHECK(clock.now() == virtual_time{10});
  journal seen{&clock, {}};
  clock.at({3}, &journal::write, &seen, 7);
  clock.advance(0);
  REQUIRE(seen.lines.size() == 1);
  CHECK(seen.lines[0] == std::pair<std::uint64_t, std::uint64_t>{10, 7});
}

TEST_CASE("a destroyed owner removes its events") {
  virtual_clock clock;
  journal gone{&clock, {}};
  journal stays{&clock, {}};
  clock.at({1}, &journal::write, &gone, 0);
  clock.at({1}, &journal::write, &stays, 1);
  clock.forget(&gone);
  clock.advance(1);
  CHECK(gone.lines.empty());
  CHECK(stays.lines.size() == 1);
}

TEST_CASE("a virtual fence passes when the clock reaches its time, and waiting takes the clock there") {
  virtual_clock clock;
  const virtual_fence f(clock, {100});
  const virtual_fence earlier(clock, {50});
  CHECK(virtual_fence{}.ready());
  virtual_fence{}.wait();
  CHECK_FALSE(f.ready());
  clock.advance(99);
  CHECK(earlier.ready());
  CHECK_FALSE(f.ready());
  f.wait();
  CHECK(f.ready());
  CHECK(clock.now() == virtual_time{100});
  earlier.wait();
  CHECK(clock.now() == virtual_time{100});
}

TEST_CASE("time past 2^64 - 1 nanoseconds is refused, not wrapped") {
  virtual_clock clock;
  clock.advance(10);
  CHECK_THROWS_WITH_AS(
      clock.advance(~std::uint64_t{0}),
      "virtual clock: 10 + 18446744073709551615 ns passes the end of time; check the bandwidth and "
      "the byte count",
      length_error);
  CHECK(clock.now() == virtual_time{10});
}
