/// @file
/// Bodies of kv_pool.hpp: copies of hot spans in other failure domains. Only that file includes this one.
#pragma once

#include <llmmem/paging/outside_keys.hpp>
#include <llmmem/pool/kv_pool.hpp>

namespace llmmem {
inline namespace v0 {

/// Finds the nodes that keep copies of a span: by rendezvous hashing, one of each other domain.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
std::uint32_t kv_pool<Tiers, Endpoint, Directory, Mover>::targets_of(const block_key& span,
                                                                     copy_targets& into) const noexcept {
  const std::uint64_t what = span.low ^ span.high;
  std::uint32_t count = 0;
  while (count < options_.copies) {
    seat_id best = no_seat;
    std::uint64_t most = 0;
    for (std::uint32_t i = 0; i < peers_.size(); ++i) {
      const detail::pool_peer& peer = peers_[i];
      if (peer.state != pool::peer_state::present || peer.domain == options_.domain) continue;
      bool is_taken = false;
      for (std::uint32_t t = 0; t < count; ++t)
        is_taken = is_taken || peers_[to_index(into[t])].domain == peer.domain;
      const std::uint64_t score = detail::mix_pair(what, peer.nonce);
      if (is_taken || (best != no_seat && score <= most)) continue;
      most = score;
      best = seat_id{i};
    }
    if (best == no_seat) break;
    into[count++] = best;
  }
  return count;
}

/// Counts a use of a published span. If it is hot, asks nodes of other domains to keep its blocks: again if
/// other nodes are to keep them, if the chain is longer, and after many more uses.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::use(std::uint32_t entry, const kv_chain& chain,
                                                     std::uint64_t span, std::uint64_t count,
                                                     std::span<const std::uint64_t> masks) noexcept {
  constexpr std::uint32_t again_after = 4;  // times as many uses: the nodes may have evicted their copies
  if (options_.copies == 0) return;
  detail::pool_span_use& each = uses_[entry];
  if (each.span != published_.at(entry).span) each = {.span = published_.at(entry).span};
  if (each.uses != ~std::uint32_t{0}) ++each.uses;
  if (each.uses < options_.hot_uses) return;
  copy_targets targets{};
  const std::uint32_t found = targets_of(each.span, targets);
  std::uint64_t which = 0;
  for (std::uint32_t t = 0; t < found; ++t)
    which = detail::mix_pair(which, peers_[to_index(targets[t])].nonce);
  const bool is_overdue = each.uses / again_after >= each.copied_uses;
  if (found == 0 || (which == each.copied_by && count <= each.copied_chunks && !is_overdue)) return;
  const auto first = static_cast<std::size_t>(span * pool::span_chunks);
  detail::pool_writer out;
  out.put(static_cast<std::uint32_t>(count));
  out.put(first == 0 ? std::uint64_t{0} : paging::key_digest(chain.keys()[first - 1]));
  for (std::size_t i = 0; i < count; ++i)
    out.put(chain.keys()[first + i]);
  for (const std::uint64_t mask : masks)
    out.put(mask);
  bool is_told = true;
  for (std::uint32_t t = 0; t < found; ++t) {
    if (!may_post(targets[t])) {
      is_told = false;  // the next use asks again
      continue;
    }
    post(targets[t], detail::pool_frame::copy, out);
    ++counted_.ordered_copies;
  }
  if (!is_told) return;
  each.copied_by = which;
  each.copied_chunks = static_cast<std::uint32_t>(count);
  each.copied_uses = each.uses;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::hear_copy(seat_id from, detail::pool_reader in) noexcept {
  const auto count = in.take<std::uint32_t>();
  const auto before = in.take<std::uint64_t>();
  std::array<block_key, pool::span_chunks> keys{};
  std::array<std::uint64_t, max_layer_groups> masks{};
  if (count == 0 || count > pool::span_chunks) {
    ++counted_.refused_frames;
    return;
  }
  for (std::uint32_t i = 0; i < count; ++i)
    keys[i] = in.take<block_key>();
  const std::uint64_t bits = count < 64 ? (std::uint64_t{1} << count) - 1 : ~std::uint64_t{0};
  for (std::size_t g = 0; g < groups_; ++g)
    masks[g] = in.take<std::uint64_t>() & bits;
  if (!in.is_over()) {
    ++counted_.refused_frames;
    return;
  }
  try {
    begin_copy(from, std::span(keys).first(count), before, std::span(masks).first(groups_));
  } catch (...) {  // without memory there is no copy
    ++counted_.dropped_messages;
  }
}

/// Begins to fetch a span's blocks from the node that asked for it.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::begin_copy(seat_id from, std::span<const block_key> keys,
                                                            std::uint64_t before,
                                                            std::span<const std::uint64_t> masks) {
  std::size_t place = 0;
  while (place < copies_.size() && copies_[place])
    ++place;
  if (place == copies_.size()) {
    ++counted_.dropped_messages;
    return;
  }
  const auto slot = static_cast<std::uint32_t>(options_.max_requests + place);
  record& made = requests_[slot];
  made.parts.clear();
  for (std::size_t g = 0; g < groups_; ++g) {
    for (std::uint32_t c = 0; c < keys.size(); ++c) {
      if ((masks[g] >> c & 1U) != 0)
        made.parts.push_back({.group = static_cast<std::uint32_t>(g), .chunk = c});
    }
  }
  made.spans.assign(1, {.asked = to_index(self()), .is_answered = true, .holder_count = 1});
  made.spans[0].holders[0] = {from, peers_[to_index(from)].nonce};
  made.masks.assign(pool::max_holders * groups_, 0);
  for (std::size_t g = 0; g < groups_; ++g)
    made.masks[g] = masks[g];
  copies_[place].emplace(detail::key_chains::of(likeness_.chunk_tokens, epoch_, keys));
  const std::uint64_t now = end_->now_ns();
  made.chain = &*copies_[place];
  made.before = before;
  made.chunks = keys.size();
  made.deadline =
      options_.patience_ns > ~std::uint64_t{0} - now ? ~std::uint64_t{0} : now + options_.patience_ns;
  made.is_late = false;
  made.first_open = 0;
  made.first_span = 0;
  made.asked_spans = 1;
  made.came = {};
  made.ask_again = ~std::uint64_t{0};
  for (part& each : made.parts) {
    const auto found = tiers_->lookup_block(each.group, key_of(made, each));
    if (found.first == offload::answer::hit) each.state = part_state::arrived;
    if (found.first == offload::answer::pending) each.state = part_state::nearby;
  }
  made.is_live = true;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::end_copy(std::size_t place) noexcept {
  record& of = requests_[options_.max_requests + place];
  give_up_late(of);
  for (part& each : of.parts)
    let_go(each);
  of.is_live = false;
  of.before = 0;
  ++of.generation;
  copies_[place].reset();
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
kv_pool<Tiers, Endpoint, Directory, Mover>::~kv_pool() {
  for (std::size_t place = 0; place < copies_.size(); ++place) {
    if (copies_[place]) end_copy(place);
  }
  for (std::size_t i = 0; i < serving_count_; ++i)
    unpin(serving_[(serving_first_ + i) % serving_.size()]);
  if constexpr (reads_directly) close_memory();
}

/// Announces the copies whose blocks are here, or will not come. A copy pins no block that has arrived: the
/// engine may need its slot.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::end_copies() noexcept {
  for (std::size_t place = 0; place < copies_.size(); ++place) {
    if (!copies_[place]) continue;
    record& of = requests_[options_.max_requests + place];
    const bool is_current = of.chain->epoch() == epoch_;
    bool has_all = true;
    for (part& each : of.parts) {
      has_all = has_all && is_over(each);
      if (each.state == part_state::arrived) let_go(each);
    }
    if (!has_all && is_current) continue;
    if (is_current) {
      std::array<std::uint32_t, pool::span_chunks> digests{};
      std::array<std::uint64_t, max_layer_groups> masks{};
      const std::uint32_t count = digests_of(*of.chain, 0, digests);
      bool has_any = false;
      for (const part& each : of.parts) {
        const offload::answer has = tiers_->lookup_block(each.group, key_of(of, each)).first;
        if (has != offload::answer::hit && has != offload::answer::pending) continue;
        masks[each.group] |= std::uint64_t{1} << each.chunk;
        has_any = true;
      }
      if (has_any) {
        publish_blocks(of.chain->keys()[0], std::span(digests).first(count), std::span(masks).first(groups_));
        ++counted_.copied_spans;
      }
    }
    end_copy(place);
  }
}

}  // namespace v0
}  // namespace llmmem
