/// @file
/// Chunks of a `tiered_buffer`: how they are made, resized, discarded and removed.
#pragma once

#include <llmmem/space/errors.hpp>
#include <llmmem/tiering/errors.hpp>
#include <llmmem/tiering/tiered_buffer.hpp>
#include <llmmem/transfer/errors.hpp>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// How many bytes tier 0 lacks to hold the largest set of leases.
inline void check_largest_lease(const std::string& name, std::uint64_t capacity, std::uint64_t largest) {
  if (largest <= capacity) return;
  throw out_of_memory(name + ": tier 0 holds " + std::to_string(capacity) +
                      " bytes, the largest set of leases " + std::to_string(largest) +
                      "; give it at least as many");
}

[[nodiscard]] inline tiered_options checked(tiered_options options, bool encodes) {
  const auto refuse = [&](const char* what) {
    throw argument_error(options.name + ": " + what + " is 0; it must be at least 1");
  };
  if (options.max_chunks == 0) refuse("max_chunks");
  if (options.max_transfers == 0) refuse("max_transfers");
  if (encodes && options.largest_chunk_bytes == 0) refuse("largest_chunk_bytes");
  if (encodes && options.staging_slots == 0) refuse("staging_slots");
  return options;
}

}  // namespace detail

template <class Traits, class... Tiers>
basic_tiered_buffer<Traits, Tiers...>::basic_tiered_buffer(
    typename Traits::clock clock, observer_type observer, tiered_options options,
    const tier_place<typename Tiers::space_type>&... places)
    : options_(detail::checked(std::move(options), encodes)),
      meter_(clock),
      clock_(clock),
      observer_(std::move(observer)),
      tiers_([&]<std::size_t... Index>(std::index_sequence<Index...>) {
        return std::tuple<typename detail::tier_state<Tiers>::setup...>{
            {places, Index, options_.name, options_.max_chunks, options_.largest_chunk_bytes,
             encodes ? options_.staging_slots : 0, options_.metadata}...};
      }(std::index_sequence_for<Tiers...>{})),
      edges_([&]<std::size_t... Index>(std::index_sequence<Index...>) {
        using setups = typename edges::setup;
        return setups(typename edges::template edge<Index>::setup{
            *tier_at<Index>().space, *tier_at<Index + 1>().space, options_.max_transfers,
            options_.bounce_bytes, options_.bounce_slot_bytes,
            options_.name + ": ring beneath tier " + std::to_string(Index), options_.metadata}...);
      }(std::make_index_sequence<tiers - 1>{})),
      names_(options_.max_chunks, options_.metadata, "tiered_buffer: names"),
      keys_(options_.max_chunks, options_.metadata),
      chunks_(options_.max_chunks, options_.metadata, "tiered_buffer: chunks"),
      transfers_(options_.max_transfers, transfer{}, options_.metadata, "tiered_buffer: transfers"),
      free_transfers_(options_.max_transfers, options_.metadata, "tiered_buffer: free transfers"),
      free_transfer_count_(options_.max_transfers),
      stages_(encodes ? options_.staging_slots : 0, staging_slot{}, options_.metadata,
              "tiered_buffer: staging"),
      wanted_(options_.max_chunks, options_.metadata, "tiered_buffer: prefetches"),
      due_(options_.max_chunks, options_.metadata, "tiered_buffer: writes through") {
  for (std::uint32_t i = 0; i < options_.max_transfers; ++i)
    free_transfers_[i] = options_.max_transfers - 1 - i;
  const detail::room_stats top = tier_at<0>().room.stats();
  const std::uint64_t staging =
      encodes ? options_.staging_slots * tier_at<last - 1>().room.granted_for(stage_size()) : 0;
  if (last != 1 || staging <= top.capacity) {
    detail::check_largest_lease(options_.name, top.capacity - (last == 1 ? staging : 0),
                                options_.largest_lease_bytes);
  }
  try {
    for (std::size_t i = 0; i < stages_.size(); ++i)
      tier_at<last - 1>().room.take(stages_[i].place, stage_size()).value();
    adopt_kept();
  } catch (...) {
    release_places();
    throw;
  }
}

