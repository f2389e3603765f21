/// The allocator of several groups against what it is for: see support/hybrid_world.hpp.
#include <doctest/doctest.h>

#include <cstdint>

#include "support/hybrid_world.hpp"
#include "support/random.hpp"
#include "support/run_worlds.hpp"

using namespace llmmem_tests;

namespace {

struct seen {
  std::uint64_t hits = 0;
  std::uint64_t evictions = 0;
  std::uint64_t refused = 0;
  std::uint64_t retired = 0;
  std::uint64_t evacuated = 0;
  std::uint64_t copies = 0;
  std::uint64_t released_early = 0;
  std::uint64_t cuts = 0;
  std::uint64_t refused_cuts = 0;
  std::uint64_t batches = 0;
  std::uint64_t waited = 0;
  std::uint64_t invalidated = 0;
  std::uint64_t removals = 0;
  std::uint64_t named = 0;
  std::uint64_t deduplicated = 0;
};

template <class Traits>
seen worlds_hold(std::uint64_t count) {
  seen all;
  run_worlds<hybrid_world<Traits, random_numbers>>(count, 300, [&](const auto& world) {
    all.hits += world.stats().hit_tokens;
    all.evictions += world.stats().pages.evictions;
    all.refused += world.refused();
    all.retired += world.retired();
    all.evacuated += world.evacuated();
    all.copies += world.stats().copies;
    all.released_early += world.stats().released_early;
    all.cuts += world.cuts();
    all.refused_cuts += world.refused_cuts();
    all.batches += world.batches();
    all.waited += world.waited();
    all.invalidated += world.invalidated();
    all.removals += world.removals();
    all.named += world.named();
    all.deduplicated += world.deduplicated();
  });
  return all;
}

}  // namespace

TEST_CASE(
    "every sequence reads what its next token attends to, holds nothing else, and finds the longest hit") {
  const seen all = worlds_hold<hybrid_world_traits>(450);
  MESSAGE(all.hits << " hit tokens, " << all.evictions << " evictions, " << all.refused << " refused, "
                   << all.retired << " pages retired, " << all.evacuated << " blocks evacuated, "
                   << all.copies << " copies, " << all.released_early << " released early, " << all.cuts
                   << " cuts, " << all.refused_cuts << " refused cuts, " << all.batches << " batches, "
                   << all.waited << " reads outlived their sequence, " << all.invalidated << " invalidated, "
                   << all.removals << " removals, " << all.named << " tokens named later, "
                   << all.deduplicated << " blocks deduplicated");
  CHECK(all.named > in_worlds(1'000));
  CHECK(all.deduplicated > in_worlds(100));
  CHECK(all.invalidated > in_worlds(200));
  CHECK(all.removals > in_worlds(100));
  CHECK(all.hits > in_worlds(1'000));
  CHECK(all.evictions > in_worlds(1'000));
  CHECK(all.refused > in_worlds(1'000));
  CHECK(all.retired > in_worlds(500));
  CHECK(all.evacuated > in_worlds(100));
  CHECK(all.copies > in_worlds(1'000));
  CHECK(all.released_early > in_worlds(1'000));
  CHECK(all.cuts > in_worlds(1'000));
  CHECK(all.refused_cuts > in_worlds(1'000));
  CHECK(all.batches > in_worlds(1'000));
  CHECK(all.waited > in_worlds(1'000));
}

TEST_CASE("with a hash that always collides no sequence gets another's values in any group") {
  const seen all = worlds_hold<weak_hybrid_world_traits>(200);
  CHECK(all.hits > in_worlds(100));
}

TEST_CASE("with a trusted hash every sequence reads its own values in every group") {
  const seen all = worlds_hold<trusting_hybrid_world_traits>(200);
  CHECK(all.hits > in_worlds(1'000));
}
