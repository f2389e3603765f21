/// @file
/// Shapes of well-known models, by their published configurations, and a lookup by command-line name.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/model_shape.hpp>

#include <array>
#include <span>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// One constant per model. tests/model/presets_test.cpp checks every parameter count against the published
/// checkpoint; docs/model_shapes.md is the table.
namespace models {

/// GPT-2 small (Radford et al. 2019): 124 M, as the checkpoint counts; the report's "117 M" was a slip.
inline constexpr model_shape gpt2_124m{.name = "gpt2-124m",
                                       .vocabulary = 50257,
                                       .hidden = 768,
                                       .layers = 12,
                                       .heads = 12,
                                       .kv_heads = 12,
                                       .head_width = 64,
                                       .intermediate = 3072,
                                       .context = 1024,
                                       .mlp = mlp_kind::plain,
                                       .norm = norm_kind::layer,
                                       .bias = bias_kind::all,
                                       .position = position_kind::learned,
                                       .output = output_kind::tied};

/// Llama 2 7B (arXiv 2307.09288).
inline constexpr model_shape llama2_7b{.name = "llama2-7b",
                                       .vocabulary = 32000,
                                       .hidden = 4096,
                                       .layers = 32,
                                       .heads = 32,
                                       .kv_heads = 32,
                                       .head_width = 128,
                                       .intermediate = 11008,
                                       .context = 4096};

/// Llama 2 13B.
inline constexpr model_shape llama2_13b{.name = "llama2-13b",
                                        .vocabulary = 32000,
                                        .hidden = 5120,
                                        .layers = 40,
                                        .heads = 40,
                                        .kv_heads = 40,
                                        .head_width = 128,
                                        .intermediate = 13824,
                                        .context = 4096};

/// Llama 2 70B, the one with grouped heads.
inline constexpr model_shape llama2_70b{.name = "llama2-70b",
                                        .vocabulary = 32000,
                                        .hidden = 8192,
                                        .layers = 80,
                                        .heads = 64,
                                        .kv_heads = 8,
                                        .head_width = 128,
                                        .intermediate = 28672,
                                        .context = 4096};

/// Llama 3 8B (arXiv 2407.21783, Table 3). Llama 3.1 differs only by a context of 131072.
inline constexpr model_shape llama3_8b{.name = "llama3-8b",
                                       .vocabulary = 128256,
                                       .hidden = 4096,
                                       .layers = 32,
                                       .heads = 32,
                                       .kv_heads = 8,
                                       .head_width = 128,
                                       .intermediate = 14336,
                                       .context = 8192};

/// Llama 3 70B. Llama 3.1 differs only by a context of 131072.
inline constexpr model_shape llama3_70b{.name = "llama3-70b",
                                        .vocabulary = 128256,
                                        .hidden = 8192,
                                        .layers = 80,
                                        .heads = 64,
                                        .kv_heads = 8,
                                        .head_width = 128,
                                        .intermediate = 28672,
                                        .context = 8192};

/// Llama 3 405B, released as 3.1. Its first upload stored 16 key/value heads, each of the 8 twice: that is a
/// checkpoint for a 16-way split, not the model.
inline constexpr model_shape llama3_405b{.name = "llama3-405b",
                                         .vocabulary = 128256,
                                         .hidden = 16384,
                                         .layers = 126,
                                         .heads = 128,
                                         .kv_heads = 8,
                                         .head_width = 128,
                                         .intermediate = 53248,
                                         .context = 131072};

/// Mixtral 8x7B (arXiv 2401.04088): two of eight experts per token.
inline constexpr model_shape mixtral_8x7b{.name = "mixtral-8x7b",
                                          .vocabulary = 32000,
                                          .hidden = 4096,
                                          .layers = 32,
                                          .heads = 32,
                                          .kv_heads = 8,
                                          .head_width = 128,
                                          .intermediate = 14336,
                                          .context = 32768,
                                          .experts = {.count = 8, .active = 2, .intermediate = 14336}};

/// DeepSeek-V3 (arXiv 2412.19437), without its multi-token prediction module: latent attention; eight of 256
/// routed experts and one shared one per token; the first three layers are dense.
inline constexpr model_shape deepseek_v3{
    .name = "deepseek-v3",
    .vocabulary = 129280,
    .hidden = 7168,
    .layers = 61,
    .heads = 128,
    .kv_heads = 128,
    .head_width = 192,
    .intermediate = 18432,
    .context = 163840,
    .latent = {.q_rank = 1536, .kv_rank = 512, .nope_width = 128, .rope_width = 64, .value_width = 128},
    .experts = {.count = 256,
                .active = 8,
                .shared = 1,
                .intermediate = 2048,
                .dense_layers = 3,
                .router = router_kind::score_correction}};

/// Qwen2.5 7B (arXiv 2412.15115).
inline constexpr model_shape qwen2_5_7b{.name = "qwen2.5-7b",
                                        .vocabulary = 152064,
                                        .hidden = 3584,
                                        .layers = 28,
                                        .heads = 28,
                                        .kv_heads = 4,
                                        .head_width = 128,
                                        .intermediate = 18944,
                                        .context = 131072,
                                        .bias = bias_kind::qkv};

/// Qwen2.5 72B.
inline constexpr model_shape qwen2_5_72b{.name = "qwen2.5-72b",
                                         .vocabulary = 152064,
                                         .hidden = 8192,
                                         .layers = 80,
                                         .heads = 64,
                                         .kv_heads = 8,
                                         .head_width = 128,
                                         .intermediate = 29568,
                                         .context = 131072,
                                         .bias = bias_kind::qkv};

/// All of them, in the order above.
inline constexpr std::array all{gpt2_124m,   llama2_7b,    llama2_13b,  llama2_70b, llama3_8b,  llama3_70b,
                                llama3_405b, mixtral_8x7b, deepseek_v3, qwen2_5_7b, qwen2_5_72b};

}  // namespace models

/// Returns every preset, for tables and `--model` help.
[[nodiscard]] constexpr std::span<const model_shape> all_models() noexcept {
  return models::all;
}

/// Returns the preset that command lines call `name`.
/// @throws argument_error  listing the known names.
[[nodiscard]] constexpr const model_shape& find_model(std::string_view name) {
  for (const model_shape& model : models::all) {
    if (model.name == name) return model;
  }
  std::string known;
  for (const model_shape& model : models::all) {
    if (!known.empty()) known += ", ";
    known += model.name;
  }
  throw argument_error("find_model: no model is called \"" + std::string(name) + "\"; known are " + known);
}

}  // namespace v0
}  // namespace llmmem
