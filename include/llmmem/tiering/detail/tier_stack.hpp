/// @file
/// The tiers of a `tiered_buffer`: which copy has which place, and which copy leaves next.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/result.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/detail/chunk_table.hpp>
#include <llmmem/tiering/detail/staging_slots.hpp>
#include <llmmem/tiering/detail/tier_state.hpp>
#include <llmmem/tiering/detail/tier_steps.hpp>
#include <llmmem/tiering/tier.hpp>
#include <llmmem/tiering/tiered_types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Places of copies, within hard budgets, and the policies that select which copy leaves next. The stack
/// makes every change of a copy's residence, so that places, policies, observer and counters agree. It moves
/// no bytes: the caller stores a dirty copy before it drops it.
///
/// `nth<Index>` names a tier, the slot of its record a chunk.
///
/// @tparam Observer  an `access_observer`, notified of the chunks that come to tier 0 and leave it.
/// @par Complexity      O(1), plus the operations of the eviction policy. No allocation after construction.
/// @par Thread safety   one thread at a time.
/// @par Errors          the constructor's: `out_of_memory`, `argument_error`. Failures are values.
template <class Observer, class... Tiers>
class tier_stack {
 public:
  static constexpr std::size_t tiers = sizeof...(Tiers);
  static constexpr std::size_t last = tiers - 1;
  template <std::size_t Index>
  using tier_type = std::tuple_element_t<Index, std::tuple<Tiers...>>;
  template <std::size_t Index>
  using space_type = typename tier_type<Index>::space_type;
  template <std::size_t Index>
  using range_type = typename space_type<Index>::range_type;
  /// Whether chunks have another form in the last tier.
  static constexpr bool encodes = tier_state<tier_type<last>>::encodes;
  static_assert(access_observer<Observer>, "Traits::observer must be an access_observer");
  static_assert(!encodes || space_type<last - 1>::is_host_accessible,
                "a codec works on host memory: the tier above the last must be one that the host can access");
  using table_type = chunk_table<tiers, persists_chunks<space_type<last>>()>;
  using record_type = typename table_type::record_type;

  /// @param options  are checked. @param places one for each tier; their spaces outlive the stack.
  tier_stack(table_type& chunks, Observer observer, const tiered_options& options,
             const tier_place<typename Tiers::space_type>&... places);
  tier_stack(const tier_stack&) = delete;
  tier_stack& operator=(const tier_stack&) = delete;
  /// Frees the places in spaces that have a range for each place.
  ~tier_stack();

  [[nodiscard]] const Observer& observer() const noexcept { return observer_; }
  [[nodiscard]] Observer& observer() noexcept { return observer_; }

  template <std::size_t Index>
  [[nodiscard]] space_type<Index>& space(tier_number<Index>) const noexcept {
    return *at<Index>().space;
  }

