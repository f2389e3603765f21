/// @file
/// Bodies of super_pages.hpp: the choice of the block to allocate, and of the contents to drop for it. Only
/// super_pages_body.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/super_pages.hpp>

#include <array>
#include <bit>

namespace llmmem {
inline namespace v0 {

template <eviction_policy Eviction>
bool super_page_pool<Eviction>::shortage(std::span<const std::uint64_t> wanted,
                                         std::span<group_shortage> out) const noexcept {
  bool enough = true;
  std::uint64_t left = open_pages();
  for (std::size_t g = 0; g < wanted.size(); ++g) {
    const group_record& group = groups_[g];
    const std::uint64_t beyond = wanted[g] > group.spare ? wanted[g] - group.spare : 0;
    const std::uint64_t pages =
        beyond == 0 ? 0 : beyond / group.page_blocks + (beyond % group.page_blocks != 0 ? 1 : 0);
    out[g] = {.wanted = wanted[g], .available = group.spare + left * group.page_blocks, .pages = pages};
    enough = enough && out[g].missing() == 0;
    left -= pages < left ? pages : left;
  }
  return enough;
}

/// Whether a page may receive an active block of `group` while the rest of the allocation remains possible.
template <eviction_policy Eviction>
bool super_page_pool<Eviction>::may_open(std::size_t group) const noexcept {
  if (open_pages() == 0) return false;
  std::uint64_t pages = 0;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const group_record& each = groups_[g];
    const std::uint64_t spare = each.spare + (g == group ? each.page_blocks : 0);
    if (each.wanted > spare) pages += each.per_page.quotient(each.wanted - spare + each.page_blocks - 1);
  }
  return pages <= open_pages() - 1;
}

template <eviction_policy Eviction>
template <eviction_callback OnEvict>
result<void> super_page_pool<Eviction>::allocate(std::span<const group_blocks> wanted,
                                                 std::span<const std::uint64_t> leave,
                                                 OnEvict&& on_evict) noexcept {
  std::array<std::uint64_t, max_layer_groups> counts{};
  for (std::size_t g = 0; g < leave.size(); ++g)
    counts[g] = leave[g];
  for (const group_blocks& each : wanted)
    counts[each.group] += each.out.size();
  std::array<group_shortage, max_layer_groups> lacks{};
  if (!shortage(std::span(counts).first(group_count_), lacks)) {
    for (std::size_t g = 0; g < group_count_; ++g) {
      if (lacks[g].missing() == 0) continue;
      return refusal(errc::out_of_group_blocks, static_cast<std::uint32_t>(g), lacks[g].wanted,
                     lacks[g].available);
    }
  }
  for (std::size_t g = 0; g < group_count_; ++g)
    groups_[g].wanted = counts[g];
  for (const group_blocks& each : wanted) {
    for (block_id& block : each.out) {
      block = take(static_cast<std::uint16_t>(each.group), on_evict);
      --groups_[each.group].wanted;
    }
  }
  for (std::size_t g = 0; g < leave.size(); ++g)
    groups_[g].wanted = 0;
  return {};
}

/// Takes a block of `group`. @pre the allocation in progress is possible.
template <eviction_policy Eviction>
template <class OnEvict>
block_id super_page_pool<Eviction>::take(std::uint16_t group, OnEvict& on_evict) noexcept {
  group_record& own = groups_[group];
  const auto fullest = [group](const detail::page_lists& lists, std::uint64_t levels) noexcept {
    return lists.front(group * fill_levels + static_cast<std::size_t>(std::bit_width(levels) - 1));
  };
  for (;;) {
    if (own.open > 1) return take_free(fullest(open_, own.open));
    const bool opens = may_open(group);
    if (opens && own.open != 0) return take_free(fullest(open_, own.open));
    // While pages are scarce, evicts idle blocks in pages with active ones first: no other group could use
    // them, and such pages would fill the pool.
    const bool scarce =
        group_count_ > 1 && own.mixed != 0 && free_page_count_ < (last_page_ + 1) / scarce_share;
    if (opens && free_page_count_ != 0 && !scarce) return take_free(assign_page(group));
    // From here on, an allocation drops contents.
    const auto victim = evictions_by_group_[group]->victim();
    const block_id block = victim ? block_of(*victim, own) : null_block;
    if (!opens || scarce) {
      const bool is_mixed = pages_[static_cast<std::size_t>(layout_.page_of(block))].active != 0;
      evict(is_mixed ? block : block_id{idle_.front(fullest(mixed_, own.mixed))}, on_evict);
    } else if (victim) {
      const std::uint32_t older = page_older_than(since_[to_index(block)]);
      if (older != detail::no_index && pages_[older].group != group) {
        empty_page(older, on_evict);
      } else {
        evict(block, on_evict);
      }
    } else {
      empty_page(cheapest_page(), on_evict);
    }
  }
}

template <eviction_policy Eviction>
template <class OnEvict>
void super_page_pool<Eviction>::evict(block_id block, OnEvict& on_evict) noexcept {
  const auto page = static_cast<std::uint32_t>(layout_.page_of(block));
  const std::size_t group = pages_[page].group;
  on_evict(std::span<const block_id>(&block, 1));
  detail::evict(*evictions_by_group_[group], slot(block, groups_[group]));
  idle_.remove(page, to_index(block));
  records_[to_index(block)].give_up(paging::transition::evicted);
  free_block(block, paging::transition::evicted);
  change(page, [](page_record& each) noexcept { --each.idle; });
  ++evictions_;
}

/// Drops all contents of a page. @pre the page holds no active block, and at least one idle block.
template <eviction_policy Eviction>
template <class OnEvict>
void super_page_pool<Eviction>::empty_page(std::uint32_t page, OnEvict& on_evict) noexcept {
  ++pages_emptied_;
  for (std::uint32_t left = pages_[page].idle; left > 0; --left)
    evict(block_id{idle_.front(page)}, on_evict);
}

/// Returns the page with the smallest share of kept contents, or `no_index`.
template <eviction_policy Eviction>
std::uint32_t super_page_pool<Eviction>::cheapest_page() const noexcept {
  for (std::size_t level = 0; level < idle_levels; ++level) {
    if (!emptiable_.empty(level)) return emptiable_.front(level);
  }
  return detail::no_index;
}

/// Returns the cheapest page whose blocks have all been idle for longer than a block idle since `time`.
template <eviction_policy Eviction>
std::uint32_t super_page_pool<Eviction>::page_older_than(std::uint32_t time) const noexcept {
  for (std::size_t level = 0; level < idle_levels; ++level) {
    const std::uint32_t page = emptiable_.front(level);
    if (page != detail::no_index && is_older(pages_[page].last_idle, time)) return page;
  }
  return detail::no_index;
}

template <eviction_policy Eviction>
template <eviction_callback OnEvict>
std::uint64_t super_page_pool<Eviction>::reclaim_pages(std::uint64_t pages, OnEvict&& on_evict) noexcept {
  std::uint64_t done = 0;
  for (; done < pages && emptiable_count_ != 0; ++done)
    empty_page(cheapest_page(), on_evict);
  return done;
}

template <eviction_policy Eviction>
template <eviction_callback OnEvict>
bool super_page_pool<Eviction>::evict_one(std::size_t group, OnEvict&& on_evict) noexcept {
  const auto victim = evictions_by_group_[group]->victim();
  if (victim) evict(block_of(*victim, groups_[group]), on_evict);
  return victim.has_value();
}

}  // namespace v0
}  // namespace llmmem
