#include <llmmem/redundancy/gf256.hpp>
#include <llmmem/redundancy/part_ownership.hpp>
#include <llmmem/redundancy/placement.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "support/comm_job.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;

rank_id rank(std::size_t i) {
  return rank_id{static_cast<std::uint32_t>(i)};
}

/// What all ranks held of a version, kept as `redundant_replica` says, by definition rather than by messages.
struct kept_world {
  kept_layout layout{};
  std::optional<replica_map> map{};
  std::vector<std::vector<std::byte>> parts{};
  std::vector<std::vector<std::byte>> blobs{};  // by rank
  // by rank, then codeword of its group
  std::vector<std::vector<std::vector<std::byte>>> parities{};

  explicit kept_world(kept_layout made, std::optional<replica_map> how)
      : layout(std::move(made)), map(std::move(how)) {
    blobs.resize(layout.world);
    for (std::uint32_t i = 0; i < layout.part_bytes.size(); ++i) {
      parts.push_back(llmmem_tests::bytes_of_seed(layout.part_bytes[i], i + 1));
      auto& blob = blobs[to_index(layout.owners[i])];
      blob.insert(blob.end(), parts[i].begin(), parts[i].end());
    }
    parities.resize(layout.world);
    if (map && map->scheme().is_coded()) encode();
  }

 private:
  void encode() {
    for (std::uint32_t g = 0; g < map->groups().size(); ++g) {
      const auto& group = map->groups()[g];
      const coded_group code = map->layout(g);
      for (std::uint32_t member = 0; member < code.members(); ++member) {
        auto& own = parities[to_index(group[member])];
        own.resize(code.codewords());
        for (std::uint32_t c = 0; c < code.codewords(); ++c) {
          const piece_id piece = code.piece_of(member, c);
          if (to_index(piece) < code.shape().data) continue;
          for (std::uint32_t data = 0; data < code.shape().data; ++data) {
            const std::uint32_t of = code.member_of(piece_id{data}, c);
            const auto& blob = blobs[to_index(group[of])];
            const llmmem::redundancy::byte_range range =
                stripe_of(blob.size(), code.shape().data, code.stripe_in(of, c));
            const std::uint8_t by = map->scheme().kind() == redundancy_kind::parity
                                        ? std::uint8_t{1}
                                        : code_coefficient(code.shape(), piece, piece_id{data});
            own[c].resize(std::max<std::size_t>(own[c].size(), range.count));
            for (std::uint64_t k = 0; k < range.count; ++k) {
              own[c][k] ^= static_cast<std::byte>(
                  gf256_multiply(by, static_cast<std::uint8_t>(blob[range.first + k])));
            }
          }
        }
      }
    }
  }
};

/// Some places of those that live are damaged: own states, copies, and parities.
damaged_places damaged_at_random(std::mt19937_64& random, const kept_world& world,
                                 const membership_change& change) {
  damaged_places damaged;
  const std::uint64_t one_in = 2 + random() % 8;
  for (std::uint32_t i = 0; i < world.layout.world; ++i) {
    if (!change.now[i]) continue;
    if (random() % one_in == 0) damaged.own.insert(rank(i));
    for (std::uint32_t c = 0; c < world.parities[i].size(); ++c) {
      if (random() % one_in == 0) damaged.parities.push_back({rank(i), c});
    }
    if (!world.map || world.map->scheme().is_coded()) continue;
    for (const rank_id of : world.map->kept_by(rank(i))) {
      if (random() % one_in == 0) damaged.copies.push_back({rank(i), to_index(of)});
    }
  }
  return damaged;
}

/// Whether a rank's state can be had, by counting what of it, or of each of its stripes, is whole.
bool can_be_had(rank_id of, const kept_world& world, const membership_change& change,
                const damaged_places& damaged) {
  const auto lives = [&](rank_id each) { return change.now[to_index(each)].has_value(); };
  if (world.blobs[to_index(of)].empty() || (lives(of) && !damaged.own.contains(of))) return true;
  if (!world.map) return false;
  if (!world.map->scheme().is_coded()) {
    return std::ranges::any_of(world.map->holders(of),
                               [&](rank_id each) { return lives(each) && !damaged.has_copy(each, of); });
  }
  const coded_group code = world.map->layout(world.map->group_of(of));
  const auto& group = world.map->groups()[world.map->group_of(of)];
  for (std::uint32_t stripe = 0; stripe < code.shape().data; ++stripe) {
    const std::uint32_t codeword = code.codeword_of(world.map->member_of(of), stripe);
    std::uint32_t whole = 0;
    for (std::uint32_t member = 0; member < code.members(); ++member) {
      const bool is_parity = to_index(code.piece_of(member, codeword)) >= code.shape().data;
      const bool is_damaged =
          is_parity ? damaged.has_parity(group[member], codeword) : damaged.own.contains(group[member]);
      whole += lives(group[member]) && !is_damaged ? 1U : 0U;
    }
    if (whole < code.shape().data) return false;
  }
  return true;
}

