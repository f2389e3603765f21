#include <llmmem/redundancy/detail/part_restorer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "redundancy/kept_world.hpp"
#include "redundancy/sim_rank.hpp"
#include "support/random.hpp"
#include "support/replica_damage.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem::detail::destinations_ref;
using llmmem::detail::found_version;
using llmmem::detail::kept_version;
using llmmem::detail::part_restorer;
using llmmem::detail::replica_setup;
using namespace llmmem_tests;

/// A version that the ranks of a world hold, all but those that have lost everything, and how it comes back.
struct lost_world {
  replica_setup setup;
  std::optional<replica_map> map;
  found_version found{};
  ownership_plan plan{};

  lost_world(const char* scheme, const std::vector<std::uint64_t>& sizes, const std::vector<rank_id>& owners,
             std::uint32_t world, const rank_set& lost)
      : setup(redundancy_scheme::parse(scheme), sizes, homes_of(owners), std::nullopt, {}),
        map(ring_neighbours().place(redundancy_scheme::parse(scheme), rank_count{world})) {
    found.facts = some_facts(1, 6, sizes, owners, world);
    found.change.world = world;
    found.change.home = setup.homes_among(found.facts.seats);
    for (std::uint32_t i = 0; i < world; ++i)
      found.change.now.push_back(lost.contains(rank_id{i}) ? std::nullopt : std::optional(rank_id{i}));
    plan = plan_ownership(found.facts.layout, map, found.change);
  }
  [[nodiscard]] std::optional<kept_version> held_by(rank_id rank) const {
    if (!found.change.now[to_index(rank)]) return std::nullopt;
    return kept_by(found.facts, rank, map);
  }
  [[nodiscard]] std::vector<std::byte> part(std::uint32_t i) const { return part_in(6, i, setup.sizes()[i]); }

 private:
  static std::vector<seat_id> homes_of(const std::vector<rank_id>& owners) {
    std::vector<seat_id> homes;
    for (const rank_id each : owners)
      homes.push_back(seat_id{to_index(each)});
    return homes;
  }
};

const kept_version* pointer(const std::optional<kept_version>& held) {
  return held ? &*held : nullptr;
}

}  // namespace

