/// @file
/// Belady's MIN: evicts the entry whose next use is furthest in the future.
#pragma once

#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/ranked_eviction.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The next use of an entry, and its last use.
struct distance {
  std::uint64_t next_use = access_hint::never;
  std::uint64_t last = 0;  // number of the last event, so that no two slots rank equal

  friend bool operator<(const distance& a, const distance& b) noexcept {
    return a.next_use != b.next_use ? a.next_use > b.next_use : a.last < b.last;
  }
};

}  // namespace detail

/// Evicts the entry whose next use is furthest ahead; among equals, the one longest without a user.
///
/// The optimum when every entry has the same size and the future is known (Belady 1966; Mattson et al. 1970):
/// the bound for replayed traces, and a practical policy if the access pattern repeats, as in training. Give
/// each access its `access_hint::next_use`; an entry inserted or touched without a next use counts as never
/// used again.
///
/// @par Complexity   insert O(1), the others O(log n); 24 bytes a slot, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`; nothing else fails.
class min_eviction : public detail::ranked_eviction<detail::distance> {
 public:
  explicit min_eviction(slot_count capacity, const metadata_source& source = {})
      : ranked_eviction(capacity, source, "min_eviction") {}

  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    candidates_.set_rank(slot, {hint.next_use, next_++});
  }
  void touch(slot_id slot, const access_hint& hint = {}) noexcept {
    candidates_.set_rank(slot, {hint.next_use, next_++});
  }

  void unpin(slot_id slot) noexcept {
    candidates_.set_rank(slot, {candidates_.rank(slot).next_use, next_++});
    candidates_.push(slot);
  }

  /// Counts no access: the slot keeps its place among equals.
  void expect(slot_id slot, std::uint64_t next_use) noexcept {
    candidates_.set_rank(slot, {next_use, candidates_.rank(slot).last});
  }

 private:
  std::uint64_t next_ = 0;
};

static_assert(eviction_policy<min_eviction> && expects_uses<min_eviction>);

}  // namespace v0
}  // namespace llmmem
