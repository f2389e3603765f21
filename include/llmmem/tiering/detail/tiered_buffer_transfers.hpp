/// @file
/// Transfers of a `tiered_buffer` over one edge: how they begin, are waited for, and end.
#pragma once

#include <llmmem/hash/crc32c.hpp>
#include <llmmem/hash/errors.hpp>
#include <llmmem/tiering/errors.hpp>
#include <llmmem/tiering/tiered_buffer.hpp>
#include <llmmem/transfer/errors.hpp>

#include <time.h>

namespace llmmem {
inline namespace v0 {

/// What becomes of bytes between tier Index and the one beneath.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
struct basic_tiered_buffer<Traits, Tiers...>::below {
  /// Whether they change their form.
  static constexpr bool encodes = basic_tiered_buffer::encodes && Index + 1 == last;
  /// Whether they go through a ring.
  static constexpr bool bounces = edges::template edge<Index>::bounces;
  static constexpr bool leaves_memory = detail::leaves_memory<space_type<Index + 1>>();
  /// Whether a copy above has a checksum where what it came from had one: no lease changes it there.
  static constexpr bool keeps_checksum = Index != 0 && detail::leaves_memory<space_type<Index>>();
  /// Whether what goes down is summed in the ring, for which all of it has to go.
  [[nodiscard]] static constexpr bool sums(const copy& above) noexcept {
    return bounces && leaves_memory && !(keeps_checksum && above.has_checksum);
  }
};

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

/// The outcome of a transfer whose space threw.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
failure basic_tiered_buffer<Traits, Tiers...>::not_moved() const noexcept {
  return {.code = errc::dependency_failed, .where = options_.name.c_str()};
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
  if constexpr (below<Index>::encodes) {
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
  } else if (beneath.is_valid() && !below<Index>::sums(above)) {
    parts = above.dirty.aligned(lower.granularity, source.bytes);
  } else {
    parts.add({0, source.bytes});
  }
  const result<void> begun =
      std::get<Index>(edges_).store(id, source, lower.range(beneath, source.bytes), parts.intervals(), how,
                                    below<Index>::sums(above) ? c.bytes : 0);
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
  if constexpr (below<Index>::encodes) beneath.stored = stages_[done.stage].bytes;
  if constexpr (below<Index>::leaves_memory && space_type<Index>::is_host_accessible) {
    if constexpr (below<Index>::encodes) {
      beneath.checksum = crc32c(0, stage_bytes<Index>(done.stage, beneath.stored));
    } else {
      beneath.checksum = crc32c(0, tier_at<Index>().range(above, c.bytes).span());
    }
    beneath.has_checksum = true;
  } else if constexpr (below<Index>::bounces && below<Index>::leaves_memory) {
    // What passes from one such tier to another keeps the checksum that it has.
    const std::optional<std::uint32_t> taken = std::get<Index>(edges_).checksum(id);
    beneath.checksum = taken.value_or(above.checksum);
    beneath.has_checksum = true;
  } else if constexpr (below<Index>::leaves_memory) {
    beneath.has_checksum = false;  // it went straight: what an earlier copy had is of other bytes
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
  if constexpr (below<Index>::encodes) {
    if (free_stage() != none) return {};
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      if (stages_[i].user != none) return attempt::blocked(stages_[i].user);
    }
    return attempt::failed(
        {.code = errc::out_of_bytes, .wanted = stage_size(), .found = 0, .where = options_.name.c_str()});
  }
  return {};
}

/// Bytes of a staging slot: the longest encoded chunk, in whole units of the last tier.
template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
std::uint64_t basic_tiered_buffer<Traits, Tiers...>::stage_size() const noexcept {
  return tier_at<last>().rounded(tier_at<last>().place_bytes(options_.largest_chunk_bytes));
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
std::uint64_t basic_tiered_buffer<Traits, Tiers...>::placed_stages() const noexcept {
  std::uint64_t placed = 0;
  for (std::size_t i = 0; i < stages_.size(); ++i)
    placed += stages_[i].place.granted != 0 ? 1U : 0U;
  return placed;
}

template <class Traits, class... Tiers>
  requires(sizeof...(Tiers) >= 2)
template <std::size_t Index>
std::span<std::byte> basic_tiered_buffer<Traits, Tiers...>::stage_bytes(std::uint32_t stage,
                                                                        std::uint64_t bytes) noexcept {
  return tier_at<Index>().range(stages_[stage].place, bytes).span();
}

/// A free staging slot, or `none`.
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
  if constexpr (below<Index>::encodes) {
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
      if constexpr (below<Index>::encodes) came = stage_bytes<Index>(done.stage, beneath.stored);
      if constexpr (below<Index>::leaves_memory) {
        if (beneath.has_checksum) outcome = verify(slot, beneath, crc32c(0, came));
      }
      if constexpr (below<Index>::encodes) {
        const auto decoding = meter_.stalling(stall_cause::codec);
        if (outcome) outcome = tier_at<Index + 1>().codec.decode(came, into);
      }
    }
  }
  if constexpr (below<Index>::bounces) {
    if (const std::optional<std::uint32_t> came = std::get<Index>(edges_).checksum(id); outcome && came)
      outcome = verify(slot, beneath, *came);
  }
  auto& room = tier_at<Index>().room;
  if (outcome) {
    if constexpr (below<Index>::keeps_checksum) {
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
  } else if constexpr (below<Index>::encodes) {
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

}  // namespace v0
}  // namespace llmmem
