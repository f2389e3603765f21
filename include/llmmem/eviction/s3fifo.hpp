/// @file
/// S3-FIFO eviction.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/ghost_table.hpp>
#include <llmmem/eviction/detail/place_sets.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {

/// Evicts early those entries that are not used twice soon after their insert; manages the rest like a clock.
///
/// Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023. New
/// entries join the *small* queue. An entry that reaches its old end is evicted and leaves a ghost, unless it
/// was used at least twice meanwhile: then it moves to the *main* queue, and its count of uses is reset. An
/// entry at the old end of the main queue passes through the queue again as often as it was used since, at
/// most three times. An entry that returns while its ghost (`access_hint::content`) is remembered joins the
/// main queue at once. The small queue provides the victim while it has its tenth of the capacity, the main
/// queue otherwise. Suits traffic in which most blocks are used once, as in one-shot prompts.
///
/// There is one more ghost than entries in a full main queue, because the caller evicts before it names the
/// new entry: the eviction must not displace the new entry's own ghost.
///
/// Pinned entries count in their queue's size, keep the place of their first `unpin`, and are skipped. If the
/// queue whose turn it is has no candidate, the other queue provides the victim.
///
/// @par Complexity   insert O(1), expected; victim, touch, pin and erase O(log n), unpin and evict O(log n)
///      amortised, to base 64: one or a few word operations per level, with 3 levels up to 131,072 slots and
///      at most 6. An eviction moves only entries whose uses it consumes, at most one move per counted use.
///      The order has two places for each slot. When first unpins and moves have used them up, one of these
///      calls renumbers all entries, at most once in `capacity` such calls: O(capacity), some nanoseconds a
///      slot (docs/eviction.md). 50 bytes a slot, ghosts included, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`, and `length_error` above 2^31 - 1 slots; nothing
///      else fails.
class s3fifo_eviction {
 public:
  explicit s3fifo_eviction(slot_count capacity, const metadata_source& source = {})
      : candidates_(capacity, source, "s3fifo_eviction"),
        contents_(to_number(capacity), source, "s3fifo_eviction"),
        entries_(to_number(capacity), entry{}, source, "s3fifo_eviction"),
        small_share_(std::max<std::uint64_t>(to_number(capacity) / 10, 1)),
        ghosts_(to_number(capacity) - to_number(capacity) / 10 + 1, source, "s3fifo_eviction") {}

  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    const auto content = ghost_table::name_of(hint.content);
    const bool returns = ghosts_.take(content).has_value();
    contents_[to_index(slot)] = content;
    entries_[to_index(slot)] = {.where = returns ? place::in_main : place::in_small, .uses = 0};
    if (!returns) ++small_size_;
  }

  void touch(slot_id slot, const access_hint& = {}) noexcept {
    entry& e = entries_[to_index(slot)];
    const bool candidate = is_candidate(slot);
    if (candidate) withdraw(slot);
    if (e.uses < most_uses) ++e.uses;
    if (candidate) enter(slot);
  }

  void pin(slot_id slot) noexcept {
    if (is_candidate(slot)) withdraw(slot);
  }

  void unpin(slot_id slot) noexcept {
    if (!candidates_.has_place(slot)) candidates_.renew(slot);
    enter(slot);
  }

  void erase(slot_id slot) noexcept {
    pin(slot);
    candidates_.forget(slot);
    entry& e = entries_[to_index(slot)];
    if (e.where == place::in_small) --small_size_;
    e.where = place::unknown;
  }

  /// As `erase`, but an entry of the small queue leaves a ghost, and entries that the queue passed on the way
  /// to the victim move.
  void evict(slot_id slot) noexcept {
    if (next() == slot) make_way_to(slot);
    leave(slot);
  }

  [[nodiscard]] std::optional<slot_id> victim() const noexcept {
    const slot_id slot = next();
    if (slot == no_slot) return std::nullopt;
    return slot;
  }
  /// `victim` and `evict` in one, or `no_slot`.
  slot_id evict_victim() noexcept {
    const slot_id slot = next();
    if (slot == no_slot) return slot;
    make_way_to(slot);
    leave(slot);
    return slot;
  }
  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept {
    return entries_[to_index(slot)].queue != none;
  }
  [[nodiscard]] slot_count capacity() const noexcept { return candidates_.capacity(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return candidates_.bytes() + contents_.bytes() + entries_.bytes() + ghosts_.bytes();
  }

 private:
  using ghost_table = detail::ghost_table<1>;

  enum class place : std::uint8_t { unknown, in_small, in_main };
  static constexpr std::uint8_t most_uses = 3;
  static constexpr std::uint8_t enough_uses = 2;  // to move from the small queue

  // The queues of candidates. Two for the small queue: entries that may not, and that may, move to the main
  // one. Then a ring for the main queue by uses left: the queue for no uses has the number `turns_`, the
  // queue for one use the next number, and so on.
  static constexpr std::size_t cold = 0;
  static constexpr std::size_t hot = 1;
  static constexpr std::size_t main = 2;
  static constexpr std::size_t main_queues = most_uses + 1;
  static constexpr std::uint8_t none = main + main_queues;

  struct entry {
    place where = place::unknown;
    std::uint8_t uses = 0;      // of a slot that is no candidate in the main queue
    std::uint8_t queue = none;  // of a candidate
  };

  [[nodiscard]] std::size_t main_queue(std::size_t uses) const noexcept {
    return main + (uses + turns_) % main_queues;
  }
  [[nodiscard]] std::uint8_t uses_left(const entry& e) const noexcept {
    return static_cast<std::uint8_t>((e.queue - main + main_queues - turns_) % main_queues);
  }

  /// Returns the main queue's victim, or `no_slot`.
  [[nodiscard]] slot_id main_front() const noexcept {
    slot_id first = no_slot;
    for (std::size_t uses = 0; uses < main_queues && first == no_slot; ++uses)
      first = candidates_.oldest(main_queue(uses));
    return first;
  }

  /// Returns the victim, or `no_slot`.
  [[nodiscard]] slot_id next() const noexcept {
    const slot_id from_main = main_front();
    if (small_size_ >= small_share_ || from_main == no_slot) {
      const slot_id unused = candidates_.oldest(cold);
      if (unused != no_slot) return unused;
      // The whole small queue would move to the end of the main one, with no uses.
      const slot_id first = candidates_.oldest(hot);
      if (first != no_slot && (from_main == no_slot || uses_left(entries_[to_index(from_main)]) != 0))
        return first;
    }
    return from_main;
  }

  /// Erases an entry; one of the small queue leaves a ghost.
  void leave(slot_id slot) noexcept {
    const bool was_small = entries_[to_index(slot)].where == place::in_small;
    erase(slot);
    if (!was_small) return;
    const auto content = contents_[to_index(slot)];
    ghosts_.take(content);  // of other contents with the same name
    ghosts_.push(0, content);
  }

  void enter(slot_id slot) noexcept {
    entry& e = entries_[to_index(slot)];
    const bool is_small = e.where == place::in_small;
    e.queue = static_cast<std::uint8_t>(is_small ? (e.uses < enough_uses ? cold : hot) : main_queue(e.uses));
    candidates_.insert(e.queue, slot);
  }
  void withdraw(slot_id slot) noexcept {
    entry& e = entries_[to_index(slot)];
    candidates_.remove(e.queue, slot);
    if (e.where == place::in_main) e.uses = uses_left(e);
    e.queue = none;
  }

  /// Puts a candidate at the new end of the main queue.
  void proceed(slot_id slot, std::uint8_t uses) noexcept {
    withdraw(slot);
    entry& e = entries_[to_index(slot)];
    if (e.where == place::in_small) --small_size_;
    e.where = place::in_main;
    e.uses = uses;
    candidates_.renew(slot);
    enter(slot);
  }

  /// Moves the entries that the queues pass on the way to the victim.
  void make_way_to(slot_id slot) noexcept {
    const bool whole_small =
        candidates_.oldest(cold) == no_slot && (small_size_ >= small_share_ || main_front() == no_slot);
    const bool is_small = entries_[to_index(slot)].where == place::in_small;
    if (is_small || whole_small) {
      for (slot_id next = candidates_.oldest(hot);
           next != no_slot && (whole_small || candidates_.before(next, slot));
           next = candidates_.oldest(hot)) {
        proceed(next, 0);
      }
    }
    if (entries_[to_index(slot)].where != place::in_main) return;
    // Whole rounds first, which take a use from every entry and change no order. Then part of a round.
    turns_ += uses_left(entries_[to_index(slot)]);
    for (slot_id passed = first_in_use_before(slot); passed != slot; passed = first_in_use_before(slot))
      proceed(passed, static_cast<std::uint8_t>(uses_left(entries_[to_index(passed)]) - 1));
  }

  /// Returns the oldest entry of the main queue with a use left that is older than `slot`, or `slot`.
  [[nodiscard]] slot_id first_in_use_before(slot_id slot) const noexcept {
    slot_id first = slot;
    for (std::size_t uses = 1; uses < main_queues; ++uses) {
      const slot_id next = candidates_.oldest(main_queue(uses));
      if (next != no_slot && candidates_.before(next, first)) first = next;
    }
    return first;
  }

  detail::place_sets<main + main_queues> candidates_;
  detail::fixed_array<ghost_table::name> contents_;  // of every known slot
  detail::fixed_array<entry> entries_;
  std::uint64_t small_share_;
  std::uint64_t small_size_ = 0;  // including pinned entries
  std::size_t turns_ = 0;         // whole rounds of the main queue
  ghost_table ghosts_;            // oldest first
};

static_assert(eviction_policy<s3fifo_eviction> && remembers_evictions<s3fifo_eviction>);
template <>
inline constexpr bool detail::evicts_victims<s3fifo_eviction> = true;

}  // namespace v0
}  // namespace llmmem
