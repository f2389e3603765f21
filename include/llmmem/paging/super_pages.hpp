/// @file
/// Blocks of several sizes from one budget, in super-pages that each hold blocks of one size at a time.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/divider.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/lru.hpp>
#include <llmmem/paging/block_pool.hpp>
#include <llmmem/paging/block_record.hpp>
#include <llmmem/paging/detail/page_lists.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/super_page_types.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A function that makes a policy with a given number of slots, for policies chosen at run time.
template <class F, class Eviction>
concept eviction_factory = requires(F& make, slot_count slots, const metadata_source& source) {
  { make(slots, source) } -> std::same_as<Eviction>;
};

/// Blocks of several sizes, one size per group, from pages of one size: nothing is padded to a common
/// multiple, and other groups use the pages that one group leaves.
///
/// A page belongs to at most one group. It then holds floor(page bytes / block bytes) of the group's blocks;
/// the rest of the page, less than a block, is unused meanwhile. The pool assigns a page when a group has no
/// free block, and takes it back when its last block is free. It makes pages free as follows:
///
///   - It takes a free block from the group's fullest page, by active blocks.
///   - While pages are scarce (fewer than one in 16 is free), a group that has idle blocks in pages with
///     active ones evicts these idle blocks before it takes a page, because no other group can use them: its
///     next victim if that is in one of these pages, otherwise the oldest idle block of its fullest page.
///   - When a page is needed, the pool empties one page as a whole: the page that loses the smallest share of
///     kept contents and, among equals, the page unused for longest. It evicts no other block for that.
///     (Evicting by age takes blocks from everywhere and frees no page: kvcached's benchmark bench_frag.) If
///     some contents of that page have been idle for less time than the asking group's own next victim, the
///     pool evicts that victim instead.
///
/// Blocks are active, idle or free as in `block_pool`. `Eviction` orders the idle blocks, with one instance
/// per group.
///
/// A running pool can be resized. Its usable pages are those below `physical_bytes()`. When a resize lowers
/// the budget, the pages above it that hold active blocks retire: their holders keep the blocks, but the pool
/// allocates nothing there, and nothing there becomes cached.
///
/// @par Ids   a `block_id` is page << shift | index, over all groups; page 0 is the null page, so block 0 is
///   the null block and kernels may read its address. Metadata is indexed by the id; hosts and kernels decode
///   it without a division. Tables for kernels hold units instead, see `super_page_layout`: address = base +
///   int64(entry) * unit for every group alike. A paged kernel computes exactly that if its stride between
///   blocks is set to `unit`, so kernels work without knowledge of pages.
///
/// @par Complexity   O(1) per block, plus the policy's cost, and O(groups) per page; `allocate` as a whole
///   adds O(groups). Metadata 20 bytes per block id (page blocks rounded up to a power of two), the policies'
///   and 56 per page. Nothing is allocated after construction.
/// @par Thread safety   one writer at a time; const calls may run concurrently.
/// @par Errors   the constructor throws `length_error` and `out_of_memory`; everything else is `noexcept`,
///   except `audit`.
template <eviction_policy Eviction = lru_eviction>
class super_page_pool {
 public:
  explicit super_page_pool(const super_page_options& options);
  /// Constructs a pool whose policies `make` returns, called once for each group.
  template <eviction_factory<Eviction> Make>
  super_page_pool(const super_page_options& options, Make&& make);

  /// Allocates all requested blocks with one reference each, or none.
  /// @param on_evict  called with each idle block whose contents are dropped, before its memory is used.
  /// @return `errc::out_of_group_blocks` for the first group that lacks blocks, see `shortage`.
  /// @pre each group occurs in `wanted` at most once.
  template <eviction_callback OnEvict = ignore_eviction>
  result<void> allocate(std::span<const group_blocks> wanted, OnEvict&& on_evict = {}) noexcept {
    return allocate(wanted, std::span<const std::uint64_t>(), on_evict);
  }

  /// Allocates only if `leave` blocks of each group remain available afterwards, all together; a refusal
  /// counts these blocks as needed. Empty: no minimum.
  template <eviction_callback OnEvict = ignore_eviction>
  result<void> allocate(std::span<const group_blocks> wanted, std::span<const std::uint64_t> leave,
                        OnEvict&& on_evict = {}) noexcept;

