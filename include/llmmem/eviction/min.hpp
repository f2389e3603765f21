/// @file
/// Belady's MIN: evict what is used furthest in the future.
#pragma once

#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/slot_heap.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem::inline v0 {

/// Evicts the entry whose next use lies furthest ahead; among equals, the one without a user for longest.
///
/// The optimum when every entry has the same size and the future is known (Belady 1966; Mattson et al. 1970):
/// the yardstick for replayed traces, and the working policy where the access pattern repeats, as in
/// training. Give each access its `access_hint::next_use`; an entry inserted or touched without one counts as
/// never used again.
///
/// @par Complexity   insert O(1), the others O(log n); 24 bytes a slot, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`; nothing else fails.
class min_eviction {
 public:
  explicit min_eviction(slot_count capacity, const metadata_source& source = {})
      : candidates_(capacity, source, "min_eviction") {}

  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    candidates_.set_rank(slot, {hint.next_use, next_++});
  }
  void touch(slot_id slot, const access_hint& hint = {}) noexcept {
    candidates_.set_rank(slot, {hint.next_use, next_++});
  }
  void pin(slot_id slot) noexcept { candidates_.remove(slot); }
  void erase(slot_id slot) noexcept { candidates_.remove(slot); }

  void unpin(slot_id slot) noexcept {
    candidates_.set_rank(slot, {candidates_.rank(slot).next_use, next_++});
    candidates_.push(slot);
  }

  [[nodiscard]] std::optional<slot_id> victim() const noexcept { return candidates_.front(); }
  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept { return candidates_.contains(slot); }
  [[nodiscard]] slot_count capacity() const noexcept { return candidates_.capacity(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return candidates_.bytes(); }

 private:
  struct distance {
    std::uint64_t next_use = access_hint::never;
    std::uint64_t last = 0;  // number of the last event, so that no two slots rank equal

    friend bool operator<(const distance& a, const distance& b) noexcept {
      return a.next_use != b.next_use ? a.next_use > b.next_use : a.last < b.last;
    }
  };

  detail::slot_heap<distance> candidates_;
  std::uint64_t next_ = 0;
};

static_assert(eviction_policy<min_eviction>);

}  // namespace llmmem::inline v0
