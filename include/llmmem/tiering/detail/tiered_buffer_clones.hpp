/// @file
/// Clones of a `tiered_buffer`'s chunks: who shares a record, and how one of them parts.
#pragma once

#include <llmmem/tiering/errors.hpp>
#include <llmmem/tiering/tiered_buffer.hpp>
#include <llmmem/transfer/errors.hpp>

namespace llmmem {
inline namespace v0 {

template <class Traits, class... Tiers>
result<chunk_handle> basic_tiered_buffer<Traits, Tiers...>::clone(chunk_handle chunk) {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = record_of(chunk);
  if (chunks_[slot].writing) return at_chunk(errc::chunk_leased, slot, 0, chunks_[slot].leases);
  const std::uint32_t name = names_.acquire({});
  if (name == none) return no_more_chunks();
  join(name, slot);
  return names_.handle(name);
}

/// Gives a name its record.
template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::join(std::uint32_t name, std::uint32_t slot) noexcept {
  chunk_record& c = chunks_[slot];
  chunk_name& n = names_[name];
  n.record = slot;
  n.previous = c.sharers == 0 ? name : c.name;
  n.next = c.sharers == 0 ? name : names_[c.name].next;
  names_[n.next].previous = name;
  names_[n.previous].next = name;
  c.name = name;
  if (++c.sharers > 1) shared_ += c.sharers == 2 ? 2 : 1;
}

/// Takes a name from its record, which may then have none.
template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::leave(std::uint32_t name) noexcept {
  const chunk_name n = names_[name];
  chunk_record& c = chunks_[n.record];
  names_[n.next].previous = n.previous;
  names_[n.previous].next = n.next;
  if (c.name == name) c.name = n.next;
  if (c.sharers > 1) shared_ -= c.sharers == 2 ? 2 : 1;
  --c.sharers;
}

/// Gives a name a record of its own, of `bytes`. Nothing has changed when it cannot. @pre others have its
/// record too, and there are contents to be copied where they are.
template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::part(std::uint32_t name, std::uint64_t bytes, parting how,
                                                         patience wait) {
  const std::uint64_t began = clock_.now_ns();
  const std::uint32_t shared = names_[name].record;
  auto& home = tier_at<last>();
  detail::spare_place beneath(home.room);
  detail::spare_place top(tier_at<0>().room);
  if (const result<void> had = home.room.take(beneath.place(), home.place_bytes(bytes)); !had) return had;
  const auto refusal = [&](const result<void>& why) -> failure {
    if (why.code() != errc::timed_out) return why.error();
    return at_chunk(errc::timed_out, shared, bytes, why.error().found);
  };
  if (how == parting::anew) {
    if (const result<void> room = await_top_room(top.place(), bytes, none, wait, began); !room)
      return refusal(room);
  }
  if (how == parting::copied) {
    if (!chunks_[shared].copies[0].is_valid()) {
      if (const result<void> there = make_resident(shared, true, wait); !there) return there;
    }
    const hold<0> kept(*this, shared);
    if (const result<void> room = await_top_room(top.place(), bytes, shared, wait, began); !room)
      return refusal(room);
    const std::uint64_t old = chunks_[shared].bytes;
    const std::uint64_t copied = bytes < old ? bytes : old;
    if (const result<void> moved = copy_top(top.place(), chunks_[shared].copies[0], copied); !moved) {
      if (moved.code() == errc::completion_lost) top.retire();
      return moved;
    }
    parted_bytes_ += copied;
  }
  const bool has_key = owns_key(name);
  if (has_key) {
    if (const result<void> gone = unindex(shared); !gone) return gone;
  }
  chunk_record fresh;
  if (has_key) fresh.kept = std::exchange(chunks_[shared].kept, {});
  fresh.bytes = bytes;
  fresh.changed = ++changes_;
  fresh.uses = chunks_[shared].uses;
  fresh.next_use = chunks_[shared].next_use;
  fresh.copies[0] = top.release();
  fresh.copies[last] = beneath.release();
  const std::uint32_t own = chunks_.acquire(fresh);  // never more records than names
  leave(name);
  join(name, own);
  if (how != parting::empty) become_valid<0>(own);
  if (how == parting::copied) observer_.on_made(chunk_id{own}, chunks_[own].copies[0].granted);
  return {};
}

/// Gives `fresh` a place in tier 0, waiting as long as patience lasts.
/// @param held  the record whose copy in tier 0 stays there meanwhile, or `none`.
template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::await_top_room(copy& fresh, std::uint64_t bytes,
                                                                   std::uint32_t held, patience wait,
                                                                   std::uint64_t began_ns) {
  for (;;) {
    const attempt room = make_room<0>(fresh, bytes, urgency::demand);
    if (room.is_done()) return {};
    if (room.how == attempt::kind::failed) return room.why;
    const transfer awaited = transfers_[room.on];
    const result<void> waited = wait_for(room.on, wait, began_ns);
    if (waited) continue;
    if (waited.code() == errc::timed_out || is_in_the_way(awaited, held, true)) return waited;
    note(waited.error());
  }
}

/// Copies within tier 0, and waits for it.
template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::copy_top(const copy& to, const copy& from,
                                                             std::uint64_t bytes) {
  auto& top = tier_at<0>();
  const auto copied = top.space->copy_within_async(top.range(to, bytes), top.range(from, bytes), {});
  if (!copied) return copied.error();
  return detail::settle(*copied);
}

/// Names and records agree on who shares what.
template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::audit_names(std::vector<std::string>& found) const {
  const auto say = [&](std::uint32_t name, const std::string& what) {
    found.push_back(options_.name + ": chunk " + std::to_string(name) + " " + what);
  };
  std::vector<std::uint32_t> sharers(chunks_.touched());
  std::vector<std::uint32_t> leases(chunks_.touched());
  for (std::uint32_t name = 0; name < names_.touched(); ++name) {
    if (!names_.is_live(name)) continue;
    const chunk_name& n = names_[name];
    if (n.record >= chunks_.touched() || !chunks_.is_live(n.record)) {
      say(name, "has no record");
      continue;
    }
    ++sharers[n.record];
    leases[n.record] += n.leases;
    if (names_[n.next].previous != name || names_[n.next].record != n.record)
      say(name, "is not among those that share its record");
  }
  std::uint64_t shared = 0;
  for (std::uint32_t slot = 0; slot < chunks_.touched(); ++slot) {
    if (!chunks_.is_live(slot)) continue;
    const chunk_record& c = chunks_[slot];
    if (c.sharers > 1) shared += c.sharers;
    if (c.sharers != sharers[slot] || c.sharers == 0) {
      say(c.name,
          "has " + std::to_string(c.sharers) + " sharers, there are " + std::to_string(sharers[slot]));
    } else if (names_[c.name].record != slot || !names_.is_live(c.name)) {
      say(c.name, "is named by a record that is not its own");
    }
    if (c.leases != leases[slot]) {
      say(c.name, "has " + std::to_string(c.leases) + " leases, its sharers " + std::to_string(leases[slot]));
    }
  }
  if (shared != shared_) {
    found.push_back(options_.name + ": " + std::to_string(shared) + " chunks are shared, " +
                    std::to_string(shared_) + " are counted");
  }
}

}  // namespace v0
}  // namespace llmmem
