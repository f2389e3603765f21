/// @file
/// How calls move the chunks of a `tiered_buffer`: prefetch, evict, flush, write through, and the steps of a
/// plan.
#pragma once

#include <llmmem/detail/named_range.hpp>
#include <llmmem/tiering/detail/chunk_mover.hpp>

#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

template <class Traits, class... Tiers>
chunk_mover<Traits, Tiers...>::~chunk_mover() {
  for (std::uint32_t id = 0; id < engine_.capacity(); ++id) {
    if (!engine_.is_under_way(id)) continue;
    try {
      static_cast<void>(complete(id));
    } catch (...) {
      // No caller is left to receive it.
    }
  }
}

template <class Traits, class... Tiers>
void chunk_mover<Traits, Tiers...>::prefetch(std::uint32_t slot) {
  record_type& c = chunks_[slot];
  if (c.copies[0].is_valid()) {
    if (c.leases == 0) c.copies[0].awaited = true;
  } else if (!std::exchange(c.wanted, true)) {
    wanted_.push_back(slot);
  }
  progress();
}

template <class Traits, class... Tiers>
void chunk_mover<Traits, Tiers...>::progress() {
  note_ended();
  write_through_due(no_index);
  for (slot_queue::walk queue(wanted_); queue.has_next();) {
    const std::uint32_t slot = queue.next();
    record_type& c = chunks_[slot];
    if (c.transfer != no_index) continue;
    const attempt tried = advance(slot, true, transfer::urgency::prefetch);
    if (tried.how == attempt::kind::blocked) {
      // In order of arrival: no later chunk overtakes one that waits for space in tier 0.
      if (c.transfer == no_index && c.copies[0].at == residence::absent) break;
      continue;
    }
    queue.take_out();
    c.wanted = false;
    stack_.release_reservations(c);
    if (tried.how == attempt::kind::failed) engine_.note(tried.why);
  }
}

template <class Traits, class... Tiers>
void chunk_mover<Traits, Tiers...>::unqueue_prefetch(std::uint32_t slot) noexcept {
  if (std::exchange(chunks_[slot].wanted, false)) wanted_.take_out(slot);
  stack_.release_reservations(chunks_[slot]);
}

template <class Traits, class... Tiers>
void chunk_mover<Traits, Tiers...>::forget_contents(std::uint32_t slot) noexcept {
  unqueue_prefetch(slot);
  if (std::exchange(chunks_[slot].store_due, false)) due_.take_out(slot);
  stack_.forget_all(slot);
}

template <class Traits, class... Tiers>
void chunk_mover<Traits, Tiers...>::mark_due(std::uint32_t slot) noexcept {
  if (!std::exchange(chunks_[slot].store_due, true)) due_.push_back(slot);
}

template <class Traits, class... Tiers>
void chunk_mover<Traits, Tiers...>::begin_due(std::uint32_t except) {
  for (slot_queue::walk queue(due_); queue.has_next();) {
    const std::uint32_t slot = queue.next();
    record_type& c = chunks_[slot];
    if (slot == except || c.writing || c.transfer != no_index) continue;
    std::size_t tier = 0;
    while (tier < last && !stack_.is_due(c, tier))
      ++tier;
    attempt begun;
    if (tier < last) begun = begin_store(tier, slot, transfer::urgency::write_back);
    if (begun.how == attempt::kind::blocked) continue;
    queue.take_out();
    c.store_due = false;
    if (begun.how == attempt::kind::failed) engine_.note(begun.why);
  }
}

template <class Traits, class... Tiers>
result<void> chunk_mover<Traits, Tiers...>::evict(std::uint32_t slot) {
  record_type& c = chunks_[slot];
  quiet(slot);
  unqueue_prefetch(slot);
  for (;;) {
    if (!c.copies[0].is_valid()) return {};
    if (is_clean(c, 0)) {
      let_go<0>(slot, transfer::urgency::write_back);
      return {};
    }
    const attempt left = begin_store<0>(slot, true, transfer::urgency::write_back);
    if (left.is_done()) return {};
    if (left.how == attempt::kind::failed) return left.why;
    if (const result<void> waited = wait_out(left.on, slot); !waited) return waited;
  }
}

