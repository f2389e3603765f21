/// @file
/// Bodies of super_pages.hpp: resizing. Only super_pages_body.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/super_pages.hpp>

namespace llmmem {
inline namespace v0 {

/// Drops the cached contents of a page that is above the budget now. @pre the page is in no list.
template <eviction_policy Eviction>
template <class OnEvict>
void super_page_pool<Eviction>::retire(std::uint32_t page, OnEvict& on_evict) noexcept {
  const std::uint64_t blocks = groups_[pages_[page].group].page_blocks;
  for (std::uint64_t i = 0; i < blocks; ++i) {
    const block_id block = block_at(page, i);
    if (!records_[to_index(block)].is_cached()) continue;
    on_evict(std::span<const block_id>(&block, 1));
    unmark_cached(block);
  }
}

template <eviction_policy Eviction>
template <eviction_callback OnEvict>
result<std::uint64_t> super_page_pool<Eviction>::resize(std::uint64_t budget_bytes,
                                                        OnEvict&& on_evict) noexcept {
  const std::uint64_t pages = budget_bytes / layout_.page_bytes;
  if (pages < 2 || budget_bytes > budget_capacity_bytes_)
    return refusal(errc::bad_budget, 0, budget_bytes, budget_capacity_bytes_);
  const std::uint64_t before = last_page_;
  const std::uint64_t after = pages - 1;
  budget_bytes_ = budget_bytes;
  // While a page changes sides, it is in no list and has no spare blocks.
  for (std::uint64_t i = after + 1; i <= before; ++i) {
    const auto page = static_cast<std::uint32_t>(i);
    if (pages_[page].group == no_group) continue;
    unlist(page, places_of(page));
    groups_[pages_[page].group].spare -= spare_of(page);
    ++retiring_;
  }
  last_page_ = after;
  for (std::uint64_t i = after + 1; i <= before; ++i)
    if (const auto page = static_cast<std::uint32_t>(i); pages_[page].group != no_group)
      retire(page, on_evict);
  for (std::uint64_t i = before + 1; i <= after; ++i) {
    const auto page = static_cast<std::uint32_t>(i);
    if (pages_[page].group == no_group) continue;
    list(page, places_of(page));
    groups_[pages_[page].group].spare += spare_of(page);
    --retiring_;
  }
  // The lowest free page is assigned first, so that a later resize finds the highest ones free.
  free_page_count_ = 0;
  for (std::uint64_t i = after; i > 0; --i)
    if (pages_[i].group == no_group) free_page(static_cast<std::uint32_t>(i));
  return retiring_;
}

template <eviction_policy Eviction>
template <eviction_callback OnEvict>
block_id super_page_pool<Eviction>::evacuate(block_id block, OnEvict&& on_evict) noexcept {
  block_id to = null_block;
  if (!allocate(group_of(block), std::span<block_id>(&to, 1), on_evict)) return null_block;
  records_[to_index(to)].take_over(records_[to_index(block)]);
  free_block(block, paging::transition::moved);
  change(static_cast<std::uint32_t>(layout_.page_of(block)),
         [](page_record& each) noexcept { --each.active; });
  return to;
}

}  // namespace v0
}  // namespace llmmem
