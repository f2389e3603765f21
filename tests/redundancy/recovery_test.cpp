#include <llmmem/redundancy/recovery.hpp>

#include <llmmem/redundancy/placement.hpp>
#include <llmmem/redundancy/reed_solomon.hpp>
#include <llmmem/redundancy/xor_parity.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "redundancy/pieces.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Ranks' states, and all that they keep for each other, as bytes.
class kept_world {
 public:
  kept_world(const replica_map& map, std::vector<byte_vector> states)
      : map_(map), states_(std::move(states)) {
    if (!map.scheme().is_coded()) return;
    for (std::uint32_t g = 0; g < map.groups().size(); ++g) {
      const coded_group layout = map.layout(g);
      for (std::uint32_t codeword = 0; codeword < layout.codewords(); ++codeword) {
        std::vector<byte_vector> data;
        std::size_t longest = 0;
        for (std::uint32_t d = 0; d < layout.shape().data; ++d) {
          data.push_back(stripe(g, layout.member_of(piece_id{d}, codeword), codeword));
          longest = std::max(longest, data.back().size());
        }
        std::vector<byte_vector> parity(layout.shape().parity, byte_vector(longest));
        if (map.scheme().kind() == redundancy_kind::parity) {
          xor_all(parity[0], spans_of<const std::byte>(data)).value();
        } else {
          reed_solomon<>(layout.shape())
              .encode(spans_of<const std::byte>(data), spans_of<std::byte>(parity))
              .value();
        }
        for (std::uint32_t p = 0; p < layout.shape().parity; ++p)
          parity_[{g, codeword, layout.shape().data + p}] = parity[p];
      }
    }
  }

  /// Does the plan, with nothing that failed ranks had, and checks what each source says it sends.
  [[nodiscard]] std::vector<byte_vector> recovered(const recovery_plan& plan, const rank_set& failed) const {
    std::vector<byte_vector> back = states_;
    for (const rank_id rank : failed)
      back[to_index(rank)] = byte_vector(states_[to_index(rank)].size(), std::byte{0xDD});
    for (const recovery_step& step : plan.steps) {
      REQUIRE(failed.contains(step.lost));
      byte_vector sum(step.range.count);
      for (const recovery_source& source : step.sources) {
        REQUIRE_FALSE(failed.contains(source.holder));
        const byte_vector piece = sent(step, source);
        REQUIRE(source.bytes == std::min<std::uint64_t>(piece.size(), step.range.count));
        gf256_multiply_add(sum, std::span(piece).first(source.bytes), source.coefficient).value();
      }
      std::copy(sum.begin(), sum.end(),
                back[to_index(step.lost)].begin() + static_cast<std::ptrdiff_t>(step.range.first));
    }
    return back;
  }

 private:
  [[nodiscard]] byte_vector stripe(std::uint32_t group, std::uint32_t member, std::uint32_t codeword) const {
    const coded_group layout = map_.layout(group);
    const byte_vector& state = states_[to_index(map_.groups()[group][member])];
    const llmmem::redundancy::byte_range range =
        stripe_of(state.size(), layout.shape().data, layout.stripe_in(member, codeword));
    const auto first = state.begin() + static_cast<std::ptrdiff_t>(range.first);
    return {first, first + static_cast<std::ptrdiff_t>(range.count)};
  }

  [[nodiscard]] byte_vector sent(const recovery_step& step, const recovery_source& source) const {
    if (step.kind == recovery_kind::fetch) {
      const auto holders = map_.holders(step.lost);
      REQUIRE(std::find(holders.begin(), holders.end(), source.holder) != holders.end());
      return states_[to_index(step.lost)];
    }
    const std::uint32_t group = map_.group_of(step.lost);
    REQUIRE(map_.group_of(source.holder) == group);
    const coded_group layout = map_.layout(group);
    REQUIRE(layout.piece_of(map_.member_of(source.holder), step.codeword) == source.piece);
    if (to_index(source.piece) < layout.shape().data)
      return stripe(group, map_.member_of(source.holder), step.codeword);
    return parity_.at({group, step.codeword, to_index(source.piece)});
  }

  struct place {
    std::uint32_t group;
    std::uint32_t codeword;
    std::uint32_t piece;
    auto operator<=>(const place&) const = default;
  };

  const replica_map& map_;
  std::vector<byte_vector> states_;
  std::map<place, byte_vector> parity_;
};

std::vector<std::uint64_t> sizes_of(const std::vector<byte_vector>& states) {
  std::vector<std::uint64_t> sizes;
  for (const byte_vector& state : states)
    sizes.push_back(state.size());
  return sizes;
}

void check_recovery(const replica_map& map, std::mt19937_64& random) {
  const std::uint32_t world = to_number(map.world());
  std::vector<byte_vector> states;
  for (std::uint32_t rank = 0; rank < world; ++rank)
    states.push_back(random_bytes(random, random() % 5 == 0 ? 0 : random() % 700));
  const std::vector<std::uint64_t> sizes = sizes_of(states);
  const kept_world kept(map, states);
  for (std::uint32_t bits = 0; bits < 1U << world; ++bits) {
    CAPTURE(bits);
    rank_set failed;
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      if ((bits >> rank & 1U) != 0) failed.insert(rank_id{rank});
    }
    const recovery_plan plan = plan_recovery(map, failed, sizes);
    REQUIRE(plan.unrecoverable == map.survives(failed).lost);
    REQUIRE(plan == plan_recovery(map, failed, sizes));
    std::vector<std::uint64_t> load(world, 0);
    for (const recovery_step& step : plan.steps) {
      for (const recovery_source& source : step.sources)
        load[to_index(source.holder)] += source.bytes;
    }
    std::uint64_t sum = 0;
    for (const std::uint64_t each : load)
      sum += each;
    REQUIRE(plan.bytes_sent == sum);
    REQUIRE(plan.max_sent == *std::max_element(load.begin(), load.end()));
    const std::vector<byte_vector> back = kept.recovered(plan, failed);
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      if (!plan.unrecoverable.contains(rank_id{rank})) REQUIRE(back[rank] == states[rank]);
    }
  }
}

}  // namespace

