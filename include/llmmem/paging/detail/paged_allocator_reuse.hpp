/// @file
/// Bodies of paged_allocator.hpp: partial reuse, equal blocks, retention and admission. Only
/// paged_allocator.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/paged_allocator.hpp>

#include <array>
#include <cstring>

namespace llmmem {
inline namespace v0 {

/// Adds the longest beginning of `rest` that a cached block starts with, if a block is available for it.
template <class Traits>
void paged_allocator<Traits>::take_beginning(std::uint32_t slot, std::span<const token_id> rest,
                                             match_result& out) noexcept {
  record& taker = records_[slot];
  const auto most = static_cast<std::size_t>(
      detail::lesser(detail::lesser(rest.size(), block_tokens_ - 1), max_sequence_tokens_ - out.tokens));
  if (most == 0) return;
  const block_id parent = taker.blocks == 0 ? null_block : row(slot)[taker.blocks - 1];
  block_id best = null_block;
  std::size_t length = 0;
  block_id block = followers_.first(parent);
  for (std::uint32_t left = partial_type::max_compared; left != 0 && block != null_block && length < most;
       --left, block = followers_.next(block)) {
    if (index_.tokens(block) != block_tokens_) continue;  // partial: its holder may overwrite the rest
    if (!verification_.holds(block, {}, taker.parent, taker.context)) continue;
    const std::span<const token_id> held = verification_.tokens(block);
    std::size_t equal = 0;
    while (equal < most && held[equal] == rest[equal])
      ++equal;
    if (equal > length) {
      best = block;
      length = equal;
    }
  }
  if (best == null_block || !pool_.share(best)) return;
  pool_.touch(best, placed({}, taker, best, parent, taker.blocks,
                           detail::blocks_for(out.tokens + rest.size(), block_tokens_)));

  const bool has_followers = followers_.first(best) != null_block;
  block_id& own = row(slot)[taker.blocks];
  if (partial_type::source == partial_source::steal && !has_followers &&
      pool_.record(best).references() == 1) {
    drop_contents(best);
    own = best;
    ++counters_.stolen_blocks;
  } else {
    const auto done = pool_.allocate(std::span<block_id>(&own, 1), forget_evicted(), parent);
    static_cast<void>(pool_.release(best));  // cannot fail: shared above
    if (!done) return;
    out.copy = {.source = best, .destination = own, .tokens = static_cast<std::uint32_t>(length)};
  }
  ++taker.blocks;
  ++counters_.partial_hits;
  out.tokens += length;
  std::memcpy(tail(slot), rest.data(), length * sizeof(token_id));
}

template <class Traits>
result<std::uint64_t> paged_allocator<Traits>::deduplicate(sequence_id sequence) noexcept {
  if (const auto alive = begin(sequence); !alive) return alive.error();
  const auto replaced = replace_duplicates(
      sequence.slot, [this](std::span<const block_id> own) noexcept { return pool_.release(own); });
  trim_idle();
  return replaced;
}

template <class Traits>
result<std::uint64_t> paged_allocator<Traits>::deduplicate_after(sequence_id sequence,
                                                                 const fence_type& after) noexcept {
  if (const auto alive = begin(sequence); !alive) return alive.error();
  const auto replaced = replace_duplicates(sequence.slot, [&](std::span<const block_id> own) noexcept {
    return defer(sequence.slot, own, after);
  });
  trim_idle();
  return replaced;
}

/// Works in groups, each released as a whole. If a group is refused, the groups before it stay replaced and
/// are reported; the refusal is returned only if it was the first group's.
template <class Traits>
template <class GiveBack>
result<std::uint64_t> paged_allocator<Traits>::replace_duplicates(std::uint32_t slot,
                                                                  GiveBack&& give_back) noexcept {
  record& sequence = records_[slot];
  block_id* const table = row(slot);
  const std::uint64_t end =
      sequence.epoch != epoch_
          ? 0
          : detail::lesser(detail::lesser(sequence.keyed, sequence.committed), sequence.sound);
  std::array<block_id, 64> own{};
  std::array<block_id, 64> equal{};
  std::array<std::uint32_t, 64> places{};
  std::uint64_t replaced = 0;
  chain_link parent{};
  std::uint32_t i = 0;
  for (bool current = true; current && i < end;) {
    std::size_t size = 0;
    for (; i < end && size < own.size(); ++i) {
      const block_id holder = index_.block_of(index_.key(table[i]));
      current = holder != null_block &&
                verification_.holds(holder, verification_.tokens(table[i]), parent, sequence.context);
      if (!current) break;
      parent = verification_.link(holder);
      if (holder == table[i] || !pool_.share(holder)) continue;
      own[size] = table[i];
      equal[size] = holder;
      places[size++] = i;
    }
    if (size == 0) continue;
    if (const auto given = give_back(std::span<const block_id>(own.data(), size)); !given) {
      static_cast<void>(pool_.release(std::span<const block_id>(equal.data(), size)));
      if (replaced == 0) return given.error();
      break;
    }
    for (std::size_t k = 0; k < size; ++k)
      table[places[k]] = equal[k];
    replaced += size;
  }
  counters_.deduplicated += replaced;
  return replaced;
}

template <class Traits>
result<void> paged_allocator<Traits>::retain(sequence_id sequence, token_range range,
                                             retention keep) noexcept {
  if (const auto alive = begin(sequence); !alive) return alive.error();
  if (keep.priority > retention::max_priority) {
    return refusal(errc::bad_priority, sequence.slot, keep.priority, retention::max_priority);
  }
  if (range.first >= range.end) return refusal(errc::empty_range, sequence.slot, range.first, range.end);
  if constexpr (retains<eviction_type>) {
    retained_[sequence.slot].add(range, keep);
    const record& owner = at(sequence);
    const std::uint64_t end = detail::lesser(owner.blocks, detail::blocks_for(range.end, block_tokens_));
    for (std::uint64_t i = range.first / block_tokens_; i < end; ++i) {
      const block_id block = row(sequence.slot)[i];
      if (index_.contains(block)) {
        pool_.retain(block, keep);
      } else if (i < owner.keyed && i < owner.committed) {
        if (const auto holder = index_.find(index_.key(block))) pool_.retain(*holder, keep);
      }
    }
  }
  return {};
}

/// Returns the worth of keeping block number `block` of a sequence.
template <class Traits>
retention paged_allocator<Traits>::kept(const record& sequence, std::uint64_t block) const noexcept {
  if constexpr (retains<eviction_type>) {
    const auto& told = retained_[static_cast<std::size_t>(&sequence - records_.data())];
    if (told.count == 0) return sequence.hints.keep;
    const std::uint64_t first = block * block_tokens_;
    for (std::uint32_t i = told.count; i > 0; --i) {
      const token_range& range = told.entries[i - 1].range;
      if (range.first < first + block_tokens_ && range.end > first) return told.entries[i - 1].keep;
    }
  }
  return sequence.hints.keep;
}

template <class Traits>
bool paged_allocator<Traits>::admits(record& sequence, const access_hint& hint, std::uint64_t part) noexcept {
  if constexpr (asks_admission) {
    if (!admission_.admit({.hint = hint, .is_partial = part < block_tokens_})) {
      ++counters_.refused;
      sequence.refused_from = sequence.committed;
      sequence.asked = sequence.committed + 1;
      return false;
    }
  }
  return true;
}

/// Shows the policy the blocks after a refused block, up to block `end`, each once, because a policy may
/// admit them later.
template <class Traits>
template <class HintAt>
void paged_allocator<Traits>::ask_on(record& sequence, std::uint64_t end, HintAt&& hint_at) noexcept {
  if constexpr (asks_admission) {
    if (sequence.refused_from >= end) return;
    for (; sequence.asked < end; ++sequence.asked) {
      const auto [hint, part] = hint_at(sequence.asked);
      static_cast<void>(admission_.admit({.hint = hint, .is_partial = part < block_tokens_}));
      ++counters_.refused;
    }
  }
}

}  // namespace v0
}  // namespace llmmem