  /// Allocates blocks of one group.
  template <eviction_callback OnEvict = ignore_eviction>
  result<void> allocate(std::size_t group, std::span<block_id> out, OnEvict&& on_evict = {}) noexcept {
    const group_blocks wanted{group, out};
    return allocate(std::span<const group_blocks>(&wanted, 1), on_evict);
  }

  /// Adds a reference to an active or idle block.
  result<void> share(block_id block) noexcept;

  /// Drops a reference from an active block. After the last one it is idle if it is cached, otherwise free.
  result<void> release(block_id block) noexcept;

  /// Declares that an active block's contents are worth keeping after its last release. @pre active, not
  /// cached.
  void mark_cached(block_id block, const access_hint& hint = {}) noexcept;

  /// Undoes `mark_cached`: an idle block becomes free at once. Has no effect on a block that is not cached.
  void unmark_cached(block_id block) noexcept;

  /// Declares that an active block's contents are wrong: `record(block).is_invalid()` until the block is
  /// allocated again. @pre active, not cached.
  void invalidate(block_id block) noexcept { records_[to_index(block)].invalidate(); }

  /// Reports an access to a cached block to the policy.
  void touch(block_id block, const access_hint& hint = {}) noexcept;

  /// Passes on what the caller knows of a cached block's future to its group's policy, see `eviction_policy`.
  void expect(block_id block, std::uint64_t next_use) noexcept {
    const std::size_t group = group_of(block);
    detail::expect(*evictions_by_group_[group], slot(block, groups_[group]), next_use);
  }
  void retain(block_id block, retention keep) noexcept {
    const std::size_t group = group_of(block);
    detail::retain(*evictions_by_group_[group], slot(block, groups_[group]), keep);
  }
  void advance(std::uint64_t now) noexcept {
    for (std::size_t g = 0; g < group_count_; ++g)
      detail::advance(*evictions_by_group_[g], now);
  }

  /// Drops the contents of `pages` pages, the cheapest first, so that they become free; returns how many.
  template <eviction_callback OnEvict = ignore_eviction>
  std::uint64_t reclaim_pages(std::uint64_t pages, OnEvict&& on_evict = {}) noexcept;

  /// Drops the idle block of `group` that its policy names; returns whether there was one.
  template <eviction_callback OnEvict = ignore_eviction>
  bool evict_one(std::size_t group, OnEvict&& on_evict = {}) noexcept;

  /// Sets the budget to `budget_bytes`, from two pages to the capacity. Growing takes effect at once; the
  /// backing memory must exist. Shrinking drops the contents of all blocks above the budget, idle or active,
  /// and retires the pages there with active blocks.
  /// @return the number of pages that are retiring: at 0, the memory from `physical_bytes()` on may be
  ///   reclaimed. `errc::bad_budget` for less than two pages or more than the capacity.
  /// @par Complexity   O(pages) plus O(blocks) of the pages that retire.
  template <eviction_callback OnEvict = ignore_eviction>
  result<std::uint64_t> resize(std::uint64_t budget_bytes, OnEvict&& on_evict = {}) noexcept;

  /// Moves an active block of a retiring page, with its references, to a usable page.
  /// @return its new place; the null block if no block of its group is available.
  /// @pre `is_retiring(block)`.
  template <eviction_callback OnEvict = ignore_eviction>
  block_id evacuate(block_id block, OnEvict&& on_evict = {}) noexcept;

  /// Computes whether all groups together can get the blocks they ask for, and what each lacks.
  /// @param wanted  blocks for each group; `out` has the same length.
  /// @return whether nothing is lacking.
  /// @par Complexity   O(groups).
  bool shortage(std::span<const std::uint64_t> wanted, std::span<group_shortage> out) const noexcept;

  /// Returns the number of blocks that `group` alone could get now.
  [[nodiscard]] std::uint64_t available(std::size_t group) const noexcept {
    return groups_[group].spare + open_pages() * groups_[group].page_blocks;
  }

  /// Checks that `block` is a block of this pool, active or idle.
  [[nodiscard]] result<void> check(block_id block) const noexcept;

