#include <llmmem/eviction/any.hpp>
#include <llmmem/eviction/fifo.hpp>
#include <llmmem/eviction/lfu.hpp>
#include <llmmem/eviction/lru.hpp>
#include <llmmem/eviction/min.hpp>

#include <doctest/doctest.h>

#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// The definitions, searched linearly: an entry is what happened to it, the victim the candidate that is
/// first by the policy's own order.
struct entry {
  bool pinned = true;
  std::uint64_t inserted = 0;
  std::uint64_t first_unpinned = access_hint::never;
  std::uint64_t last_event = 0;  // of any kind that makes it recent
  std::uint64_t uses = 1;
  std::uint64_t next_use = access_hint::never;
};

class oracle {
 public:
  explicit oracle(std::string_view policy) : policy_(policy) {}

  void insert(slot_id slot, access_hint hint) {
    entries_[slot] = {.inserted = ++now_, .last_event = now_, .next_use = hint.next_use};
  }
  void touch(slot_id slot, access_hint hint) {
    entry& e = entries_.at(slot);
    ++e.uses;
    e.next_use = hint.next_use;
    e.last_event = ++now_;
  }
  void pin(slot_id slot) { entries_.at(slot).pinned = true; }
  void unpin(slot_id slot) {
    entry& e = entries_.at(slot);
    e.pinned = false;
    e.last_event = ++now_;
    if (e.first_unpinned == access_hint::never) e.first_unpinned = now_;
  }
  void erase(slot_id slot) { entries_.erase(slot); }

  [[nodiscard]] std::optional<slot_id> victim() const {
    std::optional<slot_id> first;
    for (const auto& [slot, e] : entries_) {
      if (!e.pinned && (!first || rank(e) < rank(entries_.at(*first)))) first = slot;
    }
    return first;
  }
  [[nodiscard]] bool known(slot_id slot) const { return entries_.contains(slot); }
  [[nodiscard]] bool pinned(slot_id slot) const { return entries_.at(slot).pinned; }

 private:
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> rank(const entry& e) const {
    if (policy_ == "lru") return {e.last_event, 0};
    if (policy_ == "fifo") return {e.first_unpinned, 0};
    if (policy_ == "lfu") return {e.uses, e.last_event};
    return {access_hint::never - e.next_use, e.last_event};
  }

  std::string_view policy_;
  std::map<slot_id, entry> entries_;
  std::uint64_t now_ = 0;
};

/// One random operation that the rules allow, on both.
template <class Policy>
void step(Policy& policy, oracle& model, random_numbers& random, std::uint32_t slots) {
  const slot_id slot{random.below(slots)};
  const access_hint hint{random.once_in(4) ? access_hint::never : random.below(std::uint64_t{50})};
  if (!model.known(slot)) {
    policy.insert(slot, hint);
    model.insert(slot, hint);
  } else if (random.once_in(4)) {
    policy.touch(slot, hint);
    model.touch(slot, hint);
  } else if (model.pinned(slot)) {
    if (random.once_in(5)) {
      policy.erase(slot);
      model.erase(slot);
    } else {
      policy.unpin(slot);
      model.unpin(slot);
    }
  } else if (random.once_in(3)) {
    policy.pin(slot);
    model.pin(slot);
  } else if (const auto victim = policy.victim()) {
    policy.erase(*victim);
    model.erase(*victim);
  }
}

template <class Policy>
void behaves_as(std::string_view name, Policy (*make)(slot_count)) {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    CAPTURE(name);
    random_numbers random(seed);
    const std::uint32_t slots = 1 + static_cast<std::uint32_t>(seed % 40);
    Policy policy = make(slot_count{slots});
    oracle model(name);
    for (int i = 0; i < 600; ++i) {
      step(policy, model, random, slots);
      REQUIRE(policy.victim() == model.victim());
      for (std::uint32_t s = 0; s < slots; ++s) {
        REQUIRE(policy.is_candidate(slot_id{s}) == (model.known(slot_id{s}) && !model.pinned(slot_id{s})));
      }
    }
  }
}

template <class Policy>
Policy make_plain(slot_count slots) {
  return Policy(slots);
}

}  // namespace

