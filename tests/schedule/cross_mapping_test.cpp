#include "support/random.hpp"
#include "support/seeds.hpp"

#include <llmmem/schedule/cross_mapping.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

/// Devices of which each `group` in a row share a link.
std::vector<std::uint8_t> in_groups(std::uint32_t devices, std::uint32_t group) {
  std::vector<std::uint8_t> shares;
  for (std::uint32_t a = 0; a < devices; ++a) {
    for (std::uint32_t b = 0; b < devices; ++b)
      shares.push_back(a / group == b / group ? 1 : 0);
  }
  return shares;
}

}  // namespace

TEST_CASE("the mapping is the first order with the least contention") {
  for (const auto seed : seeds(150)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint32_t n = 1 + random.below(6U);
    std::vector<std::uint64_t> overlap(std::size_t{n} * n, 7);  // the diagonal must not matter
    std::vector<std::uint8_t> shares(std::size_t{n} * n, 1);
    for (std::uint32_t a = 0; a < n; ++a) {
      for (std::uint32_t b = 0; b < a; ++b) {
        overlap[a * n + b] = overlap[b * n + a] = random.below(std::uint64_t{6});
        shares[a * n + b] = shares[b * n + a] = random.once_in(2) ? 1 : 0;
      }
    }
    std::vector<std::uint32_t> order(n);
    for (std::uint32_t i = 0; i < n; ++i)
      order[i] = i;
    std::vector<std::uint32_t> best;
    std::uint64_t least = ~std::uint64_t{0};
    do {
      std::uint64_t contention = 0;
      for (std::uint32_t a = 0; a < n; ++a) {
        for (std::uint32_t b = 0; b < a; ++b)
          contention += shares[order[a] * n + order[b]] * overlap[a * n + b];
      }
      if (contention < least) {
        least = contention;
        best = order;
      }
    } while (std::next_permutation(order.begin(), order.end()));
    const auto mapping = cross_mapping(n, overlap, shares);
    REQUIRE(mapping.contention == least);
    REQUIRE(mapping.device == best);
  }
}

TEST_CASE("of four devices, two per root complex, neighbours load through different ones") {
  const auto mapping = cross_mapping(4, overlap_by_distance(4), in_groups(4, 2));
  CHECK(mapping.device == std::vector<std::uint32_t>{0, 2, 1, 3});
  CHECK(mapping.contention == 2 + 2);
  // In the order of their numbers the pairs that share are neighbours.
  CHECK(overlap_by_distance(4)[1] + overlap_by_distance(4)[2 * 4 + 3] == 6);
}

TEST_CASE("overlap decreases with distance and is 0 on the diagonal") {
  CHECK(overlap_by_distance(3) == std::vector<std::uint64_t>{0, 2, 1, 2, 0, 2, 1, 2, 0});
}

TEST_CASE("ten devices have no contention on ten links, and all of it on one") {
  CHECK(cross_mapping(10, overlap_by_distance(10), in_groups(10, 1)).contention == 0);
  CHECK(cross_mapping(3, overlap_by_distance(3), in_groups(3, 3)).contention == 5);
}

TEST_CASE("matrices of another size, or with two values for a pair, are refused") {
  const std::vector<std::uint64_t> overlap{0, 1, 1, 0};
  const std::vector<std::uint8_t> shares{0, 1, 0, 0};
  const auto map = [](std::uint32_t n, const auto& a, const auto& b) {
    static_cast<void>(cross_mapping(n, a, b));
  };
  CHECK_THROWS_WITH_AS(map(0, overlap, shares), "cross_mapping: 0 devices; it takes 1 to 10", length_error);
  CHECK_THROWS_WITH_AS(map(11, overlap, shares), "cross_mapping: 11 devices; it takes 1 to 10", length_error);
  CHECK_THROWS_WITH_AS(map(3, overlap, shares), "cross_mapping: overlap has 4 entries, 3 devices need 9",
                       argument_error);
  CHECK_THROWS_WITH_AS(map(2, overlap, std::vector<std::uint8_t>{}),
                       "cross_mapping: shares_link has 0 entries, 2 devices need 4", argument_error);
  CHECK_THROWS_WITH_AS(map(2, overlap, shares),
                       "cross_mapping: shares_link of 0 and 1 is 1, of 1 and 0 0; make the matrix symmetric",
                       argument_error);
  const std::vector<std::uint64_t> huge(9, std::uint64_t{1} << 62);
  CHECK_THROWS_WITH_AS(map(3, huge, std::vector<std::uint8_t>(9, 0)),
                       "cross_mapping: the sum of the overlaps exceeds 2^63 - 1; use a coarser unit",
                       length_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(overlap_by_distance(11)),
                       "overlap_by_distance: 11 devices; it takes 1 to 10", length_error);
}
