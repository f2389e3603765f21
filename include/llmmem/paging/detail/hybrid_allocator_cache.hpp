/// @file
/// Bodies of hybrid_allocator.hpp: what is cached, shared and found. Included by hybrid_allocator_body.hpp
/// alone.
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
  for (std::uint64_t end = chunk_tokens_; end <= limit && !scan.hopeless(); end += chunk_tokens_) {
    const auto part = tokens.subspan(static_cast<std::size_t>(end - chunk_tokens_), chunk_tokens_);
    const auto next = chain_.find(at, part, context);
    if (!next) break;
    at = *next;
    for (std::size_t g = 0; g < group_count_; ++g) {
      if (end % groups_[g].block_tokens == 0) scan.see(g, chain_.cached(at.node, g) != null_block);
    }
    if (scan.serves(end)) best = {.tokens = end, .at = at};
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
  std::memcpy(tokens_.data() + sequence.slot * max_sequence_tokens_, tokens.data(),
              found.tokens * sizeof(token_id));
  counters_.tokens += found.tokens;
  counters_.hit_tokens += found.tokens;
  return match_result{.tokens = found.tokens, .blocks = *blocks};
}

/// Calls `visit(group, block index, block)` for each block that a hit shares, the last first.
template <class Traits>
template <class Visit>
void hybrid_allocator<Traits>::visit_hit(const hit& found, Visit&& visit) const noexcept {
  std::uint64_t first_token = found.tokens;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const block_range needed = groups_[g].hit_blocks(found.tokens);
    const std::uint64_t begins = needed.first * groups_[g].block_tokens;
    if (needed.count() != 0 && begins < first_token) first_token = begins;
  }
  // Up the chain, as far as any group needs it.
  block_id node = found.at.node;
  for (std::uint64_t end = found.tokens; end > first_token; end -= chunk_tokens_) {
    for (std::size_t g = 0; g < group_count_; ++g) {
      const std::uint64_t blocks = end / groups_[g].block_tokens;
      if (end % groups_[g].block_tokens == 0 && blocks > groups_[g].hit_blocks(found.tokens).first)
        visit(g, blocks - 1, chain_.cached(node, g));
    }
    node = chain_.parent(node);
  }
}

/// Fills the tables of a sequence without tokens with what a hit has, and shares it; says how many blocks.
template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::take(std::uint32_t slot, const hit& found) noexcept {
  record& taker = records_[slot];
  for (std::size_t g = 0; g < group_count_; ++g) {
    const block_range needed = groups_[g].hit_blocks(found.tokens);
    taker.dead[g] = static_cast<std::uint32_t>(needed.first);
    for (std::uint64_t i = 0; i < needed.end; ++i)
      row(slot, g)[i] = null_block;
  }
  visit_hit(found, [&](std::size_t g, std::uint64_t i, block_id block) noexcept { row(slot, g)[i] = block; });
  std::uint64_t shared = 0;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const block_range needed = groups_[g].hit_blocks(found.tokens);
    for (std::uint64_t i = needed.first; i < needed.end; ++i) {
      const block_id block = row(slot, g)[i];
      if (const auto done = pool_.share(block); !done) {
        for (std::size_t h = 0; h <= g; ++h) {
          const block_range back = groups_[h].hit_blocks(found.tokens);
          for (std::uint64_t k = h == g ? i : back.end; k > back.first; --k)
            static_cast<void>(pool_.release(row(slot, h)[k - 1]));
        }
        taker.dead = {};
        return done.error();
      }
      const block_id named_by = node_of_[to_index(block)];
      pool_.touch(block, {.content = chain_.key(named_by).low, .position = static_cast<std::uint32_t>(i)});
      ++shared;
    }
  }
  if constexpr (group_sharing_observer<observer_type>) tell_shared(slot, found.tokens);
  return shared;
}

