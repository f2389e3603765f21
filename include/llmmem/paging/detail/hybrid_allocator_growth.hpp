/// @file
/// Bodies of hybrid_allocator.hpp: growth. Only hybrid_allocator_body.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <cstring>

namespace llmmem {
inline namespace v0 {

template <class Traits>
result<void> hybrid_allocator<Traits>::check_length(std::uint32_t slot, std::uint64_t count) const noexcept {
  const std::uint64_t held = records_[slot].tokens;
  if (count <= max_sequence_tokens_ - held) return {};
  return refusal(errc::sequence_full, slot, count > max_bytes ? max_bytes : held + count,
                 max_sequence_tokens_);
}

template <class Traits>
typename hybrid_allocator<Traits>::need hybrid_allocator<Traits>::needed_for(
    std::uint32_t slot, std::size_t group, std::uint64_t count) const noexcept {
  if (count == 0) return {};
  const layer_group& of = groups_[group];
  const std::uint64_t tokens = records_[slot].tokens;
  if (grows_inside(records_[slot], count)) {
    const block_id last = row(slot, group)[whole_blocks(group, tokens)];
    return {.copies = pool_.record(last).references() > 1};
  }
  const std::uint64_t whole = whole_blocks(group, tokens);
  const bool is_whole = whole * of.block_tokens == tokens;
  const std::uint64_t held = whole + (is_whole ? 0 : 1);
  need out{.more = blocks_for(group, tokens + count) - held, .skips = of.skips_blocks()};
  if (is_whole) {
    out.carries = of.kind == layer_kind::state_snapshots && tokens != 0;
  } else if (out.skips && out.more != 0) {
    out.carries = out.leaves = true;
  } else {
    const block_id last = row(slot, group)[whole];
    out.copies = pool_.record(last).references() > 1;
  }
  return out;
}

template <class Traits>
result<bool> hybrid_allocator<Traits>::shortage(sequence_id sequence, std::uint64_t count,
                                                std::span<group_shortage> out) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  if (out.size() != group_count_) return refusal(errc::size_mismatch, 0, out.size(), group_count_);
  if (const auto fits = check_length(sequence.slot, count); !fits) return fits.error();
  do {
    release_dead(sequence.slot, records_[sequence.slot].tokens);
    detail::group_counts wanted{};
    for (std::size_t g = 0; g < group_count_; ++g)
      wanted[g] = needed_for(sequence.slot, g, count).blocks();
    if (pool_.shortage(std::span(wanted).first(group_count_), out)) return false;
  } while (collect() != 0);
  return true;
}

template <class Traits>
result<hybrid_append> hybrid_allocator<Traits>::append(sequence_id sequence,
                                                       std::span<const token_id> tokens) noexcept {
  const auto grown = grow_alone(sequence, tokens.size());
  if (grown && !tokens.empty()) store_tokens(sequence.slot, grown->first, tokens);
  return grown;
}

template <class Traits>
result<hybrid_append> hybrid_allocator<Traits>::extend(sequence_id sequence, std::uint64_t count) noexcept {
  const auto grown = grow_alone(sequence, count);
  if (grown && count != 0) lose_tokens(sequence.slot, grown->first);
  return grown;
}

template <class Traits>
result<void> hybrid_allocator<Traits>::name_tokens(sequence_id sequence,
                                                   std::span<const token_id> tokens) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  record& named = records_[sequence.slot];
  const std::uint64_t first = named.unnamed < named.tokens ? named.unnamed : named.tokens;
  if (tokens.size() > named.tokens - first)
    return refusal(errc::past_the_end, sequence.slot, first + tokens.size(), named.tokens);
  if (tokens.empty()) return {};
  store_tokens(sequence.slot, first, tokens);
  const std::uint64_t end = first + tokens.size();
  named.unnamed = end == named.tokens ? ~std::uint64_t{0} : end;
  return {};
}

/// Grows a sequence by tokens without values; the caller stores the values, or notes that there are none.
template <class Traits>
result<hybrid_append> hybrid_allocator<Traits>::grow_alone(sequence_id sequence,
                                                           std::uint64_t count) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const std::uint32_t slot = sequence.slot;
  if (const auto fits = check_length(slot, count); !fits) return fits.error();
  for (;;) {
    release_dead(slot, records_[slot].tokens);
    const auto grown = grow(slot, count, std::span<std::uint64_t>(), 0);
    if (grown || collect() == 0)
      return grown;  // collected references may be the missing blocks, or the
                     // reason to copy
  }
}

