#include <llmmem/hash/crc32c.hpp>
#include <llmmem/redundancy/detail/kept_version.hpp>
#include <llmmem/redundancy/placement.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "redundancy/kept_world.hpp"
#include "support/random.hpp"
#include "support/replica_damage.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem::detail::kept_version;
using llmmem::detail::version_facts;
using namespace llmmem_tests;

/// Four ranks, six parts, one of them empty.
version_facts six_parts(std::uint64_t version) {
  std::vector<rank_id> owners;
  for (const std::uint32_t each : {0U, 1U, 2U, 3U, 1U, 0U})
    owners.push_back(rank_id{each});
  return some_facts(3, version, {100, 0, 257, 64, 31, 5}, owners, 4);
}

std::optional<replica_map> map_of(const char* scheme) {
  return ring_neighbours().place(redundancy_scheme::parse(scheme), rank_count{4});
}

}  // namespace

TEST_SUITE("kept_version") {
  TEST_CASE("a version has its contents, each in its place") {
    const version_facts facts = six_parts(9);
    const kept_version copies = kept_by(facts, rank_id{1}, map_of("mirror:2"));
    CHECK(copies.self() == rank_id{1});
    CHECK(std::ranges::equal(copies.own(), blob_in(facts, rank_id{1})));
    CHECK(std::ranges::equal(copies.at(kept_place::own, {}, 0), blob_in(facts, rank_id{1})));
    CHECK(std::ranges::equal(copies.at(kept_place::copy, rank_id{0}, 0), blob_in(facts, rank_id{0})));
    CHECK(copies.at(kept_place::copy, rank_id{2}, 0).empty());
    CHECK(copies.facts().sums == facts.sums);
    const std::optional<replica_map> coded = map_of("rs:2+2");
    const kept_version parities = kept_by(facts, rank_id{1}, coded);
    for (std::uint32_t codeword = 0; codeword < 4; ++codeword)
      CHECK(std::ranges::equal(parities.at(kept_place::parity, {}, codeword),
                               parity_in(facts, *coded, rank_id{1}, codeword)));
  }

  TEST_CASE("a parity is the sum of its stripes, each times its coefficient") {
    for (const auto seed : seeds(100)) {
      CAPTURE(seed);
      random_numbers random(seed);
      kept_version held = kept_by(six_parts(1), rank_id{0}, std::nullopt);
      held.begin_parities(3);
      const std::uint64_t bytes = 1 + random.below(200U);
      std::vector<std::byte> expected(bytes);
      held.make_parity(1, bytes);
      for (std::uint32_t i = random.below(5U); i != 0; --i) {
        const std::vector<std::byte> stripe = bytes_of_seed(random.below(bytes + 1), random.next());
        const auto times = static_cast<std::uint8_t>(random.below(256U));
        held.add_to_parity(1, stripe, times);
        for (std::size_t k = 0; k < stripe.size(); ++k)
          expected[k] ^= static_cast<std::byte>(gf256_multiply(times, static_cast<std::uint8_t>(stripe[k])));
      }
      held.seal();
      CHECK(std::ranges::equal(held.at(kept_place::parity, {}, 1), expected));
      CHECK(held.at(kept_place::parity, {}, 0).empty());
      CHECK(held.damage().places() == 0);
    }
  }

  TEST_CASE("a flipped bit in memory is found there, and nowhere else") {
    for (const char* const scheme : {"mirror:3", "parity:3", "rs:2+2"}) {
      const std::optional<replica_map> map = map_of(scheme);
      for (std::uint32_t self = 0; self < 4; ++self) {
        const kept_version whole = kept_by(six_parts(2), rank_id{self}, map);
        CHECK(whole.damage().places() == 0);
        for (const kept_place place : {kept_place::own, kept_place::copy, kept_place::parity}) {
          for (std::uint32_t number = 0; number < 4; ++number) {
            if (place == kept_place::own && number != 0) continue;
            if (place == kept_place::parity && !map->scheme().is_coded()) continue;
            const std::size_t bytes = whole.at(place, rank_id{number}, number).size();
            for (std::size_t at = 0; at < bytes; at += 1 + bytes / 7) {
              kept_version held = whole;
              testing_access::bytes_at(held, place, number)[at] ^= std::byte{32};
              damaged_places found;
              held.damage().add_to(found, rank_id{self});
              CHECK(held.damage().places() == 1);
              CHECK(found.own.contains(rank_id{self}) == (place == kept_place::own));
              CHECK(found.has_copy(rank_id{self}, rank_id{number}) == (place == kept_place::copy));
              CHECK(found.has_parity(rank_id{self}, number) == (place == kept_place::parity));
            }
          }
        }
      }
    }
  }

  TEST_CASE("a blob that differs from its owner's is refused with both checksums of the first wrong part") {
    const version_facts facts = six_parts(4);
    const kept_version held = kept_by(facts, rank_id{2}, std::nullopt);
    std::vector<std::byte> blob = blob_in(facts, rank_id{0});
    CHECK_FALSE(held.mismatch_in(rank_id{0}, blob));
    blob[102] ^= std::byte{1};  // of part 5, behind part 0
    const auto wrong = held.mismatch_in(rank_id{0}, blob);
    REQUIRE(wrong);
    CHECK(wrong->wanted == facts.sums[5]);
    CHECK(wrong->found == crc32c(0, std::span(blob).subspan(100)));
    CHECK_FALSE(held.mismatch_in(rank_id{3}, blob_in(facts, rank_id{3})));
  }

  TEST_CASE("a rank detects each damaged word before it reports it") {
    const kept_version whole = kept_by(six_parts(2), rank_id{1}, map_of("mirror:2"));
    CHECK(whole.tells_the_truth());
    for (int what = 0; what < 6; ++what) {
      CAPTURE(what);
      kept_version held = whole;
      version_facts& facts = testing_access::facts(held);
      if (what == 0) facts.version ^= 1;
      if (what == 1) facts.epoch ^= 1;
      if (what == 2) facts.seats[3] = seat_id{9};
      if (what == 3) facts.layout.owners[5] = rank_id{2};
      if (what == 4) facts.sums[0] ^= 1;
      if (what == 5) facts.layout.world = 5;
      CHECK_FALSE(held.tells_the_truth());
    }
  }

  TEST_CASE("a new version holds nothing of the previous one, and reuses its memory") {
    kept_version held = kept_by(six_parts(1), rank_id{1}, map_of("rs:2+2"));
    const std::uint64_t own = held.own_capacity();
    const std::uint64_t kept = held.kept_capacity();
    CHECK(own >= 31);
    CHECK(kept >= 2 * 64);
    held.begin(six_parts(2), rank_id{1});
    CHECK(held.own().empty());
    for (std::uint32_t i = 0; i < 4; ++i) {
      CHECK(held.at(kept_place::copy, rank_id{i}, 0).empty());
      CHECK(held.at(kept_place::parity, {}, i).empty());
    }
    CHECK(held.facts().sums == std::vector<std::uint32_t>(6));
    CHECK(held.own_capacity() == own);
    CHECK(held.kept_capacity() == kept);
    CHECK(held.make_copy(rank_id{0}).size() == 105);
  }
}
