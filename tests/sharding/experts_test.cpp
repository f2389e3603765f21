#include <llmmem/sharding/experts.hpp>
#include <llmmem/sharding/partition_bytes.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "support/partition_checks.hpp"

using namespace llmmem;
using llmmem_tests::check_partition;
using llmmem_tests::tensors_of;

TEST_CASE("experts are on ranks in their order, as evenly as possible") {
  for (std::uint32_t experts = 1; experts < 20; ++experts) {
    for (std::uint32_t world = 1; world < 12; ++world) {
      std::uint64_t next = 0;
      for (std::uint32_t r = 0; r < world; ++r) {
        const index_range mine = experts_of(experts, rank_count{world}, rank_id{r});
        REQUIRE(mine.first == next);
        REQUIRE(mine.count - experts / world <= 1);
        for (; next < mine.first + mine.count; ++next) {
          const expert_id expert{static_cast<std::uint32_t>(next)};
          REQUIRE(rank_of(expert, experts, rank_count{world}) == rank_id{r});
        }
      }
      REQUIRE(next == experts);
    }
  }
}

TEST_CASE("an expert's tensors are only on its rank, and the others are on all") {
  const auto tensors = tensors_of(
      {tensor_shape::matrix(4, 2), tensor_shape::vector(6), tensor_shape::vector(6), tensor_shape::vector(6)},
      1);
  const std::vector of{no_expert, expert_id{0}, expert_id{1}, expert_id{2}};
  const expert_parallel p(tensors, of, 3, rank_count{2});
  check_partition(p, tensors, rank_count{2});
  CHECK(p.experts() == 3);
  CHECK(p.expert_of(tensor_id{2}) == expert_id{1});
  CHECK(p.rank_of_expert(expert_id{1}) == rank_id{0});
  CHECK(p.rank_of_expert(expert_id{2}) == rank_id{1});
  CHECK(p.local(tensor_id{1}, rank_id{1}).empty());
  CHECK(p.local(tensor_id{3}, rank_id{1}) == element_runs::all_of(6));
  CHECK(p.is_replicated(tensor_id{0}));
  CHECK(!p.is_replicated(tensor_id{1}));
  // Rank 0 writes two experts of 6, rank 1 one: what all hold, 8, evens them out to 13 each.
  CHECK(owned_bytes(p, tensors, rank_id{0}) == 13);
  CHECK(owned_bytes(p, tensors, rank_id{1}) == 13);
}

TEST_CASE("a missing expert is refused with its tensor") {
  const auto tensors = tensors_of({tensor_shape::vector(6)});
  CHECK_THROWS_WITH_AS(expert_parallel(tensors, std::vector{expert_id{2}}, 2, rank_count{2}),
                       "expert_parallel: tensor 'w' is of expert 2, and there are 2", argument_error);
  CHECK_THROWS_WITH_AS(
      expert_parallel(tensors, {}, 2, rank_count{2}),
      "expert_parallel: 1 tensors and 0 experts of tensors; each tensor has one, or `no_expert`",
      argument_error);
  CHECK_THROWS_WITH_AS(expert_parallel(tensors, {}, 2, rank_count{0}),
                       "expert_parallel: 0 ranks; a world has at least one", argument_error);
}
