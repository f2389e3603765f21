/// @file
/// How a `tiered_buffer` carries out the steps of a plan.
#pragma once

#include <llmmem/tiered_buffer.hpp>

namespace llmmem::inline v0 {

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
result<void> basic_tiered_buffer<Traits, Tiers...>::expect(chunk_handle chunk,
                                                           std::uint64_t next_use) noexcept {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  chunk_record& c = chunks_[chunk.slot];
  c.next_use = next_use;
  for (std::size_t i = 0; i < last; ++i) {
    if (!c.copies[i].is_valid()) continue;
    with_index<last>(
        i, [&]<class I>(I) { detail::expect(tier_at<I::value>().eviction, slot_id{chunk.slot}, next_use); });
  }
  return {};
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
step_outcome basic_tiered_buffer<Traits, Tiers...>::execute(chunk_handle chunk, plan_operation operation,
                                                            std::size_t tier) {
  if (tier >= last || check(chunk).code != errc::ok) return step_outcome::useless;
  step_outcome outcome = step_outcome::useless;
  with_index<last>(tier, [&]<class I>(I) {
    switch (operation) {
      case plan_operation::fetch:
        outcome = execute_fetch<I::value>(chunk.slot);
        break;
      case plan_operation::write_back:
      case plan_operation::drop:
        outcome = execute_store<I::value>(chunk.slot, operation);
        break;
      case plan_operation::allocate:
        break;  // a lease that writes takes its own room
    }
  });
  return outcome;
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t I>
step_outcome basic_tiered_buffer<Traits, Tiers...>::execute_fetch(std::uint32_t slot) {
  chunk_record& c = chunks_[slot];
  if (newest(c) <= I) return step_outcome::useless;
  if (c.transfer != none) return step_outcome::later;
  if (newest(c) == tiers) return step_outcome::useless;
  if (!c.copies[I + 1].is_valid()) return step_outcome::later;  // the hop before it has not arrived
  if (c.copies[I].at == detail::residence::absent) {
    // What is leaving makes the room that the plan counts on: nothing else must go for it.
    const bool fits = tier_at<I>().room.take(c.copies[I], c.bytes).has_value();
    if (fits) {
      c.copies[I].at = detail::residence::reserved;
    } else if (leaving_[I] != 0) {
      return step_outcome::later;
    } else {
      const attempt room = make_room<I>(c.copies[I], c.bytes, urgency::prefetch);
      if (room.how == attempt::kind::blocked) return step_outcome::later;
      if (room.how == attempt::kind::failed) return step_outcome::useless;
      if (c.transfer != none || !c.copies[I + 1].is_valid()) {
        // The chunk's own copy beneath had to leave for it.
        tier_at<I>().room.give_back(c.copies[I]);
        return step_outcome::later;
      }
    }
  }
  const attempt begun = begin_fetch<I>(slot, urgency::prefetch);
  if (c.transfer != none) return step_outcome::done;
  // Not begun: its place must not stay taken.
  if (c.copies[I].at == detail::residence::reserved) tier_at<I>().room.give_back(c.copies[I]);
  return begun.how == attempt::kind::blocked ? step_outcome::later : step_outcome::useless;
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t I>
step_outcome basic_tiered_buffer<Traits, Tiers...>::execute_store(std::uint32_t slot,
                                                                  plan_operation operation) {
  chunk_record& c = chunks_[slot];
  copy& held = c.copies[I];
  const bool drops = operation == plan_operation::drop;
  if (c.transfer != none) {
    transfer& under_way = transfers_[c.transfer];
    if (drops && under_way.stores && under_way.edge == I && !under_way.then_drops) {
      under_way.then_drops = true;
      leaving_[I] += held.granted;
      return step_outcome::done;
    }
    return under_way.stores && under_way.edge == I ? step_outcome::useless : step_outcome::later;
  }
  if (!held.is_valid()) return step_outcome::useless;
  if (held.pins != 0 && (drops || c.writing)) return step_outcome::later;
  if (is_clean(c, I)) {
    if (!drops) return step_outcome::useless;
    ++tier_at<I>().drops;
    drop<I>(slot);
    return step_outcome::done;
  }
  const attempt begun = begin_store<I>(slot, drops, urgency::write_back);
  if (begun.how == attempt::kind::blocked) return step_outcome::later;
  return begun.is_done() ? step_outcome::done : step_outcome::useless;
}

}  // namespace llmmem::inline v0
