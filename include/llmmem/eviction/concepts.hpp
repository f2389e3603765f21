/// @file
/// What an eviction policy is: the one concept that block pools, tiers and caches of every kind share.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace llmmem::inline v0 {

/// A place in a cache of fixed capacity: the index of a block, a chunk, a page.
enum class slot_id : std::uint32_t {};

/// How many slots there are.
enum class slot_count : std::uint64_t {};

/// The most slots a policy can order. Links are 32 bits wide, and one value is the list's own end.
inline constexpr std::uint64_t max_slots = 0xFFFF'FFFF;

/// The number in a strong type, to index or compute with.
[[nodiscard]] constexpr std::uint32_t to_index(slot_id slot) noexcept {
  return static_cast<std::uint32_t>(slot);
}
[[nodiscard]] constexpr std::uint64_t to_number(slot_count count) noexcept {
  return static_cast<std::uint64_t>(count);
}

/// What the caller knows about an access. A policy takes from it what it ranks by and ignores the rest, at no
/// cost.
struct access_hint {
  /// A next use that will not come, or that nobody knows.
  static constexpr std::uint64_t never = ~std::uint64_t{0};

  std::uint64_t next_use = never;  ///< when this entry is next used, in the caller's own monotonic count
};

/// Ranks the entries of a cache and names the one to drop.
///
/// A slot is *unknown*, *pinned* or a *candidate*:
///
///     insert: unknown -> pinned        whoever brings an entry in is using it
///     unpin:  pinned -> candidate      its last user has gone
///     pin:    candidate -> pinned      somebody uses it again
///     touch:  pinned or candidate      an access is counted
///     erase:  pinned or candidate -> unknown
///
/// `victim` names a candidate whenever there is one, and changes nothing; the caller then erases it. A policy
/// never sees the entries, only slots, so one policy serves blocks of a pool, chunks of a tier and pages of a
/// file alike.
///
/// Everything but the constructor is `noexcept`, free of allocation and O(1) or O(log n).
///
/// @par Constructor   `P(slot_count capacity, const metadata_source&)`; throws `length_error` for a capacity
///      of 0 or above `max_slots`, `out_of_memory` when the source has no memory.
template <class P>
concept eviction_policy = std::constructible_from<P, slot_count, const metadata_source&> && std::movable<P> &&
                          requires(P policy, const P& read, slot_id slot, access_hint hint) {
                            { policy.insert(slot, hint) } noexcept -> std::same_as<void>;
                            { policy.touch(slot, hint) } noexcept -> std::same_as<void>;
                            { policy.pin(slot) } noexcept -> std::same_as<void>;
                            { policy.unpin(slot) } noexcept -> std::same_as<void>;
                            { policy.erase(slot) } noexcept -> std::same_as<void>;
                            { read.victim() } noexcept -> std::same_as<std::optional<slot_id>>;
                            { read.is_candidate(slot) } noexcept -> std::same_as<bool>;
                            { read.capacity() } noexcept -> std::same_as<slot_count>;
                            { read.metadata_bytes() } noexcept -> std::same_as<std::size_t>;
                          };

namespace detail {

/// `capacity` as a number, refused when it cannot be indexed.
[[nodiscard]] inline std::uint64_t checked_capacity(slot_count capacity, const char* who) {
  const std::uint64_t slots = to_number(capacity);
  if (slots == 0) throw length_error(std::string(who) + ": capacity 0; a cache needs at least one slot");
  if (slots > max_slots) {
    throw length_error(std::string(who) + ": capacity " + std::to_string(slots) + " exceeds max_slots " +
                       std::to_string(max_slots));
  }
  return slots;
}

}  // namespace detail

}  // namespace llmmem::inline v0
