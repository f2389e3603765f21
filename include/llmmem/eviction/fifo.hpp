/// @file
/// First-in-first-out eviction.
#pragma once

#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/ranked_eviction.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Evicts the entry that was inserted first, regardless of its uses since.
///
/// A baseline for other policies, and a fair choice if every entry is used about equally often. A slot's
/// place in the order dates from its first `unpin`, so blocks freed tail first leave tail first; a later pin
/// does not renew the place.
///
/// @par Complexity   insert, touch O(1); pin, unpin, erase O(log n), because an entry returns to its old
///      place after a pin; 16 bytes a slot, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`; nothing else fails.
class fifo_eviction : public detail::ranked_eviction<std::uint64_t> {
 public:
  explicit fifo_eviction(slot_count capacity, const metadata_source& source = {})
      : ranked_eviction(capacity, source, "fifo_eviction") {}

  void insert(slot_id slot, const access_hint& = {}) noexcept { candidates_.set_rank(slot, unplaced); }
  void touch(slot_id, const access_hint& = {}) noexcept {}

  void unpin(slot_id slot) noexcept {
    if (candidates_.rank(slot) == unplaced) candidates_.set_rank(slot, next_++);
    candidates_.push(slot);
  }

 private:
  static constexpr std::uint64_t unplaced = ~std::uint64_t{0};

  std::uint64_t next_ = 0;  // arrival number
};

static_assert(eviction_policy<fifo_eviction>);

/// Ignores hints.
template <>
inline constexpr bool ignores_hints<fifo_eviction> = true;

}  // namespace v0
}  // namespace llmmem
