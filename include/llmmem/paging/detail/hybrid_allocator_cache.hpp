/// @file
/// Bodies of hybrid_allocator.hpp: caching, sharing and lookup. Only hybrid_allocator_body.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <cstring>
#include <optional>

namespace llmmem {
inline namespace v0 {

template <class Traits>
typename hybrid_allocator<Traits>::hit hybrid_allocator<Traits>::longest_hit(
    std::span<const token_id> tokens, place at, const prefix_context& context) const noexcept {
  paging::hit_scan scan(groups());
  hit best{.tokens = 0, .at = at};
  const std::uint64_t limit = tokens.size() < max_sequence_tokens_ ? tokens.size() : max_sequence_tokens_;
  auto keys = chain_.keys_after(at, tokens);
  for (std::uint64_t end = chunk_tokens_; end <= limit && !scan.is_exhausted(); end += chunk_tokens_) {
    const auto part = tokens.subspan(static_cast<std::size_t>(end - chunk_tokens_), chunk_tokens_);
    const auto next = chain_.find(at, keys.next(), part, context);
    if (!next) break;
    at = *next;
    for (std::size_t g = 0; g < group_count_; ++g) {
      if (ends_block(g, end)) scan.add(g, chain_.cached(at.node, g) != null_block);
    }
    if (scan.has_hit(end)) best = {.tokens = end, .at = at};
  }
  return best;
}

template <class Traits>
result<match_result> hybrid_allocator<Traits>::match(sequence_id sequence,
                                                     std::span<const token_id> tokens) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  record& taker = records_[sequence.slot];
  if (taker.tokens != 0) return refusal(errc::not_fresh, sequence.slot, 0, taker.tokens);
  ++counters_.matches;
  const hit found = longest_hit(tokens, taker.at, taker.context);
  if (found.tokens == 0) return match_result{};
  const auto blocks = take(sequence.slot, found);
  if (!blocks) return blocks.error();
  chain_.share(found.at.node);
  taker.at = found.at;
  taker.committed = found.tokens / chunk_tokens_;
  taker.tokens = found.tokens;
  taker.full_at = 0;
  std::memcpy(tokens_.data() + sequence.slot * max_sequence_tokens_, tokens.data(),
              found.tokens * sizeof(token_id));
  counters_.tokens += found.tokens;
  counters_.hit_tokens += found.tokens;
  return match_result{.tokens = found.tokens, .blocks = *blocks};
}

/// Calls `visit(group, block index, block)` for each block that a hit shares, last to first.
template <class Traits>
template <class Visit>
void hybrid_allocator<Traits>::visit_hit(const hit& found, Visit&& visit) const noexcept {
  std::uint64_t first_token = found.tokens;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const block_range needed = groups_[g].hit_blocks(found.tokens);
    const std::uint64_t begins = dead_from(g) != 0 ? 0 : needed.first * groups_[g].block_tokens;
    if ((needed.count() != 0 || dead_from(g) != 0) && begins < first_token) first_token = begins;
  }
  // Walks up the chain as far as any group needs.
  block_id node = found.at.node;
  for (std::uint64_t end = found.tokens; end > first_token; end -= chunk_tokens_) {
    for (std::size_t g = 0; g < group_count_; ++g) {
      const std::uint64_t blocks = whole_blocks(g, end);
      if (ends_block(g, end) && hit_has(g, found.tokens, blocks - 1))
        visit(g, blocks - 1, chain_.cached(node, g));
    }
    node = chain_.parent(node);
  }
}

/// Fills the tables of a sequence without tokens with the blocks of a hit, and shares them; returns their
/// number.
template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::take(std::uint32_t slot, const hit& found) noexcept {
  record& taker = records_[slot];
  taker.frees_at = 0;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const block_range needed = groups_[g].hit_blocks(found.tokens);
    taker.dead[g] = static_cast<std::uint32_t>(needed.first);
    for (std::uint64_t i = 0; i < needed.end; ++i)
      row(slot, g)[i] = null_block;
  }
  visit_hit(found, [&](std::size_t g, std::uint64_t i, block_id block) noexcept { row(slot, g)[i] = block; });
  std::uint64_t shared = 0;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const std::uint64_t end = groups_[g].hit_blocks(found.tokens).end;
    for (std::uint64_t i = 0; i < end; ++i) {
      const block_id block = row(slot, g)[i];
      if (block == null_block) continue;
      if (const auto done = pool_.share(block); !done) {
        for (std::size_t h = 0; h <= g; ++h) {
          for (std::uint64_t k = h == g ? i : groups_[h].hit_blocks(found.tokens).end; k > 0; --k) {
            if (row(slot, h)[k - 1] != null_block) static_cast<void>(pool_.release(row(slot, h)[k - 1]));
          }
        }
        taker.dead = {};
        return done.error();
      }
      const block_id named_by = node_of_[to_index(block)];
      pool_.touch(block, hint_for(slot, g, i, chain_.key(named_by).low));
      ++shared;
    }
  }
  if constexpr (group_sharing_observer<observer_type>) tell_shared(slot, found.tokens);
  return shared;
}

