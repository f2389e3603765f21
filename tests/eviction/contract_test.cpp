// What every policy must keep, whatever it ranks by.
#include <llmmem/eviction/any.hpp>
#include <llmmem/eviction/leaf_only.hpp>
#include <llmmem/eviction/queue_lookahead.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/eviction_driver.hpp"
#include "support/heap_counter.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

struct contender {
  std::string name;
  any_eviction (*make)(slot_count, const metadata_source&);
  std::size_t bytes_of_1000 = 0;  // as the contracts state them for each slot, and the ends of lists
};

template <class Policy>
contender of(std::string name, std::size_t bytes_of_1000) {
  return {std::move(name),
          [](slot_count slots, const metadata_source& source) {
            return any_eviction(std::in_place_type<Policy>, slots, source);
          },
          sizeof(Policy) + bytes_of_1000};
}

std::vector<contender> every_policy() {
  constexpr std::size_t ghosts_1000 = 17 * 1000 + 64 * (1000 / 6 + 1);
  constexpr std::size_t ghosts_901 = 17 * 901 + 64 * (901 / 6 + 1);
  constexpr std::size_t s3fifo_1000 = 23 * 1000 + 7 * 8 * 33 + ghosts_901;
  return {of<lru_eviction>("lru", 8 * 1001),
          of<fifo_eviction>("fifo", 16 * 1000),
          of<lfu_eviction>("lfu", 24 * 1000),
          of<min_eviction>("min", 24 * 1000),
          of<slru_eviction>("slru", 9 * 1000),
          of<arc_eviction>("arc", 17 * 1000 + ghosts_1000),
          of<s3fifo_eviction>("s3fifo", s3fifo_1000),
          of<sieve_eviction>("sieve", 24 * 1000),
          of<wtinylfu_eviction>("wtinylfu", 17 * 1000 + 8 * 1024),
          of<gdsf_eviction>("gdsf", 32 * 1000),
          of<length_aware_eviction>("length_aware", 24 * 1000),
          of<retention_eviction>("retention", 32 * 1000),
          of<leaf_only<>>("leaf_only", 8 * 1001 + 16 * 1000 + 8 * 1001),
          of<leaf_only<s3fifo_eviction>>("leaf_only of s3fifo", s3fifo_1000 + 16 * 1000 + 8 * 1001),
          of<queue_lookahead<7>>("queue_lookahead", 8 * 1001 + 40 * 1000),
          of<queue_lookahead<7, leaf_only<sieve_eviction>>>("queue_lookahead of leaf_only",
                                                            24 * 1000 + 16 * 1000 + 8 * 1001 + 40 * 1000)};
}

/// Knows states only; takes everything a policy may be told.
struct states_alone : slot_states {
  explicit states_alone(slot_count) {}
  void insert(slot_id slot, const access_hint&) { came(slot); }
  void touch(slot_id, const access_hint&) {}
  void pin(slot_id slot) { set_pinned(slot, true); }
  void unpin(slot_id slot) { set_pinned(slot, false); }
  void erase(slot_id slot) { left(slot); }
  void advance(std::uint64_t) {}
  void expect(slot_id, std::uint64_t) {}
  [[nodiscard]] bool any_candidate(std::uint32_t slots) const {
    for (std::uint32_t s = 0; s < slots; ++s) {
      if (candidate(slot_id{s})) return true;
    }
    return false;
  }
};

}  // namespace

TEST_CASE("every policy names a victim if and only if there is a candidate") {
  for (const contender& each : every_policy()) {
    CAPTURE(each.name);
    run_beside([&](slot_count slots) { return each.make(slots, {}); },
               [](slot_count slots) { return states_alone(slots); },
               [](const any_eviction& policy, const states_alone& states) {
                 const auto victim = policy.victim();
                 REQUIRE(victim.has_value() == states.any_candidate(60));
                 if (victim) REQUIRE(states.candidate(*victim));
                 REQUIRE(policy.victim() == victim);  // asking changes nothing
               },
               60, 500);
  }
}

TEST_CASE("every policy evicts each slot that it was filled with once") {
  for (const contender& each : every_policy()) {
    CAPTURE(each.name);
    constexpr std::uint32_t slots = 500;
    any_eviction policy = each.make(slot_count{slots}, {});
    random_numbers random(1);
    for (int round = 0; round < 3; ++round) {
      for (std::uint32_t s = 0; s < slots; ++s)
        policy.insert(slot_id{s}, random_hint(random, slots));
      for (std::uint32_t s = slots; s-- > 0;)
        policy.unpin(slot_id{s});
      std::uint32_t evicted = 0;
      while (const auto victim = policy.victim()) {
        policy.evict(*victim);
        REQUIRE_FALSE(policy.is_candidate(*victim));
        ++evicted;
      }
      CHECK(evicted == slots);
    }
  }
}

