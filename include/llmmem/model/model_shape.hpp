/// @file
/// The shape of a transformer, and the exact numbers that follow from it: parameters and bytes of KV cache.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// Two matrices (up, down), or three (gate, up, down).
enum class mlp_kind : std::uint8_t { plain, gated };
/// LayerNorm keeps a scale and a shift, RMSNorm a scale only.
enum class norm_kind : std::uint8_t { layer, rms };
/// Which linear layers carry a bias: none, the query/key/value projections, or every one.
enum class bias_kind : std::uint8_t { none, qkv, all };
/// Learned positions are a table of `context` rows; rotary ones take no parameters.
enum class position_kind : std::uint8_t { learned, rotary };
/// Whether the output head shares the input embedding, or has its own table.
enum class output_kind : std::uint8_t { tied, separate };
/// A bias for each expert's score that is corrected, not learned (DeepSeek's `e_score_correction_bias`).
enum class router_kind : std::uint8_t { plain, score_correction };

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are kept as one
/// vector of `kv_rank` that all heads share, plus one rotary key of `rope_width`. Absent when `kv_rank` is 0.
struct latent_attention {
  std::uint64_t q_rank = 0;       ///< width of the compressed query; 0: the query is projected directly
  std::uint64_t kv_rank = 0;      ///< width of the compressed key and value
  std::uint64_t nope_width = 0;   ///< part of a head's key without position
  std::uint64_t rope_width = 0;   ///< part of a head's key with position, shared by the heads
  std::uint64_t value_width = 0;  ///< width of a head's value
};

/// Mixture of experts in place of the MLP. Absent when `count` is 0.
struct expert_mix {
  std::uint64_t count = 0;         ///< routed experts of a layer
  std::uint64_t active = 0;        ///< routed experts that a token visits
  std::uint64_t shared = 0;        ///< experts that every token visits
  std::uint64_t intermediate = 0;  ///< inner width of one expert
  std::uint64_t dense_layers = 0;  ///< first layers that keep an ordinary MLP
  router_kind router = router_kind::plain;
};

/// A decoder-only transformer, by the numbers of its published configuration. An aggregate: engines define
/// their own with designated initialisers and call `validate` once.
///
/// Everything is `constexpr` and exact integer arithmetic; a product that passes 2^63 - 1 is a
/// `length_error`, at compile time a failed compilation.
///
/// @par Complexity   O(1), no loop over layers.
/// @par Thread safety   a plain value.
struct model_shape {
  std::string_view name =
      "unnamed";                 ///< as command lines write it; refers to a literal or outlives the shape
  std::uint64_t vocabulary = 0;  ///< rows of the embedding table, padding rows of the checkpoint included
  std::uint64_t hidden = 0;      ///< width of the residual stream
  std::uint64_t layers = 0;
  std::uint64_t heads = 0;         ///< query heads
  std::uint64_t kv_heads = 0;      ///< key/value heads; `heads` is MHA, 1 is MQA, between is GQA
  std::uint64_t head_width = 0;    ///< elements of one head
  std::uint64_t intermediate = 0;  ///< inner width of the MLP (of the dense layers, with experts)
  std::uint64_t context = 0;       ///< most tokens of a sequence
  mlp_kind mlp = mlp_kind::gated;
  norm_kind norm = norm_kind::rms;
  bias_kind bias = bias_kind::none;
  position_kind position = position_kind::rotary;
  output_kind output = output_kind::separate;
  latent_attention latent{};
  expert_mix experts{};

  /// @name Parameters
  /// All in elements, not bytes. The totals are what a checkpoint of the model holds, without rotary tables,
  /// quantisation scales and multi-token prediction modules.
  /// @{

  /// Returns the number of all parameters of the model.
  [[nodiscard]] constexpr std::uint64_t parameters() const;

  /// Returns those that one token uses: all except the routed experts it does not visit. The input embedding
  /// and the output head are counted in full, as in Mixtral's 12.9 B; DeepSeek's 36.6 B leaves the first one
  /// out: subtract `embedding_parameters()`.
  [[nodiscard]] constexpr std::uint64_t active_parameters() const;