/// Carries a plan out, byte by byte, and checks that each source holds what it is asked for, whole.
std::vector<std::vector<std::byte>> carried_out(const ownership_plan& plan, const kept_world& world,
                                                const membership_change& change,
                                                const damaged_places& damaged) {
  std::vector<std::vector<std::byte>> made;
  for (const auto& part : world.parts)
    made.emplace_back(part.size());
  std::uint64_t moved = 0;
  for (const part_transfer& each : plan.transfers) {
    // The rank then whose memory the source reads.
    std::optional<rank_id> then;
    for (std::size_t i = 0; i < change.now.size(); ++i) {
      if (change.now[i] == each.source) then = rank(i);
    }
    REQUIRE(then);
    CHECK(each.target == plan.owners[to_index(each.part)]);
    std::span<const std::byte> from;
    if (each.place == kept_place::own) {
      CHECK(each.of == *then);
      CHECK_FALSE(damaged.own.contains(*then));
      from = world.blobs[to_index(*then)];
    } else if (each.place == kept_place::copy) {
      const auto holders = world.map->holders(each.of);
      CHECK(std::find(holders.begin(), holders.end(), *then) != holders.end());
      CHECK_FALSE(damaged.has_copy(*then, each.of));
      from = world.blobs[to_index(each.of)];
    } else {
      CHECK_FALSE(damaged.has_parity(*then, each.codeword));
      from = world.parities[to_index(*then)][each.codeword];
    }
    REQUIRE(each.place_offset + each.bytes <= from.size());
    REQUIRE(each.part_offset + each.bytes <= made[to_index(each.part)].size());
    for (std::uint64_t k = 0; k < each.bytes; ++k) {
      const std::byte value = from[each.place_offset + k];
      std::byte& into = made[to_index(each.part)][each.part_offset + k];
      into = each.is_summed ? into ^ static_cast<std::byte>(
                                         gf256_multiply(each.coefficient, static_cast<std::uint8_t>(value)))
                            : value;
    }
    if (each.source != each.target) moved += each.bytes;
  }
  CHECK(moved == plan.moved_bytes);
  return made;
}

}  // namespace

