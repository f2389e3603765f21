#include <llmmem/redundancy/placement.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

const char* const schemes[] = {"mirror:2", "mirror:3", "mirror:4", "parity:1", "parity:2",
                               "parity:3", "parity:5", "rs:1+2",   "rs:2+2",   "rs:3+2",
                               "rs:4+3",   "rs:2+3",   "compute"};

rank_set of_bits(std::uint32_t bits) {
  rank_set set;
  for (std::uint32_t rank = 0; rank < 32; ++rank) {
    if ((bits >> rank & 1U) != 0) set.insert(rank_id{rank});
  }
  return set;
}

/// By the definition: a whole state is lost when nobody alive has it, and one in stripes when a codeword of
/// one of them has less than k pieces alive.
rank_set naive_lost(const replica_map& map, const rank_set& failed) {
  rank_set lost;
  for (const rank_id rank : failed) {
    if (!map.scheme().is_coded()) {
      const auto holders = map.holders(rank);
      if (std::all_of(holders.begin(), holders.end(), [&](rank_id each) { return failed.contains(each); }))
        lost.insert(rank);
      continue;
    }
    const auto& group = map.groups()[map.group_of(rank)];
    const coded_group layout = map.layout(map.group_of(rank));
    for (std::uint32_t stripe = 0; stripe < layout.shape().data; ++stripe) {
      const std::uint32_t codeword = layout.codeword_of(map.member_of(rank), stripe);
      std::uint32_t alive = 0;
      for (std::uint32_t piece = 0; piece < layout.members(); ++piece)
        alive += failed.contains(group[layout.member_of(piece_id{piece}, codeword)]) ? 0U : 1U;
      if (alive < layout.shape().data) lost.insert(rank);
    }
  }
  return lost;
}

/// What every map promises, tried with every set of failures.
void check_map(const replica_map& map, const redundancy_scheme& scheme, std::uint32_t world) {
  REQUIRE(to_number(map.world()) == world);
  REQUIRE(map.scheme() == scheme);
  for (std::uint32_t r = 0; r < world; ++r) {
    const rank_id rank{r};
    const auto holders = map.holders(rank);
    REQUIRE(std::find(holders.begin(), holders.end(), rank) == holders.end());
    REQUIRE((scheme.is_coded() ? holders.size() + 1 >= scheme.group_ranks()
                               : holders.size() + 1 == scheme.copies()));
    for (const rank_id holder : holders) {
      const auto kept = map.kept_by(holder);
      REQUIRE(std::count(kept.begin(), kept.end(), rank) == 1);
      REQUIRE(std::count(holders.begin(), holders.end(), holder) == 1);
    }
    if (!map.groups().empty()) REQUIRE(map.groups()[map.group_of(rank)][map.member_of(rank)] == rank);
  }
  std::vector<double> losing(world + 1, 0);
  std::vector<double> sets(world + 1, 0);
  for (std::uint32_t bits = 0; bits < 1U << world; ++bits) {
    const rank_set failed = of_bits(bits);
    const llmmem::redundancy::survival outcome = map.survives(failed);
    REQUIRE(outcome.lost == naive_lost(map, failed));
    REQUIRE(static_cast<bool>(outcome) == outcome.lost.empty());
    if (failed.size() <= scheme.tolerates()) REQUIRE(outcome);
    const auto count = static_cast<std::size_t>(std::popcount(bits));
    sets[count] += 1;
    losing[count] += outcome ? 0 : 1;
  }
  for (std::uint32_t failures = 0; failures <= world; ++failures) {
    CAPTURE(failures);
    const loss_chance chance = map.loss_probability(failures);
    REQUIRE(chance.method == (map.groups().empty() ? chance_method::enumerated : chance_method::counted));
    REQUIRE(chance.probability == losing[failures] / sets[failures]);  // small whole numbers: to the last bit
  }
}

std::string refusal(const auto& placement, const char* scheme, std::uint32_t world) {
  try {
    static_cast<void>(placement.place(redundancy_scheme::parse(scheme), rank_count{world}));
  } catch (const argument_error& error) {
    return error.what();
  }
  return "placed";
}

