#include <llmmem/transfer/stripe_weights.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <numeric>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

[[nodiscard]] int sum_of(const stripe_shares& shares) {
  return std::accumulate(shares.begin(), shares.end(), 0);
}

}  // namespace

TEST_CASE("a layout numbers the stripes of each member from 0 on, and no two share a place") {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    stripe_shares shares{};
    for (std::uint32_t left = stripe_cycle; left != 0; --left)
      ++shares[random.below(1 + seed % max_stripe_members)];
    const stripe_layout layout(shares);
    std::array<std::uint64_t, max_stripe_members> dealt{};
    for (std::uint64_t stripe = 0; stripe < 200; ++stripe) {
      for (std::uint32_t m = 0; m < max_stripe_members; ++m) {
        REQUIRE(layout.count(m, stripe) == dealt[m]);
        // As evenly spread as whole stripes can be.
        REQUIRE(std::abs(static_cast<double>(dealt[m]) - static_cast<double>(stripe * shares[m]) / 32) < 2.0);
      }
      const auto place = layout.at(stripe);
      REQUIRE(place.index == dealt[place.member]++);
    }
  }
}

TEST_CASE("shares follow the speeds, to 1/32") {
  stripe_weights weights(3);
  CHECK(weights.shares() == stripe_shares{11, 11, 10});  // nothing is known
  weights.completed(0, 3'000, 1'000);
  CHECK(weights.shares() == stripe_shares{11, 11, 10});  // the others count as fast as the one that is known
  weights.completed(1, 3'000, 1'000);
  weights.completed(2, 2'000, 1'000);
  CHECK(weights.shares() == stripe_shares{12, 12, 8});
  CHECK(weights.speed(2) == doctest::Approx(2));
  CHECK(weights.shares(0b001) == stripe_shares{0, 19, 13});
  CHECK(weights.shares(0b011) == stripe_shares{0, 0, 32});
  weights.completed(0, 0, 5);  // tells nothing
  weights.completed(0, 5, 0);
  CHECK(weights.speed(0) == doctest::Approx(3));
}

TEST_CASE("a device that becomes slow loses its share within a few measurements, and regains it later") {
  stripe_weights weights(2);
  for (int i = 0; i < 10; ++i) {
    weights.completed(0, 1000, 100);
    weights.completed(1, 1000, 100);
  }
  CHECK(weights.shares() == stripe_shares{16, 16});
  for (int i = 0; i < 20; ++i)
    weights.completed(1, 1000, 100'000);
  CHECK(weights.shares() == stripe_shares{32, 0});
  // It is looked at now and then.
  int probes = 0;
  for (std::uint32_t i = 0; i < 2 * stripe_weights::probe_every; ++i)
    probes += weights.shares()[1];
  CHECK(probes == 2);
  for (int i = 0; i < 20; ++i)
    weights.completed(1, 1000, 100);
  CHECK(weights.shares() == stripe_shares{16, 16});
}

TEST_CASE("shares always add up to the cycle, regardless of the speeds") {
  for (const auto seed : seeds(500)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto members = 1 + random.below(max_stripe_members);
    stripe_weights weights(members);
    for (int turn = 0; turn < 40; ++turn) {
      weights.completed(random.below(members), random.next() >> random.below(60U),
                        random.next() >> random.below(60U));
      const std::uint32_t left_out = random.below(1U << members) & ~(1U << random.below(members));
      const stripe_shares shares = weights.shares(left_out);
      REQUIRE(sum_of(shares) == static_cast<int>(stripe_cycle));
      for (std::uint32_t m = 0; m < max_stripe_members; ++m)
        REQUIRE((shares[m] == 0 || (m < members && (left_out >> m & 1U) == 0)));
    }
  }
}
