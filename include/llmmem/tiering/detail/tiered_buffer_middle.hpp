/// @file
/// What the middle tiers of a `tiered_buffer` keep: what is admitted on its way through, and what is demoted.
#pragma once

#include <llmmem/tiering/tiered_buffer.hpp>

namespace llmmem {
inline namespace v0 {

/// Whether a chunk that comes to a middle tier is to stay there.
template <class Traits, class... Tiers>
template <std::size_t Index>
bool basic_tiered_buffer<Traits, Tiers...>::is_admitted(std::uint32_t slot, passage way) noexcept {
  auto& tier = tier_at<Index>();
  // What went up through it to be used, and comes down again, passes once.
  std::optional<bool>& asked = chunks_[slot].admitted[Index];
  std::optional<bool> stays = std::exchange(asked, {});
  if (way == passage::up || !stays) {
    stays = tier.admission.admit({.hint = hint_of(slot)});
    if (!*stays) ++tier.refusals;
  }
  if (way == passage::up) asked = stays;
  return *stays;
}

/// A copy has come to tier Index.
template <class Traits, class... Tiers>
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::admit(std::uint32_t slot, passage way) noexcept {
  if constexpr (Index != 0 && Index != last) {
    const bool stays = is_admitted<Index>(slot, way);
    chunks_[slot].copies[Index].passing = !stays;
  }
}

/// A copy that was not admitted leaves, now that another tier has it. @pre the copy beneath is up to date, or
/// the one above.
template <class Traits, class... Tiers>
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::leave_when_passed(std::uint32_t slot) noexcept {
  if constexpr (Index != 0 && Index != last) {
    const copy& held = chunks_[slot].copies[Index];
    if (held.passing && held.is_valid() && held.pins == 0 && is_clean(chunks_[slot], Index))
      forget<Index>(slot);
  }
}

/// A clean copy leaves: at once, or when the tier beneath has it where it is demoted. @pre it is not pinned.
template <class Traits, class... Tiers>
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::let_go(std::uint32_t slot, urgency how) {
  using write_type = typename std::tuple_element_t<Index, std::tuple<Tiers...>>::write_type;
  if constexpr (Index + 1 < last && detail::demotes<write_type>()) {
    chunk_record& c = chunks_[slot];
    copy& beneath = c.copies[Index + 1];
    if (c.transfer == none && beneath.at == detail::residence::absent && can_begin<Index>().is_done() &&
        is_admitted<Index + 1>(slot, passage::down) && take_clean_room<Index + 1>(beneath, c.bytes)) {
      c.admitted[Index + 1] = true;  // not to be asked again when it is there
      if (begin_store<Index>(slot, true, how).is_done()) return;
    }
    if (!c.copies[Index].is_valid()) return;  // the store ended at once, and badly
  }
  drop_clean<Index>(slot);
}

/// Gives `into` a place in tier Index without waiting: of what lies free, or what clean copies leave.
template <class Traits, class... Tiers>
template <std::size_t Index>
bool basic_tiered_buffer<Traits, Tiers...>::take_clean_room(copy& into, std::uint64_t bytes) noexcept {
  auto& tier = tier_at<Index>();
  if (tier.room.granted_for(bytes) > most_room<Index>()) return false;
  for (;;) {
    if (tier.room.take(into, bytes)) {
      into.at = detail::residence::reserved;
      return true;
    }
    const std::optional<slot_id> victim = tier.eviction.victim();
    if (!victim || !is_clean(chunks_[to_index(*victim)], Index)) return false;
    drop_clean<Index>(to_index(*victim));
  }
}

}  // namespace v0
}  // namespace llmmem
