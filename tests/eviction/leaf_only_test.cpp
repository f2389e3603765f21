#include <llmmem/eviction/fifo.hpp>
#include <llmmem/eviction/leaf_only.hpp>
#include <llmmem/eviction/lfu.hpp>
#include <llmmem/eviction/retention.hpp>

#include <doctest/doctest.h>

#include <map>
#include <set>
#include <vector>

#include "support/eviction_driver.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Names the candidate with the lowest number: an order that no history changes.
class lowest_first {
 public:
  explicit lowest_first(slot_count capacity, const metadata_source& = {}) : capacity_(capacity) {}

  void insert(slot_id, const access_hint& = {}) noexcept {}
  void touch(slot_id, const access_hint& = {}) noexcept {}
  void pin(slot_id slot) noexcept { candidates_.erase(slot); }
  void unpin(slot_id slot) noexcept { candidates_.insert(slot); }
  void erase(slot_id slot) noexcept { candidates_.erase(slot); }
  [[nodiscard]] std::optional<slot_id> victim() const noexcept {
    if (candidates_.empty()) return std::nullopt;
    return *candidates_.begin();
  }
  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept { return candidates_.contains(slot); }
  [[nodiscard]] slot_count capacity() const noexcept { return capacity_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }

 private:
  slot_count capacity_;
  std::set<slot_id> candidates_;
};

/// The tree by parents alone; everything else is looked for.
class tree_oracle : public slot_states {
 public:
  explicit tree_oracle(slot_count) {}

  void insert(slot_id slot, const access_hint& hint) {
    came(slot);
    if (hint.parent != slot && known(hint.parent)) parent_[slot] = hint.parent;
    settle();
  }
  void touch(slot_id, const access_hint&) {}
  void pin(slot_id slot) {
    set_pinned(slot, true);
    settle();
  }
  void unpin(slot_id slot) {
    set_pinned(slot, false);
    settle();
  }
  void erase(slot_id slot) {
    left(slot);
    parent_.erase(slot);
    std::erase_if(parent_, [&](const auto& each) { return each.second == slot; });
    std::erase(waiting_, slot);
    settle();
  }

  [[nodiscard]] bool is_leaf(slot_id slot) const {
    for (const auto& [child, parent] : parent_) {
      if (parent == slot) return false;
    }
    return true;
  }
  [[nodiscard]] bool behind(slot_id slot, slot_id ancestor) const {
    for (;;) {
      if (slot == ancestor) return true;
      const auto up = parent_.find(slot);
      if (up == parent_.end()) return false;
      slot = up->second;
    }
  }
  /// Whether it or anything behind it is pinned.
  [[nodiscard]] bool held(slot_id slot) const {
    for (std::uint32_t s = 0; s < 64; ++s) {
      if (pinned(slot_id{s}) && behind(slot_id{s}, slot)) return true;
    }
    return false;
  }
  /// What the lowest-numbered order names: the first that nothing in use lies behind.
  [[nodiscard]] std::optional<slot_id> named() const {
    for (std::uint32_t s = 0; s < 64; ++s) {
      if (candidate(slot_id{s}) && !held(slot_id{s})) return slot_id{s};
    }
    return std::nullopt;
  }
  [[nodiscard]] std::optional<slot_id> longest_waiting() const {
    if (waiting_.empty()) return std::nullopt;
    return waiting_.front();
  }

 private:
  /// Keeps the order in which candidates have come to wait for what is behind them.
  void settle() {
    std::erase_if(waiting_, [&](slot_id slot) { return !candidate(slot) || !held(slot); });
    for (std::uint32_t s = 0; s < 64; ++s) {
      const slot_id slot{s};
      if (candidate(slot) && held(slot) &&
          std::find(waiting_.begin(), waiting_.end(), slot) == waiting_.end())
        newly_.push_back(slot);
    }
    // Of those that one event makes wait, the deepest first.
    std::sort(newly_.begin(), newly_.end(), [&](slot_id a, slot_id b) { return a != b && behind(a, b); });
    waiting_.insert(waiting_.end(), newly_.begin(), newly_.end());
    newly_.clear();
  }

  std::map<slot_id, slot_id> parent_;
  std::vector<slot_id> waiting_;
  std::vector<slot_id> newly_;
};

template <class Policy>
void put(Policy& policy, std::uint32_t slot, slot_id parent = no_slot) {
  policy.insert(slot_id{slot}, {.parent = parent});
}

template <class Policy>
std::vector<std::uint32_t> evict_all(Policy& policy) {
  std::vector<std::uint32_t> order;
  while (const auto victim = policy.victim()) {
    order.push_back(to_index(*victim));
    policy.evict(*victim);
  }
  return order;
}

}  // namespace

