#include <llmmem/sharding/live_reshard.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "support/partition_checks.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/sharding_world.hpp"

using namespace llmmem;
using llmmem_tests::elements_of;
using llmmem_tests::layout_kinds;
using llmmem_tests::random_layout;
using llmmem_tests::random_numbers;
using llmmem_tests::random_tensors;
using llmmem_tests::seeds;
using llmmem_tests::tensors_of;

namespace {

/// Element by element: what each rank is to have comes once; what it has already, from itself; what it has
/// not, from another that has it; and the counts say so.
template <partition From, partition To>
void check_reshard(const std::vector<tensor_facts>& tensors, const From& from, const To& to) {
  const live_reshard plan = reshard(tensors, from, to);
  std::uint64_t moved_bytes = 0;
  std::uint64_t kept_bytes = 0;
  std::map<std::uint32_t, std::uint64_t> sent;
  std::map<std::uint32_t, std::uint64_t> received;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::set<std::uint64_t>> got;  // by tensor and rank
  const auto carry_out = [&](const reshard_copy& copy, bool moves) {
    const stored_piece& source = plan.stored[to_index(copy.source)];
    const wanted_piece& wanted = plan.wanted[to_index(copy.destination)];
    const std::uint32_t rank = to_index(wanted.rank);
    const std::uint64_t width = tensors[to_index(copy.tensor)].element_bytes;
    REQUIRE(source.tensor == copy.tensor);
    REQUIRE(wanted.tensor == copy.tensor);
    REQUIRE(moves == (to_index(source.holder) != rank));
    copy.each_run([&](std::uint64_t a, std::uint64_t b, std::uint64_t run) {
      for (std::uint64_t i = 0; i < run; ++i) {
        const std::uint64_t element = source.elements.element_at(a + i);
        REQUIRE(wanted.elements.element_at(b + i) == element);
        REQUIRE(from.local(copy.tensor, rank_id{to_index(source.holder)}).contains(element));
        const bool had =
            rank < to_number(from.world()) && from.local(copy.tensor, rank_id{rank}).contains(element);
        REQUIRE(had == !moves);
        REQUIRE(got[{to_index(copy.tensor), rank}].insert(element).second);
        (moves ? moved_bytes : kept_bytes) += width;
        if (moves) {
          sent[to_index(source.holder)] += width;
          received[rank] += width;
        }
      }
    });
  };
  for (const reshard_copy& each : plan.moves.copies)
    carry_out(each, true);
  for (const reshard_copy& each : plan.kept)
    carry_out(each, false);
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    for (std::uint32_t r = 0; r < to_number(to.world()); ++r) {
      const auto found = got.find({t, r});
      const auto wanted = elements_of(to.local(tensor_id{t}, rank_id{r}));
      REQUIRE((found == got.end() ? std::set<std::uint64_t>{} : found->second) == wanted);
    }
  }
  REQUIRE(plan.moves.bytes == moved_bytes);
  REQUIRE(plan.kept_bytes == kept_bytes);
  const auto same = [](const auto& shares, const auto& counted) {
    return std::equal(shares.begin(), shares.end(), counted.begin(), counted.end(),
                      [](const auto& share, const auto& entry) {
                        return to_index(share.id) == entry.first && share.bytes == entry.second;
                      });
  };
  REQUIRE(same(plan.moves.holders, sent));
  REQUIRE(same(plan.moves.ranks, received));
}

}  // namespace

TEST_CASE("between any two partitions each rank receives its missing elements once, and nothing else") {
  for (const auto seed : seeds(4)) {
    CAPTURE(seed);
    random_numbers random(seed);
    for (std::uint32_t kinds = 0; kinds < layout_kinds * layout_kinds; ++kinds) {
      CAPTURE(kinds);
      const auto tensors = random_tensors(random, 5);
      const rank_count n{1 + random.below(random.once_in(6) ? 17U : 6U)};
      const rank_count m{1 + random.below(random.once_in(6) ? 17U : 6U)};
      const auto from = random_layout(random, tensors, kinds % layout_kinds, n);
      const auto to = random_layout(random, tensors, kinds / layout_kinds, m);
      std::visit([&](const auto& a, const auto& b) { check_reshard(tensors, a, b); }, from, to);
    }
  }
}

TEST_CASE("a reshard to the same partition moves nothing") {
  random_numbers random(1);
  for (std::uint32_t kind = 0; kind < layout_kinds; ++kind) {
    CAPTURE(kind);
    const auto tensors = random_tensors(random, 6);
    const auto layout = random_layout(random, tensors, kind, rank_count{4});
    std::visit(
        [&](const auto& p) {
          const live_reshard plan = reshard(tensors, p, p);
          CHECK(plan.moves == reshard_plan{});
          std::uint64_t held = 0;
          for (std::uint32_t r = 0; r < 4; ++r)
            held += local_bytes(p, tensors, rank_id{r});
          CHECK(plan.kept_bytes == held);
        },
        layout);
  }
}

TEST_CASE("a higher stage of ZeRO moves nothing, and a lower one gathers") {
  const auto tensors = tensors_of({tensor_shape::matrix(7, 5), tensor_shape::vector(9)});
  const zero_partition whole(tensors, rank_count{4}, zero_stage::gradients, state_kind::weights);
  const zero_partition sharded(tensors, rank_count{4}, zero_stage::weights, state_kind::weights);
  CHECK(reshard(tensors, whole, sharded).moves.bytes == 0);
  // 44 elements of 4 bytes: each rank lacks the 33 of the others.
  const live_reshard gather = reshard(tensors, sharded, whole);
  CHECK(gather.moves.bytes == 4 * 33 * 4);
  CHECK(gather.kept_bytes == 44 * 4);
  CHECK(gather.kept_elements == 44);
}

TEST_CASE("a reshard with another catalogue is refused with the mismatched side") {
  const auto tensors = tensors_of({tensor_shape::vector(4)});
  const auto other = tensors_of({tensor_shape::vector(5)});
  const llmmem::sharding::replicated ours(tensors, rank_count{1});
  const llmmem::sharding::replicated theirs(other, rank_count{1});
  CHECK_THROWS_WITH_AS(reshard(tensors, theirs, ours),
                       "reshard: from: tensor 'w' is 4 x 1 in the catalogue and 5 x 1 in the partition",
                       argument_error);
  CHECK_THROWS_WITH_AS(reshard(tensors, ours, theirs),
                       "reshard: to: tensor 'w' is 4 x 1 in the catalogue and 5 x 1 in the partition",
                       argument_error);
}
