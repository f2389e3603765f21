#include <llmmem/eviction/length_aware.hpp>

#include <doctest/doctest.h>

#include <map>
#include <tuple>

#include "support/eviction_driver.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

class length_aware_oracle : public slot_states {
 public:
  explicit length_aware_oracle(slot_count) {}

  void insert(slot_id slot, const access_hint& hint) {
    came(slot);
    entries_[slot] = {1, hint.position, ++now_};
  }
  void touch(slot_id slot, const access_hint&) {
    ++entries_.at(slot).uses;
    entries_.at(slot).last = ++now_;
  }
  void pin(slot_id slot) { set_pinned(slot, true); }
  void unpin(slot_id slot) {
    set_pinned(slot, false);
    entries_.at(slot).last = ++now_;
  }
  void erase(slot_id slot) {
    left(slot);
    entries_.erase(slot);
  }
  [[nodiscard]] std::optional<slot_id> victim() const {
    std::optional<slot_id> first;
    const auto rank = [&](slot_id slot) {
      const entry& e = entries_.at(slot);
      return std::tuple(e.uses, ~e.position, e.last);
    };
    for (const auto& [slot, e] : entries_) {
      if (candidate(slot) && (!first || rank(slot) < rank(*first))) first = slot;
    }
    return first;
  }

 private:
  struct entry {
    std::uint64_t uses = 0;
    std::uint32_t position = 0;
    std::uint64_t last = 0;
  };
  std::map<slot_id, entry> entries_;
  std::uint64_t now_ = 0;
};

}  // namespace

TEST_CASE("length_aware evicts the least used entry, and the deepest of equals") {
  behaves_as_defined<length_aware_eviction, length_aware_oracle>();
}