std::vector<std::vector<std::uint32_t>> groups_of(const replica_map& map) {
  std::vector<std::vector<std::uint32_t>> groups;
  for (const auto& group : map.groups()) {
    groups.emplace_back();
    for (const rank_id rank : group)
      groups.back().push_back(to_index(rank));
  }
  return groups;
}

std::vector<domain_id> domains_of(const std::vector<std::uint32_t>& numbers) {
  std::vector<domain_id> domains;
  for (const std::uint32_t number : numbers)
    domains.push_back(domain_id{number});
  return domains;
}

}  // namespace

TEST_CASE("in worlds of 1 to 10 every placement tolerates its scheme's failures, for every set of them") {
  for (const char* text : schemes) {
    CAPTURE(text);
    const auto scheme = redundancy_scheme::parse(text);
    for (std::uint32_t world = 1; world <= 10; ++world) {
      CAPTURE(world);
      if (scheme.fits(rank_count{world})) {
        CHECK_THROWS_AS(static_cast<void>(ring_neighbours().place(scheme, rank_count{world})),
                        argument_error);
        CHECK_THROWS_AS(static_cast<void>(llmmem::redundancy::grouped().place(scheme, rank_count{world})),
                        argument_error);
        continue;
      }
      check_map(ring_neighbours().place(scheme, rank_count{world}), scheme, world);
      for (std::uint32_t jump = 1; jump <= world; ++jump) {
        CAPTURE(jump);
        if (world / jump < scheme.group_ranks()) {
          CHECK_THROWS_AS(
              static_cast<void>(llmmem::redundancy::grouped(jump).place(scheme, rank_count{world})),
              argument_error);
          continue;
        }
        check_map(llmmem::redundancy::grouped(jump).place(scheme, rank_count{world}), scheme, world);
      }
    }
  }
}

TEST_CASE("a failure of as many consecutive ranks as the jump hits at most one rank of a group") {
  for (const char* text : schemes) {
    CAPTURE(text);
    const auto scheme = redundancy_scheme::parse(text);
    for (std::uint32_t world = 1; world <= 40; ++world) {
      for (std::uint32_t jump = 1; jump * scheme.group_ranks() <= world; ++jump) {
        const replica_map map = llmmem::redundancy::grouped(jump).place(scheme, rank_count{world});
        for (std::uint32_t first = 0; first < world; ++first) {
          rank_set failed;
          for (std::uint32_t rank = first; rank < first + jump && rank < world; ++rank)
            failed.insert(rank_id{rank});
          REQUIRE(map.survives(failed));
          std::vector<std::uint32_t> hit(map.groups().size(), 0);
          for (const rank_id rank : failed)
            REQUIRE(++hit[map.group_of(rank)] == 1);
        }
      }
    }
  }
}

TEST_CASE("even worlds have the cliques of NVIDIA's resiliency extension: n, n + J, ... n + (F - 1) J") {
  using rows = std::vector<std::vector<std::uint32_t>>;
  const auto mirror = redundancy_scheme::mirror(2);
  CHECK(groups_of(llmmem::redundancy::grouped(4).place(mirror, rank_count{16})) ==
        rows{{0, 4}, {8, 12}, {1, 5}, {9, 13}, {2, 6}, {10, 14}, {3, 7}, {11, 15}});
  CHECK(groups_of(llmmem::redundancy::grouped(1).place(mirror, rank_count{4})) == rows{{0, 1}, {2, 3}});
}

