/// @file
/// Chunks of a `tiered_buffer`: how they are created, cloned, resized, discarded and removed.
#pragma once

#include <llmmem/tiering/detail/chunk_desk.hpp>

#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A read-only space. This is a concept because nvcc's front end loses the pack of an out-of-class member in
/// a requires-expression.
template <class Space>
concept read_only_space = requires { Space::is_read_only; };

template <class Traits, class... Tiers>
result<chunk_handle> chunk_desk<Traits, Tiers...>::create(std::uint64_t bytes) {
  if constexpr (read_only_space<typename stack_type::template space_type<last>>) {
    return failure{.code = errc::not_opened, .wanted = bytes, .where = chunks_.where()};
  }
  if (const failure wrong = stack_.check_size(bytes); wrong.code != errc::ok) return wrong;
  if (const failure wrong = stack_.check_fits(bytes); wrong.code != errc::ok) return wrong;
  tier_copy place;
  const result<void> had = stack_.take(nth<last>, place, stack_.place_bytes(nth<last>, bytes));
  if (!had) return had.error();
  return enter(place, bytes);
}

/// Makes a chunk of a place in the last tier; frees the place if that fails.
template <class Traits, class... Tiers>
result<chunk_handle> chunk_desk<Traits, Tiers...>::enter(tier_copy& place, std::uint64_t bytes) {
  record_type fresh;
  fresh.bytes = bytes;
  fresh.copies[last] = place;
  const result<chunk_handle> made = chunks_.enter(fresh);
  if (!made) stack_.give_back(nth<last>, place);
  return made;
}

template <class Traits, class... Tiers>
result<chunk_handle> chunk_desk<Traits, Tiers...>::adopt(std::uint64_t offset, std::uint64_t bytes,
                                                         std::optional<std::uint32_t> checksum) {
  if (const failure wrong = stack_.check_offset(offset); wrong.code != errc::ok) return wrong;
  if (const failure wrong = stack_.check_fits(bytes); wrong.code != errc::ok) return wrong;
  tier_copy place;
  if (const result<void> had = stack_.take_offset(place, offset, bytes); !had) return had.error();
  place.at = residence::valid;
  place.stored = bytes;
  place.has_checksum = checksum.has_value();
  place.checksum = checksum.value_or(0);
  return enter(place, bytes);
}

