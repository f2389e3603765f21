/// @file
/// The options, layout and statistics of a `super_page_pool`, and the choice of the page size that wastes
/// least.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/ids.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The most blocks that a super-page may hold.
inline constexpr std::uint64_t max_page_blocks = 32'768;

/// The construction parameters of a `super_page_pool`.
struct super_page_options {
  std::uint64_t budget_bytes = 0;                     ///< of all pages, including the null page
  std::uint64_t budget_capacity_bytes = 0;            ///< the most that `resize` may set; 0: `budget_bytes`
  std::uint64_t page_bytes = std::uint64_t{2} << 20;  ///< of a super-page
  std::span<const std::uint64_t> block_bytes{};       ///< of each group, 1 to `max_layer_groups` of them
  std::string name = "super_page_pool";               ///< the name in error texts
  metadata_source metadata{};                         ///< source of memory for its tables
};

/// The places of blocks, from which kernels and copies compute addresses. A plain value.
struct super_page_layout {
  std::uint64_t page_bytes = 0;
  std::uint32_t shift = 0;  ///< number of low bits of a block id that give its index in the page
  std::uint64_t unit = 0;   ///< the greatest common divisor of the page's bytes and all groups' block bytes

  [[nodiscard]] LLMMEM_HD constexpr std::uint64_t page_of(block_id block) const noexcept {
    return static_cast<std::uint32_t>(block) >> shift;
  }
  [[nodiscard]] LLMMEM_HD constexpr std::uint64_t index_of(block_id block) const noexcept {
    return static_cast<std::uint32_t>(block) & ((std::uint32_t{1} << shift) - 1);
  }
  /// Returns the distance of the block's first byte from the pool's first byte, for a group with blocks of
  /// `block_bytes`.
  [[nodiscard]] LLMMEM_HD constexpr std::uint64_t offset(block_id block,
                                                         std::uint64_t block_bytes) const noexcept {
    return page_of(block) * page_bytes + index_of(block) * block_bytes;
  }
  /// Returns the same distance in units: the entry in tables for kernels.
  [[nodiscard]] LLMMEM_HD constexpr std::uint32_t unit_index(block_id block,
                                                             std::uint64_t block_bytes) const noexcept {
    return static_cast<std::uint32_t>(offset(block, block_bytes) / unit);
  }
};

/// The blocks for one group in an allocation for several.
struct group_blocks {
  std::size_t group = 0;
  std::span<block_id> out{};
};

/// The blocks that one group asks for, the blocks available to it, and the pages that the request takes.
struct group_shortage {
  std::uint64_t wanted = 0;     ///< blocks
  std::uint64_t available = 0;  ///< blocks available to it, after the groups before it got their blocks
  std::uint64_t pages = 0;      ///< pages it needs in addition to its pages with active blocks

  [[nodiscard]] constexpr std::uint64_t missing() const noexcept {
    return wanted > available ? wanted - available : 0;
  }
  [[nodiscard, deprecated("call missing()")]] constexpr std::uint64_t lacking() const noexcept {
    return missing();
  }
};

/// The present contents of a group's pages, in bytes and blocks. `pages * page_bytes` is the sum of the four
/// byte counts.
struct super_page_group_stats {
  std::uint64_t block_bytes = 0;
  std::uint64_t page_blocks = 0;      ///< blocks per page
  std::uint64_t page_tail_bytes = 0;  ///< of a page, after its last block
  std::uint64_t pages = 0;            ///< assigned to the group
  std::uint64_t active_blocks = 0;
  std::uint64_t idle_blocks = 0;
  std::uint64_t free_blocks = 0;  ///< of its pages; those of retiring ones are not allocated again
  std::uint64_t active_bytes = 0;
  std::uint64_t idle_bytes = 0;
  std::uint64_t free_bytes = 0;     ///< internal waste: in its pages, unusable for other groups
  std::uint64_t padding_bytes = 0;  ///< page tails
};

/// The state of a `super_page_pool` now, and its counts since construction.
struct super_page_stats {
  std::uint64_t budget_bytes = 0;
  std::uint64_t remainder_bytes = 0;  ///< of the budget, less than a page
  std::uint64_t null_bytes = 0;       ///< the null page
  std::uint64_t pages = 0;            ///< usable
  std::uint64_t retiring_pages = 0;   ///< above these, with active blocks; their bytes are past the budget
  std::uint64_t free_pages = 0;       ///< of no group
  std::uint64_t emptiable_pages = 0;  ///< without active blocks: free once their idle blocks are evicted
  std::uint64_t active_bytes = 0;     ///< of all groups, as in `super_page_group_stats`
  std::uint64_t idle_bytes = 0;
  std::uint64_t free_bytes = 0;
  std::uint64_t padding_bytes = 0;
  std::uint64_t allocations = 0;     ///< blocks allocated
  std::uint64_t evictions = 0;       ///< idle blocks whose contents were dropped
  std::uint64_t pages_assigned = 0;  ///< given to a group
  std::uint64_t pages_emptied = 0;   ///< by evicting all their kept contents, to get a free page
  std::size_t metadata_bytes = 0;
};

/// The waste of a page size.
struct page_choice {
  std::uint64_t page_bytes = 0;
  std::uint64_t worst_tail = 0;  ///< bytes lost per page, in the group that loses most

  friend constexpr bool operator==(const page_choice&, const page_choice&) noexcept = default;
};

/// Returns the multiple of `step` from `least` to `most` with the least waste: the share of a page after its
/// last block, in the group that loses most; among equals, the smallest multiple. O(most / step x groups).
///
/// @throws length_error  when there is no such multiple, or a block is larger than `most`.
[[nodiscard]] constexpr page_choice choose_page_bytes(std::span<const std::uint64_t> block_bytes,
                                                      std::uint64_t least, std::uint64_t most,
                                                      std::uint64_t step) {
  page_choice best{};
  const std::uint64_t first = step == 0 || least == 0 ? 1 : (least - 1) / step + 1;
  const std::uint64_t last = step == 0 ? 0 : most / step;
  for (std::uint64_t left = first <= last ? last - first + 1 : 0; left != 0; --left) {
    const std::uint64_t page = (last - left + 1) * step;
    std::uint64_t worst = 0;
    bool fits = page != 0;
    for (const std::uint64_t bytes : block_bytes) {
      fits = fits && bytes != 0 && bytes <= page;
      if (fits && page % bytes > worst) worst = page % bytes;
    }
    const auto share = [](std::uint64_t tail, std::uint64_t of) {
      return static_cast<double>(tail) / static_cast<double>(of);
    };
    if (fits && (best.page_bytes == 0 || share(worst, page) < share(best.worst_tail, best.page_bytes)))
      best = {page, worst};
  }
  if (best.page_bytes == 0) {
    throw length_error("choose_page_bytes: no multiple of " + std::to_string(step) + " from " +
                       std::to_string(least) + " to " + std::to_string(most) +
                       " holds a block of every group");
  }
  return best;
}

}  // namespace v0
}  // namespace llmmem
