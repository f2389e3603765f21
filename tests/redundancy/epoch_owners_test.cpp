#include <llmmem/redundancy/detail/epoch_owners.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem::detail::epoch_owners;
using llmmem::detail::replica_setup;
using namespace llmmem_tests;

replica_setup setup_of(const char* scheme, const std::vector<std::uint64_t>& sizes) {
  const std::vector<seat_id> homes(sizes.size());
  return replica_setup(redundancy_scheme::parse(scheme), sizes, homes, std::nullopt, {});
}

replica_map ring(const char* scheme, std::uint32_t world) {
  return ring_neighbours().place(redundancy_scheme::parse(scheme), rank_count{world});
}

}  // namespace

TEST_SUITE("epoch_owners") {
  TEST_CASE("each part is owned by one rank, and a ward of the ranks that keep its owner's copies") {
    for (const auto seed : seeds(60)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const std::uint32_t world = 3 + random.below(4U);
      const char* const schemes[] = {"mirror:2", "mirror:3", "compute", "parity:2"};
      const char* const scheme = schemes[seed % 4];
      const replica_map map = ring(scheme, world);
      std::vector<rank_id> owners;
      for (std::uint32_t i = random.below(12U); i != 0; --i)
        owners.push_back(rank_id{random.below(world)});
      const replica_setup setup = setup_of(scheme, std::vector<std::uint64_t>(owners.size(), 1));
      for (std::uint32_t self = 0; self < world; ++self) {
        epoch_owners of(setup);
        of.begin(1, rank_id{self}, map);
        CHECK(of.own_parts().empty());
        CHECK(of.wards().empty());
        of.assign(owners);
        const std::vector<part_id> mine = of.own_parts();
        const std::vector<part_id> wards = of.wards();
        for (std::uint32_t i = 0; i < owners.size(); ++i) {
          const auto holders = map.holders(owners[i]);
          const bool is_ward =
              !map.scheme().is_coded() && std::ranges::find(holders, rank_id{self}) != holders.end();
          CHECK((std::ranges::find(mine, part_id{i}) != mine.end()) == (owners[i] == rank_id{self}));
          CHECK((std::ranges::find(wards, part_id{i}) != wards.end()) == is_ward);
        }
        CHECK(std::ranges::is_sorted(mine));
        CHECK(std::ranges::is_sorted(wards));
      }
    }
  }

  TEST_CASE("parts may be kept only in the settled epoch") {
    const replica_setup setup = setup_of("mirror:2", {1, 1});
    epoch_owners of(setup);
    CHECK(of.check_settled(1).error() == failure{errc::not_recovered, 0, 1, 0});
    of.begin(1, rank_id{0}, ring("mirror:2", 2));
    of.assign({rank_id{0}, rank_id{1}});
    CHECK(of.check_settled(1).error() == failure{errc::not_recovered, 0, 1, 0});
    of.settle();
    CHECK(of.check_settled(1));
    CHECK(of.check_settled(2).error() == failure{errc::not_recovered, 0, 2, 1});
    of.lose(rank_set{rank_id{1}});
    CHECK(of.lost() == rank_set{rank_id{1}});
    of.begin(2, rank_id{0}, std::nullopt);
    CHECK(of.check_settled(2).error() == failure{errc::not_recovered, 0, 2, 0});
    CHECK(of.all().empty());
    CHECK(of.lost().empty());
    CHECK(of.wards().empty());
    CHECK(of.epoch() == 2);
  }

  TEST_CASE("a rank must keep every part that it owns, once and in its size, and nothing else") {
    const std::vector<std::byte> bytes(20);
    const auto first = [&](std::size_t count) { return std::span<const std::byte>(bytes).first(count); };
    // Rank 0 owns parts 0 and 2; it keeps the copies of rank 1, which owns part 1.
    for (const char* const scheme : {"mirror:2", "compute"}) {
      CAPTURE(scheme);
      const replica_setup setup = setup_of(scheme, {10, 20, 0});
      epoch_owners of(setup);
      of.begin(1, rank_id{0}, ring(scheme, 2));
      of.assign({rank_id{0}, rank_id{1}, rank_id{0}});
      const bool is_computed = setup.scheme().kind() == redundancy_kind::compute;
      const auto given = [&](std::vector<part_bytes> parts, bool has_ward) {
        if (has_ward) parts.push_back({part_id{1}, first(20)});
        return of.by_part(parts);
      };
      const part_bytes a{part_id{0}, first(10)};
      const part_bytes c{part_id{2}, first(0)};
      const auto well = given({c, a}, is_computed);
      REQUIRE(well);
      CHECK((*well)[0].size() == 10);
      CHECK((*well)[1].size() == (is_computed ? 20 : 0));
      const auto code = errc::size_mismatch;
      CHECK(given({a}, is_computed).error() == failure{code, 2, 0, 0});
      CHECK(given({c}, is_computed).error() == failure{code, 0, 10, 0});
      CHECK(given({a, a, c}, is_computed).error() == failure{code, 0, 0, 10});
      CHECK(given({{part_id{0}, first(9)}, c}, is_computed).error() == failure{code, 0, 10, 9});
      if (is_computed) CHECK(given({a, c}, false).error() == failure{code, 1, 20, 0});
      if (!is_computed) CHECK(given({a, c}, true).error() == failure{code, 1, 0, 20});
      CHECK(given({{part_id{7}, first(1)}}, false).error() == failure{code, 7, 0, 1});
    }
  }
}
