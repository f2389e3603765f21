/// @file
/// A small GPT: forward and backward pass of each layer, written out by hand.
///
/// Bytes as tokens; learned positions; blocks that normalise before attention and before an MLP of four times
/// the width with GELU (tanh form); a last norm; a head of its own, not tied to the embedding, so that every
/// parameter belongs to one layer. Radford et al. 2019, "Language models are unsupervised multitask
/// learners", section 2.3.
#pragma once

#include <llmmem/space/concepts.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "train_gpt/adafactor_update.hpp"
#include "train_gpt/exact_math.hpp"
#include "train_gpt/host_values.hpp"
#include "train_gpt/layer_math.hpp"
#include "train_gpt/layer_parts.hpp"
#include "train_gpt/matrix.hpp"
#include "train_gpt/muon_update.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/worker_team.hpp"

namespace train_gpt {

/// The layers' arithmetic, without a store: the caller passes the parameters, gradients and activations of
/// one layer at a time as spans. It owns only the residual stream, its gradient, and scratch memory, also
/// that of an optimizer's sums, which hold nothing between steps.
///
/// One worker computes each element of a result in one order, so that the bits do not depend on the number of
/// workers. NaN anywhere in the input of a layer shows in its output.
///
/// @par Complexity      a step takes 6 operations a parameter and token, and 12 x context x width more a
/// token
///                      and block.
/// @par Thread safety   one caller; the team does the work.
/// @par Errors          the constructor throws `argument_error` for an impossible shape, and `out_of_memory`
///                      if the space lacks the scratch memory; nothing else throws.
template <std::floating_point T, llmmem::memory_space Space>
class gpt : layer_math<T> {
  using math = layer_math<T>;

 public:
  gpt(const gpt_shape& shape, worker_team& team, Space& space)
      : math(checked(shape), team),
        stream_values_(space, input_elements(shape)),
        gradient_values_(space, input_elements(shape)),
        narrow_values_(space, input_elements(shape)),
        wide_values_(space, wide_elements(shape)),
        scratch_values_(space, team.size() * scratch_elements(shape)) {
    math::set_scratch(scratch_values_.values());
    if (update_elements(shape) != 0) update_values_.emplace(space, update_elements(shape));
    for (std::size_t layer = 0; layer < shape.layers(); ++layer) {
      parameters_.push_back(parameter_layout(shape, shape.layer(layer)));
      activations_.push_back(activation_layout(shape, shape.layer(layer)));
      parts_.push_back(layer == 0 ? std::vector<layer_part>{} : operator_parts(shape, shape.layer(layer), 1));
    }
  }

  /// Its own memory, in values.
  [[nodiscard]] static std::size_t workspace_elements(const gpt_shape& shape, std::size_t workers) {
    std::size_t sum = 0;
    for (const std::size_t each : workspace_ranges(shape, workers))
      sum += each;
    return sum;
  }
  /// The same by range.
  [[nodiscard]] static std::array<std::size_t, 6> workspace_ranges(const gpt_shape& shape,
                                                                   std::size_t workers) {
    const std::size_t input = input_elements(shape);
    return {
        input, input, input, wide_elements(shape), workers * scratch_elements(shape), update_elements(shape)};
  }
  /// The memory of `adafactor_update` or `muon_update`. Its contents are unspecified.
  [[nodiscard]] std::span<std::byte> update_memory() noexcept {
    return update_values_ ? std::as_writable_bytes(update_values_->values()) : std::span<std::byte>{};
  }

  [[nodiscard]] const gpt_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] const layer_layout& parameters(layer_id layer) const noexcept {
    return parameters_[to_index(layer)];
  }
  [[nodiscard]] const layer_layout& activations(layer_id layer) const noexcept {
    return activations_[to_index(layer)];
  }

  /// @name Forward In this order: `embed`; for each block and the head `save_input`, `fill`; after a block's
  /// `fill`, `advance`.
  /// @{

  /// Sets the residual stream to the sum of the tokens' and the positions' embeddings.
  void embed(std::span<const std::uint8_t> tokens, std::span<const T> weights) noexcept {
    const layer_view<const T> of(weights, parameters(shape_.embedding()));
    const auto token_table = of[embedding_tensor::tokens];
    const auto position_table = of[embedding_tensor::positions];
    const matrix<T> x = stream();
    team_->slices(shape_.tokens(), 1, [&](std::size_t first, std::size_t end, std::size_t) {
      for (std::size_t i = first; i < end; ++i) {
        const T* const token = token_table.row(tokens[i]);
        const T* const position = position_table.row(i % shape_.context);
        for (std::size_t c = 0; c < shape_.width; ++c)
          x.row(i)[c] = token[c] + position[c];
      }
    });
  }

