#include <llmmem/eviction/gdsf.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "support/eviction_driver.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// The formula, searched linearly.
class gdsf_oracle : public slot_states {
 public:
  explicit gdsf_oracle(slot_count) {}

  void insert(slot_id slot, const access_hint& hint) {
    came(slot);
    entries_[slot] = {.uses = 1, .cost = hint.cost};
  }
  void touch(slot_id slot, const access_hint& hint) {
    entry& e = entries_.at(slot);
    ++e.uses;
    e.cost = hint.cost;
    if (candidate(slot)) value(e);
  }
  void pin(slot_id slot) { set_pinned(slot, true); }
  void unpin(slot_id slot) {
    set_pinned(slot, false);
    value(entries_.at(slot));
  }
  void erase(slot_id slot) {
    left(slot);
    entries_.erase(slot);
  }
  void evict(slot_id slot) {
    age_ = std::max(age_, entries_.at(slot).worth);
    erase(slot);
  }
  [[nodiscard]] std::optional<slot_id> victim() const {
    std::optional<slot_id> least;
    const auto rank = [&](slot_id slot) {
      return std::pair(entries_.at(slot).worth, entries_.at(slot).last);
    };
    for (const auto& [slot, e] : entries_) {
      if (candidate(slot) && (!least || rank(slot) < rank(*least))) least = slot;
    }
    return least;
  }

 private:
  struct entry {
    std::uint64_t uses = 0;
    double cost = 0;
    double worth = 0;
    std::uint64_t last = 0;
  };
  void value(entry& e) {
    e.worth = age_ + static_cast<double>(e.uses) * e.cost;
    e.last = ++now_;
  }

  std::map<slot_id, entry> entries_;
  double age_ = 0;
  std::uint64_t now_ = 0;
};

}  // namespace

TEST_CASE("gdsf evicts the smallest L + uses x cost") {
  behaves_as_defined<gdsf_eviction, gdsf_oracle>();
}

TEST_CASE("a cost that is not a number counts as 0, and an infinite one as very large") {
  gdsf_eviction policy(slot_count{4});
  const float costs[] = {1.0F, std::numeric_limits<float>::quiet_NaN(), -5.0F,
                         std::numeric_limits<float>::infinity()};
  for (std::uint32_t slot = 0; slot < 4; ++slot) {
    policy.insert(slot_id{slot}, {.cost = costs[slot]});
    policy.unpin(slot_id{slot});
  }
  for (const std::uint32_t expected : {1U, 2U, 0U, 3U}) {
    REQUIRE(policy.victim() == slot_id{expected});
    policy.evict(slot_id{expected});
  }
  // What an endless cost has aged goes on in order.
  for (std::uint32_t slot = 0; slot < 2; ++slot) {
    policy.insert(slot_id{slot});
    policy.unpin(slot_id{slot});
  }
  CHECK(policy.victim() == slot_id{0});
}
