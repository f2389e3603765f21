/// The table of transfers against a map.
#include <llmmem/tiering/detail/transfer_table.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::detail::tier_transfer;
using llmmem::detail::transfer_table;

namespace {

bool touches(const tier_transfer& t, std::size_t tier) {
  return tier == transfer_table::any_tier || t.edge == tier || t.edge + 1 == tier;
}

bool leaves(const tier_transfer& t, std::size_t tier) {
  return t.then_drops && t.edge == tier;
}

}  // namespace

TEST_CASE("a table of transfers records the transfers in flight, as a map does") {
  constexpr std::uint32_t capacity = 9;
  constexpr std::uint32_t edges = 3;
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    random_numbers random(seed);
    transfer_table table(capacity, {});
    std::map<std::uint32_t, tier_transfer> oracle;
    for (std::uint32_t step = 0; step < 200; ++step) {
      if (!table.is_full() && random.once_in(2)) {
        const tier_transfer fresh{
            .chunk = step, .edge = random.below(edges), .stores = true, .then_drops = random.once_in(4)};
        const std::uint32_t id = table.claim(fresh);
        REQUIRE(id < capacity);
        REQUIRE(oracle.emplace(id, fresh).second);  // a number that nobody has
      } else if (!oracle.empty()) {
        const auto ended =
            std::next(oracle.begin(), static_cast<std::ptrdiff_t>(random.below(oracle.size())));
        REQUIRE(table.release(ended->first).chunk == ended->second.chunk);
        oracle.erase(ended);
      }
      REQUIRE(table.free_count() == capacity - oracle.size());
      REQUIRE(table.is_full() == (oracle.size() == capacity));
      REQUIRE(table.is_idle() == oracle.empty());
      for (std::uint32_t id = 0; id < capacity; ++id) {
        REQUIRE(table.is_under_way(id) == oracle.contains(id));
        if (oracle.contains(id)) REQUIRE(table[id].edge == oracle.at(id).edge);
      }
      for (const std::size_t tier :
           {std::size_t{0}, std::size_t{1}, std::size_t{3}, transfer_table::any_tier}) {
        const std::uint32_t found = table.touching(tier);
        const auto there = [&](const auto& each) { return touches(each.second, tier); };
        const auto leaving = [&](const auto& each) { return leaves(each.second, tier); };
        REQUIRE((found != detail::no_index) == std::ranges::any_of(oracle, there));
        if (found == detail::no_index) continue;
        REQUIRE(touches(oracle.at(found), tier));
        REQUIRE(leaves(oracle.at(found), tier) == std::ranges::any_of(oracle, leaving));
      }
    }
  }
}
