#include <llmmem/eviction/fifo.hpp>
#include <llmmem/eviction/queue_lookahead.hpp>
#include <llmmem/eviction/retention.hpp>

#include <doctest/doctest.h>

#include <map>
#include <utility>

#include "support/eviction_driver.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t horizon = 5;

/// The definition over a FIFO by slot number: expected within the horizon goes last, furthest first.
class lookahead_oracle : public slot_states {
 public:
  explicit lookahead_oracle(slot_count) {}

  void insert(slot_id slot, const access_hint& hint) {
    came(slot);
    entries_[slot] = {.next_use = hint.next_use, .last = 0};
  }
  void touch(slot_id slot, const access_hint& hint) { entries_[slot] = {hint.next_use, ++events_}; }
  void expect(slot_id slot, std::uint64_t next_use) { entries_.at(slot).next_use = next_use; }
  void pin(slot_id slot) { set_pinned(slot, true); }
  void unpin(slot_id slot) {
    set_pinned(slot, false);
    entries_.at(slot).last = ++events_;
  }
  void erase(slot_id slot) {
    left(slot);
    entries_.erase(slot);
  }
  void advance(std::uint64_t head) { head_ = head; }

  [[nodiscard]] bool expected(slot_id slot) const {
    const std::uint64_t use = entries_.at(slot).next_use;
    return use != access_hint::never && use >= head_ && use < head_ + horizon;
  }
  [[nodiscard]] bool any_unexpected() const {
    for (const auto& [slot, e] : entries_) {
      if (candidate(slot) && !expected(slot)) return true;
    }
    return false;
  }
  [[nodiscard]] std::optional<slot_id> furthest() const {
    std::optional<slot_id> first;
    const auto rank = [&](slot_id slot) {
      return std::pair(~entries_.at(slot).next_use, entries_.at(slot).last);
    };
    for (const auto& [slot, e] : entries_) {
      if (candidate(slot) && (!first || rank(slot) < rank(*first))) first = slot;
    }
    return first;
  }

 private:
  struct entry {
    std::uint64_t next_use = access_hint::never;
    std::uint64_t last = 0;
  };
  std::map<slot_id, entry> entries_;
  std::uint64_t head_ = 0;
  std::uint64_t events_ = 0;
};

}  // namespace

TEST_CASE("queue_lookahead evicts the entry that the queued requests use last, the furthest first") {
  using policy_type = queue_lookahead<horizon>;
  run_beside([](slot_count slots) { return policy_type(slots); },
             [](slot_count slots) { return lookahead_oracle(slots); },
             [](const policy_type& policy, const lookahead_oracle& oracle) {
               const auto victim = policy.victim();
               if (oracle.any_unexpected()) {
                 REQUIRE(victim.has_value());
                 REQUIRE(oracle.candidate(*victim));
                 REQUIRE_FALSE(oracle.expected(*victim));
                 REQUIRE(victim == policy.base().victim());
               } else {
                 REQUIRE(victim == oracle.furthest());
               }
             });
}

TEST_CASE("an expectation approaches, is met or lapses, and the base keeps its order meanwhile") {
  queue_lookahead<2, fifo_eviction> policy(slot_count{3});
  for (std::uint32_t slot = 0; slot < 3; ++slot) {
    policy.insert(slot_id{slot});
    policy.unpin(slot_id{slot});
  }
  policy.expect(slot_id{0}, 4);
  CHECK(policy.victim() == slot_id{0});  // 4 is not among 0 and 1
  policy.advance(3);
  CHECK(policy.victim() == slot_id{1});
  policy.expect(slot_id{1}, 3);
  policy.expect(slot_id{2}, 3);
  CHECK(policy.victim() == slot_id{0});  // all are expected, this last
  policy.advance(4);
  CHECK(policy.victim() == slot_id{1});  // 3 has passed
  policy.touch(slot_id{0});              // met
  CHECK(policy.victim() == slot_id{0});
  policy.expect(slot_id{0}, 5);
  policy.expect(slot_id{0}, access_hint::never);
  CHECK(policy.victim() == slot_id{0});
}

TEST_CASE("an infinite horizon counts the largest number") {
  queue_lookahead<~std::uint64_t{0}> policy(slot_count{2});
  policy.insert(slot_id{0}, {.next_use = ~std::uint64_t{0} - 1});
  policy.insert(slot_id{1}, {.next_use = 0});
  policy.unpin(slot_id{0});
  policy.unpin(slot_id{1});
  CHECK(policy.victim() == slot_id{0});
  policy.advance(1);
  CHECK(policy.victim() == slot_id{1});
  policy.advance(~std::uint64_t{0});
  CHECK(policy.victim() == slot_id{1});
}

TEST_CASE("the base of a lookahead receives the notices that only it understands") {
  queue_lookahead<3, retention_eviction> policy(slot_count{2});
  for (std::uint32_t slot = 0; slot < 2; ++slot) {
    policy.insert(slot_id{slot});
    policy.unpin(slot_id{slot});
  }
  policy.retain(slot_id{0}, {.priority = 80, .until = 10});
  CHECK(policy.victim() == slot_id{1});
  policy.advance(10);  // requests, not time
  CHECK(policy.victim() == slot_id{1});
  policy.base().advance(10);
  CHECK(policy.victim() == slot_id{0});
}
