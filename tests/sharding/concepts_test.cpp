#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/flat_uneven.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/sharding/split_2d.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <variant>
#include <vector>

#include "support/partition_checks.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/sharding_world.hpp"

using namespace llmmem;
using llmmem_tests::check_partition;
using llmmem_tests::layout_kinds;
using llmmem_tests::random_layout;
using llmmem_tests::random_numbers;
using llmmem_tests::random_tensors;
using llmmem_tests::seeds;
using llmmem_tests::tensors_of;

TEST_CASE("every element has one owner that holds it, in every partition of any shapes") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto tensors = random_tensors(random, 7);
    // More ranks than elements, now and then.
    const rank_count world{1 + random.below(random.once_in(5) ? 40U : 6U)};
    for (std::uint32_t kind = 0; kind < layout_kinds; ++kind) {
      CAPTURE(kind);
      std::visit([&](const auto& p) { check_partition(p, tensors, world); },
                 random_layout(random, tensors, kind, world));
    }
  }
}

TEST_CASE("shares are as even as possible, and the first ones are the longer ones") {
  for (std::uint64_t total = 0; total < 30; ++total) {
    for (std::uint64_t parts = 1; parts < 12; ++parts) {
      std::uint64_t next = 0;
      for (std::uint64_t part = 0; part < parts; ++part) {
        const index_range share = even_share(total, part, parts);
        REQUIRE(share.first == next);
        REQUIRE(share.count == total / parts + (part < total % parts ? 1 : 0));
        next += share.count;
        for (std::uint64_t i = share.first; i < next; ++i)
          REQUIRE(even_share_of(total, i, parts) == part);
      }
      REQUIRE(next == total);
    }
  }
}

TEST_CASE("replicas are written in equal parts") {
  const auto tensors =
      tensors_of({tensor_shape::matrix(7, 11), tensor_shape::scalar(), tensor_shape::vector(2)});
  const llmmem::sharding::replicated p(tensors, rank_count{4});
  for (std::uint32_t r = 0; r < 4; ++r) {
    std::uint64_t owned = 0;
    for (std::uint32_t t = 0; t < 3; ++t)
      owned += p.owned(tensor_id{t}, rank_id{r}).elements();
    CHECK(owned == 20);
  }
  CHECK(p.is_replicated(tensor_id{1}));
}

TEST_CASE("a flat partition cuts the concatenated tensors at its boundaries") {
  const auto tensors =
      tensors_of({tensor_shape::matrix(2, 3), tensor_shape::vector(0), tensor_shape::vector(4)});
  const std::vector<std::uint64_t> boundaries{0, 0, 5, 9, 9, 10};
  const flat_uneven p(tensors, boundaries);
  CHECK(p.world() == rank_count{5});
  CHECK(p.local(tensor_id{0}, rank_id{0}).empty());
  CHECK(p.local(tensor_id{0}, rank_id{1}) == element_runs::flat_range(0, 5));
  CHECK(p.local(tensor_id{0}, rank_id{2}) == element_runs::flat_range(5, 1));
  CHECK(p.local(tensor_id{1}, rank_id{2}).empty());
  CHECK(p.local(tensor_id{2}, rank_id{2}) == element_runs::flat_range(0, 3));
  CHECK(p.local(tensor_id{2}, rank_id{3}).empty());
  CHECK(p.local(tensor_id{2}, rank_id{4}) == element_runs::flat_range(3, 1));
  CHECK(p.owner(tensor_id{0}, 0) == rank_id{1});
  CHECK(p.owner(tensor_id{2}, 3) == rank_id{4});
  CHECK(p.range_of(rank_id{2}) == index_range{5, 4});
  CHECK(p.offset_of(tensor_id{2}) == 6);
  CHECK(!p.is_replicated(tensor_id{0}));
  CHECK(flat_uneven::even(tensors, rank_count{1}).is_replicated(tensor_id{0}));

  const flat_uneven even = flat_uneven::even(tensors, rank_count{4});
  for (std::uint32_t r = 0; r < 4; ++r)
    CHECK(even.range_of(rank_id{r}).count == (r < 2 ? 3 : 2));
}

