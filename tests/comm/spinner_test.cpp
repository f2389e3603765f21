#include <llmmem/comm/detail/spinner.hpp>

#include <doctest/doctest.h>

#include <cstdint>

namespace {

using llmmem::detail::spinner;

constexpr std::uint64_t most = 20'000;
constexpr std::uint64_t look = 1'000;

/// One wait for what comes `after_ns` from its beginning: how long it was looked for.
std::uint64_t wait_for(spinner& spin, std::uint64_t& now, std::uint64_t after_ns) {
  const std::uint64_t began = now;
  spin.begin(now, most);
  while (now - began < after_ns && spin.goes_on(now))
    now += look;
  const std::uint64_t looked = now - began;
  if (now < began + after_ns) now = began + after_ns;
  spin.end(now);
  return looked;
}

}  // namespace

TEST_SUITE("spinner") {
  TEST_CASE("a spinner spins in each wait if results come soon") {
    spinner spin;
    std::uint64_t now = 5;
    for (int i = 0; i < 100; ++i)
      CHECK(wait_for(spin, now, 10'000) == 10'000);
  }

  TEST_CASE("a wait spins at most as long as allowed") {
    spinner spin;
    std::uint64_t now = 5;
    CHECK(wait_for(spin, now, 500'000) == most);
  }

  TEST_CASE("if spinning finds nothing, 1 of 1024 waits spins") {
    spinner spin;
    std::uint64_t now = 5;
    for (int i = 0; i < 4096; ++i)
      static_cast<void>(wait_for(spin, now, 100'000));
    int looked = 0;
    for (int i = 0; i < 10 * 1025; ++i)
      looked += wait_for(spin, now, 100'000) != 0 ? 1 : 0;
    CHECK(looked == 10);
  }

  TEST_CASE("each success makes the pause after the next miss shorter") {
    spinner spin;
    std::uint64_t now = 5;
    const auto waits_until_it_looks = [&](std::uint64_t after_ns) {
      int waits = 1;
      while (wait_for(spin, now, after_ns) == 0)
        ++waits;
      return waits;
    };
    CHECK(waits_until_it_looks(100'000) == 1);
    CHECK(waits_until_it_looks(100'000) == 3);
    CHECK(waits_until_it_looks(100'000) == 5);
    CHECK(waits_until_it_looks(1'000) == 9);
    CHECK(waits_until_it_looks(1'000) == 1);
    CHECK(waits_until_it_looks(1'000) == 1);
    CHECK(waits_until_it_looks(100'000) == 1);
    CHECK(waits_until_it_looks(100'000) == 3);
  }

  TEST_CASE(
      "a process that gets its core back late stops spinning for 1024 waits, even if its result has "
      "arrived") {
    spinner spin;
    std::uint64_t now = 5;
    spin.begin(now, most);
    REQUIRE(spin.goes_on(now));
    now += spinner::crowded_ns + 1;
    spin.end(now);
    for (int i = 0; i < 1024; ++i)
      REQUIRE(wait_for(spin, now, 1'000) == 0);
    CHECK(wait_for(spin, now, 1'000) != 0);
  }

  TEST_CASE("a wait that has received a part continues to spin") {
    spinner spin;
    std::uint64_t now = 5;
    spin.begin(now, most);
    for (int i = 0; i < 100; ++i) {
      now += most - 1;
      REQUIRE(spin.goes_on(now));
      spin.found_some(now);
    }
    now += most;
    CHECK_FALSE(spin.goes_on(now));
  }

  TEST_CASE("with a spin time of zero no thread spins") {
    spinner spin;
    spin.begin(5, 0);
    CHECK_FALSE(spin.goes_on(5));
  }
}
