/// @file
/// Bodies of super_pages.hpp: construction, references, statistics. Only super_pages.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/super_pages.hpp>

#include <bit>
#include <numeric>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Returns the largest budget that a pool or an allocator of `options` may ever have.
template <class Options>
[[nodiscard]] std::uint64_t budget_capacity(const Options& options) noexcept {
  return options.budget_capacity_bytes != 0 ? options.budget_capacity_bytes : options.budget_bytes;
}

/// Returns the layout for `options` after checking every number and every product in them.
[[nodiscard]] inline super_page_layout checked_layout(const super_page_options& options) {
  const auto refuse = [&](const std::string& why) { throw length_error(options.name + ": " + why); };
  const auto n = [](std::uint64_t value) { return std::to_string(value); };
  if (options.block_bytes.empty() || options.block_bytes.size() > max_layer_groups) {
    refuse(n(options.block_bytes.size()) + " groups; use 1 to " + n(max_layer_groups));
  }
  super_page_layout layout{.page_bytes = options.page_bytes, .shift = 0, .unit = options.page_bytes};
  std::uint64_t most = 1;
  for (std::size_t g = 0; g < options.block_bytes.size(); ++g) {
    const std::uint64_t bytes = options.block_bytes[g];
    if (bytes == 0 || bytes > options.page_bytes) {
      refuse("blocks of " + n(bytes) + " bytes in group " + n(g) + "; use 1 to the bytes of a page, " +
             n(options.page_bytes));
    }
    const std::uint64_t blocks = options.page_bytes / bytes;
    if (blocks > max_page_blocks) {
      refuse(n(blocks) + " blocks of group " + n(g) + " in a page, more than the limit of " +
             n(max_page_blocks) + "; use smaller pages");
    }
    most = blocks > most ? blocks : most;
    layout.unit = std::gcd(layout.unit, bytes);
  }
  layout.shift = static_cast<std::uint32_t>(std::bit_width(most - 1));
  if (options.budget_bytes / options.page_bytes < 2) {
    refuse("a budget of " + n(options.budget_bytes) +
           " bytes is too small; the null page and one more take " +
           n(checked_multiply(2, options.page_bytes, "super_page_pool: two pages")));
  }
  if (options.budget_capacity_bytes != 0 && options.budget_capacity_bytes < options.budget_bytes) {
    refuse("budget_capacity_bytes, the most that resize may set, is " + n(options.budget_capacity_bytes) +
           ", less than the budget of " + n(options.budget_bytes) + " bytes");
  }
  const std::uint64_t pages = budget_capacity(options) / options.page_bytes;
  if (pages > (max_blocks + 1) >> layout.shift) {
    refuse(n(pages) + " pages of up to " + n(most) + " blocks are too many; block ids of 31 bits can name " +
           n((max_blocks + 1) >> layout.shift) + " such pages: use larger blocks");
  }
  if (pages * (options.page_bytes / layout.unit) > max_blocks + 1) {
    refuse("offsets in units of " + n(layout.unit) +
           " bytes, the largest common divisor of pages and blocks, take " +
           n(pages * (options.page_bytes / layout.unit)) +
           " values, but int32 has 2147483647: choose sizes with a larger common divisor");
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
      budget_capacity_bytes_(detail::budget_capacity(options)),
      group_count_(options.block_bytes.size()),
      layout_(detail::checked_layout(options)),
      pages_(budget_capacity_bytes_ / options.page_bytes, page_record{}, options.metadata,
             "super_page_pool: pages"),
      records_(pages_.size() << layout_.shift, block_record{}, options.metadata, "super_page_pool: records"),
      since_(records_.size(), options.metadata, "super_page_pool: times"),
      idle_(records_.size(), pages_.size(), options.metadata, "super_page_pool: idle blocks"),
      free_pages_(pages_.size(), options.metadata, "super_page_pool: free pages"),
      open_(pages_.size(), group_count_ * fill_levels, options.metadata, "super_page_pool: open pages"),
      emptiable_(pages_.size(), idle_levels, options.metadata, "super_page_pool: emptiable pages"),
      mixed_(pages_.size(), group_count_ * fill_levels, options.metadata, "super_page_pool: mixed pages") {
  last_page_ = options.budget_bytes / options.page_bytes - 1;
  for (std::size_t g = 0; g < group_count_; ++g) {
    groups_[g].block_bytes = options.block_bytes[g];
    groups_[g].page_blocks = layout_.page_bytes / options.block_bytes[g];
    groups_[g].per_page = divider(static_cast<std::uint32_t>(groups_[g].page_blocks));
    evictions_by_group_[g].emplace(
        make(slot_count{pages_.size() * groups_[g].page_blocks}, options.metadata));
  }
  // A new pool assigns pages 1, 2, 3... in order.
  for (std::uint64_t page = last_page_; page > 0; --page)
    free_page(static_cast<std::uint32_t>(page));
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
  const std::uint32_t at = to_index(block);
  // Success builds no refusal, because a refusal copies the pool's name, and every hit revives an idle block.
  const bool is_ours = at != 0 && at < records_.size();
  if (!is_ours || !(records_[at].is_active() || records_[at].is_idle())) return check(block);
  block_record& record = records_[at];
  const bool is_idle = record.is_idle();
  if (record.references() == block_record::max_references) {
    return refusal(errc::too_many_shares, at, 1, record.references());
  }
  if (!is_idle) {
    record.add_reference(paging::transition::shared);
    return {};
  }
  const auto page = static_cast<std::uint32_t>(layout_.page_of(block));
  const std::size_t group = pages_[page].group;
  evictions_by_group_[group]->pin(slot(block, groups_[group]));
  idle_.remove(page, to_index(block));
  record.add_reference(paging::transition::revived);
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
    record.note(paging::transition::idled);
    evictions_by_group_[group]->unpin(slot(block, groups_[group]));
    since_[to_index(block)] = pages_[page].last_idle = ++clock_;
    idle_.push_back(page, to_index(block));
    change(page, [](page_record& each) noexcept {
      --each.active;
      ++each.idle;
    });
  } else {
    free_block(block, paging::transition::freed);
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
  record.give_up(paging::transition::uncached);
  if (!idle) return;
  const auto page = static_cast<std::uint32_t>(layout_.page_of(block));
  idle_.remove(page, to_index(block));
  free_block(block, paging::transition::uncached);
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
  const places at = places_of(page);
  unlist(page, at);
  list(page, at);
}

// The whole pool

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
                       .pages = last_page_,
                       .retiring_pages = retiring_,
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

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/super_pages_allocation.hpp>
#include <llmmem/paging/detail/super_pages_audit.hpp>
#include <llmmem/paging/detail/super_pages_lists.hpp>
#include <llmmem/paging/detail/super_pages_resize.hpp>
