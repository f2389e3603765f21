/// @file
/// How chunks of a `tiered_buffer` move: room, hops, what arrives, what leaves.
#pragma once

#include <llmmem/tiered_buffer.hpp>
#include <llmmem/transfer/crc32c.hpp>

#include <time.h>

namespace llmmem::inline v0 {

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
std::uint32_t basic_tiered_buffer<Traits, Tiers...>::claim_transfer(std::uint32_t slot, std::size_t edge,
                                                                    bool stores, bool then_drops) noexcept {
  const std::uint32_t id = free_transfers_[--free_transfer_count_];
  transfers_[id] = {slot, static_cast<std::uint32_t>(edge), stores, then_drops, false, none};
  chunks_[slot].transfer = id;
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
template <std::size_t I>
void basic_tiered_buffer<Traits, Tiers...>::pin(std::uint32_t slot) noexcept {
  copy& held = chunks_[slot].copies[I];
  if constexpr (I != last) {
    if (held.pins == 0 && held.is_valid()) tier_at<I>().eviction.pin(slot_id{slot});
  }
  ++held.pins;
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t I>
void basic_tiered_buffer<Traits, Tiers...>::unpin(std::uint32_t slot) noexcept {
  copy& held = chunks_[slot].copies[I];
  --held.pins;
  if constexpr (I != last) {
    if (held.pins == 0 && held.is_valid()) tier_at<I>().eviction.unpin(slot_id{slot});
  }
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t I>
void basic_tiered_buffer<Traits, Tiers...>::become_valid(std::uint32_t slot) noexcept {
  copy& held = chunks_[slot].copies[I];
  held.at = detail::residence::valid;
  if constexpr (I != last) {
    tier_at<I>().eviction.insert(slot_id{slot}, access_hint{.next_use = chunks_[slot].next_use});
    if (held.pins == 0) tier_at<I>().eviction.unpin(slot_id{slot});
  }
}

/// Frees a valid copy. @pre it is not pinned, and clean or of no use.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t I>
void basic_tiered_buffer<Traits, Tiers...>::drop(std::uint32_t slot) noexcept {
  static_assert(I != last, "in the last tier every chunk keeps its place");
  auto& tier = tier_at<I>();
  detail::evict(tier.eviction, slot_id{slot});
  tier.room.give_back(chunks_[slot].copies[I]);
}

/// Gives `into` a place in tier I, of which it drops what is clean and begins to write back what is not.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t I>
auto basic_tiered_buffer<Traits, Tiers...>::make_room(copy& into, std::uint64_t bytes, urgency how)
    -> attempt {
  auto& tier = tier_at<I>();
  for (;;) {
    const result<void> had = tier.room.take(into, bytes);
    if (had) {
      into.at = detail::residence::reserved;
      return {};
    }
    if constexpr (I == last) {
      return attempt::failed(had.error());
    } else {
      if (had.code() != errc::out_of_bytes || tier.room.granted_for(bytes) > tier.room.stats().capacity) {
        return attempt::failed(had.error());
      }
      const std::optional<slot_id> victim = tier.eviction.victim();
      const bool enough_leaves = leaving_[I] >= bytes;
      if (!victim || enough_leaves) {
        if (const std::uint32_t on = transfer_touching(I); on != none) return attempt::blocked(on);
        if (cancel_reservations()) continue;
        return attempt::failed(had.error());
      }
      const std::uint32_t slot = to_index(*victim);
      if (is_clean(chunks_[slot], I)) {
        ++tier.drops;
        drop<I>(slot);
        continue;
      }
      const attempt left = begin_store<I>(slot, true, how);
      if (!left.is_done()) return left;
    }
  }
}

/// Begins to copy a chunk's dirty bytes from tier I to the one beneath.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t I>
auto basic_tiered_buffer<Traits, Tiers...>::begin_store(std::uint32_t slot, bool then_drops, urgency how)
    -> attempt {
  chunk_record& c = chunks_[slot];
  copy& above = c.copies[I];
  copy& beneath = c.copies[I + 1];
  auto& lower = tier_at<I + 1>();
  // Between tiers further down: one transfer at a time.
  if (c.transfer != none) return attempt::blocked(c.transfer);
  if (beneath.granted == 0) {
    pin<I>(slot);  // making room beneath may look for victims here
    const attempt room = make_room<I + 1>(beneath, lower.place_bytes(c.bytes), how);
    unpin<I>(slot);
    if (!room.is_done()) return room;
  }
  const attempt ready = can_begin<I>();
  if (!ready.is_done()) return ready;
  const std::uint32_t id = claim_transfer(slot, I, true, then_drops);
  pin<I>(slot);
  pin<I + 1>(slot);
  if (then_drops) leaving_[I] += above.granted;
  const auto began = clock_.now_ns();
  const result<std::uint64_t> begun = store_parts<I>(id, slot, how);
  meter_.stalled(stall_cause::write_back, clock_.now_ns() - began);
  if (!begun) {
    release_transfer(id);
    finish_store<I>(slot, none, then_drops, begun.error());
    return attempt::failed(begun.error());
  }
  meter_.moved(I, link_direction::offload, *begun);
  return {};
}

/// Hands what has to go down to the edge; its bytes.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t I>
result<std::uint64_t> basic_tiered_buffer<Traits, Tiers...>::store_parts(std::uint32_t id, std::uint32_t slot,
                                                                         urgency how) {
  const chunk_record& c = chunks_[slot];
  const copy& above = c.copies[I];
  const copy& beneath = c.copies[I + 1];
  auto& lower = tier_at<I + 1>();
  dirty_ranges parts;
  auto source = tier_at<I>().range(above, above.granted < beneath.granted ? above.granted : beneath.granted);
  if constexpr (encodes_below<I>) {
    const std::uint32_t at = free_stage();
    transfers_[id].stage = at;
    stages_[at].user = id;
    const auto out = stage_bytes<I>(at, lower.place_bytes(c.bytes));
    const result<std::uint64_t> encoded = lower.codec.encode(tier_at<I>().range(above, c.bytes).span(), out);
    if (!encoded) return encoded.error();
    stages_[at].bytes = *encoded;
    source = tier_at<I>().range(stages_[at].place, lower.rounded(*encoded));
    parts.add({0, source.bytes});
  } else if (beneath.is_valid()) {
    parts = above.dirty.aligned(lower.granularity, source.bytes);
  } else {
    parts.add({0, source.bytes});
  }
  const result<void> begun =
      std::get<I>(edges_).store(id, source, lower.range(beneath, source.bytes), parts.intervals(), how);
  if (!begun) return begun.error();
  return parts.bytes();
}

/// @param stage  where the chunk was encoded, if it was.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t I>
void basic_tiered_buffer<Traits, Tiers...>::finish_store(std::uint32_t slot, std::uint32_t stage, bool drops,
                                                         const result<void>& outcome) noexcept {
  chunk_record& c = chunks_[slot];
  copy& above = c.copies[I];
  copy& beneath = c.copies[I + 1];
  if (drops) leaving_[I] -= above.granted;
  unpin<I>(slot);
  unpin<I + 1>(slot);
  if (!outcome) {
    // Above is still the newest, and dirty; beneath holds what it held, or parts of both.
    if (I + 1 != last && !beneath.is_valid()) tier_at<I + 1>().room.give_back(beneath);
    return;
  }
  beneath.stored = c.bytes;
  if constexpr (encodes_below<I>) beneath.stored = stages_[stage].bytes;
  if constexpr (detail::leaves_memory<space_type<I + 1>>() && space_type<I>::is_host_accessible) {
    if constexpr (encodes_below<I>) {
      beneath.checksum = crc32c(0, stage_bytes<I>(stage, beneath.stored));
    } else {
      beneath.checksum = crc32c(0, tier_at<I>().range(above, c.bytes).span());
    }
    beneath.has_checksum = true;
  }
  if (beneath.is_valid()) {
    beneath.dirty.add(above.dirty);
  } else {
    beneath.dirty = above.dirty;
    become_valid<I + 1>(slot);
  }
  above.dirty.clear();
  if (drops && above.pins == 0) {
    ++tier_at<I>().write_backs;
    drop<I>(slot);
  }
}

/// Whether a transfer over edge I can begin, or which one it must wait for.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t I>
auto basic_tiered_buffer<Traits, Tiers...>::can_begin() const noexcept -> attempt {
  if (free_transfer_count_ == 0) return attempt::blocked(transfer_touching(tiers));
  if constexpr (encodes_below<I>) {
    if (free_stage() == none) return attempt::blocked(stages_[0].user);
  }
  return {};
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
std::uint32_t basic_tiered_buffer<Traits, Tiers...>::free_stage() const noexcept {
  for (std::uint32_t i = 0; i < stages_.size(); ++i) {
    if (stages_[i].user == none) return i;
  }
  return none;
}

/// Begins to copy a chunk to tier I, where it has a place, from the one beneath.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t I>
auto basic_tiered_buffer<Traits, Tiers...>::begin_fetch(std::uint32_t slot, urgency how) -> attempt {
  const attempt ready = can_begin<I>();
  if (!ready.is_done()) return ready;
  chunk_record& c = chunks_[slot];
  copy& above = c.copies[I];
  copy& beneath = c.copies[I + 1];
  auto& lower = tier_at<I + 1>();
  const std::uint32_t id = claim_transfer(slot, I, false, false);
  pin<I + 1>(slot);
  above.at = detail::residence::arriving;
  auto destination =
      tier_at<I>().range(above, above.granted < beneath.granted ? above.granted : beneath.granted);
  if constexpr (encodes_below<I>) {
    const std::uint32_t at = free_stage();
    transfers_[id].stage = at;
    stages_[at].user = id;
    destination = tier_at<I>().range(stages_[at].place, lower.rounded(beneath.stored));
  }
  const auto began = clock_.now_ns();
  const result<void> begun =
      std::get<I>(edges_).fetch(id, destination, lower.range(beneath, destination.bytes), how);
  meter_.stalled(stall_cause::demand_fetch, clock_.now_ns() - began);
  if (!begun) {
    release_transfer(id);
    return attempt::failed(finish_fetch<I>(slot, none, begun).error());
  }
  meter_.moved(I, link_direction::onboard, destination.bytes);
  return attempt::blocked(id);
}

/// @param stage  where its encoded form lies, if it has one.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t I>
result<void> basic_tiered_buffer<Traits, Tiers...>::finish_fetch(std::uint32_t slot, std::uint32_t stage,
                                                                 result<void> outcome) noexcept {
  chunk_record& c = chunks_[slot];
  copy& above = c.copies[I];
  const copy& beneath = c.copies[I + 1];
  unpin<I + 1>(slot);
  if constexpr (space_type<I>::is_host_accessible) {
    if (outcome) {
      const std::span<std::byte> into = tier_at<I>().range(above, c.bytes).span();
      std::span<std::byte> came = into;
      if constexpr (encodes_below<I>) came = stage_bytes<I>(stage, beneath.stored);
      if constexpr (detail::leaves_memory<space_type<I + 1>>()) outcome = verify(slot, beneath, came);
      if constexpr (encodes_below<I>) {
        const auto decoding = meter_.stalling(stall_cause::codec);
        if (outcome) outcome = tier_at<I + 1>().codec.decode(came, into);
      }
    }
  }
  if (outcome) {
    become_valid<I>(slot);
  } else {
    tier_at<I>().room.give_back(above);
  }
  return outcome;
}

/// Whether what came back is what left.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
result<void> basic_tiered_buffer<Traits, Tiers...>::verify(std::uint32_t slot, const copy& beneath,
                                                           std::span<const std::byte> came) const noexcept {
  if (!beneath.has_checksum) return {};
  const std::uint32_t found = crc32c(0, came);
  if (found == beneath.checksum) return {};
  return at_chunk(errc::checksum_differs, slot, beneath.checksum, found);
}

/// Takes note of a transfer's end. Waits for it where it has not ended.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
result<void> basic_tiered_buffer<Traits, Tiers...>::complete(std::uint32_t id) {
  const transfer done = transfers_[id];
  result<void> outcome;
  with_index<last>(done.edge, [&]<class I>(I) {
    const result<void> moved = std::get<I::value>(edges_).settled(id);
    release_transfer(id);
    if (done.stores) {
      finish_store<I::value>(done.chunk, done.stage, done.then_drops, moved);
      outcome = moved;
    } else {
      outcome = finish_fetch<I::value>(done.chunk, done.stage, moved);
    }
  });
  return outcome;
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
bool basic_tiered_buffer<Traits, Tiers...>::is_ready(std::uint32_t id) {
  bool ready = false;
  with_index<last>(transfers_[id].edge, [&]<class I>(I) { ready = std::get<I::value>(edges_).ready(id); });
  return ready;
}

/// Waits for a transfer as long as patience lasts, then takes note of its end.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
result<void> basic_tiered_buffer<Traits, Tiers...>::wait_for(std::uint32_t id, patience wait,
                                                             std::uint64_t began_ns) {
  const transfer& waited = transfers_[id];
  with_index<last>(waited.edge, [&]<class I>(I) { std::get<I::value>(edges_).hurry(id); });
  const stall_cause cause = waited.stores            ? stall_cause::write_back
                            : waited.found_under_way ? stall_cause::prefetch_late
                                                     : stall_cause::demand_fetch;
  const auto stalled = meter_.stalling(cause);
  if (wait.ns != wait_complete.ns) {
    while (!is_ready(id)) {
      const std::uint64_t waited_ns = clock_.now_ns() - began_ns;
      if (waited_ns >= wait.ns) {
        return at_chunk(errc::timed_out, waited.chunk, chunks_[waited.chunk].bytes, waited_ns);
      }
      with_index<last>(waited.edge, [&]<class I>(I) { std::get<I::value>(edges_).poll(); });
      const timespec little{0, 20'000};
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
      with_index<last>(tier, [&]<class I>(I) { tier_at<I::value>().room.give_back(c.copies[I::value]); });
      any = true;
    }
  }
  return any;
}

/// Brings a chunk as far up as it gets without waiting.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
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
  const std::size_t source = newest(c);
  if (source == tiers) return attempt::failed(at_chunk(errc::no_contents, slot));
  attempt hop;
  with_index<last>(source - 1, [&]<class I>(I) {
    copy& to = c.copies[I::value];
    if (to.at == detail::residence::absent) {
      // Not to be dropped while room is made above it.
      pin<I::value + 1>(slot);
      hop = make_room<I::value>(to, c.bytes, how);
      unpin<I::value + 1>(slot);
    }
    if (hop.is_done()) hop = begin_fetch<I::value>(slot, how);
  });
  return hop;
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
result<void> basic_tiered_buffer<Traits, Tiers...>::make_resident(std::uint32_t slot, bool needs_contents,
                                                                  patience wait) {
  const std::uint64_t began = clock_.now_ns();
  const auto give_up = [&](const failure& why) -> result<void> {
    copy& top = chunks_[slot].copies[0];
    if (top.at == detail::residence::reserved && !chunks_[slot].wanted) tier_at<0>().room.give_back(top);
    return why;
  };
  for (;;) {
    const attempt tried = advance(slot, needs_contents, urgency::demand);
    if (tried.is_done()) return {};
    if (tried.how == attempt::kind::failed) return give_up(tried.why);
    const bool is_own = transfers_[tried.on].chunk == slot;
    const bool stores = transfers_[tried.on].stores;
    const result<void> waited = wait_for(tried.on, wait, began);
    if (waited) continue;
    if (waited.code() == errc::timed_out) {
      if (needs_contents && !chunks_[slot].wanted) {
        chunks_[slot].wanted = true;
        wanted_[wanted_count_++] = slot;
      }
      const failure& late = waited.error();
      return at_chunk(errc::timed_out, slot, chunks_[slot].bytes, late.found);
    }
    if (is_own && stores) {
      // It stays dirty, and where it is: nothing that this lease needs.
      note(waited.error());
      continue;
    }
    // A victim that could not be written back stays: there is no room for this chunk.
    return give_up(waited.error());
  }
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
result<void> basic_tiered_buffer<Traits, Tiers...>::prefetch(chunk_handle chunk) {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  chunk_record& c = chunks_[chunk.slot];
  if (newest(c) == tiers) return at_chunk(errc::no_contents, chunk.slot);
  if (!c.copies[0].is_valid() && !c.wanted) {
    c.wanted = true;
    wanted_[wanted_count_++] = chunk.slot;
  }
  progress();
  return {};
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
void basic_tiered_buffer<Traits, Tiers...>::progress() {
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (std::get<I>(edges_).poll(), ...);
  }(std::make_index_sequence<last>{});
  for (std::uint32_t id = 0; id < transfers_.size(); ++id) {
    if (transfers_[id].chunk == none || !is_ready(id)) continue;
    if (const result<void> outcome = complete(id); !outcome) note(outcome.error());
  }
  std::uint32_t kept = 0;
  const std::uint32_t due = std::exchange(due_count_, 0);
  for (std::uint32_t i = 0; i < due; ++i) {
    const std::uint32_t slot = due_[i];
    chunk_record& c = chunks_[slot];
    const bool later = c.leases != 0 || c.transfer != none;
    if (later || (c.copies[0].is_valid() && !is_clean(c, 0) &&
                  begin_store<0>(slot, false, urgency::write_back).how == attempt::kind::blocked)) {
      due_[kept++] = slot;
    } else {
      c.store_due = false;
    }
  }
  due_count_ = kept;
  kept = 0;
  for (std::uint32_t i = 0; i < wanted_count_; ++i) {
    const std::uint32_t slot = wanted_[i];
    const attempt tried = advance(slot, true, urgency::prefetch);
    if (tried.how == attempt::kind::blocked) {
      wanted_[kept++] = slot;
    } else {
      chunks_[slot].wanted = false;
      if (tried.how == attempt::kind::failed) note(tried.why);
    }
  }
  wanted_count_ = kept;
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
result<void> basic_tiered_buffer<Traits, Tiers...>::evict(chunk_handle chunk) {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  chunk_record& c = chunks_[chunk.slot];
  if (c.leases != 0) return at_chunk(errc::chunk_leased, chunk.slot, 0, c.leases);
  if (const result<void> quiet = await_quiet(chunk.slot); !quiet) return quiet;
  for (;;) {
    if (!c.copies[0].is_valid()) return {};
    if (is_clean(c, 0)) {
      ++tier_at<0>().drops;
      drop<0>(chunk.slot);
      return {};
    }
    const attempt left = begin_store<0>(chunk.slot, true, urgency::write_back);
    if (left.is_done()) return {};
    if (left.how == attempt::kind::failed) return left.why;
    if (const result<void> waited = wait_for(left.on, wait_complete, clock_.now_ns()); !waited) return waited;
  }
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
result<void> basic_tiered_buffer<Traits, Tiers...>::flush(chunk_handle chunk) {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = chunk.slot;
  chunk_record& c = chunks_[slot];
  if (c.writing) return at_chunk(errc::chunk_leased, slot, 0, c.leases);
  for (std::size_t i = 0; i < last;) {
    if (const result<void> quiet = await_quiet(slot); !quiet) return quiet;
    if (!c.copies[i].is_valid() || is_clean(c, i)) {
      ++i;
      continue;
    }
    attempt left;
    with_index<last>(i, [&]<class I>(I) { left = begin_store<I::value>(slot, false, urgency::demand); });
    if (left.how == attempt::kind::failed) return left.why;
    if (left.how == attempt::kind::blocked) {
      if (const result<void> waited = wait_for(left.on, wait_complete, clock_.now_ns()); !waited)
        return waited;
    }
  }
  return {};
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
result<void> basic_tiered_buffer<Traits, Tiers...>::flush() {
  result<void> first;
  for (std::uint32_t slot = 0; slot < chunks_.touched(); ++slot) {
    if (!chunks_.is_live(slot)) continue;
    if (const result<void> one = flush(chunks_.handle(slot)); !one && first) first = one;
  }
  return first;
}

}  // namespace llmmem::inline v0
