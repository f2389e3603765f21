/// @file
/// The single steps of a `tiered_buffer`: room, transfers over one edge, how they begin and end.
#pragma once

#include <llmmem/tiered_buffer.hpp>
#include <llmmem/transfer/crc32c.hpp>

#include <time.h>

namespace llmmem::inline v0 {

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
std::uint32_t basic_tiered_buffer<Traits, Tiers...>::claim_transfer(const transfer& fresh) noexcept {
  const std::uint32_t id = free_transfers_[--free_transfer_count_];
  transfers_[id] = fresh;
  chunks_[fresh.chunk].transfer = id;
  return id;
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
void basic_tiered_buffer<Traits, Tiers...>::release_transfer(std::uint32_t id) noexcept {
  chunks_[transfers_[id].chunk].transfer = none;
  if (transfers_[id].stage != none) stages_[transfers_[id].stage].user = none;
  transfers_[id].chunk = none;
  free_transfers_[free_transfer_count_++] = id;
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::pin(std::uint32_t slot) noexcept {
  copy& held = chunks_[slot].copies[Index];
  if constexpr (Index != last) {
    if (held.pins == 0 && held.is_valid()) tier_at<Index>().eviction.pin(slot_id{slot});
  }
  ++held.pins;
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::unpin(std::uint32_t slot) noexcept {
  copy& held = chunks_[slot].copies[Index];
  --held.pins;
  if constexpr (Index != last) {
    if (held.pins == 0 && held.is_valid()) tier_at<Index>().eviction.unpin(slot_id{slot});
  }
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::become_valid(std::uint32_t slot) noexcept {
  copy& held = chunks_[slot].copies[Index];
  held.at = detail::residence::valid;
  if constexpr (Index != last) {
    tier_at<Index>().eviction.insert(slot_id{slot}, hint_of(slot));
    if (held.pins == 0) tier_at<Index>().eviction.unpin(slot_id{slot});
  }
}

/// Frees a valid copy because its room is needed. @pre it is not pinned, and clean.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::drop(std::uint32_t slot) noexcept {
  static_assert(Index != last, "in the last tier every chunk keeps its place");
  auto& tier = tier_at<Index>();
  detail::evict(tier.eviction, slot_id{slot});
  if constexpr (Index == 0) observer_.on_left(chunk_id{slot}, chunks_[slot].copies[0].granted);
  tier.room.give_back(chunks_[slot].copies[Index]);
}

/// Frees a valid copy of which a tier beneath has all. @pre it is not pinned.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::drop_clean(std::uint32_t slot) noexcept {
  ++tier_at<Index>().drops;
  if constexpr (Index == 0) chunks_[slot].admitted = {};  // what came up does not go down again
  drop<Index>(slot);
}

/// Frees a valid copy that is worth nothing any more. @pre it is not pinned.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::forget(std::uint32_t slot) noexcept {
  auto& tier = tier_at<Index>();
  tier.eviction.erase(slot_id{slot});
  if constexpr (Index == 0) observer_.on_left(chunk_id{slot}, chunks_[slot].copies[0].granted);
  tier.room.give_back(chunks_[slot].copies[Index]);
}

/// Gives `into` a place in tier Index, of which it drops what is clean and begins to write back what is not.
///
/// One that cannot begin to be written is passed over for the next, and costs nobody else its lease.
///
/// A prefetch takes no room from what was itself asked for in advance and is still to be used, nor places
/// that other prefetches keep: it waits.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
auto basic_tiered_buffer<Traits, Tiers...>::make_room(copy& into, std::uint64_t bytes, urgency how)
    -> attempt {
  auto& tier = tier_at<Index>();
  passed_over<Index> unable(*this);
  for (;;) {
    const result<void> had = tier.room.take(into, bytes);
    if (had) {
      into.at = Index == last ? detail::residence::absent : detail::residence::reserved;
      return {};
    }
    if constexpr (Index == last) {
      return attempt::failed(had.error());
    } else {
      const bool can_be_had = had.code() == errc::out_of_bytes || had.code() == errc::table_full;
      if (!can_be_had || tier.room.granted_for(bytes) > most_room<Index>())
        return attempt::failed(had.error());
      const std::optional<slot_id> victim = tier.eviction.victim();
      const bool enough_leaves = leaving_[Index] >= bytes;
      if (!victim || enough_leaves) {
        if (const std::uint32_t on = transfer_touching(Index); on != none) return attempt::blocked(on);
        if (how == urgency::prefetch) return attempt::blocked(none);
        if (cancel_reservations()) continue;
        return attempt::failed(unable.why(had.error()));
      }
      const std::uint32_t slot = to_index(*victim);
      if (how == urgency::prefetch && chunks_[slot].copies[Index].awaited) return attempt::blocked(none);
      if (is_clean(chunks_[slot], Index)) {
        let_go<Index>(slot, how);
        continue;
      }
      const attempt left = begin_store<Index>(slot, true, how);
      if (left.how == attempt::kind::failed && unable.add(slot, left.why)) continue;
      if (!left.is_done()) return left;
    }
  }
}

/// Begins to copy a chunk's dirty bytes from tier Index to the one beneath.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
auto basic_tiered_buffer<Traits, Tiers...>::begin_store(std::uint32_t slot, bool then_drops, urgency how)
    -> attempt {
  const attempt ready = can_begin<Index>();
  if (!ready.is_done()) return ready;
  chunk_record& c = chunks_[slot];
  copy& above = c.copies[Index];
  copy& beneath = c.copies[Index + 1];
  // Between tiers further down: one transfer at a time.
  if (c.transfer != none) return attempt::blocked(c.transfer);
  if (beneath.granted == 0) {
    const attempt room = make_room<Index + 1>(beneath, tier_at<Index + 1>().place_bytes(c.bytes), how);
    if (!room.is_done()) return room;
    // Room may have come with a write-back that took the last transfer, or that was the chunk's own.
    const attempt still = c.transfer == none ? can_begin<Index>() : attempt::blocked(c.transfer);
    if (!still.is_done()) {
      if constexpr (Index + 1 != last) tier_at<Index + 1>().room.give_back(beneath);
      return still;
    }
  }
  if constexpr (Index + 1 == last) {
    if (const result<void> gone = unindex(slot); !gone) return attempt::failed(gone.error());
  }
  const std::uint32_t id = claim_transfer({.chunk = slot,
                                           .edge = static_cast<std::uint32_t>(Index),
                                           .stores = true,
                                           .then_drops = then_drops,
                                           .demotes = then_drops && is_clean(c, Index)});
  pin<Index>(slot);
  pin<Index + 1>(slot);
  if (Index + 1 != last && !beneath.is_valid()) beneath.at = detail::residence::arriving;
  if (then_drops) leaving_[Index] += above.granted;
  const auto began = clock_.now_ns();
  result<std::uint64_t> begun = std::uint64_t{0};
  try {
    begun = store_parts<Index>(id, slot, how);
  } catch (...) {
    static_cast<void>(finish<Index>(id, not_moved()));
    throw;
  }
  meter_.stalled(stall_cause::write_back, clock_.now_ns() - began);
  if (!begun) {
    static_cast<void>(finish<Index>(id, begun.error()));
    return refused(begun.error());
  }
  meter_.moved(Index, link_direction::offload, *begun);
  return {};
}

/// What a transfer that could not begin means: where a table is full that others under way will leave, to
/// wait for one of them.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
auto basic_tiered_buffer<Traits, Tiers...>::refused(const failure& why) const noexcept -> attempt {
  if (why.code == errc::table_full) {
    if (const std::uint32_t on = transfer_touching(tiers); on != none) return attempt::blocked(on);
  }
  return attempt::failed(why);
}

/// Ends a transfer: whatever it touched is at rest.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
result<void> basic_tiered_buffer<Traits, Tiers...>::finish(std::uint32_t id,
                                                           const result<void>& outcome) noexcept {
  const transfer done = transfers_[id];
  release_transfer(id);
  if (!done.stores) return finish_fetch<Index>(id, done, outcome);
  finish_store<Index>(id, done, outcome);
  return outcome;
}

/// Hands what has to go down to the edge; its bytes.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
result<std::uint64_t> basic_tiered_buffer<Traits, Tiers...>::store_parts(std::uint32_t id, std::uint32_t slot,
                                                                         urgency how) {
  const chunk_record& c = chunks_[slot];
  const copy& above = c.copies[Index];
  const copy& beneath = c.copies[Index + 1];
  auto& lower = tier_at<Index + 1>();
  dirty_ranges parts;
  auto source =
      tier_at<Index>().range(above, above.granted < beneath.granted ? above.granted : beneath.granted);
  if constexpr (encodes_below<Index>) {
    const std::uint32_t at = free_stage();
    transfers_[id].stage = at;
    stages_[at].user = id;
    const auto out = stage_bytes<Index>(at, lower.place_bytes(c.bytes));
    const result<std::uint64_t> encoded =
        lower.codec.encode(tier_at<Index>().range(above, c.bytes).span(), out);
    if (!encoded) return encoded.error();
    stages_[at].bytes = *encoded;
    source = tier_at<Index>().range(stages_[at].place, lower.rounded(*encoded));
    parts.add({0, source.bytes});
  } else if (beneath.is_valid() && !sums_below<Index>(above)) {
    parts = above.dirty.aligned(lower.granularity, source.bytes);
  } else {
    parts.add({0, source.bytes});
  }
  const result<void> begun =
      std::get<Index>(edges_).store(id, source, lower.range(beneath, source.bytes), parts.intervals(), how,
                                    sums_below<Index>(above) ? c.bytes : 0);
  if (!begun) return begun.error();
  return parts.bytes();
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
void basic_tiered_buffer<Traits, Tiers...>::finish_store(std::uint32_t id, const transfer& done,
                                                         const result<void>& outcome) noexcept {
  const std::uint32_t slot = done.chunk;
  chunk_record& c = chunks_[slot];
  copy& above = c.copies[Index];
  copy& beneath = c.copies[Index + 1];
  if (done.then_drops) leaving_[Index] -= above.granted;
  unpin<Index>(slot);
  unpin<Index + 1>(slot);
  if (outcome.code() == errc::completion_lost) {
    // The device may write to that place at any time to come.
    above.dirty.add(beneath.dirty);
    if constexpr (Index + 1 != last) {
      if (beneath.is_valid()) tier_at<Index + 1>().eviction.erase(slot_id{slot});
    }
    tier_at<Index + 1>().room.retire(beneath);
    if (done.demotes && above.pins == 0) drop_clean<Index>(slot);
    return;
  }
  if (!outcome) {
    // Above is still the newest, and dirty; beneath holds what it held, or parts of both.
    if (Index + 1 != last && !beneath.is_valid()) tier_at<Index + 1>().room.give_back(beneath);
    if (done.demotes && above.pins == 0) drop_clean<Index>(slot);
    return;
  }
  beneath.stored = c.bytes;
  if constexpr (encodes_below<Index>) beneath.stored = stages_[done.stage].bytes;
  if constexpr (detail::leaves_memory<space_type<Index + 1>>() && space_type<Index>::is_host_accessible) {
    if constexpr (encodes_below<Index>) {
      beneath.checksum = crc32c(0, stage_bytes<Index>(done.stage, beneath.stored));
    } else {
      beneath.checksum = crc32c(0, tier_at<Index>().range(above, c.bytes).span());
    }
    beneath.has_checksum = true;
  } else if constexpr (bounces_below<Index> && detail::leaves_memory<space_type<Index + 1>>()) {
    // What passes from one such tier to another keeps the checksum that it has.
    const std::optional<std::uint32_t> taken = std::get<Index>(edges_).checksum(id);
    beneath.checksum = taken.value_or(above.checksum);
    beneath.has_checksum = true;
  }
  if (beneath.is_valid()) {
    beneath.dirty.add(above.dirty);
  } else {
    beneath.dirty = above.dirty;
    become_valid<Index + 1>(slot);
    admit<Index + 1>(slot, passage::down);
  }
  above.dirty.clear();
  if constexpr (Index + 1 == last) {
    if (const result<void> kept = reindex(slot); !kept) note(kept.error());  // `persist` tries again
  }
  if (done.then_drops && above.pins == 0) {
    ++(done.demotes ? tier_at<Index>().demotions : tier_at<Index>().write_backs);
    drop<Index>(slot);
  }
  leave_when_passed<Index>(slot);
  if (is_due(c, Index + 1)) mark_due(slot);
}

/// Whether a transfer over edge Index can begin, or which one it must wait for.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
auto basic_tiered_buffer<Traits, Tiers...>::can_begin() noexcept -> attempt {
  if (free_transfer_count_ == 0) return attempt::blocked(transfer_touching(tiers));
  if constexpr (encodes_below<Index>) {
    if (free_stage() != none) return {};
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      if (stages_[i].user != none) return attempt::blocked(stages_[i].user);
    }
    return attempt::failed(
        {.code = errc::out_of_bytes, .wanted = stage_size(), .found = 0, .where = options_.name.c_str()});
  }
  return {};
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
std::uint32_t basic_tiered_buffer<Traits, Tiers...>::free_stage() noexcept {
  for (std::uint32_t i = 0; i < stages_.size(); ++i) {
    staging_slot& stage = stages_[i];
    if (stage.user != none) continue;
    // One whose place was retired gets another when there is room.
    if (stage.place.granted != 0 || tier_at<last - 1>().room.take(stage.place, stage_size())) return i;
  }
  return none;
}

/// Begins to copy a chunk to tier Index, where it has a place, from the one beneath.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
auto basic_tiered_buffer<Traits, Tiers...>::begin_fetch(std::uint32_t slot, urgency how) -> attempt {
  const attempt ready = can_begin<Index>();
  if (!ready.is_done()) return ready;
  chunk_record& c = chunks_[slot];
  if (c.transfer != none) return attempt::blocked(c.transfer);  // making room has moved it
  copy& above = c.copies[Index];
  copy& beneath = c.copies[Index + 1];
  auto& lower = tier_at<Index + 1>();
  const std::uint32_t id = claim_transfer(
      {.chunk = slot, .edge = static_cast<std::uint32_t>(Index), .in_advance = how == urgency::prefetch});
  pin<Index + 1>(slot);
  above.at = detail::residence::arriving;
  auto destination =
      tier_at<Index>().range(above, above.granted < beneath.granted ? above.granted : beneath.granted);
  if constexpr (encodes_below<Index>) {
    const std::uint32_t at = free_stage();
    transfers_[id].stage = at;
    stages_[at].user = id;
    destination = tier_at<Index>().range(stages_[at].place, lower.rounded(beneath.stored));
  }
  const auto began = clock_.now_ns();
  result<void> begun;
  try {
    begun = std::get<Index>(edges_).fetch(id, destination, lower.range(beneath, destination.bytes), how,
                                          beneath.has_checksum ? c.bytes : 0);
  } catch (...) {
    static_cast<void>(finish<Index>(id, not_moved()));
    throw;
  }
  meter_.stalled(how == urgency::prefetch ? stall_cause::prefetch_late : stall_cause::demand_fetch,
                 clock_.now_ns() - began);
  if (!begun) return refused(finish<Index>(id, begun).error());
  meter_.moved(Index, link_direction::onboard, destination.bytes);
  return attempt::blocked(id);
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
result<void> basic_tiered_buffer<Traits, Tiers...>::finish_fetch(std::uint32_t id, const transfer& done,
                                                                 result<void> outcome) noexcept {
  const std::uint32_t slot = done.chunk;
  chunk_record& c = chunks_[slot];
  copy& above = c.copies[Index];
  const copy& beneath = c.copies[Index + 1];
  unpin<Index + 1>(slot);
  if constexpr (space_type<Index>::is_host_accessible) {
    if (outcome) {
      const std::span<std::byte> into = tier_at<Index>().range(above, c.bytes).span();
      std::span<std::byte> came = into;
      if constexpr (encodes_below<Index>) came = stage_bytes<Index>(done.stage, beneath.stored);
      if constexpr (detail::leaves_memory<space_type<Index + 1>>()) {
        if (beneath.has_checksum) outcome = verify(slot, beneath, crc32c(0, came));
      }
      if constexpr (encodes_below<Index>) {
        const auto decoding = meter_.stalling(stall_cause::codec);
        if (outcome) outcome = tier_at<Index + 1>().codec.decode(came, into);
      }
    }
  }
  if constexpr (bounces_below<Index>) {
    if (const std::optional<std::uint32_t> came = std::get<Index>(edges_).checksum(id); outcome && came)
      outcome = verify(slot, beneath, *came);
  }
  auto& room = tier_at<Index>().room;
  if (outcome) {
    if constexpr (keeps_checksum<Index>) {
      above.checksum = beneath.checksum;
      above.has_checksum = beneath.has_checksum;
    }
    become_valid<Index>(slot);
    if constexpr (Index == 0) observer_.on_arrived(chunk_id{slot}, above.granted);
    above.awaited = Index == 0 && done.in_advance;
    admit<Index>(slot, passage::up);
    leave_when_passed<Index + 1>(slot);
  } else if (outcome.code() != errc::completion_lost) {
    room.give_back(above);
  } else if constexpr (encodes_below<Index>) {
    // The device may write to the staging memory at any time to come.
    room.retire(stages_[done.stage].place);
    room.give_back(above);
  } else {
    room.retire(above);
  }
  return outcome;
}

/// Whether what came back is what left.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
result<void> basic_tiered_buffer<Traits, Tiers...>::verify(std::uint32_t slot, const copy& beneath,
                                                           std::uint32_t found) const noexcept {
  if (found == beneath.checksum) return {};
  return at_chunk(errc::checksum_differs, slot, beneath.checksum, found);
}

/// Takes note of a transfer's end. Waits for it where it has not ended.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
result<void> basic_tiered_buffer<Traits, Tiers...>::complete(std::uint32_t id) {
  result<void> outcome;
  const transfer done = transfers_[id];
  with_index<last>(done.edge, [&]<class Index>(Index) {
    result<void> moved;
    try {
      moved = std::get<Index::value>(edges_).settled(id);
    } catch (...) {
      static_cast<void>(finish<Index::value>(id, not_moved()));
      throw;
    }
    outcome = finish<Index::value>(id, moved);
  });
  // What did not come in advance is fetched again when somebody asks for it, not before.
  if (!outcome && !done.stores) unqueue_prefetch(done.chunk);
  return outcome;
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
bool basic_tiered_buffer<Traits, Tiers...>::is_ready(std::uint32_t id) {
  bool ready = false;
  with_index<last>(transfers_[id].edge,
                   [&]<class Index>(Index) { ready = std::get<Index::value>(edges_).ready(id); });
  return ready;
}

/// Waits for a transfer as long as patience lasts, then takes note of its end.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
result<void> basic_tiered_buffer<Traits, Tiers...>::wait_for(std::uint32_t id, patience wait,
                                                             std::uint64_t began_ns) {
  const transfer& waited = transfers_[id];
  with_index<last>(waited.edge, [&]<class Index>(Index) { std::get<Index::value>(edges_).hurry(id); });
  const stall_cause cause = waited.stores            ? stall_cause::write_back
                            : waited.found_under_way ? stall_cause::prefetch_late
                                                     : stall_cause::demand_fetch;
  const auto stalled = meter_.stalling(cause);
  if (wait.ns != wait_complete.ns) {
    // A clock that is not the machine's may be one that nobody moves meanwhile: sleeping counts, too.
    constexpr std::uint64_t nap_ns = 20'000;
    constexpr std::uint64_t least_sleep_ns = 1'000'000;
    for (std::uint64_t slept_ns = 0; !is_ready(id); slept_ns += nap_ns) {
      const std::uint64_t waited_ns = clock_.now_ns() - began_ns;
      if (waited_ns >= wait.ns || (slept_ns >= wait.ns && slept_ns >= least_sleep_ns)) {
        return at_chunk(errc::timed_out, waited.chunk, chunks_[waited.chunk].bytes, waited_ns);
      }
      with_index<last>(waited.edge, [&]<class Index>(Index) { std::get<Index::value>(edges_).poll(); });
      const timespec little{0, nap_ns};
      ::nanosleep(&little, nullptr);
    }
  }
  return complete(id);
}

/// A transfer under way to or from `tier`, of any tier for `tiers`: one that leaves it sooner than another.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
std::uint32_t basic_tiered_buffer<Traits, Tiers...>::transfer_touching(std::size_t tier) const noexcept {
  std::uint32_t found = none;
  for (std::uint32_t id = 0; id < transfers_.size(); ++id) {
    const transfer& t = transfers_[id];
    if (t.chunk == none) continue;
    if (tier != tiers && t.edge != tier && t.edge + 1 != tier) continue;
    if (t.then_drops && t.edge == tier) return id;
    found = id;
  }
  return found;
}

/// Gives back places that prefetches keep and nothing is on its way to. Whether there were any.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
bool basic_tiered_buffer<Traits, Tiers...>::cancel_reservations() noexcept {
  bool any = false;
  for (std::uint32_t i = 0; i < wanted_count_; ++i) {
    chunk_record& c = chunks_[wanted_[i]];
    for (std::size_t tier = 0; tier < last; ++tier) {
      if (c.copies[tier].at != detail::residence::reserved) continue;
      with_index<last>(
          tier, [&]<class Index>(Index) { tier_at<Index::value>().room.give_back(c.copies[Index::value]); });
      any = true;
    }
  }
  return any;
}

}  // namespace llmmem::inline v0