  [[nodiscard]] std::size_t groups() const noexcept { return group_count_; }
  [[nodiscard]] const super_page_layout& layout() const noexcept { return layout_; }
  [[nodiscard]] std::uint64_t block_bytes(std::size_t group) const noexcept {
    return groups_[group].block_bytes;
  }
  /// Returns the group of an active or idle block.
  [[nodiscard]] std::size_t group_of(block_id block) const noexcept {
    return pages_[static_cast<std::size_t>(layout_.page_of(block))].group;
  }
  /// Returns the offset of an active or idle block from the pool's first byte; for the null block, that of
  /// the null page.
  [[nodiscard]] std::uint64_t offset(block_id block) const noexcept {
    return block == null_block ? 0 : layout_.offset(block, groups_[group_of(block)].block_bytes);
  }
  /// Returns the entry in a kernel's table for an active or idle block, or for the null block.
  [[nodiscard]] std::int32_t unit_index(block_id block) const noexcept {
    return static_cast<std::int32_t>(offset(block) / layout_.unit);
  }
  [[nodiscard]] const block_record& record(block_id block) const noexcept {
    return records_[to_index(block)];
  }
  /// All ids are below this number.
  [[nodiscard]] std::uint64_t block_ids() const noexcept { return records_.size(); }
  /// Bytes that the backing memory must have, apart from retiring pages.
  [[nodiscard]] std::uint64_t physical_bytes() const noexcept {
    return (last_page_ + 1) * layout_.page_bytes;
  }
  /// The value of `physical_bytes()` at the largest budget that `resize` may set.
  [[nodiscard]] std::uint64_t max_physical_bytes() const noexcept {
    return pages_.size() * layout_.page_bytes;
  }
  /// Pages above the budget that still hold active blocks.
  [[nodiscard]] std::uint64_t retiring_pages() const noexcept { return retiring_; }
  [[nodiscard]] bool is_retiring(block_id block) const noexcept {
    return layout_.page_of(block) > last_page_;
  }
  [[nodiscard]] std::uint64_t free_pages() const noexcept { return free_page_count_; }
  [[nodiscard]] const std::string& name() const noexcept LLMMEM_LIFETIMEBOUND { return name_; }

  [[nodiscard]] super_page_group_stats stats(std::size_t group) const noexcept;
  [[nodiscard]] super_page_stats stats() const noexcept;

  /// Calls `visit(std::uint64_t)` with what decides which blocks the pool hands out next, except the state of
  /// the eviction policies: free pages in their order, each page's group and free blocks, and the order of
  /// the pages and of idle blocks in their lists. Equal for pools made by the same operations. O(block ids).
  template <class Visit>
  void visit_order(Visit&& visit) const noexcept;

  /// Proves the pool's invariants: each page is free or counted with its group; each of its blocks is active,
  /// idle or free, as the page counts them; the page is in the lists it belongs to; and every byte of the
  /// budget is accounted for. Returns one sentence for each violation. O(block ids); allocates.
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  friend struct testing_access;

  static constexpr std::uint16_t no_group = 0xFFFF;
  static constexpr std::size_t fill_levels = 64;     // of a group's pages with free blocks
  static constexpr std::uint64_t scarce_share = 16;  // scarce: fewer than one page in this many is free
  static constexpr std::size_t idle_levels = 8;      // of pages without active blocks, over all groups

  struct page_record {
    std::uint16_t group = no_group;
    std::uint16_t active = 0;
    std::uint16_t idle = 0;
    std::uint16_t touched = 0;  // blocks from here on were not used since the page was assigned
    std::uint32_t free_block = detail::no_index;  // index in the page; links the previously used free blocks
    std::uint32_t last_idle = 0;                  // when a block in it last became idle
  };
  struct group_record {
    std::uint64_t block_bytes = 0;
    std::uint64_t page_blocks = 0;
    divider per_page{};  // by `page_blocks`
    std::uint64_t pages = 0;
    std::uint64_t active = 0;
    std::uint64_t idle = 0;
    std::uint64_t spare = 0;   // free and idle blocks of pages that hold an active one
    std::uint64_t open = 0;    // bit i: the group's i-th list of pages with free blocks is not empty
    std::uint64_t mixed = 0;   // the same for pages with active and idle ones
    std::uint64_t wanted = 0;  // blocks that the allocation in progress has not handed out yet
  };
  /// The lists that a page is in; -1: none. One word, because three would be returned through memory, written
  /// apart and read together, for which a processor waits longer than for the rest of a change.
  class places {
   public:
    [[nodiscard]] std::int32_t open() const noexcept { return at(0); }
    [[nodiscard]] std::int32_t emptiable() const noexcept { return at(16); }
    [[nodiscard]] std::int32_t mixed() const noexcept { return at(32); }
    void set_open(std::uint64_t list) noexcept { lists_ |= list + 1; }
    void set_emptiable(std::uint64_t list) noexcept { lists_ |= (list + 1) << 16U; }
    void set_mixed(std::uint64_t list) noexcept { lists_ |= (list + 1) << 32U; }
    friend constexpr bool operator==(const places&, const places&) = default;

