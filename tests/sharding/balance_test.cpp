#include <llmmem/sharding/balance.hpp>
#include <llmmem/sharding/whole_matrices.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "support/partition_checks.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

std::vector<std::uint64_t> with_whole(const std::vector<std::uint64_t>& items,
                                      std::vector<std::uint64_t> loads, const std::vector<rank_id>& writers) {
  REQUIRE(writers.size() == items.size());
  for (std::size_t i = 0; i < items.size(); ++i)
    loads.at(to_index(writers[i])) += items[i];
  return loads;
}

std::uint64_t most(const std::vector<std::uint64_t>& loads) {
  return *std::max_element(loads.begin(), loads.end());
}
std::uint64_t least(const std::vector<std::uint64_t>& loads) {
  return *std::min_element(loads.begin(), loads.end());
}

/// The least that the busiest rank can have, by trying everything.
std::uint64_t best_of(const std::vector<std::uint64_t>& items, std::vector<std::uint64_t>& loads,
                      std::size_t next = 0) {
  if (next == items.size()) return most(loads);
  std::uint64_t best = ~std::uint64_t{0};
  for (auto& each : loads) {
    each += items[next];
    best = std::min(best, best_of(items, loads, next + 1));
    each -= items[next];
  }
  return best;
}

/// Checks that the shares cover the items, each element once and in order, with cuts where they may be.
std::vector<std::uint64_t> with_shares(const std::vector<llmmem::sharding::cuttable_item>& items,
                                       std::vector<std::uint64_t> loads, std::uint64_t alignment,
                                       const std::vector<llmmem::sharding::write_share>& shares) {
  std::size_t next = 0;
  rank_id rank{0};
  for (std::uint32_t i = 0; i < items.size(); ++i) {
    std::uint64_t covered = 0;
    while (next < shares.size() && shares[next].item == i) {
      const llmmem::sharding::write_share& share = shares[next++];
      REQUIRE(share.count != 0);
      REQUIRE(share.first == covered);
      REQUIRE(share.rank >= rank);  // one stretch for each rank
      REQUIRE(share.first % alignment == 0);
      rank = share.rank;
      covered += share.count;
      loads.at(to_index(share.rank)) += share.count * items[i].element_bytes;
    }
    REQUIRE(covered == items[i].elements);
  }
  REQUIRE(next == shares.size());
  return loads;
}

}  // namespace

TEST_CASE("the busiest rank has at most 4/3 - 1/(3 world) of the optimum") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t world = 1 + random.below(std::uint64_t{4});
    std::vector<std::uint64_t> items(random.below(std::uint64_t{8}));
    for (auto& each : items)
      each = random.below(std::uint64_t{20});
    std::vector<std::uint64_t> none(world, 0);
    const auto loads = with_whole(items, none, assign_writers(items, none));
    REQUIRE(3 * world * most(loads) <= (4 * world - 1) * best_of(items, none));
  }
}

TEST_CASE("whole matrices are on one rank each, by cost, within 4/3 - 1/(3 world) of the optimum") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t world = 1 + random.below(std::uint64_t{4});
    std::vector<tensor_facts> tensors(random.below(std::uint64_t{8}));
    std::vector<std::uint64_t> costs;
    for (tensor_facts& each : tensors) {
      each = {"matrix",
              tensor_shape::matrix(1 + random.below(std::uint64_t{9}), random.below(std::uint64_t{9})), 4};
      costs.push_back(newton_schulz_cost(each.shape));
    }
    const whole_matrices split(tensors, rank_count{static_cast<std::uint32_t>(world)});
    llmmem_tests::check_partition(split, tensors, rank_count{static_cast<std::uint32_t>(world)});
    std::vector<rank_id> owners;
    for (std::uint32_t i = 0; i < tensors.size(); ++i)
      owners.push_back(split.owner(tensor_id{i}));
    std::vector<std::uint64_t> none(world, 0);
    const auto loads = with_whole(costs, none, owners);
    REQUIRE(std::equal(loads.begin(), loads.end(), split.loads().begin(), split.loads().end()));
    REQUIRE(3 * world * most(loads) <= (4 * world - 1) * best_of(costs, none));
  }
}

TEST_CASE("matrices are balanced by Newton-Schulz cost and not by bytes, and loads carry over") {
  static_assert(newton_schulz_cost(tensor_shape::matrix(2, 3), 1) == 2 * 2 * 2 * 3 + 2 * 2 * 2);
  static_assert(newton_schulz_cost(tensor_shape::matrix(3, 2)) == 5 * 32);
  static_assert(newton_schulz_cost(tensor_shape::vector(7)) == 7);
  // The square one costs more than the others together, which have as many bytes.
  std::vector<tensor_facts> tensors{{"square", tensor_shape::matrix(64, 64), 4}};
  for (int i = 0; i < 16; ++i)
    tensors.push_back({"flat", tensor_shape::matrix(4, 64), 4});
  const whole_matrices split(tensors, rank_count{2});
  for (std::uint32_t i = 0; i < tensors.size(); ++i)
    CHECK(split.owner(tensor_id{i}) == rank_id{i == 0 ? 0U : 1U});
  const std::uint64_t costs[] = {3, 3};
  const whole_matrices next(std::span<const tensor_facts>(tensors).first(2), costs, split.loads());
  CHECK(next.owner(tensor_id{0}) == rank_id{1});
  CHECK(next.owner(tensor_id{1}) == rank_id{1});
  CHECK(next.loads()[1] == split.loads()[1] + 6);
  CHECK_THROWS_WITH_AS(whole_matrices(tensors, costs, split.loads()),
                       "whole_matrices: 2 costs of 17 tensors; give one for each", argument_error);
  CHECK_THROWS_AS(whole_matrices(tensors, rank_count{0}), argument_error);
}

