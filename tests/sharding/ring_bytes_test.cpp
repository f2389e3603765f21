#include <llmmem/sharding/ring_bytes.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

using namespace llmmem;

namespace {

constexpr auto scatter = ring_collective::reduce_scatter;
constexpr auto gather = ring_collective::all_gather;
constexpr auto reduce = ring_collective::all_reduce;

}  // namespace

TEST_CASE("a simulated ring sends the formula's bytes, and every share ends at its place") {
  for (std::uint32_t n = 1; n <= 9; ++n) {
    for (std::uint64_t units = 0; units < 23; ++units) {
      CAPTURE(n);
      CAPTURE(units);
      std::vector<std::uint64_t> scattered(n, 0);
      std::vector<std::uint64_t> gathered(n, 0);
      // parts[r][c]: of how many ranks rank r has added up share c.
      std::vector<std::vector<std::uint32_t>> parts(n, std::vector<std::uint32_t>(n, 1));
      for (std::uint32_t step = 0; step + 1 < n; ++step) {
        const auto before = parts;
        for (std::uint32_t r = 0; r < n; ++r) {
          const std::uint32_t c = (r + 2 * n - 1 - step) % n;
          parts[(r + 1) % n][c] += before[r][c];
          scattered[r] += 3 * even_share(units, c, n).count;
        }
      }
      for (std::uint32_t r = 0; r < n; ++r)
        REQUIRE(parts[r][r] == n);
      std::vector<std::vector<bool>> has(n, std::vector<bool>(n, false));
      for (std::uint32_t r = 0; r < n; ++r)
        has[r][r] = true;
      for (std::uint32_t step = 0; step + 1 < n; ++step) {
        const auto before = has;
        for (std::uint32_t r = 0; r < n; ++r) {
          const std::uint32_t c = (r + n - step) % n;
          REQUIRE(before[r][c]);
          has[(r + 1) % n][c] = true;
          gathered[r] += 3 * even_share(units, c, n).count;
        }
      }
      for (std::uint32_t r = 0; r < n; ++r) {
        REQUIRE(has[r] == std::vector<bool>(n, true));
        REQUIRE(ring_sent_bytes(scatter, units, 3, rank_count{n}, rank_id{r}) == scattered[r]);
        REQUIRE(ring_sent_bytes(gather, units, 3, rank_count{n}, rank_id{r}) == gathered[r]);
        REQUIRE(ring_sent_bytes(reduce, units, 3, rank_count{n}, rank_id{r}) == scattered[r] + gathered[r]);
      }
    }
  }
}

TEST_CASE("with equal shares, a ring all-reduce sends 2 (N - 1) / N of the tensor from each rank") {
  for (std::uint32_t n = 2; n <= 8; ++n)
    CHECK(ring_sent_bytes(reduce, 840, 4, rank_count{n}, rank_id{n - 1}) == 2 * (n - 1) * 840 * 4 / n);
}

TEST_CASE("a ring of zero ranks, and too many bytes, are refused") {
  CHECK_THROWS_WITH_AS(ring_sent_bytes(reduce, 1, 1, rank_count{0}, rank_id{0}),
                       "ring_sent_bytes: 0 ranks; a world has at least one", argument_error);
  CHECK_THROWS_WITH_AS(
      ring_sent_bytes(reduce, max_bytes, 2, rank_count{1}, rank_id{0}),
      "ring_sent_bytes: units x bytes per unit: 9223372036854775807 x 2 exceeds the limit of "
      "2^63 - 1 bytes; lower one of the two",
      length_error);
  CHECK_THROWS_WITH_AS(ring_sent_bytes(reduce, max_bytes, 1, rank_count{1}, rank_id{0}),
                       "ring_sent_bytes: bytes of both halves: 9223372036854775807 x 2 exceeds the limit of "
                       "2^63 - 1 bytes; lower one of the two",
                       length_error);
}