template <class Traits, class... Tiers>
basic_tiered_buffer<Traits, Tiers...>::~basic_tiered_buffer() {
  for (std::uint32_t id = 0; id < transfers_.size(); ++id) {
    if (transfers_[id].chunk == none) continue;
    try {
      static_cast<void>(complete(id));
    } catch (...) {
      // Nobody is left to be told.
    }
  }
  release_places();
}

/// Gives back the places in spaces that gave a range for each.
template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::release_places() noexcept {
  const auto release = [&]<std::size_t Index>(std::integral_constant<std::size_t, Index>) {
    if constexpr (detail::never_fragments<space_type<Index>>()) {
      auto& room = tier_at<Index>().room;
      for (std::uint32_t slot = 0; slot < chunks_.touched(); ++slot) {
        if (chunks_.is_live(slot) && chunks_[slot].copies[Index].granted != 0)
          room.give_back(chunks_[slot].copies[Index]);
      }
      if constexpr (Index + 1 == last) {
        for (std::size_t i = 0; i < stages_.size(); ++i) {
          if (stages_[i].place.granted != 0) room.give_back(stages_[i].place);
        }
      }
    }
  };
  [&]<std::size_t... Index>(std::index_sequence<Index...>) {
    (release(std::integral_constant<std::size_t, Index>{}), ...);
  }(std::make_index_sequence<tiers>{});
}

template <class Traits, class... Tiers>
failure basic_tiered_buffer<Traits, Tiers...>::check(chunk_handle chunk) const noexcept {
  return names_.check(chunk, options_.name.c_str());
}

/// What is wrong with a chunk, by one of its names.
template <class Traits, class... Tiers>
failure basic_tiered_buffer<Traits, Tiers...>::at_chunk(error_code code, std::uint32_t slot,
                                                        std::uint64_t wanted,
                                                        std::uint64_t found) const noexcept {
  return {code, chunks_[slot].name, wanted, found, options_.name.c_str()};
}

template <class Traits, class... Tiers>
failure basic_tiered_buffer<Traits, Tiers...>::no_more_chunks() const noexcept {
  return {errc::table_full, static_cast<std::uint32_t>(full_table::chunks), 1, 0, options_.name.c_str()};
}

/// The record of a chunk, which texts then call by that chunk. @pre `check` found nothing wrong.
template <class Traits, class... Tiers>
inline std::uint32_t basic_tiered_buffer<Traits, Tiers...>::record_of(chunk_handle chunk) noexcept {
  const std::uint32_t slot = names_[chunk.slot].record;
  chunks_[slot].name = chunk.slot;
  return slot;
}

/// Calls `f` with tier `i` as a constant, or with edge `i`.
template <class Traits, class... Tiers>
template <std::size_t Count, class F>
inline void basic_tiered_buffer<Traits, Tiers...>::with_index(std::size_t i, F&& f) {
  [&]<std::size_t... Index>(std::index_sequence<Index...>) {
    (static_cast<void>(i == Index ? (f(std::integral_constant<std::size_t, Index>{}), 0) : 0), ...);
  }(std::make_index_sequence<Count>{});
}

/// A failure that nobody waited for.
template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::note(const failure& why) noexcept {
  ++background_failures_;
  background_failure_ = why;
}

/// Whether the codec takes chunks of that size.
template <class Traits, class... Tiers>
failure basic_tiered_buffer<Traits, Tiers...>::check_size(std::uint64_t bytes) const noexcept {
  if constexpr (encodes) {
    constexpr std::uint64_t unit =
        std::tuple_element_t<last, std::tuple<Tiers...>>::codec_type::element_bytes;
    if (bytes % unit != 0) return {errc::bad_granularity, 0, bytes, unit, options_.name};
    if (bytes > options_.largest_chunk_bytes) {
      return {errc::out_of_range, 0, bytes, options_.largest_chunk_bytes, options_.name};
    }
  }
  return {};
}