  /// @name Places
  /// @{
  template <std::size_t Index>
  [[nodiscard]] result<void> take(tier_number<Index>, tier_copy& into, std::uint64_t bytes) noexcept {
    return at<Index>().places.take(into, bytes);
  }
  template <std::size_t Index>
  [[nodiscard]] result<void> take_at(tier_number<Index>, tier_copy& into, std::byte* data,
                                     std::uint64_t bytes) noexcept {
    return at<Index>().places.take_at(into, data, bytes);
  }
  template <std::size_t Index>
  void give_back(tier_number<Index>, tier_copy& copy) noexcept {
    at<Index>().places.give_back(copy);
  }
  /// Takes the place `offset` bytes into the last tier, which is one range.
  [[nodiscard]] result<void> take_offset(tier_copy& into, std::uint64_t offset,
                                         std::uint64_t bytes) noexcept {
    auto& places = at<last>().places;
    return places.take_at(into, places.address_of(offset), bytes);
  }
  /// Never allocates the place again, because a device may still write there.
  template <std::size_t Index>
  void retire(tier_number<Index>, tier_copy& copy) noexcept {
    at<Index>().places.retire(copy);
  }
  /// A place without a chunk, freed unless a chunk takes it.
  template <std::size_t Index>
  [[nodiscard]] auto spare(tier_number<Index>) noexcept {
    return spare_place<space_type<Index>>(at<Index>().places);
  }
  /// Gives `into` a place without waiting: free space, or the space of clean copies.
  template <std::size_t Index>
  [[nodiscard]] bool take_clean_place(tier_number<Index>, tier_copy& into, std::uint64_t bytes) noexcept;
  /// Returns the most bytes that copies may take of a tier.
  template <std::size_t Index>
  [[nodiscard]] std::uint64_t most_bytes(tier_number<Index>) const noexcept;
  template <std::size_t Index>
  [[nodiscard]] std::uint64_t granted_for(tier_number<Index>, std::uint64_t bytes) const noexcept {
    return at<Index>().places.granted_for(bytes);
  }
  /// Returns a refusal unless the codec takes chunks of that size.
  [[nodiscard]] failure check_size(std::uint64_t bytes) const noexcept;
  /// Returns a refusal unless a chunk may begin that many bytes into the last tier.
  [[nodiscard]] failure check_offset(std::uint64_t offset) const noexcept;
  /// Returns a refusal unless each tier could hold a chunk of that size alone: between tier 0 and the last,
  /// the chunk passes all of them.
  [[nodiscard]] failure check_fits(std::uint64_t bytes) const noexcept;
  /// Frees reserved places that no transfer fills; returns whether there were any.
  bool release_reservations(record_type& c) noexcept;
  /// @}

  /// @name Copies
  /// @{ Pins a copy, which then does not leave.
  template <std::size_t Index>
  void pin(tier_number<Index>, std::uint32_t slot) noexcept {
    tier_copy& held = chunks_[slot].copies[Index];
    if constexpr (Index != last) {
      if (held.pins == 0 && held.is_valid()) at<Index>().eviction.pin(slot_id{slot});
    }
    ++held.pins;
  }
  template <std::size_t Index>
  void unpin(tier_number<Index>, std::uint32_t slot) noexcept {
    tier_copy& held = chunks_[slot].copies[Index];
    --held.pins;
    if constexpr (Index != last) {
      if (held.pins == 0 && held.is_valid()) at<Index>().eviction.unpin(slot_id{slot});
    }
  }
  /// Marks the copy as valid: its contents were written or brought there.
  template <std::size_t Index>
  void become_valid(tier_number<Index>, std::uint32_t slot) noexcept;
  /// Notes a copy that has come up from the tier below.
  template <std::size_t Index>
  void arrive(tier_number<Index>, std::uint32_t slot, bool in_advance) noexcept;
  /// Notes a copy that has come down from above.
  template <std::size_t Index>
  void settle(tier_number<Index> tier, std::uint32_t slot) noexcept {
    become_valid(tier, slot);
    admit(tier, slot, passage::down);
  }
  /// Frees a valid copy because its space is needed. @pre it is clean and not pinned.
  template <std::size_t Index>
  void drop(tier_number<Index>, std::uint32_t slot) noexcept;
  /// Frees a valid copy if a tier below has all of it. @pre it is not pinned.
  template <std::size_t Index>
  void drop_clean(tier_number<Index>, std::uint32_t slot) noexcept;
  /// Frees a copy that was first stored below, and counts the reason. @pre as for `drop`.
  template <std::size_t Index>
  void drop_stored(tier_number<Index> tier, std::uint32_t slot, bool was_clean) noexcept {
    ++(was_clean ? at<Index>().demotions : at<Index>().write_backs);
    drop(tier, slot);
  }
  /// Frees a valid copy that is no longer needed. @pre it is not pinned.
  template <std::size_t Index>
  void forget(tier_number<Index>, std::uint32_t slot) noexcept;
  /// As `forget`, for every middle tier that has a copy.
  void forget_middle(std::uint32_t slot) noexcept;
  /// Frees every copy. @pre no lease and no transfer.
  void forget_all(std::uint32_t slot) noexcept;
  /// Gives up the place of a copy below, because a device may still write there.
  template <std::size_t Index>
  void lose(tier_number<Index>, std::uint32_t slot) noexcept;
  /// Gives the copy in tier 0 another place, and `fresh` the old one. @pre it is valid and pinned.
  void exchange_top(std::uint32_t slot, tier_copy& fresh) noexcept;
  /// @}