TEST_SUITE("part_ownership") {
  TEST_CASE(
      "for any losses and damage, each part arrives complete at its owner, or too few pieces of its owner's "
      "state are left") {
    std::uint64_t lost = 0;
    std::uint64_t mended = 0;
    std::uint64_t recovered = 0;
    for (const auto seed : llmmem_tests::seeds(4000)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const char* const schemes[] = {"mirror:2", "mirror:3", "parity:2", "parity:3", "rs:2+2", "rs:3+1"};
      const redundancy_scheme wanted = redundancy_scheme::parse(schemes[random() % 6]);
      const auto then = static_cast<std::uint32_t>(1 + random() % 7);
      kept_layout layout{.world = then};
      const std::size_t parts = random() % 9;
      for (std::size_t i = 0; i < parts; ++i) {
        layout.part_bytes.push_back(random() % 3 == 0 ? 0 : random() % 600);
        layout.owners.push_back(rank(random() % then));
      }
      const auto scheme = scheme_for(wanted, rank_count{then});
      std::optional<replica_map> map;
      if (scheme) map = llmmem::redundancy::grouped(1).place(*scheme, rank_count{then});
      if (scheme && random() % 2 == 0) map = ring_neighbours().place(*scheme, rank_count{then});
      const kept_world world(layout, map);

      membership_change change;
      for (std::uint32_t i = 0; i < then; ++i) {
        change.now.push_back(random() % 4 == 0 ? std::nullopt : std::optional(rank(change.world)));
        if (change.now.back()) ++change.world;
      }
      change.world += static_cast<std::uint32_t>(random() % 2);  // a fresh one
      if (change.world == 0) change.world = 1;
      for (std::size_t i = 0; i < parts; ++i)
        change.home.push_back(random() % 2 == 0 ? std::nullopt
                                                : std::optional(rank(random() % change.world)));

      damaged_places damaged;
      if (random() % 2 == 0) damaged = damaged_at_random(random, world, change);
      const ownership_plan plan = plan_ownership(layout, map, change, damaged);
      rank_set hopeless;
      for (std::uint32_t i = 0; i < then; ++i) {
        if (!can_be_had(rank_id{i}, world, change, damaged)) hopeless.insert(rank_id{i});
      }
      CHECK(plan.unrecoverable == hopeless);
      if (!hopeless.empty()) {
        CHECK(plan.transfers.empty());
        ++lost;
        continue;
      }
      REQUIRE(plan.owners.size() == parts);
      CHECK(carried_out(plan, world, change, damaged) == world.parts);
      mended += damaged.own.empty() ? 0U : 1U;
      recovered += change.lost().empty() ? 0U : 1U;
      for (std::size_t i = 0; i < parts; ++i) {
        const auto owner = change.now[to_index(layout.owners[i])];
        if (change.home[i]) CHECK(plan.owners[i] == *change.home[i]);
        if (!change.home[i] && owner) CHECK(plan.owners[i] == *owner);
      }
    }
    CHECK(lost > 300);
    CHECK(recovered > 1000);
    CHECK(mended > 200);
  }

  TEST_CASE("of the ranks with a copy, the one that owns least adopts the part, and nothing moves") {
    // Four ranks, copies on the next two; rank 1 is lost, and nobody takes its seat.
    const kept_layout layout{.part_bytes = {10, 100, 20, 30, 100, 100},
                             .owners = {rank(0), rank(1), rank(2), rank(3), rank(1), rank(1)},
                             .world = 4};
    const replica_map map = ring_neighbours().place(redundancy_scheme::mirror(3), rank_count{4});
    const membership_change change{
        .now = {rank(0), std::nullopt, rank(1), rank(2)},
        .home = {rank(0), std::nullopt, rank(1), rank(2), std::nullopt, std::nullopt},
        .world = 3};
    const ownership_plan plan = plan_ownership(layout, map, change);
    // Ranks 2 and 3 of then have copies; by turns, whoever owns less.
    CHECK(plan.owners == std::vector{rank(0), rank(1), rank(1), rank(2), rank(2), rank(1)});
    CHECK(plan.moved_bytes == 0);
  }

  TEST_CASE("a part whose home is occupied again returns there, from the rank that adopted it") {
    const kept_layout layout{.part_bytes = {10, 100}, .owners = {rank(0), rank(0)}, .world = 1};
    const membership_change change{.now = {rank(1)}, .home = {rank(1), rank(0)}, .world = 2};
    const ownership_plan plan = plan_ownership(layout, std::nullopt, change);
    CHECK(plan.owners == std::vector{rank(1), rank(0)});
    REQUIRE(plan.transfers.size() == 2);
    CHECK(plan.transfers[1] == part_transfer{.part = part_id{1},
                                             .bytes = 100,
                                             .source = rank(1),
                                             .target = rank(0),
                                             .of = rank(0),
                                             .place_offset = 10});
    CHECK(plan.moved_bytes == 100);
  }

  TEST_CASE("a world that is too small for a scheme gets the nearest one that fits") {
    const auto nearest = [](const char* text, std::uint32_t world) {
      const auto scheme = scheme_for(redundancy_scheme::parse(text), rank_count{world});
      return scheme ? to_text(*scheme) : "none";
    };
    CHECK(nearest("mirror:3", 5) == "mirror:3");
    CHECK(nearest("mirror:3", 2) == "mirror:2");
    CHECK(nearest("mirror:3", 1) == "none");
    CHECK(nearest("parity:3", 4) == "parity:3");
    CHECK(nearest("parity:3", 3) == "parity:2");
    CHECK(nearest("parity:3", 2) == "parity:1");
    CHECK(nearest("rs:2+2", 3) == "rs:1+2");
    CHECK(nearest("rs:2+2", 2) == "rs:1+1");
    CHECK(nearest("compute", 2) == "compute");
    CHECK(nearest("compute", 1) == "none");
  }
}
