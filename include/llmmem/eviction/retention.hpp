/// @file
/// Eviction by priority, with priorities that expire.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/ranked_eviction.hpp>
#include <llmmem/eviction/detail/slot_heap.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The priority of an entry, and its last use.
struct standing {
  std::uint64_t priority : 8 = retention::default_priority;
  std::uint64_t last : 56 = 0;  // number of the last event, so that no two slots rank equal

  friend bool operator<(const standing& a, const standing& b) noexcept {
    return a.priority != b.priority ? a.priority < b.priority : a.last < b.last;
  }
};

}  // namespace detail

/// Evicts the entry with the lowest priority; among equals, the one longest without a user.
///
/// The retention of TensorRT-LLM: a priority from 0 to 100, 35 by default, and a time after which the default
/// applies again. Suits owners that know more than the traffic shows: a system prompt that must stay, a
/// conversation that waits for a tool for a minute, a one-shot batch job. Without priorities it is LRU.
///
/// `access_hint::keep` of the insert sets an entry's retention; a touch's `keep` replaces it, unless that is
/// the default; `retain` sets it at any time. Priorities above 100 count as 100. `advance` sets the time;
/// nothing expires between its calls. A retention already expired when it is set gives the default priority
/// at once.
///
/// A high priority is no pin: the entry leaves when no other candidate is left. Retentions of pinned entries
/// expire, too.
///
/// @par Complexity   insert, touch, retain, pin, unpin, erase O(log n); advance O(log n) for each entry that
///      expires; 32 bytes a slot, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`; nothing else fails.
class retention_eviction : public detail::ranked_eviction<detail::standing> {
 public:
  static constexpr std::uint8_t highest_priority = 100;

  explicit retention_eviction(slot_count capacity, const metadata_source& source = {})
      : ranked_eviction(capacity, source, "retention_eviction"),
        expiring_(capacity, source, "retention_eviction") {}

  void insert(slot_id slot, const access_hint& hint = {}) noexcept { retain(slot, hint.keep); }

  void touch(slot_id slot, const access_hint& hint = {}) noexcept {
    renew(slot);
    if (hint.keep != retention{}) retain(slot, hint.keep);
  }

  void unpin(slot_id slot) noexcept {
    renew(slot);
    candidates_.push(slot);
  }

  void erase(slot_id slot) noexcept {
    candidates_.remove(slot);
    expiring_.remove(slot);
  }

  /// Sets the retention of a pinned entry or a candidate; the entry keeps its place among equals.
  void retain(slot_id slot, retention keep) noexcept {
    expiring_.remove(slot);
    if (keep.until <= now_) keep = {};
    set_priority(slot, std::min(keep.priority, highest_priority));
    if (keep.until == retention{}.until) return;
    expiring_.set_rank(slot, keep.until);
    expiring_.push(slot);
  }

  /// Sets the time to `now`: entries whose `retention::until` is at most `now` get the default priority
  /// again. Does nothing for a time before the present one.
  void advance(std::uint64_t now) noexcept {
    now_ = std::max(now_, now);
    for (auto next = expiring_.front(); next && expiring_.rank(*next) <= now_; next = expiring_.front()) {
      expiring_.remove(*next);
      set_priority(*next, retention::default_priority);
    }
  }

  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return ranked_eviction::metadata_bytes() + expiring_.bytes();
  }

 private:
  void set_priority(slot_id slot, std::uint8_t priority) noexcept {
    detail::standing rank = candidates_.rank(slot);
    rank.priority = priority;
    candidates_.set_rank(slot, rank);
  }
  void renew(slot_id slot) noexcept {
    detail::standing rank = candidates_.rank(slot);
    rank.last = next_++ & 0xFF'FFFF'FFFF'FFFF;
    candidates_.set_rank(slot, rank);
  }

  detail::slot_heap<std::uint64_t> expiring_;  // retentions with an end, the soonest first
  std::uint64_t now_ = 0;
  std::uint64_t next_ = 0;
};

static_assert(eviction_policy<retention_eviction> && keeps_time<retention_eviction> &&
              retains<retention_eviction>);

}  // namespace v0
}  // namespace llmmem
