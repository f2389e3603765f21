/// @file
/// Bodies of hybrid_allocator.hpp: equal blocks, and what is worth keeping. Only hybrid_allocator_body.hpp
/// includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <array>
#include <utility>

namespace llmmem {
inline namespace v0 {

template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::deduplicate(sequence_id sequence) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const std::uint32_t slot = sequence.slot;
  record& owner = records_[slot];
  if (!owner.borrows || owner.epoch != epoch_) return std::uint64_t{0};
  block_id node = owner.at.node;
  for (std::uint64_t i = owner.committed; i > 0; --i) {
    path_[i - 1] = node;
    node = chain_.parent(node);
  }
  // In place of block `i` of a group: the cached block with its contents, if that is another.
  const auto equal = [&](std::size_t g, std::uint64_t i) noexcept {
    const std::uint64_t end = (i + 1) * groups_[g].block_tokens;
    if (end > owner.committed * chunk_tokens_ || end > cacheable(owner)) return null_block;
    const block_id own = row(slot, g)[i];
    if (own == null_block || pool_.record(own).is_invalid() || !is_snapshot(slot, g, i)) return null_block;
    const block_id cached = chain_.cached(path_[end / chunk_tokens_ - 1], g);
    const bool is_full =
        cached != null_block && pool_.record(cached).references() == block_record::max_references;
    return cached == own || is_full ? null_block : cached;
  };
  std::uint64_t wanted = 0;
  for (std::size_t g = 0; g < group_count_; ++g) {
    for (std::uint64_t i = 0; i < groups_[g].blocks_for(owner.tokens); ++i)
      wanted += equal(g, i) != null_block ? 1U : 0U;
  }
  if (wanted == 0) return std::uint64_t{0};
  // All or none: the queue must have space for all of them, one by one.
  if (is_read(owner) && !deferred_.fits(wanted, wanted)) {
    collect();
    if (is_read(owner) && !deferred_.fits(wanted, wanted))
      return refusal(errc::deferred_full, slot, wanted, deferred_.free_entries());
  }
  for (std::size_t g = 0; g < group_count_; ++g) {
    for (std::uint64_t i = 0; i < groups_[g].blocks_for(owner.tokens); ++i) {
      const block_id cached = equal(g, i);
      if (cached == null_block) continue;
      static_cast<void>(pool_.share(cached));  // cannot fail: checked in `equal`
      const block_id own = std::exchange(row(slot, g)[i], cached);
      const table_part given(&own, 1);
      static_cast<void>(let_go(slot, std::span(&given, 1)));  // cannot fail: space checked
    }
  }
  counters_.deduplicated += wanted;
  return wanted;
}

template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::deduplicate_after(sequence_id sequence,
                                                                  const fence_type& after) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const fence_type before = std::exchange(records_[sequence.slot].after, after);
  const auto replaced = deduplicate(sequence);
  if (!replaced) records_[sequence.slot].after = before;
  return replaced;
}

template <class Traits>
result<void> hybrid_allocator<Traits>::retain(sequence_id sequence, token_range range,
                                              retention keep) noexcept {
  if (const auto alive = check(sequence); !alive) return alive;
  if (keep.priority > retention::max_priority)
    return refusal(errc::bad_priority, sequence.slot, keep.priority, retention::max_priority);
  if (range.first >= range.end) return refusal(errc::empty_range, sequence.slot, range.first, range.end);
  if constexpr (retains<eviction_type>) {
    retained_[sequence.slot].add(range, keep);
    const record& owner = records_[sequence.slot];
    // From the last chunk back: each node names the blocks that end with it.
    block_id node = owner.at.node;
    for (std::uint64_t chunks = owner.committed; chunks > 0; --chunks, node = chain_.parent(node)) {
      for (std::size_t g = 0; g < group_count_; ++g) {
        const std::uint64_t end = chunks * chunk_tokens_;
        const std::uint64_t tokens = groups_[g].block_tokens;
        if (end % tokens != 0 || range.first >= end || range.end <= end - tokens) continue;
        const block_id cached = chain_.cached(node, g);
        if (cached != null_block) pool_.retain(cached, keep);
      }
    }
  }
  return {};
}

template <class Traits>
std::uint64_t hybrid_allocator<Traits>::expect(std::span<const token_id> tokens,
                                               const prefix_context& context,
                                               std::uint64_t next_use) noexcept {
  const hit found = longest_hit(tokens, chain_.root(context, epoch_), context);
  if (found.tokens == 0) return 0;
  visit_hit(found,
            [&](std::size_t, std::uint64_t, block_id block) noexcept { pool_.expect(block, next_use); });
  return found.tokens;
}

/// Returns the worth of keeping block number `block` of a group.
template <class Traits>
retention hybrid_allocator<Traits>::kept(std::uint32_t slot, std::size_t group,
                                         std::uint64_t block) const noexcept {
  if constexpr (retains<eviction_type>) {
    const detail::retained_ranges& told = retained_[slot];
    const std::uint64_t first = block * groups_[group].block_tokens;
    for (std::uint32_t i = told.count; i > 0; --i) {
      const token_range& range = told.entries[i - 1].range;
      if (range.first < first + groups_[group].block_tokens && range.end > first)
        return told.entries[i - 1].keep;
    }
  }
  return records_[slot].hints.keep;
}

template <class Traits>
access_hint hybrid_allocator<Traits>::hint_for(std::uint32_t slot, std::size_t group, std::uint64_t block,
                                               std::uint64_t content) const noexcept {
  const request_hints& told = records_[slot].hints;
  return {.session = told.session,
          .cost = told.cost,
          .keep = kept(slot, group, block),
          .content = content,
          .position = static_cast<std::uint32_t>(block)};
}

}  // namespace v0
}  // namespace llmmem