  /// Returns the parameters of the input embedding table.
  [[nodiscard]] constexpr std::uint64_t embedding_parameters() const {
    return checked_multiply(vocabulary, hidden, "model_shape: vocabulary x hidden");
  }

  /// Returns the parameters of one layer's attention: projections, their biases, and the norms of latent
  /// attention.
  [[nodiscard]] constexpr std::uint64_t attention_parameters() const;

  /// Returns the parameters of one MLP of inner width `inner`: the layer's own, or one expert.
  [[nodiscard]] constexpr std::uint64_t mlp_parameters(std::uint64_t inner) const;
  /// @}

  /// @name KV cache
  /// @{

  /// Returns the elements of one token in one layer's cache: a key and a value for each key/value head, or
  /// with latent attention the compressed vector and the rotary key.
  [[nodiscard]] constexpr std::uint64_t kv_elements_per_layer() const {
    if (latent.kv_rank != 0) return checked_add(latent.kv_rank, latent.rope_width, "model_shape: latent KV");
    return checked_multiply(2, checked_multiply(kv_heads, head_width, "model_shape: kv_heads x head_width"),
                            "model_shape: keys and values");
  }

  /// Returns the bytes of one token in the caches of all layers.
  [[nodiscard]] constexpr std::uint64_t kv_bytes_per_token(dtype type = dtype::bf16) const {
    return bytes_of(checked_multiply(kv_elements_per_layer(), layers, "model_shape: KV elements x layers"),
                    type);
  }

  /// Returns the bytes of a block of `tokens` tokens over all layers: what a paged cache allocates at a time.
  [[nodiscard]] constexpr std::uint64_t kv_bytes_per_block(std::uint64_t tokens,
                                                           dtype type = dtype::bf16) const {
    return checked_multiply(kv_bytes_per_token(type), tokens, "model_shape: KV bytes x tokens per block");
  }

  /// Returns the bytes of a layer's input divided by the bytes of its KV, in the same type. Below 1 it pays
  /// to store hidden states and project them again (HCache, arXiv 2410.05004); with grouped heads it is above
  /// 1 and does not.
  [[nodiscard]] constexpr double hidden_over_kv() const {
    return static_cast<double>(hidden) / static_cast<double>(kv_elements_per_layer());
  }
  /// @}

  /// Refuses a shape that no transformer has.
  /// @throws argument_error  naming the field and its value.
  constexpr void validate() const;

 private:
  [[nodiscard]] constexpr std::uint64_t norm_parameters() const {
    return norm == norm_kind::layer ? checked_multiply(2, hidden, "model_shape: norm") : hidden;
  }
  [[nodiscard]] constexpr std::uint64_t count_parameters(std::uint64_t routed_experts) const;
};

constexpr std::uint64_t model_shape::attention_parameters() const {
  const auto times = [](std::uint64_t a, std::uint64_t b) {
    return checked_multiply(a, b, "model_shape: attention");
  };
  const auto plus = [](std::uint64_t a, std::uint64_t b) {
    return checked_add(a, b, "model_shape: attention");
  };
  if (latent.kv_rank != 0) {
    const std::uint64_t query_width = times(heads, plus(latent.nope_width, latent.rope_width));
    const std::uint64_t query = latent.q_rank == 0 ? times(hidden, query_width)
                                                   : plus(plus(times(hidden, latent.q_rank), latent.q_rank),
                                                          times(latent.q_rank, query_width));
    const std::uint64_t down = plus(times(hidden, plus(latent.kv_rank, latent.rope_width)), latent.kv_rank);
    const std::uint64_t up = times(latent.kv_rank, times(heads, plus(latent.nope_width, latent.value_width)));
    return plus(plus(query, down), plus(up, times(times(heads, latent.value_width), hidden)));
  }
  const std::uint64_t q_width = times(heads, head_width);
  const std::uint64_t qkv_width = plus(q_width, times(2, times(kv_heads, head_width)));
  std::uint64_t total = plus(times(hidden, qkv_width), times(q_width, hidden));
  if (bias != bias_kind::none) total = plus(total, qkv_width);
  if (bias == bias_kind::all) total = plus(total, hidden);
  return total;
}

