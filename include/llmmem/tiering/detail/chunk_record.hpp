/// @file
/// The record of a chunk in a `tiered_buffer`: its copies, one for each tier, and its planned movement.
#pragma once

#include <llmmem/arena/arena.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/ordered_slots.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/tiering/chunk_key.hpp>
#include <llmmem/version/dirty_ranges.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Whether a tier has a copy of a chunk.
enum class residence : std::uint8_t {
  absent,    ///< no copy; the last tier keeps the place nevertheless
  reserved,  ///< the copy has a place, and no transfer fills it
  arriving,  ///< a transfer fills it
  valid,     ///< the contents are complete; the topmost valid copy is the newest
};

/// A chunk's copy in a tier.
struct tier_copy {
  arena_handle place{};
  std::byte* data = nullptr;
  std::uint64_t granted = 0;
  residence at = residence::absent;
  bool has_checksum = false;
  bool awaited = false;        // prefetched, and not yet leased
  bool passing = false;        // not admitted: leaves when the next tier has the chunk
  std::uint32_t checksum = 0;  // of the bytes as stored here
  std::uint64_t stored = 0;    // stored bytes, if a codec determines the number
  std::uint32_t pins = 0;      // leases and transfers
  dirty_ranges dirty;          // bytes that the next copy below does not have

  [[nodiscard]] bool is_valid() const noexcept { return at == residence::valid; }
};

/// The key of a chunk that outlives the process.
struct kept_chunk {
  chunk_key key{};
  std::uint32_t name = no_index;  // the name with the key; at most one of several sharers has a key
  bool indexed = false;           // the last tier's index has an entry for it
  bool was_there = false;         // it existed when the buffer was built
};
/// Replaces `kept_chunk` for tiers without an index.
struct nothing_kept {};

/// A chunk; all its sharers are names of it.
template <std::size_t Tiers, bool PersistsChunks>
struct chunk_record {
  std::uint64_t bytes = 0;
  std::uint32_t sharers = 0;
  std::uint32_t name = no_index;      // one of its names, for texts
  std::uint32_t leases = 0;           // leases under all names
  std::uint32_t transfer = no_index;  // in flight: one at a time
  std::uint32_t uses = 0;
  std::uint64_t next_use = access_hint::never;
  std::uint64_t changed = 0;  // the buffer's count of changes at this chunk's last change
  bool writing = false;
  bool wanted = false;                                // in the queue of prefetches
  bool store_due = false;                             // to be written through
  std::array<std::optional<bool>, Tiers> admitted{};  // admission of each middle tier, asked on the way up
                                                      // and kept until the chunk has moved down
  LLMMEM_NO_UNIQUE_ADDRESS std::conditional_t<PersistsChunks, kept_chunk, nothing_kept> kept{};
  std::array<tier_copy, Tiers> copies{};
};

/// Returns the topmost tier with a valid copy, or `Tiers` if there is none.
template <std::size_t Tiers, bool PersistsChunks>
[[nodiscard]] std::size_t newest(const chunk_record<Tiers, PersistsChunks>& c) noexcept {
  std::size_t i = 0;
  while (i < Tiers && !c.copies[i].is_valid())
    ++i;
  return i;
}

/// Returns whether a tier below has all contents of this copy.
template <std::size_t Tiers, bool PersistsChunks>
[[nodiscard]] bool is_clean(const chunk_record<Tiers, PersistsChunks>& c, std::size_t tier) noexcept {
  if (!c.copies[tier].dirty.empty()) return false;
  for (std::size_t i = tier + 1; i < Tiers; ++i) {
    if (c.copies[i].is_valid()) return true;
  }
  return false;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
