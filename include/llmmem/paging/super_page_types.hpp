/// @file
/// What a `super_page_pool` is built from and tells, and which size of page wastes least.
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

/// How a `super_page_pool` is built.
struct super_page_options {
  std::uint64_t budget_bytes = 0;                     ///< of all pages, the null page among them
  std::uint64_t page_bytes = std::uint64_t{2} << 20;  ///< of a super-page
  std::span<const std::uint64_t> block_bytes{};       ///< of each group, 1 to `max_layer_groups` of them
  std::string name = "super_page_pool";               ///< what error texts call it
  metadata_source metadata{};                         ///< where its tables come from
};

/// Where blocks lie: what kernels and copies compute addresses with. A plain value.
struct super_page_layout {
  std::uint64_t page_bytes = 0;
  std::uint32_t shift = 0;  ///< low bits of a block id that say which block of its page it is
  std::uint64_t unit = 0;   ///< the greatest common divisor of the page's bytes and all groups' block bytes

  [[nodiscard]] LLMMEM_HD constexpr std::uint64_t page_of(block_id block) const noexcept {
    return static_cast<std::uint32_t>(block) >> shift;
  }
  [[nodiscard]] LLMMEM_HD constexpr std::uint64_t index_of(block_id block) const noexcept {
    return static_cast<std::uint32_t>(block) & ((std::uint32_t{1} << shift) - 1);
  }
  /// The block's first byte behind the pool's first, for a group with blocks of `block_bytes`.
  [[nodiscard]] LLMMEM_HD constexpr std::uint64_t offset(block_id block,
                                                         std::uint64_t block_bytes) const noexcept {
    return page_of(block) * page_bytes + index_of(block) * block_bytes;
  }
  /// The same in units: what tables for kernels hold.
  [[nodiscard]] LLMMEM_HD constexpr std::uint32_t unit_index(block_id block,
                                                             std::uint64_t block_bytes) const noexcept {
    return static_cast<std::uint32_t>(offset(block, block_bytes) / unit);
  }
};

/// Blocks that one group gets out of an allocation for several.
struct group_blocks {
  std::size_t group = 0;
  std::span<block_id> out{};
};

/// How many blocks one group asks for, could have, and how many pages that takes.
struct group_shortage {
  std::uint64_t wanted = 0;     ///< blocks
  std::uint64_t available = 0;  ///< blocks it could have, after the groups before it got theirs
  std::uint64_t pages = 0;      ///< pages it needs beyond those it cannot lose

  [[nodiscard]] constexpr std::uint64_t lacking() const noexcept {
    return wanted > available ? wanted - available : 0;
  }
};

/// What a group's pages hold now, in bytes and blocks. `pages * page_bytes` is the sum of the four byte
/// counts.
struct super_page_group_stats {
  std::uint64_t block_bytes = 0;
  std::uint64_t page_blocks = 0;      ///< blocks of a page
  std::uint64_t page_tail_bytes = 0;  ///< of a page, behind its last block
  std::uint64_t pages = 0;            ///< assigned to the group
  std::uint64_t active_blocks = 0;
  std::uint64_t idle_blocks = 0;
  std::uint64_t free_blocks = 0;  ///< of its pages
  std::uint64_t active_bytes = 0;
  std::uint64_t idle_bytes = 0;
  std::uint64_t free_bytes = 0;     ///< internal waste: of its pages, no other group can use them
  std::uint64_t padding_bytes = 0;  ///< page tails
};

/// A `super_page_pool` now, and since its construction.
struct super_page_stats {
  std::uint64_t budget_bytes = 0;
  std::uint64_t remainder_bytes = 0;  ///< of the budget, less than a page
  std::uint64_t null_bytes = 0;       ///< the null page
  std::uint64_t pages = 0;            ///< usable
  std::uint64_t free_pages = 0;       ///< of no group
  std::uint64_t emptiable_pages = 0;  ///< nothing active in them: free once their idle blocks are evicted
  std::uint64_t active_bytes = 0;     ///< of all groups, as in `super_page_group_stats`
  std::uint64_t idle_bytes = 0;
  std::uint64_t free_bytes = 0;
  std::uint64_t padding_bytes = 0;
  std::uint64_t allocations = 0;     ///< blocks handed out
  std::uint64_t evictions = 0;       ///< idle blocks whose contents were given up
  std::uint64_t pages_assigned = 0;  ///< given to a group
  std::uint64_t pages_emptied = 0;   ///< by evicting all they kept, for another page to be had
  std::size_t metadata_bytes = 0;
};

/// What a page size would waste.
struct page_choice {
  std::uint64_t page_bytes = 0;
  std::uint64_t worst_tail = 0;  ///< bytes lost of a page, in the group where that is most

  friend constexpr bool operator==(const page_choice&, const page_choice&) noexcept = default;
};

/// The multiple of `step` from `least` to `most` at which the group that loses most loses the smallest share
/// of a page behind its last block; the smallest of those. O(most / step x groups).
///
/// @throws length_error  when there is none, or a block is larger than `most`.
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
