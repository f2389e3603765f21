/// The clock of a socket endpoint, driven by hand.
#include <llmmem/comm/detail/listening_clock.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem_tests;
using llmmem::detail::listening_clock;
using llmmem::detail::timer_ns;

namespace {
constexpr std::uint64_t clock_ms = 1'000'000;
}  // namespace

TEST_CASE("time counts as listened only within calls, and at most as long as each may have waited") {
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    random_numbers random(seed);
    listening_clock clock;
    std::uint64_t now = 1'000;
    std::uint64_t listened = 0;
    for (int call = 0; call < 50; ++call) {
      now += random.below(1'000'000U);  // computed in between
      clock.begin(now);
      for (std::uint32_t look = random.below(5U); look != 0; --look) {
        const std::uint64_t passes = random.below(1'000U);
        const std::uint64_t most = random.below(1'000U);
        now += passes;
        listened += std::min(passes, most);
        clock.look(now, most);
      }
      REQUIRE(clock.now() == now);
      REQUIRE(clock.listened() == listened);
    }
  }
}

TEST_CASE("the next timer is the earliest requested one, at most 50 ms away") {
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    random_numbers random(seed);
    listening_clock clock;
    CHECK(clock.is_due());  // the first timers run at once
    std::uint64_t now = 5;
    for (int run = 0; run < 50; ++run) {
      clock.begin(now);
      clock.restart_timers();
      std::uint64_t earliest = now + timer_ns;
      for (std::uint32_t i = random.below(4U); i != 0; --i) {
        const std::uint64_t at = now + random.below(std::uint64_t{2} * timer_ns);
        clock.due(at);
        earliest = std::min(earliest, at);
      }
      REQUIRE(clock.wait_until(~std::uint64_t{0}) == earliest);
      REQUIRE(clock.wait_until(now) == now);
      clock.begin(earliest - 1);
      REQUIRE_FALSE(clock.is_due());
      clock.begin(earliest);
      REQUIRE(clock.is_due());
      now = earliest + random.below(100U);
    }
  }
}

TEST_CASE("a timer that is due at once is reported regardless of earlier timers") {
  listening_clock clock;
  clock.begin(1'000);
  clock.restart_timers();
  CHECK_FALSE(clock.is_due());
  clock.due_at_once();
  CHECK(clock.is_due());
  CHECK(clock.wait_until(2'000) == 0);
}

TEST_CASE("a clock without timers is never due and leaves waits as they are") {
  listening_clock clock(false);
  clock.begin(~std::uint64_t{0} - 1);
  CHECK_FALSE(clock.is_due());
  CHECK(clock.wait_until(77) == 77);
}

TEST_CASE("a wait may spin until its time, the next timer, or 1 ms after the last check of all descriptors") {
  listening_clock clock;
  clock.begin(10 * clock_ms);
  clock.restart_timers();
  CHECK(clock.is_look_due());
  CHECK_FALSE(clock.may_spin(20 * clock_ms));
  clock.note_looked();
  CHECK_FALSE(clock.is_look_due());
  CHECK(clock.may_spin(20 * clock_ms));
  CHECK_FALSE(clock.may_spin(10 * clock_ms));
  clock.look(11 * clock_ms, clock_ms);
  CHECK(clock.may_spin(20 * clock_ms));
  clock.look(11 * clock_ms + 1, clock_ms);
  CHECK(clock.is_look_due());
  CHECK_FALSE(clock.may_spin(20 * clock_ms));
  clock.note_looked();
  clock.due(11 * clock_ms + 1);
  CHECK(clock.is_look_due());
  CHECK_FALSE(clock.may_spin(20 * clock_ms));
}
