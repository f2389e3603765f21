#include <llmmem/eviction/wtinylfu.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "support/eviction_driver.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Four vectors, least recent first. Uses are counted by the sketch itself, which has a test of its own.
class wtinylfu_oracle : public slot_states {
 public:
  explicit wtinylfu_oracle(slot_count slots)
      : uses_(slots, {}, "oracle"),
        window_(std::max<std::uint64_t>(to_number(slots) / 100, 1)),
        protected_((to_number(slots) - to_number(slots) / 100) * 4 / 5) {}

  void insert(slot_id slot, const access_hint& hint) {
    came(slot);
    uses_.add(hint.content);
    entries_[slot] = {.content = hint.content};
  }
  void touch(slot_id slot, const access_hint&) {
    entry& e = entries_.at(slot);
    uses_.add(e.content);
    const bool ranked = candidate(slot);
    if (ranked) pin(slot);
    if (e.where != window) e.where = safe;
    if (ranked) unpin(slot);
  }
  void pin(slot_id slot) {
    set_pinned(slot, true);
    entry& e = entries_.at(slot);
    take_out(order_[e.where], slot);
    if (e.where == line) e.where = trial;
  }
  void unpin(slot_id slot) {
    set_pinned(slot, false);
    order_[entries_.at(slot).where].push_back(slot);
    if (order_[window].size() > window_) move(window, known() > level_ ? line : trial);
    if (order_[safe].size() > protected_) move(safe, trial);
    const std::size_t main = order_[trial].size() + order_[safe].size();
    if (order_[line].size() > std::max<std::size_t>(main / 4, 1)) move(line, trial);
  }
  void erase(slot_id slot) {
    left(slot);
    take_out(order_[entries_.at(slot).where], slot);
    entries_.erase(slot);
  }
  void evict(slot_id slot) {
    const bool won = victim() == slot && !order_[line].empty() && order_[line].front() != slot;
    erase(slot);
    if (won) move(line, trial);
    level_ = victim() ? known() : ~std::size_t{0};
  }
  [[nodiscard]] std::optional<slot_id> victim() const {
    std::vector<slot_id> main = order_[trial];
    main.insert(main.end(), order_[safe].begin(), order_[safe].end());
    if (!order_[line].empty() && !main.empty()) {
      const slot_id fresh = order_[line].front();
      return uses(fresh) > uses(main.front()) ? main.front() : fresh;
    }
    for (const std::vector<slot_id>& each : {order_[line], main, order_[window]}) {
      if (!each.empty()) return each.front();
    }
    return std::nullopt;
  }

 private:
  static constexpr std::size_t window = 0, line = 1, trial = 2, safe = 3;
  struct entry {
    std::uint64_t content = 0;
    std::size_t where = window;
  };
  [[nodiscard]] std::uint64_t uses(slot_id slot) const { return uses_.estimate(entries_.at(slot).content); }
  void move(std::size_t from, std::size_t to) {
    const slot_id slot = order_[from].front();
    order_[from].erase(order_[from].begin());
    order_[to].push_back(slot);
    entries_.at(slot).where = to;
  }

  llmmem::detail::frequency_sketch uses_;
  std::size_t window_;
  std::size_t protected_;
  std::size_t level_ = ~std::size_t{0};
  std::map<slot_id, entry> entries_;
  std::array<std::vector<slot_id>, 4> order_;
};

}  // namespace

TEST_CASE("wtinylfu behaves as a window, an admission queue and two segments") {
  behaves_as_defined<wtinylfu_eviction, wtinylfu_oracle>();
}

TEST_CASE("a scan of entries used once displaces almost none of wtinylfu's frequent entries") {
  constexpr std::uint32_t slots = 1000;
  constexpr std::uint32_t often = 900;
  wtinylfu_eviction policy(slot_count{slots});
  std::uint64_t content = 0;
  std::vector<std::uint64_t> held(slots);
  const auto put = [&](slot_id slot) {
    held[to_index(slot)] = ++content;
    policy.insert(slot, {.content = content});
    policy.unpin(slot);
  };
  for (std::uint32_t slot = 0; slot < slots; ++slot) {
    put(slot_id{slot});
    for (int use = 0; slot < often && use < 5; ++use)
      policy.touch(slot_id{slot});
  }
  int displaced = 0;
  for (int i = 0; i < 3000; ++i) {
    const slot_id victim = policy.victim().value();
    if (held[to_index(victim)] <= often) ++displaced;
    policy.evict(victim);
    put(victim);
  }
  CHECK(displaced <= 9);  // where all four counters of a newcomer are shared
}
