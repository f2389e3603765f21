/// The stack of tiers against lists of who has a copy, the one used longest ago first.
#include <llmmem/eviction/lru.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiering/detail/tier_stack.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/tiered_objects.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::detail::nth;
using llmmem::detail::residence;

namespace {

using three = tiered_objects<tier<host_space>, tier<host_space>, tier<host_space>>;

/// The copies of tier 0, the one used longest ago first, and how often each is pinned.
struct resident {
  std::uint32_t slot;
  std::uint32_t pins;
};

}  // namespace

TEST_CASE("copies leave in the order of last use, and pinned ones stay") {
  constexpr std::uint64_t room = 5;
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    three world({.max_chunks = 16}, room, 8, 16);
    auto& stack = world.parts.stack;
    std::vector<std::uint32_t> slots;
    for (int i = 0; i < 10; ++i)
      slots.push_back(world.make());
    std::vector<resident> oracle;
    std::uint64_t dropped = 0;
    for (int step = 0; step < 200; ++step) {
      const std::uint32_t slot = slots[random.below(slots.size())];
      const auto at = std::ranges::find(oracle, slot, &resident::slot);
      if (at == oracle.end()) {
        const result<void> had = stack.take(nth<0>, world.copy(slot, 0), object_page);
        REQUIRE(had.has_value() == (oracle.size() < room));
        if (!had) {
          REQUIRE(had.code() == errc::out_of_bytes);
          const auto first = std::ranges::find(oracle, 0U, &resident::pins);
          const auto victim = stack.victim(nth<0>);
          REQUIRE(victim.has_value() == (first != oracle.end()));
          if (!victim) continue;
          REQUIRE(to_index(*victim) == first->slot);
          stack.drop_clean(nth<0>, first->slot);
          oracle.erase(first);
          ++dropped;
          continue;
        }
        stack.become_valid(nth<0>, slot);
        oracle.push_back({slot, 0});
      } else if (random.once_in(3)) {
        stack.pin(nth<0>, slot);
        ++at->pins;
      } else if (at->pins != 0) {
        stack.unpin(nth<0>, slot);
        if (--at->pins == 0) std::rotate(at, at + 1, oracle.end());  // used until now
      } else if (random.once_in(4)) {
        stack.forget(nth<0>, slot);
        oracle.erase(at);
      } else {
        stack.touch(nth<0>, slot);
        std::rotate(at, at + 1, oracle.end());
      }
      tiered_stats<3> now;
      stack.add_to(now);
      REQUIRE(now.tiers[0].used == oracle.size() * object_page);
      REQUIRE(now.tiers[0].used <= now.tiers[0].budget);
      REQUIRE(now.tiers[0].chunks == oracle.size());
      REQUIRE(now.tiers[0].drops == dropped);
      std::vector<std::string> broken;
      stack.audit(broken);
      REQUIRE(broken.empty());
    }
    for (const resident& each : oracle) {
      for (std::uint32_t i = 0; i < each.pins; ++i)
        stack.unpin(nth<0>, each.slot);
    }
  }
}

TEST_CASE("space without a wait comes from free bytes, and then from clean copies in order") {
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    three world({.max_chunks = 16}, 4, 4, 16);
    auto& stack = world.parts.stack;
    std::vector<bool> clean;
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t slot = world.make();
      REQUIRE(stack.take(nth<1>, world.copy(slot, 1), object_page).has_value());
      stack.become_valid(nth<1>, slot);
      clean.push_back(!random.once_in(3));
      if (clean.back()) {
        world.copy(slot, 2).at = residence::valid;
      } else {
        world.copy(slot, 1).dirty.add({0, object_page});
      }
    }
    // Each of them makes room for one more, until a dirty one is next to leave.
    std::vector<detail::tier_copy> taken;
    for (bool had = true; had;) {
      detail::tier_copy place;
      had = stack.take_clean_place(nth<1>, place, object_page);
      if (had) {
        CHECK(place.at == residence::reserved);
        taken.push_back(place);
      }
    }
    const auto first_dirty = std::ranges::find(clean, false);
    CHECK(taken.size() == static_cast<std::size_t>(first_dirty - clean.begin()));
    for (detail::tier_copy& each : taken)
      stack.give_back(nth<1>, each);
  }
}

TEST_CASE("a place that a device may still write to is never reused, and no longer counts as space") {
  three world({.max_chunks = 8}, 4, 4, 8);
  auto& stack = world.parts.stack;
  const std::uint64_t most = stack.most_bytes(nth<0>);
  detail::tier_copy place;
  REQUIRE(stack.take(nth<0>, place, object_page).has_value());
  std::byte* const lost = place.data;
  stack.retire(nth<0>, place);
  CHECK(stack.most_bytes(nth<0>) == most - object_page);
  std::vector<detail::tier_copy> rest(3);
  for (detail::tier_copy& each : rest) {
    REQUIRE(stack.take(nth<0>, each, object_page).has_value());
    CHECK(each.data != lost);
  }
  detail::tier_copy more;
  CHECK(stack.take(nth<0>, more, object_page).code() == errc::out_of_bytes);
  CHECK(stack.check_fits(4 * object_page).code == errc::out_of_bytes);
  CHECK(stack.check_fits(3 * object_page).code == errc::ok);
  for (detail::tier_copy& each : rest)
    stack.give_back(nth<0>, each);
}
