/// @file
/// W-TinyLFU eviction.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/frequency_sketch.hpp>
#include <llmmem/eviction/detail/slot_lists.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {

/// Keeps the entries used more often recently; uses before an entry's insert count, too.
///
/// Einziger, Friedman and Manes, "TinyLFU: A highly efficient cache admission policy", ACM Transactions on
/// Storage 2017. New entries pass through a small LRU *window*, a hundredth of the capacity. An entry that
/// leaves it competes with the least recent entry of the *main* region, a segmented LRU like `slru_eviction`
/// with four fifths protected. The entry used less often recently is evicted; if they are equal, the
/// newcomer. A sketch counts uses by `access_hint::content` and remembers entries that have left; contents
/// without a name count as never used. Suits traffic in which contents stay popular for longer than they stay
/// in the cache; slow to notice a new favourite.
///
/// The paper refuses newcomers. Here an entry is in the cache before it can be judged, so entries that have
/// left the window wait in line; the first that left is judged first. While the cache has at most as many
/// entries as the latest eviction left, there is no competition: entries that leave the window join the main
/// region unjudged. At most a quarter of the main region waits in line; beyond that, the first in line joins
/// unjudged, too. Segments hold candidates: a pinned entry is in none, keeps its standing and gets its place
/// at its `unpin`.
///
/// @par Complexity   every operation O(1); 25 to 33 bytes a slot and at least 64, allocated once in the
///      constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor's, see `eviction_policy`; nothing else fails.
class wtinylfu_eviction {
 public:
  explicit wtinylfu_eviction(slot_count capacity, const metadata_source& source = {})
      : candidates_(capacity, source, "wtinylfu_eviction"),
        contents_(to_number(capacity), source, "wtinylfu_eviction"),
        regions_(to_number(capacity), unknown, source, "wtinylfu_eviction"),
        uses_(capacity, source, "wtinylfu_eviction"),
        window_share_(std::max<std::uint64_t>(to_number(capacity) / 100, 1)),
        protected_share_((to_number(capacity) - to_number(capacity) / 100) * 4 / 5) {}

  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    uses_.add(hint.content);
    contents_[to_index(slot)] = hint.content;
    regions_[to_index(slot)] = window;
    ++known_;
  }

  void touch(slot_id slot, const access_hint& = {}) noexcept {
    uses_.add(contents_[to_index(slot)]);
    const bool candidate = candidates_.contains(slot);
    if (candidate) pin(slot);
    if (regions_[to_index(slot)] != window) regions_[to_index(slot)] = protected_;
    if (candidate) unpin(slot);
  }

  /// Takes an entry in use out of the line.
  void pin(slot_id slot) noexcept {
    if (!candidates_.contains(slot)) return;
    std::uint8_t& region = regions_[to_index(slot)];
    candidates_.remove(region, slot);
    if (region == line) region = probationary;
  }

  void unpin(slot_id slot) noexcept {
    candidates_.push_back(regions_[to_index(slot)], slot);
    if (candidates_.size(window) > window_share_) move_first(window, known_ > level_ ? line : probationary);
    if (candidates_.size(protected_) > protected_share_) move_first(protected_, probationary);
    const std::uint64_t main = candidates_.size(probationary) + candidates_.size(protected_);
    if (candidates_.size(line) > std::max<std::uint64_t>(main / 4, 1)) move_first(line, probationary);
  }

  void erase(slot_id slot) noexcept {
    if (regions_[to_index(slot)] == unknown) return;
    pin(slot);
    regions_[to_index(slot)] = unknown;
    --known_;
  }

  /// As `erase`, but a newcomer that won joins the main region.
  void evict(slot_id slot) noexcept {
    const auto newcomer = candidates_.front(line);
    const bool lost = newcomer && *newcomer != slot && victim() == slot;
    erase(slot);
    if (lost) move_first(line, probationary);
    level_ = victim() ? known_ : never_full;
  }

  [[nodiscard]] std::optional<slot_id> victim() const noexcept {
    const auto newcomer = candidates_.front(line);
    const auto old = main_front();
    if (newcomer && old) return estimate(*newcomer) > estimate(*old) ? old : newcomer;
    if (newcomer || old) return newcomer ? newcomer : old;
    return candidates_.front(window);
  }
  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept { return candidates_.contains(slot); }
  [[nodiscard]] slot_count capacity() const noexcept { return candidates_.capacity(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return candidates_.bytes() + contents_.bytes() + regions_.bytes() + uses_.bytes();
  }

 private:
  static constexpr std::uint8_t window = 0;
  static constexpr std::uint8_t line = 1;  // entries that have left the window and wait to be judged
  static constexpr std::uint8_t probationary = 2;
  static constexpr std::uint8_t protected_ = 3;
  static constexpr std::uint8_t unknown = 4;
  static constexpr std::uint64_t never_full = ~std::uint64_t{0};

  [[nodiscard]] std::optional<slot_id> main_front() const noexcept {
    const auto first = candidates_.front(probationary);
    return first ? first : candidates_.front(protected_);
  }
  [[nodiscard]] std::uint64_t estimate(slot_id slot) const noexcept {
    return uses_.estimate(contents_[to_index(slot)]);
  }

  void move_first(std::uint8_t from, std::uint8_t to) noexcept {
    const slot_id slot = *candidates_.front(from);
    candidates_.remove(from, slot);
    regions_[to_index(slot)] = to;
    candidates_.push_back(to, slot);
  }

  detail::slot_lists<4> candidates_;             // by region, oldest at the front
  detail::fixed_array<std::uint64_t> contents_;  // of every known slot
  detail::fixed_array<std::uint8_t> regions_;    // of every slot
  detail::frequency_sketch uses_;
  std::uint64_t window_share_;
  std::uint64_t protected_share_;
  std::uint64_t known_ = 0;
  std::uint64_t level_ = never_full;  // entries that the latest eviction left
};

static_assert(eviction_policy<wtinylfu_eviction> && remembers_evictions<wtinylfu_eviction>);

}  // namespace v0
}  // namespace llmmem
