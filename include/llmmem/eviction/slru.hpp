/// @file
/// Segmented LRU eviction.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/slot_lists.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {

/// Evicts the least recent entry that was used once; if there is none, the least recent entry that was used
/// again.
///
/// Two LRU segments (Karedla, Love and Wherry, "Caching strategies to improve disk system performance",
/// 1994). A new entry joins the *probationary* segment; a use moves it to the *protected* one. When the
/// protected segment exceeds its share, its least recent entry returns to the recent end of the probationary
/// one. So one-shot prompts pass only through the probationary segment and displace no shared prefix. If
/// nearly all entries are used twice, or none is, it is LRU with more work.
///
/// A pinned entry is in neither segment. It keeps its standing and gets its place in the order at its
/// `unpin`, as in `lru_eviction`.
///
/// @par Complexity   every operation O(1); 9 bytes a slot, allocated once in the constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`, and `argument_error` for a share above 100;
///      nothing else fails.
class slru_eviction {
 public:
  /// Four fifths: a common share of the protected segment (as in Caffeine's main region).
  static constexpr std::uint32_t default_protected_percent = 80;
  [[deprecated(
      "its name is default_protected_percent")]] static constexpr std::uint32_t usual_protected_percent =
      default_protected_percent;

  explicit slru_eviction(slot_count capacity, const metadata_source& source = {})
      : slru_eviction(capacity, default_protected_percent, source) {}

  /// @param protected_percent  the share of the capacity, 0 to 100, that candidates of the protected segment
  ///      may take.
  slru_eviction(slot_count capacity, std::uint32_t protected_percent, const metadata_source& source = {})
      : candidates_(capacity, source, "slru_eviction"),
        segments_(to_number(capacity), probationary, source, "slru_eviction"),
        most_protected_(to_number(capacity) * protected_percent / 100) {
    if (protected_percent > 100) {
      throw argument_error("slru_eviction: protected_percent is " + std::to_string(protected_percent) +
                           "; it must be at most 100");
    }
  }

  void insert(slot_id slot, const access_hint& = {}) noexcept { segments_[to_index(slot)] = probationary; }

  /// Protects the entry, and makes a candidate the most recent of its segment.
  void touch(slot_id slot, const access_hint& = {}) noexcept {
    if (!candidates_.contains(slot)) {
      segments_[to_index(slot)] = protected_;
      return;
    }
    pin(slot);
    segments_[to_index(slot)] = protected_;
    unpin(slot);
  }

  void pin(slot_id slot) noexcept {
    if (candidates_.contains(slot)) candidates_.remove(segments_[to_index(slot)], slot);
  }

  void unpin(slot_id slot) noexcept {
    candidates_.push_back(segments_[to_index(slot)], slot);
    if (candidates_.size(protected_) > most_protected_) {
      const slot_id least = *candidates_.front(protected_);
      candidates_.remove(protected_, least);
      segments_[to_index(least)] = probationary;
      candidates_.push_back(probationary, least);
    }
  }

  void erase(slot_id slot) noexcept { pin(slot); }

  [[nodiscard]] std::optional<slot_id> victim() const noexcept {
    const auto first = candidates_.front(probationary);
    return first ? first : candidates_.front(protected_);
  }
  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept { return candidates_.contains(slot); }
  [[nodiscard]] slot_count capacity() const noexcept { return candidates_.capacity(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return candidates_.bytes() + segments_.bytes();
  }

 private:
  static constexpr std::uint8_t probationary = 0;
  static constexpr std::uint8_t protected_ = 1;

  detail::slot_lists<2> candidates_;            // by segment, oldest at the front
  detail::fixed_array<std::uint8_t> segments_;  // of every known slot
  std::uint64_t most_protected_;
};

static_assert(eviction_policy<slru_eviction>);

}  // namespace v0
}  // namespace llmmem
