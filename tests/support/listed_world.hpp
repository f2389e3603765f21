/// @file
/// Worlds whose rows attend to lists of tokens, and the same tokens as sequences of their own.
#pragma once

#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/kernels/token_lists.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "support/attention_world.hpp"

namespace llmmem_tests {

/// Lists that are all of some rows'.
struct listed_rows {
  const std::vector<std::int32_t>& listed;
  std::int32_t stride;

  template <class Tables>
  [[nodiscard]] llmmem::token_lists<Tables> lists_over(const Tables& tables) const {
    return {.tables = tables,
            .listed = listed.data(),
            .stride = stride,
            .num_sequences = tables.num_sequences,
            .block_tokens = tables.block_tokens};
  }
};

/// A world and lists of its tokens, in any order.
struct listed_world {
  attention_world world;
  attention_world dense;  // each row a sequence of its tokens
  std::vector<std::int32_t> of_row{};
  std::vector<std::int32_t> listed{};
  std::vector<std::int32_t> counts{};
  std::int32_t stride = 0;

  explicit listed_world(std::mt19937_64& random, llmmem::attention_arithmetic arithmetic = {})
      : world(random, arithmetic), dense(world) {
    world.options.window = 0;
    of_row = world.sequences;
    if (of_row.empty()) {
      of_row.resize(world.rows);
      std::iota(of_row.begin(), of_row.end(), 0);
    }
    for (std::int32_t& each : of_row)
      each = std::max(each, 0);
    std::vector<std::vector<std::int32_t>> lists;
    for (const std::int32_t sequence : of_row) {
      std::vector<std::int32_t> all(
          static_cast<std::size_t>(world.tokens[static_cast<std::size_t>(sequence)]));
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random);
      if (!all.empty()) all.resize(1 + random() % all.size());
      if (random() % 2 == 0) std::sort(all.begin(), all.end());
      lists.push_back(all);
      stride = std::max(stride, static_cast<std::int32_t>(all.size()));
    }
    stride += static_cast<std::int32_t>(random() % 3);
    for (const auto& list : lists) {
      // Half of them tell how many there are, the others have padding behind.
      counts.push_back(random() % 2 == 0 ? static_cast<std::int32_t>(list.size()) : stride);
      listed.insert(listed.end(), list.begin(), list.end());
      listed.insert(listed.end(), static_cast<std::size_t>(stride) - list.size(), -1);
    }
    make_dense(lists);
  }

  /// Its lists over tables of the sequences.
  template <class Tables>
  [[nodiscard]] llmmem::token_lists<Tables> lists_over(const Tables& tables) const {
    return {.tables = tables,
            .of_row = of_row.data(),
            .listed = listed.data(),
            .counts = counts.data(),
            .stride = stride,
            .num_sequences = static_cast<std::int32_t>(world.rows),
            .block_tokens = tables.block_tokens};
  }

 private:
  void make_dense(const std::vector<std::vector<std::int32_t>>& lists) {
    dense.options.window = 0;
    dense.sequences.clear();
    dense.lengths.clear();
    dense.tokens.clear();
    dense.tables.clear();
    std::int32_t next = 0;
    for (const auto& list : lists) {
      dense.tokens.push_back(static_cast<std::int32_t>(list.size()));
      dense.tables.emplace_back();
      for (std::size_t at = 0; at < list.size(); at += dense.layout.block_tokens)
        dense.tables.back().push_back(next++);
    }
    dense.blocks = static_cast<std::uint64_t>(next) + 1;
    dense.cache.assign(dense.layout.total_bytes(dense.blocks), std::byte{0xFF});  // NaNs
    for (std::size_t row = 0; row < lists.size(); ++row) {
      for (std::size_t i = 0; i < lists[row].size(); ++i) {
        for (std::uint32_t p = 0; p < 2; ++p)
          for (std::uint32_t h = 0; h < world.layout.heads; ++h)
            std::memcpy(dense.cache.data() +
                            dense.place(p, static_cast<std::int32_t>(row), static_cast<std::int64_t>(i), h),
                        world.cache.data() + world.place(p, of_row[row], lists[row][i], h),
                        world.layout.vector_bytes(p));
      }
    }
    dense.flatten();
  }
};

}  // namespace llmmem_tests
