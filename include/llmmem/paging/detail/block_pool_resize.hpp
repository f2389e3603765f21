/// @file
/// Bodies of block_pool.hpp: moving blocks, and resizing. Only block_pool_body.hpp includes it.
#pragma once

#include <llmmem/paging/block_pool.hpp>
#include <llmmem/paging/errors.hpp>

#include <utility>

namespace llmmem {
inline namespace v0 {

template <eviction_policy Eviction, free_list FreeList, block_history History>
void block_pool<Eviction, FreeList, History>::relocate(std::span<const block_move> moves) noexcept {
  for (const block_move& move : moves)
    records_[to_index(move.destination)].allocate();
  free_.keep_if([this](block_id block) noexcept { return !records_[to_index(block)].is_active(); });
  for (const block_move& move : moves) {
    block_record& from = records_[to_index(move.source)];
    block_record& to = records_[to_index(move.destination)];
    if (from.is_cached())
      detail::relabel(eviction_, slot_id{to_index(move.source)}, slot_id{to_index(move.destination)});
    to.take_over(from);
    history_.note(move.source, paging::transition::moved);
    history_.note(move.destination, paging::transition::allocated);
    push_free(move.source);
  }
}

template <eviction_policy Eviction, free_list FreeList, block_history History>
template <eviction_callback OnEvict>
result<std::uint64_t> block_pool<Eviction, FreeList, History>::resize(std::uint64_t blocks,
                                                                      OnEvict&& on_evict) noexcept {
  if (blocks == 0 || blocks > block_capacity())
    return refusal(errc::bad_block_count, 0, blocks, block_capacity());
  const std::uint64_t before = std::exchange(last_, blocks);
  free_.keep_if([this](block_id block) noexcept { return !is_retiring(block); });
  // Counts all blocks before it drops any, because `on_evict` may drop others.
  for (std::uint64_t i = blocks + 1; i <= before; ++i)
    retiring_ += records_[i].is_active() || records_[i].is_idle() ? 1U : 0U;
  for (std::uint64_t i = blocks + 1; i <= before; ++i) {
    const block_id block{static_cast<std::uint32_t>(i)};
    if (!records_[i].is_cached()) continue;
    unmark_cached(block);
    on_evict(std::span<const block_id>(&block, 1));
  }
  for (std::uint64_t i = blocks; i > before; --i) {
    const block_id block{static_cast<std::uint32_t>(i)};
    if (records_[i].is_active()) {
      --retiring_;
    } else {
      push_free(block);
    }
  }
  return retiring_;
}

}  // namespace v0
}  // namespace llmmem
