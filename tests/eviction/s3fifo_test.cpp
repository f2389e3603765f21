#include <llmmem/eviction/s3fifo.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "support/eviction_driver.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Both queues as vectors, oldest first, walked when something must go. Pinned entries keep their place in
/// them and are passed over.
class s3fifo_oracle : public slot_states {
 public:
  explicit s3fifo_oracle(slot_count slots)
      : share_(std::max<std::uint64_t>(to_number(slots) / 10, 1)),
        most_ghosts_(to_number(slots) - to_number(slots) / 10 + 1) {}

  void insert(slot_id slot, const access_hint& hint) {
    came(slot);
    entries_[slot] = {.small = !take_out(ghosts_, hint.content), .content = hint.content};
  }
  void touch(slot_id slot, const access_hint&) {
    entry& e = entries_.at(slot);
    ++touches;
    e.uses = std::min(e.uses + 1, 3);
  }
  void pin(slot_id slot) { set_pinned(slot, true); }
  void unpin(slot_id slot) {
    set_pinned(slot, false);
    entry& e = entries_.at(slot);
    if (!e.placed) (e.small ? small_ : main_).push_back(slot);
    e.placed = true;
  }
  void erase(slot_id slot) {
    left(slot);
    entries_.erase(slot);
    take_out(small_, slot);
    take_out(main_, slot);
  }
  void evict(slot_id slot) {
    if (victim() == slot) static_cast<void>(give());
    const entry e = entries_.at(slot);
    erase(slot);
    if (!e.small || e.content == 0) return;
    take_out(ghosts_, e.content);
    ghosts_.push_back(e.content);
    if (ghosts_.size() > most_ghosts_) ghosts_.erase(ghosts_.begin());
  }
  [[nodiscard]] std::optional<slot_id> victim() const {
    s3fifo_oracle copy = *this;
    return copy.give();
  }

  std::uint64_t touches = 0;
  std::uint64_t passes = 0;  // moves that evictions made

 private:
  struct entry {
    bool small = true;
    bool placed = false;
    int uses = 0;
    std::uint64_t content = 0;
  };

  /// The first candidate of a queue.
  [[nodiscard]] std::optional<slot_id> first(const std::vector<slot_id>& queue) const {
    for (const slot_id slot : queue) {
      if (candidate(slot)) return slot;
    }
    return std::nullopt;
  }

  std::optional<slot_id> give() {
    const auto in_small =
        std::count_if(entries_.begin(), entries_.end(), [](const auto& each) { return each.second.small; });
    if (static_cast<std::uint64_t>(in_small) >= share_ || !first(main_)) {
      while (const auto slot = first(small_)) {
        entry& e = entries_.at(*slot);
        if (e.uses < 2) return slot;
        e.small = false;
        e.uses = 0;
        move(*slot, small_);
      }
    }
    if (!first(main_)) return first(small_);
    // Rounds in which all that can go is spared move nothing from its place.
    int fewest = 3;
    for (const slot_id slot : main_) {
      if (candidate(slot)) fewest = std::min(fewest, entries_.at(slot).uses);
    }
    for (const slot_id slot : main_) {
      if (candidate(slot)) entries_.at(slot).uses -= fewest;
    }
    for (;;) {
      const slot_id slot = *first(main_);
      if (entries_.at(slot).uses == 0) return slot;
      --entries_.at(slot).uses;
      move(slot, main_);
    }
  }

  void move(slot_id slot, std::vector<slot_id>& from) {
    take_out(from, slot);
    main_.push_back(slot);
    ++passes;
  }

  std::uint64_t share_;
  std::uint64_t most_ghosts_;
  std::map<slot_id, entry> entries_;
  std::vector<slot_id> small_;
  std::vector<slot_id> main_;
  std::vector<std::uint64_t> ghosts_;
};

}  // namespace

TEST_CASE("s3fifo behaves as three queues, and moves at most as many entries as uses") {
  run_beside([](slot_count slots) { return s3fifo_eviction(slots); },
             [](slot_count slots) { return s3fifo_oracle(slots); },
             [](const s3fifo_eviction& policy, const s3fifo_oracle& oracle) {
               const auto named = policy.victim();
               REQUIRE(named == oracle.victim());
               REQUIRE(oracle.passes <= oracle.touches);
             });
}

TEST_CASE("contents that return while s3fifo remembers them go to the main queue") {
  s3fifo_eviction policy(slot_count{20});
  const auto access = [&](std::uint32_t slot, std::uint64_t content) {
    policy.insert(slot_id{slot}, {.content = content});
    policy.unpin(slot_id{slot});
  };
  access(0, 100);
  policy.evict(slot_id{0});
  access(0, 100);
  access(1, 101);
  access(2, 102);
  CHECK(policy.victim() == slot_id{1});  // the small queue has its two
  policy.evict(slot_id{1});
  CHECK(policy.victim() == slot_id{0});  // it has one: the main queue's turn
}
