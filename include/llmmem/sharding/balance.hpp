/// @file
/// Picks which rank writes each replicated item, so that all ranks write about equally many bytes.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/sharding/ids.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Assigns each item, undivided, to one rank: the largest first, each to the rank that writes least so far
/// (LPT; Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969).
///
/// If nothing else is written, the rank with the most has at most 4/3 - 1/(3 world) times what the best
/// assignment would give it. If the rank with the most received an item, it exceeds the rank with the least
/// by at most that item. So while no item is above a tenth of the least rank's total, the two are within a
/// factor of 1.1. If an item is larger, use `cut_writes`.
///
/// @param item_bytes  of each replicated item.
/// @param already     bytes that each rank already writes: one entry per rank, so that its size is the world.
///                    @returns the rank of each item. Equal inputs give equal answers: ties go to the lower
///                    item and rank.
/// @par Complexity   O(items x log items + items x log world).
/// @throws argument_error  when `already` is empty; length_error when the bytes together pass 2^63 - 1.
[[nodiscard]] std::vector<rank_id> assign_writers(std::span<const std::uint64_t> item_bytes,
                                                  std::span<const std::uint64_t> already);

namespace sharding {

/// An item that may be cut between elements.
struct cuttable_item {
  std::uint64_t elements = 0;
  std::uint32_t element_bytes = 1;
};

/// Elements `first` to `first + count - 1` of an item, written by `rank`.
struct write_share {
  std::uint32_t item = 0;
  rank_id rank{};
  std::uint64_t first = 0;
  std::uint64_t count = 0;

  friend constexpr bool operator==(const write_share&, const write_share&) noexcept = default;
};

}  // namespace sharding

using cuttable_item [[deprecated("its name is sharding::cuttable_item")]] = sharding::cuttable_item;
using write_share [[deprecated("its name is sharding::write_share")]] = sharding::write_share;

/// Cuts the items, laid end to end, into one range per rank, so that all ranks write the same amount. There
/// are fewer cuts than ranks, and each rank writes one contiguous range; the cuts are rounded to the next
/// multiple of `alignment` elements of their item, or to its end.
///
/// With `a` = `alignment` x the largest `element_bytes`, and `level` = all bytes, `already` included, divided
/// by the world: if no rank already writes more than `level`, and `level` is 32 `a` or more, no rank writes
/// more than 1.1 times as much as another. (Two cuts are each at most a / 2 off, so that a rank is at most a
/// + 1 off the level.) A rank that already writes more than `level` gets nothing, and the others become even.
///
/// @param alignment  in elements, at least 1: those of a file system block, so that two ranks never share a
///                   block.
/// @param already    as for `assign_writers`. @returns shares that are not empty, sorted by item, then
///                   element; they cover each item once.
/// @par Complexity   O(items + world x log world).
/// @throws argument_error  when `already` is empty or `alignment` 0.
/// @throws length_error    when the bytes together pass 2^63 - 1, or items 2^32.
[[nodiscard]] std::vector<sharding::write_share> cut_writes(std::span<const sharding::cuttable_item> items,
                                                            std::span<const std::uint64_t> already,
                                                            std::uint64_t alignment = 1);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/sharding/detail/balance_body.hpp>
