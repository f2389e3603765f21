/// @file
/// A model that ranks split: their layouts, and keys that follow from the tokens, so that each one can be
/// checked.
#pragma once

#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/kv_memory.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kv_pool/command_line.hpp"
#include "kv_pool/prompts.hpp"
#include "replay_trace/random.hpp"

namespace kv_pool_example {

/// The layouts of all ranks of one role. Both roles have the same model in other orders and blocks.
[[nodiscard]] inline std::vector<llmmem::kv_layout> layouts_of(const command_line& asked,
                                                               const kv_split& split,
                                                               llmmem::block_order order) {
  std::vector<llmmem::kv_layout> all;
  for (std::uint32_t rank = 0; rank < split.ranks(); ++rank) {
    all.push_back(
        {.layers = layers,
         .heads = heads_of_model / split.tp,
         .head_dim = static_cast<std::uint32_t>(asked.block_bytes / (block_tokens * layers * heads_of_model)),
         .block_tokens = split.block,
         .has_values = false,
         .element = llmmem::dtype::int8,
         .order = order,
         .part = {.tp_rank = rank % split.tp,
                  .tp_size = split.tp,
                  .cp_rank = rank / split.tp,
                  .cp_size = split.cp,
                  .cp_interleave = split.interleave}});
  }
  return all;
}

/// Returns a number for each token, which follows from all tokens up to it.
[[nodiscard]] inline std::vector<std::uint64_t> digests_of(std::span<const llmmem::token_id> tokens) {
  std::vector<std::uint64_t> all;
  std::uint64_t state = 0;
  for (const llmmem::token_id token : tokens)
    all.push_back(state = replay_trace::splitmix64(state ^ static_cast<std::uint64_t>(token)).next());
  return all;
}

/// The keys of one rank, in its memory of blocks.
class rank_keys {
 public:
  rank_keys(const llmmem::kv_layout& layout, std::uint64_t blocks)
      : bytes_(layout.total_bytes(blocks)),
        memory_{.data = bytes_.data(), .blocks = blocks, .layout = layout} {}

  [[nodiscard]] const llmmem::kv_memory& memory() const noexcept { return memory_; }

  /// Replaces the kernels of one layer: writes the keys of tokens that this rank holds.
  void compute(std::uint32_t layer, llmmem::token_range range, std::span<const std::uint64_t> digests,
               std::span<const llmmem::block_id> blocks) {
    each_key(layer, range, digests, blocks, [&](std::byte* at, std::span<const std::byte> key, std::size_t) {
      std::memcpy(at, key.data(), key.size());
    });
  }
  /// Sets `is_wrong` of each block in which a byte of the layer is not what `compute` writes.
  void check(std::uint32_t layer, llmmem::token_range range, std::span<const std::uint64_t> digests,
             std::span<const llmmem::block_id> blocks, std::vector<bool>& is_wrong) {
    each_key(layer, range, digests, blocks,
             [&](std::byte* at, std::span<const std::byte> key, std::size_t block) {
               if (std::memcmp(at, key.data(), key.size()) != 0) is_wrong[block] = true;
             });
  }

 private:
  template <class F>
  void each_key(std::uint32_t layer, llmmem::token_range range, std::span<const std::uint64_t> digests,
                std::span<const llmmem::block_id> blocks, F&& f) {
    const llmmem::kv_layout& layout = memory_.layout;
    const llmmem::kv_plane plane = llmmem::kv_plane_of(memory_, 0);
    std::vector<std::byte> key(static_cast<std::size_t>(layout.vector_bytes(0)));
    for (std::uint64_t token = range.first; token < range.end; ++token) {
      if (layout.part.cp_rank_of(token) != layout.part.cp_rank) continue;
      const std::uint64_t local = layout.part.local_of(token);
      const auto block = static_cast<std::size_t>(local / layout.block_tokens);
      for (std::uint32_t head = 0; head < layout.heads; ++head) {
        const std::uint64_t of_model = layout.part.tp_rank * layout.heads + head;
        replay_trace::splitmix64 words(digests[static_cast<std::size_t>(token)] + layer * heads_of_model +
                                       of_model);
        for (std::size_t at = 0; at < key.size(); at += 8) {
          const std::uint64_t word = words.next();
          std::memcpy(key.data() + at, &word, std::min<std::size_t>(8, key.size() - at));
        }
        std::byte* const at =
            llmmem::plane_base(plane, layer) +
            plane.strides.offset(0, llmmem::to_index(blocks[block]), local % layout.block_tokens, head);
        f(at, key, block);
      }
    }
  }

  std::vector<std::byte> bytes_;
  llmmem::kv_memory memory_;
};

}  // namespace kv_pool_example