/// @param rest  blocks of each group that the batch still takes, plus those that must remain; less this
///   growth's on return. Or none.
/// @param first_copy  index in `copies_` of the sequence's first copy.
template <class Traits>
result<hybrid_append> hybrid_allocator<Traits>::grow(std::uint32_t slot, std::uint64_t count,
                                                     std::span<std::uint64_t> rest,
                                                     std::size_t first_copy) noexcept {
  record& grown = records_[slot];
  hybrid_append out{.first = grown.tokens};
  if (count == 0) return out;
  if (grows_inside(grown, count) && grows_in_place(slot)) {
    grown.tokens += count;
    counters_.tokens += count;
    return out;
  }
  std::array<need, max_layer_groups> needs{};
  std::array<group_blocks, max_layer_groups> wanted{};
  std::uint64_t sources = 0;
  for (std::size_t g = 0; g < group_count_; ++g) {
    needs[g] = needed_for(slot, g, count);
    // A copy's block follows the new ones; a step that skips blocks allocates only the last.
    const std::uint64_t skipped = needs[g].skips && needs[g].more > 1 ? needs[g].more - 1 : 0;
    wanted[g] = group_blocks{
        g, std::span<block_id>(row(slot, g) + blocks_for(g, grown.tokens) + skipped, needs[g].blocks())};
    out.new_blocks += needs[g].blocks();
    sources += needs[g].copies ? 1U : 0U;
    if (!rest.empty()) rest[g] -= needs[g].blocks();
  }
  if (out.new_blocks == 0) {
    for (std::size_t g = 0; g < group_count_; ++g)
      drop_overwritten(slot, g);
    grown.tokens += count;
    counters_.tokens += count;
    note_full(grown);
    return out;
  }
  const bool queues = sources != 0 && is_read(grown);
  if (queues && !deferred_.fits(sources, 1))
    return refusal(errc::deferred_full, slot, sources, deferred_.free_entries());
  const auto had = pool_.allocate(std::span(wanted).first(group_count_), std::span<const std::uint64_t>(rest),
                                  forget_evicted());
  if (!had) return had.error();

  std::array<block_id, max_layer_groups> given_back{};
  const table_part given(given_back.data(), sources);
  for (std::size_t g = 0; g < group_count_; ++g) {
    if (!needs[g].skips) continue;
    for (std::uint64_t i = 0; i + 1 < needs[g].more; ++i)
      row(slot, g)[blocks_for(g, grown.tokens) + i] = null_block;
  }
  std::size_t copies = first_copy;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const layer_group& of = groups_[g];
    const std::uint64_t entries = blocks_for(g, grown.tokens);
    const std::uint32_t used =
        of.kind == layer_kind::state_snapshots ? of.block_tokens : per_block_[g].remainder(grown.tokens);
    if (needs[g].copies) {
      block_id& last = row(slot, g)[entries - 1];
      const block_id copy = row(slot, g)[entries + needs[g].more];
      copies_[copies++] = group_copy{g, block_copy{.source = last, .destination = copy, .tokens = used}};
      given_back[--sources] = last;
      last = copy;
      ++counters_.copies;
    } else if (needs[g].carries) {
      const block_id state = row(slot, g)[entries - 1];
      const std::uint64_t next = needs[g].skips ? entries + needs[g].more - 1 : entries;
      copies_[copies++] =
          group_copy{g, block_copy{.source = state, .destination = row(slot, g)[next], .tokens = used}};
      std::uint32_t& left = grown.left[g];
      std::uint32_t& last = grown.left_last[g];
      if (last != 0 && row(slot, g)[last - 1] == null_block) left = last = 0;
      if (needs[g].leaves) {
        last = static_cast<std::uint32_t>(entries);
        if (left == 0) left = last;
      }
    } else {
      drop_overwritten(slot, g);
    }
  }
  if (!given.empty()) static_cast<void>(let_go(slot, std::span(&given, 1)));  // cannot fail: space checked
  grown.tokens += count;
  counters_.tokens += count;
  note_full(grown);
  out.copies = std::span<const group_copy>(copies_.data() + first_copy, copies - first_copy);
  return out;
}

