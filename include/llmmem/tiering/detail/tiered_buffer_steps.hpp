/// @file
/// How a `tiered_buffer` carries out the steps of a plan.
#pragma once

#include <llmmem/tiering/tiered_buffer.hpp>

namespace llmmem {
inline namespace v0 {

template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::expect(chunk_handle chunk,
                                                           std::uint64_t next_use) noexcept {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = record_of(chunk);
  chunk_record& c = chunks_[slot];
  c.next_use = next_use;
  for (std::size_t i = 0; i < last; ++i) {
    if (!c.copies[i].is_valid()) continue;
    with_index<last>(i, [&]<class Index>(Index) {
      detail::expect(tier_at<Index::value>().eviction, slot_id{slot}, next_use);
    });
  }
  return {};
}

template <class Traits, class... Tiers>
step_outcome basic_tiered_buffer<Traits, Tiers...>::execute(chunk_handle chunk, plan_operation operation,
                                                            std::size_t tier) {
  if (tier >= last || check(chunk).code != errc::ok) return step_outcome::useless;
  const std::uint32_t slot = record_of(chunk);
  step_outcome outcome = step_outcome::useless;
  with_index<last>(tier, [&]<class Index>(Index) {
    switch (operation) {
      case plan_operation::fetch:
        outcome = execute_fetch<Index::value>(slot);
        break;
      case plan_operation::write_back:
      case plan_operation::drop:
        outcome = execute_store<Index::value>(slot, operation);
        break;
      case plan_operation::allocate:
        break;  // a lease that writes takes its own room
    }
  });
  return outcome;
}

template <class Traits, class... Tiers>
template <std::size_t Index>
step_outcome basic_tiered_buffer<Traits, Tiers...>::execute_fetch(std::uint32_t slot) {
  chunk_record& c = chunks_[slot];
  if (newest(c) <= Index) return step_outcome::useless;
  if (c.transfer != none) return step_outcome::later;
  if (newest(c) == tiers) return step_outcome::useless;
  if (!c.copies[Index + 1].is_valid()) return step_outcome::later;  // the hop before it has not arrived
  if (c.copies[Index].at == detail::residence::absent) {
    // What is leaving makes the room that the plan counts on: nothing else must go for it.
    const bool fits = tier_at<Index>().room.take(c.copies[Index], c.bytes).has_value();
    if (fits) {
      c.copies[Index].at = detail::residence::reserved;
    } else if (leaving_[Index] != 0) {
      return step_outcome::later;
    } else {
      const attempt room = make_room<Index>(c.copies[Index], c.bytes, urgency::prefetch);
      if (room.how == attempt::kind::blocked) return step_outcome::later;
      if (room.how == attempt::kind::failed) return step_outcome::useless;
      if (c.transfer != none || !c.copies[Index + 1].is_valid()) {
        // The chunk's own copy beneath had to leave for it.
        tier_at<Index>().room.give_back(c.copies[Index]);
        return step_outcome::later;
      }
    }
  }
  const attempt begun = begin_fetch<Index>(slot, urgency::prefetch);
  if (c.transfer != none) return step_outcome::done;
  // Not begun: its place must not stay taken.
  if (c.copies[Index].at == detail::residence::reserved) tier_at<Index>().room.give_back(c.copies[Index]);
  return begun.how == attempt::kind::blocked ? step_outcome::later : step_outcome::useless;
}

template <class Traits, class... Tiers>
template <std::size_t Index>
step_outcome basic_tiered_buffer<Traits, Tiers...>::execute_store(std::uint32_t slot,
                                                                  plan_operation operation) {
  chunk_record& c = chunks_[slot];
  copy& held = c.copies[Index];
  const bool drops = operation == plan_operation::drop;
  if (c.transfer != none) {
    transfer& under_way = transfers_[c.transfer];
    if (drops && under_way.stores && under_way.edge == Index && !under_way.then_drops) {
      under_way.then_drops = true;
      leaving_[Index] += held.granted;
      return step_outcome::done;
    }
    return under_way.stores && under_way.edge == Index ? step_outcome::useless : step_outcome::later;
  }
  if (!held.is_valid()) return step_outcome::useless;
  if (held.pins != 0 && (drops || c.writing)) return step_outcome::later;
  if (is_clean(c, Index)) {
    if (!drops) return step_outcome::useless;
    drop_clean<Index>(slot);
    return step_outcome::done;
  }
  const attempt begun = begin_store<Index>(slot, drops, urgency::write_back);
  if (begun.how == attempt::kind::blocked) return step_outcome::later;
  return begun.is_done() ? step_outcome::done : step_outcome::useless;
}

}  // namespace v0
}  // namespace llmmem
