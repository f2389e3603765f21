#include <llmmem/redundancy/detail/replica_setup.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem::detail::replica_setup;
using namespace llmmem_tests;

std::vector<seat_id> seats_of(std::vector<std::uint32_t> numbers) {
  std::vector<seat_id> seats;
  for (const std::uint32_t each : numbers)
    seats.push_back(seat_id{each});
  return seats;
}

replica_setup setup_of(const char* scheme, const std::vector<std::uint64_t>& sizes,
                       const std::vector<seat_id>& homes, std::optional<std::uint32_t> seats = std::nullopt) {
  return replica_setup(redundancy_scheme::parse(scheme), sizes, homes, seats, {.name = "weights", .tag = 5});
}

/// Neighbours, of four ranks and more.
struct four_or_more {
  [[nodiscard]] static const char* name() noexcept { return "four_or_more"; }
  [[nodiscard]] replica_map place(const redundancy_scheme& scheme, rank_count world) const {
    if (to_number(world) < 4) throw argument_error("too few");
    return ring_neighbours().place(scheme, world);
  }
};

}  // namespace

TEST_SUITE("replica_setup") {
  TEST_CASE("parts without a home and homes outside the job are refused with their numbers") {
    CHECK_THROWS_WITH_AS(setup_of("mirror:2", {1, 2, 3}, seats_of({0, 1})),
                         "weights: 3 parts and 2 homes; give one home for each part", argument_error);
    CHECK_THROWS_WITH_AS(
        setup_of("mirror:2", {1, 2}, seats_of({0, 3}), 3),
        "weights: part 1 has its home in seat 3, but the job has seats 0 to 2; name one of these",
        argument_error);
    CHECK_NOTHROW(setup_of("mirror:2", {1, 2}, seats_of({0, 3})));  // the transport cannot tell
    CHECK_NOTHROW(setup_of("mirror:2", {1, 2}, seats_of({0, 2}), 3));
  }

  TEST_CASE("failures have the replica's name, and calls its tag") {
    const replica_setup setup = setup_of("mirror:2", {1}, seats_of({0}));
    CHECK(setup.refuse(errc::size_mismatch, 4, 5, 6) == failure{errc::size_mismatch, 4, 5, 6});
    CHECK(std::string(setup.refuse(errc::size_mismatch, 4, 5, 6).where) == "weights");
    CHECK(setup.tag() == 5);
    CHECK(setup.call(no_deadline).tag == 5);
  }

  TEST_CASE("a part belongs to the rank at its home, and without one to the rank with the fewest bytes") {
    for (const auto seed : seeds(200)) {
      CAPTURE(seed);
      random_numbers random(seed);
      std::vector<std::uint64_t> sizes;
      std::vector<seat_id> homes;
      for (std::uint32_t i = 1 + random.below(9U); i != 0; --i) {
        sizes.push_back(random.below(100U));
        homes.push_back(seat_id{random.below(6U)});
      }
      std::vector<seat_id> seats;
      for (std::uint32_t seat = 0; seat < 6; ++seat) {
        if (!random.once_in(3) || (seat == 5 && seats.empty())) seats.push_back(seat_id{seat});
      }
      const replica_setup setup = setup_of("mirror:2", sizes, homes);
      const auto at_home = setup.homes_among(seats);
      const std::vector<rank_id> owners = setup.owners_by_home(seats);
      std::vector<std::uint64_t> load(seats.size());
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        const auto at = std::ranges::find(seats, homes[i]);
        REQUIRE(at_home[i].has_value() == (at != seats.end()));
        if (!at_home[i]) continue;
        CHECK(seats[to_index(*at_home[i])] == homes[i]);
        CHECK(owners[i] == *at_home[i]);
        load[to_index(owners[i])] += sizes[i];
      }
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        if (at_home[i]) continue;
        REQUIRE(to_index(owners[i]) < seats.size());
        CHECK(load[to_index(owners[i])] == *std::ranges::min_element(load));
        load[to_index(owners[i])] += sizes[i];
      }
    }
  }

  TEST_CASE("the digest differs if any fact differs that all ranks must share") {
    const std::vector<seat_id> three = seats_of({0, 1, 2});
    const auto digest = [&](const char* scheme, const std::vector<std::uint64_t>& sizes,
                            const std::vector<seat_id>& homes, const std::vector<domain_id>& domains) {
      const replica_setup setup = setup_of(scheme, sizes, homes);
      return setup.digest(setup.map_of(seat_domains(domains), three));
    };
    const std::vector<domain_id> apart{domain_id{0}, domain_id{1}, domain_id{2}};
    const std::vector<domain_id> pairs{domain_id{0}, domain_id{0}, domain_id{1}};
    const std::uint32_t first = digest("mirror:2", {5, 6, 7}, three, apart);
    CHECK(first == digest("mirror:2", {5, 6, 7}, three, apart));
    const std::set<std::uint32_t> all{first,
                                      digest("compute", {5, 6, 7}, three, apart),
                                      digest("parity:2", {5, 6, 7}, three, apart),
                                      digest("mirror:2", {5, 7, 6}, three, apart),
                                      digest("mirror:2", {5, 6}, seats_of({0, 1}), apart),
                                      digest("mirror:2", {5, 6, 7}, seats_of({0, 2, 1}), apart),
                                      digest("mirror:2", {5, 6, 7}, three, pairs)};
    CHECK(all.size() == 7);
  }

  TEST_CASE("a single rank has no map; a placement that few members cannot satisfy gives way to neighbours") {
    const replica_setup setup = setup_of("mirror:3", {1, 1, 1, 1}, seats_of({0, 1, 2, 3}));
    CHECK_FALSE(setup.map_of(any_seats(four_or_more()), seats_of({2})));
    CHECK(setup.map_of(any_seats(four_or_more()), seats_of({0, 1, 2, 3}))->scheme().copies() == 3);
    CHECK(setup.map_of(any_seats(four_or_more()), seats_of({0, 2, 3}))->holders(rank_id{0}).size() == 2);
    CHECK(setup.map_of(any_seats(four_or_more()), seats_of({0, 2}))->scheme().copies() == 2);
    const replica_setup small = setup_of("mirror:3", {1, 1, 1}, seats_of({0, 1, 1}));
    CHECK_THROWS_WITH_AS(static_cast<void>(small.map_of(any_seats(four_or_more()), seats_of({0, 1}))),
                         "too few", argument_error);
  }
}
