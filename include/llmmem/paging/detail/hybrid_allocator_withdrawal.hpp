/// @file
/// Bodies of hybrid_allocator.hpp: withdrawing contents from the cache, and removing tokens from the middle
/// of a sequence. Only hybrid_allocator.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <cstring>
#include <utility>

namespace llmmem {
inline namespace v0 {

template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::reset(std::uint64_t epoch) noexcept {
  if (epoch <= epoch_) return refusal(errc::old_epoch, 0, epoch, epoch_);
  epoch_ = epoch;
  ++losses_;
  std::uint64_t cached = 0;
  for (std::uint32_t i = 1; i < pool_.block_ids(); ++i) {
    const block_id block{i};
    if (!pool_.record(block).is_cached()) continue;
    const block_id node = node_of_[i];
    const std::size_t group = pool_.group_of(block);
    if constexpr (!clearing_observer<observer_type>) observer_.on_dropped(block, chain_.key(node), group);
    chain_.drop(node, group);
    pool_.unmark_cached(block);
    ++cached;
  }
  if constexpr (clearing_observer<observer_type>) observer_.on_cleared(epoch);
  for (std::uint32_t slot = 0; slot < records_.touched(); ++slot) {
    if (!records_.is_live(slot) || records_[slot].tokens != 0) continue;
    records_[slot].epoch = epoch;
    records_[slot].at = chain_.root(records_[slot].context, epoch);
  }
  return cached;
}

/// Removes a block from the cache; returns how many blocks were cached.
template <class Traits>
std::uint64_t hybrid_allocator<Traits>::drop_cached(block_id block) noexcept {
  if (block == null_block || !pool_.record(block).is_cached()) return 0;
  drop_contents<detail::loss::invalidated>(block);
  return 1;
}

/// Removes everything after `node` from the cache, in all groups; returns how many blocks.
template <class Traits>
std::uint64_t hybrid_allocator<Traits>::drop_below(block_id node) noexcept {
  std::uint64_t dropped = 0;
  chain_.share(node);
  chain_.each_below(node, [&](block_id each) noexcept {
    chain_.share(each);
    for (std::size_t g = 0; g < group_count_; ++g)
      dropped += drop_cached(chain_.cached(each, g));
    chain_.release(each);
  });
  chain_.release(node);
  return dropped;
}

/// Returns the node after the first `chunks` chunks of a sequence. @pre the sequence has committed that many.
template <class Traits>
block_id hybrid_allocator<Traits>::node_at(const record& sequence, std::uint64_t chunks) const noexcept {
  block_id node = sequence.at.node;
  for (std::uint64_t i = sequence.committed; i > chunks; --i)
    node = chain_.parent(node);
  return node;
}

template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::invalidate(block_id block) noexcept {
  if (block == null_block || to_index(block) >= pool_.block_ids())
    return refusal(errc::no_such_block, to_index(block), to_index(block), pool_.block_ids());
  const block_record& state = pool_.record(block);
  if (!state.is_active() && !state.is_cached()) return std::uint64_t{0};
  const std::size_t group = pool_.group_of(block);
  std::uint64_t dropped = 0;
  if (state.is_cached()) {
    // Sequences with this prefix that no longer hold the block have read it, too.
    const block_id node = node_of_[to_index(block)];
    std::uint64_t chunks = 0;
    for (block_id each = node; each != null_block; each = chain_.parent(each))
      ++chunks;
    const std::uint64_t end = chunks * chunk_tokens_;
    const std::uint64_t index = end / groups_[group].block_tokens - 1;
    for (std::uint32_t slot = 0; slot < records_.touched(); ++slot) {
      if (!records_.is_live(slot)) continue;
      record& sequence = records_[slot];
      if (sequence.committed < chunks || row(slot, group)[index] != null_block) continue;
      if (sequence.tokens > end && node_at(sequence, chunks) == node) limit(sequence, end);
    }
    chain_.share(node);
    dropped += drop_cached(block) + drop_below(node);
    chain_.release(node);
  }
  if (state.is_active()) {
    if (dropped == 0) limit_readers_of(block, group);
    pool_.invalidate(block);
  }
  dropped += spread_wrong();
  counters_.invalidated += dropped;
  return dropped;
}

/// Limits the sequences that no longer hold `block`, which no prefix names, and begin with the tokens of a
/// sequence that holds it: they have read it, too.
template <class Traits>
void hybrid_allocator<Traits>::limit_readers_of(block_id block, std::size_t group) noexcept {
  const std::uint64_t tokens = groups_[group].block_tokens;
  for (std::uint32_t holder = 0; holder < records_.touched(); ++holder) {
    if (!records_.is_live(holder)) continue;
    const record& held = records_[holder];
    std::uint64_t i = 0;
    while (i < held.tokens / tokens && row(holder, group)[i] != block)
      ++i;
    if (i == held.tokens / tokens) continue;
    const std::uint64_t end = (i + 1) * tokens;
    for (std::uint32_t slot = 0; slot < records_.touched(); ++slot) {
      if (!records_.is_live(slot) || records_[slot].tokens <= end) continue;
      record& reader = records_[slot];
      if (row(slot, group)[i] != null_block || reader.epoch != held.epoch ||
          !(reader.context == held.context))
        continue;
      // Tokens without values may be equal, because a fork can name what its parent has not named yet.
      const std::uint64_t both_named = held.unnamed < reader.unnamed ? held.unnamed : reader.unnamed;
      const std::uint64_t named = end < both_named ? end : both_named;
      const bool is_equal = std::memcmp(tokens_.data() + slot * max_sequence_tokens_,
                                        tokens_.data() + holder * max_sequence_tokens_,
                                        static_cast<std::size_t>(named) * sizeof(token_id)) == 0;
      if (is_equal) limit(reader, end);
    }
  }
}

template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::invalidate(sequence_id sequence,
                                                           std::uint64_t from) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  record& wrong = records_[sequence.slot];
  if (from > wrong.tokens) return refusal(errc::past_the_end, sequence.slot, from, wrong.tokens);
  if (from == wrong.tokens) return std::uint64_t{0};
  limit(wrong, from);
  std::uint64_t dropped = mark_wrong(sequence.slot) + spread_wrong();
  counters_.invalidated += dropped;
  return dropped;
}

/// Removes the unsound contents of a sequence, and everything after them, from the cache: all its blocks that
/// reach past its sound tokens. Returns how many blocks were cached.
template <class Traits>
std::uint64_t hybrid_allocator<Traits>::mark_wrong(std::uint32_t slot) noexcept {
  record& sequence = records_[slot];
  // A block that reaches past the sound tokens is wrong as a whole; states are cut at the ends of their
  // blocks in any case.
  for (std::uint64_t before = sequence.sound + 1; sequence.sound < before;) {
    before = sequence.sound;
    for (std::size_t g = 0; g < group_count_; ++g) {
      const std::uint64_t whole = sequence.sound / groups_[g].block_tokens;
      const bool is_held =
          whole < groups_[g].blocks_for(sequence.tokens) && row(slot, g)[whole] != null_block;
      if (is_held && groups_[g].kind != layer_kind::state_snapshots)
        limit(sequence, whole * groups_[g].block_tokens);
    }
  }
  std::uint64_t dropped = 0;
  const std::uint64_t chunks = sequence.sound / chunk_tokens_;
  if constexpr (requires { observer_.on_invalidated(null_block, block_key{}, std::size_t{0}); }) {
    // Tiers may hold contents that the cache has dropped.
    if (chunks < sequence.committed)
      observer_.on_invalidated(null_block, chain_.key(node_at(sequence, chunks + 1)), 0);
  }
  if (chunks < sequence.committed) dropped += drop_below(node_at(sequence, chunks));
  for (std::size_t g = 0; g < group_count_; ++g) {
    for (std::uint64_t i = sequence.sound / groups_[g].block_tokens;
         i < groups_[g].blocks_for(sequence.tokens); ++i) {
      const block_id block = row(slot, g)[i];
      if (block == null_block) continue;
      dropped += drop_cached(block);
      pool_.invalidate(block);
    }
  }
  return dropped;
}

/// Marks as wrong what sequences computed after wrong blocks. Because sequences share blocks, it repeats
/// until it finds no more. Returns how many blocks were cached.
template <class Traits>
std::uint64_t hybrid_allocator<Traits>::spread_wrong() noexcept {
  std::uint64_t dropped = 0;
  for (bool changed = true; changed;) {
    changed = false;
    for (std::uint32_t slot = 0; slot < records_.touched(); ++slot) {
      if (!records_.is_live(slot)) continue;
      record& sequence = records_[slot];
      const std::uint64_t before = sequence.sound;
      for (std::size_t g = 0; g < group_count_; ++g) {
        const std::uint64_t tokens = groups_[g].block_tokens;
        for (std::uint64_t i = 0; i < groups_[g].blocks_for(sequence.tokens) && i * tokens < sequence.sound;
             ++i) {
          const block_id block = row(slot, g)[i];
          if (block != null_block && pool_.record(block).is_invalid()) limit(sequence, i * tokens);
        }
      }
      if (sequence.sound == before && (before >= sequence.tokens || !has_unmarked(slot))) continue;
      dropped += mark_wrong(slot);
      changed = true;
    }
  }
  return dropped;
}

/// Whether a sequence holds a block after its sound tokens that is not yet known to be wrong.
template <class Traits>
bool hybrid_allocator<Traits>::has_unmarked(std::uint32_t slot) const noexcept {
  const record& sequence = records_[slot];
  if (sequence.has_gap) return false;
  for (std::size_t g = 0; g < group_count_; ++g) {
    for (std::uint64_t i = sequence.sound / groups_[g].block_tokens;
         i < groups_[g].blocks_for(sequence.tokens); ++i) {
      const block_id block = row(slot, g)[i];
      if (block != null_block && !pool_.record(block).is_invalid()) return true;
    }
  }
  return false;
}

template <class Traits>
std::uint64_t hybrid_allocator<Traits>::prefix_tokens(sequence_id sequence) const noexcept {
  if (!check(sequence)) return 0;
  const record& held = records_[sequence.slot];
  return held.tokens < held.sound ? held.tokens : held.sound;
}

// Removal from the middle

/// Returns the range if it can be removed, or why it cannot.
template <class Traits>
result<token_range> hybrid_allocator<Traits>::check_removal(sequence_id sequence,
                                                            token_range range) const noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const record& cut = records_[sequence.slot];
  if (range.first >= range.end) return refusal(errc::empty_range, sequence.slot, range.first, range.end);
  if (range.first > cut.tokens) return refusal(errc::past_the_end, sequence.slot, range.first, cut.tokens);
  if (range.end >= cut.tokens) return token_range{range.first, cut.tokens};
  const std::uint64_t gone = range.end - range.first;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const layer_group& of = groups_[g];
    for (const std::uint64_t edge : {range.first, range.end}) {
      if (edge % of.block_tokens != 0)
        return refusal(errc::not_whole_blocks, sequence.slot, edge, of.block_tokens);
    }
    // The blocks that the next token will read must exist: the window may reach blocks that it has released.
    const std::uint64_t first = range.first / of.block_tokens;
    const std::uint64_t blocks = gone / of.block_tokens;
    const std::uint64_t dead = dead_to(cut, g);
    std::uint64_t dead_then = dead;
    if (dead > first) dead_then = dead >= first + blocks ? dead - blocks : first;
    const bool sees_dead = dead_then > dead_from(g) && of.dead_blocks(cut.tokens - gone) < dead_then;
    const bool moves_chunks = of.kind == layer_kind::chunked_local && gone % of.reach != 0;
    const bool takes_sinks = first < dead_from(g);
    if (of.kind == layer_kind::state_snapshots || moves_chunks || sees_dead || takes_sinks)
      return refusal(errc::cannot_remove, static_cast<std::uint32_t>(g), range.first, range.end);
  }
  return range;
}

