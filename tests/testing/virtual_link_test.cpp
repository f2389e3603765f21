#include <llmmem/testing/virtual_link.hpp>

#include <doctest/doctest.h>

#include "support/seeds.hpp"

#include <algorithm>
#include <cstdint>
#include <random>

using namespace llmmem;
using llmmem_tests::seeds;
using namespace llmmem::testing;

static_assert(transfer_ns({.bytes_per_second = 1'000'000'000}, 4096) == 4096);
static_assert(transfer_ns({.bytes_per_second = 3}, 1) == 333'333'334);
static_assert(transfer_ns({.bytes_per_second = 25'000'000'000}, 1) == 1);
static_assert(transfer_ns({.bytes_per_second = 25'000'000'000}, 0) == 0);
static_assert(transfer_ns({.bytes_per_second = virtual_link::max_bytes_per_second}, max_bytes) ==
              8'000'000'000);

TEST_CASE("copies end at max(now, link free, after) + latency + bytes / bandwidth") {
  __extension__ using wide = unsigned __int128;
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const link_model model{.bytes_per_second = 1 + random() % (std::uint64_t{1} << (1 + random() % 60)),
                           .latency_ns = random() % 10'000};
    virtual_link link(model);
    std::uint64_t free_at = 0;
    std::uint64_t busy = 0;
    for (int copy = 0; copy < 50; ++copy) {
      const std::uint64_t ready = random() % 1'000'000'000;
      const std::uint64_t bytes =
          random() % std::min<std::uint64_t>(model.bytes_per_second * 4, std::uint64_t{1} << 62);
      const std::uint64_t start = std::max(ready, free_at);
      const wide product = static_cast<wide>(bytes) * 1'000'000'000;
      const auto ns =
          static_cast<std::uint64_t>((product + model.bytes_per_second - 1) / model.bytes_per_second);
      free_at = start + model.latency_ns + ns;
      busy += model.latency_ns + ns;
      const auto taken = link.schedule({ready}, bytes);
      REQUIRE(taken.start.ns == start);
      REQUIRE(taken.finish.ns == free_at);
      REQUIRE(link.free_at().ns == free_at);
      REQUIRE(link.busy_ns() == busy);
    }
  }
}

TEST_CASE("a link without bandwidth, or with too much to compute with, is refused") {
  CHECK_THROWS_WITH_AS(virtual_link(link_model{}),
                       "virtual link: a bandwidth of 0 bytes per second; it must be 1 to 2^60",
                       argument_error);
  CHECK_THROWS_WITH_AS(
      virtual_link(link_model{.bytes_per_second = virtual_link::max_bytes_per_second + 1}),
      "virtual link: a bandwidth of 1152921504606846977 bytes per second; it must be 1 to 2^60",
      argument_error);
}

TEST_CASE("a copy past the largest time is refused and leaves the link as it was") {
  virtual_link link(link_model{.bytes_per_second = 1});
  CHECK_THROWS_WITH_AS(static_cast<void>(link.schedule({}, max_bytes)),
                       "link: 9223372036854775807 bytes at 1 bytes per second take more than 2^64 - 1 ns",
                       length_error);
  CHECK_THROWS_AS(static_cast<void>(link.schedule({~std::uint64_t{0}}, 1)), length_error);
  CHECK(link.free_at().ns == 0);
  CHECK(link.busy_ns() == 0);
}