TEST_SUITE("part_restorer") {
  TEST_CASE("each part is complete at its owner, at the caller's destination or in place, after any losses") {
    for (const char* const scheme : {"mirror:2", "mirror:3", "parity:2", "rs:2+2", "rs:1+2"}) {
      for (const auto seed : seeds(15)) {
        CAPTURE(scheme);
        CAPTURE(seed);
        random_numbers random(seed);
        const std::uint32_t group = redundancy_scheme::parse(scheme).group_ranks();
        const std::uint32_t world = group + random.below(2U);
        std::vector<std::uint64_t> sizes;
        std::vector<rank_id> owners;
        for (std::uint32_t i = 0; i < 2 * world; ++i) {
          sizes.push_back(random.once_in(5) ? 0 : random.below(1000U));
          owners.push_back(rank_id{i % world});
        }
        const std::uint32_t gone = random.below(world);
        const lost_world before(scheme, sizes, owners, world, {rank_id{gone}});
        REQUIRE(before.plan.unrecoverable.empty());
        const bool has_destinations = seed % 2 == 0;
        on_all_ranks(world, seed, [&](sim_rank& ranks) {
          const rank_id self = ranks.rank();
          const std::optional<kept_version> held = before.held_by(self);
          std::vector<std::vector<std::byte>> memory;
          for (const std::uint64_t bytes : sizes)
            memory.push_back(bytes_of_seed(bytes, seed + 99));
          auto into = [&](part_id part) { return std::span(memory[to_index(part)]); };
          part_restorer restorer(ranks, before.setup);
          const auto rebuilt =
              restorer.restore(before.found, before.plan, pointer(held),
                               has_destinations ? destinations_ref(into) : destinations_ref(), ranks.soon());
          REQUIRE(rebuilt);
          std::uint64_t lost_bytes = 0;
          std::uint64_t came = 0;
          for (std::uint32_t i = 0; i < sizes.size(); ++i) {
            const bool is_mine = before.plan.owners[i] == self;
            const std::span<const std::byte> part = restorer.recovered(part_id{i});
            CHECK(std::ranges::equal(part, is_mine ? before.part(i) : std::vector<std::byte>()));
            if (!is_mine) continue;
            if (owners[i] == rank_id{gone}) lost_bytes += sizes[i];
            if (has_destinations) CHECK(part.data() == memory[i].data());
            const bool was_here =
                held && (owners[i] == self || !held->at(kept_place::copy, owners[i], 0).empty());
            if (!was_here) came += sizes[i];
          }
          CHECK(*rebuilt == lost_bytes);
          CHECK(restorer.memory_bytes() == (has_destinations ? 0 : came));
          restorer.clear();
          CHECK(restorer.memory_bytes() == 0);
          for (std::uint32_t i = 0; i < sizes.size(); ++i)
            CHECK(restorer.recovered(part_id{i}).empty());
        });
      }
    }
  }

  TEST_CASE(
      "the restorer asks for destinations in order, once each, and refuses one of another size by its part") {
    const lost_world before("mirror:2", {30, 40, 50, 60}, {rank_id{0}, rank_id{1}, rank_id{0}, rank_id{1}}, 2,
                            {});
    on_all_ranks(2, 1, [&](sim_rank& ranks) {
      const std::optional<kept_version> held = before.held_by(ranks.rank());
      std::vector<std::byte> memory(200);
      std::vector<part_id> asked;
      std::uint64_t short_by = 1;
      auto into = [&](part_id part) {
        asked.push_back(part);
        const std::uint32_t i = to_index(part);
        return std::span(memory).subspan(i < 2 ? 0 : 100, before.setup.sizes()[i] - (i < 2 ? 0 : short_by));
      };
      part_restorer restorer(ranks, before.setup);
      const std::uint32_t second = to_index(ranks.rank()) + 2;
      const auto refused =
          restorer.restore(before.found, before.plan, pointer(held), destinations_ref(into), ranks.soon());
      const std::uint64_t bytes = before.setup.sizes()[second];
      CHECK(refused.error() == failure{errc::size_mismatch, second, bytes, bytes - 1});
      CHECK(asked == std::vector{part_id{second - 2}, part_id{second}});
      restorer.clear();
      short_by = 0;
      CHECK(restorer.restore(before.found, before.plan, pointer(held), destinations_ref(into), ranks.soon()));
      CHECK(std::ranges::equal(restorer.recovered(part_id{second}), before.part(second)));
    });
  }

  TEST_CASE("an exception of a caller's destinations passes through, and nothing was sent or received") {
    const lost_world before("mirror:2", {30, 40}, {rank_id{0}, rank_id{1}}, 2, {rank_id{0}});
    on_all_ranks(2, 1, [&](sim_rank& ranks) {
      const std::optional<kept_version> held = before.held_by(ranks.rank());
      auto into = [](part_id) -> std::span<std::byte> { throw 7; };
      part_restorer restorer(ranks, before.setup);
      const std::uint32_t received = ranks.received();
      CHECK_THROWS_AS(static_cast<void>(restorer.restore(before.found, before.plan, pointer(held),
                                                         destinations_ref(into), ranks.soon())),
                      int);
      CHECK(ranks.received() == received);
    });
  }

  TEST_CASE("a part that was damaged at its source, or on its way, is an error of the rank that owns it") {
    for (const bool is_on_its_way : {false, true}) {
      for (const char* const scheme : {"mirror:2", "parity:2"}) {
        CAPTURE(is_on_its_way);
        CAPTURE(scheme);
        const std::uint32_t world = redundancy_scheme::parse(scheme).group_ranks();
        std::vector<std::uint64_t> sizes;
        std::vector<rank_id> owners;
        for (std::uint32_t i = 0; i < world; ++i) {
          sizes.push_back(500);
          owners.push_back(rank_id{i});
        }
        const lost_world before(scheme, sizes, owners, world, {rank_id{0}});
        on_all_ranks(world, 1, [&](sim_rank& ranks) {
          const bool is_fresh = to_index(ranks.rank()) == 0;
          std::optional<kept_version> held = before.held_by(ranks.rank());
          if (!is_on_its_way && !is_fresh && std::string(scheme) == "mirror:2")
            testing_access::bytes_at(*held, kept_place::copy, 0)[100] ^= std::byte{2};
          if (!is_on_its_way && to_index(ranks.rank()) == 1 && std::string(scheme) == "parity:2")
            testing_access::bytes_at(*held, kept_place::own, 0)[100] ^= std::byte{2};
          if (is_on_its_way && is_fresh) ranks.turn_message(0);
          part_restorer restorer(ranks, before.setup);
          const auto done = restorer.restore(before.found, before.plan, pointer(held), {}, ranks.soon());
          if (is_fresh) {
            CHECK(done.code() == errc::message_damaged);
            CHECK(done.error().index == 0);
            CHECK(done.error().wanted == before.found.facts.sums[0]);
          }
        });
      }
    }
  }

  TEST_CASE("a failing transport is revoked, and otherwise parts of several pieces arrive complete") {
    for (const bool is_there : {false, true}) {
      CAPTURE(is_there);
      const lost_world before("mirror:2", {3'000'001, 10}, {rank_id{0}, rank_id{1}}, 2, {rank_id{0}});
      on_all_ranks(2, 1, [&](sim_rank& ranks) {
        const std::uint32_t self = to_index(ranks.rank());
        const std::optional<kept_version> held = before.held_by(ranks.rank());
        if (self == 1 && !is_there) return;  // does not take part
        part_restorer restorer(ranks, before.setup);
        const auto done = restorer.restore(before.found, before.plan, pointer(held), {},
                                           is_there ? ranks.soon() : ranks.after(1'000'000));
        CHECK(done.has_value() == is_there);
        CHECK(ranks.is_revoked() == !is_there);
        if (is_there) CHECK(std::ranges::equal(restorer.recovered(part_id{self}), before.part(self)));
      });
    }
  }
}