/// Whether each tier could hold a chunk of that size if it held nothing else: between tier 0 and the last it
/// passes them all.
template <class Traits, class... Tiers>
failure basic_tiered_buffer<Traits, Tiers...>::check_fits(std::uint64_t bytes) const noexcept {
  failure wrong;
  const auto check_tier = [&]<std::size_t Index>(std::integral_constant<std::size_t, Index>) {
    const auto& tier = tier_at<Index>();
    const std::uint64_t takes = tier.room.granted_for(Index == last ? tier.place_bytes(bytes) : bytes);
    if (wrong.code != errc::ok || takes <= most_room<Index>()) return;
    wrong = failure{errc::out_of_bytes, 1, takes, most_room<Index>(), tier.room.name()};
  };
  if (bytes > max_bytes / 2) return wrong;  // refused by the last tier
  [&]<std::size_t... Index>(std::index_sequence<Index...>) {
    (check_tier(std::integral_constant<std::size_t, Index>{}), ...);
  }(std::make_index_sequence<tiers>{});
  return wrong;
}

template <class Traits, class... Tiers>
result<chunk_handle> basic_tiered_buffer<Traits, Tiers...>::create(std::uint64_t bytes) {
  if constexpr (requires { space_type<last>::is_read_only; }) {
    return failure{.code = errc::not_opened, .wanted = bytes, .where = options_.name.c_str()};
  }
  if (const failure wrong = check_size(bytes); wrong.code != errc::ok) return wrong;
  if (const failure wrong = check_fits(bytes); wrong.code != errc::ok) return wrong;
  auto& home = tier_at<last>();
  copy place;
  if (const result<void> had = home.room.take(place, home.place_bytes(bytes)); !had) return had.error();
  return enter(place, bytes);
}

/// Makes a chunk of a place in the last tier, which it gives back when there can be none.
template <class Traits, class... Tiers>
result<chunk_handle> basic_tiered_buffer<Traits, Tiers...>::enter(copy& place, std::uint64_t bytes) {
  const std::uint32_t name = names_.acquire({});
  if (name == none) {
    tier_at<last>().room.give_back(place);
    return no_more_chunks();
  }
  chunk_record fresh;
  fresh.bytes = bytes;
  fresh.changed = ++changes_;
  fresh.copies[last] = place;
  join(name, chunks_.acquire(fresh));
  return names_.handle(name);
}

template <class Traits, class... Tiers>
result<chunk_handle> basic_tiered_buffer<Traits, Tiers...>::adopt(std::uint64_t offset, std::uint64_t bytes,
                                                                  std::optional<std::uint32_t> checksum)
  requires(adopts)
{
  auto& room = tier_at<last>().room;
  if (offset > room.stats().capacity) {
    return failure{.code = errc::past_the_bytes,
                   .wanted = offset,
                   .found = room.stats().capacity,
                   .where = options_.name.c_str()};
  }
  if (offset % tier_at<last>().granularity != 0) {
    return failure{.code = errc::bad_granularity,
                   .wanted = offset,
                   .found = tier_at<last>().granularity,
                   .where = options_.name.c_str()};
  }
  if (const failure wrong = check_fits(bytes); wrong.code != errc::ok) return wrong;
  copy place;
  if (const result<void> had = room.take_at(place, room.address_of(offset), bytes); !had) return had.error();
  place.at = detail::residence::valid;
  place.stored = bytes;
  place.has_checksum = checksum.has_value();
  place.checksum = checksum.value_or(0);
  return enter(place, bytes);
}

template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::remove(chunk_handle chunk) {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = record_of(chunk);
  if (chunks_[slot].sharers > 1) {
    const std::uint32_t leases = names_[chunk.slot].leases;
    if (leases != 0) return at_chunk(errc::chunk_leased, slot, 0, leases);
    if (const result<void> gone = give_up_key(chunk.slot); !gone) return gone;
    leave(chunk.slot);
  } else {
    if (const result<void> gone = discard(chunk); !gone) return gone;
    static_cast<void>(give_up_key(chunk.slot));  // no longer in the index: cannot be refused
    leave(chunk.slot);
    if (chunks_[slot].copies[last].granted != 0) tier_at<last>().room.give_back(chunks_[slot].copies[last]);
    chunks_.release(slot);
  }
  names_.release(chunk.slot);
  return {};
}

