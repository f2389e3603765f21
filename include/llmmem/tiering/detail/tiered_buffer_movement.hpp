/// @file
/// How chunks of a `tiered_buffer` move: up for a lease or in advance, down when told or written through.
#pragma once

#include <llmmem/tiering/errors.hpp>
#include <llmmem/tiering/tiered_buffer.hpp>

namespace llmmem {
inline namespace v0 {

/// Brings a chunk as far up as it gets without waiting.
template <class Traits, class... Tiers>
auto basic_tiered_buffer<Traits, Tiers...>::advance(std::uint32_t slot, bool needs_contents, urgency how)
    -> attempt {
  chunk_record& c = chunks_[slot];
  if (c.transfer != none) {
    transfers_[c.transfer].found_under_way = true;
    return attempt::blocked(c.transfer);
  }
  copy& top = c.copies[0];
  if (top.is_valid()) return {};
  if (top.at == detail::residence::absent) {
    // The place in tier 0 first: what it takes to get one may need the tiers beneath.
    const attempt room = make_room<0>(top, c.bytes, how);
    if (!room.is_done()) return room;
    // It may have been the chunk's own copy beneath that had to leave for a victim: one transfer at a time.
    if (c.transfer != none) return attempt::blocked(c.transfer);
  }
  if (!needs_contents) {
    become_valid<0>(slot);
    return {};
  }
  for (;;) {
    const std::size_t source = newest(c);
    if (source == tiers) return attempt::failed(at_chunk(errc::no_contents, slot));
    attempt hop;
    bool has_moved = false;
    with_index<last>(source - 1, [&]<class Index>(Index) {
      copy& to = c.copies[Index::value];
      if (to.at == detail::residence::absent) {
        {
          const hold<Index::value + 1> kept(*this, slot);  // not to be dropped while room is made above it
          hop = make_room<Index::value>(to, c.bytes, how);
        }
        if (!hop.is_done() && hop.on == none) {
          // Unless that is where room must come from.
          hop = make_room<Index::value>(to, c.bytes, how);
          has_moved = hop.is_done() && newest(c) != source;
        }
      }
      if (hop.is_done() && !has_moved) hop = begin_fetch<Index::value>(slot, how);
    });
    if (!has_moved) return hop;
  }
}

template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::make_resident(std::uint32_t slot, bool needs_contents,
                                                                  patience wait) {
  const std::uint64_t began = clock_.now_ns();
  const auto end = [&](const result<void>& how) {
    if (!chunks_[slot].wanted) release_reservations(slot);
    return how;
  };
  for (;;) {
    attempt tried;
    try {
      tried = advance(slot, needs_contents, urgency::demand);
    } catch (...) {
      static_cast<void>(end({}));
      throw;
    }
    if (tried.is_done()) return {};
    if (tried.how == attempt::kind::failed) return end(tried.why);
    const transfer awaited = transfers_[tried.on];
    result<void> waited;
    try {
      waited = wait_for(tried.on, wait, began);
    } catch (...) {
      static_cast<void>(end({}));
      throw;
    }
    if (waited) continue;
    if (waited.code() == errc::timed_out) {
      if (needs_contents && !chunks_[slot].wanted) {
        // Before all prefetches: somebody has asked for it.
        chunks_[slot].wanted = true;
        for (std::uint32_t i = wanted_count_++; i > 0; --i)
          wanted_[i] = wanted_[i - 1];
        wanted_[0] = slot;
      }
      return end(at_chunk(errc::timed_out, slot, chunks_[slot].bytes, waited.error().found));
    }
    if (is_in_the_way(awaited, slot, needs_contents)) return end(waited.error());
    note(waited.error());
  }
}

template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::prefetch(chunk_handle chunk) {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = record_of(chunk);
  chunk_record& c = chunks_[slot];
  if (newest(c) == tiers) return at_chunk(errc::no_contents, slot);
  if (c.copies[0].is_valid()) {
    if (c.leases == 0) c.copies[0].awaited = true;
  } else if (!c.wanted) {
    c.wanted = true;
    wanted_[wanted_count_++] = slot;
  }
  progress();
  return {};
}

/// Takes note of the transfers that have ended.
template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::note_ended() {
  const auto most = static_cast<std::uint32_t>(transfers_.size());
  if (free_transfer_count_ == most) return;
  [&]<std::size_t... Index>(std::index_sequence<Index...>) {
    (std::get<Index>(edges_).poll(), ...);
  }(std::make_index_sequence<last>{});
  for (std::uint32_t id = 0; id < most && free_transfer_count_ != most; ++id) {
    if (transfers_[id].chunk == none || !is_ready(id)) continue;
    if (const result<void> outcome = complete(id); !outcome) note(outcome.error());
  }
}

template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::progress() {
  note_ended();
  write_through_due(none);
  for (sieve queue(wanted_, wanted_count_); queue.has_next();) {
    const std::uint32_t slot = queue.next();
    chunk_record& c = chunks_[slot];
    if (c.transfer != none) continue;
    const attempt tried = advance(slot, true, urgency::prefetch);
    if (tried.how == attempt::kind::blocked) {
      // First come, first served: what waits for room in tier 0 is not overtaken.
      if (c.transfer == none && c.copies[0].at == detail::residence::absent) break;
      continue;
    }
    queue.take_out();
    c.wanted = false;
    release_reservations(slot);
    if (tried.how == attempt::kind::failed) note(tried.why);
  }
}

/// Whether a write policy wants a copy to go down, or it is not to stay where it is.
template <class Traits, class... Tiers>
bool basic_tiered_buffer<Traits, Tiers...>::is_due(const chunk_record& c, std::size_t tier) const noexcept {
  bool wants = false;
  with_index<last>(tier, [&]<class Index>(Index) {
    wants = std::tuple_element_t<Index::value, std::tuple<Tiers...>>::write_type::writes_at(c.uses);
  });
  return (wants || c.copies[tier].passing) && c.copies[tier].is_valid() && !is_clean(c, tier);
}

template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::mark_due(std::uint32_t slot) noexcept {
  if (std::exchange(chunks_[slot].store_due, true)) return;
  due_[due_count_++] = slot;
}

/// Begins to write through what is due, as far as it can without waiting.
/// @param except  a chunk that is about to change, or `none`.
template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::write_through_due(std::uint32_t except) {
  for (sieve queue(due_, due_count_); queue.has_next();) {
    const std::uint32_t slot = queue.next();
    chunk_record& c = chunks_[slot];
    if (slot == except || c.writing || c.transfer != none) continue;
    std::size_t tier = 0;
    while (tier < last && !is_due(c, tier))
      ++tier;
    attempt begun;
    if (tier < last) {
      with_index<last>(tier, [&]<class Index>(Index) {
        begun = begin_store<Index::value>(slot, false, urgency::write_back);
      });
    }
    if (begun.how == attempt::kind::blocked) continue;
    queue.take_out();
    c.store_due = false;
    if (begun.how == attempt::kind::failed) note(begun.why);
  }
}

template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::evict(chunk_handle chunk) {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = record_of(chunk);
  chunk_record& c = chunks_[slot];
  if (c.leases != 0) return at_chunk(errc::chunk_leased, slot, 0, c.leases);
  if (const result<void> quiet = await_quiet(slot); !quiet) note(quiet.error());
  unqueue_prefetch(slot);
  for (;;) {
    if (!c.copies[0].is_valid()) return {};
    if (is_clean(c, 0)) {
      let_go<0>(slot, urgency::write_back);
      return {};
    }
    const attempt left = begin_store<0>(slot, true, urgency::write_back);
    if (left.is_done()) return {};
    if (left.how == attempt::kind::failed) return left.why;
    const transfer awaited = transfers_[left.on];
    const result<void> waited = wait_for(left.on, wait_complete, clock_.now_ns());
    if (waited) continue;
    if (is_in_the_way(awaited, slot, true)) return waited;
    note(waited.error());
  }
}

template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::flush(chunk_handle chunk) {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  return flush_record(record_of(chunk));
}

template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::flush_record(std::uint32_t slot) {
  chunk_record& c = chunks_[slot];
  if (c.writing) return at_chunk(errc::chunk_leased, slot, 0, c.leases);
  bool is_ours = false;
  for (std::size_t i = 0; i < last;) {
    if (const result<void> quiet = await_quiet(slot); !quiet) {
      if (is_ours) return quiet;
      note(quiet.error());  // of a transfer begun before: what it did not do is done now
    }
    is_ours = false;
    if (!c.copies[i].is_valid() || is_clean(c, i)) {
      ++i;
      continue;
    }
    attempt left;
    with_index<last>(
        i, [&]<class Index>(Index) { left = begin_store<Index::value>(slot, false, urgency::demand); });
    if (left.how == attempt::kind::failed) return left.why;
    is_ours = left.is_done();
    if (is_ours) continue;
    const transfer awaited = transfers_[left.on];
    const result<void> waited = wait_for(left.on, wait_complete, clock_.now_ns());
    if (waited) continue;
    if (is_in_the_way(awaited, slot, true)) return waited;
    note(waited.error());
  }
  return {};
}

template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::flush() {
  begin_writing_all();
  result<void> first;
  for (std::uint32_t slot = 0; slot < chunks_.touched(); ++slot) {
    if (!chunks_.is_live(slot)) continue;
    if (const result<void> one = flush_record(slot); !one && first) first = one;
  }
  return first;
}

/// Tier by tier, so that many writes are under way at once. How they went is left to `flush_record`.
template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::begin_writing_all() {
  for (std::size_t i = 0; i < last; ++i) {
    for (std::uint32_t slot = 0; slot < chunks_.touched(); ++slot) {
      if (!chunks_.is_live(slot)) continue;
      chunk_record& c = chunks_[slot];
      if (c.writing) continue;
      if (const result<void> quiet = await_quiet(slot); !quiet) note(quiet.error());
      if (!c.copies[i].is_valid() || is_clean(c, i)) continue;
      attempt begun;
      const auto begin = [&] {
        with_index<last>(
            i, [&]<class Index>(Index) { begun = begin_store<Index::value>(slot, false, urgency::demand); });
      };
      begin();
      if (begun.how == attempt::kind::blocked) {
        if (const result<void> waited = wait_for(begun.on, wait_complete, clock_.now_ns()); !waited)
          note(waited.error());
        begin();
      }
    }
  }
}

}  // namespace v0
}  // namespace llmmem