  /// Begins a layer's record with its input, the residual stream.
  void save_input(std::span<T> record) noexcept {
    const auto from = stream_values_.values();
    team_->slices(from.size(), 16, [&](std::size_t first, std::size_t end, std::size_t) {
      std::copy_n(from.data() + first, end - first, record.data() + first);
    });
  }

  /// Fills a record from its input. Accesses only the record and scratch memory, so that it may be repeated
  /// at any time.
  void fill(layer_id layer, std::span<const T> weights, std::span<T> record) noexcept {
    for (const layer_part& part : parts_[to_index(layer)]) {
      if (!is_output(shape_, part)) forward_part(part, weights.subspan(part.first, part.elements), record);
    }
  }

  /// Fills a part of a record from its other values, with the bits of `fill`.
  void refill(layer_id layer, std::span<const T> weights, std::span<T> record, rebuilt_part part) noexcept {
    if (part == rebuilt_part::all_but_input || layer == shape_.head()) return fill(layer, weights, record);
    const layer_view<T> saved(record, activations(layer));
    attend(saved[block_activation::attended], saved[block_activation::probabilities],
           saved[block_activation::qkv]);
  }

  /// Sets the residual stream to the output of a block with a filled record.
  void advance(layer_id block, std::span<const T> weights, std::span<T> record) noexcept {
    for (const layer_part& part : parts_[to_index(block)]) {
      if (is_output(shape_, part)) forward_part(part, weights.subspan(part.first, part.elements), record);
    }
  }

  /// `fill` and `advance` by the parts of a layer (`operator_parts`), in their order, each with its weights
  /// alone. Those that are no output may be repeated.
  void forward_part(const layer_part& part, std::span<const T> weights, std::span<T> record) noexcept {
    if (part.is_whole()) {
      fill(part.layer, weights, record);
      if (part.layer != shape_.head()) advance(part.layer, weights, record);
    } else if (part.layer == shape_.head()) {
      forward_head(part, weights, record);
    } else {
      forward_block(part, weights, record);
    }
  }

