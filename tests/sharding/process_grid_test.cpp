#include <llmmem/sharding/process_grid.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

using namespace llmmem;

namespace {

constexpr process_grid two_by_three_by_two(2, 3, 2);
static_assert(two_by_three_by_two.world() == rank_count{12});
static_assert(two_by_three_by_two.rank_at({.row = 1, .column = 2, .layer = 1}) == rank_id{11});
static_assert(two_by_three_by_two.coordinates_of(rank_id{7}) ==
              grid_place{.row = 0, .column = 1, .layer = 1});

std::vector<rank_id> ranks(std::initializer_list<std::uint32_t> numbers) {
  std::vector<rank_id> all;
  for (const std::uint32_t each : numbers)
    all.push_back(rank_id{each});
  return all;
}

}  // namespace

TEST_CASE("rank and place are inverse to each other, and the ranks of a group differ in one coordinate") {
  for (std::uint32_t rows = 1; rows < 5; ++rows) {
    for (std::uint32_t columns = 1; columns < 5; ++columns) {
      for (std::uint32_t depth = 1; depth < 4; ++depth) {
        const process_grid grid(rows, columns, depth);
        REQUIRE(grid.world() == rank_count{rows * columns * depth});
        for (std::uint32_t r = 0; r < rows * columns * depth; ++r) {
          const grid_place place = grid.coordinates_of(rank_id{r});
          REQUIRE(grid.rank_at(place) == rank_id{r});
          std::vector<rank_id> row;
          std::vector<rank_id> column;
          std::vector<rank_id> deep;
          for (std::uint32_t other = 0; other < rows * columns * depth; ++other) {
            const grid_place at = grid.coordinates_of(rank_id{other});
            const bool same_row = at.row == place.row;
            const bool same_column = at.column == place.column;
            const bool same_layer = at.layer == place.layer;
            if (same_row && same_layer) row.push_back(rank_id{other});
            if (same_column && same_layer) column.push_back(rank_id{other});
            if (same_row && same_column) deep.push_back(rank_id{other});
          }
          REQUIRE(grid.row_group(rank_id{r}) == row);
          REQUIRE(grid.column_group(rank_id{r}) == column);
          REQUIRE(grid.depth_group(rank_id{r}) == deep);
        }
      }
    }
  }
}

TEST_CASE("ranks are numbered along rows, then over rows, then over layers") {
  CHECK(two_by_three_by_two.row_group(rank_id{4}) == ranks({3, 4, 5}));
  CHECK(two_by_three_by_two.column_group(rank_id{4}) == ranks({1, 4}));
  CHECK(two_by_three_by_two.depth_group(rank_id{4}) == ranks({4, 10}));
}

TEST_CASE("a grid with a side of 0, or with more ranks than ids, is refused") {
  CHECK_THROWS_WITH_AS(process_grid(2, 0), "process_grid: 2 x 0 x 1 ranks; each side is at least 1",
                       argument_error);
  CHECK_THROWS_WITH_AS(process_grid(65536, 65536),
                       "process_grid: 65536 x 65536 x 1 ranks; their ids are 32 bits wide", length_error);
  CHECK_THROWS_AS(process_grid(65536, 32768, 2), length_error);
  CHECK(process_grid(65536, 32768).world() == rank_count{0x8000'0000});
}
