#include <llmmem/eviction/arc.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "support/eviction_driver.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// The paper's four lists as vectors, and its p.
class arc_oracle : public slot_states {
 public:
  explicit arc_oracle(slot_count slots) : c_(to_number(slots)) {}

  void insert(slot_id slot, const access_hint& hint) {
    const std::uint64_t most = known() + 1;
    came(slot);
    content_[slot] = hint.content;
    list_[slot] = 1;
    const std::uint64_t b1 = ghosts_[1].size();
    const std::uint64_t b2 = ghosts_[2].size();
    if (take_out(ghosts_[1], hint.content)) {
      p_ = std::min(std::min(p_, most) + std::max<std::uint64_t>(b2 / b1, 1), most);
      list_[slot] = 2;
    } else if (take_out(ghosts_[2], hint.content)) {
      const std::uint64_t by = std::max<std::uint64_t>(b1 / b2, 1);
      p_ = std::min(p_, most);
      p_ = p_ > by ? p_ - by : 0;
      list_[slot] = 2;
    }
    limit();
  }
  void touch(slot_id slot, const access_hint&) {
    if (candidate(slot)) take_out(order_[list_[slot]], slot);
    list_[slot] = 2;
    if (candidate(slot)) order_[2].push_back(slot);
  }
  void pin(slot_id slot) {
    set_pinned(slot, true);
    take_out(order_[list_[slot]], slot);
  }
  void unpin(slot_id slot) {
    set_pinned(slot, false);
    order_[list_[slot]].push_back(slot);
  }
  void erase(slot_id slot) {
    left(slot);
    take_out(order_[list_[slot]], slot);
    list_.erase(slot);
  }
  void evict(slot_id slot) {
    const int list = list_[slot];
    erase(slot);
    const std::uint64_t content = content_[slot];
    if (content != 0) {
      take_out(ghosts_[1], content);
      take_out(ghosts_[2], content);
    }
    if (ghosts_[1].size() + ghosts_[2].size() == c_) {
      auto& full = ghosts_[ghosts_[2].empty() ? 1 : 2];
      full.erase(full.begin());
    }
    if (content != 0) ghosts_[list].push_back(content);
    limit();
  }
  [[nodiscard]] std::optional<slot_id> victim() const {
    const int list = count(1) > p_ ? 1 : 2;
    if (!order_.at(list).empty()) return order_.at(list).front();
    if (!order_.at(3 - list).empty()) return order_.at(3 - list).front();
    return std::nullopt;
  }
  [[nodiscard]] bool within_c() const {
    return count(1) + ghosts_.at(1).size() <= c_ && ghosts_.at(1).size() + ghosts_.at(2).size() <= c_;
  }

 private:
  [[nodiscard]] std::uint64_t count(int list) const {
    return static_cast<std::uint64_t>(
        std::count_if(list_.begin(), list_.end(), [&](const auto& each) { return each.second == list; }));
  }
  void limit() {
    if (count(1) + ghosts_[1].size() > c_ && !ghosts_[1].empty()) ghosts_[1].erase(ghosts_[1].begin());
  }

  std::uint64_t c_;
  std::uint64_t p_ = 0;
  std::map<slot_id, int> list_;
  std::map<slot_id, std::uint64_t> content_;
  std::map<int, std::vector<slot_id>> order_{{1, {}}, {2, {}}};
  std::map<int, std::vector<std::uint64_t>> ghosts_{{1, {}}, {2, {}}};
};

void access(arc_eviction& policy, slot_id slot, std::uint64_t content) {
  policy.insert(slot, {.content = content});
  policy.unpin(slot);
}

}  // namespace

TEST_CASE("arc behaves as the paper's four lists and target") {
  run_beside([](slot_count slots) { return arc_eviction(slots); },
             [](slot_count slots) { return arc_oracle(slots); },
             [](const arc_eviction& policy, const arc_oracle& oracle) {
               const auto named = policy.victim();
               REQUIRE(named == oracle.victim());
               REQUIRE(oracle.within_c());
             });
}

TEST_CASE("arc gives entries used once the space that their ghosts claim") {
  arc_eviction policy(slot_count{2});
  access(policy, slot_id{0}, 10);
  policy.touch(slot_id{0});  // in T2
  access(policy, slot_id{1}, 11);
  CHECK(policy.victim() == slot_id{1});  // T1 may have nothing yet
  policy.evict(slot_id{1});
  access(policy, slot_id{1}, 12);
  policy.evict(slot_id{1});
  access(policy, slot_id{1}, 12);        // its ghost: T1 may have one, and this is in T2
  CHECK(policy.victim() == slot_id{0});  // the least recent of T2
}

TEST_CASE("unnamed contents leave no ghost in arc") {
  arc_eviction policy(slot_count{1});
  for (int i = 0; i < 3; ++i) {
    access(policy, slot_id{0}, 0);
    policy.evict(slot_id{0});
  }
  access(policy, slot_id{0}, 7);
  CHECK(policy.victim() == slot_id{0});
}
