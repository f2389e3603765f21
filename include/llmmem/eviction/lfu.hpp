/// @file
/// Least-frequently-used eviction.
#pragma once

#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/ranked_eviction.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The uses of an entry, and its last use.
struct frequency {
  std::uint64_t uses = 0;
  std::uint64_t last = 0;  // number of the last event, so that no two slots rank equal

  friend bool operator<(const frequency& a, const frequency& b) noexcept {
    return a.uses != b.uses ? a.uses < b.uses : a.last < b.last;
  }
};

}  // namespace detail

/// Evicts the entry used least often since its insert; among equals, the one longest without a user.
///
/// Counts end with the entry (in-cache LFU): an entry that returns starts at one. Suits traffic that consists
/// mostly of a few system prompts; does not suit conversations, because yesterday's favourites never age.
///
/// @par Complexity   insert O(1), the others O(log n); 24 bytes a slot, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`; nothing else fails.
class lfu_eviction : public detail::ranked_eviction<detail::frequency> {
 public:
  explicit lfu_eviction(slot_count capacity, const metadata_source& source = {})
      : ranked_eviction(capacity, source, "lfu_eviction") {}

  void insert(slot_id slot, const access_hint& = {}) noexcept { candidates_.set_rank(slot, {1, next_++}); }

  void touch(slot_id slot, const access_hint& = {}) noexcept {
    candidates_.set_rank(slot, {candidates_.rank(slot).uses + 1, next_++});
  }

  void unpin(slot_id slot) noexcept {
    candidates_.set_rank(slot, {candidates_.rank(slot).uses, next_++});
    candidates_.push(slot);
  }

 private:
  std::uint64_t next_ = 0;
};

static_assert(eviction_policy<lfu_eviction>);

/// Ignores hints.
template <>
inline constexpr bool ignores_hints<lfu_eviction> = true;

}  // namespace v0
}  // namespace llmmem
