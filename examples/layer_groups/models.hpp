/// @file
/// Layers of published models, and schemes that divide memory among them.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/model/presets.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/super_pages.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace layer_groups {

/// Layers of one kind. For attention, `bytes` are those of a token in one layer, for states those of one
/// layer's state.
struct layer_set {
  std::string_view name;
  llmmem::layer_kind kind;
  std::uint64_t layers;
  std::uint64_t bytes;
  std::uint64_t reach = 0;

  [[nodiscard]] bool is_state() const { return kind == llmmem::layer_kind::state_snapshots; }
};

struct hybrid_model {
  std::string_view name;
  std::uint64_t context;
  std::vector<layer_set> sets;
};

/// Returns the bytes of a token in one attention layer, keys and values in bf16.
[[nodiscard]] constexpr std::uint64_t kv_bytes(std::uint64_t kv_heads, std::uint64_t head_width) {
  return 2 * kv_heads * head_width * 2;
}

/// By the numbers of each model's config.json.
[[nodiscard]] inline std::vector<hybrid_model> models() {
  using enum llmmem::layer_kind;
  std::vector<hybrid_model> all;
  // google/gemma-2-9b: num_hidden_layers 42, num_key_value_heads 8, head_dim 256, sliding_window 4096 in
  // every other layer, max_position_embeddings 8192.
  all.push_back({"gemma2-9b",
                 8192,
                 {{"full", full_attention, 21, kv_bytes(8, 256)},
                  {"local", sliding_window, 21, kv_bytes(8, 256), 4096}}});
  // google/gemma-3-27b: num_hidden_layers 62, num_key_value_heads 16, head_dim 128, sliding_window 1024 in
  // five of six layers, max_position_embeddings 131072.
  all.push_back({"gemma3-27b",
                 131072,
                 {{"full", full_attention, 10, kv_bytes(16, 128)},
                  {"local", sliding_window, 52, kv_bytes(16, 128), 1024}}});
  // meta-llama/Llama-4-Scout: num_hidden_layers 48, num_key_value_heads 8, head_dim 128, attention_chunk_size
  // 8192 except in every fourth layer (no_rope_layer_interval 4); its context of 10 M is cut here.
  all.push_back({"llama4-scout",
                 131072,
                 {{"full", full_attention, 12, kv_bytes(8, 128)},
                  {"chunked", chunked_local, 36, kv_bytes(8, 128), 8192}}});
  // ai21labs/Jamba-v0.1: num_hidden_layers 32, attn_layer_period 8, num_key_value_heads 8, hidden_size 4096
  // over 32 heads, mamba_expand 2, mamba_d_state 16, mamba_d_conv 4. A state: 8192 x 3 of the convolution in
  // bf16 and 8192 x 16 in fp32.
  all.push_back({"jamba-v0.1",
                 262144,
                 {{"full", full_attention, 4, kv_bytes(8, 128)},
                  {"mamba", state_snapshots, 28, 8192 * 3 * 2 + 8192 * 16 * 4}}});
  // nvidia/Nemotron-H-8B: hybrid_override_pattern with 24 Mamba-2 and 4 attention layers of 52,
  // num_key_value_heads 8, head_dim 128, mamba_num_heads 128, mamba_head_dim 64, n_groups 8, ssm_state_size
  // 128, conv_kernel 4. A state: (8192 + 2 x 8 x 128) x 3 in bf16 and 8192 x 128 in fp32.
  all.push_back({"nemotron-h-8b",
                 131072,
                 {{"full", full_attention, 4, kv_bytes(8, 128)},
                  {"mamba", state_snapshots, 24, (8192 + 2 * 8 * 128) * 3 * 2 + 8192 * 128 * 4}}});
  // deepseek-ai/DeepSeek-V3: num_hidden_layers 61, kv_lora_rank 512, qk_rope_head_dim 64.
  constexpr auto& v3 = llmmem::models::deepseek_v3;
  all.push_back(
      {"deepseek-v3", v3.context, {{"latent", full_attention, v3.layers, v3.kv_elements_per_layer() * 2}}});
  return all;
}

/// Layers that share a block, each with its own need of it.
struct part {
  llmmem::layer_group needs;  ///< its `block_bytes` are the part's
};

/// A division of memory: groups with one block size each, in pages.
struct scheme {
  std::string_view name;
  std::vector<llmmem::layer_group> groups;
  std::vector<std::vector<part>> parts;  ///< of each group's blocks
  std::uint64_t page_bytes = 0;
};

