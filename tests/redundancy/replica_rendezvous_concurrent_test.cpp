#include <llmmem/redundancy/detail/replica_rendezvous.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "redundancy/kept_world.hpp"
#include "redundancy/sim_rank.hpp"
#include "support/random.hpp"
#include "support/replica_damage.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem::detail::held_versions;
using llmmem::detail::kept_version;
using llmmem::detail::known_past;
using llmmem::detail::replica_rendezvous;
using llmmem::detail::replica_setup;
using llmmem::detail::version_facts;
using namespace llmmem_tests;

/// One part a rank, at home in the seat of its number.
replica_setup setup_of(std::uint32_t parts) {
  std::vector<std::uint64_t> sizes;
  std::vector<seat_id> homes;
  for (std::uint32_t i = 0; i < parts; ++i) {
    sizes.push_back(10 + i);
    homes.push_back(seat_id{i});
  }
  return replica_setup(redundancy_scheme::mirror(2), sizes, homes, std::nullopt, {});
}

version_facts facts_of(const replica_setup& setup, std::uint64_t epoch, std::uint64_t version,
                       std::uint32_t world) {
  std::vector<rank_id> owners;
  for (std::uint32_t i = 0; i < setup.parts(); ++i)
    owners.push_back(rank_id{(i + static_cast<std::uint32_t>(version)) % world});
  return some_facts(epoch, version, setup.sizes(), owners, world);
}

/// Makes a rank hold a version, as that rank of the version's epoch.
void hold(held_versions& held, const version_facts& facts, std::uint32_t self) {
  held.begin() =
      kept_by(facts, rank_id{self},
              ring_neighbours().place(redundancy_scheme::mirror(2), rank_count{facts.layout.world}));
  held.finish();
  CHECK(held.commit());
}

}  // namespace