template <class Traits, class... Tiers>
result<chunk_handle> chunk_desk<Traits, Tiers...>::clone(chunk_handle chunk) {
  if (const failure wrong = chunks_.check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = chunks_.record_of(chunk);
  if (chunks_[slot].writing) return chunks_.at_chunk(errc::chunk_leased, slot, 0, chunks_[slot].leases);
  return chunks_.share(slot);
}

/// Returns a refusal if the chunk is leased under that name.
template <class Traits, class... Tiers>
failure chunk_desk<Traits, Tiers...>::refuse_leased(std::uint32_t name, std::uint32_t slot) const noexcept {
  const std::uint32_t leases = chunks_.leases_of(name);
  return leases == 0 ? failure{} : chunks_.at_chunk(errc::chunk_leased, slot, 0, leases);
}

template <class Traits, class... Tiers>
result<void> chunk_desk<Traits, Tiers...>::remove(chunk_handle chunk) {
  if (const failure wrong = chunks_.check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = chunks_.record_of(chunk);
  if (chunks_[slot].sharers > 1) {
    if (const failure wrong = refuse_leased(chunk.slot, slot); wrong.code != errc::ok) return wrong;
    if (const result<void> gone = keys_.give_up(chunk.slot); !gone) return gone;
  } else {
    if (const result<void> gone = discard(chunk); !gone) return gone;
    static_cast<void>(keys_.give_up(chunk.slot));  // cannot fail: the index no longer has the chunk
    tier_copy& lowest = chunks_[slot].copies[last];
    if (lowest.granted != 0) stack_.give_back(nth<last>, lowest);
  }
  chunks_.remove(chunk.slot);
  return {};
}

template <class Traits, class... Tiers>
result<void> chunk_desk<Traits, Tiers...>::resize(chunk_handle chunk, std::uint64_t bytes) {
  if (const failure wrong = chunks_.check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = chunks_.record_of(chunk);
  record_type& c = chunks_[slot];
  if (const failure wrong = refuse_leased(chunk.slot, slot); wrong.code != errc::ok) return wrong;
  if (bytes == c.bytes) return {};
  if (const failure wrong = stack_.check_size(bytes); wrong.code != errc::ok) return wrong;
  if (const failure wrong = stack_.check_fits(bytes); wrong.code != errc::ok) return wrong;
  if (c.sharers > 1) {
    return part(chunk.slot, bytes, newest(c) == tiers ? parting::empty : parting::copied,
                tiering::wait_complete);
  }
  mover_.quiet(slot);
  const bool has_contents = newest(c) != tiers;
  if (has_contents) {
    if (const result<void> there = mover_.make_resident(slot, true, tiering::wait_complete); !there)
      return there;
    // Another call may already have begun to write the chunk back.
    mover_.quiet(slot);
  }
  tier_copy& lowest = c.copies[last];
  auto place = stack_.spare(nth<last>);
  const result<void> had = stack_.take(nth<last>, place.place(), stack_.place_bytes(nth<last>, bytes));
  if (!had) return had;
  if (has_contents) {
    if (const result<void> moved = resize_top(slot, bytes); !moved) return moved;
  }
  if (lowest.granted != 0) stack_.give_back(nth<last>, lowest);
  lowest = place.release();
  c.bytes = bytes;
  chunks_.mark_changed(c);
  mover_.unqueue_prefetch(slot);
  if (has_contents) {
    stack_.forget_middle(slot);
    c.copies[0].dirty.clear();  // with no copy below, all bytes move down anyway
  }
  return {};
}

/// Moves the copy in tier 0, with its contents, to another place, and removes the chunk's entry from the
/// index. @pre the copy is valid and at rest.
template <class Traits, class... Tiers>
result<void> chunk_desk<Traits, Tiers...>::resize_top(std::uint32_t slot, std::uint64_t bytes) {
  tier_copy& held = chunks_[slot].copies[0];
  if (stack_.granted_for(nth<0>, bytes) == held.granted) return keys_.unindex(slot);
  const pinned_copy kept(stack_, nth<0>, slot);
  auto fresh = stack_.spare(nth<0>);
  const result<void> room =
      mover_.await_top_place(fresh.place(), bytes, slot, tiering::wait_complete, engine_.now_ns());
  if (!room) return room;
  // The chunk's own copy below may have had to leave for a victim: no transfer may be on its way to the old
  // place.
  mover_.quiet(slot);
  // After `quiet`, because a copy that moves down is added to the index again.
  if (const result<void> gone = keys_.unindex(slot); !gone) return gone;
  const std::uint64_t old = chunks_[slot].bytes;
  const std::uint64_t kept_bytes = bytes < old ? bytes : old;
  const result<void> moved = copy_top(fresh.place(), held, kept_bytes);
  if (moved) {
    stack_.exchange_top(slot, fresh.place());
  } else {
    if (moved.code() == errc::completion_lost) fresh.retire();
    if (const result<void> again = keys_.reindex(slot); !again) engine_.note(again.error());
  }
  return moved;
}

template <class Traits, class... Tiers>
result<void> chunk_desk<Traits, Tiers...>::discard(chunk_handle chunk) {
  if (const failure wrong = chunks_.check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = chunks_.record_of(chunk);
  if (const failure wrong = refuse_leased(chunk.slot, slot); wrong.code != errc::ok) return wrong;
  if (chunks_[slot].sharers > 1) {
    return part(chunk.slot, chunks_[slot].bytes, parting::empty, tiering::wait_complete);
  }
  static_cast<void>(mover_.await_quiet(slot));  // the outcome no longer matters
  if (const result<void> gone = keys_.unindex(slot); !gone) return gone;
  mover_.forget_contents(slot);
  chunks_.mark_changed(chunks_[slot]);
  return {};
}

template <class Traits, class... Tiers>
result<std::uint64_t> chunk_desk<Traits, Tiers...>::bytes(chunk_handle chunk) const noexcept {
  if (const failure wrong = chunks_.check(chunk); wrong.code != errc::ok) return wrong;
  return chunks_[chunks_.slot_of(chunk.slot)].bytes;
}

template <class Traits, class... Tiers>
result<std::uint64_t> chunk_desk<Traits, Tiers...>::last_change(chunk_handle chunk) const noexcept {
  if (const failure wrong = chunks_.check(chunk); wrong.code != errc::ok) return wrong;
  return chunks_[chunks_.slot_of(chunk.slot)].changed;
}

template <class Traits, class... Tiers>
result<std::size_t> chunk_desk<Traits, Tiers...>::tier_of(chunk_handle chunk) const noexcept {
  if (const failure wrong = chunks_.check(chunk); wrong.code != errc::ok) return wrong;
  const std::size_t found = newest(chunks_[chunks_.slot_of(chunk.slot)]);
  if (found == tiers)
    return failure{.code = errc::no_contents, .index = chunk.slot, .where = chunks_.where()};
  return found;
}

template <class Traits, class... Tiers>
result<void> chunk_desk<Traits, Tiers...>::prefetch(chunk_handle chunk) {
  if (const failure wrong = chunks_.check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = chunks_.record_of(chunk);
  if (newest(chunks_[slot]) == tiers) return chunks_.at_chunk(errc::no_contents, slot);
  mover_.prefetch(slot);
  return {};
}

template <class Traits, class... Tiers>
result<void> chunk_desk<Traits, Tiers...>::evict(chunk_handle chunk) {
  if (const failure wrong = chunks_.check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = chunks_.record_of(chunk);
  const std::uint32_t leases = chunks_[slot].leases;
  if (leases != 0) return chunks_.at_chunk(errc::chunk_leased, slot, 0, leases);
  return mover_.evict(slot);
}

template <class Traits, class... Tiers>
result<void> chunk_desk<Traits, Tiers...>::flush(chunk_handle chunk) {
  if (const failure wrong = chunks_.check(chunk); wrong.code != errc::ok) return wrong;
  return mover_.flush(chunks_.record_of(chunk));
}

template <class Traits, class... Tiers>
tiering::step_outcome chunk_desk<Traits, Tiers...>::execute(chunk_handle chunk, plan_operation operation,
                                                            std::size_t tier) {
  if (tier >= last || chunks_.check(chunk).code != errc::ok) return tiering::step_outcome::unneeded;
  return mover_.execute(chunks_.record_of(chunk), operation, tier);
}

template <class Traits, class... Tiers>
result<void> chunk_desk<Traits, Tiers...>::expect(chunk_handle chunk, std::uint64_t next_use) noexcept {
  if (const failure wrong = chunks_.check(chunk); wrong.code != errc::ok) return wrong;
  const std::uint32_t slot = chunks_.record_of(chunk);
  chunks_[slot].next_use = next_use;
  stack_.expect(slot, next_use);
  return {};
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
