/// @file
/// `grid2d` and `grid25d`: weights and activations in blocks over a grid of ranks.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/detail/owner_table.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/process_grid.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The role of a tensor in Y = X W + b on a grid of q1 rows, q2 columns and depth d.
enum class grid_role : std::uint8_t {
  weight,      ///< W [inputs, outputs]: q1 x q2 blocks, the same in every layer of depth
  activation,  ///< X, Y [tokens, features]: q1 d x q2 blocks; band k q1 + i of the tokens is row i of layer k
  bias,        ///< b [outputs]: q2 parts, the same in all rows and layers
  whole,       ///< all of it on every rank
};

/// The rows and columns of a matrix that make a block.
struct grid_block {
  index_range rows{};
  index_range columns{};

  friend constexpr bool operator==(const grid_block&, const grid_block&) noexcept = default;
};

/// Returns the block of a matrix that the rank at `place` holds. Blocks are as even as possible, the first
/// ones longer.
/// @pre `role` is `weight` or `activation`, and `place` in the grid
[[nodiscard]] constexpr grid_block block_of(const process_grid& grid, grid_role role,
                                            const tensor_shape& shape, const grid_place& place) noexcept {
  const bool by_layer = role == grid_role::activation;
  const std::uint64_t bands = std::uint64_t{grid.rows()} * (by_layer ? grid.depth() : 1);
  const std::uint64_t band = place.row + (by_layer ? std::uint64_t{place.layer} * grid.rows() : 0);
  return {even_share(shape.rows(), band, bands), even_share(shape.columns(), place.column, grid.columns())};
}

/// Weights and activations in blocks over a grid, as SUMMA multiplies them (`plan_summa`). `grid2d` and
/// `grid25d` are this with a name; use it directly for grids of any sides.
///
/// A rank holds 1/(q1 q2) of the weights and 1/(q1 q2 d) of the activations, while `split_2d` leaves all
/// activations on each. If several ranks hold an element set, each owns a share of it: the rows of a block of
/// weights among the layers of depth, a part of a bias among layers and rows. Blocks are uneven if sides do
/// not divide, and empty if the grid is larger than the matrix.
///
/// Matrices are [inputs, outputs], row-major. PyTorch stores the transpose, [outputs, inputs]: transpose such
/// weights before they are split.
///
/// @par Complexity      O(1), except `owned` and `owner` of tensors that all hold: O(log world).
/// @par Thread safety   as a plain value.
class grid_partition {
 public:
  /// @param roles  one for each tensor.
  /// @throws argument_error  when the two lists differ in length, a weight or an activation has less than two
  ///                         dimensions, or a bias not one; length_error when bytes together pass 2^63 - 1.
  grid_partition(std::span<const tensor_facts> tensors, std::span<const grid_role> roles,
                 const process_grid& grid);

  [[nodiscard]] rank_count world() const noexcept { return grid_.world(); }
  [[nodiscard]] std::uint32_t tensors() const noexcept { return static_cast<std::uint32_t>(shapes_.size()); }
  [[nodiscard]] tensor_shape shape(tensor_id tensor) const noexcept { return shapes_[to_index(tensor)]; }

  /// Returns a block, a part of a bias, or everything.
  [[nodiscard]] element_runs local(tensor_id tensor, rank_id rank) const noexcept {
    return piece(to_index(tensor), grid_.coordinates_of(rank));
  }
  [[nodiscard]] element_runs owned(tensor_id tensor, rank_id rank) const noexcept;
  [[nodiscard]] rank_id owner(tensor_id tensor, std::uint64_t element) const noexcept;
  /// True on a grid of one rank, for `whole`, for a weight on a grid of depth only and for a bias of one
  /// column.
  [[nodiscard]] bool is_replicated(tensor_id tensor) const noexcept;

  [[nodiscard]] const process_grid& grid() const noexcept { return grid_; }
  [[nodiscard]] grid_role role(tensor_id tensor) const noexcept { return roles_[to_index(tensor)]; }
  /// Returns the rows and columns that the rank at `place` holds. @pre the tensor is a weight or an
  /// activation
  [[nodiscard]] grid_block block(tensor_id tensor, const grid_place& place) const noexcept {
    return block_of(grid_, role(tensor), shapes_[to_index(tensor)], place);
  }

 private:
  [[nodiscard]] element_runs piece(std::size_t tensor, const grid_place& place) const noexcept;

  process_grid grid_;
  std::vector<tensor_shape> shapes_;
  std::vector<grid_role> roles_;
  detail::owner_table owners_;
};

static_assert(partition<grid_partition>);

/// The two-dimensional tensor parallelism of Optimus (Xu et al. 2021, arXiv 2104.05343): q x q ranks.
class grid2d : public grid_partition {
 public:
  /// A square. @throws as `process_grid` and `grid_partition`.
  grid2d(std::span<const tensor_facts> tensors, std::span<const grid_role> roles, std::uint32_t side)
      : grid_partition(tensors, roles, process_grid(side, side)) {}
  /// A rectangle. @throws as `process_grid` and `grid_partition`.
  grid2d(std::span<const tensor_facts> tensors, std::span<const grid_role> roles, std::uint32_t rows,
         std::uint32_t columns)
      : grid_partition(tensors, roles, process_grid(rows, columns)) {}
};

/// The 2.5-dimensional tensor parallelism of Tesseract (Wang et al. 2021, arXiv 2105.14500): q x q x d ranks.
/// The layers of depth hold the same weights, d copies in all, and each has its own tokens, so that they
/// exchange only the sums of weights' gradients.
class grid25d : public grid_partition {
 public:
  /// @throws as `process_grid` and `grid_partition`.
  grid25d(std::span<const tensor_facts> tensors, std::span<const grid_role> roles, std::uint32_t side,
          std::uint32_t depth)
      : grid_partition(tensors, roles, process_grid(side, side, depth)) {}
};

static_assert(partition<grid2d>);
static_assert(partition<grid25d>);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/sharding/detail/grid_body.hpp>