TEST_SUITE("replica_rendezvous") {
  TEST_CASE("all ranks find the version of the latest epoch and number, and the rank that has it") {
    std::uint64_t stale = 0;
    for (const auto seed : seeds(80)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const std::uint32_t world = 2 + random.below(4U);
      const replica_setup setup = setup_of(world);
      // Versions of several epochs, and which of them each rank holds, as which rank of then.
      struct kept_one {
        std::uint64_t epoch = 0;
        std::uint64_t version = 0;
      };
      const kept_one versions[] = {{1, 100}, {2, 51}, {2, 52}};
      std::vector<std::optional<kept_one>> holds(world);
      std::vector<std::uint32_t> self_then(world);
      for (std::uint32_t rank = 0; rank < world; ++rank) {
        self_then[rank] = (rank + static_cast<std::uint32_t>(seed)) % world;
        if (!random.once_in(4)) holds[rank] = versions[random.below(3U)];
      }
      std::optional<kept_one> newest;
      for (const auto& each : holds) {
        if (each &&
            (!newest || std::pair(each->epoch, each->version) > std::pair(newest->epoch, newest->version)))
          newest = each;
      }
      on_all_ranks(world, seed, [&](sim_rank& ranks) {
        const std::uint32_t self = to_index(ranks.rank());
        held_versions held;
        if (holds[self])
          hold(held, facts_of(setup, holds[self]->epoch, holds[self]->version, world), self_then[self]);
        replica_rendezvous rendezvous(ranks, setup);
        const auto met = rendezvous.meet(held, {}, 1, ranks.soon());
        REQUIRE(met);
        CHECK(met->has_value() == newest.has_value());
        CHECK(held.past() == (newest ? known_past::kept : known_past::unknown));
        if (!newest) return;
        const version_facts expected = facts_of(setup, newest->epoch, newest->version, world);
        CHECK((*met)->facts.version == newest->version);
        CHECK((*met)->facts.epoch == newest->epoch);
        CHECK((*met)->facts.seats == expected.seats);
        CHECK((*met)->facts.layout.owners == expected.layout.owners);
        CHECK((*met)->facts.layout.part_bytes == setup.sizes());
        CHECK((*met)->facts.sums == expected.sums);
        CHECK((*met)->change.world == world);
        std::vector<std::optional<rank_id>> now(world);
        for (std::uint32_t rank = 0; rank < world; ++rank) {
          CHECK((*met)->change.home[rank] == rank_id{rank});
          if (holds[rank] && holds[rank]->version == newest->version) now[self_then[rank]] = rank_id{rank};
        }
        CHECK((*met)->change.now == now);
        const bool is_newest = holds[self] && holds[self]->version == newest->version;
        CHECK(held.version().has_value() == is_newest);
        stale += holds[self] && !is_newest ? 1U : 0U;
      });
    }
    CHECK(stale > 40);
  }

  TEST_CASE("a rank that knows the reason why there is nothing to restore informs all others") {
    const replica_setup setup = setup_of(3);
    on_all_ranks(3, 1, [&](sim_rank& ranks) {
      held_versions held;
      if (to_index(ranks.rank()) == 1) held.forget();
      if (to_index(ranks.rank()) == 2) static_cast<void>(held.begin_recovery(1));
      const auto met = replica_rendezvous(ranks, setup).meet(held, {}, 1, ranks.soon());
      REQUIRE(met);
      CHECK_FALSE(met->has_value());
      CHECK(held.past() == known_past::forgotten);
    });
  }

  TEST_CASE("all ranks learn the damage of each former rank, but only of holders of the newest version") {
    const replica_setup setup = setup_of(4);
    on_all_ranks(4, 1, [&](sim_rank& ranks) {
      const std::uint32_t self = to_index(ranks.rank());
      held_versions held;
      // Rank 0 is left out of version 2; the others were ranks 3, 2 and 1 when that was kept.
      hold(held, facts_of(setup, 1, self == 0 ? 1 : 2, 4), (4 - self) % 4);
      kept_version& committed = testing_access::committed(held);
      if (self == 0) testing_access::bytes_at(committed, kept_place::own, 0)[0] ^= std::byte{1};
      if (self == 1) testing_access::bytes_at(committed, kept_place::own, 0)[0] ^= std::byte{1};
      if (self == 3) testing_access::bytes_at(committed, kept_place::copy, 0)[0] ^= std::byte{1};
      const auto met = replica_rendezvous(ranks, setup).meet(held, committed.damage(), 1, ranks.soon());
      REQUIRE(met);
      REQUIRE(met->has_value());
      CHECK((*met)->damaged.own == rank_set{rank_id{3}});
      CHECK((*met)->damaged.copies == std::vector<damaged_places::kept_one>{{rank_id{1}, 0}});
      CHECK((*met)->damaged.parities.empty());
    });
  }

  TEST_CASE("ranks whose setups differ all learn the first that differs from rank 0") {
    const replica_setup setup = setup_of(3);
    on_all_ranks(3, 1, [&](sim_rank& ranks) {
      held_versions held;
      const std::uint32_t digest = to_index(ranks.rank()) == 2 ? 8 : 7;
      const auto met = replica_rendezvous(ranks, setup).meet(held, {}, digest, ranks.soon());
      CHECK(met.error() == failure{errc::setup_differs, 2, 7, 8});
    });
  }

  TEST_CASE("a message that changes on its way is an error that names its sender, in each exchange") {
    const replica_setup setup = setup_of(3);
    std::uint32_t messages = 0;
    std::uint32_t refused = 0;
    for (std::uint32_t number = 0; number < 8; ++number) {
      CAPTURE(number);
      on_all_ranks(3, 1, [&](sim_rank& ranks) {
        held_versions held;
        hold(held, facts_of(setup, 1, 2, 3), to_index(ranks.rank()));
        detail::kept_damage damage(3);
        damage.note_own();
        const bool is_victim = to_index(ranks.rank()) == 1;
        const std::uint32_t before = ranks.received();
        if (is_victim) ranks.turn_message(number);
        const auto met = replica_rendezvous(ranks, setup).meet(held, damage, 1, ranks.soon());
        if (!is_victim) return;
        messages = ranks.received() - before;
        if (number >= messages) {
          CHECK(met);
          return;
        }
        CHECK(met.code() == errc::message_damaged);
        CHECK(met.error().index != 1);
        CHECK(met.error().wanted != met.error().found);
        ++refused;
        ranks.revoke();
      });
    }
    CHECK(refused == 5);  // two presences, the facts, and what two found damaged
  }
}
