/// @file
/// Bodies of paged_allocator.hpp: withdrawing contents from the cache, and removing tokens from the middle of
/// a sequence. Only paged_allocator.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/paged_allocator.hpp>

#include <cstring>

namespace llmmem {
inline namespace v0 {

/// Makes a sequence without tokens belong to the present epoch.
template <class Traits>
void paged_allocator<Traits>::reset(record& sequence) noexcept {
  sequence.epoch = epoch_;
  sequence.chain = root_of(sequence);
}

/// Drops a block whose contents no lookup can find.
template <class Traits>
void paged_allocator<Traits>::drop_orphan() noexcept {
  const block_id block = followers_.orphan();
  if (pool_.record(block).is_active()) ++cuts_;
  unregister(block);
  pool_.unmark_cached(block);
  ++counters_.orphans;
}

/// Drops a block and everything cached after it; returns how many blocks.
template <class Traits>
std::uint64_t paged_allocator<Traits>::drop_tree(block_id block) noexcept {
  std::uint64_t dropped = 0;
  if (!index_.contains(block)) return dropped;
  for (; block != null_block; block = followers_.orphan()) {
    detail::tell_loss<detail::loss::invalidated>(observer_, block, index_.key(block));
    followers_.unlink(block, [](block_id) noexcept { return true; });
    index_.erase(block);
    pool_.unmark_cached(block);
    ++dropped;
  }
  ++cuts_;
  return dropped;
}

template <class Traits>
result<std::uint64_t> paged_allocator<Traits>::reset(std::uint64_t epoch) noexcept {
  if (epoch <= epoch_) return refusal(errc::old_epoch, 0, epoch, epoch_);
  pool_.set_actor(paging::no_actor);
  const std::uint64_t cached = index_.size();
  epoch_ = epoch;
  for (std::uint32_t i = 1; i <= pool_.block_capacity() && index_.size() != 0; ++i) {
    const block_id block{i};
    if (!index_.contains(block)) continue;
    if constexpr (!clearing_observer<observer_type>) observer_.on_dropped(block, index_.key(block));
    index_.erase(block);
    pool_.unmark_cached(block);
  }
  followers_.clear();
  if constexpr (clearing_observer<observer_type>) observer_.on_cleared(epoch);
  for (std::uint32_t slot = 0; slot < records_.size(); ++slot) {
    if (records_[slot].alive() && records_[slot].tokens == 0) reset(records_[slot]);
  }
  return cached;
}

template <class Traits>
result<std::uint64_t> paged_allocator<Traits>::invalidate(block_id block) noexcept {
  if (block == null_block || to_index(block) > pool_.block_capacity())
    return refusal(errc::no_such_block, to_index(block), to_index(block), max_physical_blocks());
  pool_.set_actor(paging::no_actor);
  std::uint64_t dropped = drop_tree(block);
  if (pool_.record(block).is_active()) {
    pool_.invalidate(block);
    dropped += spread_invalid();
  }
  counters_.invalidated += dropped;
  return dropped;
}

template <class Traits>
result<std::uint64_t> paged_allocator<Traits>::invalidate(sequence_id sequence, std::uint64_t from) noexcept {
  if (const auto alive = begin(sequence); !alive) return alive.error();
  const record& wrong = at(sequence);
  if (from > wrong.tokens) return refusal(errc::past_the_end, sequence.slot, from, wrong.tokens);
  if (from == wrong.tokens) return std::uint64_t{0};
  std::uint64_t dropped = 0;
  for (std::uint64_t i = from / block_tokens_; i < wrong.blocks; ++i) {
    const block_id block = row(sequence.slot)[i];
    dropped += drop_tree(block);
    pool_.invalidate(block);
  }
  dropped += spread_invalid();
  counters_.invalidated += dropped;
  return dropped;
}

/// Invalidates the blocks after an invalid block in each table, because they were computed from it. Because
/// sequences share blocks, it repeats until it finds no more. Returns how many blocks were cached.
template <class Traits>
std::uint64_t paged_allocator<Traits>::spread_invalid() noexcept {
  std::uint64_t dropped = 0;
  for (bool changed = true; changed;) {
    changed = false;
    for (std::uint32_t slot = 0; slot < records_.size(); ++slot) {
      record& sequence = records_[slot];
      if (!sequence.alive()) continue;
      const std::span<const block_id> table(row(slot), sequence.blocks);
      std::size_t i = 0;
      while (i < table.size() && i < sequence.sound && !pool_.record(table[i]).is_invalid())
        ++i;
      if (i == table.size() || i >= sequence.sound) continue;
      sequence.sound = static_cast<std::uint32_t>(i);
      for (; i < table.size(); ++i) {
        dropped += drop_tree(table[i]);
        changed = changed || !pool_.record(table[i]).is_invalid();
        pool_.invalidate(table[i]);
      }
    }
  }
  return dropped;
}

template <class Traits>
std::uint64_t paged_allocator<Traits>::prefix_tokens(sequence_id sequence) const noexcept {
  if (!check(sequence)) return 0;
  const record& held = at(sequence);
  return detail::lesser(held.tokens, std::uint64_t{held.sound} * block_tokens_);
}

/// Returns a call's keys in the form that the index uses. Valid until the next call.
template <class Traits>
keyed_blocks paged_allocator<Traits>::in_chain(const keyed_blocks& given,
                                               const prefix_context& context) noexcept {
  if constexpr (!Traits::keys::chains) {
    return given;
  } else {
    const auto count = static_cast<std::size_t>(detail::lesser(given.keys.size(), chained_.size()));
    block_key last = paging::root_key(hash_, context, epoch_);
    for (std::size_t i = 0; i < count; ++i)
      chained_[i] = last = paging::chain_key(hash_, last, given.keys[i]);
    return {.keys = std::span<const block_key>(chained_.data(), count),
            .tokens = given.tokens,
            .hints = given.hints};
  }
}

// Removal from the middle

/// Returns the range if it can be removed, or why it cannot.
template <class Traits>
result<token_range> paged_allocator<Traits>::check_removal(sequence_id sequence,
                                                           token_range range) const noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const std::uint64_t held = at(sequence).tokens;
  if (range.first >= range.end) return refusal(errc::empty_range, sequence.slot, range.first, range.end);
  if (range.first > held) return refusal(errc::past_the_end, sequence.slot, range.first, held);
  range.end = detail::lesser(range.end, held);
  for (const std::uint64_t edge : {range.first, range.end}) {
    if (edge % block_tokens_ != 0 && edge != held)
      return refusal(errc::not_whole_blocks, sequence.slot, edge, block_tokens_);
  }
  return range;
}

template <class Traits>
result<std::uint64_t> paged_allocator<Traits>::remove(sequence_id sequence, token_range range) noexcept {
  pool_.set_actor(sequence.slot);
  const auto gone = check_removal(sequence, range);
  if (!gone) return gone.error();
  const std::uint64_t before = at(sequence).blocks;
  if (gone->end == at(sequence).tokens) {
    if (const auto cut = truncate(sequence, gone->first); !cut) return cut.error();
  } else {
    const auto part =
        blocks(sequence).subspan(static_cast<std::size_t>(gone->first / block_tokens_),
                                 static_cast<std::size_t>((gone->end - gone->first) / block_tokens_));
    static_cast<void>(pool_.release(part));  // cannot fail: this sequence holds them
    close_up(sequence.slot, *gone);
    trim_idle();
  }
  return before - at(sequence).blocks;
}

template <class Traits>
result<std::uint64_t> paged_allocator<Traits>::remove_after(sequence_id sequence, token_range range,
                                                            const fence_type& after) noexcept {
  pool_.set_actor(sequence.slot);
  const auto gone = check_removal(sequence, range);
  if (!gone) return gone.error();
  const std::uint64_t before = at(sequence).blocks;
  if (gone->end == at(sequence).tokens) {
    if (const auto cut = truncate_after(sequence, gone->first, after); !cut) return cut.error();
  } else {
    const auto part =
        blocks(sequence).subspan(static_cast<std::size_t>(gone->first / block_tokens_),
                                 static_cast<std::size_t>((gone->end - gone->first) / block_tokens_));
    if (const auto queued = defer(sequence.slot, part, after); !queued) return queued.error();
    close_up(sequence.slot, *gone);
  }
  return before - at(sequence).blocks;
}

/// Closes the gap that `range` leaves; the caller has taken over the references to its blocks.
template <class Traits>
void paged_allocator<Traits>::close_up(std::uint32_t slot, token_range range) noexcept {
  record& sequence = records_[slot];
  const auto first = static_cast<std::uint32_t>(range.first / block_tokens_);
  const auto gone = static_cast<std::uint32_t>((range.end - range.first) / block_tokens_);
  block_id* const table = row(slot);
  if (first < sequence.keyed) {
    sequence.keyed = first;
    sequence.chain = first == 0 ? root_of(sequence) : index_.key(table[first - 1]);
  }
  sequence.tokens_known = false;
  sequence.unnamed = ~std::uint64_t{0};
  if (first < sequence.committed) sequence.recommit_from(sequence.keyed == 0 ? first : 0);
  if (first < sequence.asked) sequence.asked = first;
  if (first <= sequence.refused_from) sequence.refused_from = ~0U;
  if (first < sequence.sound) sequence.sound = first;
  sequence.blocks -= gone;
  sequence.tokens -= range.end - range.first;
  counters_.table_blocks -= gone;
  counters_.tokens -= range.end - range.first;
  std::memmove(table + first, table + first + gone, (sequence.blocks - first) * sizeof(block_id));
  if constexpr (retains<eviction_type>) retained_[slot].close_up(range);
  for (std::uint32_t i = first; i < sequence.blocks; ++i) {
    if (index_.contains(table[i]) && pool_.record(table[i]).references() == 1) drop_contents(table[i]);
  }
}

}  // namespace v0
}  // namespace llmmem