template <class Traits, class... Tiers>
result<void> chunk_mover<Traits, Tiers...>::flush(std::uint32_t slot) {
  record_type& c = chunks_[slot];
  if (c.writing) return chunks_.at_chunk(errc::chunk_leased, slot, 0, c.leases);
  bool is_ours = false;
  for (std::size_t i = 0; i < last;) {
    if (const result<void> quiet = await_quiet(slot); !quiet) {
      if (is_ours) return quiet;
      engine_.note(quiet.error());  // the failure of an earlier transfer, whose work this call repeats
    }
    is_ours = false;
    if (!c.copies[i].is_valid() || is_clean(c, i)) {
      ++i;
      continue;
    }
    const attempt left = begin_store(i, slot, transfer::urgency::demand);
    if (left.how == attempt::kind::failed) return left.why;
    is_ours = left.is_done();
    if (is_ours) continue;
    if (const result<void> waited = wait_out(left.on, slot); !waited) return waited;
  }
  return {};
}

template <class Traits, class... Tiers>
result<void> chunk_mover<Traits, Tiers...>::flush() {
  const detail::named_range range("tiered_buffer flush");
  begin_writing_all();
  result<void> first;
  for (std::uint32_t slot = 0; slot < chunks_.slots(); ++slot) {
    if (!chunks_.is_live(slot)) continue;
    if (const result<void> one = flush(slot); !one && first) first = one;
  }
  return first;
}

/// Goes tier by tier, so that many writes are in flight at once. The `flush` of each chunk reports its
/// outcome.
template <class Traits, class... Tiers>
void chunk_mover<Traits, Tiers...>::begin_writing_all() {
  for (std::size_t i = 0; i < last; ++i) {
    for (std::uint32_t slot = 0; slot < chunks_.slots(); ++slot) {
      if (!chunks_.is_live(slot)) continue;
      record_type& c = chunks_[slot];
      if (c.writing) continue;
      quiet(slot);
      if (!c.copies[i].is_valid() || is_clean(c, i)) continue;
      const attempt begun = begin_store(i, slot, transfer::urgency::demand);
      if (begun.how != attempt::kind::blocked) continue;
      if (const result<void> waited = wait_for(begun.on, tiering::wait_complete, engine_.now_ns()); !waited)
        engine_.note(waited.error());
      static_cast<void>(begin_store(i, slot, transfer::urgency::demand));
    }
  }
}

template <class Traits, class... Tiers>
tiering::step_outcome chunk_mover<Traits, Tiers...>::execute(std::uint32_t slot, plan_operation operation,
                                                             std::size_t tier) {
  tiering::step_outcome outcome = tiering::step_outcome::unneeded;
  with_index<last>(tier, [&](auto index) {
    switch (operation) {
      case plan_operation::fetch:
        outcome = this->template execute_fetch<index.value>(slot);
        break;
      case plan_operation::write_back:
      case plan_operation::drop:
        outcome = this->template execute_store<index.value>(slot, operation);
        break;
      case plan_operation::allocate:
        break;  // a lease for writing takes its own space
    }
  });
  return outcome;
}