/// Records the length up to which a sequence grows without a new block.
template <class Traits>
void hybrid_allocator<Traits>::note_full(record& sequence) noexcept {
  sequence.full_at = ~std::uint64_t{0};
  for (std::size_t g = 0; g < group_count_; ++g) {
    const std::uint64_t full = blocks_for(g, sequence.tokens) * per_block_[g].by();
    if (full < sequence.full_at) sequence.full_at = full;
  }
}

/// Whether a sequence alone holds the last block of each group; drops cached contents of these blocks, which
/// it is about to overwrite. Most steps of a decode do no more. @pre `grows_inside`.
template <class Traits>
bool hybrid_allocator<Traits>::grows_in_place(std::uint32_t slot) noexcept {
  const std::uint64_t tokens = records_[slot].tokens;
  bool drops = false;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const block_record& last = pool_.record(row(slot, g)[whole_blocks(g, tokens)]);
    if (last.references() != 1) return false;
    drops = drops || last.is_cached();
  }
  for (std::size_t g = 0; drops && g < group_count_; ++g)
    drop_overwritten(slot, g);
  return true;
}

/// Drops cached contents that a sequence is about to overwrite: it was cut into them, and no other sequence
/// shares them.
template <class Traits>
void hybrid_allocator<Traits>::drop_overwritten(std::uint32_t slot, std::size_t group) noexcept {
  const std::uint64_t tokens = records_[slot].tokens;
  const std::uint64_t whole = whole_blocks(group, tokens);
  if (whole * per_block_[group].by() == tokens) return;
  const block_id last = row(slot, group)[whole];
  if (pool_.record(last).is_cached()) drop_contents(last);
}

// Batches

template <class Traits>
result<void> hybrid_allocator<Traits>::append_batch(std::span<const hybrid_growth> batch,
                                                    std::span<hybrid_append> out,
                                                    std::span<const std::uint64_t> leave) noexcept {
  if (batch.size() != out.size()) return refusal(errc::size_mismatch, 0, batch.size(), out.size());
  if (!leave.empty() && leave.size() != group_count_)
    return refusal(errc::size_mismatch, 0, leave.size(), group_count_);
  if (const auto sound = check_batch(batch); !sound) return sound;
  detail::group_counts left{};  // still to be taken by the batch, plus the blocks that must remain
  for (;;) {
    for (const hybrid_growth& each : batch)
      release_dead(each.sequence.slot, records_[each.sequence.slot].tokens);
    const detail::hybrid_batch_need needed = count_batch(batch);
    left = needed.blocks;
    for (std::size_t g = 0; g < leave.size(); ++g)
      left[g] += leave[g] < max_blocks ? leave[g] : max_blocks;
    std::array<group_shortage, max_layer_groups> lacks{};
    const bool enough = pool_.shortage(std::span(left).first(group_count_), lacks);
    if (enough && deferred_.fits(needed.sources, needed.readers)) break;
    if (collect() != 0) continue;
    if (enough) return refusal(errc::deferred_full, 0, needed.sources, deferred_.free_entries());
    std::size_t g = 0;
    while (lacks[g].missing() == 0)
      ++g;
    return refusal(errc::out_of_group_blocks, static_cast<std::uint32_t>(g), lacks[g].wanted,
                   lacks[g].available);
  }
  std::size_t copies = 0;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const hybrid_growth& each = batch[i];
    const auto grown = grow(each.sequence.slot, each.tokens.size() + each.unknown_tokens,
                            std::span(left).first(group_count_), copies);
    if (!grown) return grown.error();  // only under a policy that breaks its contract
    out[i] = *grown;
    store_tokens(each.sequence.slot, grown->first, each.tokens);
    if (each.unknown_tokens != 0) lose_tokens(each.sequence.slot, grown->first + each.tokens.size());
    copies += grown->copies.size();
  }
  return {};
}