  /// @name Policies
  /// @{
  template <std::size_t Index>
  [[nodiscard]] std::optional<slot_id> victim(tier_number<Index>) const noexcept {
    return at<Index>().eviction.victim();
  }
  template <std::size_t Index>
  void touch(tier_number<Index>, std::uint32_t slot) noexcept {
    at<Index>().eviction.touch(slot_id{slot}, chunks_.hint_of(slot));
  }
  /// Informs the policies of the tiers that have a copy when the chunk is next leased.
  void expect(std::uint32_t slot, std::uint64_t next_use) noexcept;
  /// Returns whether a chunk that comes to a middle tier stays there; asks the policy once for each passage.
  template <std::size_t Index>
  [[nodiscard]] bool is_admitted(tier_number<Index>, std::uint32_t slot, passage way) noexcept;
  /// Removes a copy that was not admitted, after another tier has it. @pre the copy below or above is up to
  /// date.
  template <std::size_t Index>
  void leave_when_passed(tier_number<Index>, std::uint32_t slot) noexcept;
  /// Returns whether the copy should move down now: its write policy says so, or it was not admitted.
  [[nodiscard]] bool is_due(const record_type& c, std::size_t tier) const noexcept;
  /// @}

  /// @name Bytes
  /// @{
  template <std::size_t Index>
  [[nodiscard]] space_type<Index>& space(tier_number<Index>) noexcept {
    return *at<Index>().space;
  }
  template <std::size_t Index>
  [[nodiscard]] auto& codec(tier_number<Index>) noexcept {
    return at<Index>().codec;
  }
  template <std::size_t Index>
  [[nodiscard]] std::uint64_t granularity(tier_number<Index>) const noexcept {
    return at<Index>().granularity;
  }
  template <std::size_t Index>
  [[nodiscard]] std::uint64_t rounded(tier_number<Index>, std::uint64_t bytes) const noexcept {
    return at<Index>().rounded(bytes);
  }
  /// Returns the size of the place for a chunk of `bytes`.
  template <std::size_t Index>
  [[nodiscard]] static constexpr std::uint64_t place_bytes(tier_number<Index>, std::uint64_t bytes) noexcept {
    return tier_state<tier_type<Index>>::place_bytes(bytes);
  }
  template <std::size_t Index>
  [[nodiscard]] static range_type<Index> range(tier_number<Index>, const tier_copy& copy,
                                               std::uint64_t bytes) noexcept {
    return {copy.data, bytes};
  }
  [[nodiscard]] auto& staging() noexcept { return stages_; }
  /// @}

  /// @name Accounts
  /// @{ Counts a lease that found its chunk in that tier.
  void count_hit(std::size_t tier) noexcept { ++hits_[tier]; }
  /// Returns the bytes of a tier that are leaving it.
  [[nodiscard]] std::uint64_t leaving(std::size_t tier) const noexcept { return leaving_[tier]; }
  void begin_leaving(std::size_t tier, std::uint64_t bytes) noexcept { leaving_[tier] += bytes; }
  void end_leaving(std::size_t tier, std::uint64_t bytes) noexcept { leaving_[tier] -= bytes; }
  void add_to(tiered_stats<tiers>& now) const noexcept;
  /// Returns the most bytes that a chunk of `bytes` takes of any tier except the last.
  [[nodiscard]] std::uint64_t rounded_bytes(std::uint64_t bytes) const noexcept;
  void audit(std::vector<std::string>& found) const;
  /// @}

 private:
  template <std::size_t Index>
  [[nodiscard]] auto& at() noexcept {
    return std::get<Index>(tiers_);
  }
  template <std::size_t Index>
  [[nodiscard]] const auto& at() const noexcept {
    return std::get<Index>(tiers_);
  }
  template <std::size_t Index>
  void admit(tier_number<Index>, std::uint32_t slot, passage way) noexcept;
  void release_places() noexcept;

