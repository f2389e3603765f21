/// @file
/// Bodies of super_pages.hpp: pages, and the lists that they are in. Only super_pages_body.hpp includes it.
#pragma once

#include <llmmem/paging/super_pages.hpp>

namespace llmmem {
inline namespace v0 {

template <eviction_policy Eviction>
typename super_page_pool<Eviction>::places super_page_pool<Eviction>::places_of(
    std::uint32_t of) const noexcept {
  const page_record& page = pages_[of];
  places at;
  if (page.group == no_group || of > last_page_) return at;
  const std::uint64_t blocks = groups_[page.group].page_blocks;
  const divider& per_page = groups_[page.group].per_page;
  const std::uint64_t level =
      page.active == 0 ? 0 : 1 + per_page.quotient((page.active - 1U) * (fill_levels - 1));
  const std::uint64_t of_group = page.group * fill_levels + level;
  if (std::uint64_t{page.active} + page.idle < blocks) at.set_open(of_group);
  if (page.active == 0 && page.idle != 0) {
    at.set_emptiable(per_page.quotient(page.idle * idle_levels - 1));
  }
  if (page.active != 0 && page.idle != 0) at.set_mixed(of_group);
  return at;
}

/// Returns the blocks of a page that its group may still allocate although another one of the page is active.
template <eviction_policy Eviction>
std::uint64_t super_page_pool<Eviction>::spare_of(std::uint32_t page) const noexcept {
  const page_record& record = pages_[page];
  return record.active == 0 || page > last_page_ ? 0 : groups_[record.group].page_blocks - record.active;
}

template <eviction_policy Eviction>
void super_page_pool<Eviction>::free_page(std::uint32_t page) noexcept {
  free_pages_[free_page_count_++] = page;
}

template <eviction_policy Eviction>
void super_page_pool<Eviction>::list(std::uint32_t page, const places& to) noexcept {
  group_record& group = groups_[pages_[page].group];
  const auto put = [page](detail::page_lists& lists, std::int32_t which, std::uint64_t& levels) noexcept {
    if (which < 0) return;
    lists.push_back(static_cast<std::size_t>(which), page);
    levels |= std::uint64_t{1} << (static_cast<std::size_t>(which) % fill_levels);
  };
  put(open_, to.open(), group.open);
  put(mixed_, to.mixed(), group.mixed);
  if (to.emptiable() >= 0) {
    emptiable_.push_back(static_cast<std::size_t>(to.emptiable()), page);
    ++emptiable_count_;
  }
}

template <eviction_policy Eviction>
void super_page_pool<Eviction>::unlist(std::uint32_t page, const places& from) noexcept {
  group_record& group = groups_[pages_[page].group];
  const auto drop = [page](detail::page_lists& lists, std::int32_t which, std::uint64_t& levels) noexcept {
    if (which < 0) return;
    const auto list = static_cast<std::size_t>(which);
    lists.remove(list, page);
    if (lists.empty(list)) levels &= ~(std::uint64_t{1} << (list % fill_levels));
  };
  drop(open_, from.open(), group.open);
  drop(mixed_, from.mixed(), group.mixed);
  if (from.emptiable() >= 0) {
    emptiable_.remove(static_cast<std::size_t>(from.emptiable()), page);
    --emptiable_count_;
  }
}

/// Changes the counts of a page and updates its group's counts and its lists; frees the page if it is empty.
template <eviction_policy Eviction>
template <class Change>
void super_page_pool<Eviction>::change(std::uint32_t page, Change&& how) noexcept {
  page_record& record = pages_[page];
  group_record& group = groups_[record.group];
  const places from = places_of(page);
  group.active -= record.active;
  group.idle -= record.idle;
  group.spare -= spare_of(page);
  how(record);
  group.active += record.active;
  group.idle += record.idle;
  group.spare += spare_of(page);
  const places to = places_of(page);
  if (record.active == 0 && record.idle == 0) {
    unlist(page, from);
    --group.pages;
    record = {};
    if (page > last_page_) {
      --retiring_;
    } else {
      free_page(page);
    }
  } else if (from != to) {
    unlist(page, from);
    list(page, to);
  }
}

/// Assigns a free page to `group`; the caller must take a block of it next. @pre a free page exists.
template <eviction_policy Eviction>
std::uint32_t super_page_pool<Eviction>::assign_page(std::uint16_t group) noexcept {
  const std::uint32_t page = free_pages_[--free_page_count_];
  pages_[page] = {.group = group};
  ++groups_[group].pages;
  ++pages_assigned_;
  list(page, places_of(page));
  return page;
}

/// Takes a free block of a page. @pre the page has one.
template <eviction_policy Eviction>
block_id super_page_pool<Eviction>::take_free(std::uint32_t page) noexcept {
  page_record& record = pages_[page];
  block_id block{};
  if (record.free_block != detail::no_index) {
    block = block_at(page, record.free_block);
    record.free_block = since_[to_index(block)];
  } else {
    block = block_at(page, record.touched++);
  }
  records_[to_index(block)].allocate();
  change(page, [](page_record& each) noexcept { ++each.active; });
  ++allocations_;
  return block;
}

template <eviction_policy Eviction>
void super_page_pool<Eviction>::free_block(block_id block, paging::transition why) noexcept {
  block_record& record = records_[to_index(block)];
  record.note(why);
  record.end_life();
  page_record& page = pages_[static_cast<std::size_t>(layout_.page_of(block))];
  since_[to_index(block)] = page.free_block;
  page.free_block = static_cast<std::uint32_t>(layout_.index_of(block));
}

template <eviction_policy Eviction>
template <class Visit>
void super_page_pool<Eviction>::visit_order(Visit&& visit) const noexcept {
  for (std::uint64_t i = 0; i < free_page_count_; ++i)
    visit(std::uint64_t{free_pages_[i]});
  const auto walk = [&](const detail::page_lists& lists, std::size_t list) noexcept {
    for (std::uint32_t at = lists.front(list); at != detail::no_index; at = lists.next(at))
      visit(std::uint64_t{at});
    visit(~std::uint64_t{0});
  };
  for (std::uint32_t i = 0; i < pages_.size(); ++i) {
    const page_record& page = pages_[i];
    visit(std::uint64_t{page.group} << 48 | std::uint64_t{page.active} << 32 |
          std::uint64_t{page.idle} << 16 | page.touched);
    if (page.group == no_group) continue;
    for (std::uint32_t free = page.free_block; free != detail::no_index;
         free = since_[to_index(block_at(i, free))])
      visit(std::uint64_t{free});
    walk(idle_, i);
  }
  for (std::size_t list = 0; list < group_count_ * fill_levels; ++list) {
    walk(open_, list);
    walk(mixed_, list);
  }
  for (std::size_t list = 0; list < idle_levels; ++list)
    walk(emptiable_, list);
}

}  // namespace v0
}  // namespace llmmem
