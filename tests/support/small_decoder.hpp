/// @file
/// A model of two layers over small blocks, for tests of paged_decode.
#pragma once

#include "paged_decode/comparison.hpp"

namespace llmmem_tests {

/// Two layers, four query heads of two cached heads of 32 elements, a window of 16 tokens; blocks of four
/// tokens.
inline paged_decode::experiment small_decoder() {
  paged_decode::experiment what{.with_errors = false};
  what.shape = {.layers = 2,
                .query_heads = 4,
                .kv_heads = 2,
                .head_dim = 32,
                .hidden = 32,
                .inner = 32,
                .vocabulary = 16,
                .window = 16};
  what.cache.block_tokens = 4;
  return what;
}

/// The same with latents: records of 32 and 8 rotary elements; heads of 16 elements.
inline paged_decode::experiment small_latents() {
  paged_decode::experiment what = small_decoder();
  what.shape.latents = 32;
  what.shape.rotary_dim = 8;
  what.shape.head_dim = 16;
  what.shape.value_dim = 16;
  return what;
}

}  // namespace llmmem_tests
