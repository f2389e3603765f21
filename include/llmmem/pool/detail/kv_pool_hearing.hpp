/// @file
/// Bodies of kv_pool.hpp: messages of other nodes, and blocks sent to them. Only that file includes this one.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/pool/kv_pool.hpp>

namespace llmmem {
inline namespace v0 {

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::hear() {
  constexpr int most = 1024;  // bounds a step, so that many busy peers do not delay the engine
  hearing handler{this};
  for (int i = 0; i < most && end_->poll(deadline{0}, handler); ++i) {
  }
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
typename kv_pool<Tiers, Endpoint, Directory, Mover>::record* kv_pool<Tiers, Endpoint, Directory, Mover>::find(
    std::uint64_t id) noexcept {
  const std::uint64_t slot = id & 0xFFFF'FFFF;
  if (slot >= requests_.size()) return nullptr;
  record& of = requests_[static_cast<std::size_t>(slot)];
  return of.is_live && of.generation == id >> 32 ? &of : nullptr;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
typename kv_pool<Tiers, Endpoint, Directory, Mover>::part*
kv_pool<Tiers, Endpoint, Directory, Mover>::awaited(seat_id from, std::uint64_t id,
                                                    std::uint32_t part_index) noexcept {
  record* const of = find(id);
  if (of == nullptr || part_index >= of->parts.size()) return nullptr;
  part& each = of->parts[part_index];
  return each.state == part_state::asked && each.holder == from && !each.is_reading ? &each : nullptr;
}

// Blocks that come

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
frame_buffer kv_pool<Tiers, Endpoint, Directory, Mover>::buffer_for(seat_id from,
                                                                    const frame_header& frame) noexcept {
  part* const each = frame.kind == static_cast<std::uint16_t>(detail::pool_frame::data)
                         ? awaited(from, frame.epoch, frame.tag)
                         : nullptr;
  if (each == nullptr) {
    ++counted_.refused_frames;
    return {};
  }
  const std::uint64_t whole = block_bytes(each->group);
  if (frame.offset != 0 && frame.bytes != 0 && frame.bytes <= each->received &&
      frame.offset <= each->received - frame.bytes)
    return {};  // it came already: the sender did not know that this frame went
  // A node that was asked again begins again: the frames of its first answer did not all come.
  if (frame.offset == 0) each->received = 0;
  if (frame.message != whole || frame.offset != each->received || frame.bytes == 0 ||
      frame.bytes > whole - frame.offset || (frame.offset + frame.bytes == whole && frame.is_checked == 0)) {
    ++counted_.refused_frames;
    fail(*find(frame.epoch), *each, errc::frame_forged);
    return {};
  }
  each->is_receiving = true;
  return {
      .what = frame_buffer::answer::take,
      .bytes = tiers_->bytes_of(each->block).subspan(static_cast<std::size_t>(frame.offset), frame.bytes)};
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::on_frame(seat_id from, const frame_header& frame) noexcept {
  part* const each = awaited(from, frame.epoch, frame.tag);
  if (each == nullptr) return;
  record& of = *find(frame.epoch);
  each->is_receiving = false;
  const auto bytes =
      tiers_->bytes_of(each->block).subspan(static_cast<std::size_t>(each->received), frame.bytes);
  each->crc = crc32c(each->received == 0 ? 0 : each->crc, bytes);  // while they are in the cache
  each->received += frame.bytes;
  if (each->received != block_bytes(each->group)) {
    if (each->is_broken) return fail(of, *each, errc::ok);
    each->ask_again = time_to_ask_again(of, wait_for_block(), each->asked_times);
    return;
  }
  if (each->crc != frame.crc) {
    report_damage(of, *each);
    return fail(of, *each, errc::message_damaged);
  }
  tiers_->note_checksum(each->block, each->crc);  // before it moves on, so that lower tiers get it as well
  arrive(*each);
}

/// All bytes of a block are in its slot, and right.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::arrive(part& each) noexcept {
  --in_flight_;
  --peers_[to_index(each.holder)].outstanding;
  if (!tiers_->end_arrival(each.block, true)) {  // withdrawn while it arrived
    each.block = {};
    each.state = part_state::failed;
    return;
  }
  each.state = part_state::arrived;
  each.is_fetched = true;
  ++counted_.fetched_blocks;
  counted_.fetched_bytes += block_bytes(each.group);
}

// Words

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::on_message(seat_id from, const frame_header& frame,
                                                            std::span<const std::byte> bytes) noexcept {
  using detail::pool_frame;
  if (to_index(from) >= peers_.size() || from == self()) return;
  const detail::pool_reader in(bytes);
  const auto kind = static_cast<pool_frame>(frame.kind);
  if (kind == pool_frame::hello) return hear_hello(from, in);
  if (kind == pool_frame::reach) return hear_introduction(from, in);
  if (peers_[to_index(from)].state != pool::peer_state::present) {
    ++counted_.refused_frames;
    return;
  }
  switch (kind) {
    case pool_frame::publish:
    case pool_frame::ask:
    case pool_frame::answer:
    case pool_frame::gone:
    case pool_frame::received: {
      directory_link link{this};
      if (!directory_.hear(link, from, kind, in)) ++counted_.refused_frames;
      return;
    }
    case pool_frame::get:
      return hear_get(from, in, false);
    case pool_frame::get_again:
      return hear_get(from, in, true);
    case pool_frame::missing:
      return hear_missing(from, in);
    case pool_frame::copy:
      return hear_copy(from, in);
    case pool_frame::damaged:
      return hear_damaged(from, in);
    default:
      ++counted_.refused_frames;
  }
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::hear_hello(seat_id from, detail::pool_reader in) noexcept {
  const auto like = in.take<detail::pool_likeness>();
  const auto domain = in.take<std::uint32_t>();
  const auto nonce = in.take<std::uint64_t>();
  if (!in.is_over()) {
    ++counted_.refused_frames;
    return;
  }
  detail::pool_peer& peer = peers_[to_index(from)];
  const bool is_known = peer.state != pool::peer_state::absent && peer.nonce == nonce;
  if (is_known && peer.likeness == like) return;
  if (peer.nonce != nonce) mover_.detach(from);
  forget_peer(from, false);  // a greeting does not prove a death; the endpoint reports deaths
  peer.likeness = like;
  if (peer.nonce != nonce) peer.introduce_at = peer.introductions = 0;
  peer.nonce = nonce;
  peer.domain = domain;
  peer.state = like == likeness_ ? pool::peer_state::present : pool::peer_state::different;
  announce_again();
  // That node may have missed this node's greeting, because it was not yet listening.
  if (!is_known) post_hello(from);
}

/// Returns false if no request awaits the answer from that keeper.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
bool kv_pool<Tiers, Endpoint, Directory, Mover>::take_answer(std::uint32_t keeper, std::uint64_t id,
                                                             std::uint32_t index,
                                                             const pool::span_holders& found) noexcept {
  record* const of = find(id);
  const bool is_asked = of != nullptr && index < of->spans.size() && of->spans[index].asked == keeper;
  if (is_asked && of->spans[index].is_answered && of->spans[index].asked_times > 1)
    return true;  // the second answer
  if (!is_asked || of->spans[index].is_answered) return false;
  detail::pool_span& span = of->spans[index];
  span.is_answered = true;
  span.holder_count = found.count;
  for (std::uint32_t h = 0; h < found.count; ++h) {
    span.holders[h] = found.holders[h];
    for (std::size_t g = 0; g < groups_; ++g)
      masks_of(*of, index, h)[g] = found.masks[h * groups_ + g];
  }
  return true;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::take_unknown(std::uint64_t id,
                                                              std::uint32_t index) noexcept {
  record* const of = find(id);
  if (of == nullptr || index >= of->spans.size() || of->spans[index].is_answered) return;
  of->spans[index].is_answered = true;
  of->spans[index].is_unknown = true;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::hear_get(seat_id from, detail::pool_reader in,
                                                          bool is_again) noexcept {
  const auto is_queued = [this](const detail::pool_serving& one) {
    for (std::size_t i = 0; i < serving_count_; ++i) {
      const detail::pool_serving& each = serving_[(serving_first_ + i) % serving_.size()];
      if (each.to == one.to && each.nonce == one.nonce && each.id == one.id && each.part == one.part)
        return true;
    }
    return false;
  };
  detail::pool_serving wanted{.to = from, .nonce = peers_[to_index(from)].nonce, .since = end_->now_ns()};
  wanted.id = in.take<std::uint64_t>();
  wanted.span = in.take<block_key>();
  while (in.is_right() && !in.is_over()) {
    wanted.part = in.take<std::uint32_t>();
    wanted.group = in.take<std::uint32_t>();
    wanted.place = in.take<std::uint32_t>();
    wanted.key = in.take<block_key>();
    if (!in.is_right() || wanted.group >= groups_ || wanted.place >= pool::span_chunks) break;
    if (is_again && is_queued(wanted)) continue;
    if (serving_count_ == serving_.size()) {
      post_missing(wanted);
      continue;
    }
    serving_[(serving_first_ + serving_count_++) % serving_.size()] = wanted;
  }
  if (!in.is_over()) ++counted_.refused_frames;
  if constexpr (reads_directly) introduce_again(from);
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::hear_missing(seat_id from, detail::pool_reader in) noexcept {
  const auto id = in.take<std::uint64_t>();
  const auto index = in.take<std::uint32_t>();
  part* const each = in.is_over() ? awaited(from, id, index) : nullptr;
  if (each == nullptr) return;
  if (each->is_receiving) {  // messages overtake bytes, so the frame in flight ends first
    each->is_broken = true;
  } else {
    fail(*find(id), *each, errc::ok);
  }
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::on_death(seat_id seat) noexcept {
  if (to_index(seat) >= peers_.size() || seat == self()) return;
  mover_.detach(seat);
  forget_peer(seat, true);
  peers_[to_index(seat)] = {.checks = peers_[to_index(seat)].checks};
  announce_again();
}

/// Forgets a node: the blocks that it was asked for will not arrive, and its entries in the directory are
/// useless. If the node is alive, the frame that the transport is writing ends by itself; this node does not
/// await the rest of that block, because it would refuse the peer's message that the block is missing.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::forget_peer(seat_id seat, bool is_dead) noexcept {
  directory_link link{this};
  directory_.forget(link, seat);
  for (std::uint32_t i = 0; i < published_.capacity(); ++i) {
    // The next process in that seat has no record of these entries, so they must be published again.
    if (directory_type::keepers_are_seats && published_.at(i).place == to_index(seat))
      published_.at(i).place = pool::no_keeper;
  }
  for (record& of : requests_) {
    if (!of.is_live) continue;
    for (detail::pool_span& span : of.spans)
      span.is_answered =
          span.is_answered || (directory_type::keepers_are_seats && span.asked == to_index(seat));
    for (part& each : of.parts) {
      if (each.state != part_state::asked || each.holder != seat) continue;
      stop_reading(of, each);
      if (each.is_receiving && !is_dead) {
        each.is_broken = true;
        continue;
      }
      each.is_receiving = false;
      fail(of, each, errc::peer_failed);
    }
  }
  for (std::size_t i = 0; i < serving_count_; ++i) {
    detail::pool_serving& each = serving_[(serving_first_ + i) % serving_.size()];
    if (each.to == seat) each.to = no_seat;
  }
}

// Blocks that go

/// A block that cannot be sent now keeps its place among those to the same node: all are passed once, in
/// order.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::serve() {
  std::uint64_t sent = 0;
  ++serve_turn_;
  send_wait_ = options_.send_ns;
  for (std::size_t left = serving_count_; left != 0 && (sent == 0 || sent < options_.serve_bytes); --left) {
    detail::pool_serving next = serving_[serving_first_];
    if (next.to == no_seat || !is_present(next.to, next.nonce)) {
      pop_serving();
      unpin(next);
      continue;
    }
    if (next.is_missing) {
      pop_serving();
      post_missing(next);
      continue;
    }
    const auto held = tiers_->hold(next.group, next.key);
    if (next.offset != 0 &&
        held != next.block) {  // withdrawn behind its first bytes: begins again, if at all
      if (held) tiers_->release(*held);
      pop_serving();
      unpin(next);
      next.offset = 0;
      next.crc = 0;
      push_serving(next);
    } else if (held) {
      const std::uint64_t from = next.offset;
      serve_held(next, *held);
      sent += next.offset - from;
    } else {
      pop_serving();
      serve_absent(next);
    }
  }
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::pop_serving() noexcept {
  serving_first_ = (serving_first_ + 1) % serving_.size();
  --serving_count_;
}

/// @pre an entry was popped since the last one was pushed
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::push_serving(const detail::pool_serving& what) noexcept {
  serving_[(serving_first_ + serving_count_++) % serving_.size()] = what;
}

/// Whether a block may stay queued: its patience counts from the last frame that its receiver took, but a
/// receiver that reads a little at a time pins it no longer than `pin_ns`.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
bool kv_pool<Tiers, Endpoint, Directory, Mover>::may_wait(const detail::pool_serving& what) const noexcept {
  const std::uint64_t taken_at = peers_[to_index(what.to)].taken_at;
  const std::uint64_t now = end_->now_ns();
  if (what.offset != 0 && now - what.pinned_at >= options_.pin_ns) return false;
  return now - (taken_at > what.since ? taken_at : what.since) < options_.patience_ns;
}

/// Sends the first block of the queue, which is in the first tier, or queues it again. Its place stays taken
/// while it is sent: a node may ask for blocks meanwhile, also again for this one.
/// @param block  one more pin of it, which ends here or becomes the entry's.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::serve_held(detail::pool_serving& next,
                                                            const offload::held_block& block) {
  const std::uint64_t from = next.offset;
  if constexpr (reads_directly) {
    if (from == 0) offer(next.group, next.key, block);
  }
  sending came = sending::stalled;
  try {
    if (peers_[to_index(next.to)].stalled_in != serve_turn_) came = send_block(next, block);
  } catch (...) {  // without memory; it goes again in a later step
    tiers_->release(block);
    throw;
  }
  pop_serving();
  if (from == 0) next.pinned_at = end_->now_ns();
  if (came == sending::stalled && may_wait(next)) {
    if (from == 0 && next.offset != 0) {
      next.block = block;  // pinned until its last byte has gone
    } else {
      tiers_->release(block);
    }
    return push_serving(next);
  }
  tiers_->release(block);
  if (from != 0) unpin(next);
  if (came != sending::done) post_missing(next);
}

/// A block that is not in the first tier: brings it up, or says that it is missing.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::serve_absent(const detail::pool_serving& next) {
  const bool has_stalled = peers_[to_index(next.to)].stalled_in == serve_turn_;
  const offload::answer has = tiers_->lookup_block(next.group, next.key).first;
  // What comes up for a node that takes nothing would leave again, for the next such block.
  const bool comes = has == offload::answer::pending || (has == offload::answer::hit && !has_stalled &&
                                                         tiers_->prefetch_block(next.group, next.key));
  const bool may_come = comes || has == offload::answer::hit || has == offload::answer::unknown;
  if (may_come && may_wait(next)) return push_serving(next);
  ++counted_.missing_blocks;
  post_missing(next);
  if (has == offload::answer::miss) retract(next.span, next.group, next.place, next.key);
}

/// Sends what is left of a block. Waits for a receiver only if that took its last frame in time, and no
/// longer than the sends before it in this step have left of `send_ns`.
/// @param what  its `offset` becomes the bytes that the transport has, or will send from its own copy.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
auto kv_pool<Tiers, Endpoint, Directory, Mover>::send_block(detail::pool_serving& what,
                                                            const offload::held_block& block) -> sending {
  const std::span<const std::byte> bytes = tiers_->bytes_of(block);
  const std::size_t most = end_->frame_bytes();
  detail::pool_peer& to = peers_[to_index(what.to)];
  hearing handler{this};
  const auto known = tiers_->checksum_of(block);
  while (what.offset < bytes.size()) {
    const auto offset = static_cast<std::size_t>(what.offset);
    const std::size_t left = bytes.size() - offset;
    const std::span<const std::byte> piece = bytes.subspan(offset, left < most ? left : most);
    // The last frame carries the block's checksum. If the tiers keep none, it is computed piece by piece,
    // just before the transport copies the same bytes.
    const std::uint32_t crc = known ? *known : crc32c(what.crc, piece);
    const bool is_last = piece.size() == left;
    const frame_header header{.epoch = what.id,
                              .message = bytes.size(),
                              .offset = offset,
                              .bytes = static_cast<std::uint32_t>(piece.size()),
                              .tag = what.part,
                              .crc = is_last ? crc : 0,
                              .kind = static_cast<std::uint16_t>(detail::pool_frame::data),
                              .is_checked = static_cast<std::uint16_t>(is_last ? 1 : 0)};
    const std::uint64_t now = end_->now_ns();
    const std::uint64_t wait = to.slow_until > now ? 0 : send_wait_;
    const auto sent =
        end_->send(what.to, header, piece, deadline{detail::saturating_add(now, wait)}, handler);
    const std::uint64_t taken = end_->now_ns() - now;
    send_wait_ -= taken < send_wait_ ? taken : send_wait_;
    if (!sent && sent.error().code != errc::peer_timed_out) return sending::failed;
    if (sent) {
      to.taken_at = end_->now_ns();
    } else {
      // One for which little time was left is tried again in the next step, before others.
      if (wait == 0 ? to.slow_until > now : wait >= options_.send_ns / 2)
        to.slow_until = detail::saturating_add(end_->now_ns(), options_.slow_ns);
      to.stalled_in = serve_turn_;
      // The transport completes a frame that it has begun. One of which only the header went looks like one
      // that did not begin, and goes again: the receiver drops what it has.
      if (sent.error().found == 0) return sending::stalled;
    }
    what.offset += piece.size();
    what.crc = crc;
    if (!sent && what.offset < bytes.size()) return sending::stalled;
  }
  if (!known) tiers_->note_checksum(block, what.crc);
  ++counted_.served_blocks;
  counted_.served_bytes += bytes.size();
  return sending::done;
}

/// Ends the pin of a block of which a part has gone.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::unpin(detail::pool_serving& what) noexcept {
  if (what.block.slot != no_slot) tiers_->release(what.block);
  what.block = {};
}

}  // namespace v0
}  // namespace llmmem
