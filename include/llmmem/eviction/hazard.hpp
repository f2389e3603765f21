/// @file
/// Eviction by learned hazard of reuse: drops the entry whose next use is least likely.
#pragma once

#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/idle_history.hpp>
#include <llmmem/eviction/detail/reuse_model.hpp>
#include <llmmem/eviction/detail/slot_lists.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {

/// Learns from the traffic, and evicts the entry whose next use is least likely at this moment.
///
/// There are few classes of entries: by number of uses; for entries used once, by the length of the chain
/// with which they came. Entries that ended their chain have classes of their own, because most ends of
/// prompts are never used again. The policy learns one curve, the rate of reuse by the time that an entry has
/// been idle, and one factor for each class (`detail::reuse_model`). An entry's rate is their product: the
/// proportional hazards of survival analysis. Idle time counts entries that became idle; the policy reads no
/// clock.
///
/// The policy also learns from evicted entries. It remembers the last `history()` idle periods by
/// `access_hint::content`, evicted or not, so it sees the reuses of a class that is always evicted, and an
/// entry that returns keeps its count of uses. Without contents it learns from the entries that stay.
///
/// Prefix chains lose their tails first: factors never fall with the number of uses, ends of chains have the
/// smallest factors, and an unpinned entry passes its number of uses on to its parent. So if every access to
/// an entry also accesses its parent, and parents are unpinned after their children, no entry leaves before
/// its children.
///
/// Suits chat and agent traffic, in which prefixes are shared and most prompts occur once. It has no
/// settings. If only recency predicts reuse, it comes close to LRU and costs more; if the access pattern is
/// known, `min_eviction` is better.
///
/// @par Complexity   O(1): `unpin` reads one byte for each doubling of the history, `victim` the oldest entry
///      of each of 21 classes; at most every 256th `unpin` fits the model again, with some 1300 additions.
/// @par Memory   40 bytes a slot and 14 for each remembered idle period (4 to 8 times the slots, at least
///      32768); allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`; nothing else fails.
/// @par Source   the factors and the common curve: Cox, "Regression models and life-tables", 1972. Ranking by
///      expected hits over time, with hits by age counted in classes: Beckmann, Chen and Cidon, "LHD:
///      improving cache hit rate by maximizing hit density", NSDI 2018. Learning from remembered evictions:
///      Megiddo and Modha, "ARC", FAST 2003. Halving of counts: Einziger, Friedman and Manes, "TinyLFU",
///      2017.
class hazard_eviction {
 public:
  explicit hazard_eviction(slot_count capacity, const metadata_source& source = {})
      : candidates_(capacity, source, "hazard_eviction"),
        entries_(to_number(capacity), entry{}, source, "hazard_eviction"),
        history_(history_for(to_number(capacity)), source, "hazard_eviction"),
        model_(history_.length()) {
    refit_every_ = std::max<std::uint64_t>(256, to_number(capacity) / 16);
    halve_every_ = std::max<std::uint64_t>(16 * to_number(capacity), history_.length());
  }

  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    entry& e = entries_[to_index(slot)];
    e = {.content = hint.content,
         .parent_content = content_of(hint.parent),
         .parent = hint.parent,
         .uses = 1,
         .length = detail::reuse_model::length_class(hint.chain),
         .is_end = hint.chain != 0 && hint.position + 1 == hint.chain};
    if (const auto known = history_.find(hint.content)) {
      e.uses = more(history_.uses(*known));
      count_reuse(*known);
    }
  }

  void touch(slot_id slot, const access_hint& hint = {}) noexcept {
    entry& e = entries_[to_index(slot)];
    e.uses = more(e.uses);
    if (hint.content != 0) e.content = hint.content;
    if (hint.chain != 0) {
      e.parent = hint.parent;
      e.parent_content = content_of(hint.parent);
      if (hint.position + 1 != hint.chain) e.is_end = false;
    }
    if (!candidates_.contains(slot)) return;
    pin(slot);
    unpin(slot);
  }

  void pin(slot_id slot) noexcept {
    if (!candidates_.contains(slot)) return;
    count_reuse(entries_[to_index(slot)].idle_since);
    unlist(slot);
  }

  void unpin(slot_id slot) noexcept {
    entry& e = entries_[to_index(slot)];
    raise_parent(e);
    const std::uint8_t in = detail::reuse_model::class_of(e.uses, e.length, e.is_end);
    e.idle_since = history_.begin(e.content, in, e.uses);
    model_.count_idle(history_);
    e.in_class = in;
    candidates_.push_back(in, slot);
    if (candidates_.front(in) == slot) oldest_[in] = e.idle_since;
    if (e.idle_since % refit_every_ == 0) model_.fit();
    if (e.idle_since % halve_every_ == 0) model_.halve();
  }

  /// Forgets contents that became worthless, because they will not return.
  void erase(slot_id slot) noexcept {
    if (!candidates_.contains(slot)) return;
    history_.end(entries_[to_index(slot)].idle_since);
    unlist(slot);
  }

  /// Evicts the entry for lack of space; if its contents return, the policy learns from that.
  void evict(slot_id slot) noexcept {
    if (candidates_.contains(slot)) unlist(slot);
  }

  [[nodiscard]] std::optional<slot_id> victim() const noexcept {
    std::optional<slot_id> least;
    double least_rate = 0;
    std::uint64_t least_since = 0;
    for (std::uint32_t c = 0; c < detail::reuse_model::classes; ++c) {
      const auto first = candidates_.front(c);
      if (!first) continue;
      const double rate = model_.rate(c, history_.now() - oldest_[c]);
      if (least && (rate > least_rate || (!(rate < least_rate) && oldest_[c] > least_since))) continue;
      least = first;
      least_rate = rate;
      least_since = oldest_[c];
    }
    return least;
  }

  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept { return candidates_.contains(slot); }
  [[nodiscard]] slot_count capacity() const noexcept { return slot_count{entries_.size()}; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return candidates_.bytes() + entries_.bytes() + history_.bytes();
  }

  /// Returns how many idle periods the policy remembers.
  [[nodiscard]] std::uint64_t history() const noexcept { return history_.length(); }

 private:
  struct entry {
    std::uint64_t content = 0;
    std::uint64_t parent_content = 0;
    std::uint64_t idle_since = 0;  // of a candidate: its period in the history
    slot_id parent = no_slot;
    std::uint8_t uses = 0;  // 255: 255 or more
    std::uint8_t length = 0;
    std::uint8_t in_class = 0;  // of a candidate
    bool is_end = false;        // inserted as the last of its chain, and no entry has followed it since
  };

  [[nodiscard]] static std::uint64_t history_for(std::uint64_t slots) noexcept {
    std::uint64_t length = 32768;
    while (length < 4 * slots)
      length *= 2;
    return length;
  }

  [[nodiscard]] static std::uint8_t more(std::uint8_t uses) noexcept {
    return uses == 255 ? uses : static_cast<std::uint8_t>(uses + 1);
  }

  /// Gives a parent at least the uses of its child, even if the history has lost more of the parent's.
  void raise_parent(const entry& child) noexcept {
    if (child.parent == no_slot || candidates_.contains(child.parent)) return;
    entry& parent = entries_[to_index(child.parent)];
    if (parent.content == child.parent_content) parent.uses = std::max(parent.uses, child.uses);
  }

  [[nodiscard]] std::uint64_t content_of(slot_id slot) const noexcept {
    return slot == no_slot ? 0 : entries_[to_index(slot)].content;
  }

  void count_reuse(std::uint64_t period) noexcept {
    if (const auto in = history_.end(period)) model_.count_reuse(*in, history_.now() - period);
  }

  void unlist(slot_id slot) noexcept {
    const std::uint8_t in = entries_[to_index(slot)].in_class;
    candidates_.remove(in, slot);
    if (const auto first = candidates_.front(in)) oldest_[in] = entries_[to_index(*first)].idle_since;
  }

  detail::slot_lists<detail::reuse_model::classes> candidates_;  // one list per class, oldest at the front
  detail::fixed_array<entry> entries_;
  detail::idle_history history_;
  detail::reuse_model model_;
  std::uint64_t oldest_[detail::reuse_model::classes]{};  // of each list's front: when it became idle
  std::uint64_t refit_every_;
  std::uint64_t halve_every_;
};

static_assert(eviction_policy<hazard_eviction> && remembers_evictions<hazard_eviction>);

}  // namespace v0
}  // namespace llmmem