constexpr std::uint64_t model_shape::mlp_parameters(std::uint64_t inner) const {
  const std::uint64_t matrices = mlp == mlp_kind::gated ? 3 : 2;
  const std::uint64_t matrix = checked_multiply(hidden, inner, "model_shape: hidden x intermediate");
  std::uint64_t total = checked_multiply(matrices, matrix, "model_shape: MLP");
  if (bias == bias_kind::all) {
    const std::uint64_t in = checked_multiply(matrices - 1, inner, "model_shape: MLP biases");
    total = checked_add(total, checked_add(in, hidden, "model_shape: MLP biases"), "model_shape: MLP");
  }
  return total;
}

constexpr std::uint64_t model_shape::count_parameters(std::uint64_t routed_experts) const {
  const auto times = [](std::uint64_t a, std::uint64_t b) {
    return checked_multiply(a, b, "model_shape: parameters");
  };
  const auto plus = [](std::uint64_t a, std::uint64_t b) {
    return checked_add(a, b, "model_shape: parameters");
  };
  const std::uint64_t dense_layers =
      experts.count == 0 || experts.dense_layers > layers ? layers : experts.dense_layers;
  const std::uint64_t norms = times(2, norm_parameters());
  std::uint64_t total = times(layers, plus(attention_parameters(), norms));
  total = plus(total, times(dense_layers, mlp_parameters(intermediate)));
  if (dense_layers != layers) {
    const std::uint64_t visited = plus(routed_experts, experts.shared);
    std::uint64_t layer =
        plus(times(visited, mlp_parameters(experts.intermediate)), times(experts.count, hidden));
    if (experts.router == router_kind::score_correction) layer = plus(layer, experts.count);
    total = plus(total, times(layers - dense_layers, layer));
  }
  total = plus(total, norm_parameters());
  total = plus(total, embedding_parameters());
  if (output == output_kind::separate) total = plus(total, embedding_parameters());
  if (position == position_kind::learned) total = plus(total, times(context, hidden));
  return total;
}

constexpr std::uint64_t model_shape::parameters() const {
  return count_parameters(experts.count);
}

constexpr std::uint64_t model_shape::active_parameters() const {
  return count_parameters(experts.active);
}

constexpr void model_shape::validate() const {
  const auto refuse = [this](const std::string& why) {
    throw argument_error("model_shape " + std::string(name) + ": " + why);
  };
  const auto positive = [&](std::uint64_t value, const char* field) {
    if (value == 0) refuse(std::string(field) + " is 0; the model's configuration file has it");
  };
  positive(vocabulary, "vocabulary");
  positive(hidden, "hidden");
  positive(layers, "layers");
  positive(heads, "heads");
  positive(context, "context");
  if (latent.kv_rank == 0) {
    positive(kv_heads, "kv_heads");
    positive(head_width, "head_width");
    if (heads % kv_heads != 0) {
      refuse("kv_heads " + std::to_string(kv_heads) + " does not divide heads " + std::to_string(heads));
    }
  } else {
    positive(latent.rope_width, "latent.rope_width");
    positive(latent.value_width, "latent.value_width");
  }
  if (experts.count == 0 || experts.dense_layers != 0) positive(intermediate, "intermediate");
  if (experts.count != 0) {
    positive(experts.active, "experts.active");
    positive(experts.intermediate, "experts.intermediate");
    if (experts.active > experts.count) {
      refuse("experts.active " + std::to_string(experts.active) + " exceeds experts.count " +
             std::to_string(experts.count));
    }
    if (experts.dense_layers > layers) {
      refuse("experts.dense_layers " + std::to_string(experts.dense_layers) + " exceeds layers " +
             std::to_string(layers));
    }
  }
  static_cast<void>(parameters());
  static_cast<void>(kv_bytes_per_token(dtype::f64));
}

}  // namespace v0
}  // namespace llmmem
