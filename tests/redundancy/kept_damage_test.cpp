#include <llmmem/redundancy/detail/kept_damage.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <set>

#include "support/random.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem::detail::kept_damage;

}  // namespace

TEST_SUITE("kept_damage") {
  TEST_CASE("another rank reads exactly the noted places") {
    for (const auto seed : llmmem_tests::seeds(300)) {
      CAPTURE(seed);
      llmmem_tests::random_numbers random(seed);
      const std::uint32_t world = 1 + random.below(80U);
      kept_damage noted(world);
      bool own = false;
      std::set<std::uint32_t> copies;
      std::set<std::uint32_t> parities;
      for (std::uint32_t i = random.below(10U); i != 0; --i) {
        const std::uint32_t what = random.below(world);
        const std::uint32_t kind = random.below(3U);
        if (kind == 0) noted.note_own();
        if (kind == 1) noted.note_copy(what);
        if (kind == 2) noted.note_parity(what);
        own = own || kind == 0;
        if (kind == 1) copies.insert(what);
        if (kind == 2) parities.insert(what);
      }
      CHECK(noted.places() == copies.size() + parities.size() + (own ? 1U : 0U));
      REQUIRE(noted.words().size() == kept_damage::words_for(world));
      damaged_places all;
      kept_damage(world, noted.words()).add_to(all, rank_id{7});
      CHECK(all.own == (own ? rank_set{rank_id{7}} : rank_set{}));
      CHECK(all.copies.size() == copies.size());
      CHECK(all.parities.size() == parities.size());
      for (const std::uint32_t each : copies)
        CHECK(all.has_copy(rank_id{7}, rank_id{each}));
      for (const std::uint32_t each : parities)
        CHECK(all.has_parity(rank_id{7}, each));
    }
  }

  TEST_CASE("a rank that has verified nothing reports no damage") {
    CHECK(kept_damage().places() == 0);
    CHECK(kept_damage().words().empty());
  }
}
