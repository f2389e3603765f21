/// @file
/// Ranks of a model that is split by tensor and context parallelism: their layouts, memory and contents.
#pragma once

#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/kv_memory.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "support/kv_forms_world.hpp"
#include "support/random.hpp"

namespace llmmem_tests {

/// The memory of one rank, and its blocks of one sequence.
struct rank_memory {
  llmmem::kv_layout layout;
  std::uint64_t blocks = 0;
  std::vector<std::byte> bytes;
  std::vector<llmmem::block_id> table;
  std::vector<std::byte*> planes;  // where each layer's plane begins; empty: one allocation

  rank_memory(const llmmem::kv_layout& of, std::uint64_t tokens, random_numbers& random)
      : layout(of), blocks(2 * (tokens / of.block_tokens + 2)), bytes(of.total_bytes(blocks)) {
    for (std::uint32_t i = 1; i < blocks; ++i)
      table.push_back(llmmem::block_id{i});
    for (std::size_t i = table.size(); i > 1; --i)
      std::swap(table[i - 1], table[static_cast<std::size_t>(random.below(i))]);
    table.resize((of.part.local_tokens(tokens) + of.block_tokens - 1) / of.block_tokens);
    if (random.below(std::uint32_t{2}) == 0) return;
    for (std::uint32_t p = 0; p < of.planes(); ++p) {
      const llmmem::plane_strides strides = of.strides(p, blocks);
      for (std::uint32_t layer = 0; layer < of.layers; ++layer)
        planes.push_back(bytes.data() + strides.offset(layer, 0, 0, 0));
    }
  }
  [[nodiscard]] llmmem::kv_memory memory() {
    if (planes.empty()) return {.data = bytes.data(), .blocks = blocks, .layout = layout};
    return {.blocks = blocks, .layout = layout, .plane_table = planes.data()};
  }
  /// The head of the model that is `head` here.
  [[nodiscard]] std::uint64_t model_head(std::uint64_t head) const {
    const kv_part_of part{layout};
    return part.first_head + head;
  }

  /// Calls `visit(bytes, plane, token, model head)` for each vector of the first `tokens` tokens in a layer.
  template <class Visit>
  void each_vector(std::uint32_t layer, std::uint64_t tokens, Visit&& visit) {
    for (std::uint64_t token = 0; token < tokens; ++token) {
      if (layout.part.cp_rank_of(token) != layout.part.cp_rank) continue;
      const std::uint64_t local = layout.part.local_of(token);
      const auto block = llmmem::to_index(table.at(static_cast<std::size_t>(local / layout.block_tokens)));
      for (std::uint32_t p = 0; p < layout.planes(); ++p) {
        const bool is_common = layout.role_of(p) >= llmmem::paging::plane_role::index_key;
        const llmmem::kv_plane plane = llmmem::kv_plane_of(memory(), p);
        for (std::uint64_t head = 0; head < layout.heads_of(p); ++head) {
          std::byte* const at = llmmem::plane_base(plane, layer) +
                                plane.strides.offset(0, block, local % layout.block_tokens, head);
          visit(std::span(at, static_cast<std::size_t>(layout.vector_bytes(p))), p, token,
                is_common ? 0 : model_head(head));
        }
      }
    }
  }

 private:
  struct kv_part_of {
    std::uint64_t first_head;
    explicit kv_part_of(const llmmem::kv_layout& of) {
      const bool is_repeated = of.part.heads_of_model != 0 && of.part.heads_of_model < of.part.tp_size;
      const std::uint64_t ranks_of_a_head = is_repeated ? of.part.tp_size / of.part.heads_of_model : 1;
      first_head = of.part.tp_rank / ranks_of_a_head * of.heads;
    }
  };
};

/// What a vector of the model holds.
inline std::vector<std::byte> contents(std::size_t bytes, std::uint32_t layer, std::uint32_t plane,
                                       std::uint64_t token, std::uint64_t head) {
  random_numbers random(((layer * 16 + plane) * 1000 + token) * 100 + head);
  std::vector<std::byte> out(bytes);
  for (std::byte& each : out)
    each = std::byte(1 + random.below(std::uint32_t{255}));
  return out;
}

/// The layouts of all ranks of one side.
inline std::vector<llmmem::kv_layout> split(llmmem::kv_layout model, std::uint32_t tp, std::uint32_t cp,
                                            std::uint32_t interleave) {
  std::vector<llmmem::kv_layout> all;
  const std::uint32_t heads = model.heads;
  model.heads = heads >= tp ? heads / tp : 1;
  model.part = {.tp_size = tp, .heads_of_model = heads, .cp_size = cp, .cp_interleave = interleave};
  for (std::uint32_t c = 0; c < cp; ++c) {
    for (std::uint32_t t = 0; t < tp; ++t) {
      model.part.tp_rank = t;
      model.part.cp_rank = c;
      all.push_back(model.checked());
    }
  }
  return all;
}

inline bool is_per_token(const llmmem::kv_layout& of) {
  return std::ranges::all_of(std::array{of.key_scales, of.value_scales, of.index_scales},
                             [](const auto& each) {
                               return each.group != llmmem::paging::scale_group::channel && !each.has_global;
                             });
}

/// A model, and a side of its ranks.
inline std::vector<llmmem::kv_layout> any_side(const llmmem::kv_layout& model, random_numbers& random) {
  llmmem::kv_layout of = rearranged(model, random);
  const std::uint32_t cp = 1 + random.below(std::uint32_t{3});
  const std::uint32_t interleave = 1 + random.below(std::uint32_t{3});
  of.block_tokens = interleave * (1 + random.below(std::uint32_t{4}));
  std::uint32_t tp = 1U << random.below(std::uint32_t{4});
  while (of.heads >= tp ? of.heads % tp != 0 : tp % of.heads != 0)
    tp /= 2;
  return split(of, tp, cp, interleave);
}

/// A side of at most `most` ranks.
inline std::vector<llmmem::kv_layout> small_side(const llmmem::kv_layout& model, std::size_t most,
                                                 random_numbers& random) {
  std::vector<llmmem::kv_layout> all = any_side(model, random);
  while (all.size() > most)
    all = any_side(model, random);
  return all;
}

/// A small model whose scales, if any, are of single tokens, with 1, 2, 4 or 8 heads.
inline llmmem::kv_layout any_split_model(random_numbers& random) {
  llmmem::kv_layout model = any_forms(random);
  while (!is_per_token(model))
    model = any_forms(random);
  model.heads = 1U << random.below(std::uint32_t{4});
  return model;
}

}  // namespace llmmem_tests