/// Reports that block number `block` of `group` is cached at `at`, after its last token. Names the parent
/// only if the same group has cached it, because a router that follows one group knows no other.
template <class Traits>
void hybrid_allocator<Traits>::tell_cached(const place& at, std::uint32_t slot, std::size_t group,
                                           std::uint64_t block) noexcept {
  const std::uint32_t tokens = groups_[group].block_tokens;
  block_id before = at.node;
  for (std::uint32_t i = 0; i < tokens; i += chunk_tokens_)
    before = chain_.parent(before);
  const bool is_parent_known = before != null_block && chain_.cached(before, group) != null_block;
  observer_.on_cached(
      stored_block{.block = row(slot, group)[block],
                   .key = at.key,
                   .parent = is_parent_known ? chain_.key(before) : block_key{},
                   .first = block * tokens,
                   .tokens = tokens,
                   .token_ids = {tokens_.data() + slot * max_sequence_tokens_ + block * tokens, tokens},
                   .context = &records_[slot].context},
      group);
}

/// Reports the blocks that a hit of `length` tokens shares.
template <class Traits>
void hybrid_allocator<Traits>::tell_shared(std::uint32_t slot, std::uint64_t length) noexcept {
  for (std::size_t g = 0; g < group_count_; ++g) {
    for (std::uint64_t i = 0; i < groups_[g].hit_blocks(length).end; ++i) {
      const block_id block = row(slot, g)[i];
      if constexpr (group_sharing_observer<observer_type>) {
        if (block != null_block) observer_.on_shared(block, chain_.key(node_of_[to_index(block)]), g);
      }
    }
  }
}

template <class Traits>
template <class Visit>
void hybrid_allocator<Traits>::for_each_cached(Visit&& visit) const {
  static_assert(std::is_invocable_v<Visit&, const stored_key&, std::size_t>,
                "visit must be callable as visit(const stored_key&, std::size_t)");
  for (std::uint32_t i = 1; i < pool_.block_ids(); ++i) {
    const block_id block{i};
    if (!pool_.record(block).is_cached()) continue;
    const std::size_t group = pool_.group_of(block);
    visit(stored_key{chain_.key(node_of_[i]), block, groups_[group].block_tokens}, group);
  }
}

/// Returns the position after the next chunk; if the chain is full, evicts idle blocks to make space.
template <class Traits>
std::optional<typename hybrid_allocator<Traits>::place> hybrid_allocator<Traits>::next_place(
    record& sequence, const block_key& key, std::span<const token_id> part) noexcept {
  for (;;) {
    const auto next = chain_.extend(sequence.at, key, part, sequence.context);
    if (next || chain_.free() != 0 || chain_.collides(sequence.at, key, part, sequence.context)) return next;
    bool evicted = false;
    for (std::size_t g = 0; g < group_count_; ++g)
      evicted = pool_.evict_one(g, forget_evicted()) || evicted;
    if (!evicted) return std::nullopt;
  }
}

template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::commit(sequence_id sequence, std::uint64_t written) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const std::uint64_t held = records_[sequence.slot].tokens;
  if (written > held) return refusal(errc::past_the_end, sequence.slot, written, held);
  return commit_written(sequence.slot, written);
}

/// `commit` of a sequence that has at least `written` tokens.
template <class Traits>
std::uint64_t hybrid_allocator<Traits>::commit_written(std::uint32_t slot, std::uint64_t written) noexcept {
  const record& writer = records_[slot];
  std::uint64_t registered = 0;
  if (writer.epoch == epoch_) {
    const std::uint64_t before = counters_.registrations;
    if (writer.borrows) commit_again(slot);
    const std::uint64_t end = cacheable(writer);
    const std::uint64_t sound = written < end ? written : end;
    if (sound >= (writer.committed + 1) * chunk_tokens_) commit_chunks(slot, sound);
    registered = counters_.registrations - before;
  }
  release_dead(slot, written);
  return registered;
}

