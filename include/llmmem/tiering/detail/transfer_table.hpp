/// @file
/// The transfers that a `tiered_buffer` has in flight.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/ordered_slots.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/tiering/detail/tier_steps.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A fixed number of transfers, each free or in flight. The table moves no bytes; it records which chunks
/// move.
///
/// @par Complexity      `touching` O(capacity), the others O(1). No allocation after construction.
/// @par Thread safety   one thread at a time.
/// @par Errors          the constructor's; nothing else fails.
class transfer_table {
 public:
  /// For `touching`: a transfer between any two tiers.
  static constexpr std::size_t any_tier = ~std::size_t{0};

  transfer_table(std::uint32_t capacity, const metadata_source& source)
      : transfers_(capacity, tier_transfer{}, source, "tiered_buffer: transfers"),
        free_(capacity, source, "tiered_buffer: free transfers"),
        free_count_(capacity) {
    for (std::uint32_t i = 0; i < capacity; ++i)
      free_[i] = capacity - 1 - i;
  }

  [[nodiscard]] std::uint32_t capacity() const noexcept {
    return static_cast<std::uint32_t>(transfers_.size());
  }
  [[nodiscard]] std::uint32_t free_count() const noexcept { return free_count_; }
  [[nodiscard]] bool is_full() const noexcept { return free_count_ == 0; }
  [[nodiscard]] bool is_idle() const noexcept { return free_count_ == capacity(); }
  [[nodiscard]] bool is_under_way(std::uint32_t id) const noexcept {
    return transfers_[id].chunk != no_index;
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return transfers_.bytes() + free_.bytes(); }

  [[nodiscard]] tier_transfer& operator[](std::uint32_t id) noexcept { return transfers_[id]; }
  [[nodiscard]] const tier_transfer& operator[](std::uint32_t id) const noexcept { return transfers_[id]; }

  /// Enters a transfer as in flight and returns its number. @pre the table has a free entry, and `fresh` has
  /// a chunk.
  [[nodiscard]] std::uint32_t claim(const tier_transfer& fresh) noexcept {
    const std::uint32_t id = free_[--free_count_];
    transfers_[id] = fresh;
    return id;
  }
  /// Ends the transfer and returns its record. @pre it is in flight.
  tier_transfer release(std::uint32_t id) noexcept {
    const tier_transfer done = transfers_[id];
    transfers_[id].chunk = no_index;
    free_[free_count_++] = id;
    return done;
  }

  /// Returns a transfer in flight to or from `tier`, or `no_index`; prefers one that makes space there.
  [[nodiscard]] std::uint32_t touching(std::size_t tier) const noexcept {
    std::uint32_t found = no_index;
    for (std::uint32_t id = 0; id < capacity(); ++id) {
      const tier_transfer& t = transfers_[id];
      if (t.chunk == no_index) continue;
      if (tier != any_tier && t.edge != tier && t.edge + 1 != tier) continue;
      if (t.then_drops && t.edge == tier) return id;
      found = id;
    }
    return found;
  }

 private:
  fixed_array<tier_transfer> transfers_;
  fixed_array<std::uint32_t> free_;
  std::uint32_t free_count_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