  table_type& chunks_;
  std::tuple<tier_state<Tiers>...> tiers_;
  staging_slots<chunk_places<space_type<last - 1>>> stages_;
  std::uint64_t largest_chunk_bytes_;
  std::array<std::uint64_t, tiers> leaving_{};
  std::array<std::uint64_t, tiers> hits_{};
  LLMMEM_NO_UNIQUE_ADDRESS Observer observer_;
};

/// Keeps a copy from leaving while it lives.
template <class Stack, std::size_t Index>
class pinned_copy {
 public:
  pinned_copy(Stack& stack, tier_number<Index>, std::uint32_t slot) noexcept : stack_(stack), slot_(slot) {
    stack_.pin(nth<Index>, slot_);
  }
  pinned_copy(const pinned_copy&) = delete;
  pinned_copy& operator=(const pinned_copy&) = delete;
  ~pinned_copy() { stack_.unpin(nth<Index>, slot_); }

 private:
  Stack& stack_;
  std::uint32_t slot_;
};

template <class Observer, class... Tiers>
template <std::size_t Index>
bool tier_stack<Observer, Tiers...>::take_clean_place(tier_number<Index> tier, tier_copy& into,
                                                      std::uint64_t bytes) noexcept {
  if (granted_for(tier, bytes) > most_bytes(tier)) return false;
  for (;;) {
    if (take(tier, into, bytes)) {
      into.at = residence::reserved;
      return true;
    }
    const std::optional<slot_id> leaves = victim(tier);
    if (!leaves || !is_clean(chunks_[to_index(*leaves)], Index)) return false;
    drop_clean(tier, to_index(*leaves));
  }
}

template <class Observer, class... Tiers>
template <std::size_t Index>
std::uint64_t tier_stack<Observer, Tiers...>::most_bytes(tier_number<Index>) const noexcept {
  const place_stats stats = at<Index>().places.stats();
  if constexpr (encodes && Index + 1 == last) return stats.capacity - stats.lost - stages_.granted();
  return stats.capacity - stats.lost;
}

template <class Observer, class... Tiers>
bool tier_stack<Observer, Tiers...>::release_reservations(record_type& c) noexcept {
  bool any = false;
  for_each_index<last>([&](auto tier) {
    tier_copy& held = c.copies[tier.value];
    if (held.at != residence::reserved) return;
    give_back(tier, held);
    any = true;
  });
  return any;
}

template <class Observer, class... Tiers>
template <std::size_t Index>
void tier_stack<Observer, Tiers...>::become_valid(tier_number<Index>, std::uint32_t slot) noexcept {
  tier_copy& held = chunks_[slot].copies[Index];
  held.at = residence::valid;
  if constexpr (Index != last) {
    at<Index>().eviction.insert(slot_id{slot}, chunks_.hint_of(slot));
    if (held.pins == 0) at<Index>().eviction.unpin(slot_id{slot});
  }
}

template <class Observer, class... Tiers>
template <std::size_t Index>
void tier_stack<Observer, Tiers...>::arrive(tier_number<Index> tier, std::uint32_t slot,
                                            bool in_advance) noexcept {
  tier_copy& came = chunks_[slot].copies[Index];
  become_valid(tier, slot);
  if constexpr (Index == 0) observer_.on_arrived(chunk_id{slot}, came.granted);
  came.awaited = Index == 0 && in_advance;
  admit(tier, slot, passage::up);
}

template <class Observer, class... Tiers>
template <std::size_t Index>
void tier_stack<Observer, Tiers...>::drop(tier_number<Index> tier, std::uint32_t slot) noexcept {
  static_assert(Index != last, "in the last tier every chunk keeps its place");
  evict(at<Index>().eviction, slot_id{slot});
  if constexpr (Index == 0) observer_.on_left(chunk_id{slot}, chunks_[slot].copies[0].granted);
  give_back(tier, chunks_[slot].copies[Index]);
}