/// Adds the chunks of the first `written` tokens to the chain, and caches the blocks that end with them.
template <class Traits>
void hybrid_allocator<Traits>::commit_chunks(std::uint32_t slot, std::uint64_t written) noexcept {
  record& writer = records_[slot];
  const std::uint64_t chunks = written / chunk_tokens_;
  if (writer.committed >= chunks) return;
  const auto new_tokens = static_cast<std::size_t>((chunks - writer.committed) * chunk_tokens_);
  for (auto keys = chain_.keys_after(writer.at, {chunk(slot, writer.committed).data(), new_tokens});
       writer.committed < chunks; ++writer.committed) {
    const auto next = next_place(writer, keys.next(), chunk(slot, writer.committed));
    if (!next) break;
    chain_.share(next->node);
    chain_.release(writer.at.node);
    writer.at = *next;
    const std::uint64_t end = (writer.committed + 1) * chunk_tokens_;
    for (std::size_t g = 0; g < group_count_; ++g)
      cache_block(slot, g, writer.at, end);
  }
}

/// Whether a sequence holds block number `block` of `group`; for a group whose steps skip blocks, also
/// whether the block has the state at its end. A step that began inside a block left that block with an inner
/// state. Such a block is held until a later call releases it (`limit_releases`, `errc::deferred_full`), and
/// others may follow: all blocks from the first to the last of them count as left.
template <class Traits>
bool hybrid_allocator<Traits>::is_snapshot(std::uint32_t slot, std::size_t group,
                                           std::uint64_t block) const noexcept {
  const record& sequence = records_[slot];
  const block_id* const entries = row(slot, group);
  if (entries[block] == null_block) return false;
  const std::uint32_t last = sequence.left_last[group];
  if (block >= last || entries[last - 1] == null_block) return true;
  const std::uint32_t first = sequence.left[group];
  if (entries[first - 1] != null_block && block + 1 < first) return true;
  return block + 1 == blocks_for(group, sequence.tokens);
}

/// Caches the block of `group` that ends after `end` tokens, at `at`, if that block exists, the sequence
/// holds it, and no block is cached there.
template <class Traits>
void hybrid_allocator<Traits>::cache_block(std::uint32_t slot, std::size_t group, const place& at,
                                           std::uint64_t end) noexcept {
  const std::uint64_t blocks = whole_blocks(group, end);
  if (blocks * per_block_[group].by() != end) return;
  const std::uint64_t i = blocks - 1;
  const block_id block = row(slot, group)[i];
  if (!is_snapshot(slot, group, i) || pool_.is_retiring(block)) return;
  // A fork gave other values to tokens that it shares with this sequence (`name_tokens`), and was first.
  if (pool_.record(block).is_cached() && node_of_[to_index(block)] != at.node) return;
  if (const block_id cached = chain_.cached(at.node, group); cached != null_block) {
    if (cached == block) return;
    ++counters_.duplicates;
    records_[slot].borrows = true;
    return;
  }
  chain_.hold(at.node, group, block);
  node_of_[to_index(block)] = at.node;
  pool_.mark_cached(block, hint_for(slot, group, i, at.key.low));
  if constexpr (is_observed) tell_cached(at, slot, group, i);
  ++counters_.registrations;
}

/// Caches a sequence's blocks in place of equal blocks of other sequences that are no longer cached.
template <class Traits>
void hybrid_allocator<Traits>::commit_again(std::uint32_t slot) noexcept {
  record& sequence = records_[slot];
  if (!sequence.borrows || sequence.losses == losses_ || sequence.epoch != epoch_) return;
  sequence.losses = losses_;
  sequence.borrows = false;
  block_id node = sequence.at.node;
  for (std::uint64_t i = sequence.committed; i > 0; --i) {
    path_[i - 1] = node;
    node = chain_.parent(node);
  }
  const std::uint64_t sound = sequence.sound / chunk_tokens_;
  for (std::uint64_t i = 0; i < sequence.committed && i < sound; ++i) {
    for (std::size_t g = 0; g < group_count_; ++g)
      cache_block(slot, g, place{path_[i], chain_.key(path_[i])}, (i + 1) * chunk_tokens_);
  }
}

template <class Traits>
std::uint64_t hybrid_allocator<Traits>::drop_idle() noexcept {
  std::uint64_t dropped = 0;
  for (std::size_t g = 0; g < group_count_; ++g) {
    while (pool_.evict_one(g, forget_evicted()))
      ++dropped;
  }
  return dropped;
}

}  // namespace v0
}  // namespace llmmem