inline constexpr std::array<std::string_view, 4> scheme_names{"super_pages", "equal_groups", "padded",
                                                              "one_table"};

namespace detail {

[[nodiscard]] inline llmmem::layer_group group_of(const layer_set& set, std::uint64_t layers,
                                                  std::uint32_t tokens) {
  return {set.name, set.kind, set.reach, tokens, layers * set.bytes * (set.is_state() ? 1 : tokens)};
}

inline void add(scheme& to, const llmmem::layer_group& group) {
  to.groups.push_back(group);
  to.parts.push_back({{group}});
}

/// Every block takes a page, regardless of its contents.
inline void pad(scheme& of) {
  for (auto& each : of.groups)
    each.block_bytes = of.page_bytes;
}

[[nodiscard]] inline std::uint64_t largest_block(const scheme& of) {
  std::uint64_t most = 0;
  for (const auto& each : of.groups)
    most = std::max(most, each.block_bytes);
  return most;
}

}  // namespace detail

struct carving {
  std::uint32_t block_tokens = 16;
  std::uint32_t snapshot_tokens = 512;
};

/// This library's scheme: a group for each kind of layer with its own block size, and pages chosen for small
/// tails.
[[nodiscard]] inline scheme super_pages(const hybrid_model& model, const carving& how) {
  scheme out{.name = "super_pages", .groups = {}, .parts = {}};
  std::vector<std::uint64_t> sizes;
  for (const layer_set& set : model.sets) {
    const auto group =
        detail::group_of(set, set.layers, set.is_state() ? how.snapshot_tokens : how.block_tokens);
    detail::add(out, group);
    sizes.push_back(group.block_bytes);
  }
  const std::uint64_t least = std::max(detail::largest_block(out), std::uint64_t{2} << 20);
  out.page_bytes = llmmem::choose_page_bytes(sizes, least, 2 * least, 2048).page_bytes;
  return out;
}

/// The same groups, each block padded to the largest.
[[nodiscard]] inline scheme padded(const hybrid_model& model, const carving& how) {
  scheme out = super_pages(model, how);
  out.name = "padded";
  out.page_bytes = detail::largest_block(out);
  detail::pad(out);
  return out;
}

/// As vLLM's hybrid groups: all groups have the number of layers of the smallest set, other sets are padded
/// to a multiple, and attention blocks have enough tokens to be at least as large as a state.
[[nodiscard]] inline scheme equal_groups(const hybrid_model& model, const carving& how) {
  scheme out{.name = "equal_groups", .groups = {}, .parts = {}};
  std::uint64_t layers = model.sets.front().layers;
  std::uint64_t token_bytes = 0;
  std::uint64_t state_bytes = 0;
  for (const layer_set& set : model.sets) {
    layers = std::min(layers, set.layers);
    (set.is_state() ? state_bytes : token_bytes) = set.bytes;
  }
  std::uint32_t tokens = how.block_tokens;
  while (tokens * token_bytes < state_bytes)
    tokens += how.block_tokens;
  for (const layer_set& set : model.sets) {
    for (std::uint64_t left = set.layers; left != 0; left -= std::min(left, layers))
      detail::add(out, detail::group_of(set, std::min(left, layers), tokens));
  }
  out.page_bytes = layers * std::max(token_bytes * tokens, state_bytes);
  detail::pad(out);
  return out;
}

/// One table for all layers, which keeps all tokens while the sequence lives. No states.
[[nodiscard]] inline scheme one_table(const hybrid_model& model, const carving& how) {
  scheme out{.name = "one_table", .groups = {}, .parts = {{}}};
  std::uint64_t bytes = 0;
  for (const layer_set& set : model.sets) {
    out.parts[0].push_back({detail::group_of(set, set.layers, how.block_tokens)});
    bytes += out.parts[0].back().needs.block_bytes;
  }
  out.groups.push_back({"all", llmmem::layer_kind::full_attention, 0, how.block_tokens, bytes});
  out.page_bytes = bytes;
  return out;
}

/// The schemes that make sense for a model.
[[nodiscard]] inline std::vector<scheme> schemes_for(const hybrid_model& model, const carving& how) {
  std::vector<scheme> out{super_pages(model, how), equal_groups(model, how), padded(model, how)};
  const bool states =
      std::any_of(model.sets.begin(), model.sets.end(), [](const layer_set& set) { return set.is_state(); });
  if (!states) out.push_back(one_table(model, how));
  return out;
}

}  // namespace layer_groups