template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::remove(sequence_id sequence, token_range range) noexcept {
  const auto gone = check_removal(sequence, range);
  if (!gone) return gone.error();
  const auto held = [&]() noexcept {
    std::uint64_t blocks = 0;
    for (std::size_t g = 0; g < group_count_; ++g) {
      for (const block_id block : table(sequence, g))
        blocks += block != null_block ? 1U : 0U;
    }
    return blocks;
  };
  const std::uint64_t before = held();
  const auto done = gone->end == records_[sequence.slot].tokens ? truncate(sequence, gone->first)
                                                                : close_up(sequence.slot, *gone);
  if (!done) return done.error();
  return before - held();
}

template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::remove_after(sequence_id sequence, token_range range,
                                                             const fence_type& after) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const fence_type before = std::exchange(records_[sequence.slot].after, after);
  const auto removed = remove(sequence, range);
  if (!removed) records_[sequence.slot].after = before;
  return removed;
}

/// Releases the blocks of `range`, and closes the gap.
template <class Traits>
result<void> hybrid_allocator<Traits>::close_up(std::uint32_t slot, token_range range) noexcept {
  record& sequence = records_[slot];
  const std::uint64_t gone = range.end - range.first;
  std::array<table_part, max_layer_groups> parts{};
  for (std::size_t g = 0; g < group_count_; ++g)
    parts[g] = table_part(row(slot, g) + range.first / groups_[g].block_tokens,
                          static_cast<std::size_t>(gone / groups_[g].block_tokens));
  if (const auto given = let_go(slot, std::span(parts).first(group_count_)); !given) return given;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const std::uint64_t first = range.first / groups_[g].block_tokens;
    const std::uint64_t blocks = gone / groups_[g].block_tokens;
    const std::uint64_t end = groups_[g].blocks_for(sequence.tokens);
    block_id* const entries = row(slot, g);
    std::memmove(entries + first, entries + first + blocks, (end - first - blocks) * sizeof(block_id));
    const std::uint32_t dead = sequence.dead[g];
    if (dead > first)
      sequence.dead[g] = static_cast<std::uint32_t>(dead >= first + blocks ? dead - blocks : first);
  }
  token_id* const tokens = tokens_.data() + slot * max_sequence_tokens_;
  std::memmove(tokens + range.first, tokens + range.end, (sequence.tokens - range.end) * sizeof(token_id));
  // The chain returns to the last position before the gap.
  const std::uint64_t rest = sequence.tokens - gone;
  const std::uint64_t chunks = range.first / chunk_tokens_;
  if (chunks < sequence.committed) {
    const block_id node = node_at(sequence, chunks);
    chain_.share(node);
    chain_.release(sequence.at.node);
    sequence.at =
        node == null_block ? chain_.root(sequence.context, sequence.epoch) : place{node, chain_.key(node)};
    sequence.committed = chunks;
  }
  counters_.tokens -= gone;
  sequence.tokens = rest;
  sequence.full_at = sequence.frees_at = 0;
  limit(sequence, range.first);
  sequence.has_gap = true;
  if (sequence.unnamed > range.first && sequence.unnamed != ~std::uint64_t{0})
    sequence.unnamed = sequence.unnamed < range.end ? range.first : sequence.unnamed - gone;
  if constexpr (retains<eviction_type>) retained_[slot].close_up(range);
  for (std::size_t g = 0; g < group_count_; ++g) {
    for (std::uint64_t i = range.first / groups_[g].block_tokens; i < groups_[g].blocks_for(rest); ++i) {
      const block_id block = row(slot, g)[i];
      if (block != null_block && pool_.record(block).is_cached() && pool_.record(block).references() == 1)
        drop_contents(block);
    }
  }
  return {};
}

}  // namespace v0
}  // namespace llmmem
