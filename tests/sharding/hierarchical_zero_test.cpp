#include <llmmem/sharding/hierarchical_zero.hpp>
#include <llmmem/sharding/reshard.hpp>
#include <llmmem/sharding/zero.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "support/partition_checks.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/sharding_world.hpp"

using namespace llmmem;
using llmmem_tests::check_partition;
using llmmem_tests::random_numbers;
using llmmem_tests::random_tensors;
using llmmem_tests::seeds;
using llmmem_tests::tensors_of;

TEST_CASE("every node holds each element once, and a rank's primary is in its secondary") {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto tensors = random_tensors(random, 7);
    const rank_count world{1 + random.below(20U)};
    const rank_count node{1 + random.below(to_number(world) + 1)};
    const hierarchical_zero p(tensors, world, node);
    if (random.once_in(4)) check_partition(p, tensors, world);
    std::uint64_t all = 0;
    for (const auto& each : tensors)
      all += each.shape.elements();
    std::uint32_t next_rank = 0;
    for (std::uint32_t n = 0; n < p.nodes(); ++n) {
      const index_range ranks = p.ranks_of(n);
      REQUIRE(ranks.first == next_rank);
      std::uint64_t next = 0;
      for (std::uint32_t i = 0; i < ranks.count; ++i, ++next_rank) {
        const rank_id rank{next_rank};
        REQUIRE(p.node_of(rank) == n);
        REQUIRE(p.secondary(rank).first == next);
        next += p.secondary(rank).count;
        REQUIRE(p.primary(rank).first >= p.secondary(rank).first);
        REQUIRE(p.primary(rank).first + p.primary(rank).count <= next);
        const std::uint64_t even = all / to_number(world);
        REQUIRE(p.primary(rank).count - even <= 1);
      }
      REQUIRE(next == all);
    }
    REQUIRE(next_rank == to_number(world));
  }
}

TEST_CASE("nodes of one size hold even shares, and an uneven world's shares stay within a bound") {
  for (std::uint32_t world = 1; world <= 40; ++world) {
    for (std::uint32_t node = 1; node <= world; ++node) {
      constexpr std::uint64_t elements = 100'003;
      const auto tensors = tensors_of({tensor_shape::vector(elements)});
      const hierarchical_zero p(tensors, rank_count{world}, rank_count{node});
      for (std::uint32_t r = 0; r < world; ++r) {
        const std::uint64_t size = p.ranks_of(p.node_of(rank_id{r})).count;
        const std::uint64_t held = p.secondary(rank_id{r}).count;
        CAPTURE(world);
        CAPTURE(node);
        CAPTURE(r);
        if (world % node == 0) {
          REQUIRE(held >= elements / size);
          REQUIRE(held <= elements / size + 1);
          REQUIRE(p.secondary(rank_id{r}) == p.secondary(rank_id{r % node}));
        } else {
          // One primary more or less than an even share.
          REQUIRE(held <= elements / size + elements / world + 2);
          REQUIRE(held + elements / world + 2 >= elements / size);
        }
      }
    }
  }
}

TEST_CASE("two nodes of two ranks interleave their primaries") {
  const auto tensors = tensors_of({tensor_shape::vector(5), tensor_shape::vector(5)});
  const hierarchical_zero p(tensors, rank_count{4}, rank_count{2});
  CHECK(p.primary(rank_id{0}) == index_range{0, 2});
  CHECK(p.primary(rank_id{2}) == index_range{2, 3});
  CHECK(p.primary(rank_id{1}) == index_range{5, 2});
  CHECK(p.primary(rank_id{3}) == index_range{7, 3});
  for (const std::uint32_t r : {0U, 2U}) {
    CHECK(p.secondary(rank_id{r}) == index_range{0, 5});
    CHECK(p.secondary(rank_id{r + 1}) == index_range{5, 5});
  }
  CHECK(p.local(tensor_id{0}, rank_id{2}) == element_runs::all_of(5));
  CHECK(p.local(tensor_id{1}, rank_id{2}).empty());
  CHECK(p.owned(tensor_id{1}, rank_id{3}) == element_runs::flat_range(2, 3));
  CHECK(!p.is_replicated(tensor_id{0}));
  CHECK(hierarchical_zero(tensors, rank_count{4}, rank_count{1}).is_replicated(tensor_id{0}));
}

TEST_CASE("the backward gather stays within nodes, unlike the forward one") {
  const auto tensors = tensors_of({tensor_shape::matrix(30, 10)}, 2);
  for (const std::uint32_t node : {1U, 2U, 3U, 4U, 5U, 6U}) {
    CAPTURE(node);
    const hierarchical_zero p(tensors, rank_count{6}, rank_count{node});
    // Every rank gathers all, reading in its own node only.
    for (std::uint32_t r = 0; r < 6; ++r) {
      std::vector<stored_piece> in_node;
      for (const stored_piece& each : llmmem::sharding::held_pieces(p)) {
        if (p.node_of(rank_id{to_index(each.holder)}) == p.node_of(rank_id{r})) in_node.push_back(each);
      }
      const wanted_piece all{
          .tensor = tensor_id{0}, .rank = rank_id{r}, .elements = element_runs::all_of(300)};
      CHECK(make_reshard(tensors, in_node, std::vector{all}).bytes == 600);
    }
  }
}

TEST_CASE("a secondary costs the weights divided by the node, plain ZeRO 3 by the world") {
  // 64 ranks in nodes of 8, 16-bit weights of 1.024 billion parameters.
  const auto tensors = tensors_of({tensor_shape::matrix(1'024'000, 1000)}, 2);
  const hierarchical_zero p(tensors, rank_count{64}, rank_count{8});
  for (std::uint32_t r = 0; r < 64; ++r) {
    CHECK(local_bytes(p, tensors, rank_id{r}) == 256'000'000);
    CHECK(owned_bytes(p, tensors, rank_id{r}) == 32'000'000);
  }
}

TEST_CASE("a hierarchy of empty nodes is refused") {
  const auto tensors = tensors_of({tensor_shape::vector(4)});
  CHECK_THROWS_WITH_AS(hierarchical_zero(tensors, rank_count{4}, rank_count{0}),
                       "hierarchical_zero: nodes of 0 ranks; a node has at least one", argument_error);
  CHECK_THROWS_WITH_AS(hierarchical_zero(tensors, rank_count{0}, rank_count{4}),
                       "hierarchical_zero: 0 ranks; a world has at least one", argument_error);
  const auto huge = tensors_of({tensor_shape::vector(max_bytes), tensor_shape::vector(1)});
  CHECK_THROWS_WITH_AS(hierarchical_zero(huge, rank_count{1}, rank_count{1}),
                       "hierarchical_zero: elements of all tensors: 9223372036854775807 + 1 exceeds the "
                       "limit of 2^63 - 1 bytes; lower one of the two",
                       length_error);
}