TEST_CASE("leaf_only evicts a leaf behind what the policy names, and a parent of what is in use last") {
  run_beside([](slot_count slots) { return leaf_only<lowest_first>(slots); },
             [](slot_count slots) { return tree_oracle(slots); },
             [](const leaf_only<lowest_first>& policy, const tree_oracle& oracle) {
               const auto victim = policy.victim();
               const auto named = oracle.named();
               REQUIRE(policy.policy().victim() == named);
               if (named) {
                 REQUIRE(victim.has_value());
                 REQUIRE(oracle.candidate(*victim));
                 REQUIRE(oracle.is_leaf(*victim));
                 REQUIRE(oracle.behind(*victim, *named));
               } else {
                 REQUIRE(victim == oracle.longest_waiting());
               }
             },
             100, 600);
}

TEST_CASE("chains freed tail first leave an LRU's order as it is") {
  leaf_only<> policy(slot_count{6});
  for (const std::uint32_t first : {0U, 3U}) {
    put(policy, first);
    put(policy, first + 1, slot_id{first});
    put(policy, first + 2, slot_id{first + 1});
    for (const std::uint32_t i : {2U, 1U, 0U})
      policy.unpin(slot_id{first + i});
  }
  CHECK(evict_all(policy) == std::vector<std::uint32_t>{2, 1, 0, 5, 4, 3});
}

TEST_CASE("a FIFO that would drop a shared head drops what continues it first") {
  leaf_only<fifo_eviction> policy(slot_count{4});
  put(policy, 0);
  policy.unpin(slot_id{0});
  put(policy, 1);
  policy.unpin(slot_id{1});
  put(policy, 2, slot_id{0});  // later, and behind the oldest
  put(policy, 3, slot_id{2});
  policy.unpin(slot_id{3});
  policy.unpin(slot_id{2});
  CHECK(evict_all(policy) == std::vector<std::uint32_t>{3, 2, 0, 1});
}

TEST_CASE("a head whose continuation was in use takes its place when that is let go") {
  leaf_only<> policy(slot_count{3});
  put(policy, 0);
  put(policy, 1, slot_id{0});
  policy.unpin(slot_id{0});
  CHECK(policy.is_candidate(slot_id{0}));
  CHECK(policy.victim() == slot_id{0});  // nothing else is left
  put(policy, 2);
  policy.unpin(slot_id{2});
  CHECK(policy.victim() == slot_id{2});
  policy.unpin(slot_id{1});
  CHECK(evict_all(policy) == std::vector<std::uint32_t>{2, 1, 0});
}

TEST_CASE("what loses its parent becomes a root") {
  leaf_only<> policy(slot_count{3});
  put(policy, 0);
  put(policy, 1, slot_id{0});
  policy.unpin(slot_id{0});
  policy.evict(slot_id{0});
  put(policy, 0);  // other contents in the same slot: no parent of 1
  policy.unpin(slot_id{1});
  policy.unpin(slot_id{0});
  CHECK(evict_all(policy) == std::vector<std::uint32_t>{1, 0});
}

TEST_CASE("a long chain is dropped from its end in steps that do not grow with it") {
  // Walking down anew for every eviction would take 10^10 steps here.
  constexpr std::uint32_t length = 150'000;
  leaf_only<lfu_eviction> policy(slot_count{length});
  put(policy, 0);
  for (std::uint32_t i = 1; i < length; ++i)
    put(policy, i, slot_id{i - 1});
  for (std::uint32_t i = length; i-- > 0;)
    policy.unpin(slot_id{i});
  for (std::uint32_t i = 1; i < length; ++i)
    policy.touch(slot_id{i});  // the head has the fewest uses
  bool in_order = true;
  for (std::uint32_t i = length; i-- > 0;) {
    if (policy.victim() != slot_id{i}) in_order = false;
    policy.evict(slot_id{i});
  }
  CHECK(in_order);
  CHECK(policy.victim() == std::nullopt);
}

TEST_CASE("leaf_only passes on what its policy may be told, and nothing else") {
  static_assert(keeps_time<leaf_only<retention_eviction>> && retains<leaf_only<retention_eviction>>);
  static_assert(!keeps_time<leaf_only<>> && !retains<leaf_only<>> && !expects_uses<leaf_only<>>);
  leaf_only<retention_eviction> policy(slot_count{2});
  put(policy, 0);
  put(policy, 1);
  policy.unpin(slot_id{0});
  policy.unpin(slot_id{1});
  policy.retain(slot_id{0}, {.priority = 90, .until = 5});
  CHECK(policy.victim() == slot_id{1});
  policy.advance(5);
  CHECK(policy.victim() == slot_id{0});
}
