/// When a seat is called next, against the definition of a doubling back-off.
#include <llmmem/comm/detail/call_schedule.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using detail::call_schedule;
using detail::listening_clock;

namespace {

constexpr std::uint32_t seats = 4;
constexpr std::uint64_t first = 5;
constexpr std::uint64_t last = 70;

/// The definition: the n-th failure in a row is followed by a pause of `first` times 2 to the n - 1.
struct by_failures {
  std::uint64_t at = 0;
  std::uint32_t failures = 0;

  void failed(std::uint64_t now) {
    at = now + std::min(last, first << failures);
    failures = std::min(failures + 1, 20U);
  }
};

}  // namespace

TEST_CASE("a schedule calls a seat at once, and after each failure when the pause has doubled") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    listening_clock clock;
    call_schedule calls(clock, seats, first, last);
    std::array<by_failures, seats> oracle{};
    std::uint64_t now = 1;
    for (int i = 0; i < 200; ++i) {
      now += random.below(30U);
      clock.begin(now);
      clock.restart_timers();
      const seat_id seat{static_cast<std::uint32_t>(random.below(seats))};
      by_failures& expected = oracle[to_index(seat)];
      switch (random.below(6U)) {
        case 0:
          calls.seat_freed(seat);
          expected = {now + first, 0};
          CHECK(clock.wait_until(now + 1000) <= now + first);
          break;
        case 1:
          calls.call_now(seat);
          expected = {now, 0};
          CHECK(clock.is_due());
          break;
        case 2:
          calls.connected(seat);
          expected.failures = 0;
          break;
        default:
          if (!calls.is_due(seat)) break;
          calls.failed(seat);
          expected.failed(now);
      }
      for (std::uint32_t each = 0; each < seats; ++each) {
        REQUIRE(calls.is_due(seat_id{each}) == (now >= oracle[each].at));
        // A wait that the clock ends is over in time for the call.
        if (now < oracle[each].at) REQUIRE(clock.wait_until(~std::uint64_t{0}) <= oracle[each].at);
      }
    }
  }
}

TEST_CASE("the pause grows to its limit and stays there") {
  listening_clock clock;
  call_schedule calls(clock, 1, first, last);
  std::uint64_t now = 100;
  for (const std::uint64_t pause : {5U, 10U, 20U, 40U, 70U, 70U, 70U}) {
    clock.begin(now);
    REQUIRE(calls.is_due(seat_id{0}));
    calls.failed(seat_id{0});
    clock.begin(now + pause - 1);
    CHECK_FALSE(calls.is_due(seat_id{0}));
    now += pause;
  }
}