template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::resize(chunk_handle chunk, std::uint64_t bytes) {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = record_of(chunk);
  chunk_record& c = chunks_[slot];
  const std::uint32_t leases = names_[chunk.slot].leases;
  if (leases != 0) return at_chunk(errc::chunk_leased, slot, 0, leases);
  if (bytes == c.bytes) return {};
  if (const failure wrong = check_size(bytes); wrong.code != errc::ok) return wrong;
  if (const failure wrong = check_fits(bytes); wrong.code != errc::ok) return wrong;
  if (c.sharers > 1) {
    return part(chunk.slot, bytes, newest(c) == tiers ? parting::empty : parting::copied, wait_complete);
  }
  if (const result<void> quiet = await_quiet(slot); !quiet) note(quiet.error());
  const bool has_contents = newest(c) != tiers;
  if (has_contents) {
    if (const result<void> there = make_resident(slot, true, wait_complete); !there) return there;
    // A write-back of it may have begun before it was asked for.
    if (const result<void> quiet = await_quiet(slot); !quiet) note(quiet.error());
  }
  auto& home = tier_at<last>().room;
  copy& lowest = c.copies[last];
  detail::spare_place place(home);
  if (const result<void> had = home.take(place.place(), tier_at<last>().place_bytes(bytes)); !had) return had;
  if (has_contents) {
    if (const result<void> moved = resize_top(slot, bytes); !moved) return moved;
  }
  if (lowest.granted != 0) home.give_back(lowest);
  lowest = place.release();
  c.bytes = bytes;
  c.changed = ++changes_;
  unqueue_prefetch(slot);
  if (has_contents) {
    for (std::size_t i = 1; i < last; ++i) {
      with_index<last>(i, [&]<class Index>(Index) {
        if (c.copies[Index::value].is_valid()) forget<Index::value>(slot);
      });
    }
    c.copies[0].dirty.clear();  // with nothing beneath it, all of it goes down
  }
  return {};
}

/// Gives the copy in tier 0 another place, with what it holds; from then on the index has nothing of the
/// chunk. @pre it is valid and at rest.
template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::resize_top(std::uint32_t slot, std::uint64_t bytes) {
  auto& top = tier_at<0>();
  copy& held = chunks_[slot].copies[0];
  if (top.room.granted_for(bytes) == held.granted) return unindex(slot);
  const hold<0> kept(*this, slot);
  detail::spare_place fresh(top.room);
  if (const result<void> room = await_top_room(fresh.place(), bytes, slot, wait_complete, clock_.now_ns());
      !room) {
    return room;
  }
  // Its own copy beneath may have had to leave for a victim: nothing must be on its way to the old place.
  if (const result<void> quiet = await_quiet(slot); !quiet) note(quiet.error());
  // Not before: that copy, once down, is in the index again.
  if (const result<void> gone = unindex(slot); !gone) return gone;
  const std::uint64_t old = chunks_[slot].bytes;
  const std::uint64_t kept_bytes = bytes < old ? bytes : old;
  const result<void> moved = copy_top(fresh.place(), held, kept_bytes);
  if (moved) {
    observer_.on_left(chunk_id{slot}, held.granted);
    std::swap(held.place, fresh.place().place);
    std::swap(held.data, fresh.place().data);
    std::swap(held.granted, fresh.place().granted);
    observer_.on_made(chunk_id{slot}, held.granted);
  } else {
    if (moved.code() == errc::completion_lost) fresh.retire();
    if (const result<void> again = reindex(slot); !again) note(again.error());
  }
  return moved;
}

