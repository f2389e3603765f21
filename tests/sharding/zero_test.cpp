#include <llmmem/sharding/live_reshard.hpp>
#include <llmmem/sharding/zero.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
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

namespace {

constexpr state_kind kinds[] = {state_kind::weights, state_kind::gradients, state_kind::optimizer};
constexpr zero_stage stages[] = {zero_stage::none, zero_stage::optimizer, zero_stage::gradients,
                                 zero_stage::weights};

}  // namespace

TEST_CASE("ranks keep the bytes of the ZeRO paper's Table 1") {
  struct column {
    std::uint64_t billions_and_a_half;  // of parameters, doubled, so that 7.5 is whole
    std::uint32_t ranks;
    double stage1, stage2, stage3;  // GB, as printed: cut or rounded to the digits shown
  };
  for (const column& each :
       {column{15, 1, 120, 120, 120}, column{15, 4, 52.5, 41.3, 30}, column{15, 16, 35.6, 21.6, 7.5},
        column{15, 64, 31.4, 16.6, 1.88}, column{15, 256, 30.4, 15.4, 0.47},
        column{15, 1024, 30.1, 15.1, 0.12}, column{256, 64, 536, 284, 32}, column{256, 1024, 513, 257, 2},
        column{2000, 64, 4187, 2218, 250}, column{2000, 1024, 4011, 2013, 15.6}}) {
    CAPTURE(each.billions_and_a_half);
    CAPTURE(each.ranks);
    const auto tensors = tensors_of({tensor_shape::matrix(each.billions_and_a_half * 50'000, 10'000)});
    const rank_count world{each.ranks};
    const rank_id first{0};
    const auto gigabytes = [&](const zero_state& state) {
      return static_cast<double>(state.bytes(first).total()) / 1e9;
    };
    const auto as_printed = [](double found, double printed) {
      // Below 100 one digit behind the point, below 2 two of them; above, whole.
      const double unit = printed < 2 ? 0.01 : printed < 100 ? 0.1 : 1;
      return std::abs(found - printed) < unit;
    };
    CHECK(as_printed(gigabytes(zero1(tensors, world)), each.stage1));
    CHECK(as_printed(gigabytes(zero2(tensors, world)), each.stage2));
    CHECK(as_printed(gigabytes(zero3(tensors, world)), each.stage3));
    CHECK(gigabytes(zero_state(tensors, world, zero_stage::none)) ==
          doctest::Approx(8.0 * static_cast<double>(each.billions_and_a_half)));
  }
}

TEST_CASE("if the ranks divide the parameters, the formulas hold to the byte") {
  constexpr std::uint64_t p = 7'500'000'000;
  const auto tensors = tensors_of({tensor_shape::vector(p)});
  for (const std::uint32_t n : {1U, 2U, 50U, 64U * 5U}) {
    for (std::uint32_t r = 0; r < n; ++r) {
      REQUIRE(zero1(tensors, rank_count{n}).bytes(rank_id{r}).total() == 4 * p + 12 * p / n);
      REQUIRE(zero2(tensors, rank_count{n}).bytes(rank_id{r}).total() == 2 * p + 14 * p / n);
      REQUIRE(zero3(tensors, rank_count{n}).bytes(rank_id{r}).total() == 16 * p / n);
    }
  }
}

TEST_CASE("the bytes of a kind are those of the elements that its partition gives the rank, for any cut") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto tensors = random_tensors(random, 6);
    const rank_count world{1 + random.below(9U)};
    std::uint64_t all = 0;
    for (const auto& each : tensors)
      all += each.shape.elements();
    std::vector<std::uint64_t> boundaries{0, all};
    while (boundaries.size() <= to_number(world))
      boundaries.push_back(random.below(all + 1));
    std::sort(boundaries.begin(), boundaries.end());
    const flat_uneven cut(tensors, boundaries);
    const bytes_per_parameter each{.weights = 1 + random.below(std::uint64_t{4}),
                                   .gradients = 1 + random.below(std::uint64_t{4}),
                                   .optimizer = 1 + random.below(std::uint64_t{16})};
    for (const zero_stage stage : stages) {
      const zero_state state(cut, stage, each);
      REQUIRE(state.stage() == stage);
      REQUIRE(state.world() == world);
      const std::uint64_t widths[] = {each.weights, each.gradients, each.optimizer};
      for (const state_kind kind : kinds) {
        const zero_partition& p = state.of(kind);
        check_partition(p, tensors, world);
        const bool sharded = static_cast<int>(stage) + static_cast<int>(kind) >= 3;
        for (std::uint32_t r = 0; r < to_number(world); ++r) {
          std::uint64_t elements = 0;
          for (std::uint32_t t = 0; t < tensors.size(); ++t)
            elements += p.local(tensor_id{t}, rank_id{r}).elements();
          REQUIRE(elements == (sharded ? boundaries[r + 1] - boundaries[r] : all));
          REQUIRE(state.bytes(kind, rank_id{r}) == elements * widths[static_cast<int>(kind)]);
          REQUIRE(p.range_of(rank_id{r}) == index_range{boundaries[r], boundaries[r + 1] - boundaries[r]});
        }
      }
    }
  }
}

TEST_CASE("the largest rank keeps the bytes of training_state without a catalogue") {
  for (std::uint64_t p = 0; p < 40; ++p) {
    for (std::uint32_t n = 1; n < 9; ++n) {
      for (const zero_stage stage : stages) {
        const zero_state state(tensors_of({tensor_shape::vector(p)}), rank_count{n}, stage);
        REQUIRE(state.bytes(rank_id{0}) == training_state(p, stage, n));
      }
    }
  }
}

TEST_CASE("the shards of a rank are the same elements in every kind, at every stage") {
  const auto tensors = tensors_of({tensor_shape::matrix(5, 7), tensor_shape::vector(3)});
  for (const zero_stage stage : stages) {
    const zero_state state(tensors, rank_count{4}, stage);
    for (std::uint32_t t = 0; t < 2; ++t) {
      for (std::uint32_t r = 0; r < 4; ++r) {
        const auto shard = state.of(state_kind::optimizer).owned(tensor_id{t}, rank_id{r});
        CHECK(state.of(state_kind::weights).owned(tensor_id{t}, rank_id{r}) == shard);
        CHECK(state.of(state_kind::gradients).owned(tensor_id{t}, rank_id{r}) == shard);
      }
    }
  }
}

TEST_CASE("state for zero ranks, and too many bytes, are refused") {
  const auto tensors = tensors_of({tensor_shape::vector(4)});
  CHECK_THROWS_WITH_AS(zero3(tensors, rank_count{0}), "flat_uneven: 0 ranks; a world has at least one",
                       argument_error);
  const auto huge = tensors_of({tensor_shape::vector(max_bytes / 8)});
  CHECK_THROWS_WITH_AS(zero1(huge, rank_count{2}),
                       "zero_state: elements x bytes: 1152921504606846975 x 12 exceeds the limit of 2^63 - 1 "
                       "bytes; lower one of the two",
                       length_error);
  const bytes_per_parameter wide{.weights = 4, .gradients = 4, .optimizer = 1};
  CHECK_THROWS_WITH_AS(zero3(huge, rank_count{2}, wide),
                       "zero_state: bytes of all kinds: 9223372036854775800 + 1152921504606846975 exceeds "
                       "the limit of 2^63 - 1 bytes; lower one of the two",
                       length_error);
}
