/// @file
/// The bodies of grid.hpp.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/grid.hpp>
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

inline grid_partition::grid_partition(std::span<const tensor_facts> tensors, std::span<const grid_role> roles,
                                      const process_grid& grid)
    : grid_(grid), roles_(roles.begin(), roles.end()) {
  detail::check_world(grid.world(), tensors.size(), "grid_partition");
  if (roles.size() != tensors.size()) {
    throw argument_error("grid_partition: " + std::to_string(tensors.size()) + " tensors and " +
                         std::to_string(roles.size()) + " roles; each tensor has one");
  }
  shapes_.reserve(tensors.size());
  std::vector<sharding::cuttable_item> whole(
      tensors.size());  // empty if split: their owner is not looked up here
  std::vector<std::uint64_t> written(to_number(grid.world()), 0);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const tensor_facts& each = tensors[i];
    shapes_.push_back(each.shape);
    static_cast<void>(each.bytes());
    const std::uint64_t dimensions = each.shape.dimensions();
    const bool is_bias = roles_[i] == grid_role::bias;
    if (roles_[i] == grid_role::whole) {
      whole[i] = {each.shape.elements(), each.element_bytes};
      continue;
    }
    if (is_bias ? dimensions != 1 : dimensions < 2) {
      throw argument_error("grid_partition: tensor '" + each.name + "' has " + std::to_string(dimensions) +
                           (is_bias ? " dimensions, but a bias has 1"
                                    : " dimensions, too few for blocks; give it the role `bias` or `whole`"));
    }
    for (std::uint32_t rank = 0; rank < to_number(grid.world()); ++rank) {
      const auto elements = owned(tensor_id{static_cast<std::uint32_t>(i)}, rank_id{rank}).elements();
      written[rank] =
          checked_add(written[rank], elements * each.element_bytes, "grid_partition: bytes of one rank");
    }
  }
  owners_ = detail::owner_table(whole, written);
}

inline element_runs grid_partition::piece(std::size_t tensor, const grid_place& place) const noexcept {
  const tensor_shape& shape = shapes_[tensor];
  switch (roles_[tensor]) {
    case grid_role::weight:
    case grid_role::activation: {
      const grid_block block = block_of(grid_, roles_[tensor], shape, place);
      return element_runs::box(shape, block.rows, block.columns);
    }
    case grid_role::bias:
      return element_runs::rows(shape, even_share(shape.rows(), place.column, grid_.columns()));
    case grid_role::whole:
      break;
  }
  return element_runs::all_of(shape.elements());
}

inline element_runs grid_partition::owned(tensor_id tensor, rank_id rank) const noexcept {
  const tensor_shape& shape = shapes_[to_index(tensor)];
  const grid_place place = grid_.coordinates_of(rank);
  const auto share = [](const index_range& of, std::uint64_t part, std::uint64_t parts) {
    const index_range within = even_share(of.count, part, parts);
    return index_range{of.first + within.first, within.count};
  };
  switch (role(tensor)) {
    case grid_role::weight: {
      const grid_block held = block(tensor, place);
      return element_runs::box(shape, share(held.rows, place.layer, grid_.depth()), held.columns);
    }
    case grid_role::activation:
      return piece(to_index(tensor), place);
    case grid_role::bias: {
      const index_range held = even_share(shape.rows(), place.column, grid_.columns());
      const std::uint64_t holders = std::uint64_t{grid_.rows()} * grid_.depth();
      return element_runs::rows(shape,
                                share(held, std::uint64_t{place.layer} * grid_.rows() + place.row, holders));
    }
    case grid_role::whole:
      break;
  }
  return owners_.owned(tensor, rank);
}

inline rank_id grid_partition::owner(tensor_id tensor, std::uint64_t element) const noexcept {
  const tensor_shape& shape = shapes_[to_index(tensor)];
  const auto narrow = [](std::uint64_t part) { return static_cast<std::uint32_t>(part); };
  const std::uint64_t lines = std::uint64_t{grid_.rows()} * grid_.depth();
  grid_place place;
  switch (role(tensor)) {
    case grid_role::weight: {
      const std::uint64_t row = element / shape.columns();
      place.row = narrow(even_share_of(shape.rows(), row, grid_.rows()));
      place.column = narrow(even_share_of(shape.columns(), element % shape.columns(), grid_.columns()));
      const index_range held = even_share(shape.rows(), place.row, grid_.rows());
      place.layer = narrow(even_share_of(held.count, row - held.first, grid_.depth()));
      return grid_.rank_at(place);
    }
    case grid_role::activation: {
      const std::uint64_t band = even_share_of(shape.rows(), element / shape.columns(), lines);
      place.row = narrow(band % grid_.rows());
      place.layer = narrow(band / grid_.rows());
      place.column = narrow(even_share_of(shape.columns(), element % shape.columns(), grid_.columns()));
      return grid_.rank_at(place);
    }
    case grid_role::bias: {
      place.column = narrow(even_share_of(shape.rows(), element, grid_.columns()));
      const index_range held = even_share(shape.rows(), place.column, grid_.columns());
      const std::uint64_t line = even_share_of(held.count, element - held.first, lines);
      place.row = narrow(line % grid_.rows());
      place.layer = narrow(line / grid_.rows());
      return grid_.rank_at(place);
    }
    case grid_role::whole:
      break;
  }
  return owners_.owner(tensor, element);
}

inline bool grid_partition::is_replicated(tensor_id tensor) const noexcept {
  switch (role(tensor)) {
    case grid_role::weight:
      return grid_.rows() == 1 && grid_.columns() == 1;
    case grid_role::activation:
      return to_number(grid_.world()) == 1;
    case grid_role::bias:
      return grid_.columns() == 1;
    case grid_role::whole:
      break;
  }
  return true;
}

}  // namespace v0
}  // namespace llmmem
