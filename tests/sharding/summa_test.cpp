#include <llmmem/sharding/summa.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "support/partition_checks.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem_tests::random_grid;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;
using llmmem_tests::tensors_of;

namespace {

/// Row-major, with a flag for each value: whether the rank has it.
struct matrix {
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  std::vector<float> values;
  std::vector<bool> known;

  matrix(std::uint64_t r, std::uint64_t c) : rows(r), columns(c), values(r * c, 0), known(r * c, false) {}

  void take(const matrix& from, const grid_block& block) {
    for (std::uint64_t i = 0; i < block.rows.count; ++i) {
      for (std::uint64_t j = 0; j < block.columns.count; ++j) {
        const std::size_t at = (block.rows.first + i) * columns + block.columns.first + j;
        REQUIRE(from.known[at]);
        values[at] = from.values[at];
        known[at] = true;
      }
    }
  }
};

matrix random_matrix(random_numbers& random, std::uint64_t rows, std::uint64_t columns) {
  matrix made(rows, columns);
  for (float& each : made.values)
    each = static_cast<float>(random.below(2001U)) / 1000.0F - 1.0F;
  made.known.assign(made.values.size(), true);
  return made;
}

/// Carries a plan out on ranks that each know their own blocks, and compares with the product of the wholes.
void check_product(const process_grid& grid, const product_shape& shape, random_numbers& random) {
  const matrix a = random_matrix(random, shape.m, shape.k);
  const matrix b = random_matrix(random, shape.k, shape.n);
  std::vector<double> expected(shape.m * shape.n, 0);
  for (std::uint64_t i = 0; i < shape.m; ++i) {
    for (std::uint64_t l = 0; l < shape.k; ++l) {
      for (std::uint64_t j = 0; j < shape.n; ++j)
        expected[i * shape.n + j] += double{a.values[i * shape.k + l]} * double{b.values[l * shape.n + j]};
    }
  }
  const auto tensors =
      tensors_of({tensor_shape::matrix(shape.m, shape.k), tensor_shape::matrix(shape.k, shape.n),
                  tensor_shape::matrix(shape.m, shape.n)});
  const grid_partition layout(
      tensors, std::vector{grid_role::activation, grid_role::weight, grid_role::activation}, grid);
  const summa_plan plan = plan_summa(grid, shape);
  const std::uint32_t world = to_number(grid.world());
  std::vector<matrix> own_a(world, matrix(shape.m, shape.k));
  std::vector<matrix> own_b(world, matrix(shape.k, shape.n));
  std::vector<std::uint64_t> received(world, 0);
  for (std::uint32_t r = 0; r < world; ++r) {
    own_a[r].take(a, layout.block(tensor_id{0}, grid.coordinates_of(rank_id{r})));
    own_b[r].take(b, layout.block(tensor_id{1}, grid.coordinates_of(rank_id{r})));
  }
  std::vector<float> result(shape.m * shape.n, 0);
  for (const summa_step& step : plan.steps) {
    // A step's panels are on top of the own blocks, and gone behind it.
    std::vector<matrix> got_a = own_a;
    std::vector<matrix> got_b = own_b;
    for (const summa_broadcast& each : step.broadcasts) {
      const std::uint32_t root = to_index(each.root);
      for (const rank_id to : each.to) {
        REQUIRE(to != each.root);
        received[to_index(to)] += each.elements();
        if (each.factor == summa_factor::a) {
          got_a[to_index(to)].take(own_a[root], each.block);
        } else {
          got_b[to_index(to)].take(own_b[root], each.block);
        }
      }
    }
    for (std::uint32_t r = 0; r < world; ++r) {
      const grid_block c = plan.result_block(grid.coordinates_of(rank_id{r}));
      REQUIRE(c == layout.block(tensor_id{2}, grid.coordinates_of(rank_id{r})));
      for (std::uint64_t i = c.rows.first; i < c.rows.first + c.rows.count; ++i) {
        for (std::uint64_t j = c.columns.first; j < c.columns.first + c.columns.count; ++j) {
          for (std::uint64_t l = step.inner.first; l < step.inner.first + step.inner.count; ++l) {
            REQUIRE(got_a[r].known[i * shape.k + l]);
            REQUIRE(got_b[r].known[l * shape.n + j]);
            result[i * shape.n + j] += got_a[r].values[i * shape.k + l] * got_b[r].values[l * shape.n + j];
          }
        }
      }
    }
  }
  for (std::size_t i = 0; i < result.size(); ++i)
    REQUIRE(std::abs(double{result[i]} - expected[i]) <= 1e-5);

  // A rank lacks, of its rows of A and its columns of B, all but its own blocks, and gets each element once.
  const summa_traffic traffic = traffic_of(plan);
  REQUIRE(traffic.received == received);
  for (std::uint32_t r = 0; r < world; ++r) {
    const grid_place place = grid.coordinates_of(rank_id{r});
    const grid_block c = plan.result_block(place);
    std::uint64_t lacks = c.rows.count * shape.k + shape.k * c.columns.count;
    const grid_block mine_a = layout.block(tensor_id{0}, place);
    const grid_block mine_b = layout.block(tensor_id{1}, place);
    lacks -= mine_a.rows.count * mine_a.columns.count + mine_b.rows.count * mine_b.columns.count;
    REQUIRE(received[r] == (c.rows.count * c.columns.count == 0 ? 0 : lacks));
  }
  REQUIRE(traffic.total == std::accumulate(received.begin(), received.end(), std::uint64_t{0}));
}

}  // namespace

