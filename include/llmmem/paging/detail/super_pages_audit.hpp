/// @file
/// Bodies of super_pages.hpp: the proof of its invariants. Only super_pages_body.hpp includes it.
#pragma once

#include <llmmem/paging/super_pages.hpp>

#include <array>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Walks a pool once, recounts it, and collects the differences.
template <eviction_policy Eviction>
class super_page_pool<Eviction>::auditor {
 public:
  explicit auditor(const super_page_pool& pool)
      : pool_(&pool), in_lists_(pool.pages_.size()), is_free_(pool.pages_.size()) {}

  std::vector<std::string> run() && {
    if (audit_free_pages()) {
      for (std::uint32_t page = 0; page < pool_->pages_.size(); ++page)
        audit_page(page);
      audit_emptiable();
      audit_retiring();
      for (std::size_t group = 0; group < pool_->group_count_; ++group)
        audit_group(group);
      for (std::size_t page = 0; page < in_lists_.size(); ++page) {
        if (in_lists_[page] != 0) blame(named(page) + " is missing from a list");
      }
      audit_bytes();
    }
    return std::move(found_);
  }

 private:
  /// The totals of the blocks of a page.
  struct page_count {
    std::uint64_t active = 0;
    std::uint64_t idle = 0;
  };

  void blame(const std::string& what) { found_.push_back(pool_->name_ + ": " + what); }
  [[nodiscard]] static std::string named(std::uint64_t page) { return "page " + std::to_string(page); }
  [[nodiscard]] const block_record& record(std::uint32_t page, std::uint64_t index) const noexcept {
    return pool_->record(pool_->block_at(page, index));
  }
  [[nodiscard]] std::uint64_t page_ids() const noexcept { return std::uint64_t{1} << pool_->layout_.shift; }

  /// Checks the free pages first, because the checks of other pages use them.
  bool audit_free_pages() {
    for (std::uint64_t i = 0; i < pool_->free_page_count_; ++i) {
      const std::uint32_t page = pool_->free_pages_[i];
      if (page == 0 || page > pool_->last_page_ || is_free_[page] || pool_->pages_[page].group != no_group) {
        blame("the free pages name " + named(page) + ", which is assigned, named twice or does not exist");
        return false;
      }
      is_free_[page] = true;
    }
    return true;
  }

  /// Checks one page: its blocks, its lists of them, and its contribution to its group.
  void audit_page(std::uint32_t page) {
    const page_record& record = pool_->pages_[page];
    const page_count has = audit_blocks(page);
    if (has.active != record.active || has.idle != record.idle) {
      blame(named(page) + " counts " + std::to_string(record.active) + " active and " +
            std::to_string(record.idle) + " idle blocks, it has " + std::to_string(has.active) + " and " +
            std::to_string(has.idle));
    }
    const bool lists_idle = audit_idle_list(page, has.idle);
    if (record.group == no_group) {
      if (!is_free_[page] && page != 0 && page <= pool_->last_page_) blame(named(page) + " is leaked");
      return;
    }
    if (lists_idle) audit_free_list(page, has);
    if (page > pool_->last_page_) ++retiring_;
    const places at = pool_->places_of(page);
    in_lists_[page] =
        (at.open() >= 0 ? 1U : 0U) + (at.emptiable() >= 0 ? 1U : 0U) + (at.mixed() >= 0 ? 1U : 0U);
    group_record& group = counted_[record.group];
    ++group.pages;
    group.active += record.active;
    group.idle += record.idle;
    group.spare += pool_->spare_of(page);
  }

  page_count audit_blocks(std::uint32_t page) {
    const page_record& of = pool_->pages_[page];
    const std::uint64_t blocks = of.group == no_group ? 0 : pool_->groups_[of.group].page_blocks;
    page_count has;
    for (std::uint64_t i = 0; i < page_ids(); ++i) {
      const block_record& each = record(page, i);
      has.active += each.is_active() ? 1U : 0U;
      has.idle += each.is_idle() ? 1U : 0U;
      if (i < blocks) {
        audit_block(pool_->block_at(page, i));
      } else if (each.is_active() || each.is_cached()) {
        accuse(pool_->block_at(page, i), "is in use where its page has no block");
      }
    }
    return has;
  }

  void audit_block(block_id block) {
    const page_record& page = pool_->pages_[static_cast<std::size_t>(pool_->layout_.page_of(block))];
    const block_record& record = pool_->record(block);
    const bool candidate =
        pool_->evictions_by_group_[page.group]->is_candidate(pool_->slot(block, pool_->groups_[page.group]));
    if (candidate != record.is_idle()) {
      accuse(block,
             candidate ? "is an eviction candidate but not idle" : "is idle but not an eviction candidate");
    }
    if (pool_->layout_.index_of(block) >= page.touched && (record.is_active() || record.is_cached())) {
      accuse(block, "was never handed out");
    }
    if (record.is_idle() && pool_->is_older(page.last_idle, pool_->since_[to_index(block)])) {
      accuse(block, "became idle later than its page records");
    }
  }

  void accuse(block_id block, const std::string& what) {
    blame("block " + std::to_string(to_index(block)) + " " + what +
          " (last: " + std::string(to_string(pool_->record(block).last())) + ")");
  }

