/// @file
/// Bodies of hybrid_allocator.hpp: truncation. Only hybrid_allocator_body.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <utility>

namespace llmmem {
inline namespace v0 {

/// Whether a group still has what the token after the first `tokens` reads.
template <class Traits>
bool hybrid_allocator<Traits>::can_cut(std::uint32_t slot, std::size_t group,
                                       std::uint64_t tokens) const noexcept {
  const record& sequence = records_[slot];
  const layer_group& of = groups_[group];
  const std::uint64_t dead = dead_to(sequence, group);
  if (!of.can_cut(tokens, sequence.tokens, dead > dead_from(group) ? dead : 0)) return false;
  if (!of.skips_blocks() || tokens == 0 || tokens == sequence.tokens) return true;
  return is_snapshot(slot, group, of.blocks_for(tokens) - 1);
}

/// Returns the first group that cannot be cut to `tokens`, or `group_count_`.
template <class Traits>
std::size_t hybrid_allocator<Traits>::blocking_group(std::uint32_t slot,
                                                     std::uint64_t tokens) const noexcept {
  std::size_t g = 0;
  while (g < group_count_ && can_cut(slot, g, tokens))
    ++g;
  return g;
}

template <class Traits>
result<paging::cut_points> hybrid_allocator<Traits>::nearest_cuts(sequence_id sequence,
                                                                  std::uint64_t tokens) const noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const std::uint64_t held = records_[sequence.slot].tokens;
  if (tokens > held) return refusal(errc::past_the_end, sequence.slot, tokens, held);
  paging::cut_points found{.below = tokens, .above = tokens};
  while (blocking_group(sequence.slot, found.below) != group_count_)
    --found.below;
  while (blocking_group(sequence.slot, found.above) != group_count_)
    ++found.above;
  return found;
}

template <class Traits>
result<void> hybrid_allocator<Traits>::truncate(sequence_id sequence, std::uint64_t tokens) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const std::uint32_t slot = sequence.slot;
  const record& cut = records_[slot];
  if (tokens > cut.tokens) return refusal(errc::past_the_end, slot, tokens, cut.tokens);
  if (const std::size_t g = blocking_group(slot, tokens); g != group_count_) {
    const auto nearest = nearest_cuts(sequence, tokens);
    return refusal(errc::not_kept, static_cast<std::uint32_t>(g), tokens, nearest->above);
  }
  if (const auto gone = give_back(slot, tokens); !gone) return gone;
  shorten(slot, tokens);
  return {};
}

template <class Traits>
result<void> hybrid_allocator<Traits>::truncate_after(sequence_id sequence, std::uint64_t tokens,
                                                      const fence_type& after) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const fence_type before = std::exchange(records_[sequence.slot].after, after);
  const auto cut = truncate(sequence, tokens);
  if (!cut) records_[sequence.slot].after = before;
  return cut;
}

/// Forgets all tokens except the first `tokens`; the caller has taken over the references to the blocks after
/// them.
template <class Traits>
void hybrid_allocator<Traits>::shorten(std::uint32_t slot, std::uint64_t tokens) noexcept {
  record& sequence = records_[slot];
  counters_.tokens -= sequence.tokens - tokens;
  sequence.tokens = tokens;
  note_full(sequence);
  for (std::size_t g = 0; g < group_count_; ++g) {
    // Smaller only if the next token reads nothing of the group.
    const std::uint64_t entries = blocks_for(g, tokens);
    if (sequence.dead[g] > entries) {
      sequence.dead[g] = static_cast<std::uint32_t>(entries);
      sequence.frees_at = 0;
    }
    if (sequence.left_last[g] > entries) sequence.left_last[g] = static_cast<std::uint32_t>(entries);
    if (sequence.left[g] > entries) sequence.left[g] = sequence.left_last[g] = 0;
  }
  if (tokens <= sequence.sound) {
    sequence.sound = ~std::uint64_t{0};
    sequence.has_gap = false;
  }
  if (tokens <= sequence.limit) sequence.limit = ~std::uint64_t{0};
  if (tokens <= sequence.unnamed) sequence.unnamed = ~std::uint64_t{0};
  if (tokens == 0) sequence.epoch = epoch_;
  if (sequence.committed <= tokens / chunk_tokens_) {
    if (tokens == 0) sequence.at = chain_.root(sequence.context, sequence.epoch);
    return;
  }
  block_id node = sequence.at.node;
  for (; sequence.committed > tokens / chunk_tokens_; --sequence.committed)
    node = chain_.parent(node);
  chain_.share(node);
  chain_.release(sequence.at.node);
  sequence.at =
      node == null_block ? chain_.root(sequence.context, sequence.epoch) : place{node, chain_.key(node)};
}

/// Undoes the caching of `block`, which one sequence alone holds and is about to overwrite.
template <class Traits>
template <detail::loss Why>
void hybrid_allocator<Traits>::drop_contents(block_id block) noexcept {
  forget<Why>(block);
  pool_.unmark_cached(block);
}

}  // namespace v0
}  // namespace llmmem
