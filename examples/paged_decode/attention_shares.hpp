/// @file
/// The shares of a row in attention: the same for all caches here, so that sums have the same order.
#pragma once

#include <llmmem/kernels/paged_attention.hpp>

#include <cstdint>

#include "paged_decode/model.hpp"

namespace paged_decode {

/// Tokens of a share: few enough that the example's short sequences have several.
inline constexpr std::uint32_t share_tokens = 32;

/// @param most_tokens  of a sequence. The shares depend only on this, and not on the batch.
[[nodiscard]] inline llmmem::attention_options attention_of(const model_config& config, std::uint32_t layer,
                                                            std::uint64_t most_tokens) {
  const auto shares = static_cast<std::uint32_t>((most_tokens + share_tokens - 1) / share_tokens);
  return {.query_heads = config.query_heads,
          .element = llmmem::dtype::f32,
          .window = config.window_of(layer),
          .split = {.tokens = share_tokens, .count = shares}};
}

}  // namespace paged_decode