TEST_CASE("every policy evicts the tail of an unused chain before its head, if it was freed tail first") {
  for (const contender& each : every_policy()) {
    CAPTURE(each.name);
    constexpr std::uint32_t slots = 100;
    any_eviction policy = each.make(slot_count{slots}, {});
    for (std::uint32_t s = 0; s < slots; ++s) {
      policy.insert(
          slot_id{s},
          {.content = s + 1, .parent = s == 0 ? no_slot : slot_id{s - 1}, .position = s, .chain = slots});
    }
    for (std::uint32_t s = slots; s-- > 0;)
      policy.unpin(slot_id{s});
    for (std::uint32_t s = slots; s-- > 0;) {
      REQUIRE(policy.victim() == slot_id{s});
      policy.evict(slot_id{s});
    }
  }
}

TEST_CASE("every policy takes the bytes per slot that its contract states, all in its constructor") {
  for (const contender& each : every_policy()) {
    CAPTURE(each.name);
    CHECK(each.make(slot_count{1000}, {}).metadata_bytes() == each.bytes_of_1000);
    counting_metadata counted;
    {
      any_eviction policy = each.make(slot_count{1000}, counted.source());
      CHECK(policy.metadata_bytes() == counted.live_bytes());
      const std::uint64_t before = heap_allocations();
      random_numbers random(1);
      for (std::uint32_t i = 0; i < 5000; ++i) {
        const slot_id slot{i % 1000};
        if (policy.is_candidate(slot)) policy.evict(*policy.victim());
        if (i >= 1000 && policy.is_candidate(slot)) policy.erase(slot);
        policy.insert(slot, random_hint(random, 1000));
        policy.unpin(slot);
        policy.touch(slot, random_hint(random, 1000));
      }
      CHECK(heap_allocations() == before);
    }
    CHECK(counted.live_bytes() == 0);
  }
}

TEST_CASE("every policy whose metadata cannot be allocated says so and leaks nothing") {
  for (const contender& each : every_policy()) {
    CAPTURE(each.name);
    CHECK(fail_each_allocation([&](const metadata_source& source) {
            static_cast<void>(each.make(slot_count{9}, source));
          }) >= 2);
  }
}

TEST_CASE("every policy refuses a capacity of 0") {
  for (const contender& each : every_policy())
    CHECK_THROWS_AS(each.make(slot_count{0}, {}), length_error);
  CHECK_THROWS_WITH_AS(slru_eviction{slot_count{0}}, "slru_eviction: capacity is 0; it must be at least 1",
                       length_error);
  CHECK_THROWS_WITH_AS(arc_eviction{slot_count{max_slots + 1}},
                       "arc_eviction: capacity 4294967296 exceeds max_slots 4294967295", length_error);
}

TEST_CASE("a moved policy keeps its order, and the source can be assigned to") {
  for (const contender& each : every_policy()) {
    CAPTURE(each.name);
    any_eviction first = each.make(slot_count{20}, {});
    any_eviction twin = each.make(slot_count{20}, {});
    random_numbers random(3);
    for (std::uint32_t s = 0; s < 20; ++s) {
      const access_hint hint = random_hint(random, 20);
      for (any_eviction* policy : {&first, &twin}) {
        policy->insert(slot_id{s}, hint);
        policy->unpin(slot_id{s});
      }
    }
    any_eviction second = std::move(first);
    // A moved-from policy has no slots.
    CHECK(first.capacity() == slot_count{0});
    CHECK(first.metadata_bytes() == 0);
    first.insert(slot_id{0});
    first.touch(slot_id{0});
    first.pin(slot_id{0});
    first.unpin(slot_id{0});
    first.unpin(std::array{slot_id{0}});
    first.expect(slot_id{0}, 1);
    first.relabel(slot_id{0}, slot_id{1});
    first.advance(1);
    first.retain(slot_id{0}, {});
    first.evict(slot_id{0});
    first.erase(slot_id{0});
    CHECK(first.victim() == std::nullopt);
    CHECK(first.evict_victim() == no_slot);
    CHECK_FALSE(first.is_candidate(slot_id{0}));
    CHECK_FALSE(first.reads_hints());
    first = std::move(second);
    while (const auto victim = twin.victim()) {
      REQUIRE(first.victim() == victim);
      first.evict(*victim);
      twin.evict(*victim);
    }
    CHECK(first.victim() == std::nullopt);
  }
}

