#include <llmmem/arena/stitched_source.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/resident_bytes.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t piece = 64 * 1024;

struct held {
  stitched_host_space::range_type range;
  std::byte value{};
};

}  // namespace

TEST_CASE(
    "a stitched space serves every range with enough free pieces, in any order of sizes, without overlap") {
  for (const auto seed : seeds(6)) {
    CAPTURE(seed);
    random_numbers random(seed);
    constexpr std::uint64_t pieces = 24;
    stitched_host_space space(stitched_source({.budget = pieces * piece}), {.budget = pieces * piece});
    std::vector<held> live;
    std::uint64_t free_pieces = pieces;
    for (int step = 0; step < 120; ++step) {
      CAPTURE(step);
      if (!live.empty() && random.once_in(2)) {
        const std::size_t at = random.below(live.size());
        const auto bytes = live[at].range.span();
        CHECK(bytes.front() == live[at].value);
        CHECK(bytes.back() == live[at].value);
        free_pieces += (bytes.size() + piece - 1) / piece;
        space.deallocate(live[at].range);
        live[at] = live.back();
        live.pop_back();
        continue;
      }
      const std::uint64_t bytes = 1 + random.below(8 * piece);
      const std::uint64_t takes = (bytes + piece - 1) / piece;
      const auto had = space.try_allocate(bytes, 4096);
      REQUIRE(had.has_value() == (takes <= free_pieces));
      if (!had) {
        CHECK(had.code() == errc::out_of_bytes);
        continue;
      }
      free_pieces -= takes;
      const auto value = static_cast<std::byte>(step);
      std::ranges::fill(had->span(), value);
      live.push_back({*had, value});
      CHECK(space.used() == (pieces - free_pieces) * piece);
    }
    for (const held& each : live) {
      CHECK(std::ranges::all_of(each.range.span(), [&](std::byte b) { return b == each.value; }));
      space.deallocate(each.range);
    }
    CHECK(space.used() == 0);
    CHECK(space.audit().empty());
  }
}

TEST_CASE("a stitched source charges whole pieces, and refuses larger alignments than theirs") {
  stitched_source source({.budget = 4 * piece});
  CHECK(source.footprint(1, 64) == piece);
  CHECK(source.footprint(piece, 64) == piece);
  CHECK(source.footprint(piece + 1, 64) == 2 * piece);
  CHECK(source.footprint(max_bytes, 64) == max_bytes);
  CHECK(source.take(1, 2 * piece) == nullptr);
  std::byte* const first = source.take(4 * piece, piece);
  REQUIRE(first != nullptr);
  CHECK(source.take(1, 64) == nullptr);
  source.give_back(first, 4 * piece, piece);
  CHECK(source.stats().live == 0);
}

TEST_CASE("a loop over the same sizes maps nothing after its first round") {
  stitched_source source({.budget = 16 * piece});
  const auto round = [&] {
    std::vector<std::pair<std::byte*, std::uint64_t>> all;
    for (const std::uint64_t pieces : {5U, 3U, 7U}) {
      all.emplace_back(source.take(pieces * piece, 64), pieces * piece);
      REQUIRE(all.back().first != nullptr);
    }
    for (const auto& [data, bytes] : all)
      source.give_back(data, bytes, 64);
  };
  round();
  const auto before = source.counts();
  for (int i = 0; i < 5; ++i)
    round();
  CHECK(source.counts().stitched == before.stitched);
  CHECK(source.counts().mapped_chunks == before.mapped_chunks);
}

TEST_CASE("tools show the memory of a stitched space once, at any number of addresses") {
  // Each round has other sizes: pieces are used at ever new addresses.
  constexpr std::uint64_t pieces = 64;
  stitched_host_space space(stitched_source({.budget = pieces * piece}), {.budget = pieces * piece});
  random_numbers random(7);
  std::uint64_t most = 0;
  std::vector<held> live;
  for (int round = 0; round < 40; ++round) {
    while (!live.empty() && (space.used() > pieces * piece / 2 || random.once_in(3))) {
      const std::size_t at = random.below(live.size());
      space.deallocate(live[at].range);
      live[at] = live.back();
      live.pop_back();
    }
    for (;;) {
      const auto had = space.try_allocate((1 + random.below(std::size_t{9})) * piece, 4096);
      if (!had) break;
      const auto value = static_cast<std::byte>(round);
      std::ranges::fill(had->span(), value);
      live.push_back({*had, value});
    }
    most = std::max(most, resident_bytes_of("memfd:llmmem-virtual"));
    for (const held& each : live)
      CHECK(std::ranges::all_of(each.range.span(), [&](std::byte b) { return b == each.value; }));
  }
  CHECK(space.source().counts().stitched > 20);  // what the rounds are for
  CHECK(most >= pieces * piece);
  CHECK(most <= pieces * piece + pieces * piece / 10);
  for (const held& each : live)
    space.deallocate(each.range);
}
