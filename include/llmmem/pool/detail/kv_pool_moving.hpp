/// @file
/// Bodies of kv_pool.hpp: reads of other nodes' memory, and the blocks that this node offers for that. Only
/// that file includes this one.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/pool/kv_pool.hpp>

namespace llmmem {
inline namespace v0 {

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::close_memory() noexcept {
  tiers_->watch_first_tier({});
  mover_.withdraw_all();
  for (std::uint32_t seat = 0; seat < peers_.size(); ++seat)
    mover_.detach(seat_id{seat});
}

/// Lets other nodes read the first tier: what leaves it leaves the mover's index.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::open_memory() {
  if (!mover_.can_offer(tiers_->bytes_of({.group = 0, .slot = slot_id{0}}))) {
    throw argument_error(options_.name +
                         ": the first tier is not in the mover's memory, so no other node could read it; "
                         "make it with kv_tier(mover.space(), ...)");
  }
  tiers_->watch_first_tier({.left = &on_left, .context = this});
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::post_introduction(seat_id to) noexcept {
  detail::pool_writer out;
  out.put(nonce_);
  out.put_bytes(mover_.introduction());
  post(to, detail::pool_frame::reach, out);
}

/// A node that asks for blocks by message may have lost this node's introduction, or refused it because it
/// had no descriptor left. Each repetition doubles the time to the next, because it may have no mover at all.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::introduce_again(seat_id to) noexcept {
  detail::pool_peer& peer = peers_[to_index(to)];
  const std::uint64_t now = end_->now_ns();
  if (now < peer.introduce_at || !may_post(to)) return;
  const bool is_first = peer.introduce_at == 0;  // the one of the greeting may be on its way
  const std::uint64_t wait = options_.ask_again_ns > (~std::uint64_t{0} >> 8)
                                 ? ~std::uint64_t{0} >> 1
                                 : options_.ask_again_ns << peer.introductions;
  peer.introduce_at = wait > ~std::uint64_t{0} - now ? ~std::uint64_t{0} : now + wait;
  if (is_first) return;
  if (peer.introductions < 6) ++peer.introductions;
  post_introduction(to);
}

/// Hostile input: the mover checks it against what it can map. A node without a mover needs none of it.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::hear_introduction(seat_id from,
                                                                   detail::pool_reader in) noexcept {
  const auto nonce = in.take<std::uint64_t>();
  const detail::pool_peer& peer = peers_[to_index(from)];
  if (!in.is_right() || peer.state == pool::peer_state::absent || peer.nonce != nonce) {
    ++counted_.refused_frames;
    return;
  }
  if (mover_.reaches(from)) return;  // it was repeated
  if (!mover_.attach(from, in.rest())) ++counted_.refused_introductions;
}

/// Remembers to offer a block. One that finds the ring full is offered when its first reader has asked for
/// it.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::offer_later(std::size_t group,
                                                             const block_key& key) noexcept {
  if (offer_count_ == offers_.size() || mover_.is_offered(Tiers::name_of(group, key))) return;
  offers_[(offer_first_ + offer_count_++) % offers_.size()] = {.key = key,
                                                               .group = static_cast<std::uint32_t>(group)};
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::offer(std::size_t group, const block_key& key,
                                                       const offload::held_block& block) noexcept {
  const block_key name = Tiers::name_of(group, key);
  if (mover_.is_offered(name)) return;
  const std::span<const std::byte> bytes = tiers_->bytes_of(block);
  const auto known = tiers_->checksum_of(block);
  const std::uint32_t crc = known ? *known : crc32c(0, bytes);
  if (!known) tiers_->note_checksum(block, crc);
  if (mover_.offer(name, bytes, crc)) ++counted_.offered_blocks;
}

/// Offers published blocks that have arrived in the first tier.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::offer_some() noexcept {
  std::uint64_t offered = 0;
  for (std::size_t left = offer_count_; left != 0 && offered < options_.serve_bytes; --left) {
    const detail::pool_offer next = offers_[offer_first_];
    offer_first_ = (offer_first_ + 1) % offers_.size();
    --offer_count_;
    if (const auto held = tiers_->hold(next.group, next.key)) {
      offer(next.group, next.key, *held);
      tiers_->release(*held);
      offered += block_bytes(next.group);
    } else if (tiers_->lookup_block(next.group, next.key).first == offload::answer::pending) {
      offers_[(offer_first_ + offer_count_++) % offers_.size()] = next;
    }
  }
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
pool::move_ticket kv_pool<Tiers, Endpoint, Directory, Mover>::ticket_of(const record& of,
                                                                        const part& each) const noexcept {
  return {.request = id_of(static_cast<std::uint32_t>(&of - requests_.data()), of),
          .part = static_cast<std::uint32_t>(&each - of.parts.data())};
}

/// Begins to read blocks from their holders' memory, or does all of it. Copies follow each other immediately:
/// with more work between two of them than a processor executes ahead, memory would idle meanwhile. After a
/// failure the block can be asked for by message.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::read(record& of, read_batch& batch) noexcept {
  for (std::size_t k = 0; k < batch.count; ++k) {
    part& each = of.parts[batch.parts[k]];
    batch.outcomes[k] = mover_.fetch(each.holder, Tiers::name_of(each.group, key_of(of, each)),
                                     tiers_->bytes_of(each.block), ticket_of(of, each));
  }
  for (std::size_t k = 0; k < batch.count; ++k)
    end_read(of, of.parts[batch.parts[k]], batch.holders[k], batch.outcomes[k]);
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::end_read(record& of, part& each, std::uint32_t holder,
                                                          pool::moved how) noexcept {
  each.read_from |= static_cast<std::uint8_t>(1U << holder);
  if (how == pool::moved::here) {
    ++counted_.read_blocks;
    return arrive(each);
  }
  if (how == pool::moved::begun) {
    each.is_reading = true;
    each.ask_again = time_to_ask_again(of, wait_for_block(), 0);
    return;
  }
  read_in_step_ -= block_bytes(each.group);
  if (how == pool::moved::busy) {
    each.read_from &= static_cast<std::uint8_t>(~(1U << holder));
    read_in_step_ = options_.serve_bytes;  // no further one in this step
  } else {
    ++counted_.failed_reads;
    if (how == pool::moved::damaged) report_damage(of, each);
  }
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::on_moved(const pool::move_ticket& ticket,
                                                          pool::moved how) noexcept {
  record* const of = find(ticket.request);
  if (of == nullptr || ticket.part >= of->parts.size() || !of->parts[ticket.part].is_reading) return;
  part& each = of->parts[ticket.part];
  each.is_reading = false;
  if (how == pool::moved::here) {
    ++counted_.read_blocks;
    return arrive(each);
  }
  ++counted_.failed_reads;
  if (how == pool::moved::damaged) report_damage(*of, each);
  fail(*of, each, errc::ok);  // the next step asks its owner by message
}

/// Nothing is written to the block's slot from then on.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::stop_reading(record& of, part& each) noexcept {
  if (std::exchange(each.is_reading, false)) mover_.drop(ticket_of(of, each));
}

}  // namespace v0
}  // namespace llmmem
