#include <llmmem/detail/ordered_slots.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <iterator>
#include <map>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

TEST_CASE("ordered slots are a sorted map from key to slot, forwards and backwards") {
  for (const auto seed : seeds(30)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint32_t capacity = 1 + static_cast<std::uint32_t>(seed) * 5;
    detail::ordered_slots<std::uint64_t> order(capacity, {}, "test");
    std::map<std::uint64_t, std::uint32_t> naive;
    std::map<std::uint32_t, std::uint64_t> keys;
    for (int i = 0; i < 500; ++i) {
      const std::uint32_t slot = random.below(capacity);
      const std::uint64_t key = random.below(std::uint64_t{200});
      if (const auto held = keys.find(slot); held != keys.end()) {
        REQUIRE(order.contains(slot));
        REQUIRE(order.key(slot) == held->second);
        order.erase(slot);
        naive.erase(held->second);
        keys.erase(held);
      } else if (!naive.contains(key)) {
        REQUIRE_FALSE(order.contains(slot));
        order.insert(slot, key);
        naive[key] = slot;
        keys[slot] = key;
      }
      const std::uint64_t probe = random.below(std::uint64_t{210});
      const auto lower = naive.lower_bound(probe);
      REQUIRE(order.at_least(probe) == (lower == naive.end() ? detail::no_index : lower->second));
      REQUIRE(order.below(probe) == (lower == naive.begin() ? detail::no_index : std::prev(lower)->second));
      REQUIRE(order.size() == naive.size());
      std::uint32_t at = order.first();
      for (const auto& [unused, expected] : naive) {
        REQUIRE(at == expected);
        at = order.next(at);
      }
      REQUIRE(at == detail::no_index);
      at = order.last();
      for (auto each = naive.rbegin(); each != naive.rend(); ++each) {
        REQUIRE(at == each->second);
        at = order.previous(at);
      }
      REQUIRE(at == detail::no_index);
    }
  }
}
