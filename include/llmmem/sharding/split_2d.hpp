/// @file
/// `split_2d`: each matrix cut into bands of rows or of columns, one per rank. The split of tensor
/// parallelism.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/detail/owner_table.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The axis along which a tensor is split. Rows and columns are those of the matrix **as it is stored**,
/// row-major.
enum class split_axis : std::uint8_t {
  none,     ///< every rank holds all of it
  rows,     ///< bands of rows; of a tensor of one dimension, ranges of its elements
  columns,  ///< bands of columns: strided in storage; for tensors of two dimensions or more
};

/// The two linear layers of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053).
enum class parallel_linear : std::uint8_t {
  column_parallel,  ///< Y = X A with A split by columns: each rank computes some of the outputs
  row_parallel,     ///< Y = X A with A split by rows: each rank sums over some of the inputs
};

/// Returns how a layer's tensor is split if its matrix is stored as [outputs, inputs], the transpose of the A
/// above, as PyTorch and Megatron-LM store it. The names therefore cross over:
///
///     layer             weight [outputs, inputs]   bias [outputs]
///     column_parallel   rows                       rows, like the outputs
///     row_parallel      columns                    none: it is added once, to the sum
///
/// For matrices stored as [inputs, outputs], give the axes yourself.
[[nodiscard]] constexpr split_axis axis_of(parallel_linear layer, const tensor_shape& shape) noexcept {
  if (shape.dimensions() == 0) return split_axis::none;
  if (layer == parallel_linear::column_parallel) return split_axis::rows;
  return shape.dimensions() == 1 ? split_axis::none : split_axis::columns;
}

/// Each tensor split by rows, by columns or not at all, over one group of ranks. Splits are uneven if sides
/// do not divide: the first ranks have one extra row or column, and with more ranks than rows the last ones
/// have none.
///
/// All ranks hold the tensors that are not split, and share their writes: the shares even out the bytes that
/// ranks write of split tensors.
///
/// @par Complexity      `local` O(1), `owned` and `owner` O(log world).
/// @par Thread safety   as a plain value.
class split_2d {
 public:
  /// @param axes  one for each tensor.
  /// @throws argument_error  when `world` is 0, the two lists differ in length, or a tensor of less than two
  ///                         dimensions would be split by columns.
  /// @throws length_error    when the bytes together pass 2^63 - 1.
  split_2d(std::span<const tensor_facts> tensors, std::span<const split_axis> axes, rank_count world)
      : world_(world), axes_(axes.begin(), axes.end()) {
    detail::check_world(world, tensors.size(), "split_2d");
    if (axes.size() != tensors.size()) {
      throw argument_error("split_2d: " + std::to_string(tensors.size()) + " tensors and " +
                           std::to_string(axes.size()) + " axes; each tensor has one");
    }
    shapes_.reserve(tensors.size());
    std::vector<sharding::cuttable_item> whole(
        tensors.size());  // empty if split: their owner is not looked up here
    std::vector<std::uint64_t> written(to_number(world), 0);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const tensor_facts& each = tensors[i];
      shapes_.push_back(each.shape);
      if (axes_[i] == split_axis::columns && each.shape.dimensions() < 2) {
        throw argument_error("split_2d: tensor '" + each.name + "' has " +
                             std::to_string(each.shape.dimensions()) +
                             " dimensions and no columns; split it by rows, or not at all");
      }
      static_cast<void>(each.bytes());
      if (axes_[i] == split_axis::none) {
        whole[i] = {each.shape.elements(), each.element_bytes};
        continue;
      }
      for (std::uint32_t rank = 0; rank < to_number(world); ++rank) {
        const std::uint64_t bytes = band(i, rank).elements() * each.element_bytes;
        written[rank] = checked_add(written[rank], bytes, "split_2d: bytes of one rank");
      }
    }
    owners_ = detail::owner_table(whole, written);
  }

  [[nodiscard]] rank_count world() const noexcept { return world_; }
  [[nodiscard]] std::uint32_t tensors() const noexcept { return static_cast<std::uint32_t>(shapes_.size()); }
  [[nodiscard]] tensor_shape shape(tensor_id tensor) const noexcept { return shapes_[to_index(tensor)]; }
  [[nodiscard]] split_axis axis(tensor_id tensor) const noexcept { return axes_[to_index(tensor)]; }

  [[nodiscard]] element_runs local(tensor_id tensor, rank_id rank) const noexcept {
    return band(to_index(tensor), to_index(rank));
  }
  [[nodiscard]] element_runs owned(tensor_id tensor, rank_id rank) const noexcept {
    return axis(tensor) == split_axis::none ? owners_.owned(tensor, rank) : local(tensor, rank);
  }
  [[nodiscard]] rank_id owner(tensor_id tensor, std::uint64_t element) const noexcept {
    const tensor_shape& shape = shapes_[to_index(tensor)];
    const std::uint64_t ranks = to_number(world_);
    std::uint64_t rank = 0;
    switch (axis(tensor)) {
      case split_axis::rows:
        rank = even_share_of(shape.rows(), element / shape.columns(), ranks);
        break;
      case split_axis::columns:
        rank = even_share_of(shape.columns(), element % shape.columns(), ranks);
        break;
      case split_axis::none:
        return owners_.owner(tensor, element);
    }
    return rank_id{static_cast<std::uint32_t>(rank)};
  }
  [[nodiscard]] bool is_replicated(tensor_id tensor) const noexcept {
    return axis(tensor) == split_axis::none || to_number(world_) == 1;
  }

 private:
  [[nodiscard]] element_runs band(std::size_t tensor, std::uint32_t rank) const noexcept {
    const tensor_shape& shape = shapes_[tensor];
    const std::uint64_t ranks = to_number(world_);
    switch (axes_[tensor]) {
      case split_axis::rows:
        return element_runs::rows(shape, even_share(shape.rows(), rank, ranks));
      case split_axis::columns:
        return element_runs::columns(shape, even_share(shape.columns(), rank, ranks));
      case split_axis::none:
        break;
    }
    return element_runs::all_of(shape.elements());
  }

  rank_count world_;
  std::vector<tensor_shape> shapes_;
  std::vector<split_axis> axes_;
  detail::owner_table owners_;
};

static_assert(partition<split_2d>);

}  // namespace v0
}  // namespace llmmem
