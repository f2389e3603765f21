/// @file
/// `process_grid`: ranks in rows, columns and layers of depth.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/ids.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Where a rank is in a grid.
struct grid_place {
  std::uint32_t row = 0;
  std::uint32_t column = 0;
  std::uint32_t layer = 0;

  friend constexpr bool operator==(const grid_place&, const grid_place&) noexcept = default;
};

/// rows x columns x depth ranks, numbered column by column, row by row, then layer by layer: the ranks of a
/// grid row are contiguous, and so are all the ranks of a layer.
///
/// @par Complexity      O(1), the lists O(their length).
/// @par Thread safety   a plain value.
class process_grid {
 public:
  /// A grid of one rank.
  constexpr process_grid() noexcept = default;

  /// @throws argument_error  when a side is 0; length_error when the ranks pass 2^32 - 1.
  constexpr process_grid(std::uint32_t rows, std::uint32_t columns, std::uint32_t depth = 1)
      : rows_(rows), columns_(columns), depth_(depth) {
    const auto sides = [&] {
      return "process_grid: " + std::to_string(rows) + " x " + std::to_string(columns) + " x " +
             std::to_string(depth);
    };
    if (rows == 0 || columns == 0 || depth == 0) {
      throw argument_error(sides() + " ranks; each side is at least 1");
    }
    if (std::uint64_t{rows} * columns > 0xFFFF'FFFFU / depth) {
      throw length_error(sides() + " ranks; their ids are 32 bits wide");
    }
  }

  [[nodiscard]] constexpr std::uint32_t rows() const noexcept { return rows_; }
  [[nodiscard]] constexpr std::uint32_t columns() const noexcept { return columns_; }
  [[nodiscard]] constexpr std::uint32_t depth() const noexcept { return depth_; }
  [[nodiscard]] constexpr rank_count world() const noexcept { return rank_count{rows_ * columns_ * depth_}; }

  /// @pre `place` is in the grid
  [[nodiscard]] constexpr rank_id rank_at(const grid_place& place) const noexcept {
    return rank_id{(place.layer * rows_ + place.row) * columns_ + place.column};
  }
  /// @pre `rank` is less than `world()`
  [[nodiscard]] constexpr grid_place coordinates_of(rank_id rank) const noexcept {
    const std::uint32_t line = to_index(rank) / columns_;
    return {.row = line % rows_, .column = to_index(rank) % columns_, .layer = line / rows_};
  }

  /// Returns the ranks of the same row and layer, by column: blocks of activations are broadcast among them.
  [[nodiscard]] std::vector<rank_id> row_group(rank_id rank) const {
    grid_place place = coordinates_of(rank);
    std::vector<rank_id> ranks(columns_);
    for (place.column = 0; place.column < columns_; ++place.column)
      ranks[place.column] = rank_at(place);
    return ranks;
  }
  /// Returns the ranks of the same column and layer, by row: blocks of weights are broadcast among them.
  [[nodiscard]] std::vector<rank_id> column_group(rank_id rank) const {
    grid_place place = coordinates_of(rank);
    std::vector<rank_id> ranks(rows_);
    for (place.row = 0; place.row < rows_; ++place.row)
      ranks[place.row] = rank_at(place);
    return ranks;
  }
  /// Returns the ranks of the same row and column, by layer: they hold the same weights and sum their
  /// gradients.
  [[nodiscard]] std::vector<rank_id> depth_group(rank_id rank) const {
    grid_place place = coordinates_of(rank);
    std::vector<rank_id> ranks(depth_);
    for (place.layer = 0; place.layer < depth_; ++place.layer)
      ranks[place.layer] = rank_at(place);
    return ranks;
  }

  friend constexpr bool operator==(const process_grid&, const process_grid&) noexcept = default;

 private:
  std::uint32_t rows_ = 1;
  std::uint32_t columns_ = 1;
  std::uint32_t depth_ = 1;
};

}  // namespace v0
}  // namespace llmmem
