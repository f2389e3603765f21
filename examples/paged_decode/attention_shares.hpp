/// @file
/// The shares of a row in attention: the same for all caches here, so that sums have the same order.
#pragma once

#include <llmmem/kernels/paged_attention.hpp>

#include <cmath>
#include <cstdint>

#include "paged_decode/model.hpp"

namespace paged_decode {

/// Tokens of a share: few enough that the example's short sequences have several.
inline constexpr std::uint32_t share_tokens = 32;

/// @param most_tokens  of a sequence. The shares depend only on this, and not on the batch.
[[nodiscard]] inline llmmem::attention_options attention_of(const model_config& config, std::uint32_t layer,
                                                            std::uint64_t most_tokens) {
  const auto shares = static_cast<std::uint32_t>((most_tokens + share_tokens - 1) / share_tokens);
  const auto key = static_cast<float>(config.head_dim + config.rotary_dim);
  return {.query_heads = config.query_heads,
          .element = llmmem::dtype::f32,
          .scale = config.has_latents() ? 1 / std::sqrt(key) : 0,  // of a head before absorption
          .window = config.window_of(layer),
          .split = {.tokens = share_tokens, .count = shares}};
}

}  // namespace paged_decode