TEST_CASE("a layer of Megatron is split along the axes of its stored matrix") {
  using enum parallel_linear;
  const tensor_shape weight = tensor_shape::matrix(5, 4);
  const tensor_shape bias = tensor_shape::vector(5);
  const std::vector<split_axis> axes{axis_of(column_parallel, weight), axis_of(column_parallel, bias),
                                     axis_of(row_parallel, weight), axis_of(row_parallel, bias)};
  CHECK(axes == std::vector{split_axis::rows, split_axis::rows, split_axis::columns, split_axis::none});
  CHECK(axis_of(column_parallel, tensor_shape::scalar()) == split_axis::none);
  CHECK(axis_of(row_parallel, tensor_shape::scalar()) == split_axis::none);

  const split_2d p(tensors_of({weight, bias, weight, bias}), axes, rank_count{3});
  // Outputs 0 and 1: rows of the weight and elements of the bias.
  CHECK(p.local(tensor_id{0}, rank_id{0}) == element_runs::flat_range(0, 8));
  CHECK(p.local(tensor_id{1}, rank_id{0}) == element_runs::flat_range(0, 2));
  CHECK(p.local(tensor_id{0}, rank_id{2}) == element_runs::flat_range(16, 4));
  // Inputs 0 and 1, then 2, then 3: columns.
  CHECK(p.local(tensor_id{2}, rank_id{0}) == element_runs{0, 2, 4, 5});
  CHECK(p.local(tensor_id{2}, rank_id{1}) == element_runs{2, 1, 4, 5});
  CHECK(p.local(tensor_id{2}, rank_id{2}) == element_runs{3, 1, 4, 5});
  CHECK(p.local(tensor_id{3}, rank_id{2}) == element_runs::all_of(5));
  CHECK(p.is_replicated(tensor_id{3}));
  CHECK(!p.is_replicated(tensor_id{2}));
}

TEST_CASE("undivided tensors even out the ranks' writes of the others") {
  // 3 rows over 2 ranks: rank 0 writes 20 elements, rank 1 writes 10. The bias of 10 is all rank 1's.
  const auto tensors = tensors_of({tensor_shape::matrix(3, 10), tensor_shape::vector(10)});
  const std::vector axes{split_axis::rows, split_axis::none};
  const split_2d p(tensors, axes, rank_count{2});
  CHECK(p.owned(tensor_id{1}, rank_id{0}).empty());
  CHECK(p.owned(tensor_id{1}, rank_id{1}) == element_runs::all_of(10));
}

TEST_CASE("partitions refuse impossible input") {
  const auto tensors = tensors_of({tensor_shape::vector(4), tensor_shape::matrix(2, 3)});
  const auto flat = [&](std::vector<std::uint64_t> boundaries) { return flat_uneven(tensors, boundaries); };
  CHECK_THROWS_WITH_AS(llmmem::sharding::replicated(tensors, rank_count{0}),
                       "replicated: 0 ranks; a world has at least one", argument_error);
  CHECK_THROWS_WITH_AS(flat_uneven::even(tensors, rank_count{0}),
                       "flat_uneven: 0 ranks; a world has at least one", argument_error);
  CHECK_THROWS_WITH_AS(flat({}), "flat_uneven: 0 ranks; a world has at least one", argument_error);
  CHECK_THROWS_WITH_AS(flat({0}), "flat_uneven: 0 ranks; a world has at least one", argument_error);
  CHECK_THROWS_WITH_AS(
      flat({0, 9}),
      "flat_uneven: boundaries go from 0 to 9; they must go from 0 to 10, the elements of all tensors",
      argument_error);
  CHECK_THROWS_WITH_AS(
      flat({1, 10}),
      "flat_uneven: boundaries go from 1 to 10; they must go from 0 to 10, the elements of all tensors",
      argument_error);
  CHECK_THROWS_WITH_AS(flat({0, 6, 5, 10}), "flat_uneven: boundary 2 is 5, less than the one before it, 6",
                       argument_error);
  const std::vector one{split_axis::rows};
  CHECK_THROWS_WITH_AS(split_2d(tensors, one, rank_count{2}),
                       "split_2d: 2 tensors and 1 axes; each tensor has one", argument_error);
  const std::vector columns{split_axis::columns, split_axis::columns};
  CHECK_THROWS_WITH_AS(
      split_2d(tensors, columns, rank_count{2}),
      "split_2d: tensor 'w' has 1 dimensions and no columns; split it by rows, or not at all",
      argument_error);
  CHECK_THROWS_WITH_AS(split_2d(tensors, {}, rank_count{0}), "split_2d: 0 ranks; a world has at least one",
                       argument_error);
  const auto huge = tensors_of({tensor_shape::vector(max_bytes), tensor_shape::vector(1)});
  CHECK_THROWS_AS(flat_uneven::even(huge, rank_count{1}), length_error);
  CHECK_THROWS_AS(llmmem::sharding::replicated(huge, rank_count{1}), length_error);
  CHECK_THROWS_AS(split_2d(huge, columns, rank_count{1}), error);
}