TEST_CASE("after every set of failures every recoverable state is restored to the byte") {
  std::mt19937_64 random(1);
  for (const char* text :
       {"mirror:2", "mirror:3", "parity:1", "parity:3", "rs:2+2", "rs:3+2", "rs:1+3", "compute"}) {
    CAPTURE(text);
    const auto scheme = redundancy_scheme::parse(text);
    for (const std::uint32_t world : {2U, 4U, 5U, 7U, 9U}) {
      CAPTURE(world);
      if (scheme.fits(rank_count{world})) continue;
      check_recovery(ring_neighbours().place(scheme, rank_count{world}), random);
      if (world / 2 >= scheme.group_ranks())
        check_recovery(llmmem::redundancy::grouped(2).place(scheme, rank_count{world}), random);
    }
  }
  const failure_domains domains({domain_id{0}, domain_id{0}, domain_id{0}, domain_id{1}, domain_id{2}});
  check_recovery(domains.place(redundancy_scheme::mirror(2), rank_count{5}), random);
}

TEST_CASE("copies are fetched from the least loaded holder, and states with few holders come first") {
  // Rank 0's copies are on 1 and 2, rank 3's only on 1 when 4 has failed too.
  const replica_map map = replica_map::of_holders(redundancy_scheme::mirror(3), {{rank_id{1}, rank_id{2}},
                                                                                 {rank_id{2}, rank_id{0}},
                                                                                 {rank_id{0}, rank_id{1}},
                                                                                 {rank_id{1}, rank_id{4}},
                                                                                 {rank_id{1}, rank_id{2}}});
  const std::vector<std::uint64_t> bytes{100, 100, 100, 90, 80};
  const recovery_plan plan = plan_recovery(map, {rank_id{0}, rank_id{3}, rank_id{4}}, bytes);
  REQUIRE(plan.steps.size() == 3);
  CHECK(plan.steps[0] == recovery_step{.kind = recovery_kind::fetch,
                                       .lost = rank_id{3},
                                       .range = {0, 90},
                                       .sources = {{.holder = rank_id{1}, .bytes = 90}}});
  CHECK(plan.steps[1].lost == rank_id{0});
  CHECK(plan.steps[1].sources[0].holder == rank_id{2});
  CHECK(plan.steps[2].lost == rank_id{4});
  CHECK(plan.steps[2].sources[0].holder == rank_id{1});
  CHECK(plan.bytes_sent == 270);
  CHECK(plan.max_sent == 170);
}

TEST_CASE("a rebuild loads the live ranks evenly") {
  // One of eight lost: five of the seven are enough for each stripe, and all take part.
  const replica_map map =
      llmmem::redundancy::grouped().place(redundancy_scheme::rs({.data = 5, .parity = 3}), rank_count{8});
  const std::vector<std::uint64_t> bytes(8, 64 * 5 * 7);
  const recovery_plan plan = plan_recovery(map, {rank_id{2}}, bytes);
  CHECK(plan.steps.size() == 5);
  CHECK(plan.bytes_sent == 5 * bytes[0]);
  std::vector<std::uint64_t> load(8, 0);
  for (const recovery_step& step : plan.steps) {
    REQUIRE(step.sources.size() == 5);
    for (const recovery_source& source : step.sources)
      load[to_index(source.holder)] += source.bytes;
  }
  for (std::uint32_t rank = 0; rank < 8; ++rank) {
    if (rank != 2) CHECK(load[rank] >= 3 * 64 * 7);
  }
  CHECK(plan.max_sent == 4 * 64 * 7);  // 25 pieces from 7 ranks: no plan has less
}

TEST_CASE("a single parity is an exclusive or: every coefficient is 1") {
  const replica_map map = llmmem::redundancy::grouped().place(redundancy_scheme::parity(3), rank_count{4});
  for (const recovery_step& step :
       plan_recovery(map, {rank_id{1}}, std::vector<std::uint64_t>(4, 999)).steps) {
    for (const recovery_source& source : step.sources)
      CHECK(source.coefficient == 1);
  }
}

TEST_CASE("what cannot be planned is refused") {
  const replica_map map = llmmem::redundancy::grouped().place(redundancy_scheme::mirror(2), rank_count{4});
  CHECK_THROWS_WITH_AS(static_cast<void>(plan_recovery(map, {}, std::vector<std::uint64_t>(3))),
                       "plan_recovery: bytes of 3 states are given, but the world has 4 ranks",
                       argument_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(plan_recovery(map, {rank_id{1}, rank_id{4}, rank_id{9}},
                                                       std::vector<std::uint64_t>(4))),
                       "plan_recovery: failed ranks 4 and 9; the world has ranks 0 to 3", argument_error);
}
