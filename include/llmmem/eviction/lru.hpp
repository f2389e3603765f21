/// @file
/// Least-recently-used eviction.
#pragma once

#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/slot_list.hpp>

#include <cstddef>
#include <optional>

namespace llmmem {
inline namespace v0 {

/// Evicts the entry longest without a user.
///
/// A pinned entry is in use; its place in the order dates from its unpin. A pool that frees a sequence's
/// blocks tail first therefore loses the tail of a shared prefix before its head (the order of vLLM's free
/// queue). Suits chat traffic. A loop over more entries than fit misses every time: use `min_eviction` with
/// known next uses for it.
///
/// @par Complexity   every operation O(1); 8 bytes a slot, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`; nothing else fails.
class lru_eviction {
 public:
  explicit lru_eviction(slot_count capacity, const metadata_source& source = {})
      : candidates_(capacity, source, "lru_eviction") {}

  /// Does nothing for a pinned slot, because `unpin` decides its place.
  void insert(slot_id, const access_hint& = {}) noexcept {}

  /// Makes a candidate the most recent.
  void touch(slot_id slot, const access_hint& = {}) noexcept {
    if (!candidates_.contains(slot)) return;
    candidates_.remove(slot);
    candidates_.push_back(slot);
  }

  void pin(slot_id slot) noexcept { candidates_.remove(slot); }
  void unpin(slot_id slot) noexcept { candidates_.push_back(slot); }
  void erase(slot_id slot) noexcept { candidates_.remove(slot); }

  [[nodiscard]] std::optional<slot_id> victim() const noexcept { return candidates_.front(); }
  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept { return candidates_.contains(slot); }
  [[nodiscard]] slot_count capacity() const noexcept { return candidates_.capacity(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return candidates_.bytes(); }

 private:
  detail::slot_list candidates_;  // oldest at the front
};

static_assert(eviction_policy<lru_eviction>);

/// Ignores hints.
template <>
inline constexpr bool ignores_hints<lru_eviction> = true;

}  // namespace v0
}  // namespace llmmem
