#include <llmmem/eviction/retention.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <utility>

#include "support/eviction_driver.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

class retention_oracle : public slot_states {
 public:
  explicit retention_oracle(slot_count) {}

  void insert(slot_id slot, const access_hint& hint) {
    came(slot);
    entries_[slot] = {.keep = hint.keep, .last = 0};
    retain(slot, hint.keep);
  }
  void touch(slot_id slot, const access_hint& hint) {
    entries_.at(slot).last = ++events_;
    if (hint.keep != retention{}) retain(slot, hint.keep);
  }
  void pin(slot_id slot) { set_pinned(slot, true); }
  void unpin(slot_id slot) {
    set_pinned(slot, false);
    entries_.at(slot).last = ++events_;
  }
  void erase(slot_id slot) {
    left(slot);
    entries_.erase(slot);
  }
  void retain(slot_id slot, retention keep) {
    entries_.at(slot).keep = keep;
    expire();
  }
  void advance(std::uint64_t now) {
    now_ = std::max(now_, now);
    expire();
  }
  [[nodiscard]] std::optional<slot_id> victim() const {
    std::optional<slot_id> first;
    const auto rank = [&](slot_id slot) {
      const entry& e = entries_.at(slot);
      return std::pair(e.keep.priority, e.last);
    };
    for (const auto& [slot, e] : entries_) {
      if (candidate(slot) && (!first || rank(slot) < rank(*first))) first = slot;
    }
    return first;
  }

 private:
  struct entry {
    retention keep;
    std::uint64_t last = 0;
  };
  void expire() {
    for (auto& [slot, e] : entries_) {
      if (e.keep.until <= now_) e.keep = {};
    }
  }
  std::map<slot_id, entry> entries_;
  std::uint64_t events_ = 0;
  std::uint64_t now_ = 0;
};

}  // namespace

TEST_CASE("retention evicts the lowest priority, and the least recent of equals, as time passes") {
  behaves_as_defined<retention_eviction, retention_oracle>();
}

TEST_CASE("a priority above 100 counts as 100, and a clock that goes back changes nothing") {
  retention_eviction policy(slot_count{2});
  policy.insert(slot_id{0}, {.keep = {.priority = 200, .until = 50}});
  policy.insert(slot_id{1}, {.keep = {.priority = 100}});
  policy.unpin(slot_id{0});
  policy.unpin(slot_id{1});
  CHECK(policy.victim() == slot_id{0});  // equal: the least recent
  policy.touch(slot_id{0});
  CHECK(policy.victim() == slot_id{1});
  policy.advance(49);
  CHECK(policy.victim() == slot_id{1});
  policy.advance(50);
  CHECK(policy.victim() == slot_id{0});
  policy.advance(3);
  policy.retain(slot_id{0}, {.priority = 101, .until = 50});  // over already
  CHECK(policy.victim() == slot_id{0});
}
