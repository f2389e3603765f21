/// @file
/// Bodies of hybrid_allocator.hpp: another budget, and the blocks that are in its way. Only
/// hybrid_allocator_body.hpp includes it.
#pragma once

#include <llmmem/paging/hybrid_allocator.hpp>

namespace llmmem {
inline namespace v0 {

template <class Traits>
result<std::uint64_t> hybrid_allocator<Traits>::resize(std::uint64_t budget_bytes) noexcept {
  // Where pages are usable again, the next commits of their holders cache what these have committed.
  if (pool_.retiring_pages() != 0)
    visit_retiring([](block_id&, std::size_t, record& holder) noexcept { holder.borrows = true; });
  const auto retiring = pool_.resize(budget_bytes, forget_evicted());
  if (retiring) ++losses_;
  return retiring;
}

/// Calls `visit(block, group, holder)` for each table entry that names a block of a retiring page.
template <class Traits>
template <class Visit>
void hybrid_allocator<Traits>::visit_retiring(Visit&& visit) noexcept {
  for (std::uint32_t slot = 0; slot < records_.touched(); ++slot) {
    if (!records_.is_live(slot)) continue;
    for (std::size_t g = 0; g < group_count_; ++g) {
      const std::uint64_t entries = groups_[g].blocks_for(records_[slot].tokens);
      for (std::uint64_t i = 0; i < entries; ++i)
        if (block_id& block = row(slot, g)[i]; pool_.is_retiring(block)) visit(block, g, records_[slot]);
    }
  }
}

template <class Traits>
std::uint64_t hybrid_allocator<Traits>::evacuate(std::span<group_copy> moves) noexcept {
  collect();
  // Blocks of retiring pages are not cached, so their entries of `node_of_` are free: first for the number of
  // tables that name the block, then for its new place.
  visit_retiring(
      [&](block_id& block, std::size_t, record&) noexcept { node_of_[to_index(block)] = block_id{0}; });
  visit_retiring([&](block_id& block, std::size_t, record&) noexcept {
    block_id& tables = node_of_[to_index(block)];
    tables = block_id{to_index(tables) + 1};
  });
  std::uint64_t moved = 0;
  visit_retiring([&](block_id& block, std::size_t g, record& holder) noexcept {
    const block_record& held = pool_.record(block);
    if (!held.is_active()) {  // another table's entry has moved it
      block = node_of_[to_index(block)];
      holder.borrows = true;
      return;
    }
    if (moved == moves.size() || held.references() != to_index(node_of_[to_index(block)])) return;
    const block_id to = pool_.evacuate(block, forget_evicted());
    if (to == null_block) return;
    moves[static_cast<std::size_t>(moved++)] = {
        g, block_copy{.source = block, .destination = to, .tokens = groups_[g].block_tokens}};
    node_of_[to_index(block)] = to;
    block = to;
    holder.borrows = true;  // its next commit caches the block again
  });
  if (moved != 0) ++losses_;
  return moved;
}

}  // namespace v0
}  // namespace llmmem