template <class Traits, class... Tiers>
template <std::size_t Index>
tiering::step_outcome chunk_mover<Traits, Tiers...>::execute_fetch(std::uint32_t slot) {
  record_type& c = chunks_[slot];
  tier_copy& to = c.copies[Index];
  step_blocker_ = tiering::step_blocker::none;
  if (newest(c) <= Index) return tiering::step_outcome::unneeded;
  if (c.transfer == no_index && newest(c) == tiers) return tiering::step_outcome::unneeded;
  step_blocker_ = tiering::step_blocker::transfer;
  if (c.transfer != no_index) return tiering::step_outcome::deferred;
  if (!c.copies[Index + 1].is_valid())
    return tiering::step_outcome::deferred;  // the hop before this one has not arrived
  if (to.at == residence::absent) {
    // The plan counts on the space of copies that are leaving, so no other copy may leave for this one.
    const bool fits = stack_.take(nth<Index>, to, c.bytes).has_value();
    if (fits) {
      to.at = residence::reserved;
    } else if (step_blocker_ = tiering::step_blocker::space; stack_.leaving(Index) != 0) {
      return tiering::step_outcome::deferred;
    } else {
      const attempt room = make_room<Index>(to, c.bytes, transfer::urgency::prefetch);
      if (room.how == attempt::kind::blocked) return tiering::step_outcome::deferred;
      if (room.how == attempt::kind::failed) return tiering::step_outcome::unneeded;
      if (c.transfer != no_index || !c.copies[Index + 1].is_valid()) {
        // The chunk's own copy below had to leave for this place.
        stack_.give_back(nth<Index>, to);
        return tiering::step_outcome::deferred;
      }
      step_blocker_ = tiering::step_blocker::transfer;
    }
  }
  const attempt begun = engine_.begin_fetch(nth<Index>, slot, transfer::urgency::prefetch);
  if (c.transfer != no_index) return tiering::step_outcome::done;
  // The transfer has not begun, so its place must not stay taken.
  if (to.at == residence::reserved) stack_.give_back(nth<Index>, to);
  return begun.how == attempt::kind::blocked ? tiering::step_outcome::deferred
                                             : tiering::step_outcome::unneeded;
}

template <class Traits, class... Tiers>
template <std::size_t Index>
tiering::step_outcome chunk_mover<Traits, Tiers...>::execute_store(std::uint32_t slot,
                                                                   plan_operation operation) {
  record_type& c = chunks_[slot];
  tier_copy& held = c.copies[Index];
  const bool drops = operation == plan_operation::drop;
  step_blocker_ = tiering::step_blocker::transfer;
  if (c.transfer != no_index) {
    const tier_transfer& under_way = engine_[c.transfer];
    if (drops && under_way.stores && under_way.edge == Index && !under_way.then_drops) {
      engine_.let_drop(c.transfer);
      return tiering::step_outcome::done;
    }
    return under_way.stores && under_way.edge == Index ? tiering::step_outcome::unneeded
                                                       : tiering::step_outcome::deferred;
  }
  step_blocker_ = tiering::step_blocker::none;
  if (!held.is_valid()) return tiering::step_outcome::unneeded;
  if (held.pins != 0 && (drops || c.writing)) {
    step_blocker_ = tiering::step_blocker::lease;
    return tiering::step_outcome::deferred;
  }
  if (is_clean(c, Index)) {
    if (!drops) return tiering::step_outcome::unneeded;
    stack_.drop_clean(nth<Index>, slot);
    return tiering::step_outcome::done;
  }
  const attempt begun = begin_store<Index>(slot, drops, transfer::urgency::write_back);
  step_blocker_ =
      begun.how == attempt::kind::blocked ? tiering::step_blocker::transfer : tiering::step_blocker::space;
  if (begun.how == attempt::kind::blocked) return tiering::step_outcome::deferred;
  return begun.is_done() ? tiering::step_outcome::done : tiering::step_outcome::unneeded;
}

template <class Traits, class... Tiers>
void chunk_mover<Traits, Tiers...>::audit(std::vector<std::string>& found) const {
  const std::string name = chunks_.where();
  std::uint32_t wanted = 0;
  for (std::uint32_t slot = 0; slot < chunks_.slots(); ++slot) {
    if (!chunks_.is_live(slot)) continue;
    const record_type& c = chunks_[slot];
    if (c.wanted) ++wanted;
    for (std::size_t i = 0; i < tiers; ++i) {
      if (c.copies[i].at != residence::reserved || c.wanted) continue;
      found.push_back(name + ": chunk " + std::to_string(c.name) + " in tier " + std::to_string(i) +
                      " keeps a place for nothing");
    }
  }
  if (wanted != wanted_.size()) {
    found.push_back(name + ": " + std::to_string(wanted) + " chunks are wanted, " +
                    std::to_string(wanted_.size()) + " are in the queue");
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
