/// @file
/// Bodies of hybrid_allocator.hpp: releasing blocks, at once or after a fence. Only hybrid_allocator.hpp
/// includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <utility>

namespace llmmem {
inline namespace v0 {

template <class Traits>
result<void> hybrid_allocator<Traits>::read_until(sequence_id sequence, const fence_type& after) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  records_[sequence.slot].after = after;
  return {};
}

template <class Traits>
result<void> hybrid_allocator<Traits>::release_after(sequence_id sequence, const fence_type& after) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  const fence_type before = std::exchange(records_[sequence.slot].after, after);
  const auto released = release(sequence);
  if (!released) records_[sequence.slot].after = before;
  return released;
}

template <class Traits>
std::uint64_t hybrid_allocator<Traits>::collect() noexcept {
  return deferred_.collect([this](block_id block) noexcept {
    static_cast<void>(pool_.release(block));  // cannot fail: the queue held this reference
  });
}

template <class Traits>
result<void> hybrid_allocator<Traits>::pin(block_id block) noexcept {
  if (block == null_block || to_index(block) >= pool_.block_ids())
    return refusal(errc::no_such_block, to_index(block), to_index(block), pool_.block_ids());
  if (!pins_.can_add(block)) return refusal(errc::too_many_shares, to_index(block), 1, pins_.of(block));
  if (const auto shared = pool_.share(block); !shared) return shared.error();
  pins_.add(block);
  return {};
}

template <class Traits>
result<void> hybrid_allocator<Traits>::limit_commits(sequence_id sequence, std::uint64_t tokens) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  records_[sequence.slot].limit = tokens;
  return {};
}

template <class Traits>
result<void> hybrid_allocator<Traits>::unpin(block_id block) noexcept {
  if (block == null_block || to_index(block) >= pool_.block_ids())
    return refusal(errc::no_such_block, to_index(block), to_index(block), pool_.block_ids());
  if (pins_.of(block) == 0) return refusal(errc::double_free, to_index(block), 0, 0);
  pins_.remove(block);
  static_cast<void>(pool_.release(block));  // cannot fail: the pin held this reference
  return {};
}

template <class Traits>
result<void> hybrid_allocator<Traits>::limit_releases(sequence_id sequence, std::uint64_t tokens) noexcept {
  if (const auto alive = check(sequence); !alive) return alive.error();
  records_[sequence.slot].hold = tokens;
  return {};
}

template <class Traits>
std::array<std::uint64_t, max_layer_groups> hybrid_allocator<Traits>::deferred_by_group() const noexcept {
  detail::group_counts waiting{};
  deferred_.for_each([&](block_id block) noexcept { ++waiting[pool_.group_of(block)]; });
  return waiting;
}

/// Whether the sequence's fence is still pending.
template <class Traits>
bool hybrid_allocator<Traits>::is_read(record& sequence) noexcept {
  if (!sequence.after.ready()) return true;
  sequence.after = fence_type();  // need not be checked again
  return false;
}

/// Drops references of a sequence, all or none: at once, or when its fence has passed.
template <class Traits>
result<void> hybrid_allocator<Traits>::let_go(std::uint32_t slot,
                                              std::span<const table_part> parts) noexcept {
  if (!is_read(records_[slot])) {
    for (const auto& part : parts) {
      for (std::size_t i = part.size(); i > 0; --i) {
        if (part[i - 1] != null_block)
          static_cast<void>(pool_.release(part[i - 1]));  // cannot fail: the sequence held it
      }
    }
    return {};
  }
  const fence_type& after = records_[slot].after;
  if (deferred_.push_parts(parts, after)) return {};
  collect();  // fences may have passed since
  const auto queued = deferred_.push_parts(parts, after);
  if (queued) return {};
  return refusal(errc::deferred_full, slot, queued.error().wanted, queued.error().found);
}

/// Drops the references to all blocks after the first `keep` tokens.
template <class Traits>
result<void> hybrid_allocator<Traits>::give_back(std::uint32_t slot, std::uint64_t keep) noexcept {
  const record& sequence = records_[slot];
  std::array<table_part, 2 * max_layer_groups> parts{};  // sinks, and the blocks after the dead ones
  std::size_t blocks = 0;
  const auto add = [&](std::size_t part, std::size_t g, std::uint64_t first, std::uint64_t end) noexcept {
    if (end <= first) return;
    parts[part] = table_part(row(slot, g) + first, static_cast<std::size_t>(end - first));
    blocks += parts[part].size();
  };
  for (std::size_t g = 0; g < group_count_; ++g) {
    const std::uint64_t kept = blocks_for(g, keep);
    const std::uint64_t end = blocks_for(g, sequence.tokens);
    const std::uint64_t dead = dead_to(sequence, g);
    add(2 * g, g, kept, end < dead_from(g) ? end : dead_from(g));
    add(2 * g + 1, g, kept > dead ? kept : dead, end);
  }
  if (blocks == 0) return {};
  return let_go(slot, std::span(parts).first(2 * group_count_));
}

/// `release_dead` where some group may have blocks to release.
template <class Traits>
void hybrid_allocator<Traits>::release_more(std::uint32_t slot, std::uint64_t length) noexcept {
  record& sequence = records_[slot];
  if (length > sequence.hold) length = sequence.hold;
  std::array<table_part, max_layer_groups> parts{};
  std::size_t blocks = 0;
  bool releases = false;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const std::uint64_t end = whole_blocks(g, groups_[g].skipped_tokens(length));
    const std::uint64_t first = dead_to(sequence, g);
    if (end <= first) continue;
    releases = true;
    parts[g] = table_part(row(slot, g) + first, static_cast<std::size_t>(end - first));
    for (const block_id block : parts[g])
      blocks += block != null_block ? 1U : 0U;
  }
  if (releases) {
    if (!let_go(slot, std::span(parts).first(group_count_))) return;
    for (std::size_t g = 0; g < group_count_; ++g) {
      if (parts[g].empty()) continue;
      const std::uint64_t first = dead_to(sequence, g);
      for (std::size_t i = 0; i < parts[g].size(); ++i)
        row(slot, g)[first + i] = null_block;
      sequence.dead[g] = static_cast<std::uint32_t>(first + parts[g].size());
    }
    counters_.released_early += blocks;
  }
  sequence.frees_at = ~std::uint64_t{0};
  for (std::size_t g = 0; g < group_count_; ++g) {
    const std::uint64_t next = detail::length_with_dead_blocks(groups_[g], dead_to(sequence, g) + 1);
    if (next < sequence.frees_at) sequence.frees_at = next;
  }
}

}  // namespace v0
}  // namespace llmmem