TEST_CASE("the executed plan gives the product, at 2 x 2, 3 x 3 and 2 x 2 x 2, even and uneven") {
  random_numbers random(1);
  for (const process_grid& grid : {process_grid(2, 2), process_grid(3, 3), process_grid(2, 2, 2)}) {
    check_product(grid, {.m = 12, .n = 12, .k = 12}, random);
    check_product(grid, {.m = 13, .n = 7, .k = 11}, random);
    check_product(grid, {.m = 5, .n = 3, .k = 2}, random);
    check_product(grid, {.m = 1, .n = 1, .k = 1}, random);
  }
}

TEST_CASE("the executed plan gives the product on grids of any sides") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const process_grid grid = random_grid(random, 1 + random.below(13U));
    CAPTURE(grid.rows());
    CAPTURE(grid.columns());
    CAPTURE(grid.depth());
    check_product(grid,
                  {.m = random.below(std::uint64_t{11}),
                   .n = random.below(std::uint64_t{11}),
                   .k = random.below(std::uint64_t{11})},
                  random);
  }
}

TEST_CASE("step k of a square grid broadcasts column k of A along rows and row k of B along columns") {
  const summa_plan plan = plan_summa(process_grid(2, 2), {.m = 4, .n = 6, .k = 8});
  REQUIRE(plan.steps.size() == 2);
  const summa_step& second = plan.steps[1];
  CHECK(second.inner == index_range{4, 4});
  REQUIRE(second.broadcasts.size() == 4);
  CHECK(second.broadcasts[0] == summa_broadcast{.factor = summa_factor::a,
                                                .root = rank_id{1},
                                                .to = {rank_id{0}},
                                                .block = {.rows = {0, 2}, .columns = {4, 4}}});
  CHECK(second.broadcasts[1].root == rank_id{3});
  CHECK(second.broadcasts[2] == summa_broadcast{.factor = summa_factor::b,
                                                .root = rank_id{2},
                                                .to = {rank_id{0}},
                                                .block = {.rows = {4, 4}, .columns = {0, 3}}});
  CHECK(second.broadcasts[3].root == rank_id{3});
  CHECK(plan_summa(process_grid(2, 3), {.m = 6, .n = 6, .k = 6}).steps.size() == 2 + 3 - 1);
  CHECK(plan_summa(process_grid(4, 6), {.m = 12, .n = 12, .k = 12}).steps.size() == 4 + 6 - 2);
}

TEST_CASE("a layer's forward pass has Optimus's cost: log2(p) / (2 sqrt p) x (7 b s h + 12 h^2)") {
  constexpr std::uint64_t tokens = 64, h = 32;
  for (const std::uint32_t q : {2U, 4U, 8U}) {
    const std::uint64_t rounds = q == 2 ? 1 : q == 4 ? 2 : 3;
    std::uint64_t tree = 0;
    // Queries, keys and values; the projection; the two linear layers.
    for (const auto& [k, n] :
         {std::pair(h, 3 * h), std::pair(h, h), std::pair(h, 4 * h), std::pair(4 * h, h)}) {
      const auto traffic = traffic_of(plan_summa(process_grid(q, q), {.m = tokens, .n = n, .k = k}));
      tree += traffic.tree_elements;
      // Whatever broadcasts: q - 1 of q blocks along a row and along a column.
      for (const std::uint64_t each : traffic.received)
        REQUIRE(each == (q - 1) * (tokens * k + k * n) / (q * q));
    }
    // log2(p) / 2 is log2(q), sqrt p is q.
    CHECK(tree == rounds * (7 * tokens * h + 12 * h * h) / q);
  }
}

TEST_CASE("at 64 ranks Tesseract broadcasts 32 times per layer, and 2-D SUMMA 128 times") {
  // arXiv 2105.14500 counts transmissions: 2 p^(2/3) at d = q, so that Cannon's 2 p^(3/2) - 2
  // p^(1/2) = 1008 is 31.5 times as many.
  const product_shape shape{.m = 64, .n = 64, .k = 64};
  const auto deep = traffic_of(plan_summa(process_grid(4, 4, 4), shape));
  const auto flat = traffic_of(plan_summa(process_grid(8, 8), shape));
  CHECK(deep.broadcasts / 4 == 32);  // four layers at a time
  CHECK(flat.broadcasts == 128);
  CHECK(1008.0 / static_cast<double>(deep.broadcasts / 4) == 31.5);
  // Depth saves activations' bytes, at the price of weights': wide batches gain.
  CHECK(deep.received[0] == 3 * (64 * 64 / 64 + 64 * 64 / 16));
  CHECK(flat.received[0] == 7 * (64 * 64 / 64 + 64 * 64 / 64));
  const product_shape wide{.m = 4096, .n = 64, .k = 64};
  CHECK(traffic_of(plan_summa(process_grid(4, 4, 4), wide)).received[0] <
        traffic_of(plan_summa(process_grid(8, 8), wide)).received[0]);
}

TEST_CASE("one rank broadcasts nothing, and factors past 64 bits are refused") {
  const auto alone = traffic_of(plan_summa(process_grid(), {.m = 3, .n = 3, .k = 3}));
  CHECK(alone == summa_traffic{.received = {0}, .total = 0, .broadcasts = 0, .tree_elements = 0});
  CHECK(plan_summa(process_grid(2, 2), {.m = 3, .n = 3, .k = 0}).steps.empty());
  CHECK_THROWS_WITH_AS(
      plan_summa(process_grid(2, 2), {.m = max_bytes, .n = 1, .k = 2}),
      "plan_summa: m x k: 9223372036854775807 x 2 exceeds the limit of 2^63 - 1 bytes; lower one of the two",
      length_error);
  CHECK_THROWS_AS(plan_summa(process_grid(2, 2), {.m = 1, .n = max_bytes, .k = 2}), length_error);
  CHECK_THROWS_AS(plan_summa(process_grid(2, 2), {.m = 2, .n = max_bytes, .k = 1}), length_error);
}
