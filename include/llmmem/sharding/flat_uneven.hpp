/// @file
/// `flat_uneven`: all tensors end to end as one space, cut into a range for each rank. The split of ZeRO.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The elements of all tensors, in the order of their ids, are one flat space; each rank holds one contiguous
/// range of it. A rank holds a flat range of each tensor, often none, regardless of the shape.
///
/// Use it for optimizer state, gradients and weights that are gathered before they are used (ZeRO;
/// Rajbhandari et al. 2020, arXiv 1910.02054). Ranges need not be even: a rank may receive the range that it
/// has space for, and one may receive none.
///
/// @par Complexity      `local` and `owned` O(1), `owner` O(log world).
/// @par Thread safety   as a plain value.
class flat_uneven {
 public:
  /// Even ranges: sizes differ by at most one, the first ranks have the longer ones.
  /// @throws argument_error  when `world` is 0; length_error when the elements together pass 2^63 - 1.
  [[nodiscard]] static flat_uneven even(std::span<const tensor_facts> tensors, rank_count world) {
    detail::check_world(world, tensors.size(), "flat_uneven");
    std::vector<std::uint64_t> boundaries(std::size_t{to_number(world)} + 1, 0);
    std::uint64_t elements = 0;
    for (const tensor_facts& each : tensors)
      elements = checked_add(elements, each.shape.elements(), "flat_uneven: elements of all tensors");
    for (std::size_t rank = 0; rank + 1 < boundaries.size(); ++rank) {
      const index_range share = even_share(elements, rank, to_number(world));
      boundaries[rank + 1] = share.first + share.count;
    }
    return flat_uneven(tensors, boundaries);
  }

  /// @param boundaries  in elements of the flat space, one more than ranks: 0, then the end of each rank's
  ///                    range; the last is the number of all elements. Each is at least the one before; two
  ///                    equal ones make an empty range.
  /// @throws argument_error  for any other boundaries.
  /// @throws length_error    when the elements together pass 2^63 - 1, or there are 2^32 ranks.
  flat_uneven(std::span<const tensor_facts> tensors, std::span<const std::uint64_t> boundaries)
      : boundaries_(boundaries.begin(), boundaries.end()), offsets_(1, 0) {
    if (boundaries.size() > 0xFFFF'FFFFU) {
      throw length_error("flat_uneven: " + std::to_string(boundaries.size()) +
                         " boundaries; ranks are 32 bits wide");
    }
    detail::check_world(
        rank_count{static_cast<std::uint32_t>(boundaries.empty() ? 0 : boundaries.size() - 1)},
        tensors.size(), "flat_uneven");
    shapes_.reserve(tensors.size());
    offsets_.reserve(tensors.size() + 1);
    for (const tensor_facts& each : tensors) {
      shapes_.push_back(each.shape);
      offsets_.push_back(
          checked_add(offsets_.back(), each.shape.elements(), "flat_uneven: elements of all tensors"));
    }
    if (boundaries.front() != 0 || boundaries.back() != offsets_.back()) {
      throw argument_error("flat_uneven: boundaries go from " + std::to_string(boundaries.front()) + " to " +
                           std::to_string(boundaries.back()) + "; they must go from 0 to " +
                           std::to_string(offsets_.back()) + ", the elements of all tensors");
    }
    for (std::size_t i = 1; i < boundaries.size(); ++i) {
      if (boundaries[i] >= boundaries[i - 1]) continue;
      throw argument_error("flat_uneven: boundary " + std::to_string(i) + " is " +
                           std::to_string(boundaries[i]) + ", less than the one before it, " +
                           std::to_string(boundaries[i - 1]));
    }
  }

  [[nodiscard]] rank_count world() const noexcept {
    return rank_count{static_cast<std::uint32_t>(boundaries_.size() - 1)};
  }
  [[nodiscard]] std::uint32_t tensors() const noexcept { return static_cast<std::uint32_t>(shapes_.size()); }
  [[nodiscard]] tensor_shape shape(tensor_id tensor) const noexcept { return shapes_[to_index(tensor)]; }

  /// Returns the elements of the flat space that `rank` holds.
  [[nodiscard]] index_range range_of(rank_id rank) const noexcept {
    const std::uint64_t first = boundaries_[to_index(rank)];
    return {first, boundaries_[std::size_t{to_index(rank)} + 1] - first};
  }
  /// Returns where `tensor` begins in the flat space.
  [[nodiscard]] std::uint64_t offset_of(tensor_id tensor) const noexcept {
    return offsets_[to_index(tensor)];
  }

  [[nodiscard]] element_runs local(tensor_id tensor, rank_id rank) const noexcept {
    const std::uint64_t begins = offset_of(tensor);
    const index_range range = range_of(rank);
    const std::uint64_t first = std::max(begins, range.first);
    const std::uint64_t last =
        std::min(begins + shapes_[to_index(tensor)].elements(), range.first + range.count);
    if (first >= last) return {};
    return element_runs::flat_range(first - begins, last - first);
  }
  [[nodiscard]] element_runs owned(tensor_id tensor, rank_id rank) const noexcept {
    return local(tensor, rank);
  }
  [[nodiscard]] rank_id owner(tensor_id tensor, std::uint64_t element) const noexcept {
    // After all boundaries that are equal: ranks with an empty range own nothing.
    const auto behind = std::ranges::upper_bound(boundaries_, offset_of(tensor) + element);
    return rank_id{static_cast<std::uint32_t>(behind - boundaries_.begin() - 1)};
  }
  [[nodiscard]] bool is_replicated(tensor_id /*tensor*/) const noexcept {
    return boundaries_.size() == 2;  // a world of one
  }

 private:
  std::vector<tensor_shape> shapes_;
  std::vector<std::uint64_t> boundaries_;  // of ranks, world + 1
  std::vector<std::uint64_t> offsets_;     // of tensors, and the end of the last one
};

static_assert(partition<flat_uneven>);

}  // namespace v0
}  // namespace llmmem
