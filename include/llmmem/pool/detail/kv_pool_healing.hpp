/// @file
/// Bodies of kv_pool.hpp: a damaged block at its reader and at its holder. Only that file
/// includes this one.
#pragma once

#include <llmmem/pool/kv_pool.hpp>

namespace llmmem {
inline namespace v0 {

// The reader

/// Reports to a holder that its block arrived damaged. The report goes before any further request, and the
/// holder may have a sound copy in a lower tier, so the reader asks it once more, after the other holders.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::report_damage(const record& of, part& each) noexcept {
  ++counted_.damaged_blocks;
  const std::uint64_t which = each.chunk / pool::span_chunks;
  const detail::pool_span& in = of.spans[static_cast<std::size_t>(which - of.first_span)];
  for (std::uint32_t h = 0; h < in.holder_count; ++h) {
    if (in.holders[h].seat != each.holder) continue;
    const auto bit = static_cast<std::uint8_t>(1U << h);
    if ((each.damaged_by & bit) == 0) each.tried &= static_cast<std::uint8_t>(~bit);
    each.damaged_by |= bit;
  }
  detail::pool_writer out;
  out.put(peers_[to_index(each.holder)].nonce);
  out.put(of.chain->keys()[static_cast<std::size_t>(which * pool::span_chunks)]);
  out.put(each.group);
  out.put(static_cast<std::uint32_t>(each.chunk % pool::span_chunks));
  out.put(key_of(of, each));
  if (may_post(each.holder)) ++counted_.reported_blocks;
  post_or_drop(each.holder, detail::pool_frame::damaged, out);
}

// The holder

/// Hostile input: it names a block to verify, and proves nothing.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::hear_damaged(seat_id from, detail::pool_reader in) noexcept {
  const auto nonce = in.take<std::uint64_t>();
  const auto span = in.take<block_key>();
  const auto group = in.take<std::uint32_t>();
  const auto place = in.take<std::uint32_t>();
  const auto key = in.take<block_key>();
  if (!in.is_over() || group >= groups_ || place >= pool::span_chunks) {
    ++counted_.refused_frames;
    return;
  }
  // A report about an earlier process in this seat names a copy that ended with it.
  if (nonce != nonce_ || !peers_[to_index(from)].checks.may_check(end_->now_ns(), options_.max_checks)) {
    ++counted_.ignored_reports;
    return;
  }
  check_copy(span, group, place, key);
}

/// Verifies a copy in the first tier. If it is damaged and no other tier has the block, corrects the
/// directory; a lower tier's copy is verified when a reader's request brings it up.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::check_copy(const block_key& span, std::uint32_t group,
                                                            std::uint32_t place,
                                                            const block_key& key) noexcept {
  switch (tiers_->verify_copy(group, key)) {
    case offload::copy_state::unknown:
      ++counted_.ignored_reports;
      return;
    case offload::copy_state::sound:
      ++counted_.checked_blocks;
      if constexpr (reads_directly) offer_again(group, key);
      return;
    case offload::copy_state::damaged:
      ++counted_.checked_blocks;
      ++counted_.dropped_blocks;
      if (tiers_->lookup_block(group, key).first == offload::answer::miss) retract(span, group, place, key);
  }
}

/// Writes the index entry of a sound block again, because a damaged entry may have misled the reader.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::offer_again(std::size_t group,
                                                             const block_key& key) noexcept {
  const block_key name = Tiers::name_of(group, key);
  if (!mover_.is_offered(name)) return;
  const auto held = tiers_->hold(group, key);
  if (!held) return;
  mover_.withdraw(name);
  offer(group, key, *held);
  tiers_->release(*held);
}

}  // namespace v0
}  // namespace llmmem