/// Checks handles and lengths of a batch.
template <class Traits>
result<void> hybrid_allocator<Traits>::check_batch(std::span<const hybrid_growth> batch) noexcept {
  ++batches_;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const sequence_id sequence = batch[i].sequence;
    if (const auto alive = check(sequence); !alive) return alive;
    if (records_[sequence.slot].batch == batches_)
      return refusal(errc::listed_twice, sequence.slot, i, batch.size());
    const std::uint64_t unknown = batch[i].unknown_tokens < max_bytes ? batch[i].unknown_tokens : max_bytes;
    if (const auto fits = check_length(sequence.slot, batch[i].tokens.size() + unknown); !fits) return fits;
    records_[sequence.slot].batch = batches_;
  }
  return {};
}

template <class Traits>
result<bool> hybrid_allocator<Traits>::shortage(std::span<const hybrid_growth> batch,
                                                std::span<group_shortage> out) noexcept {
  if (out.size() != group_count_) return refusal(errc::size_mismatch, 0, out.size(), group_count_);
  if (const auto sound = check_batch(batch); !sound) return sound.error();
  do {
    for (const hybrid_growth& each : batch)
      release_dead(each.sequence.slot, records_[each.sequence.slot].tokens);
    const detail::hybrid_batch_need needed = count_batch(batch);
    if (pool_.shortage(std::span(needed.blocks).first(group_count_), out)) return false;
  } while (collect() != 0);
  return true;
}

template <class Traits>
std::array<std::uint64_t, max_layer_groups> hybrid_allocator<Traits>::blocks_to_append(
    sequence_id sequence, std::uint64_t count) const noexcept {
  detail::group_counts wanted{};
  if (!check(sequence) || !check_length(sequence.slot, count)) return wanted;
  for (std::size_t g = 0; g < group_count_; ++g)
    wanted[g] = needed_for(sequence.slot, g, count).blocks();
  return wanted;
}

/// Counts the blocks of each group that the whole `batch` takes. Of k sequences that share their last block,
/// all except the last holder copy it. So the count drops references as growth would, then restores them. It
/// keeps references that wait for a fence.
template <class Traits>
detail::hybrid_batch_need hybrid_allocator<Traits>::count_batch(
    std::span<const hybrid_growth> batch) noexcept {
  detail::hybrid_batch_need needed{};
  const auto last = [this](std::uint32_t slot, std::size_t g) noexcept {
    return row(slot, g)[blocks_for(g, records_[slot].tokens) - 1];
  };
  for (const hybrid_growth& each : batch) {
    const std::uint32_t slot = each.sequence.slot;
    const std::uint64_t before = needed.sources;
    records_[slot].copies = 0;
    for (std::size_t g = 0; g < group_count_; ++g) {
      const need required = needed_for(slot, g, each.tokens.size() + each.unknown_tokens);
      needed.blocks[g] += required.blocks();
      if (!required.copies) continue;
      if (is_read(records_[slot])) {
        ++needed.sources;
        continue;
      }
      static_cast<void>(pool_.release(last(slot, g)));  // cannot fail: other sequences hold it too
      records_[slot].copies |= std::uint32_t{1} << g;
    }
    needed.readers += needed.sources != before ? 1U : 0U;
  }
  for (const hybrid_growth& each : batch) {
    const std::uint32_t slot = each.sequence.slot;
    for (std::size_t g = 0; g < group_count_; ++g) {
      if ((records_[slot].copies >> g & 1U) != 0) static_cast<void>(pool_.share(last(slot, g)));
    }
  }
  return needed;
}

template <class Traits>
hybrid_cost hybrid_allocator<Traits>::cost(std::span<const token_id> tokens,
                                           const prefix_context& context) const noexcept {
  const hit found = longest_hit(tokens, chain_.root(context, epoch_), context);
  hybrid_cost out{.cached_tokens = found.tokens};
  if (found.tokens != 0) {
    visit_hit(found, [&](std::size_t g, std::uint64_t, block_id block) noexcept {
      ++out.groups[g].cached_blocks;
      if (pool_.record(block).is_idle()) ++out.groups[g].revived_blocks;
    });
  }
  for (std::size_t g = 0; g < group_count_; ++g) {
    out.groups[g].new_blocks = groups_[g].blocks_to_append(found.tokens, tokens.size() - found.tokens);
  }
  return out;
}

}  // namespace v0
}  // namespace llmmem
