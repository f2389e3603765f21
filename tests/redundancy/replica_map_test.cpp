#include <llmmem/redundancy/replica_map.hpp>

#include <llmmem/redundancy/placement.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

using namespace llmmem;

namespace {

using lists = std::vector<std::vector<rank_id>>;

lists of(const std::vector<std::vector<std::uint32_t>>& numbers) {
  lists all;
  for (const auto& list : numbers) {
    all.emplace_back();
    for (const std::uint32_t number : list)
      all.back().push_back(rank_id{number});
  }
  return all;
}

double choose(double n, double k) {
  double value = 1;
  for (double i = 0; i < k; ++i)
    value *= (n - i) / (k - i);
  return value;
}

double chance(const replica_map& map, std::uint32_t failures) {
  return map.loss_probability(failures).probability;
}

}  // namespace

TEST_CASE("groups of mirrors have the probabilities of the Gemini paper") {
  // Wang et al., SOSP 2023: N machines in N/m groups recover from k failures with a probability of
  // at least 1 - N C(N - m, k - m) / (m C(N, k)), which is exact below 2m failures.
  for (const std::uint32_t m : {2U, 3U, 4U}) {
    for (const std::uint32_t n : {12U, 24U, 120U, 1'020U}) {
      const replica_map map =
          llmmem::redundancy::grouped().place(redundancy_scheme::mirror(m), rank_count{n});
      for (std::uint32_t k = 0; k < m; ++k)
        REQUIRE(chance(map, k) == 0);
      for (std::uint32_t k = m; k <= 12; ++k) {
        CAPTURE(m);
        CAPTURE(n);
        CAPTURE(k);
        const double bound = n * choose(n - m, k - m) / (m * choose(n, k));
        REQUIRE(chance(map, k) <= bound * (1 + 1e-9));
        if (k < 2 * m) REQUIRE(chance(map, k) == doctest::Approx(bound).epsilon(1e-10));
      }
    }
  }
  // Its example: 16 machines, 2 copies; 93.3 % with two failures, 80 % with three.
  const replica_map map = llmmem::redundancy::grouped().place(redundancy_scheme::mirror(2), rank_count{16});
  CHECK(chance(map, 2) == doctest::Approx(1.0 / 15));
  CHECK(chance(map, 3) == doctest::Approx(0.2));
}

TEST_CASE("a ring of two copies loses every pair of neighbours") {
  for (const std::uint32_t n : {3U, 16U, 1'024U}) {
    const replica_map map = ring_neighbours().place(redundancy_scheme::mirror(2), rank_count{n});
    CHECK(chance(map, 2) == doctest::Approx(n / choose(n, 2)));
    // Sets of f without two neighbours around a ring of n: n / (n - f) C(n - f, f) (Kaplansky's lemma).
    for (std::uint32_t f = 1; f <= 9 && f < n; ++f) {
      const double kept = 2 * f > n ? 0 : static_cast<double>(n) / (n - f) * choose(n - f, f);
      CHECK(chance(map, f) == doctest::Approx(1 - kept / choose(n, f)).epsilon(1e-9));
    }
  }
}

TEST_CASE("groups of a code lose state exactly when more members fail than they tolerate") {
  // One group: none up to m, all beyond.
  const replica_map one =
      llmmem::redundancy::grouped().place(redundancy_scheme::rs({.data = 2, .parity = 2}), rank_count{4});
  CHECK(chance(one, 2) == 0);
  CHECK(chance(one, 3) == 1);
  // 16 groups of 4: three failures lose something when all are in one group.
  const replica_map many =
      llmmem::redundancy::grouped().place(redundancy_scheme::rs({.data = 2, .parity = 2}), rank_count{64});
  CHECK(chance(many, 3) == doctest::Approx(16 * 4 / choose(64, 3)));
  CHECK(chance(many, 4) == doctest::Approx(16 * (4 * 60 + 1) / choose(64, 4)));
}

TEST_CASE("probabilities stay finite in the largest world, at any count of failures") {
  for (const char* text : {"mirror:2", "mirror:8", "parity:7", "rs:4+2", "rs:200+56"}) {
    CAPTURE(text);
    for (const replica_map& map :
         {llmmem::redundancy::grouped().place(redundancy_scheme::parse(text), rank_count{1024}),
          ring_neighbours().place(redundancy_scheme::parse(text), rank_count{1024})}) {
      double last = 0;
      for (const std::uint32_t failures : {0U, 1U, 2U, 3U, 8U, 64U, 300U, 512U, 700U, 1'023U, 1'024U}) {
        CAPTURE(failures);
        const double now = chance(map, failures);
        REQUIRE(std::isfinite(now));
        REQUIRE(now >= last - 1e-12);  // more failures never help
        REQUIRE(now <= 1 + 1e-12);
        if (failures <= map.scheme().tolerates()) REQUIRE(now == 0);
        last = now;
      }
      REQUIRE(last == doctest::Approx(1));
    }
  }
  // A chance of one in 10^18 is told as such: nothing is subtracted from 1.
  const replica_map map = llmmem::redundancy::grouped().place(redundancy_scheme::mirror(8), rank_count{1024});
  CHECK(chance(map, 8) == doctest::Approx(128 / choose(1024, 8)).epsilon(1e-10));
}

TEST_CASE(
    "the probability of a map without groups is enumerated if that is short, otherwise sampled close to the "
    "truth") {
  // A ring, written as holders: what it should say is known.
  lists holders;
  for (std::uint32_t rank = 0; rank < 100; ++rank)
    holders.push_back({rank_id{(rank + 1) % 100}});
  const auto scheme = redundancy_scheme::mirror(2);
  const replica_map listed = replica_map::of_holders(scheme, holders);
  const replica_map ring = ring_neighbours().place(scheme, rank_count{100});

  const loss_chance pairs = listed.loss_probability(2);
  CHECK(pairs.method == chance_method::enumerated);
  CHECK(pairs.probability == doctest::Approx(chance(ring, 2)).epsilon(1e-12));
  CHECK(pairs.standard_error == 0);

  const loss_chance sampled = listed.loss_probability(6);
  CHECK(sampled.method == chance_method::sampled);
  CHECK(sampled.standard_error > 0);
  CHECK(sampled.standard_error < 0.002);
  CHECK(std::fabs(sampled.probability - chance(ring, 6)) < 5 * sampled.standard_error);
  CHECK(sampled.standard_error ==
        doctest::Approx(std::sqrt(sampled.probability * (1 - sampled.probability) / 65536)));
  CHECK(listed.loss_probability(6).probability == sampled.probability);  // the same seed
  CHECK(listed.loss_probability(6, {.samples = 1'000, .seed = 2}).method == chance_method::sampled);
  CHECK_THROWS_WITH_AS(static_cast<void>(listed.loss_probability(6, {.samples = 0})),
                       "replica_map: too many sets of failures to try all, and chance_options::samples is 0",
                       argument_error);
}

TEST_CASE("ranks past the world do not count as losses") {
  const replica_map map = llmmem::redundancy::grouped().place(redundancy_scheme::mirror(2), rank_count{4});
  CHECK(map.survives({rank_id{0}, rank_id{900}}));
  CHECK(map.survives({rank_id{0}, rank_id{1}, rank_id{900}}).lost == rank_set{rank_id{0}, rank_id{1}});
}

TEST_CASE("impossible groups and holders are refused by name") {
  const auto mirror = redundancy_scheme::mirror(2);
  const auto groups = [&](const std::vector<std::vector<std::uint32_t>>& numbers, std::uint32_t world) {
    static_cast<void>(replica_map::of_groups(mirror, rank_count{world}, of(numbers)));
  };
  const auto holders = [&](const std::vector<std::vector<std::uint32_t>>& numbers) {
    static_cast<void>(replica_map::of_holders(mirror, of(numbers)));
  };
  CHECK_THROWS_WITH_AS(groups({{0, 1}, {2}}, 3), "replica_map: group 1 has 1 ranks; mirror:2 needs 2",
                       argument_error);
  CHECK_THROWS_WITH_AS(groups({{0, 1}, {2, 3}}, 3),
                       "replica_map: group 1 has rank 3; the world has ranks 0 to 2", argument_error);
  CHECK_THROWS_WITH_AS(groups({{0, 1}, {1, 2}}, 3),
                       "replica_map: group 1 has rank 1, which is already in a group", argument_error);
  CHECK_THROWS_WITH_AS(groups({{0, 1}, {3, 4}}, 6), "replica_map: no group has ranks 2 and 5",
                       argument_error);
  CHECK_THROWS_WITH_AS(groups({}, 0), "replica_map: a world of 0 ranks; it must be 1 to 1024",
                       argument_error);
  CHECK_THROWS_WITH_AS(holders({{1}, {0, 2}, {0}}), "replica_map: rank 1 has 2 holders; mirror:2 needs 1",
                       argument_error);
  CHECK_THROWS_WITH_AS(holders({{1}, {1}, {0}}),
                       "replica_map: rank 1 has holder 1; holders are different other ranks of a world of 3",
                       argument_error);
  CHECK_THROWS_WITH_AS(holders({{1}, {3}, {0}}),
                       "replica_map: rank 1 has holder 3; holders are different other ranks of a world of 3",
                       argument_error);
  CHECK_THROWS_WITH_AS(
      static_cast<void>(replica_map::of_holders(redundancy_scheme::parity(1), of({{1}, {0}}))),
      "replica_map: parity:1 has parity, which needs groups; use of_groups()", argument_error);
  const replica_map map = llmmem::redundancy::grouped().place(mirror, rank_count{4});
  CHECK_THROWS_WITH_AS(static_cast<void>(map.loss_probability(5)), "replica_map: 5 failures in a world of 4",
                       argument_error);
}
