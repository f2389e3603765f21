/// Staging slots against a count of places.
#include <llmmem/space/host.hpp>
#include <llmmem/tiering/detail/staging_slots.hpp>
#include <llmmem/tiering/detail/tier_state.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <map>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

TEST_CASE("a staging slot has one user at a time, and gets another place after the first was retired") {
  constexpr std::uint64_t each = 128;
  constexpr std::uint32_t count = 3;
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    host_space memory({.budget = 1 << 20});
    using places_type = detail::chunk_places<host_space>;
    places_type places(tier_place<host_space>(memory, 8 * each, 64), 16, "test: places", {});
    detail::staging_slots<places_type> stages(places, count, each, {});
    stages.take_places();
    std::uint64_t places_left = 8 - count;  // of the tier
    std::map<std::uint32_t, std::uint32_t> users;
    for (std::uint32_t step = 0; step < 60; ++step) {
      CHECK(stages.granted() == stages.placed() * each);
      const std::uint64_t missing = count - stages.placed();
      const std::uint32_t at = stages.free();
      const std::uint64_t had = missing - (count - stages.placed());  // it took this many places anew
      CHECK(had <= places_left);
      places_left -= had;
      if (at != detail::no_index && random.once_in(2)) {
        REQUIRE(!users.contains(at));
        REQUIRE(stages.place(at).granted == each);
        stages.claim(at, step);
        users[at] = step;
      } else if (!users.empty()) {
        const auto [slot, user] = *users.begin();
        stages.set_encoded_bytes(slot, user);
        CHECK(stages.encoded_bytes(slot) == user);
        stages.release(slot);
        if (random.once_in(4)) stages.retire(slot);
        users.erase(slot);
      }
      const std::uint32_t any = stages.any_user();
      CHECK((any == detail::no_index) == users.empty());
      if (users.size() == count) CHECK(stages.free() == detail::no_index);
      CHECK(places.stats().lost_places + stages.placed() + places_left == 8);
    }
    stages.release_places();
    CHECK(places.stats().places == places.stats().lost_places);
  }
}
