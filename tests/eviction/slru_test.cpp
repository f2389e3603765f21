#include <llmmem/eviction/slru.hpp>

#include <doctest/doctest.h>

#include <map>
#include <vector>

#include "support/eviction_driver.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Two vectors of candidates, least recent first.
class slru_oracle : public slot_states {
 public:
  explicit slru_oracle(slot_count slots) : most_(to_number(slots) * 80 / 100) {}

  void insert(slot_id slot, const access_hint&) {
    came(slot);
    is_protected_[slot] = false;
  }
  void touch(slot_id slot, const access_hint&) {
    is_protected_[slot] = true;
    if (!candidate(slot)) return;
    drop(slot);
    enter(slot);
  }
  void pin(slot_id slot) {
    set_pinned(slot, true);
    drop(slot);
  }
  void unpin(slot_id slot) {
    set_pinned(slot, false);
    enter(slot);
  }
  void erase(slot_id slot) {
    left(slot);
    drop(slot);
  }
  [[nodiscard]] std::optional<slot_id> victim() const {
    if (!probationary_.empty()) return probationary_.front();
    if (!protected_.empty()) return protected_.front();
    return std::nullopt;
  }

 private:
  void drop(slot_id slot) {
    take_out(probationary_, slot);
    take_out(protected_, slot);
  }
  void enter(slot_id slot) {
    (is_protected_[slot] ? protected_ : probationary_).push_back(slot);
    if (protected_.size() <= most_) return;
    is_protected_[protected_.front()] = false;
    probationary_.push_back(protected_.front());
    protected_.erase(protected_.begin());
  }

  std::uint64_t most_;
  std::map<slot_id, bool> is_protected_;
  std::vector<slot_id> probationary_;
  std::vector<slot_id> protected_;
};

/// Comes in and is let go.
void pass(slru_eviction& policy, std::uint32_t slot) {
  policy.insert(slot_id{slot});
  policy.unpin(slot_id{slot});
}

}  // namespace

TEST_CASE("slru behaves as two LRU lists, the second for entries that were used again") {
  behaves_as_defined<slru_eviction, slru_oracle>();
}

TEST_CASE("a scan of entries used once evicts nothing that slru protects") {
  slru_eviction policy(slot_count{5});
  pass(policy, 0);
  policy.touch(slot_id{0});
  for (std::uint32_t slot = 1; slot < 5; ++slot)
    pass(policy, slot);
  for (int round = 0; round < 20; ++round) {
    const slot_id victim = policy.victim().value();
    CHECK(victim != slot_id{0});
    policy.erase(victim);
    pass(policy, to_index(victim));
  }
}

TEST_CASE("a protected share of 0 makes slru an LRU") {
  slru_eviction policy(slot_count{3}, 0);
  for (std::uint32_t slot = 0; slot < 3; ++slot)
    pass(policy, slot);
  policy.touch(slot_id{0});
  CHECK(policy.victim() == slot_id{1});
  policy.touch(slot_id{1});
  CHECK(policy.victim() == slot_id{2});
}

TEST_CASE("slru refuses a share of more than the whole") {
  CHECK_THROWS_WITH_AS((slru_eviction{slot_count{3}, 101}),
                       "slru_eviction: protected_percent is 101; it must be at most 100", argument_error);
}
