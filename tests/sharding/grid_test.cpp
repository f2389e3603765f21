#include <llmmem/sharding/grid.hpp>
#include <llmmem/sharding/partition_bytes.hpp>
#include <llmmem/sharding/split_2d.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "support/partition_checks.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/sharding_world.hpp"

using namespace llmmem;
using llmmem_tests::check_partition;
using llmmem_tests::elements_of;
using llmmem_tests::random_grid;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;
using llmmem_tests::tensors_of;
using enum llmmem::grid_role;

TEST_CASE("a rank holds the block at its place: weights by row, activations by layer and row") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const process_grid grid = random_grid(random, 1 + random.below(18U));
    const tensor_shape shape =
        tensor_shape::matrix(random.below(std::uint64_t{9}), random.below(std::uint64_t{9}));
    const auto tensors = tensors_of({shape, shape, tensor_shape::vector(7), tensor_shape::vector(5)});
    const grid_partition p(tensors, std::vector{weight, activation, bias, whole}, grid);
    check_partition(p, tensors, grid.world());
    REQUIRE(p.grid() == grid);
    for (std::uint32_t r = 0; r < to_number(grid.world()); ++r) {
      const grid_place place = grid.coordinates_of(rank_id{r});
      for (std::uint64_t row = 0; row < shape.rows(); ++row) {
        for (std::uint64_t column = 0; column < shape.columns(); ++column) {
          const bool in_column = even_share_of(shape.columns(), column, grid.columns()) == place.column;
          const bool weights = in_column && even_share_of(shape.rows(), row, grid.rows()) == place.row;
          const std::uint64_t band = even_share_of(shape.rows(), row, grid.rows() * grid.depth());
          const bool tokens = in_column && band == place.layer * grid.rows() + place.row;
          const std::uint64_t element = row * shape.columns() + column;
          REQUIRE(p.local(tensor_id{0}, rank_id{r}).contains(element) == weights);
          REQUIRE(p.local(tensor_id{1}, rank_id{r}).contains(element) == tokens);
        }
      }
      REQUIRE(p.local(tensor_id{2}, rank_id{r}) ==
              element_runs::rows(tensors[2].shape, even_share(7, place.column, grid.columns())));
      REQUIRE(p.local(tensor_id{3}, rank_id{r}) == element_runs::all_of(5));
      const grid_block block = p.block(tensor_id{1}, place);
      REQUIRE(p.local(tensor_id{1}, rank_id{r}) == element_runs::box(shape, block.rows, block.columns));
    }
  }
}

TEST_CASE("layers of depth hold the same weights, d copies, and different tokens") {
  const auto tensors = tensors_of({tensor_shape::matrix(6, 4), tensor_shape::matrix(8, 6)});
  const grid25d p(tensors, std::vector{weight, activation}, 2, 2);
  for (std::uint32_t r = 0; r < 8; ++r) {
    const auto group = p.grid().depth_group(rank_id{r});
    CHECK(p.local(tensor_id{0}, group[0]) == p.local(tensor_id{0}, group[1]));
    CHECK(p.local(tensor_id{1}, group[0]) != p.local(tensor_id{1}, group[1]));
  }
  // Rank (1, 0, 1) has band 3 of 4 of the tokens.
  const grid_place place{.row = 1, .column = 0, .layer = 1};
  CHECK(p.block(tensor_id{1}, place) == grid_block{.rows = {6, 2}, .columns = {0, 3}});
  CHECK(p.block(tensor_id{0}, place) == grid_block{.rows = {3, 3}, .columns = {0, 2}});
  // Of its 3 rows the first layer owns 2, the other 1.
  CHECK(p.owned(tensor_id{0}, rank_id{2}).elements() == 4);
  CHECK(p.owned(tensor_id{0}, rank_id{6}).elements() == 2);
}

TEST_CASE(
    "a rank keeps 1/(q q d) of activations and d times that of weights; in 1-D it keeps all activations") {
  // Of X [a, b] and W [b, c]: Tesseract ab/p + bcd/p; Megatron ab + bc/p.
  const auto tensors = tensors_of({tensor_shape::matrix(64, 48), tensor_shape::matrix(48, 96)}, 1);
  for (const auto& [q, d] : {std::pair(2U, 1U), std::pair(4U, 1U), std::pair(2U, 2U), std::pair(4U, 4U)}) {
    const std::uint32_t p = q * q * d;
    const grid25d grid(tensors, std::vector{activation, weight}, q, d);
    const split_2d flat(tensors, std::vector{split_axis::none, split_axis::columns}, rank_count{q});
    CHECK(local_bytes(flat, tensors, rank_id{0}) == 64 * 48 + 48 * 96 / q);
    for (std::uint32_t r = 0; r < p; ++r)
      REQUIRE(local_bytes(grid, tensors, rank_id{r}) == 64 * 48 / p + 48 * 96 * d / p);
  }
}

TEST_CASE("tensors that all ranks of a grid hold are reported as replicated") {
  const auto tensors = tensors_of({tensor_shape::matrix(4, 4), tensor_shape::matrix(4, 4),
                                   tensor_shape::vector(4), tensor_shape::scalar()});
  const std::vector roles{weight, activation, bias, whole};
  const grid_partition deep(tensors, roles, process_grid(1, 1, 3));
  CHECK(deep.is_replicated(tensor_id{0}));
  CHECK(!deep.is_replicated(tensor_id{1}));
  CHECK(deep.is_replicated(tensor_id{2}));
  CHECK(deep.is_replicated(tensor_id{3}));
  const grid2d flat(tensors, roles, 2, 1);
  CHECK(!flat.is_replicated(tensor_id{0}));
  CHECK(flat.is_replicated(tensor_id{2}));
  CHECK(!grid2d(tensors, roles, 2).is_replicated(tensor_id{2}));
}

TEST_CASE("impossible roles of tensors on a grid are refused") {
  const auto tensors = tensors_of({tensor_shape::vector(4)});
  CHECK_THROWS_WITH_AS(grid2d(tensors, {}, 2), "grid_partition: 1 tensors and 0 roles; each tensor has one",
                       argument_error);
  CHECK_THROWS_WITH_AS(
      grid2d(tensors, std::vector{weight}, 2),
      "grid_partition: tensor 'w' has 1 dimensions, too few for blocks; give it the role `bias` or `whole`",
      argument_error);
  const auto matrix = tensors_of({tensor_shape::matrix(4, 4)});
  CHECK_THROWS_WITH_AS(grid25d(matrix, std::vector{bias}, 2, 2),
                       "grid_partition: tensor 'w' has 2 dimensions, but a bias has 1", argument_error);
  CHECK_THROWS_WITH_AS(grid25d(matrix, std::vector{weight}, 2, 0),
                       "process_grid: 2 x 2 x 0 ranks; each side is at least 1", argument_error);
}
