/// @file
/// Which rank writes which range of replicated tensors: the shares of `cut_writes`, looked up by tensor.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/sharding/balance.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Shares by item, then element. A rank has at most one share of an item, because its range is contiguous.
class owner_table {
 public:
  owner_table() = default;

  owner_table(std::span<const sharding::cuttable_item> items, std::span<const std::uint64_t> already)
      : shares_(cut_writes(items, already)), begins_(items.size() + 1, 0) {
    if (items.empty()) return;  // no items have no shares; g++ at -O3 cannot deduce that, and warns
    for (const sharding::write_share& each : shares_)
      ++begins_[std::size_t{each.item} + 1];
    for (std::size_t i = 1; i < begins_.size(); ++i)
      begins_[i] += begins_[i - 1];
  }

  [[nodiscard]] element_runs owned(tensor_id tensor, rank_id rank) const noexcept {
    // Ranks take their ranges in ascending order, so the shares of one item ascend in rank, too.
    const std::span<const sharding::write_share> shares = shares_of(tensor);
    const auto found = std::ranges::lower_bound(shares, rank, {}, &sharding::write_share::rank);
    if (found == shares.end() || found->rank != rank) return {};
    return element_runs::flat_range(found->first, found->count);
  }

  [[nodiscard]] rank_id owner(tensor_id tensor, std::uint64_t element) const noexcept {
    const std::span<const sharding::write_share> shares = shares_of(tensor);
    const auto behind = std::ranges::upper_bound(shares, element, {}, &sharding::write_share::first);
    return (behind - 1)->rank;
  }

 private:
  [[nodiscard]] std::span<const sharding::write_share> shares_of(tensor_id tensor) const noexcept {
    const std::size_t begin = begins_[to_index(tensor)];
    return {shares_.data() + begin, begins_[std::size_t{to_index(tensor)} + 1] - begin};
  }

  std::vector<sharding::write_share> shares_;
  std::vector<std::size_t> begins_;  // of each item's shares, and the end of the last
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