TEST_CASE("without large items, the ranks' writes differ by at most a factor of 1.1") {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t world = 1 + random.below(std::uint64_t{16});
    std::vector<std::uint64_t> items(40 * world);
    for (auto& each : items)
      each = 1 + random.below(std::uint64_t{1} << 30);
    // What ranks write already differs, but by less than the items are in all.
    std::vector<std::uint64_t> already(world);
    for (auto& each : already)
      each = random.below(std::uint64_t{4} << 30);
    const auto loads = with_whole(items, already, assign_writers(items, already));
    REQUIRE(10 * most(loads) <= 11 * least(loads));
  }
}

TEST_CASE("writers are deterministic, and ties go to the lower item and rank") {
  const std::vector<std::uint64_t> items{5, 7, 5, 7, 0};
  const std::vector<std::uint64_t> already{1, 0, 0};
  CHECK(assign_writers(items, already) ==
        std::vector{rank_id{0}, rank_id{1}, rank_id{0}, rank_id{2}, rank_id{1}});
  CHECK(assign_writers({}, already).empty());
}

TEST_CASE(
    "with cut items, the ranks' writes differ by at most a factor of 1.1 from 32 alignments per rank on") {
  std::uint64_t bound = 0;
  for (const auto seed : seeds(3000)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t world = 1 + random.below(std::uint64_t{12});
    const std::uint64_t alignment = random.once_in(3) ? 1 : 1 + random.below(std::uint64_t{64});
    std::vector<llmmem::sharding::cuttable_item> items(random.below(std::uint64_t{12}));
    std::uint64_t widest = 1;
    std::uint64_t bytes = 0;
    for (auto& each : items) {
      // Tiny ones, and ones too large for any rank.
      each.elements = random.below(random.once_in(2) ? std::uint64_t{5} : 100 * alignment * world);
      each.element_bytes = 1U << random.below(4U);
      widest = std::max<std::uint64_t>(widest, each.element_bytes);
      bytes += each.elements * each.element_bytes;
    }
    std::vector<std::uint64_t> already(world, 0);
    if (random.once_in(2)) {
      for (auto& each : already)
        each = random.below(bytes / world + 2);
    }
    const auto shares = cut_writes(items, already, alignment);
    const auto loads = with_shares(items, already, alignment, shares);
    REQUIRE(shares.size() <= items.size() + world - 1);
    const std::uint64_t level = std::accumulate(loads.begin(), loads.end(), std::uint64_t{0}) / world;
    if (most(already) > level || level < 32 * alignment * widest) continue;
    ++bound;
    REQUIRE(10 * most(loads) <= 11 * least(loads));
  }
  CHECK(bound > 1000);
}

TEST_CASE("a rank that already writes more than its share gets nothing, and the others become even") {
  const std::vector<llmmem::sharding::cuttable_item> items{{.elements = 90, .element_bytes = 1}};
  const std::vector<std::uint64_t> already{500, 10, 0, 20};
  CHECK(with_shares(items, already, 1, cut_writes(items, already)) ==
        std::vector<std::uint64_t>{500, 40, 40, 40});
}

TEST_CASE("a cut is at the nearest multiple of the alignment, or at the item's end") {
  const std::vector<std::uint64_t> three(3, 0);
  const std::vector<llmmem::sharding::cuttable_item> items{{.elements = 100, .element_bytes = 4}};
  CHECK(cut_writes(items, three, 8) == std::vector<llmmem::sharding::write_share>{{0, rank_id{0}, 0, 32},
                                                                                  {0, rank_id{1}, 32, 32},
                                                                                  {0, rank_id{2}, 64, 36}});
  // 66 is nearer to 70, the end, than to 56.
  const std::vector<llmmem::sharding::cuttable_item> two{{.elements = 70}, {.elements = 62}};
  CHECK(cut_writes(two, std::vector<std::uint64_t>(2, 0), 28) ==
        std::vector<llmmem::sharding::write_share>{{0, rank_id{0}, 0, 70}, {1, rank_id{1}, 0, 62}});
}

TEST_CASE("writers for zero ranks, and too many bytes, are refused") {
  CHECK_THROWS_WITH_AS(assign_writers({}, {}),
                       "assign_writers: `already` has no ranks; it has one number for each", argument_error);
  CHECK_THROWS_WITH_AS(cut_writes({}, {}), "cut_writes: `already` has no ranks; it has one number for each",
                       argument_error);
  const std::vector<std::uint64_t> one(1, 1);
  CHECK_THROWS_WITH_AS(cut_writes({}, one, 0), "cut_writes: an alignment of 0 elements; 1 cuts anywhere",
                       argument_error);
  const std::vector<std::uint64_t> huge{max_bytes};
  CHECK_THROWS_WITH_AS(assign_writers(huge, one),
                       "assign_writers: bytes: 1 + 9223372036854775807 exceeds the limit of 2^63 - 1 bytes; "
                       "lower one of the two",
                       length_error);
  const std::vector<llmmem::sharding::cuttable_item> item{{.elements = max_bytes, .element_bytes = 2}};
  CHECK_THROWS_WITH_AS(cut_writes(item, one),
                       "cut_writes: elements x bytes: 9223372036854775807 x 2 exceeds the limit of 2^63 - 1 "
                       "bytes; lower one of the two",
                       length_error);
}
