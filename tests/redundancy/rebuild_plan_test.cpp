#include <llmmem/redundancy/rebuild_plan.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

using namespace llmmem;

namespace {

std::vector<piece_id> pieces_of(std::uint32_t bits) {
  std::vector<piece_id> pieces;
  for (std::uint32_t i = 0; i < 32; ++i) {
    if ((bits >> i & 1U) != 0) pieces.push_back(piece_id{i});
  }
  return pieces;
}

/// The rank of a matrix by elimination, on its own, to hold the code's rows to.
std::size_t matrix_rank(std::vector<std::vector<std::uint8_t>> rows) {
  std::size_t rank = 0;
  for (std::size_t column = 0; !rows.empty() && column < rows[0].size(); ++column) {
    std::size_t pivot = rank;
    while (pivot < rows.size() && rows[pivot][column] == 0)
      ++pivot;
    if (pivot == rows.size()) continue;
    std::swap(rows[pivot], rows[rank]);
    for (std::size_t row = rank + 1; row < rows.size(); ++row) {
      const std::uint8_t factor = gf256_divide(rows[row][column], rows[rank][column]);
      for (std::size_t i = 0; i < rows[row].size(); ++i)
        rows[row][i] ^= gf256_multiply(factor, rows[rank][i]);
    }
    ++rank;
  }
  return rank;
}

std::vector<std::uint8_t> code_row(const code_shape& shape, piece_id piece) {
  std::vector<std::uint8_t> row;
  for (std::uint32_t d = 0; d < shape.data; ++d)
    row.push_back(code_coefficient(shape, piece, piece_id{d}));
  return row;
}

/// Each target's row of the code is the plan's sum of its sources' rows: then it is right for any bytes.
bool plan_holds(const code_shape& shape, const rebuild_plan& plan) {
  for (std::size_t t = 0; t < plan.targets.size(); ++t) {
    std::vector<std::uint8_t> sum(shape.data, 0);
    for (std::size_t s = 0; s < plan.sources.size(); ++s) {
      const std::vector<std::uint8_t> row = code_row(shape, plan.sources[s]);
      for (std::size_t d = 0; d < shape.data; ++d)
        sum[d] ^= gf256_multiply(plan.coefficient(t, s), row[d]);
    }
    if (sum != code_row(shape, plan.targets[t])) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("any k pieces of a code of up to 10 determine the rest") {
  for (std::uint32_t k = 1; k <= 9; ++k) {
    for (std::uint32_t m = 1; k + m <= 10; ++m) {
      const code_shape shape{k, m};
      for (std::uint32_t bits = 0; bits < 1U << shape.pieces(); ++bits) {
        const std::vector<piece_id> sources = pieces_of(bits);
        if (sources.size() != k) continue;
        std::vector<std::vector<std::uint8_t>> rows;
        for (const piece_id source : sources)
          rows.push_back(code_row(shape, source));
        REQUIRE(matrix_rank(rows) == k);
      }
    }
  }
}

TEST_CASE("every loss of up to m pieces has a valid plan from live pieces alone") {
  for (std::uint32_t k = 1; k <= 7; ++k) {
    for (std::uint32_t m = 1; k + m <= 8; ++m) {
      const code_shape shape{k, m};
      for (std::uint32_t bits = 0; bits < 1U << shape.pieces(); ++bits) {
        const std::vector<piece_id> lost = pieces_of(bits);
        if (lost.size() > m) continue;
        const rebuild_plan plan = plan_rebuild(shape, lost);
        REQUIRE(plan.targets == lost);
        REQUIRE(plan.sources.size() == k);
        for (const piece_id source : plan.sources)
          REQUIRE((bits >> to_index(source) & 1U) == 0);
        REQUIRE(plan_holds(shape, plan));
      }
    }
  }
}

TEST_CASE("any k sources make any pieces") {
  const code_shape shape{3, 4};
  for (std::uint32_t bits = 0; bits < 128; ++bits) {
    const std::vector<piece_id> sources = pieces_of(bits);
    if (sources.size() != 3) continue;
    REQUIRE(plan_holds(shape, plan_rebuild_from(shape, sources, pieces_of(127))));
  }
}

TEST_CASE("the largest possible code can be rebuilt") {
  const code_shape shape{200, 56};
  std::vector<piece_id> lost;
  for (std::uint32_t i = 0; i < 56; ++i)
    lost.push_back(piece_id{i * 4});
  CHECK(plan_holds(shape, plan_rebuild(shape, lost)));
}

TEST_CASE("impossible shapes, pieces and losses are refused with their numbers") {
  const std::vector<piece_id> none;
  CHECK_THROWS_WITH_AS(plan_rebuild({0, 2}, none),
                       "reed_solomon: a code of 0+2; use at least one piece of data and one of parity",
                       argument_error);
  CHECK_THROWS_WITH_AS(plan_rebuild({2, 0}, none),
                       "reed_solomon: a code of 2+0; use at least one piece of data and one of parity",
                       argument_error);
  CHECK_THROWS_WITH_AS(plan_rebuild({200, 57}, none),
                       "reed_solomon: a code of 200+57; use at most 256 pieces of data and parity together",
                       argument_error);
  CHECK_THROWS_WITH_AS(
      plan_rebuild({0xFFFF'FFFF, 2}, none),
      "reed_solomon: a code of 4294967295+2; use at most 256 pieces of data and parity together",
      argument_error);
  CHECK_THROWS_WITH_AS(
      plan_rebuild({2, 2}, pieces_of(0b1011)),
      "reed_solomon: pieces 0, 1 and 3 are lost, 3 in all; 2+2 tolerates the loss of 2: use an older version",
      argument_error);
  CHECK_THROWS_WITH_AS(plan_rebuild({2, 2}, pieces_of(0b10000)),
                       "reed_solomon: lost piece 4; 2+2 has pieces 0 to 3", argument_error);
  CHECK_THROWS_WITH_AS(plan_rebuild({2, 2}, std::vector{piece_id{1}, piece_id{1}}),
                       "reed_solomon: lost piece 1 twice; name each piece once", argument_error);
  CHECK_THROWS_WITH_AS(plan_rebuild_from({2, 2}, pieces_of(0b111), none),
                       "reed_solomon: 3 sources; 2+2 rebuilds from exactly 2", argument_error);
  CHECK_THROWS_WITH_AS(plan_rebuild_from({2, 2}, pieces_of(0b11), pieces_of(0b100000)),
                       "reed_solomon: target piece 5; 2+2 has pieces 0 to 3", argument_error);
  CHECK_THROWS_WITH_AS(plan_rebuild_from({2, 2}, pieces_of(0b1000001), none),
                       "reed_solomon: source piece 6; 2+2 has pieces 0 to 3", argument_error);
}
