/// @file
/// Adaptive replacement cache eviction (ARC).
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/ghost_table.hpp>
#include <llmmem/eviction/detail/slot_lists.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {

/// Balances recency against frequency by itself. Evicts the least recent entry used once, or the least recent
/// entry used again: of the kind that is missed less after eviction.
///
/// Megiddo and Modha, "ARC: A self-tuning, low overhead replacement cache", FAST 2003. Entries used once (T1)
/// and more than once (T2) are two LRU lists; an evicted entry leaves a ghost, identified by
/// `access_hint::content`, in B1 or B2. An entry that returns while its ghost is in B1 raises the target size
/// of T1; an entry with a ghost in B2 lowers it. Suits an unknown or changing mix of chat turns and one-shot
/// prompts. Entries without `content` leave no ghost; without ghosts the policy is an LRU that evicts entries
/// used once first.
///
/// The paper's c is the capacity here: |T1| + |B1| and |B1| + |B2| stay within it. Pinned entries count in T1
/// or T2, the list to which `unpin` returns them, but cannot be evicted. The target stays within the number
/// of known entries. If the list whose turn it is has no candidate, the other list provides the victim. Two
/// things differ from the paper, because a policy here names a victim before it knows the next entry: the
/// target moves when an entry is inserted, after the eviction that made space for it; and at |T1| = target
/// the victim always comes from T2, regardless of the next entry.
///
/// @par Complexity   every operation O(1), expected if it looks up a ghost; 45 bytes a slot, ghosts
///      included, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`; nothing else fails.
class arc_eviction {
 public:
  explicit arc_eviction(slot_count capacity, const metadata_source& source = {})
      : candidates_(capacity, source, "arc_eviction"),
        contents_(to_number(capacity), source, "arc_eviction"),
        lists_(to_number(capacity), unknown, source, "arc_eviction"),
        ghosts_(to_number(capacity), source, "arc_eviction") {}

  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    const auto content = ghost_table::name_of(hint.content);
    contents_[to_index(slot)] = content;
    const auto ghost = ghosts_.take(content);
    if (ghost) adapt(*ghost);
    join(slot, ghost ? again : once);
    trim();
  }

  void touch(slot_id slot, const access_hint& = {}) noexcept {
    const bool candidate = candidates_.contains(slot);
    if (candidate) candidates_.remove(lists_[to_index(slot)], slot);
    leave(slot);
    join(slot, again);
    if (candidate) candidates_.push_back(again, slot);
  }

  void pin(slot_id slot) noexcept {
    if (candidates_.contains(slot)) candidates_.remove(lists_[to_index(slot)], slot);
  }
  void unpin(slot_id slot) noexcept { candidates_.push_back(lists_[to_index(slot)], slot); }

  void erase(slot_id slot) noexcept {
    if (lists_[to_index(slot)] == unknown) return;
    pin(slot);
    leave(slot);
  }

  /// As `erase`, but the entry leaves a ghost.
  void evict(slot_id slot) noexcept {
    const std::uint8_t list = lists_[to_index(slot)];
    if (list == unknown) return;
    const auto content = contents_[to_index(slot)];
    erase(slot);
    ghosts_.take(content);  // of other contents with the same name
    // The paper's order: ghosts in B2 make space before those in B1.
    if (ghosts_.size(once) + ghosts_.size(again) == to_number(capacity()))
      ghosts_.pop(ghosts_.size(again) != 0 ? again : once);
    ghosts_.push(list, content);
    trim();
  }

  [[nodiscard]] std::optional<slot_id> victim() const noexcept {
    const slot_id slot = next();
    if (slot == no_slot) return std::nullopt;
    return slot;
  }
  /// `victim` and `evict` in one, or `no_slot`.
  slot_id evict_victim() noexcept {
    const slot_id slot = next();
    if (slot != no_slot) evict(slot);
    return slot;
  }
  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept { return candidates_.contains(slot); }
  [[nodiscard]] slot_count capacity() const noexcept { return candidates_.capacity(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return candidates_.bytes() + contents_.bytes() + lists_.bytes() + ghosts_.bytes();
  }

 private:
  using ghost_table = detail::ghost_table<2>;

  static constexpr std::uint8_t once = 0;   // T1 and, for ghosts, B1
  static constexpr std::uint8_t again = 1;  // T2, B2
  static constexpr std::uint8_t unknown = 2;

  [[nodiscard]] slot_id next() const noexcept {
    const auto list = static_cast<std::size_t>(known_[once] <= target_);  // no branch: it is hard to predict
    const slot_id first = candidates_.first(list);
    return first != no_slot ? first : candidates_.first(1 - list);
  }

  void join(slot_id slot, std::uint8_t list) noexcept {
    lists_[to_index(slot)] = list;
    ++known_[list];
  }
  void leave(slot_id slot) noexcept {
    --known_[lists_[to_index(slot)]];
    lists_[to_index(slot)] = unknown;
  }

  /// Moves T1's target towards the size that would have kept the entry of a ghost that was just taken from
  /// `list`.
  void adapt(std::size_t list) noexcept {
    const std::uint64_t here = ghosts_.size(list) + 1;
    const std::uint64_t there = ghosts_.size(1 - list);
    const std::uint64_t by = std::max<std::uint64_t>(there / here, 1);
    const std::uint64_t most = known_[once] + known_[again] + 1;  // including the new entry
    target_ = std::min(target_, most);
    target_ = list == once ? std::min(target_ + by, most) : target_ - std::min(target_, by);
  }

  void trim() noexcept {
    if (known_[once] + ghosts_.size(once) > to_number(capacity())) ghosts_.pop(once);
  }

  detail::slot_lists<2> candidates_;                 // T1 and T2 without pinned entries, oldest at the front
  detail::fixed_array<ghost_table::name> contents_;  // of every known slot
  detail::fixed_array<std::uint8_t> lists_;          // of every slot
  ghost_table ghosts_;                               // B1 and B2
  std::array<std::uint64_t, 2> known_{};             // |T1| and |T2|, including pinned entries
  std::uint64_t target_ = 0;                         // of |T1|: the paper's p
};

static_assert(eviction_policy<arc_eviction> && remembers_evictions<arc_eviction>);
template <>
inline constexpr bool detail::evicts_victims<arc_eviction> = true;

}  // namespace v0
}  // namespace llmmem
