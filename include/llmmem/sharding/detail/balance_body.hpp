/// @file
/// The bodies of balance.hpp.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/balance.hpp>
#include <llmmem/sharding/ids.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline void check_ranks(std::span<const std::uint64_t> already, const char* name) {
  if (already.empty()) {
    throw argument_error(std::string(name) + ": `already` has no ranks; it has one number for each");
  }
  if (already.size() > 0xFFFF'FFFFU) {
    throw length_error(std::string(name) + ": " + std::to_string(already.size()) +
                       " ranks; ids are 32 bits wide");
  }
}

/// Returns the bytes to add to each rank, so that ranks that receive anything end up within one byte of each
/// other.
inline std::vector<std::uint64_t> fill_evenly(std::span<const std::uint64_t> already, std::uint64_t bytes) {
  std::vector<std::uint32_t> by_load(already.size());
  for (std::size_t i = 0; i < by_load.size(); ++i)
    by_load[i] = static_cast<std::uint32_t>(i);
  std::ranges::sort(by_load, [&](std::uint32_t a, std::uint32_t b) {
    return already[a] != already[b] ? already[a] < already[b] : a < b;
  });
  // The ranks below the water level: the fewest for which the next rank is not lower than the resulting
  // level.
  std::uint64_t sum = bytes;
  std::size_t wet = 0;
  while (wet < by_load.size() && (wet == 0 || already[by_load[wet]] < sum / wet)) {
    sum += already[by_load[wet]];
    ++wet;
  }
  std::vector<std::uint64_t> more(already.size(), 0);
  for (std::size_t i = 0; i < wet; ++i)
    more[by_load[i]] = sum / wet + (i < sum % wet ? 1U : 0U) - already[by_load[i]];
  return more;
}

/// Returns `bytes` into the item as a count of elements: the nearest multiple of `alignment`, or the item's
/// end.
inline std::uint64_t nearest_cut(const sharding::cuttable_item& item, std::uint64_t bytes,
                                 std::uint64_t alignment) {
  const std::uint64_t whole = bytes / item.element_bytes / alignment * alignment;
  const std::uint64_t next = item.elements - whole <= alignment ? item.elements : whole + alignment;
  const std::uint64_t past = bytes - whole * item.element_bytes;
  const std::uint64_t short_of = next * item.element_bytes - bytes;
  return past <= short_of ? whole : next;
}

}  // namespace detail

inline std::vector<rank_id> assign_writers(std::span<const std::uint64_t> item_bytes,
                                           std::span<const std::uint64_t> already) {
  detail::check_ranks(already, "assign_writers");
  std::uint64_t sum = 0;
  for (const std::uint64_t each : already)
    sum = checked_add(sum, each, "assign_writers: bytes");
  for (const std::uint64_t each : item_bytes)
    sum = checked_add(sum, each, "assign_writers: bytes");

  std::vector<std::size_t> by_size(item_bytes.size());
  for (std::size_t i = 0; i < by_size.size(); ++i)
    by_size[i] = i;
  std::ranges::sort(by_size, [&](std::size_t a, std::size_t b) {
    return item_bytes[a] != item_bytes[b] ? item_bytes[a] > item_bytes[b] : a < b;
  });

  struct load {
    std::uint64_t bytes = 0;
    std::uint32_t rank = 0;
  };
  const auto writes_more = [](const load& a, const load& b) {
    return a.bytes != b.bytes ? a.bytes > b.bytes : a.rank > b.rank;
  };
  std::vector<load> heap(already.size());  // the least loaded in front
  for (std::size_t i = 0; i < heap.size(); ++i)
    heap[i] = {already[i], static_cast<std::uint32_t>(i)};
  std::ranges::make_heap(heap, writes_more);

  std::vector<rank_id> writers(item_bytes.size());
  for (const std::size_t item : by_size) {
    std::ranges::pop_heap(heap, writes_more);
    writers[item] = rank_id{heap.back().rank};
    heap.back().bytes += item_bytes[item];
    std::ranges::push_heap(heap, writes_more);
  }
  return writers;
}

inline std::vector<sharding::write_share> cut_writes(std::span<const sharding::cuttable_item> items,
                                                     std::span<const std::uint64_t> already,
                                                     std::uint64_t alignment) {
  detail::check_ranks(already, "cut_writes");
  if (alignment == 0) throw argument_error("cut_writes: an alignment of 0 elements; 1 cuts anywhere");
  if (items.size() > 0xFFFF'FFFFU) {
    throw length_error("cut_writes: " + std::to_string(items.size()) + " items; their ids are 32 bits wide");
  }
  std::uint64_t bytes = 0;
  for (const sharding::cuttable_item& each : items) {
    const auto size = checked_multiply(each.elements, each.element_bytes, "cut_writes: elements x bytes");
    bytes = checked_add(bytes, size, "cut_writes: bytes");
  }
  std::uint64_t sum = bytes;
  for (const std::uint64_t each : already)
    sum = checked_add(sum, each, "cut_writes: bytes");

  const std::vector<std::uint64_t> more = detail::fill_evenly(already, bytes);
  std::vector<sharding::write_share> shares;
  std::uint64_t begins = 0;   // where the item begins, in bytes of all items laid end to end
  std::uint64_t covered = 0;  // bytes covered by the ranks before this one
  std::size_t rank = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const sharding::cuttable_item& item = items[i];
    const std::uint64_t ends = begins + item.elements * item.element_bytes;
    std::uint64_t first = 0;
    while (first < item.elements) {
      std::uint64_t until = item.elements;
      const std::uint64_t cut = covered + more[rank];
      const bool goes_on = rank + 1 == more.size() || cut >= ends || item.element_bytes == 0;
      // A cut may be before the item, when the previous cut was rounded up to the item's beginning.
      if (!goes_on) until = cut <= begins ? 0 : detail::nearest_cut(item, cut - begins, alignment);
      if (until > first) {
        shares.push_back(
            {static_cast<std::uint32_t>(i), rank_id{static_cast<std::uint32_t>(rank)}, first, until - first});
        first = until;
      }
      if (!goes_on) covered += more[rank++];
    }
    begins = ends;
  }
  return shares;
}

}  // namespace v0
}  // namespace llmmem
