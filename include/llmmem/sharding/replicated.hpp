/// @file
/// `replicated`: every rank holds everything, and each writes its share of it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/detail/owner_table.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace sharding {

/// Every rank holds all of every tensor, as in data parallelism. Each element still has one owner, so that a
/// checkpoint holds it once: the bytes of all tensors, end to end, are cut evenly between the ranks
/// (`cut_writes`), at fewer places than there are ranks.
///
/// @par Complexity      `local` O(1), `owned` and `owner` O(log world).
/// @par Thread safety   as a plain value.
class replicated {
 public:
  /// @throws argument_error  when `world` is 0; length_error when the bytes together pass 2^63 - 1.
  replicated(std::span<const tensor_facts> tensors, rank_count world) : world_(world) {
    detail::check_world(world, tensors.size(), "replicated");
    std::vector<cuttable_item> items;
    items.reserve(tensors.size());
    shapes_.reserve(tensors.size());
    for (const tensor_facts& each : tensors) {
      shapes_.push_back(each.shape);
      items.push_back({each.shape.elements(), each.element_bytes});
    }
    owners_ = detail::owner_table(items, std::vector<std::uint64_t>(to_number(world), 0));
  }

  [[nodiscard]] rank_count world() const noexcept { return world_; }
  [[nodiscard]] std::uint32_t tensors() const noexcept { return static_cast<std::uint32_t>(shapes_.size()); }
  [[nodiscard]] tensor_shape shape(tensor_id tensor) const noexcept { return shapes_[to_index(tensor)]; }

  [[nodiscard]] element_runs local(tensor_id tensor, rank_id /*rank*/) const noexcept {
    return element_runs::all_of(shapes_[to_index(tensor)].elements());
  }
  [[nodiscard]] element_runs owned(tensor_id tensor, rank_id rank) const noexcept {
    return owners_.owned(tensor, rank);
  }
  [[nodiscard]] rank_id owner(tensor_id tensor, std::uint64_t element) const noexcept {
    return owners_.owner(tensor, element);
  }
  [[nodiscard]] bool is_replicated(tensor_id /*tensor*/) const noexcept { return true; }

 private:
  rank_count world_;
  std::vector<tensor_shape> shapes_;
  detail::owner_table owners_;
};

}  // namespace sharding

using replicated [[deprecated("its name is sharding::replicated")]] = sharding::replicated;

static_assert(partition<sharding::replicated>);

}  // namespace v0
}  // namespace llmmem