  /// The mean over all tokens of -ln(probability of the target), from the head's record; summed in double
  /// precision in the order of the tokens.
  [[nodiscard]] double loss(std::span<const std::uint8_t> targets, std::span<const T> record) const noexcept {
    const layer_view<const T> saved(record, activations(shape_.head()));
    const auto probabilities = saved[head_activation::probabilities];
    double sum = 0;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      const auto likely = static_cast<double>(probabilities.row(i)[targets[i]]);
      sum -= exact_log(likely < 0x1p-1000 ? 0x1p-1000 : likely);
    }
    return sum / static_cast<double>(targets.size());
  }
  /// @}

  /// @name Backward
  /// In this order: `head_backward`, `block_backward` from the last block to the first, `embed_backward`.
  /// Each writes all of its layer's gradients, of the mean loss.
  /// @{
  /// Multiplies all gradients by `scale`, from the next `head_backward` on: exactly, if it is a power of two.
  void scale_loss(T scale) noexcept { loss_scale_ = scale; }
  void head_backward(std::span<const std::uint8_t> targets, std::span<const T> weights,
                     std::span<const T> record, std::span<T> gradients) noexcept {
    backward_all(shape_.head(), targets, weights, record, gradients);
  }
  void block_backward(layer_id block, std::span<const T> weights, std::span<const T> record,
                      std::span<T> gradients) noexcept {
    backward_all(block, {}, weights, record, gradients);
  }
  /// The same by the parts of a layer, in the reverse of their order, each with its weights and gradients
  /// alone.
  void backward_part(const layer_part& part, std::span<const std::uint8_t> targets,
                     std::span<const T> weights, std::span<const T> record, std::span<T> gradients) noexcept {
    if (part.is_whole()) {
      backward_all(part.layer, targets, weights, record, gradients);
    } else if (part.layer == shape_.head()) {
      backward_head(part, targets, weights, record, gradients);
    } else {
      backward_block(part, weights, record, gradients);
    }
  }

  void embed_backward(std::span<const std::uint8_t> tokens, std::span<T> gradients) noexcept {
    const layer_view<T> to(gradients, parameters(shape_.embedding()));
    const auto token_table = to[embedding_tensor::tokens];
    const auto position_table = to[embedding_tensor::positions];
    const matrix<T> out = gradient();
    team_->slices(shape_.width, 16, [&](std::size_t first, std::size_t end, std::size_t) {
      for (const auto& table : {token_table, position_table}) {
        for (std::size_t i = 0; i < table.rows; ++i)
          std::fill(table.row(i) + first, table.row(i) + end, T{0});
      }
      for (std::size_t i = 0; i < out.rows; ++i) {
        T* const token = token_table.row(tokens[i]);
        T* const position = position_table.row(i % shape_.context);
        for (std::size_t c = first; c < end; ++c) {
          token[c] += out.row(i)[c];
          position[c] += out.row(i)[c];
        }
      }
    });
  }
  /// @}

 private:
  using math::add_product;
  using math::attend;
  using math::attention_backward;
  using math::column_sums;
  using math::fill_zero;
  using math::gelu;
  using math::gelu_backward;
  using math::norm;
  using math::norm_backward;
  using math::product;
  using math::scratch_elements;
  using math::set_rows;
  using math::shape_;
  using math::softmax;
  using math::team_;

  [[nodiscard]] static const gpt_shape& checked(const gpt_shape& shape) {
    shape.validate();
    return shape;
  }

  /// @name Own memory
  /// @{
  [[nodiscard]] matrix<T> stream() const noexcept { return as_matrix(stream_values_.values(), shape_.width); }
  [[nodiscard]] matrix<T> gradient() const noexcept {
    return as_matrix(gradient_values_.values(), shape_.width);
  }
  [[nodiscard]] matrix<T> narrow() const noexcept { return as_matrix(narrow_values_.values(), shape_.width); }
  [[nodiscard]] matrix<T> wide(std::size_t columns) const noexcept {
    return as_matrix(wide_values_.values().first(shape_.tokens() * columns), columns);
  }
  [[nodiscard]] static constexpr std::size_t wide_elements(const gpt_shape& shape) noexcept {
    return shape.tokens() * std::max(shape.inner(), vocabulary);
  }
  [[nodiscard]] static std::size_t update_elements(const gpt_shape& shape) {
    return (update_sum_bytes(shape) + muon_memory_bytes(shape)) / sizeof(T);
  }
  /// @}

  /// The rows of a part as a matrix.
  template <class V>
  [[nodiscard]] matrix<V> rows_of(const layer_part& part, std::span<V> values) const noexcept {
    return as_matrix(values, parameters(part.layer).tensors[part.tensor].columns);
  }
  /// The columns of `all` that the part's rows are multiplied by.
  template <class V>
  [[nodiscard]] static matrix<V> inputs_of(const layer_part& part, matrix<V> all) noexcept {
    return all.part(0, all.rows, part.first_row, part.rows);
  }

  void forward_block(const layer_part& part, std::span<const T> weights, std::span<T> record) noexcept {
    using enum block_tensor;
    using enum block_activation;
    const layer_view<T> saved(record, activations(part.layer));
    const auto multiply = [&](matrix<T> y, matrix<const T> x) {
      add_product(y, inputs_of(part, x), rows_of(part, weights));
    };
    switch (static_cast<block_tensor>(part.tensor)) {
      case norm1_scale:
        norm(saved[norm1], saved[norm1_statistics], saved[input], weights.data(),
             weights.data() + shape_.width);
        break;
      case qkv_bias:
        set_rows(saved[qkv], weights.data());
        break;
      case qkv_weight:
        multiply(saved[qkv], saved[norm1]);
        if (part.ends_tensor) attend(saved[attended], saved[probabilities], saved[qkv]);
        break;
      case project_bias:
        set_rows(saved[middle], weights.data(), saved[input]);
        break;
      case project_weight:
        multiply(saved[middle], saved[attended]);
        break;
      case norm2_scale:
        norm(saved[norm2], saved[norm2_statistics], saved[middle], weights.data(),
             weights.data() + shape_.width);
        break;
      case expand_bias:
        set_rows(saved[expanded], weights.data());
        break;
      case expand_weight:
        multiply(saved[expanded], saved[norm2]);
        if (part.ends_tensor) gelu(saved[activated], saved[expanded]);
        break;
      case contract_bias:
        set_rows(stream(), weights.data(), saved[middle]);
        break;
      case contract_weight:
        multiply(stream(), saved[activated]);
        break;
      case norm1_shift:  // with the scale
      case norm2_shift:
        break;
    }
  }

  void forward_head(const layer_part& part, std::span<const T> weights, std::span<T> record) noexcept {
    const layer_view<T> saved(record, activations(shape_.head()));
    if (static_cast<head_tensor>(part.tensor) == head_tensor::norm_scale) {
      norm(saved[head_activation::norm], saved[head_activation::norm_statistics],
           saved[head_activation::input], weights.data(), weights.data() + shape_.width);
      return;
    }
    const matrix<T> logits = saved[head_activation::probabilities];
    if (part.first_row == 0) fill_zero(logits);
    add_product(logits, inputs_of(part, matrix<const T>(saved[head_activation::norm])),
                rows_of(part, weights));
    if (!part.ends_tensor) return;
    team_->slices(logits.rows, 1, [&](std::size_t first, std::size_t end, std::size_t) {
      for (std::size_t i = first; i < end; ++i)
        softmax(logits.row(i), vocabulary, 1);
    });
  }

  void backward_all(layer_id layer, std::span<const std::uint8_t> targets, std::span<const T> weights,
                    std::span<const T> record, std::span<T> gradients) noexcept {
    const std::vector<layer_part>& parts = parts_[to_index(layer)];
    for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
      backward_part(*part, targets, weights.subspan(part->first, part->elements), record,
                    gradients.subspan(part->first, part->elements));
    }
  }

  /// Gradients of a part's weights, and of their inputs.
  void products_backward(const layer_part& part, matrix<const T> x, matrix<const T> out, matrix<T> inputs,
                         std::span<const T> weights, std::span<T> gradients) noexcept {
    product(rows_of(part, gradients), inputs_of(part, x).transposed(), out);
    product(inputs_of(part, inputs), out, rows_of(part, weights).transposed());
  }

  void backward_head(const layer_part& part, std::span<const std::uint8_t> targets,
                     std::span<const T> weights, std::span<const T> record, std::span<T> gradients) noexcept {
    const layer_view<const T> saved(record, activations(shape_.head()));
    const matrix<T> logits = wide(vocabulary);
    if (static_cast<head_tensor>(part.tensor) == head_tensor::norm_scale) {
      fill_zero(gradient());
      norm_backward(gradient(), narrow(), saved[head_activation::input],
                    saved[head_activation::norm_statistics], weights.data(), gradients.data(),
                    gradients.data() + shape_.width);
      return;
    }
    if (part.ends_tensor) loss_backward(logits, saved[head_activation::probabilities], targets);
    products_backward(part, saved[head_activation::norm], logits, narrow(), weights, gradients);
  }

  /// The gradients of logits.
  void loss_backward(matrix<T> logits, matrix<const T> probabilities,
                     std::span<const std::uint8_t> targets) noexcept {
    const T share = loss_scale_ / static_cast<T>(shape_.tokens());
    team_->slices(logits.rows, 1, [&](std::size_t first, std::size_t end, std::size_t) {
      for (std::size_t i = first; i < end; ++i) {
        for (std::size_t j = 0; j < vocabulary; ++j)
          logits.row(i)[j] = probabilities.row(i)[j] * share;
        logits.row(i)[targets[i]] -= share;
      }
    });
  }

  void backward_block(const layer_part& part, std::span<const T> weights, std::span<const T> record,
                      std::span<T> gradients) noexcept {
    using enum block_tensor;
    using enum block_activation;
    const layer_view<const T> saved(record, activations(part.layer));
    const matrix<T> out = gradient();  // of the block's output, then of `middle`, then of its input
    const matrix<T> within = wide(shape_.inner());
    const matrix<T> of_qkv = wide(3 * shape_.width);
    switch (static_cast<block_tensor>(part.tensor)) {
      case contract_weight:
        products_backward(part, saved[activated], out, within, weights, gradients);
        break;
      case contract_bias:
        column_sums(gradients.data(), out);
        gelu_backward(within, saved[expanded]);
        break;
      case expand_weight:
        products_backward(part, saved[norm2], within, narrow(), weights, gradients);
        break;
      case expand_bias:
        column_sums(gradients.data(), within);
        break;
      case norm2_scale:
        norm_backward(gradient(), narrow(), saved[middle], saved[norm2_statistics], weights.data(),
                      gradients.data(), gradients.data() + shape_.width);
        break;
      case project_weight:
        products_backward(part, saved[attended], out, narrow(), weights, gradients);
        break;
      case project_bias:
        column_sums(gradients.data(), out);
        attention_backward(of_qkv, narrow(), saved[qkv], saved[probabilities]);
        break;
      case qkv_weight:
        products_backward(part, saved[norm1], of_qkv, narrow(), weights, gradients);
        break;
      case qkv_bias:
        column_sums(gradients.data(), of_qkv);
        break;
      case norm1_scale:
        norm_backward(gradient(), narrow(), saved[input], saved[norm1_statistics], weights.data(),
                      gradients.data(), gradients.data() + shape_.width);
        break;
      case norm1_shift:  // with the scale
      case norm2_shift:
        break;
    }
  }

  T loss_scale_ = 1;
  host_values<T, Space> stream_values_;
  host_values<T, Space> gradient_values_;
  host_values<T, Space> narrow_values_;
  host_values<T, Space> wide_values_;
  host_values<T, Space> scratch_values_;
  std::optional<host_values<T, Space>> update_values_{};
  std::vector<std::vector<layer_part>> parts_;  // of blocks and head, each matrix in one tile
  std::vector<layer_layout> parameters_;
  std::vector<layer_layout> activations_;
};

}  // namespace train_gpt
