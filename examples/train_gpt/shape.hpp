/// @file
/// The shape of the small GPT, and the place of each tensor in a layer's parameters and activations.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/model/model_shape.hpp>
#include <llmmem/model/optimizer_form.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "train_gpt/matrix.hpp"

namespace train_gpt {

/// Tokens are bytes.
inline constexpr std::size_t vocabulary = 256;

/// A layer of the model: 0 is the embedding, followed by the blocks and the head.
enum class layer_id : std::uint32_t {};

[[nodiscard]] constexpr std::uint32_t to_index(layer_id layer) noexcept {
  return static_cast<std::uint32_t>(layer);
}

/// The dimensions of a model and its batches.
struct gpt_shape {
  std::size_t blocks = 6;    ///< transformer blocks
  std::size_t width = 256;   ///< of the residual stream
  std::size_t heads = 8;     ///< of attention; divides `width`
  std::size_t context = 64;  ///< tokens of a sequence
  std::size_t batch = 4;     ///< sequences of a step
  /// `adamw`, `sgd`, `adafactor` or `muon`.
  llmmem::optimizer_form optimizer = llmmem::optimizer_form::adamw;
  /// With `sgd`: each rank adds momentum before it sends (`llmmem::top_k_all_reduce`). Its mean is then the
  /// momentum, its variance what it has not sent, and an update is a step of plain SGD.
  bool corrects_momentum = false;
  /// Tiles of each matrix of blocks and head, that stores of state hand out one at a time; 0: whole layers.
  std::uint32_t tiles = 0;

  [[nodiscard]] constexpr std::size_t tokens() const noexcept { return batch * context; }
  [[nodiscard]] constexpr std::size_t head_width() const noexcept { return width / heads; }
  [[nodiscard]] constexpr std::size_t inner() const noexcept { return 4 * width; }
  /// Embedding, blocks, head.
  [[nodiscard]] constexpr std::size_t layers() const noexcept { return blocks + 2; }
  /// The pieces of each kind of state (`state_parts`).
  [[nodiscard]] constexpr std::size_t parts() const noexcept {
    return tiles == 0 ? layers() : 1 + blocks * (6 + 4 * std::size_t{tiles}) + 1 + tiles;
  }
  [[nodiscard]] constexpr layer_id layer(std::size_t index) const noexcept {
    return layer_id{static_cast<std::uint32_t>(index)};
  }
  [[nodiscard]] constexpr layer_id embedding() const noexcept { return layer(0); }
  [[nodiscard]] constexpr layer_id head() const noexcept { return layer(blocks + 1); }

  /// The same in the library's terms; a test compares its arithmetic with the layouts below.
  [[nodiscard]] constexpr llmmem::model_shape model() const noexcept {
    return {.name = "train_gpt",
            .vocabulary = vocabulary,
            .hidden = width,
            .layers = blocks,
            .heads = heads,
            .kv_heads = heads,
            .head_width = head_width(),
            .intermediate = inner(),
            .context = context,
            .mlp = llmmem::mlp_kind::plain,
            .norm = llmmem::norm_kind::layer,
            .bias = llmmem::bias_kind::all,
            .position = llmmem::position_kind::learned,
            .output = llmmem::output_kind::separate};
  }

  /// @throws argument_error  with the wrong number and a valid one.
  void validate() const {
    const auto within = [](const char* what, std::size_t value, std::size_t least, std::size_t most) {
      if (value >= least && value <= most) return;
      throw llmmem::argument_error("gpt_shape: " + std::string(what) + " " + std::to_string(value) +
                                   "; it may be " + std::to_string(least) + " to " + std::to_string(most));
    };
    within("blocks", blocks, 1, 1024);
    within("width", width, 1, 16'384);
    within("heads", heads, 1, 256);
    within("context", context, 1, 8192);
    within("batch", batch, 1, 4096);
    if (width % heads != 0) {
      throw llmmem::argument_error("gpt_shape: heads " + std::to_string(heads) + " does not divide width " +
                                   std::to_string(width) + "; the next width that it does is " +
                                   std::to_string((width / heads + 1) * heads));
    }
  }
};

/// A tensor inside a layer's parameters or activations.
struct tensor_place {
  std::string name;  ///< of a parameter: as in GPT-2's checkpoints, except the head's, which is tied there
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::size_t offset = 0;  ///< elements before it
};

/// The consecutive tensors of one layer, without gaps.
struct layer_layout {
  std::vector<tensor_place> tensors;
  std::size_t elements = 0;