TEST_CASE("slots unpinned together, and victims evicted at once, leave as they do one call after another") {
  for (const contender& each : every_policy()) {
    CAPTURE(each.name);
    any_eviction together = each.make(slot_count{40}, {});
    any_eviction twin = each.make(slot_count{40}, {});
    random_numbers random(5);
    std::vector<slot_id> slots;
    for (std::uint32_t round = 0; round < 30; ++round) {
      slots.clear();
      for (std::uint32_t s = 0; s < 40; ++s) {
        if (together.is_candidate(slot_id{s})) continue;
        const access_hint hint = random_hint(random, 40);
        together.insert(slot_id{s}, hint);
        twin.insert(slot_id{s}, hint);
        slots.push_back(slot_id{s});
      }
      together.unpin(std::span<const slot_id>(slots));
      for (const slot_id slot : slots)
        twin.unpin(slot);
      for (std::uint32_t i = 0; i < 25; ++i) {
        const auto victim = twin.victim();
        REQUIRE(together.evict_victim() == victim.value());
        twin.evict(*victim);
      }
    }
    while (together.evict_victim() != no_slot) {
    }
    CHECK(together.victim() == std::nullopt);
  }
}

namespace {

/// An ARC whose owner names the victim.
struct named_victim : arc_eviction {
  using arc_eviction::arc_eviction;
  [[nodiscard]] std::optional<slot_id> victim() const noexcept { return slot_id{2}; }
};

}  // namespace

TEST_CASE("a derived policy's own victim is the one that is evicted") {
  named_victim policy(slot_count{4});
  for (std::uint32_t s = 0; s < 4; ++s) {
    policy.insert(slot_id{s});
    policy.unpin(slot_id{s});
  }
  CHECK(llmmem::detail::evict_victim(policy) == slot_id{2});
  CHECK(!policy.is_candidate(slot_id{2}));
}

namespace {

/// As above, by the policy's own move.
template <class Policy>
void moves_by_itself() {
  Policy first(slot_count{4});
  first.insert(slot_id{2});
  first.unpin(slot_id{2});
  Policy second(std::move(first));
  CHECK(second.victim() == slot_id{2});
  first = Policy(slot_count{8});
  CHECK(first.victim() == std::nullopt);
  first = std::move(second);
  CHECK(first.victim() == slot_id{2});
  CHECK(first.capacity() == slot_count{4});
}

}  // namespace

TEST_CASE("policies also move without an any_eviction") {
  moves_by_itself<lru_eviction>();
  moves_by_itself<slru_eviction>();
  moves_by_itself<arc_eviction>();
  moves_by_itself<s3fifo_eviction>();
  moves_by_itself<sieve_eviction>();
  moves_by_itself<wtinylfu_eviction>();
  moves_by_itself<gdsf_eviction>();
  moves_by_itself<retention_eviction>();
  moves_by_itself<leaf_only<>>();
  moves_by_itself<queue_lookahead<2>>();
}

TEST_CASE("every policy keeps its bound on idle slots of a full cache in a long run") {
  // 200 seeds of a cache under pressure: an access hits and uses, or misses and evicts what is named.
  for (const contender& each : every_policy()) {
    CAPTURE(each.name);
    for (const auto seed : seeds(200)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const std::uint32_t slots = 2 + static_cast<std::uint32_t>(seed % 30);
      any_eviction policy = each.make(slot_count{slots}, {});
      std::vector<std::uint64_t> holds(slots);
      std::uint32_t used = 0;
      for (int i = 0; i < 400; ++i) {
        // Squared: low contents are asked for more often.
        const std::uint64_t x = random.below(std::uint64_t{slots} * 3);
        const access_hint hint{.content = 1 + x * x / (slots * 3)};
        std::uint32_t slot = 0;
        while (slot < used && holds[slot] != hint.content)
          ++slot;
        if (slot < used) {
          policy.pin(slot_id{slot});
          policy.touch(slot_id{slot}, hint);
        } else {
          if (used < slots) {
            slot = used++;
          } else {
            const auto victim = policy.victim();
            REQUIRE(victim.has_value());
            slot = to_index(*victim);
            policy.evict(*victim);
          }
          policy.insert(slot_id{slot}, hint);
          holds[slot] = hint.content;
        }
        policy.unpin(slot_id{slot});
      }
    }
  }
}