   private:
    static_assert(max_layer_groups * fill_levels < 0xFFFF);
    [[nodiscard]] std::int32_t at(std::uint32_t bit) const noexcept {
      return static_cast<std::int32_t>(lists_ >> bit & 0xFFFFU) - 1;
    }
    std::uint64_t lists_ = 0;  // the number of each list plus one, in 16 bits
  };

  class auditor;

  [[nodiscard]] LLMMEM_COLD failure refusal(error_code code, std::uint32_t index, std::uint64_t wanted,
                                            std::uint64_t found) const noexcept {
    return {code, index, wanted, found, name_.c_str()};
  }
  [[nodiscard]] std::uint64_t open_pages() const noexcept { return free_page_count_ + emptiable_count_; }
  [[nodiscard]] slot_id slot(block_id block, const group_record& group) const noexcept {
    return slot_id{
        static_cast<std::uint32_t>(layout_.page_of(block) * group.page_blocks + layout_.index_of(block))};
  }
  [[nodiscard]] block_id block_at(std::uint64_t page, std::uint64_t index) const noexcept {
    return block_id{static_cast<std::uint32_t>(page << layout_.shift | index)};
  }
  [[nodiscard]] block_id block_of(slot_id slot, const group_record& group) const noexcept {
    return block_at(group.per_page.quotient(to_index(slot)), group.per_page.remainder(to_index(slot)));
  }
  [[nodiscard]] bool is_older(std::uint32_t a, std::uint32_t b) const noexcept {
    return clock_ - a > clock_ - b;
  }
  [[nodiscard]] places places_of(std::uint32_t page) const noexcept;
  [[nodiscard]] std::uint64_t spare_of(std::uint32_t page) const noexcept;
  void free_page(std::uint32_t page) noexcept;
  template <class OnEvict>
  void retire(std::uint32_t page, OnEvict& on_evict) noexcept;
  template <class Change>
  void change(std::uint32_t page, Change&& how) noexcept;
  void list(std::uint32_t page, const places& to) noexcept;
  void unlist(std::uint32_t page, const places& from) noexcept;
  std::uint32_t assign_page(std::uint16_t group) noexcept;
  [[nodiscard]] bool may_open(std::size_t group) const noexcept;
  template <class OnEvict>
  block_id take(std::uint16_t group, OnEvict& on_evict) noexcept;
  block_id take_free(std::uint32_t page) noexcept;
  template <class OnEvict>
  void evict(block_id block, OnEvict& on_evict) noexcept;
  template <class OnEvict>
  void empty_page(std::uint32_t page, OnEvict& on_evict) noexcept;
  [[nodiscard]] std::uint32_t cheapest_page() const noexcept;
  [[nodiscard]] std::uint32_t page_older_than(std::uint32_t time) const noexcept;
  void free_block(block_id block, paging::transition why) noexcept;

  std::string name_;
  std::uint64_t budget_bytes_;
  std::uint64_t budget_capacity_bytes_;
  std::size_t group_count_;
  super_page_layout layout_;
  std::array<group_record, max_layer_groups> groups_{};
  detail::fixed_array<page_record> pages_;
  detail::fixed_array<block_record> records_;  // by block id
  detail::fixed_array<std::uint32_t> since_;   // by block id: when it became idle; for a free block, the next
                                               // free one
  detail::page_lists idle_;                    // the idle blocks of each page, the oldest first
  detail::fixed_array<std::uint32_t> free_pages_;  // a stack
  std::uint64_t free_page_count_ = 0;
  std::uint64_t last_page_ = 0;  // the last usable one; those above it retire
  std::uint64_t retiring_ = 0;
  detail::page_lists open_;       // pages with a free block, by group and share of active blocks
  detail::page_lists emptiable_;  // pages without an active block, by share of idle ones
  detail::page_lists mixed_;      // pages with active and idle blocks, by group and share of active ones
  std::uint64_t emptiable_count_ = 0;
  std::uint32_t clock_ = 0;
  std::uint64_t allocations_ = 0;
  std::uint64_t evictions_ = 0;
  std::uint64_t pages_assigned_ = 0;
  std::uint64_t pages_emptied_ = 0;
  std::array<std::optional<Eviction>, max_layer_groups> evictions_by_group_{};
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/super_pages_body.hpp>
