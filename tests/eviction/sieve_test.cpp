#include <llmmem/eviction/sieve.hpp>

#include <doctest/doctest.h>

#include <set>
#include <vector>

#include "support/eviction_driver.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// The queue as a vector, oldest first, and a hand that walks it.
class sieve_oracle : public slot_states {
 public:
  explicit sieve_oracle(slot_count) {}

  void insert(slot_id slot, const access_hint&) { came(slot); }
  void touch(slot_id slot, const access_hint&) { marked_.insert(slot); }
  void pin(slot_id slot) { set_pinned(slot, true); }
  void unpin(slot_id slot) {
    set_pinned(slot, false);
    for (const place& each : queue_) {
      if (each.slot == slot) return;
    }
    queue_.push_back({++arrivals_, slot});
  }
  void erase(slot_id slot) {
    left(slot);
    marked_.erase(slot);
    std::erase_if(queue_, [&](const place& each) { return each.slot == slot; });
  }
  void evict(slot_id slot) {
    if (victim() == slot) {
      std::uint64_t at = hand_;
      walk(at, marked_);
      hand_ = at == arrivals_ ? 0 : at;
    }
    erase(slot);
  }
  [[nodiscard]] std::optional<slot_id> victim() const {
    std::uint64_t at = hand_;
    std::set<slot_id> marked = marked_;
    return walk(at, marked);
  }

 private:
  struct place {
    std::uint64_t number;
    slot_id slot;
  };

  /// On from the place numbered `at` to the first candidate without a mark.
  std::optional<slot_id> walk(std::uint64_t& at, std::set<slot_id>& marked) const {
    for (int round = 0; round < 3; ++round, at = 0) {
      for (const place& each : queue_) {
        if (each.number <= at) continue;
        at = each.number;
        if (candidate(each.slot) && !marked.contains(each.slot)) return each.slot;
        marked.erase(each.slot);
      }
    }
    return std::nullopt;
  }

  std::vector<place> queue_;
  std::set<slot_id> marked_;
  std::uint64_t hand_ = 0;
  std::uint64_t arrivals_ = 0;
};

}  // namespace

TEST_CASE("sieve behaves as a queue and a hand that removes marks") {
  behaves_as_defined<sieve_eviction, sieve_oracle>();
}

TEST_CASE("sieve's hand spares an entry once") {
  sieve_eviction policy(slot_count{3});
  for (std::uint32_t slot = 0; slot < 3; ++slot) {
    policy.insert(slot_id{slot});
    policy.unpin(slot_id{slot});
  }
  policy.touch(slot_id{0});
  policy.touch(slot_id{0});
  CHECK(policy.victim() == slot_id{1});
  policy.evict(slot_id{1});
  CHECK(policy.victim() == slot_id{2});
  policy.evict(slot_id{2});
  CHECK(policy.victim() == slot_id{0});
}
