/// @file
/// Bodies of super_pages.hpp; included by it alone.
#pragma once

#include <llmmem/paging/super_pages.hpp>

#include <bit>
#include <numeric>
#include <utility>

namespace llmmem::inline v0 {

namespace detail {

/// The layout that `options` ask for, once every number in them, and every product, can be worked with.
[[nodiscard]] inline super_page_layout checked_layout(const super_page_options& options) {
  const auto refuse = [&](const std::string& why) { throw length_error(options.name + ": " + why); };
  const auto n = [](std::uint64_t value) { return std::to_string(value); };
  if (options.block_bytes.empty() || options.block_bytes.size() > max_layer_groups) {
    refuse(n(options.block_bytes.size()) + " groups; allowed are 1 to " + n(max_layer_groups));
  }
  super_page_layout layout{.page_bytes = options.page_bytes, .shift = 0, .unit = options.page_bytes};
  std::uint64_t most = 1;
  for (std::size_t g = 0; g < options.block_bytes.size(); ++g) {
    const std::uint64_t bytes = options.block_bytes[g];
    if (bytes == 0 || bytes > options.page_bytes) {
      refuse("blocks of " + n(bytes) + " bytes in group " + n(g) + "; allowed are 1 to those of a page, " +
             n(options.page_bytes));
    }
    const std::uint64_t blocks = options.page_bytes / bytes;
    if (blocks > max_page_blocks) {
      refuse(n(blocks) + " blocks of group " + n(g) + " in a page, the most is " + n(max_page_blocks) +
             "; take smaller pages");
    }
    most = blocks > most ? blocks : most;
    layout.unit = std::gcd(layout.unit, bytes);
  }
  layout.shift = static_cast<std::uint32_t>(std::bit_width(most - 1));
  const std::uint64_t pages = options.budget_bytes / options.page_bytes;
  if (pages < 2) {
    refuse("a budget of " + n(options.budget_bytes) + " bytes; the null page and one more take " +
           n(checked_multiply(2, options.page_bytes, "super_page_pool: two pages")));
  }
  if (pages > (max_blocks + 1) >> layout.shift) {
    refuse(n(pages) + " pages of up to " + n(most) + " blocks; block ids, of 31 bits, name " +
           n((max_blocks + 1) >> layout.shift) + " such pages: take larger blocks");
  }
  if (pages * (options.page_bytes / layout.unit) > max_blocks + 1) {
    refuse("offsets in units of " + n(layout.unit) +
           " bytes, all that pages and blocks have in common, take " +
           n(pages * (options.page_bytes / layout.unit)) +
           " values and int32 has 2147483647: choose sizes with a larger common divisor");
  }
  return layout;
}

}  // namespace detail

template <eviction_policy Eviction>
super_page_pool<Eviction>::super_page_pool(const super_page_options& options)
    : super_page_pool(
          options, [](slot_count slots, const metadata_source& source) { return Eviction(slots, source); }) {}

template <eviction_policy Eviction>
template <eviction_factory<Eviction> Make>
super_page_pool<Eviction>::super_page_pool(const super_page_options& options, Make&& make)
    : name_(options.name),
      budget_bytes_(options.budget_bytes),
      group_count_(options.block_bytes.size()),
      layout_(detail::checked_layout(options)),
      pages_(options.budget_bytes / options.page_bytes, page_record{}, options.metadata,
             "super_page_pool: pages"),
      records_(pages_.size() << layout_.shift, block_record{}, options.metadata, "super_page_pool: records"),
      since_(records_.size(), options.metadata, "super_page_pool: times"),
      idle_(records_.size(), pages_.size(), options.metadata, "super_page_pool: idle blocks"),
      free_pages_(pages_.size(), options.metadata, "super_page_pool: free pages"),
      open_(pages_.size(), group_count_ * fill_levels, options.metadata, "super_page_pool: open pages"),
      emptiable_(pages_.size(), idle_levels, options.metadata, "super_page_pool: emptiable pages"),
      mixed_(pages_.size(), group_count_ * fill_levels, options.metadata, "super_page_pool: mixed pages") {
  for (std::size_t g = 0; g < group_count_; ++g) {
    groups_[g].block_bytes = options.block_bytes[g];
    groups_[g].page_blocks = layout_.page_bytes / options.block_bytes[g];
    evictions_by_group_[g].emplace(
        make(slot_count{pages_.size() * groups_[g].page_blocks}, options.metadata));
  }
  // A fresh pool hands out pages 1, 2, 3...
  for (std::size_t page = pages_.size() - 1; page > 0; --page)
    free_pages_[free_page_count_++] = static_cast<std::uint32_t>(page);
}

// Pages and the lists they stand in

template <eviction_policy Eviction>
typename super_page_pool<Eviction>::places super_page_pool<Eviction>::places_of(
    const page_record& page) const noexcept {
  places at;
  if (page.group == no_group) return at;
  const std::uint64_t blocks = groups_[page.group].page_blocks;
  const std::uint64_t level = page.active == 0 ? 0 : 1 + (page.active - 1U) * (fill_levels - 1) / blocks;
  const auto of_group = static_cast<std::int32_t>(page.group * fill_levels + level);
  if (std::uint64_t{page.active} + page.idle < blocks) at.open = of_group;
  if (page.active == 0 && page.idle != 0) {
    at.emptiable = static_cast<std::int32_t>((page.idle * idle_levels - 1) / blocks);
  }
  if (page.active != 0 && page.idle != 0) at.mixed = of_group;
  return at;
}

template <eviction_policy Eviction>
void super_page_pool<Eviction>::list(std::uint32_t page, const places& to) noexcept {
  group_record& group = groups_[pages_[page].group];
  const auto put = [page](detail::page_lists& lists, std::int32_t which, std::uint64_t& levels) noexcept {
    if (which < 0) return;
    lists.push_back(static_cast<std::size_t>(which), page);
    levels |= std::uint64_t{1} << (static_cast<std::size_t>(which) % fill_levels);
  };
  put(open_, to.open, group.open);
  put(mixed_, to.mixed, group.mixed);
  if (to.emptiable >= 0) {
    emptiable_.push_back(static_cast<std::size_t>(to.emptiable), page);
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
  drop(open_, from.open, group.open);
  drop(mixed_, from.mixed, group.mixed);
  if (from.emptiable >= 0) {
    emptiable_.remove(static_cast<std::size_t>(from.emptiable), page);
    --emptiable_count_;
  }
}

/// Changes what a page counts, and sees to its group's counts, its lists, and its return when it is empty.
template <eviction_policy Eviction>
template <class Change>
void super_page_pool<Eviction>::change(std::uint32_t page, Change&& how) noexcept {
  page_record& record = pages_[page];
  group_record& group = groups_[record.group];
  const auto room = [&] { return record.active == 0 ? 0 : group.page_blocks - record.active; };
  const places from = places_of(record);
  group.active -= record.active;
  group.idle -= record.idle;
  group.room -= room();
  how(record);
  group.active += record.active;
  group.idle += record.idle;
  group.room += room();
  const places to = places_of(record);
  if (record.active == 0 && record.idle == 0) {
    unlist(page, from);
    --group.pages;
    record = {};
    free_pages_[free_page_count_++] = page;
  } else if (from != to) {
    unlist(page, from);
    list(page, to);
  }
}

/// Gives a free page to `group`; a block of it has to be taken next. @pre there is one.
template <eviction_policy Eviction>
std::uint32_t super_page_pool<Eviction>::assign_page(std::uint16_t group) noexcept {
  const std::uint32_t page = free_pages_[--free_page_count_];
  pages_[page] = {.group = group};
  ++groups_[group].pages;
  ++pages_assigned_;
  list(page, places_of(pages_[page]));
  return page;
}

/// Takes a free block of a page. @pre it has one.
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
void super_page_pool<Eviction>::free_block(block_id block, transition why) noexcept {
  block_record& record = records_[to_index(block)];
  record.note(why);
  record.end_life();
  page_record& page = pages_[static_cast<std::size_t>(layout_.page_of(block))];
  since_[to_index(block)] = page.free_block;
  page.free_block = static_cast<std::uint32_t>(layout_.index_of(block));
}

// Allocation

template <eviction_policy Eviction>
bool super_page_pool<Eviction>::shortage(std::span<const std::uint64_t> wanted,
                                         std::span<group_shortage> out) const noexcept {
  bool enough = true;
  std::uint64_t left = open_pages();
  for (std::size_t g = 0; g < wanted.size(); ++g) {
    const group_record& group = groups_[g];
    const std::uint64_t beyond = wanted[g] > group.room ? wanted[g] - group.room : 0;
    const std::uint64_t pages = beyond / group.page_blocks + (beyond % group.page_blocks != 0 ? 1 : 0);
    out[g] = {.wanted = wanted[g], .available = group.room + left * group.page_blocks, .pages = pages};
    enough = enough && out[g].lacking() == 0;
    left -= pages < left ? pages : left;
  }
  return enough;
}

/// Whether a page may become one that holds an active block of `group`, and the rest of the allocation still
/// be had.
template <eviction_policy Eviction>
bool super_page_pool<Eviction>::may_open(std::size_t group) const noexcept {
  if (open_pages() == 0) return false;
  std::uint64_t pages = 0;
  for (std::size_t g = 0; g < group_count_; ++g) {
    const group_record& each = groups_[g];
    const std::uint64_t room = each.room + (g == group ? each.page_blocks : 0);
    if (each.wanted > room) pages += (each.wanted - room + each.page_blocks - 1) / each.page_blocks;
  }
  return pages <= open_pages() - 1;
}

template <eviction_policy Eviction>
template <eviction_callback OnEvict>
result<void> super_page_pool<Eviction>::allocate(std::span<const group_blocks> wanted,
                                                 OnEvict&& on_evict) noexcept {
  std::array<std::uint64_t, max_layer_groups> counts{};
  for (const group_blocks& each : wanted)
    counts[each.group] += each.out.size();
  std::array<group_shortage, max_layer_groups> lacks{};
  if (!shortage(std::span(counts).first(group_count_), lacks)) {
    for (std::size_t g = 0; g < group_count_; ++g) {
      if (lacks[g].lacking() == 0) continue;
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
  return {};
}

/// A block of `group`. @pre the allocation under way can be had.
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
    // Then idle blocks beside active ones go first: no other group could use them, and pages that are left to
    // them would fill the pool.
    const bool scarce = group_count_ > 1 && own.mixed != 0 && free_page_count_ < pages_.size() / scarce_share;
    if (opens && free_page_count_ != 0 && !scarce) return take_free(assign_page(group));
    // Contents have to go.
    const auto victim = evictions_by_group_[group]->victim();
    const block_id block = victim ? block_of(*victim, own) : null_block;
    if (!opens || scarce) {
      const bool beside = pages_[static_cast<std::size_t>(layout_.page_of(block))].active != 0;
      evict(beside ? block : block_id{idle_.front(fullest(mixed_, own.mixed))}, on_evict);
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
  records_[to_index(block)].give_up(transition::evicted);
  free_block(block, transition::evicted);
  change(page, [](page_record& each) noexcept { --each.idle; });
  ++evictions_;
}

/// Gives up all that a page keeps. @pre it holds no active block, and an idle one.
template <eviction_policy Eviction>
template <class OnEvict>
void super_page_pool<Eviction>::empty_page(std::uint32_t page, OnEvict& on_evict) noexcept {
  ++pages_emptied_;
  for (std::uint32_t left = pages_[page].idle; left > 0; --left)
    evict(block_id{idle_.front(page)}, on_evict);
}

/// The page that loses the smallest share when it is emptied, or `no_index`.
template <eviction_policy Eviction>
std::uint32_t super_page_pool<Eviction>::cheapest_page() const noexcept {
  for (std::size_t level = 0; level < idle_levels; ++level) {
    if (!emptiable_.empty(level)) return emptiable_.front(level);
  }
  return detail::no_index;
}

/// The cheapest page whose blocks have all been idle for longer than one that is idle since `time`.
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

// References

template <eviction_policy Eviction>
result<void> super_page_pool<Eviction>::check(block_id block) const noexcept {
  const std::uint32_t i = to_index(block);
  if (i == 0) return refusal(errc::null_handle, 0, 0, 0);
  if (i >= records_.size()) return refusal(errc::foreign_handle, i, 0, 0);
  if (!records_[i].is_active()) return refusal(errc::double_free, i, 0, 0);
  return {};
}

template <eviction_policy Eviction>
result<void> super_page_pool<Eviction>::share(block_id block) noexcept {
  if (const auto held = check(block); !held) {
    if (held.code() != errc::double_free || !records_[to_index(block)].is_idle()) return held;
  }
  block_record& record = records_[to_index(block)];
  if (record.references() == block_record::max_references) {
    return refusal(errc::too_many_shares, to_index(block), 1, record.references());
  }
  if (!record.is_idle()) {
    record.add_reference(transition::shared);
    return {};
  }
  const auto page = static_cast<std::uint32_t>(layout_.page_of(block));
  const std::size_t group = pages_[page].group;
  evictions_by_group_[group]->pin(slot(block, groups_[group]));
  idle_.remove(page, to_index(block));
  record.add_reference(transition::revived);
  change(page, [](page_record& each) noexcept {
    --each.idle;
    ++each.active;
  });
  return {};
}

template <eviction_policy Eviction>
result<void> super_page_pool<Eviction>::release(block_id block) noexcept {
  if (const auto held = check(block); !held) return held;
  block_record& record = records_[to_index(block)];
  if (!record.drop_reference()) return {};
  const auto page = static_cast<std::uint32_t>(layout_.page_of(block));
  if (record.is_cached()) {
    const std::size_t group = pages_[page].group;
    record.note(transition::idled);
    evictions_by_group_[group]->unpin(slot(block, groups_[group]));
    since_[to_index(block)] = pages_[page].last_idle = ++clock_;
    idle_.push_back(page, to_index(block));
    change(page, [](page_record& each) noexcept {
      --each.active;
      ++each.idle;
    });
  } else {
    free_block(block, transition::freed);
    change(page, [](page_record& each) noexcept { --each.active; });
  }
  return {};
}

template <eviction_policy Eviction>
void super_page_pool<Eviction>::mark_cached(block_id block, const access_hint& hint) noexcept {
  records_[to_index(block)].keep();
  const std::size_t group = group_of(block);
  evictions_by_group_[group]->insert(slot(block, groups_[group]), hint);
}

template <eviction_policy Eviction>
void super_page_pool<Eviction>::unmark_cached(block_id block) noexcept {
  block_record& record = records_[to_index(block)];
  if (!record.is_cached()) return;
  const bool idle = record.is_idle();
  const std::size_t group = group_of(block);
  evictions_by_group_[group]->erase(slot(block, groups_[group]));
  record.give_up(transition::uncached);
  if (!idle) return;
  const auto page = static_cast<std::uint32_t>(layout_.page_of(block));
  idle_.remove(page, to_index(block));
  free_block(block, transition::uncached);
  change(page, [](page_record& each) noexcept { --each.idle; });
}

template <eviction_policy Eviction>
void super_page_pool<Eviction>::touch(block_id block, const access_hint& hint) noexcept {
  const block_record& record = records_[to_index(block)];
  if (!record.is_cached()) return;
  const auto page = static_cast<std::uint32_t>(layout_.page_of(block));
  const std::size_t group = pages_[page].group;
  evictions_by_group_[group]->touch(slot(block, groups_[group]), hint);
  if (!record.is_idle()) return;
  since_[to_index(block)] = pages_[page].last_idle = ++clock_;
  idle_.remove(page, to_index(block));
  idle_.push_back(page, to_index(block));
  const places at = places_of(pages_[page]);
  unlist(page, at);
  list(page, at);
}

// The whole

template <eviction_policy Eviction>
super_page_group_stats super_page_pool<Eviction>::stats(std::size_t group) const noexcept {
  const group_record& of = groups_[group];
  const std::uint64_t free = of.pages * of.page_blocks - of.active - of.idle;
  const std::uint64_t tail = layout_.page_bytes - of.page_blocks * of.block_bytes;
  return {.block_bytes = of.block_bytes,
          .page_blocks = of.page_blocks,
          .page_tail_bytes = tail,
          .pages = of.pages,
          .active_blocks = of.active,
          .idle_blocks = of.idle,
          .free_blocks = free,
          .active_bytes = of.active * of.block_bytes,
          .idle_bytes = of.idle * of.block_bytes,
          .free_bytes = free * of.block_bytes,
          .padding_bytes = of.pages * tail};
}

template <eviction_policy Eviction>
super_page_stats super_page_pool<Eviction>::stats() const noexcept {
  super_page_stats all{.budget_bytes = budget_bytes_,
                       .remainder_bytes = budget_bytes_ - physical_bytes(),
                       .null_bytes = layout_.page_bytes,
                       .pages = pages_.size() - 1,
                       .free_pages = free_page_count_,
                       .emptiable_pages = emptiable_count_,
                       .allocations = allocations_,
                       .evictions = evictions_,
                       .pages_assigned = pages_assigned_,
                       .pages_emptied = pages_emptied_,
                       .metadata_bytes = pages_.bytes() + records_.bytes() + since_.bytes() + idle_.bytes() +
                                         free_pages_.bytes() + open_.bytes() + emptiable_.bytes() +
                                         mixed_.bytes()};
  for (std::size_t g = 0; g < group_count_; ++g) {
    const super_page_group_stats each = stats(g);
    all.active_bytes += each.active_bytes;
    all.idle_bytes += each.idle_bytes;
    all.free_bytes += each.free_bytes;
    all.padding_bytes += each.padding_bytes;
    all.metadata_bytes += evictions_by_group_[g]->metadata_bytes();
  }
  return all;
}

template <eviction_policy Eviction>
void super_page_pool<Eviction>::audit_page(std::uint32_t page, std::vector<std::string>& found) const {
  const page_record& record = pages_[page];
  const auto blame = [&](const std::string& what) {
    found.push_back(name_ + ": page " + std::to_string(page) + " " + what);
  };
  const std::uint64_t ids = std::uint64_t{1} << layout_.shift;
  const std::uint64_t blocks = record.group == no_group ? 0 : groups_[record.group].page_blocks;
  std::uint64_t active = 0;
  std::uint64_t idle = 0;
  for (std::uint64_t i = 0; i < ids; ++i) {
    const block_id block = block_at(page, i);
    const block_record& each = records_[to_index(block)];
    const auto accuse = [&](const std::string& what) {
      found.push_back(name_ + ": block " + std::to_string(to_index(block)) + " " + what +
                      " (last: " + std::string(to_string(each.last())) + ")");
    };
    active += each.is_active() ? 1 : 0;
    idle += each.is_idle() ? 1 : 0;
    if (i >= blocks) {
      if (each.is_active() || each.is_cached()) accuse("is in use where its page has no block");
      continue;
    }
    const group_record& group = groups_[record.group];
    const bool candidate = evictions_by_group_[record.group]->is_candidate(slot(block, group));
    if (candidate != each.is_idle()) {
      accuse(candidate ? "is an eviction candidate but not idle" : "is idle but no eviction candidate");
    }
    if (i >= record.touched && (each.is_active() || each.is_cached())) accuse("was never handed out");
    if (each.is_idle() && is_older(record.last_idle, since_[to_index(block)])) {
      accuse("is idle since later than its page knows");
    }
  }
  if (active != record.active || idle != record.idle) {
    blame("counts " + std::to_string(record.active) + " active and " + std::to_string(record.idle) +
          " idle blocks, it has " + std::to_string(active) + " and " + std::to_string(idle));
  }
  std::uint64_t kept = 0;
  for (std::uint32_t i = idle_.front(page); i != detail::no_index && kept <= ids; i = idle_.next(i), ++kept) {
    if (layout_.page_of(block_id{i}) != page || !records_[i].is_idle()) {
      blame("lists block " + std::to_string(i) + " as idle, which is not, or not its own");
      return;
    }
  }
  if (kept != idle) blame("lists " + std::to_string(kept) + " idle blocks, it has " + std::to_string(idle));
  if (record.group == no_group) return;
  if (record.active == 0 && record.idle == 0) blame("is empty but not free");
  std::vector<bool> listed(ids);
  std::uint64_t free = 0;
  for (std::uint32_t i = record.free_block; i != detail::no_index; i = since_[to_index(block_at(page, i))]) {
    const block_record* each = i < record.touched ? &records_[to_index(block_at(page, i))] : nullptr;
    if (each == nullptr || listed[i] || each->is_active() || each->is_cached()) {
      blame("lists block " + std::to_string(i) + " as free, which is in use, listed twice or none");
      return;
    }
    listed[i] = true;
    ++free;
  }
  if (free + active + idle != record.touched) {
    blame("has handed out " + std::to_string(record.touched) + " blocks, accounted for are " +
          std::to_string(free + active + idle));
  }
}

template <eviction_policy Eviction>
std::vector<std::string> super_page_pool<Eviction>::audit() const {
  std::vector<std::string> found;
  const auto blame = [&](const std::string& what) { found.push_back(name_ + ": " + what); };
  std::array<group_record, max_layer_groups> counted{};
  std::vector<std::uint32_t> in_lists(pages_.size());
  std::vector<bool> is_free(pages_.size());
  for (std::uint64_t i = 0; i < free_page_count_; ++i) {
    const std::uint32_t page = free_pages_[i];
    if (page == 0 || page >= pages_.size() || is_free[page] || pages_[page].group != no_group) {
      blame("the free pages name page " + std::to_string(page) + ", which is assigned, named twice or none");
      return found;
    }
    is_free[page] = true;
  }
  for (std::uint32_t page = 0; page < pages_.size(); ++page) {
    const page_record& record = pages_[page];
    audit_page(page, found);
    if (record.group == no_group) {
      if (!is_free[page] && page != 0) blame("page " + std::to_string(page) + " is leaked");
      continue;
    }
    const places at = places_of(record);
    in_lists[page] = (at.open >= 0 ? 1U : 0U) + (at.emptiable >= 0 ? 1U : 0U) + (at.mixed >= 0 ? 1U : 0U);
    group_record& group = counted[record.group];
    ++group.pages;
    group.active += record.active;
    group.idle += record.idle;
    if (record.active != 0) group.room += groups_[record.group].page_blocks - record.active;
  }
  const auto walk = [&](const detail::page_lists& lists, std::size_t which, auto&& belongs) {
    std::uint64_t length = 0;
    for (std::uint32_t page = lists.front(which); page != detail::no_index && length <= pages_.size();
         page = lists.next(page), ++length) {
      if (in_lists[page] == 0 || !belongs(places_of(pages_[page]))) {
        blame("page " + std::to_string(page) + " stands in a list it does not belong to");
        return length;
      }
      --in_lists[page];
    }
    return length;
  };
  std::uint64_t emptiable = 0;
  for (std::size_t i = 0; i < idle_levels; ++i) {
    emptiable += walk(emptiable_, i, [&](const places& at) { return at.emptiable == std::int32_t(i); });
  }
  if (emptiable != emptiable_count_) {
    blame(std::to_string(emptiable) + " pages can be emptied, counted are " +
          std::to_string(emptiable_count_));
  }
  for (std::size_t g = 0; g < group_count_; ++g) {
    const group_record& of = groups_[g];
    const group_record& now = counted[g];
    for (std::size_t level = 0; level < fill_levels; ++level) {
      const auto which = static_cast<std::int32_t>(g * fill_levels + level);
      const auto at = static_cast<std::size_t>(which);
      const std::uint64_t open =
          walk(open_, at, [&](const places& of_page) { return of_page.open == which; });
      const std::uint64_t mixed =
          walk(mixed_, at, [&](const places& of_page) { return of_page.mixed == which; });
      if ((open != 0) != ((of.open >> level & 1U) != 0) || (mixed != 0) != ((of.mixed >> level & 1U) != 0)) {
        blame("group " + std::to_string(g) + " has " + std::to_string(open) + " open and " +
              std::to_string(mixed) + " mixed pages of fill level " + std::to_string(level) +
              ", its masks say otherwise");
      }
    }
    if (of.pages != now.pages || of.active != now.active || of.idle != now.idle || of.room != now.room ||
        of.wanted != 0) {
      blame("group " + std::to_string(g) + " counts " + std::to_string(of.pages) + " pages, " +
            std::to_string(of.active) + " active and " + std::to_string(of.idle) + " idle blocks, room for " +
            std::to_string(of.room) + "; there are " + std::to_string(now.pages) + ", " +
            std::to_string(now.active) + ", " + std::to_string(now.idle) + ", " + std::to_string(now.room));
    }
  }
  for (std::size_t page = 0; page < in_lists.size(); ++page) {
    if (in_lists[page] != 0) blame("page " + std::to_string(page) + " is missing from a list");
  }
  const super_page_stats all = stats();
  const std::uint64_t bytes = all.remainder_bytes + all.null_bytes + all.free_pages * layout_.page_bytes +
                              all.active_bytes + all.idle_bytes + all.free_bytes + all.padding_bytes;
  if (bytes != budget_bytes_) {
    blame("accounts for " + std::to_string(bytes) + " of " + std::to_string(budget_bytes_) + " bytes");
  }
  return found;
}

}  // namespace llmmem::inline v0
