#include <llmmem/redundancy/detail/replica_sender.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "redundancy/kept_world.hpp"
#include "redundancy/sim_rank.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem::detail::epoch_owners;
using llmmem::detail::kept_version;
using llmmem::detail::replica_sender;
using llmmem::detail::replica_setup;
using llmmem::detail::version_facts;
using namespace llmmem_tests;

/// A world whose ranks keep a version by a scheme.
struct world_of {
  replica_setup setup;
  version_facts facts;
  std::optional<replica_map> map;

  world_of(const char* scheme, const std::vector<std::uint64_t>& sizes, const std::vector<rank_id>& owners,
           std::uint32_t world)
      : setup(redundancy_scheme::parse(scheme), sizes, std::vector<seat_id>(sizes.size()), std::nullopt, {}),
        facts(some_facts(1, 5, sizes, owners, world)) {
    if (world > 1)
      map = ring_neighbours().place(*scheme_for(setup.scheme(), rank_count{world}), rank_count{world});
  }

  /// What a rank has before it spreads the version: its own parts.
  [[nodiscard]] kept_version begun_by(rank_id rank) const {
    kept_version made;
    made.begin(facts, rank);
    for (std::uint32_t i = 0; i < setup.parts(); ++i) {
      if (facts.layout.owners[i] == rank)
        made.add_own(part_id{i}, part_in(facts.version, i, setup.sizes()[i]));
    }
    return made;
  }
  [[nodiscard]] epoch_owners owners_at(rank_id rank) const {
    epoch_owners owners(setup);
    owners.begin(1, rank, map);
    owners.assign(facts.layout.owners);
    owners.settle();
    return owners;
  }
};

/// Whether two versions are the same in every place.
bool is_same(const kept_version& a, const kept_version& b, std::uint32_t codewords) {
  bool is_same = a.facts().sums == b.facts().sums && std::ranges::equal(a.own(), b.own());
  for (std::uint32_t i = 0; i < a.facts().layout.world; ++i)
    is_same = is_same && std::ranges::equal(a.at(kept_place::copy, rank_id{i}, 0),
                                            b.at(kept_place::copy, rank_id{i}, 0));
  for (std::uint32_t i = 0; i < codewords; ++i)
    is_same = is_same && std::ranges::equal(a.at(kept_place::parity, {}, i), b.at(kept_place::parity, {}, i));
  return is_same;
}

}  // namespace

TEST_SUITE("replica_sender") {
  TEST_CASE(
      "after a spread each rank has all checksums, and the copies and parities that the map assigns to it") {
    for (const char* const scheme :
         {"mirror:2", "mirror:3", "parity:2", "parity:3", "rs:2+2", "rs:1+2", "compute"}) {
      for (const auto seed : seeds(15)) {
        CAPTURE(scheme);
        CAPTURE(seed);
        random_numbers random(seed);
        const std::uint32_t world = 1 + random.below(6U);
        std::vector<std::uint64_t> sizes;
        std::vector<rank_id> owners;
        for (std::uint32_t i = random.below(10U); i != 0; --i) {
          sizes.push_back(random.once_in(4) ? 0 : random.below(700U));
          owners.push_back(rank_id{random.below(world)});
        }
        const world_of kept(scheme, sizes, owners, world);
        on_all_ranks(world, seed, [&](sim_rank& ranks) {
          const rank_id self = ranks.rank();
          const epoch_owners of = kept.owners_at(self);
          std::vector<std::vector<std::byte>> wards(sizes.size());
          std::vector<std::span<const std::byte>> by_part(sizes.size());
          for (const part_id part : of.wards()) {
            const std::uint32_t i = to_index(part);
            wards[i] = part_in(5, i, sizes[i]);
            by_part[i] = wards[i];
          }
          replica_sender sender(ranks, kept.setup);
          for (int time = 0; time < 2; ++time) {  // the second time with the memory of the first
            kept_version made = kept.begun_by(self);
            REQUIRE(sender.spread(made, of, by_part, ranks.soon()));
            made.seal();
            const bool is_coded = kept.map && kept.map->scheme().is_coded();
            CHECK(is_same(made, kept_by(kept.facts, self, kept.map),
                          is_coded ? kept.map->layout(kept.map->group_of(self)).codewords() : 0));
            CHECK(made.damage().places() == 0);
          }
        });
      }
    }
  }

  TEST_CASE("a message that changes on its way is an error that names its sender, for any contents") {
    for (const char* const scheme : {"mirror:3", "parity:2", "rs:1+2"}) {
      const world_of kept(scheme, {200, 300, 250}, {rank_id{0}, rank_id{1}, rank_id{2}}, 3);
      std::uint32_t refused = 0;
      for (std::uint32_t number = 0; number < 8; ++number) {
        CAPTURE(scheme);
        CAPTURE(number);
        on_all_ranks(3, 1, [&](sim_rank& ranks) {
          const bool is_victim = to_index(ranks.rank()) == 1;
          replica_sender sender(ranks, kept.setup);
          kept_version made = kept.begun_by(ranks.rank());
          const epoch_owners of = kept.owners_at(ranks.rank());
          const std::uint32_t before = ranks.received();
          if (is_victim) ranks.turn_message(number);
          const result<void> done = sender.spread(made, of, {}, ranks.soon());
          if (!is_victim) return;
          if (ranks.received() - before <= number) {
            CHECK(done);
            return;
          }
          CHECK(done.code() == errc::message_damaged);
          CHECK(done.error().index != 1);
          CHECK(done.error().wanted != done.error().found);
          ++refused;
          ranks.revoke();
        });
      }
      // Checksums of two ranks, and two blobs or stripes of others.
      CHECK(refused == 4);
    }
  }

  TEST_CASE("a failing transport is revoked, so that no rank waits") {
    const world_of kept("mirror:2", {20'000, 30'000}, {rank_id{0}, rank_id{1}}, 2);
    on_all_ranks(2, 1, [&](sim_rank& ranks) {
      replica_sender sender(ranks, kept.setup);
      kept_version made = kept.begun_by(ranks.rank());
      const epoch_owners of = kept.owners_at(ranks.rank());
      if (to_index(ranks.rank()) == 1) return;  // does not take part
      CHECK(sender.spread(made, of, {}, ranks.after(1'000'000)).code() == errc::peer_timed_out);
      CHECK(ranks.is_revoked());
    });
  }

  TEST_CASE("a ward with a different result on this rank is named, and all wards before it are held") {
    const world_of kept("compute", {8, 9, 10, 11}, {rank_id{0}, rank_id{0}, rank_id{0}, rank_id{1}}, 2);
    on_all_ranks(2, 1, [&](sim_rank& ranks) {
      const epoch_owners of = kept.owners_at(ranks.rank());
      std::vector<std::vector<std::byte>> computed;
      for (std::uint32_t i = 0; i < 4; ++i)
        computed.push_back(part_in(5, i, kept.setup.sizes()[i]));
      computed[1][4] ^= std::byte{1};
      const std::vector<std::span<const std::byte>> by_part(computed.begin(), computed.end());
      replica_sender sender(ranks, kept.setup);
      kept_version made = kept.begun_by(ranks.rank());
      const result<void> done = sender.spread(made, of, by_part, ranks.soon());
      if (to_index(ranks.rank()) == 0) {
        CHECK(done);
      } else {
        CHECK(done.error() == failure{errc::checksum_differs, 1, kept.facts.sums[1], crc32c(0, computed[1])});
        CHECK(std::ranges::equal(made.at(kept_place::copy, rank_id{0}, 0), computed[0]));
      }
    });
  }
}
