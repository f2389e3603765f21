/// @file
/// SIEVE eviction.
#pragma once

#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/ranked_eviction.hpp>

#include <algorithm>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The turn at which SIEVE's hand drops an entry: the hand's round, and the place in the queue.
struct sieve_turn {
  std::uint64_t round = 0;
  std::uint64_t place = 0;  // in the queue; no two slots have the same

  friend bool operator<(const sieve_turn& a, const sieve_turn& b) noexcept {
    return a.round != b.round ? a.round < b.round : a.place < b.place;
  }
};

}  // namespace detail

/// Evicts the oldest entry that was not used since the hand last passed it.
///
/// Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is simpler than LRU: an efficient turn-key eviction
/// algorithm for web caches", NSDI 2024. A hand circles over a queue in order of arrival, from its old end to
/// its new end. It drops the first entry without a mark, and clears the marks that it passes. A use sets the
/// mark. New entries join at the new end regardless of the hand. Suits traffic in which most entries are used
/// once; a poor choice for a loop over more entries than fit.
///
/// An entry's place dates from its first `unpin`, so the hand reaches the tail first if blocks are freed tail
/// first. The hand passes pinned entries like others: they keep their place and lose their mark.
///
/// The policy does not move the hand step by step. The round in which the hand drops an entry follows from
/// the entry's place and mark alone, so a heap by round and place has the victim on top, and no eviction has
/// to clear the marks of many hits.
///
/// @par Complexity   insert O(1); touch O(1) for a pinned or marked entry, otherwise O(log n), like the rest;
///      24 bytes a slot, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`; nothing else fails.
class sieve_eviction : public detail::ranked_eviction<detail::sieve_turn> {
 public:
  explicit sieve_eviction(slot_count capacity, const metadata_source& source = {})
      : ranked_eviction(capacity, source, "sieve_eviction") {}

  void insert(slot_id slot, const access_hint& = {}) noexcept {
    candidates_.set_rank(slot, {.round = 0, .place = unplaced});
  }

  void touch(slot_id slot, const access_hint& = {}) noexcept {
    const detail::sieve_turn turn = candidates_.rank(slot);
    const std::uint64_t marked = turn.place == unplaced ? 1 : next_round(turn.place) + 1;
    if (turn.round < marked) candidates_.set_rank(slot, {.round = marked, .place = turn.place});
  }

  void unpin(slot_id slot) noexcept {
    const detail::sieve_turn turn = candidates_.rank(slot);
    if (turn.place == unplaced) {
      candidates_.set_rank(slot, {.round = hand_.round + turn.round, .place = next_++});
    } else {
      candidates_.set_rank(slot,
                           {.round = std::max(turn.round, next_round(turn.place)), .place = turn.place});
    }
    candidates_.push(slot);
  }

  /// As `erase`, but the hand moves to the victim's place, or to the end of its round if that was the newest
  /// place.
  void evict(slot_id slot) noexcept {
    if (victim() == slot) {
      hand_ = candidates_.rank(slot);
      if (hand_.place + 1 == next_) hand_ = {.round = hand_.round + 1, .place = 0};
    }
    candidates_.remove(slot);
  }

 private:
  static constexpr std::uint64_t unplaced = ~std::uint64_t{0};

  /// Returns the round in which the hand next passes `place`.
  [[nodiscard]] std::uint64_t next_round(std::uint64_t place) const noexcept {
    return place > hand_.place ? hand_.round : hand_.round + 1;
  }

  // A mark adds 1 to the round in which the hand drops an entry. An entry without a place has only its mark:
  // round 1 or 0.
  detail::sieve_turn hand_;  // the place of the latest victim; initially before all places
  std::uint64_t next_ = 1;   // the next place in the queue
};

static_assert(eviction_policy<sieve_eviction> && remembers_evictions<sieve_eviction>);

}  // namespace v0
}  // namespace llmmem
