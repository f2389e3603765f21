/// The allocator against what it is for: the memory behind the blocks, see support/paged_world.hpp.
#include <doctest/doctest.h>

#include <cstdint>

#include "support/paged_world.hpp"
#include "support/random.hpp"
#include "support/run_worlds.hpp"

using namespace llmmem_tests;

namespace {

struct hit_blocks {
  std::uint64_t all = 0;
  std::uint64_t by_key = 0;
  std::uint64_t beginnings = 0;
  std::uint64_t stolen = 0;
  std::uint64_t deduplicated = 0;
  std::uint64_t refused = 0;
  std::uint64_t moves = 0;
  std::uint64_t orphans = 0;
  std::uint64_t invalidated = 0;
  std::uint64_t mended = 0;
  std::uint64_t removed = 0;
  std::uint64_t named = 0;
};

template <class Traits>
hit_blocks worlds_hold(std::uint64_t count) {
  hit_blocks hits;
  run_worlds<paged_world<Traits, random_numbers>>(count, 450, [&](const auto& world) {
    hits.all += world.hits();
    hits.by_key += world.hits_by_key();
    hits.beginnings += world.beginnings();
    hits.stolen += world.stats().stolen_blocks;
    hits.deduplicated += world.stats().deduplicated;
    hits.moves += world.moves();
    hits.refused += world.stats().refused;
    hits.orphans += world.stats().orphans;
    hits.invalidated += world.stats().invalidated;
    hits.mended += world.mended();
    hits.removed += world.removed();
    hits.named += world.named();
  });
  return hits;
}

}  // namespace

TEST_CASE(
    "every sequence reads its own values, regardless of sharing, copies, evictions and deferred frees") {
  const hit_blocks hits = worlds_hold<world_traits>(250);
  CHECK(hits.all > in_worlds(4'000));
  CHECK(hits.by_key > in_worlds(700));
  CHECK(hits.deduplicated > in_worlds(20));
  CHECK(hits.moves > in_worlds(500));
  MESSAGE(hits.orphans << " orphans, " << hits.invalidated << " invalidated, " << hits.mended << " mended, "
                       << hits.removed << " removed, " << hits.named << " named");
  CHECK(hits.named > in_worlds(200));
  CHECK(hits.orphans > in_worlds(100));
  CHECK(hits.invalidated > in_worlds(200));
  CHECK(hits.mended > in_worlds(500));
  CHECK(hits.removed > in_worlds(300));
}

TEST_CASE("with external keys that name single blocks, every sequence reads back its own values") {
  const hit_blocks hits = worlds_hold<alone_world_traits>(150);
  CHECK(hits.by_key > in_worlds(300));
}

TEST_CASE("with a hash that always collides no sequence gets another's values, and blocks are still shared") {
  const hit_blocks hits = worlds_hold<weak_world_traits>(250);
  CHECK(hits.all - hits.by_key > in_worlds(500));
}

TEST_CASE("with a trusted hash every sequence also reads back its own values") {
  const hit_blocks hits = worlds_hold<trusting_world_traits>(250);
  CHECK(hits.all > in_worlds(4'000));
  CHECK(hits.by_key > in_worlds(700));
}

TEST_CASE("sequences that copy the beginnings of blocks read back their own values") {
  const hit_blocks hits = worlds_hold<copying_world_traits>(250);
  CHECK(hits.beginnings > in_worlds(800));
  CHECK(hits.stolen == 0);
}

TEST_CASE("sequences that take over the beginnings of idle blocks read back their own values") {
  const hit_blocks hits = worlds_hold<stealing_world_traits>(250);
  CHECK(hits.beginnings > in_worlds(800));
  CHECK(hits.stolen > in_worlds(100));
}

TEST_CASE("if only contents written twice are cached, every sequence reads back its own values") {
  const hit_blocks hits = worlds_hold<choosy_world_traits>(250);
  CHECK(hits.all > in_worlds(500));
  CHECK(hits.refused > in_worlds(1'000));
}