TEST_CASE("lru evicts the entry that has been unused for longest") {
  behaves_as("lru", make_plain<lru_eviction>);
}
TEST_CASE("fifo evicts the entry that was released first") {
  behaves_as("fifo", make_plain<fifo_eviction>);
}
TEST_CASE("lfu evicts the least often used entry, and the least recent of equals") {
  behaves_as("lfu", make_plain<lfu_eviction>);
}
TEST_CASE("min evicts the entry with the furthest next use, and the least recent of equals") {
  behaves_as("min", make_plain<min_eviction>);
}

TEST_CASE("a policy made by name behaves as the policy it names") {
  behaves_as<any_eviction>("lru", [](slot_count slots) { return make_eviction("lru", slots); });
  behaves_as<any_eviction>("fifo", [](slot_count slots) { return make_eviction("fifo", slots); });
  behaves_as<any_eviction>("lfu", [](slot_count slots) { return make_eviction("lfu", slots); });
  behaves_as<any_eviction>("min", [](slot_count slots) { return make_eviction("min", slots); });
}

TEST_CASE("every listed name makes a policy, and no other name does") {
  for (const auto name : eviction_names)
    CHECK_NOTHROW(make_eviction(name, slot_count{1}));
  CHECK_THROWS_WITH_AS(make_eviction("mru", slot_count{1}),
                       "make_eviction: no policy is called \"mru\"; known are lru, fifo, lfu, min, slru, "
                       "arc, s3fifo, sieve, wtinylfu, gdsf, length_aware, retention, hazard",
                       argument_error);
  CHECK_THROWS_WITH_AS(make_eviction("", slot_count{1}),
                       "make_eviction: no policy is called \"\"; known are lru, fifo, lfu, min, slru, arc, "
                       "s3fifo, sieve, wtinylfu, gdsf, length_aware, retention, hazard",
                       argument_error);
}

TEST_CASE("without candidates there is no victim") {
  lru_eviction policy(slot_count{3});
  CHECK(policy.victim() == std::nullopt);
  policy.insert(slot_id{1});
  CHECK(policy.victim() == std::nullopt);  // pinned: whoever brought it in is using it
  policy.unpin(slot_id{1});
  CHECK(policy.victim() == slot_id{1});
  policy.pin(slot_id{1});
  CHECK(policy.victim() == std::nullopt);
}

TEST_CASE("a capacity past the index type is refused with both numbers") {
  CHECK_THROWS_WITH_AS(lru_eviction{slot_count{max_slots + 1}},
                       "lru_eviction: capacity 4294967296 exceeds max_slots 4294967295", length_error);
  CHECK_THROWS_WITH_AS(fifo_eviction{slot_count{max_slots + 1}},
                       "fifo_eviction: capacity 4294967296 exceeds max_slots 4294967295", length_error);
  CHECK_THROWS_WITH_AS(lfu_eviction{slot_count{0}}, "lfu_eviction: capacity is 0; it must be at least 1",
                       length_error);
  CHECK_THROWS_WITH_AS(min_eviction{slot_count{0}}, "min_eviction: capacity is 0; it must be at least 1",
                       length_error);
}

TEST_CASE("a policy whose metadata cannot be allocated says so and leaks nothing") {
  CHECK(fail_each_allocation([](const metadata_source& source) { lru_eviction(slot_count{8}, source); }) ==
        1);
  CHECK(fail_each_allocation([](const metadata_source& source) { lfu_eviction(slot_count{8}, source); }) ==
        3);
  CHECK(fail_each_allocation([](const metadata_source& source) {
          static_cast<void>(make_eviction("lfu", slot_count{8}, source));
        }) == 4);
  counting_metadata failing(1);
  CHECK_THROWS_WITH_AS(lru_eviction(slot_count{7}, failing.source()),
                       "lru_eviction: no memory for 64 bytes of metadata; lower the option that sizes it",
                       out_of_memory);
}

TEST_CASE("a by-name policy moves, leaving its source with nothing to free") {
  counting_metadata counted;
  {
    any_eviction first = make_eviction("min", slot_count{4}, counted.source());
    first.insert(slot_id{2});
    first.unpin(slot_id{2});
    any_eviction second = std::move(first);
    CHECK(second.victim() == slot_id{2});
    any_eviction third = make_eviction("lru", slot_count{4}, counted.source());
    third = std::move(second);
    CHECK(third.victim() == slot_id{2});
    CHECK(third.metadata_bytes() >= 4 * 24);
  }
  CHECK(counted.live_bytes() == 0);
}
