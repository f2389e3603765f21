/// @file
/// The parts of a layer's parameters that stores hand out one at a time: with tiles, some rows of a matrix.
#pragma once

#include <llmmem/sharding/operator_tiles.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "train_gpt/shape.hpp"

namespace train_gpt {

/// Consecutive parameters of a layer.
struct layer_part {
  layer_id layer{};
  std::size_t tensor = 0;  ///< the first one, in the layer's layout
  std::size_t first_row = 0;
  std::size_t rows = 0;   ///< of the tensor; 0: the whole layer
  std::size_t first = 0;  ///< element in the layer
  std::size_t elements = 0;
  bool ends_tensor = true;  ///< it has the tensor's last rows

  [[nodiscard]] bool is_whole() const noexcept { return rows == 0; }
};

/// Returns a layer in the order in which its forward pass uses the parts; the backward pass uses them in the
/// reverse. Each matrix is `tiles` parts, after its bias; vectors that are used together are one.
///
/// Weights are stored input by output, so that a tile has the weights of some inputs. The forward pass adds
/// the products of inputs in their order, with or without tiles; the backward pass has each input's gradient
/// from one tile. So no bits depend on the tiles.
///
/// @param layer  a block or the head.
/// @throws llmmem::argument_error  for more tiles than a matrix has rows.
[[nodiscard]] inline std::vector<layer_part> operator_parts(const gpt_shape& shape, layer_id layer,
                                                            std::uint32_t tiles) {
  const layer_layout layout = parameter_layout(shape, layer);
  std::vector<layer_part> all;
  const auto vectors = [&](auto of, std::size_t count) {
    const auto tensor = static_cast<std::size_t>(of);
    all.push_back({layer, tensor, 0, 1, layout.tensors[tensor].offset, 0, true});
    for (std::size_t i = 0; i < count; ++i)
      all.back().elements += layout.tensors[tensor + i].columns;
  };
  const auto matrix = [&](auto of) {
    const auto tensor = static_cast<std::size_t>(of);
    const tensor_place& place = layout.tensors[tensor];
    const llmmem::operator_tiles cut(llmmem::tensor_shape::matrix(place.rows, place.columns), tiles,
                                     sizeof(float));
    for (std::uint32_t tile = 0; tile < tiles; ++tile) {
      const llmmem::index_range rows = cut.rows(tile);
      all.push_back({layer, tensor, rows.first, rows.count, place.offset + rows.first * place.columns,
                     rows.count * place.columns, tile + 1 == tiles});
    }
  };
  if (layer == shape.head()) {
    vectors(head_tensor::norm_scale, 2);
    matrix(head_tensor::weight);
    return all;
  }
  using enum block_tensor;
  vectors(norm1_scale, 2);
  for (const auto& [bias, weight] :
       {std::pair(qkv_bias, qkv_weight), std::pair(project_bias, project_weight),
        std::pair(expand_bias, expand_weight), std::pair(contract_bias, contract_weight)}) {
    if (bias == expand_bias) vectors(norm2_scale, 2);
    vectors(bias, 1);
    matrix(weight);
  }
  return all;
}

/// Returns whether a part of a block only adds to the residual stream, and not to the block's record.
[[nodiscard]] inline bool is_output(const gpt_shape& shape, const layer_part& part) noexcept {
  return part.layer != shape.head() && part.tensor >= static_cast<std::size_t>(block_tensor::contract_weight);
}

/// Returns the pieces of a model's state, in the order of the forward pass: each layer whole, or, with
/// `shape.tiles`, the embedding and the parts of all others. Stores of state number these, in place of
/// layers.
[[nodiscard]] inline std::vector<layer_part> state_parts(const gpt_shape& shape) {
  std::vector<layer_part> all;
  for (std::size_t i = 0; i < shape.layers(); ++i) {
    const layer_id layer = shape.layer(i);
    if (shape.tiles != 0 && layer != shape.embedding()) {
      const std::vector<layer_part> parts = operator_parts(shape, layer, shape.tiles);
      all.insert(all.end(), parts.begin(), parts.end());
    } else {
      all.push_back({.layer = layer, .elements = parameter_layout(shape, layer).elements});
    }
  }
  return all;
}

/// The number of a piece's layer. @pre piece < shape.parts()
[[nodiscard]] constexpr layer_id layer_of(const gpt_shape& shape, std::uint32_t piece) noexcept {
  if (shape.tiles == 0 || piece == 0) return shape.layer(piece);
  const std::size_t of_block = (shape.parts() - 2 - shape.tiles) / shape.blocks;
  return shape.layer(std::min<std::size_t>((piece - 1) / of_block, shape.blocks) + 1);
}
/// The elements of a piece. @pre piece < shape.parts()
[[nodiscard]] inline std::size_t part_elements(const gpt_shape& shape, std::uint32_t piece) {
  const layer_id layer = layer_of(shape, piece);
  if (shape.tiles == 0 || piece == 0) return parameter_layout(shape, layer).elements;
  const std::vector<layer_part> parts = operator_parts(shape, layer, shape.tiles);
  const std::size_t of_block = (shape.parts() - 2 - shape.tiles) / shape.blocks;
  return parts[piece - 1 - (to_index(layer) - 1) * of_block].elements;
}

/// Whether a piece is the first one of its layer, or the last one.
[[nodiscard]] inline bool begins_layer(const std::vector<layer_part>& parts, std::size_t piece) noexcept {
  return piece == 0 || parts[piece - 1].layer != parts[piece].layer;
}
[[nodiscard]] inline bool ends_layer(const std::vector<layer_part>& parts, std::size_t piece) noexcept {
  return piece + 1 == parts.size() || parts[piece + 1].layer != parts[piece].layer;
}

}  // namespace train_gpt
