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

/// A policy that counts how often it is pinned.
template <class Policy>
struct counted : Policy {
  using Policy::Policy;
  void pin(slot_id slot) noexcept {
    ++pins;
    Policy::pin(slot);
  }
  std::uint64_t pins = 0;
};

/// The tree by parents alone; everything else is looked for.
class tree_oracle : public slot_states {
 public:
  explicit tree_oracle(slot_count) {}

  void insert(slot_id slot, const access_hint& hint) {
    came(slot);
    if (hint.parent != slot && known(hint.parent)) parent_[slot] = hint.parent;
  }
  void touch(slot_id, const access_hint&) {}
  void pin(slot_id slot) { set_pinned(slot, true); }
  void unpin(slot_id slot) { set_pinned(slot, false); }
  void erase(slot_id slot) {
    left(slot);
    parent_.erase(slot);
    std::erase_if(parent_, [&](const auto& each) { return each.second == slot; });
  }

  [[nodiscard]] bool is_leaf(slot_id slot) const {
    for (const auto& [child, parent] : parent_) {
      if (parent == slot) return false;
    }
    return true;
  }
  [[nodiscard]] std::optional<slot_id> lowest_leaf() const {
    for (std::uint32_t s = 0; s < 64; ++s) {
      if (candidate(slot_id{s}) && is_leaf(slot_id{s})) return slot_id{s};
    }
    return std::nullopt;
  }
  [[nodiscard]] bool any_candidate() const {
    for (std::uint32_t s = 0; s < 64; ++s) {
      if (candidate(slot_id{s})) return true;
    }
    return false;
  }

 private:
  std::map<slot_id, slot_id> parent_;
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

TEST_CASE("leaf_only evicts the first leaf of the policy's order, a parent only when there is no leaf") {
  run_beside([](slot_count slots) { return leaf_only<lowest_first>(slots); },
             [](slot_count slots) { return tree_oracle(slots); },
             [](const leaf_only<lowest_first>& policy, const tree_oracle& oracle) {
               const auto victim = policy.victim();
               if (const auto leaf = oracle.lowest_leaf()) {
                 REQUIRE(victim == leaf);
               } else {
                 REQUIRE(victim.has_value() == oracle.any_candidate());
                 if (victim) REQUIRE(oracle.candidate(*victim));
               }
             });
}

TEST_CASE("chains freed tail first keep an LRU's order") {
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

TEST_CASE("a FIFO keeps a shared head until its followers were evicted, and then evicts it next") {
  leaf_only<fifo_eviction> policy(slot_count{5});
  put(policy, 0);
  policy.unpin(slot_id{0});
  put(policy, 1);
  policy.unpin(slot_id{1});
  put(policy, 2, slot_id{0});  // later, and behind the oldest
  put(policy, 3, slot_id{2});
  policy.unpin(slot_id{3});
  policy.unpin(slot_id{2});
  put(policy, 4);
  policy.unpin(slot_id{4});
  CHECK(evict_all(policy) == std::vector<std::uint32_t>{1, 3, 2, 0, 4});
}

TEST_CASE("a parent leaves before its child if only the child is in use") {
  leaf_only<> policy(slot_count{3});
  put(policy, 0);
  put(policy, 1, slot_id{0});
  policy.unpin(slot_id{0});
  CHECK(policy.is_candidate(slot_id{0}));
  CHECK(policy.victim() == slot_id{0});  // nothing else is left
  put(policy, 2);
  policy.unpin(slot_id{2});
  CHECK(policy.victim() == slot_id{2});
  policy.pin(slot_id{0});
  CHECK_FALSE(policy.is_candidate(slot_id{0}));
  policy.unpin(slot_id{1});
  policy.unpin(slot_id{0});
  CHECK(evict_all(policy) == std::vector<std::uint32_t>{2, 1, 0});
}

TEST_CASE("an entry that loses its parent becomes a root") {
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

TEST_CASE("a parent is set aside at most once for each unpin and each eviction") {
  // An LFU that names the head of a long chain first, then the next...: each is passed over once.
  constexpr std::uint32_t length = 1000;
  leaf_only<counted<lfu_eviction>> policy(slot_count{length});
  put(policy, 0);
  for (std::uint32_t i = 1; i < length; ++i)
    put(policy, i, slot_id{i - 1});
  for (std::uint32_t i = length; i-- > 0;)
    policy.unpin(slot_id{i});
  for (std::uint32_t i = 1; i < length; ++i) {
    for (std::uint32_t use = 0; use < i; ++use)
      policy.touch(slot_id{i});  // the further back, the more uses
  }
  bool in_order = true;
  for (std::uint32_t i = length; i-- > 0;) {
    if (policy.victim() != slot_id{i}) in_order = false;
    policy.evict(slot_id{i});
  }
  CHECK(in_order);
  CHECK(policy.policy().pins >= length - 1);
  CHECK(policy.policy().pins <= 2 * length);
}

TEST_CASE("leaf_only passes on exactly the notices that its policy understands") {
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