TEST_CASE("remaining ranks join a mirror's last group and a code's first groups") {
  using rows = std::vector<std::vector<std::uint32_t>>;
  CHECK(groups_of(llmmem::redundancy::grouped().place(redundancy_scheme::mirror(2), rank_count{7})) ==
        rows{{0, 1}, {2, 3}, {4, 5, 6}});
  CHECK(groups_of(llmmem::redundancy::grouped().place(redundancy_scheme::mirror(3), rank_count{8})) ==
        rows{{0, 1, 2}, {3, 4, 5, 6, 7}});
  CHECK(groups_of(llmmem::redundancy::grouped().place(redundancy_scheme::parity(2), rank_count{11})) ==
        rows{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10}});
  CHECK(groups_of(llmmem::redundancy::grouped(2).place(redundancy_scheme::mirror(2), rank_count{7})) ==
        rows{{0, 2}, {4, 6}, {1, 3, 5}});
  const replica_map wide = llmmem::redundancy::grouped().place(redundancy_scheme::parity(2), rank_count{5});
  CHECK(wide.layout(0).shape() == code_shape{4, 1});
  CHECK(wide.extra_bytes(rank_id{0}, 1'024) == 256);  // less than the scheme's half
  const replica_map ring = llmmem::redundancy::grouped().place(redundancy_scheme::mirror(2), rank_count{3});
  CHECK(ring.extra_bytes(rank_id{2}, 1'000) == 1'000);
}

TEST_CASE("no other division of mirrors into groups loses fewer pairs") {
  // Every way to cut 2 to 12 ranks in a row into groups of 2 or more.
  const auto scheme = redundancy_scheme::mirror(2);
  for (std::uint32_t world = 2; world <= 12; ++world) {
    const double ours =
        llmmem::redundancy::grouped().place(scheme, rank_count{world}).loss_probability(2).probability;
    for (std::uint32_t cuts = 0; cuts < 1U << (world - 1); ++cuts) {
      std::vector<std::vector<rank_id>> groups(1);
      for (std::uint32_t rank = 0; rank < world; ++rank) {
        groups.back().push_back(rank_id{rank});
        if (rank + 1 < world && (cuts >> rank & 1U) != 0) groups.emplace_back();
      }
      if (std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group.size() < 2; }))
        continue;
      REQUIRE(replica_map::of_groups(scheme, rank_count{world}, groups).loss_probability(2).probability >=
              ours);
    }
  }
}

TEST_CASE("ranks of a domain never share a group if that is possible, and then no domain is fatal") {
  std::uint32_t placed = 0;
  std::uint32_t refused = 0;
  std::uint32_t by_load = 0;
  for (const auto seed : seeds(600)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const auto world = static_cast<std::uint32_t>(2 + random() % 9);
    const char* text = schemes[random() % std::size(schemes)];
    CAPTURE(text);
    const auto scheme = redundancy_scheme::parse(text);
    if (scheme.fits(rank_count{world})) continue;
    std::vector<domain_id> domains(world);
    const std::uint64_t kinds = 1 + random() % world;
    std::vector<std::uint32_t> sizes(kinds, 0);
    for (domain_id& each : domains) {
      each = domain_id{static_cast<std::uint32_t>(random() % kinds)};
      ++sizes[to_index(each)];
    }
    const auto used = static_cast<std::uint32_t>(
        kinds - static_cast<std::uint64_t>(std::count(sizes.begin(), sizes.end(), 0U)));
    const bool groups_do = *std::max_element(sizes.begin(), sizes.end()) <= world / scheme.group_ranks();
    const bool copies_do = !scheme.is_coded() && used >= scheme.copies();
    if (!groups_do && !copies_do) {
      REQUIRE(refusal(failure_domains(domains), text, world).starts_with("failure_domains: domain "));
      // The weaker promise: still every loss the scheme bears, and as few of a domain in a group as can be.
      const replica_map map =
          failure_domains(domains, crowded_domains::spread).place(scheme, rank_count{world});
      check_map(map, scheme, world);
      for (const auto& group : map.groups()) {
        for (std::uint32_t domain = 0; domain < kinds; ++domain) {
          const auto there = std::count_if(group.begin(), group.end(), [&](rank_id rank) {
            return to_index(domains[to_index(rank)]) == domain;
          });
          const std::size_t count = map.groups().size();
          REQUIRE(static_cast<std::size_t>(there) <= (sizes[domain] + count - 1) / count);
        }
      }
      ++refused;
      continue;
    }
    const replica_map map = failure_domains(domains).place(scheme, rank_count{world});
    check_map(map, scheme, world);
    REQUIRE(map.groups().empty() == !groups_do);
    REQUIRE(fatal_domains(map, domains).empty());
    for (std::uint32_t r = 0; r < world; ++r) {
      std::vector<domain_id> seen{domains[r]};
      for (const rank_id holder : map.holders(rank_id{r})) {
        REQUIRE(std::find(seen.begin(), seen.end(), domains[to_index(holder)]) == seen.end());
        if (!scheme.is_coded() || groups_do) seen.push_back(domains[to_index(holder)]);
      }
    }
    ++(groups_do ? placed : by_load);
  }
  CHECK(placed > 50);
  CHECK(refused > 50);
  CHECK(by_load > 10);
}

