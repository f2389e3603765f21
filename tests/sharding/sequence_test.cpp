#include <llmmem/sharding/partition_bytes.hpp>
#include <llmmem/sharding/ring_bytes.hpp>
#include <llmmem/sharding/sequence.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "support/partition_checks.hpp"

using namespace llmmem;
using llmmem_tests::check_partition;
using llmmem_tests::tensors_of;
using enum llmmem::sequence_role;

TEST_CASE("each token's activations are on one rank, and the weights are on all") {
  const std::vector<std::uint64_t> dimensions{7, 2, 3};
  const auto tensors = tensors_of({tensor_shape::of(dimensions), tensor_shape::vector(3)}, 2);
  const sequence_split p(tensors, std::vector{along_sequence, whole}, rank_count{3});
  check_partition(p, tensors, rank_count{3});
  CHECK(p.tokens(tensor_id{0}, rank_id{0}) == index_range{0, 3});
  CHECK(p.tokens(tensor_id{0}, rank_id{1}) == index_range{3, 2});
  CHECK(p.tokens(tensor_id{0}, rank_id{2}) == index_range{5, 2});
  CHECK(p.tokens(tensor_id{1}, rank_id{2}) == index_range{0, 3});
  CHECK(p.local(tensor_id{0}, rank_id{1}) == element_runs::flat_range(18, 12));
  CHECK(p.local(tensor_id{1}, rank_id{1}) == element_runs::all_of(3));
  CHECK(p.is_replicated(tensor_id{1}));
  CHECK(!p.is_replicated(tensor_id{0}));
  CHECK(p.role(tensor_id{0}) == along_sequence);
  CHECK(p.role(tensor_id{1}) == whole);
  check_partition(sequence_split(tensors, std::vector{along_sequence, whole}, rank_count{11}), tensors,
                  rank_count{11});
}

TEST_CASE("the 552 MiB of a GPT-3 layer under tensor parallelism become 342 MiB") {
  // Korthikanti et al., Table 2: of s b h (34 + 5 a s / h) bytes, 10 s b h are on every one of t ranks
  // without sequence parallelism: inputs of two norms and of two linear layers, 2 bytes each, two dropout
  // masks of 1.
  constexpr std::uint64_t s = 2048, h = 12288, a = 96, t = 8, mib = 1 << 20;
  std::vector<tensor_facts> tensors(6,
                                    {.name = "x", .shape = tensor_shape::matrix(s, h), .element_bytes = 2});
  tensors[4].element_bytes = tensors[5].element_bytes = 1;
  const std::vector<sequence_role> cut(6, along_sequence);
  const std::vector<sequence_role> uncut(6, whole);
  const std::uint64_t in_layers = 24 * s * h / t + 5 * a * s * s / t;  // split in either case
  const auto mib_of = [&](const std::vector<sequence_role>& roles) {
    return (local_bytes(sequence_split(tensors, roles, rank_count{t}), tensors, rank_id{7}) + in_layers) /
           mib;
  };
  CHECK(mib_of(uncut) == 552);
  CHECK(mib_of(cut) == 342);
}

TEST_CASE("a reduce-scatter and an all-gather along the sequence cost as much as the all-reduce") {
  for (std::uint32_t t = 1; t <= 8; ++t) {
    for (const std::uint64_t tokens : {8U, 13U, 3U}) {
      const auto tensors = tensors_of({tensor_shape::matrix(tokens, 5)}, 2);
      const sequence_split p(tensors, std::vector{along_sequence}, rank_count{t});
      for (std::uint32_t r = 0; r < t; ++r) {
        const auto sent = [&](ring_collective what) {
          return ring_sent_bytes(what, tokens, 10, rank_count{t}, rank_id{r});
        };
        CHECK(sent(ring_collective::reduce_scatter) + sent(ring_collective::all_gather) ==
              sent(ring_collective::all_reduce));
        // A rank ends a reduce-scatter with what it holds along the sequence.
        CHECK(sent(ring_collective::reduce_scatter) == tokens * 10 - local_bytes(p, tensors, rank_id{r}));
      }
    }
  }
}

TEST_CASE("impossible roles of tensors are refused") {
  const auto tensors = tensors_of({tensor_shape::vector(4), tensor_shape::scalar()});
  CHECK_THROWS_WITH_AS(sequence_split(tensors, std::vector{whole}, rank_count{2}),
                       "sequence_split: 2 tensors and 1 roles; each tensor has one", argument_error);
  CHECK_THROWS_WITH_AS(sequence_split(tensors, std::vector{along_sequence, along_sequence}, rank_count{2}),
                       "sequence_split: tensor 'w' has no dimensions and so no sequence; its role is `whole`",
                       argument_error);
  CHECK_THROWS_WITH_AS(sequence_split(tensors, std::vector{along_sequence, whole}, rank_count{0}),
                       "sequence_split: 0 ranks; a world has at least one", argument_error);
}
