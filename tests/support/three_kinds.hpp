/// @file
/// A `hybrid_allocator` of three kinds of layer, few enough blocks to count by hand.
#pragma once

#include <llmmem/paging/hybrid_allocator.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/tokens.hpp"

namespace llmmem_tests {

inline std::vector<llmmem::token_id> count_up(llmmem::token_id first, std::size_t count) {
  return tokens(count, first);
}

// Blocks of 4 tokens: full attention 40 bytes, a window of 6 tokens 100 bytes; a state of 300 bytes every 8.
inline const std::array three_kinds{llmmem::full_attention({"full", 1, 10, 4}),
                                    llmmem::sliding_window({"local", 1, 25, 4}, 6),
                                    llmmem::state_snapshots("mamba", 1, 300, 8)};

inline llmmem::hybrid_allocator<> small_cache(std::uint64_t pages = 32) {
  return llmmem::hybrid_allocator<>({.groups = three_kinds,
                                     .budget_bytes = (pages + 1) * 300,
                                     .page_bytes = 300,
                                     .max_sequences = 4,
                                     .max_sequence_tokens = 100,
                                     .name = "kv"});
}

}  // namespace llmmem_tests