  /// Whether each block that `page` lists as idle is its own and idle; reports a wrong number separately.
  bool audit_idle_list(std::uint32_t page, std::uint64_t idle) {
    std::uint64_t kept = 0;
    for (std::uint32_t i = pool_->idle_.front(page); i != detail::no_index && kept <= page_ids();
         i = pool_->idle_.next(i), ++kept) {
      if (pool_->layout_.page_of(block_id{i}) != page || !pool_->records_[i].is_idle()) {
        blame(named(page) + " lists block " + std::to_string(i) +
              " as idle, but it is not idle, or not its own");
        return false;
      }
    }
    if (kept != idle) {
      blame(named(page) + " lists " + std::to_string(kept) + " idle blocks, it has " + std::to_string(idle));
    }
    return true;
  }

  void audit_free_list(std::uint32_t page, const page_count& has) {
    const page_record& of = pool_->pages_[page];
    if (of.active == 0 && of.idle == 0) blame(named(page) + " is empty but not free");
    std::vector<bool> listed(page_ids());
    std::uint64_t free = 0;
    for (std::uint32_t i = of.free_block; i != detail::no_index;
         i = pool_->since_[to_index(pool_->block_at(page, i))]) {
      const block_record* each = i < of.touched ? &record(page, i) : nullptr;
      if (each == nullptr || listed[i] || each->is_active() || each->is_cached()) {
        blame(named(page) + " lists block " + std::to_string(i) +
              " as free, but it is in use, listed twice or does not exist");
        return;
      }
      listed[i] = true;
      ++free;
    }
    if (free + has.active + has.idle != of.touched) {
      blame(named(page) + " has handed out " + std::to_string(of.touched) + " blocks, but accounts for " +
            std::to_string(free + has.active + has.idle));
    }
  }

  /// Follows one list of pages and marks them as found; returns its length, up to the first wrong page.
  template <class Belongs>
  std::uint64_t walk(const detail::page_lists& lists, std::size_t which, Belongs&& belongs) {
    std::uint64_t length = 0;
    for (std::uint32_t page = lists.front(which); page != detail::no_index && length <= pool_->pages_.size();
         page = lists.next(page), ++length) {
      if (in_lists_[page] == 0 || !belongs(pool_->places_of(page))) {
        blame(named(page) + " is in a list it does not belong to");
        return length;
      }
      --in_lists_[page];
    }
    return length;
  }

  void audit_emptiable() {
    std::uint64_t emptiable = 0;
    for (std::size_t i = 0; i < idle_levels; ++i) {
      const auto which = static_cast<std::int32_t>(i);
      emptiable += walk(pool_->emptiable_, i, [&](const places& at) { return at.emptiable() == which; });
    }
    if (emptiable != pool_->emptiable_count_) {
      blame(std::to_string(emptiable) + " pages can be emptied, the count says " +
            std::to_string(pool_->emptiable_count_));
    }
  }

  void audit_retiring() {
    if (retiring_ != pool_->retiring_) {
      blame(std::to_string(retiring_) + " pages are retiring, the count says " +
            std::to_string(pool_->retiring_));
    }
  }

  void audit_group(std::size_t group) {
    const group_record& of = pool_->groups_[group];
    for (std::size_t level = 0; level < fill_levels; ++level) {
      const std::size_t at = group * fill_levels + level;
      const auto which = static_cast<std::int32_t>(at);
      const std::uint64_t open =
          walk(pool_->open_, at, [&](const places& of_page) { return of_page.open() == which; });
      const std::uint64_t mixed =
          walk(pool_->mixed_, at, [&](const places& of_page) { return of_page.mixed() == which; });
      if ((open != 0) != ((of.open >> level & 1U) != 0) || (mixed != 0) != ((of.mixed >> level & 1U) != 0)) {
        blame("group " + std::to_string(group) + " has " + std::to_string(open) + " open and " +
              std::to_string(mixed) + " mixed pages of fill level " + std::to_string(level) +
              ", but its masks differ");
      }
    }
    const group_record& now = counted_[group];
    if (of.wanted != 0) {
      blame("group " + std::to_string(group) + " wants " + std::to_string(of.wanted) +
            " blocks, but no allocation is in progress");
    }
    if (of.pages != now.pages || of.active != now.active || of.idle != now.idle || of.spare != now.spare) {
      blame("group " + std::to_string(group) + " counts " + std::to_string(of.pages) + " pages, " +
            std::to_string(of.active) + " active and " + std::to_string(of.idle) +
            " idle blocks, space for " + std::to_string(of.spare) + "; there are " +
            std::to_string(now.pages) + ", " + std::to_string(now.active) + ", " + std::to_string(now.idle) +
            ", " + std::to_string(now.spare));
    }
  }

  void audit_bytes() {
    const super_page_stats all = pool_->stats();
    const std::uint64_t bytes = all.remainder_bytes + all.null_bytes +
                                all.free_pages * pool_->layout_.page_bytes + all.active_bytes +
                                all.idle_bytes + all.free_bytes + all.padding_bytes;
    const std::uint64_t expected = pool_->budget_bytes_ + all.retiring_pages * pool_->layout_.page_bytes;
    if (bytes != expected) {
      blame("accounts for " + std::to_string(bytes) + " of " + std::to_string(expected) + " bytes");
    }
  }

  const super_page_pool* pool_;
  std::vector<std::string> found_;
  std::array<group_record, max_layer_groups> counted_{};
  std::vector<std::uint32_t> in_lists_;  // by page: the number of lists in which it is still missing
  std::vector<bool> is_free_;            // by page
  std::uint64_t retiring_ = 0;
};

template <eviction_policy Eviction>
std::vector<std::string> super_page_pool<Eviction>::audit() const {
  return auditor(*this).run();
}

}  // namespace v0
}  // namespace llmmem