  void add(std::string name, std::size_t rows, std::size_t columns) {
    tensors.push_back({std::move(name), rows, columns, elements});
    elements += rows * columns;
  }
};

/// The tensors of each kind of layer, in the order of their layout. Weights are stored input by output, so
/// that y = x W + b.
enum class embedding_tensor : std::uint8_t { tokens, positions };
enum class block_tensor : std::uint8_t {
  norm1_scale,
  norm1_shift,
  qkv_weight,
  qkv_bias,
  project_weight,
  project_bias,
  norm2_scale,
  norm2_shift,
  expand_weight,
  expand_bias,
  contract_weight,
  contract_bias,
};
enum class head_tensor : std::uint8_t { norm_scale, norm_shift, weight };

/// The activations that a layer's backward pass needs. The first tensor is the layer's input, from which all
/// others can be recomputed.
enum class block_activation : std::uint8_t {
  input,
  norm1_statistics,
  norm1,
  qkv,
  probabilities,
  attended,
  middle,
  norm2_statistics,
  norm2,
  expanded,
  activated,
};
enum class head_activation : std::uint8_t { input, norm_statistics, norm, probabilities };

/// The recomputed values of a layer's activations.
enum class rebuilt_part : std::uint8_t {
  all_but_input,  ///< from the layer's input
  attention,      ///< the probabilities and what they attend to, from queries, keys and values
};

/// The layout of the parameters of `layer`, which gradients and Adam's moments share.
[[nodiscard]] inline layer_layout parameter_layout(const gpt_shape& shape, layer_id layer) {
  const std::size_t width = shape.width;
  layer_layout all;
  if (layer == shape.embedding()) {
    all.add("wte.weight", vocabulary, width);
    all.add("wpe.weight", shape.context, width);
  } else if (layer == shape.head()) {
    all.add("ln_f.weight", 1, width);
    all.add("ln_f.bias", 1, width);
    all.add("lm_head.weight", width, vocabulary);
  } else {
    const std::string block = "h." + std::to_string(to_index(layer) - 1) + ".";
    all.add(block + "ln_1.weight", 1, width);
    all.add(block + "ln_1.bias", 1, width);
    all.add(block + "attn.c_attn.weight", width, 3 * width);
    all.add(block + "attn.c_attn.bias", 1, 3 * width);
    all.add(block + "attn.c_proj.weight", width, width);
    all.add(block + "attn.c_proj.bias", 1, width);
    all.add(block + "ln_2.weight", 1, width);
    all.add(block + "ln_2.bias", 1, width);
    all.add(block + "mlp.c_fc.weight", width, shape.inner());
    all.add(block + "mlp.c_fc.bias", 1, shape.inner());
    all.add(block + "mlp.c_proj.weight", shape.inner(), width);
    all.add(block + "mlp.c_proj.bias", 1, width);
  }
  return all;
}

/// The layout of Adafactor's factors of `layer`: for each tensor its rows' and columns', or, for a vector,
/// one for each element.
[[nodiscard]] inline layer_layout factor_layout(const gpt_shape& shape, layer_id layer) {
  layer_layout all;
  for (tensor_place& each : parameter_layout(shape, layer).tensors)
    all.add(std::move(each.name), 1, llmmem::factor_count(each.rows, each.columns));
  return all;
}

/// The tensors of `layer` that Muon updates: the matrices of a block. The embedding and the head have none.
[[nodiscard]] inline std::vector<tensor_place> muon_matrices(const gpt_shape& shape, layer_id layer) {
  std::vector<tensor_place> all = parameter_layout(shape, layer).tensors;
  const bool is_block = layer != shape.embedding() && layer != shape.head();
  std::erase_if(all,
                [&](const tensor_place& each) { return !is_block || each.rows < 2 || each.columns < 2; });
  return all;
}

/// The layout of variances of `layer` with Muon: of the tensors that AdamW updates.
[[nodiscard]] inline layer_layout rest_layout(const gpt_shape& shape, layer_id layer) {
  const std::vector<tensor_place> matrices = muon_matrices(shape, layer);
  layer_layout all;
  for (tensor_place& each : parameter_layout(shape, layer).tensors) {
    const auto is_it = [&](const tensor_place& matrix) { return matrix.offset == each.offset; };
    if (!std::any_of(matrices.begin(), matrices.end(), is_it))
      all.add(std::move(each.name), each.rows, each.columns);
  }
  return all;
}

/// The layout of the activations of `layer`: empty for the embedding, whose input is the batch itself.
[[nodiscard]] inline layer_layout activation_layout(const gpt_shape& shape, layer_id layer) {
  const std::size_t tokens = shape.tokens();
  const std::size_t width = shape.width;
  layer_layout all;
  if (layer == shape.embedding()) return all;
  all.add("input", tokens, width);
  if (layer == shape.head()) {
    all.add("norm_statistics", tokens, 2);
    all.add("norm", tokens, width);
    all.add("probabilities", tokens, vocabulary);
  } else {
    all.add("norm1_statistics", tokens, 2);
    all.add("norm1", tokens, width);
    all.add("qkv", tokens, 3 * width);
    all.add("probabilities", shape.batch * shape.heads * shape.context, shape.context);
    all.add("attended", tokens, width);
    all.add("middle", tokens, width);
    all.add("norm2_statistics", tokens, 2);
    all.add("norm2", tokens, width);
    all.add("expanded", tokens, shape.inner());
    all.add("activated", tokens, shape.inner());
  }
  return all;
}

/// The elements at the start of a layer's activations that are its input.
[[nodiscard]] constexpr std::size_t input_elements(const gpt_shape& shape) noexcept {
  return shape.tokens() * shape.width;
}

/// The values of a layer, tensor by tensor.
template <class T>
class layer_view {
 public:
  /// @pre `values` has `layout.elements`; both outlive the view.
  layer_view(std::span<T> values, const layer_layout& layout) noexcept
      : data_(values.data()), layout_(&layout) {}

  /// @tparam Tensor  one of the enumerations above, of this layer's kind.
  template <class Tensor>
  [[nodiscard]] matrix<T> operator[](Tensor tensor) const noexcept {
    const tensor_place& place = layout_->tensors[static_cast<std::size_t>(tensor)];
    return {data_ + place.offset, place.rows, place.columns, place.columns};
  }

 private:
  T* data_;
  const layer_layout* layout_;
};

}  // namespace train_gpt