template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::discard(chunk_handle chunk) {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = record_of(chunk);
  const std::uint32_t leases = names_[chunk.slot].leases;
  if (leases != 0) return at_chunk(errc::chunk_leased, slot, 0, leases);
  if (chunks_[slot].sharers > 1) {
    return part(chunk.slot, chunks_[slot].bytes, parting::empty, wait_complete);
  }
  static_cast<void>(await_quiet(slot));  // how that went no longer matters
  if (const result<void> gone = unindex(slot); !gone) return gone;
  forget_contents(slot);
  chunks_[slot].changed = ++changes_;
  return {};
}

/// Frees every copy, and whatever was planned for the chunk. @pre no lease and no transfer.
template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::forget_contents(std::uint32_t slot) noexcept {
  chunk_record& c = chunks_[slot];
  unqueue_prefetch(slot);
  if (std::exchange(c.store_due, false)) {
    sieve queue(due_, due_count_);
    while (queue.has_next()) {
      if (queue.next() == slot) queue.take_out();
    }
  }
  for (std::size_t i = 0; i < last; ++i) {
    with_index<last>(i, [&]<class Index>(Index) {
      if (c.copies[Index::value].is_valid()) forget<Index::value>(slot);
    });
  }
  c.copies[last].at = detail::residence::absent;
  c.copies[last].dirty.clear();
  c.admitted = {};
}

/// Gives back the places that the chunk has and nothing is on its way to.
template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::release_reservations(std::uint32_t slot) noexcept {
  for (std::size_t i = 0; i < last; ++i) {
    copy& held = chunks_[slot].copies[i];
    if (held.at != detail::residence::reserved) continue;
    with_index<last>(i, [&]<class Index>(Index) { tier_at<Index::value>().room.give_back(held); });
  }
}

/// Nothing is brought up in advance any more.
template <class Traits, class... Tiers>
void basic_tiered_buffer<Traits, Tiers...>::unqueue_prefetch(std::uint32_t slot) noexcept {
  if (std::exchange(chunks_[slot].wanted, false)) {
    sieve queue(wanted_, wanted_count_);
    while (queue.has_next()) {
      if (queue.next() == slot) queue.take_out();
    }
  }
  release_reservations(slot);
}

/// What an eviction policy knows a chunk by after it has left.
template <class Traits, class... Tiers>
access_hint basic_tiered_buffer<Traits, Tiers...>::hint_of(std::uint32_t slot) const noexcept {
  // The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): different for different handles, none 0.
  std::uint64_t x = (std::uint64_t{chunks_.handle(slot).generation} << 32) + slot;
  x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBULL;
  return {.next_use = chunks_[slot].next_use, .content = x ^ (x >> 31)};
}

/// Waits for the chunk's transfer, if it has one.
template <class Traits, class... Tiers>
result<void> basic_tiered_buffer<Traits, Tiers...>::await_quiet(std::uint32_t slot) {
  const std::uint32_t id = chunks_[slot].transfer;
  return id == none ? result<void>{} : wait_for(id, wait_complete, clock_.now_ns());
}

template <class Traits, class... Tiers>
result<std::uint64_t> basic_tiered_buffer<Traits, Tiers...>::bytes(chunk_handle chunk) const noexcept {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  return chunks_[names_[chunk.slot].record].bytes;
}

template <class Traits, class... Tiers>
result<std::uint64_t> basic_tiered_buffer<Traits, Tiers...>::last_change(chunk_handle chunk) const noexcept {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  return chunks_[names_[chunk.slot].record].changed;
}

template <class Traits, class... Tiers>
result<std::size_t> basic_tiered_buffer<Traits, Tiers...>::tier_of(chunk_handle chunk) const noexcept {
  if (const failure wrong = check(chunk); wrong.code != errc::ok) return wrong;
  const std::size_t found = newest(chunks_[names_[chunk.slot].record]);
  if (found == tiers)
    return failure{.code = errc::no_contents, .index = chunk.slot, .where = options_.name.c_str()};
  return found;
}

}  // namespace v0
}  // namespace llmmem
