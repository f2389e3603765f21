/// @file
/// Worlds of attention with summaries of their keys.
#pragma once

#include <llmmem/kernels/block_summary.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "support/attention_world.hpp"

namespace llmmem_tests {

struct summary_world {
  attention_world world;
  std::uint32_t columns = 0;  // blocks of a sequence that are bounded
  // Of every block that a sequence has: how many of its tokens are keys.
  std::vector<std::int32_t> blocks{};
  std::vector<std::int32_t> ends{};

  explicit summary_world(std::mt19937_64& random) : world(random) {
    columns = static_cast<std::uint32_t>(world.columns) + static_cast<std::uint32_t>(random() % 2);
    const auto block_tokens = static_cast<std::int32_t>(world.layout.block_tokens);
    for (std::size_t s = 0; s < world.tables.size(); ++s) {
      for (std::size_t b = 0; b < world.tables[s].size(); ++b) {
        blocks.push_back(world.tables[s][b]);
        ends.push_back(std::min(block_tokens, world.tokens[s] - static_cast<std::int32_t>(b) * block_tokens));
      }
    }
    blocks.push_back(-1);  // skipped
    ends.push_back(1);
  }

  [[nodiscard]] std::vector<std::byte> empty_summaries() const {
    return std::vector<std::byte>(llmmem::key_summary_bytes(world.layout, world.blocks), std::byte{0xFF});
  }

  /// @param is_stepwise  each token as if it came alone
  template <class Run>
  std::uint32_t summarize(const Run& run, std::vector<std::byte>& summaries, bool is_stepwise) const {
    std::uint32_t flag = 0;
    std::vector<std::byte> cache = world.cache;
    const auto summarize_to = [&](const std::vector<std::int32_t>& begins,
                                  const std::vector<std::int32_t>& to) {
      llmmem::summarize_keys(run,
                             {.blocks = blocks.data(),
                              .begins = is_stepwise ? begins.data() : nullptr,
                              .ends = to.data(),
                              .count = blocks.size()},
                             {cache.data(), world.blocks, world.layout}, world.layer, summaries, &flag)
          .value();
    };
    if (!is_stepwise) {
      summarize_to({}, ends);
      return flag;
    }
    std::vector<std::int32_t> begins(blocks.size());
    std::vector<std::int32_t> to(blocks.size());
    for (std::uint32_t t = 0; t < world.layout.block_tokens; ++t) {
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        begins[i] = std::min(static_cast<std::int32_t>(t), ends[i]);
        to[i] = std::min(static_cast<std::int32_t>(t) + 1, ends[i]);
      }
      summarize_to(begins, to);
    }
    return flag;
  }

  template <class Run>
  [[nodiscard]] std::vector<float> bound(const Run& run, const std::vector<std::byte>& summaries) const {
    std::vector<float> scores(world.rows * columns, 12345.0F);
    std::vector<std::byte> cache = world.cache;
    llmmem::attention_options options = world.options;
    if (!world.scales[0].empty()) options.scales.keys = world.scales[0].data();
    const llmmem::padded_table_view tables{
        .block_table = world.padded.data(),
        .seq_lens = world.tokens.data(),
        .num_sequences = static_cast<std::int32_t>(world.tables.size()),
        .max_blocks = world.columns,
        .block_tokens = static_cast<std::int32_t>(world.layout.block_tokens)};
    llmmem::bound_scores(run, tables,
                         {.rows = world.rows,
                          .sequences = world.sequences.empty() ? nullptr : world.sequences.data(),
                          .lengths = world.lengths.empty() ? nullptr : world.lengths.data()},
                         {world.queries.data(), world.query_strides[0], world.query_strides[1]},
                         {cache.data(), world.blocks, world.layout}, summaries, columns, scores.data(),
                         options)
        .value();
    return scores;
  }
};

}  // namespace llmmem_tests
