/// @file
/// The concept of an eviction policy, which block pools, tiers and all other caches share.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {

/// A place in a cache of fixed capacity: the index of a block, a chunk or a page.
enum class slot_id : std::uint32_t {};

/// A number of slots.
enum class slot_count : std::uint64_t {};

/// The most slots a policy can order: links have 32 bits, and one value marks the end of a list.
inline constexpr std::uint64_t max_slots = 0xFFFF'FFFF;

/// Returns the number in a strong type, to index or compute with.
[[nodiscard]] constexpr std::uint32_t to_index(slot_id slot) noexcept {
  return static_cast<std::uint32_t>(slot);
}
[[nodiscard]] constexpr std::uint64_t to_number(slot_count count) noexcept {
  return static_cast<std::uint64_t>(count);
}

/// The value for "no slot".
inline constexpr slot_id no_slot{0xFFFF'FFFF};

/// The worth of an entry to its owner.
struct retention {
  static constexpr std::uint8_t max_priority = 100;
  static constexpr std::uint8_t default_priority = 35;  ///< of unmarked entries, as in TensorRT-LLM
  [[deprecated("its name is max_priority")]] static constexpr std::uint8_t most_priority = max_priority;
  [[deprecated("its name is default_priority")]] static constexpr std::uint8_t usual_priority =
      default_priority;

  std::uint8_t priority = default_priority;  ///< 0 to 100: the lowest leaves first
  std::uint64_t until = ~std::uint64_t{0};   ///< when `priority` ends and `default_priority` holds; default:
                                             ///< never

  friend constexpr bool operator==(const retention&, const retention&) noexcept = default;
};

/// The facts about an access: those of the caller, and those that the allocator adds about the entry's place.
/// A policy reads the facts by which it ranks; the others cost nothing.
struct access_hint {
  /// No next use, or an unknown one.
  static constexpr std::uint64_t never = ~std::uint64_t{0};

  // Given by the caller

  std::uint64_t next_use = never;  ///< when this entry is next used, in the caller's own monotonic count
  std::uint64_t session = 0;       ///< the conversation that the access belongs to; 0: unknown
  float cost = 1;                  ///< to bring the entry back, for each of its bytes, in any unit
  retention keep{};

  // Added by the allocator

  /// Equal for equal contents, evenly distributed: by it, the policy recognises an entry that has left. 0:
  /// unknown.
  std::uint64_t content = 0;
  slot_id parent = no_slot;    ///< the slot of the contents before these, at the time of this access
  std::uint32_t position = 0;  ///< entries of its chain before this one
  std::uint32_t chain = 0;     ///< entries of the chain that the access reads or writes; 0: unknown
};

/// Ranks the entries of a cache and names the one to drop.
///
/// A slot is *unknown*, *pinned* or a *candidate*:
///
///     insert: unknown -> pinned        the inserting caller uses the entry
///     unpin:  pinned -> candidate      its last user has released it
///     pin:    candidate -> pinned      a caller uses it again
///     touch:  pinned or candidate      an access is counted
///     erase:  pinned or candidate -> unknown
///
/// `victim` names a candidate if there is one, and changes nothing; the caller then erases it. Optional
/// abilities of a policy are `remembers_evictions`, `expects_uses`, `keeps_time`, `retains` and `relabels`. A
/// policy sees slots, never the entries, so one policy serves blocks of a pool, chunks of a tier and pages of
/// a file.
///
/// Everything except the constructor is `noexcept`, allocates nothing and takes O(1) or O(log n), amortised
/// if a policy says so; `victim` never relies on amortisation.
///
/// @par Constructor   `P(slot_count capacity, const metadata_source&)`; throws `length_error` for a capacity
///      of 0 or above `max_slots`, or above the policy's own limit, and `out_of_memory` when the source has
///      no memory.
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

/// A policy that remembers evicted entries (ghost entries). When an entry leaves for lack of space, the
/// caller calls `evict`; `erase` means that its contents became worthless.
template <class P>
concept remembers_evictions = requires(P policy, slot_id slot) {
  { policy.evict(slot) } noexcept -> std::same_as<void>;
};

/// A policy that accepts predictions of accesses: `expect` sets when a pinned entry or a candidate is next
/// used, in the count of `access_hint::next_use`; `access_hint::never` withdraws the prediction. A prediction
/// is no access.
template <class P>
concept expects_uses = requires(P policy, slot_id slot, std::uint64_t next_use) {
  { policy.expect(slot, next_use) } noexcept -> std::same_as<void>;
};

/// A policy with entries that expire: `advance` sets the time, in the unit of `retention::until`. Time never
/// goes back.
template <class P>
concept keeps_time = requires(P policy, std::uint64_t now) {
  { policy.advance(now) } noexcept -> std::same_as<void>;
};

/// A policy whose owner may change an entry's worth after its insert.
template <class P>
concept retains = requires(P policy, slot_id slot, retention keep) {
  { policy.retain(slot, keep) } noexcept -> std::same_as<void>;
};

/// Whether a policy ignores hints, so that callers build none. Specialise it next to the policy. The value
/// does not extend to derived policies.
template <class P>
inline constexpr bool ignores_hints = false;

/// A policy that can move an entry to another slot: its knowledge of `from` then applies to `to`, which was
/// unknown.
template <class P>
concept relabels = requires(P policy, slot_id slot) {
  { policy.relabel(slot, slot) } noexcept -> std::same_as<void>;
};

namespace detail {

// The optional calls, for callers that use any policy: they do nothing for a policy without them.

template <eviction_policy P>
[[nodiscard]] constexpr bool reads_hints(const P& policy) noexcept {
  if constexpr (requires { policy.reads_hints(); }) {
    return policy.reads_hints();
  } else {
    return !ignores_hints<P>;
  }
}

/// The hint of callers that know nothing of an access: for policies that use none, without building one.
inline constexpr access_hint no_hint{};

template <eviction_policy P>
void evict(P& policy, slot_id slot) noexcept {
  if constexpr (remembers_evictions<P>) {
    policy.evict(slot);
  } else {
    policy.erase(slot);
  }
}

/// Whether a policy's own `evict_victim` replaces `victim` and `evict`. As `ignores_hints`, the value does
/// not extend to derived policies, which may shadow either.
template <class P>
inline constexpr bool evicts_victims = false;

/// Evicts the victim and returns it, or `no_slot`: one call of a policy that is chosen at run time. A slot
/// passes through a register where an optional one is stored in parts and then loaded whole, which stalls.
template <eviction_policy P>
slot_id evict_victim(P& policy) noexcept {
  if constexpr (evicts_victims<P>) {
    return policy.evict_victim();
  } else {
    const std::optional<slot_id> victim = policy.victim();
    if (!victim) return no_slot;
    evict(policy, *victim);
    return *victim;
  }
}

/// A policy that is chosen at run time: callers collect slots, and unpin them by one call.
template <class P>
concept unpins_together = requires(P policy, std::span<const slot_id> slots) {
  { policy.unpin(slots) } noexcept -> std::same_as<void>;
};

template <eviction_policy P>
void expect(P& policy, slot_id slot, std::uint64_t next_use) noexcept {
  if constexpr (expects_uses<P>) policy.expect(slot, next_use);
}

template <eviction_policy P>
void advance(P& policy, std::uint64_t now) noexcept {
  if constexpr (keeps_time<P>) policy.advance(now);
}

/// @pre `from` is pinned. A policy that cannot relabel sees a new entry.
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

/// Slots on their way to `unpin`: passed on at once, or, for a policy that is chosen at run time, together.
/// @pre `pass_to` is called before the policy's next call.
template <eviction_policy P>
class unpinned_slots {
 public:
  void add(P& policy, slot_id slot) noexcept { policy.unpin(slot); }
  void pass_to(P&) noexcept {}
};

template <eviction_policy P>
  requires unpins_together<P>
class unpinned_slots<P> {
 public:
  unpinned_slots() noexcept {}  // NOLINT(cppcoreguidelines-pro-type-member-init,modernize-use-equals-default)
  void add(P& policy, slot_id slot) noexcept {
    slots_[count_++] = slot;
    if (count_ == slots_.size()) pass_to(policy);
  }
  void pass_to(P& policy) noexcept {
    if (count_ != 0) policy.unpin(std::span<const slot_id>(slots_.data(), count_));
    count_ = 0;
  }

 private:
  std::array<slot_id, 16> slots_;  // only the first `count_` are ever read
  std::size_t count_ = 0;
};

/// Returns `capacity` as a number; throws if 32 bits cannot index it.
[[nodiscard]] inline std::uint64_t checked_capacity(slot_count capacity, const char* who) {
  const std::uint64_t slots = to_number(capacity);
  if (slots == 0) throw length_error(std::string(who) + ": capacity is 0; it must be at least 1");
  if (slots > max_slots) {
    throw length_error(std::string(who) + ": capacity " + std::to_string(slots) + " exceeds max_slots " +
                       std::to_string(max_slots));
  }
  return slots;
}

}  // namespace detail

}  // namespace v0
}  // namespace llmmem