/// @pre `owner.at` is behind the block.
template <class Traits>
void hybrid_allocator<Traits>::tell_cached(const record& owner, std::uint32_t slot, std::size_t group,
                                           std::uint64_t block) noexcept {
  const std::uint32_t tokens = groups_[group].block_tokens;
  block_id before = owner.at.node;
  for (std::uint32_t i = 0; i < tokens; i += chunk_tokens_)
    before = chain_.parent(before);
  observer_.on_cached(
      stored_block{.block = row(slot, group)[block],
                   .key = owner.at.key,
                   .parent = before == null_block ? block_key{} : chain_.key(before),
                   .tokens = tokens,
                   .token_ids = {tokens_.data() + slot * max_sequence_tokens_ + block * tokens, tokens},
                   .context = &owner.context},
      group);
}

/// Tells what a hit of `length` tokens took.
template <class Traits>
void hybrid_allocator<Traits>::tell_shared(std::uint32_t slot, std::uint64_t length) noexcept {
  for (std::size_t g = 0; g < group_count_; ++g) {
    const block_range needed = groups_[g].hit_blocks(length);
    for (std::uint64_t i = needed.first; i < needed.end; ++i) {
      const block_id block = row(slot, g)[i];
      observer_.on_shared(block, chain_.key(node_of_[to_index(block)]), g);
    }
  }
}

template <class Traits>
template <class Visit>
void hybrid_allocator<Traits>::for_each_cached(Visit&& visit) const {
  static_assert(std::is_invocable_v<Visit&, const stored_key&, std::size_t>,
                "visit(const stored_key&, std::size_t) is what is called");
  for (std::uint32_t i = 1; i < pool_.block_ids(); ++i) {
    const block_id block{i};
    if (!pool_.record(block).is_cached()) continue;
    const std::size_t group = pool_.group_of(block);
    visit(stored_key{chain_.key(node_of_[i]), block, groups_[group].block_tokens}, group);
  }
}

/// The place behind the next chunk; where the chain has no room, idle blocks make some.
template <class Traits>
std::optional<typename hybrid_allocator<Traits>::place> hybrid_allocator<Traits>::next_place(
    record& sequence, std::span<const token_id> part) noexcept {
  for (;;) {
    const auto next = chain_.extend(sequence.at, part, sequence.context);
    if (next || chain_.free() != 0 || chain_.collides(sequence.at, part, sequence.context)) return next;
    bool evicted = false;
    for (std::size_t g = 0; g < group_count_; ++g)
      evicted = pool_.evict_one(g, forget_evicted()) || evicted;
    if (!evicted) return std::nullopt;
  }
}

template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::commit(sequence_id sequence, std::uint64_t written) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  record& writer = records_[sequence.slot];
  if (written > writer.tokens) return refusal(errc::past_the_end, sequence.slot, written, writer.tokens);
  std::uint64_t registered = 0;
  for (; writer.committed < written / chunk_tokens_; ++writer.committed) {
    const auto next = next_place(writer, chunk(sequence.slot, writer.committed));
    if (!next) break;
    chain_.share(next->node);
    chain_.release(writer.at.node);
    writer.at = *next;
    const std::uint64_t end = (writer.committed + 1) * chunk_tokens_;
    for (std::size_t g = 0; g < group_count_; ++g) {
      if (end % groups_[g].block_tokens != 0) continue;
      const std::uint64_t i = end / groups_[g].block_tokens - 1;
      const block_id block = row(sequence.slot, g)[i];
      if (block == null_block) continue;
      if (const block_id cached = chain_.cached(next->node, g); cached != null_block) {
        counters_.duplicates += cached != block ? 1U : 0U;
        continue;
      }
      chain_.hold(next->node, g, block);
      node_of_[to_index(block)] = next->node;
      pool_.mark_cached(block, {.content = next->key.low, .position = static_cast<std::uint32_t>(i)});
      if constexpr (is_observed) tell_cached(writer, sequence.slot, g, i);
      ++registered;
    }
  }
  counters_.registrations += registered;
  release_dead(sequence.slot, written);
  return registered;
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