TEST_CASE("copies placed without groups go to the ranks that keep least") {
  // A host of three and two of one: no two groups of two can part the three.
  const auto domains = domains_of({0, 0, 0, 1, 2});
  const replica_map map = failure_domains(domains).place(redundancy_scheme::mirror(2), rank_count{5});
  CHECK(map.groups().empty());
  CHECK(map.holders(rank_id{0})[0] == rank_id{3});
  CHECK(map.holders(rank_id{1})[0] == rank_id{4});
  CHECK(map.holders(rank_id{2})[0] == rank_id{3});
  CHECK(map.holders(rank_id{3})[0] == rank_id{0});
  CHECK(map.holders(rank_id{4})[0] == rank_id{1});
  CHECK(map.extra_bytes(rank_id{3}, 10) == 20);
  CHECK(map.extra_bytes(rank_id{2}, 10) == 0);
}

TEST_CASE("a world with too few domains is refused with the domain in the way, or fatal_domains names it") {
  const auto domains = domains_of({7, 7, 7, 9});
  CHECK(refusal(failure_domains(domains), "parity:1", 4) ==
        "failure_domains: domain 7 has 3 ranks, but parity:1 makes only 2 groups of 4 ranks in 2 domains, so "
        "some would share a group: use a scheme with smaller groups, or crowded_domains::spread without that "
        "guarantee");
  const replica_map map =
      failure_domains(domains, crowded_domains::spread).place(redundancy_scheme::parity(1), rank_count{4});
  CHECK(fatal_domains(map, domains) == domains_of({7}));
  CHECK(refusal(failure_domains(domains_of({1, 1})), "mirror:2", 2) ==
        "failure_domains: domain 1 has 2 ranks, but mirror:2 makes only 1 group of 2 ranks in 1 domain, so "
        "some "
        "would share a group: use a scheme with smaller groups, or crowded_domains::spread without that "
        "guarantee");
}

TEST_CASE("an impossible placement is refused with a possible one") {
  CHECK(refusal(ring_neighbours(), "mirror:3", 2) ==
        "ring_neighbours: mirror:3 needs 3 ranks, but the world has 2: start 1 more, or use mirror:2");
  CHECK(refusal(llmmem::redundancy::grouped(), "rs:2+2", 3) ==
        "grouped: rs:2+2 needs 4 ranks, but the world has 3: start 1 more, or use rs:1+2");
  CHECK(refusal(llmmem::redundancy::grouped(4), "rs:2+2", 15) ==
        "grouped: rs:2+2 needs 4 ranks a jump of 4 apart, but a world of 15 has 3 in some columns: use a "
        "jump of at most 3");
  CHECK(refusal(ring_neighbours(), "mirror:2", 0) == "replica_map: a world of 0 ranks; it must be 1 to 1024");
  CHECK(refusal(llmmem::redundancy::grouped(), "mirror:2", 1025) ==
        "replica_map: a world of 1025 ranks; it must be 1 to 1024");
  CHECK(refusal(llmmem::redundancy::grouped(), "rs:255+1", 511) ==
        "replica_map: group 0 has 511 ranks, but a code has at most 256 pieces; use smaller groups");
  CHECK(refusal(failure_domains(domains_of({1, 2, 3})), "mirror:2", 4) ==
        "failure_domains: domains of 3 ranks are given, but the world has 4");
  CHECK_THROWS_WITH_AS(llmmem::redundancy::grouped(0),
                       "grouped: a jump of 0; use at least 1, the number of ranks that fail together",
                       argument_error);
}
