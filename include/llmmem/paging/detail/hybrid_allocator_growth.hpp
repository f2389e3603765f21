/// @file
/// Bodies of hybrid_allocator.hpp: growing. Included by it alone.
#pragma once

#include <llmmem/paging/hybrid_allocator.hpp>

#include <cstring>

namespace llmmem::inline v0 {

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
  need out{.more = of.blocks_to_append(tokens, count)};
  if (tokens % of.block_tokens != 0) {
    const block_id last = row(slot, group)[of.blocks_for(tokens) - 1];
    out.copies = pool_.record(last).references() > 1;
  } else {
    out.carries = of.kind == layer_kind::state_snapshots && tokens != 0;
  }
  return out;
}

template <class Traits>
result<bool> hybrid_allocator<Traits>::shortage(sequence_id sequence, std::uint64_t count,
                                                std::span<group_shortage> out) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  if (out.size() != group_count_) return refusal(errc::size_mismatch, 0, out.size(), group_count_);
  if (const auto fits = check_length(sequence.slot, count); !fits) return fits.error();
  release_dead(sequence.slot, records_[sequence.slot].tokens);
  std::array<std::uint64_t, max_layer_groups> wanted{};
  for (std::size_t g = 0; g < group_count_; ++g)
    wanted[g] = needed_for(sequence.slot, g, count).blocks();
  return !pool_.shortage(std::span(wanted).first(group_count_), out);
}

template <class Traits>
result<hybrid_append> hybrid_allocator<Traits>::append(sequence_id sequence,
                                                       std::span<const token_id> tokens) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const std::uint32_t slot = sequence.slot;
  if (const auto fits = check_length(slot, tokens.size()); !fits) return fits.error();
  record& grown = records_[slot];
  release_dead(slot, grown.tokens);
  hybrid_append out{.first = grown.tokens};
  if (tokens.empty()) return out;

  std::array<need, max_layer_groups> needs{};
  std::array<group_blocks, max_layer_groups> wanted{};
  for (std::size_t g = 0; g < group_count_; ++g) {
    needs[g] = needed_for(slot, g, tokens.size());
    // A copy's block comes behind the new ones.
    wanted[g] = {g, {row(slot, g) + groups_[g].blocks_for(grown.tokens), needs[g].blocks()}};
    out.new_blocks += needs[g].blocks();
  }
  const auto had = pool_.allocate(std::span(wanted).first(group_count_), forget_evicted());
  if (!had) return had.error();

  std::size_t copies = 0;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const layer_group& of = groups_[g];
    const std::uint64_t entries = of.blocks_for(grown.tokens);
    const auto used = static_cast<std::uint32_t>(
        of.kind == layer_kind::state_snapshots ? of.block_tokens : grown.tokens % of.block_tokens);
    if (needs[g].copies) {
      block_id& last = row(slot, g)[entries - 1];
      const block_id copy = row(slot, g)[entries + needs[g].more];
      copies_[copies++] = {g, {.source = last, .destination = copy, .tokens = used}};
      static_cast<void>(pool_.release(last));  // cannot fail: others hold it too
      last = copy;
      ++counters_.copies;
    } else if (needs[g].carries) {
      copies_[copies++] = {
          g, {.source = row(slot, g)[entries - 1], .destination = row(slot, g)[entries], .tokens = used}};
    }
  }
  std::memcpy(tokens_.data() + slot * max_sequence_tokens_ + grown.tokens, tokens.data(),
              tokens.size_bytes());
  grown.tokens += tokens.size();
  counters_.tokens += tokens.size();
  out.copies = std::span(copies_).first(copies);
  return out;
}

}  // namespace llmmem::inline v0