template <class Observer, class... Tiers>
template <std::size_t Index>
void tier_stack<Observer, Tiers...>::drop_clean(tier_number<Index> tier, std::uint32_t slot) noexcept {
  ++at<Index>().drops;
  // A dropped copy does not move down: its passage is over.
  if constexpr (Index == 0) chunks_[slot].admitted = {};
  drop(tier, slot);
}

template <class Observer, class... Tiers>
template <std::size_t Index>
void tier_stack<Observer, Tiers...>::forget(tier_number<Index> tier, std::uint32_t slot) noexcept {
  at<Index>().eviction.erase(slot_id{slot});
  if constexpr (Index == 0) observer_.on_left(chunk_id{slot}, chunks_[slot].copies[0].granted);
  give_back(tier, chunks_[slot].copies[Index]);
}

template <class Observer, class... Tiers>
void tier_stack<Observer, Tiers...>::forget_middle(std::uint32_t slot) noexcept {
  for_each_index<last>([&](auto tier) {
    if (tier.value != 0 && chunks_[slot].copies[tier.value].is_valid()) forget(tier, slot);
  });
}

template <class Observer, class... Tiers>
void tier_stack<Observer, Tiers...>::forget_all(std::uint32_t slot) noexcept {
  record_type& c = chunks_[slot];
  for_each_index<last>([&](auto tier) {
    if (c.copies[tier.value].is_valid()) forget(tier, slot);
  });
  c.copies[last].at = residence::absent;
  c.copies[last].dirty.clear();
  c.admitted = {};
}

template <class Observer, class... Tiers>
template <std::size_t Index>
void tier_stack<Observer, Tiers...>::lose(tier_number<Index> tier, std::uint32_t slot) noexcept {
  tier_copy& lost = chunks_[slot].copies[Index];
  if constexpr (Index != last) {
    if (lost.is_valid()) at<Index>().eviction.erase(slot_id{slot});
  }
  retire(tier, lost);
}

template <class Observer, class... Tiers>
template <std::size_t Index>
bool tier_stack<Observer, Tiers...>::is_admitted(tier_number<Index>, std::uint32_t slot,
                                                 passage way) noexcept {
  // A chunk that came up through this tier for use, and moves down again, counts as one passage.
  std::optional<bool>& asked = chunks_[slot].admitted[Index];
  std::optional<bool> stays = std::exchange(asked, {});
  if (way == passage::up || !stays) {
    stays = at<Index>().admission.admit({.hint = chunks_.hint_of(slot)});
    if (!*stays) ++at<Index>().refusals;
  }
  if (way == passage::up) asked = stays;
  return *stays;
}

/// Notes a copy that has come to a tier.
template <class Observer, class... Tiers>
template <std::size_t Index>
void tier_stack<Observer, Tiers...>::admit(tier_number<Index> tier, std::uint32_t slot,
                                           passage way) noexcept {
  if constexpr (Index != 0 && Index != last) {
    const bool stays = is_admitted(tier, slot, way);
    chunks_[slot].copies[Index].passing = !stays;
  }
}

template <class Observer, class... Tiers>
template <std::size_t Index>
void tier_stack<Observer, Tiers...>::leave_when_passed(tier_number<Index> tier, std::uint32_t slot) noexcept {
  if constexpr (Index != 0 && Index != last) {
    const tier_copy& held = chunks_[slot].copies[Index];
    if (held.passing && held.is_valid() && held.pins == 0 && is_clean(chunks_[slot], Index))
      forget(tier, slot);
  }
}

template <class Observer, class... Tiers>
bool tier_stack<Observer, Tiers...>::is_due(const record_type& c, std::size_t tier) const noexcept {
  bool wants = false;
  with_index<last>(tier, [&](auto index) { wants = tier_type<index.value>::write_type::writes_at(c.uses); });
  return (wants || c.copies[tier].passing) && c.copies[tier].is_valid() && !is_clean(c, tier);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/tier_stack_body.hpp>
