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

namespace llmmem {
inline namespace v0 {

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

/// A slot that is none.
inline constexpr slot_id no_slot{0xFFFF'FFFF};

/// How much an entry is worth keeping, as its owner sees it.
struct retention {
  static constexpr std::uint8_t most_priority = 100;
  static constexpr std::uint8_t usual_priority = 35;  ///< what unmarked entries have, as in TensorRT-LLM

  std::uint8_t priority = usual_priority;   ///< 0 to 100: the lower leaves first
  std::uint64_t until = ~std::uint64_t{0};  ///< when `priority` ends and the usual one holds; default: never

  friend constexpr bool operator==(const retention&, const retention&) noexcept = default;
};

/// What is known about an access: what the caller tells of it, and what the allocator adds of the entry's
/// place. A policy takes from it what it ranks by and ignores the rest, at no cost.
struct access_hint {
  /// A next use that will not come, or that nobody knows.
  static constexpr std::uint64_t never = ~std::uint64_t{0};

  // Told by the caller

  std::uint64_t next_use = never;  ///< when this entry is next used, in the caller's own monotonic count
  std::uint64_t session = 0;       ///< the conversation that the access belongs to; 0: not told
  float cost = 1;                  ///< of bringing the entry back, for each byte of it, in any unit
  retention keep{};

  // Added by the allocator

  /// Equal for equal contents, evenly distributed: what a policy knows an entry by after it has left. 0: not
  /// told.
  std::uint64_t content = 0;
  slot_id parent = no_slot;    ///< where the contents before these lie, or did when this was told
  std::uint32_t position = 0;  ///< how many entries of its chain come before this one
  std::uint32_t chain = 0;     ///< entries of the chain that is being read or written; 0: not told
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
/// `victim` names a candidate whenever there is one, and changes nothing; the caller then erases it. What a
/// policy may offer beyond: `remembers_evictions`, `expects_uses`, `keeps_time`, `retains`, `relabels`. A
/// policy never sees the entries, only slots, so one policy serves blocks of a pool, chunks of a tier and
/// pages of a file alike.
///
/// Everything but the constructor is `noexcept`, free of allocation and O(1) or O(log n), amortised where a
/// policy says so; `victim` is so always.
///
/// @par Constructor   `P(slot_count capacity, const metadata_source&)`; throws `length_error` for a capacity
///      of 0 or above `max_slots`, or above the policy's own limit, `out_of_memory` when the source has no
///      memory.
template <class P>
concept eviction_policy = std::constructible_from<P, slot_count, const metadata_source&> && std::movable<P> &&
                          requires(P policy, const P& read, slot_id slot, const access_hint& hint) {
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

/// A policy that remembers what it had to drop (ghost entries): `evict` is said instead of `erase` when an
/// entry leaves for lack of room, not because its contents became worthless.
template <class P>
concept remembers_evictions = requires(P policy, slot_id slot) {
  { policy.evict(slot) } noexcept -> std::same_as<void>;
};

/// A policy that is told of accesses to come: `expect` sets when a pinned entry or a candidate is next used,
/// in the count of `access_hint::next_use`; `access_hint::never` takes it back. It is no access.
template <class P>
concept expects_uses = requires(P policy, slot_id slot, std::uint64_t next_use) {
  { policy.expect(slot, next_use) } noexcept -> std::same_as<void>;
};

/// A policy that lets entries expire: `advance` tells the time, in the unit of `retention::until`, which
/// never goes back.
template <class P>
concept keeps_time = requires(P policy, std::uint64_t now) {
  { policy.advance(now) } noexcept -> std::same_as<void>;
};

/// A policy whose owner may change an entry's worth after it came in.
template <class P>
concept retains = requires(P policy, slot_id slot, retention keep) {
  { policy.retain(slot, keep) } noexcept -> std::same_as<void>;
};

/// Whether a policy takes nothing from hints: callers then make none up. To be specialised beside such a
/// policy; a policy that derives from it is asked anew.
template <class P>
inline constexpr bool ignores_hints = false;

/// A policy that can call an entry by another slot: what it knows of `from` it then knows of `to`, which was
/// unknown.
template <class P>
concept relabels = requires(P policy, slot_id slot) {
  { policy.relabel(slot, slot) } noexcept -> std::same_as<void>;
};

namespace detail {

// What is optional in a policy, for callers that say it to all: nothing happens where a policy has no use for
// it.

template <eviction_policy P>
[[nodiscard]] constexpr bool reads_hints(const P& policy) noexcept {
  if constexpr (requires { policy.reads_hints(); }) {
    return policy.reads_hints();
  } else {
    return !ignores_hints<P>;
  }
}

template <eviction_policy P>
void evict(P& policy, slot_id slot) noexcept {
  if constexpr (remembers_evictions<P>) {
    policy.evict(slot);
  } else {
    policy.erase(slot);
  }
}

template <eviction_policy P>
void expect(P& policy, slot_id slot, std::uint64_t next_use) noexcept {
  if constexpr (expects_uses<P>) policy.expect(slot, next_use);
}

template <eviction_policy P>
void advance(P& policy, std::uint64_t now) noexcept {
  if constexpr (keeps_time<P>) policy.advance(now);
}

/// @pre `from` is pinned. A policy that cannot relabel takes the entry for a new one.
template <eviction_policy P>
void relabel(P& policy, slot_id from, slot_id to) noexcept {
  if constexpr (relabels<P>) {
    policy.relabel(from, to);
  } else {
    policy.erase(from);
    policy.insert(to, access_hint{});
  }
}

template <eviction_policy P>
void retain(P& policy, slot_id slot, retention keep) noexcept {
  if constexpr (retains<P>) policy.retain(slot, keep);
}

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

}  // namespace v0
}  // namespace llmmem
