/// @file
/// What a `tiered_buffer` keeps of a chunk.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/ordered_slots.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/detail/tier_state.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A chunk, which all that share it are names of.
template <std::size_t Tiers, bool KeepsChunks>
struct chunk_record {
  std::uint64_t bytes = 0;
  std::uint32_t sharers = 0;
  std::uint32_t name = no_index;      // one of them, for texts
  std::uint32_t leases = 0;           // of all of them
  std::uint32_t transfer = no_index;  // under way: one at a time
  std::uint32_t uses = 0;
  std::uint64_t next_use = access_hint::never;
  std::uint64_t changed = 0;  // the buffer's count of changes, after the last of this one's
  bool writing = false;
  bool wanted = false;                                // in the queue of prefetches
  bool store_due = false;                             // to be written through
  std::array<std::optional<bool>, Tiers> admitted{};  // on its way up, and not yet down again
  LLMMEM_NO_UNIQUE_ADDRESS std::conditional_t<KeepsChunks, kept_chunk, nothing_kept> kept{};
  std::array<tier_copy, Tiers> copies{};
};

/// The topmost tier with a valid copy, or `Tiers` when there is none.
template <std::size_t Tiers, bool KeepsChunks>
[[nodiscard]] std::size_t newest(const chunk_record<Tiers, KeepsChunks>& c) noexcept {
  std::size_t i = 0;
  while (i < Tiers && !c.copies[i].is_valid())
    ++i;
  return i;
}

/// Whether a tier beneath has all that this copy has.
template <std::size_t Tiers, bool KeepsChunks>
[[nodiscard]] bool is_clean(const chunk_record<Tiers, KeepsChunks>& c, std::size_t tier) noexcept {
  if (!c.copies[tier].dirty.empty()) return false;
  for (std::size_t i = tier + 1; i < Tiers; ++i) {
    if (c.copies[i].is_valid()) return true;
  }
  return false;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
