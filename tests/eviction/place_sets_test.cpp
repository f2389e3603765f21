#include <llmmem/eviction/detail/place_sets.hpp>

#include <doctest/doctest.h>

#include <array>
#include <map>
#include <utility>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::detail::place_sets;

namespace {

constexpr std::size_t sets = 3;
constexpr std::size_t in_none = sets;

/// Ages that are never renumbered, and each set sorted by them.
struct sorted_sets {
  struct entry {
    std::uint64_t age = 0;
    std::size_t set = in_none;
  };
  std::map<slot_id, entry> placed;
  std::array<std::map<std::uint64_t, slot_id>, sets> members;
  std::uint64_t next_age = 0;
};

/// One operation that the rules allow, on both. A slot enters a set once in `rarely` times.
void step(place_sets<sets>& tested, sorted_sets& model, random_numbers& random, std::uint32_t slots,
          std::uint64_t rarely) {
  const slot_id slot{random.below(slots)};
  const auto known = model.placed.find(slot);
  if (known == model.placed.end()) {
    tested.renew(slot);
    model.placed[slot].age = model.next_age++;
    return;
  }
  auto& [age, set] = known->second;
  if (set != in_none) {
    tested.remove(set, slot);
    model.members[set].erase(age);
    set = in_none;
  } else if (!random.once_in(rarely) || random.once_in(3)) {
    tested.renew(slot);
    age = model.next_age++;
  } else if (random.once_in(6)) {
    tested.forget(slot);
    model.placed.erase(known);
  } else {
    set = random.below(std::uint64_t{sets});
    tested.insert(set, slot);
    model.members[set][age] = slot;
  }
}

void check_alike(const place_sets<sets>& tested, const sorted_sets& model, slot_id a, slot_id b) {
  REQUIRE(tested.has_place(a) == model.placed.contains(a));
  if (model.placed.contains(a) && model.placed.contains(b))
    REQUIRE(tested.before(a, b) == (model.placed.at(a).age < model.placed.at(b).age));
  for (std::size_t set = 0; set < sets; ++set) {
    const auto first = tested.first(set);
    REQUIRE(first.has_value() == !model.members[set].empty());
    if (first) REQUIRE(*first == model.members[set].begin()->second);
  }
}

}  // namespace

TEST_CASE("place sets behave as sorted maps, regardless of renumbering") {
  // 1, 2 and 3 slots among them, where every few places bring a renumbering; up to two levels. In half of the
  // runs sets have few members, so that most of their words are empty.
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t rarely = seed % 2 == 0 ? 1 : 30;
    const std::uint32_t slots = 1 + static_cast<std::uint32_t>(seed % (rarely == 1 ? 40 : 400));
    place_sets<sets> tested(slot_count{slots}, {}, "sets");
    sorted_sets model;
    for (int i = 0; i < 4000; ++i) {
      step(tested, model, random, slots, rarely);
      check_alike(tested, model, slot_id{random.below(slots)}, slot_id{random.below(slots)});
    }
  }
}

TEST_CASE("place sets of three levels also behave as sorted maps") {
  for (const auto seed : seeds(3)) {
    CAPTURE(seed);
    random_numbers random(seed);
    constexpr std::uint32_t slots = 3000;
    place_sets<sets> tested(slot_count{slots}, {}, "sets");
    sorted_sets model;
    for (int i = 0; i < 100'000; ++i) {
      step(tested, model, random, slots, 1 + seed % 2 * 500);
      check_alike(tested, model, slot_id{random.below(slots)}, slot_id{random.below(slots)});
    }
  }
}

TEST_CASE("a set returns all slots in the order of their last renewal, at every edge of a level") {
  for (const std::uint32_t slots : {1U, 31U, 32U, 33U, 2047U, 2048U, 2049U, 131'072U, 131'073U}) {
    CAPTURE(slots);
    random_numbers random(slots);
    place_sets<1> tested(slot_count{slots}, {}, "sets");
    std::vector<slot_id> order(slots);
    for (std::uint32_t s = 0; s < slots; ++s)
      order[s] = slot_id{s};
    for (int round = 0; round < 5; ++round) {
      for (std::uint32_t s = slots; s > 1; --s)
        std::swap(order[s - 1], order[random.below(s)]);
      for (const slot_id slot : order)
        tested.renew(slot);
      for (std::uint32_t s = slots; s-- > 0;)
        tested.insert(0, slot_id{s});
      for (const slot_id slot : order) {
        REQUIRE(tested.first(0) == slot);
        tested.remove(0, slot);
      }
      REQUIRE(tested.first(0) == std::nullopt);
    }
  }
}

TEST_CASE(
    "place sets take 12 bytes per slot, a word for each set, and one word for 64 places and for 64 words") {
  CHECK(place_sets<6>(slot_count{1000}, {}, "sets").bytes() == 12 * 1000 + 7 * 8 * (32 + 1));
  CHECK(place_sets<2>(slot_count{3000}, {}, "sets").bytes() == 12 * 3000 + 3 * 8 * (94 + 2 + 1));
}

TEST_CASE("place sets refuse more slots than half of what 32 bits can number") {
  CHECK_THROWS_WITH_AS((place_sets<1>(slot_count{2'147'483'648}, {}, "sets")),
                       "sets: capacity 2147483648 exceeds 2147483647, the most slots of this policy",
                       length_error);
}

TEST_CASE("place sets whose memory cannot be allocated leak nothing") {
  CHECK(fail_each_allocation(
            [](const metadata_source& source) { place_sets<2>(slot_count{5}, source, "sets"); }) == 3);
}
