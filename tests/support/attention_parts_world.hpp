/// @file
/// Parts of the attention of an `attention_world`: memory for them, ranges that cut rows, and runs.
#pragma once

#include <llmmem/kernels/attention_parts.hpp>
#include <llmmem/kernels/merge_attention.hpp>
#include <llmmem/kernels/paged_attention.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "support/attention_world.hpp"

namespace llmmem_tests {

/// A part in memory of its own, with strides of its own; full of NaNs before it is written.
struct part_memory {
  llmmem::attention_part_shape shape{};
  std::vector<float> sums{};
  std::vector<float> states{};
  std::uint64_t sum_strides[2]{};  // bytes: row, head
  std::uint64_t state_strides[2]{};

  explicit part_memory(const llmmem::attention_part_shape& of, std::uint64_t odd = 0) : shape(of) {
    sum_strides[1] = (shape.value_dim + 4 * (odd % 3)) * sizeof(float);
    sum_strides[0] = sum_strides[1] * shape.query_heads + 16 * (odd % 2);
    state_strides[1] = sizeof(llmmem::attention_state) * (1 + odd % 2);
    state_strides[0] = state_strides[1] * shape.query_heads + 8 * (odd % 3);
    sums.assign(sum_strides[0] * shape.rows / sizeof(float), std::numeric_limits<float>::quiet_NaN());
    states.assign(state_strides[0] * shape.rows / sizeof(float), std::numeric_limits<float>::quiet_NaN());
  }

  [[nodiscard]] llmmem::attention_part_output output() {
    return at(reinterpret_cast<std::byte*>(sums.data()), reinterpret_cast<std::byte*>(states.data()));
  }
  [[nodiscard]] llmmem::attention_part part() { return output(); }
  /// The same in other memory.
  [[nodiscard]] llmmem::attention_part_output at(std::byte* of_sums, std::byte* of_states) const {
    return {{of_sums, sum_strides[0], sum_strides[1]}, {of_states, state_strides[0], state_strides[1]}};
  }
  [[nodiscard]] float* sum(std::uint64_t row, std::uint32_t head) {
    return sums.data() + (row * sum_strides[0] + head * sum_strides[1]) / sizeof(float);
  }
  [[nodiscard]] llmmem::attention_state state(std::uint64_t row, std::uint32_t head) const {
    const float* const at =
        states.data() + (row * state_strides[0] + head * state_strides[1]) / sizeof(float);
    return {at[0], at[1]};
  }
  void set(std::uint64_t row, std::uint32_t head, const llmmem::attention_state& of) {
    std::memcpy(states.data() + (row * state_strides[0] + head * state_strides[1]) / sizeof(float), &of,
                sizeof of);
  }
};

[[nodiscard]] inline llmmem::attention_part_shape part_shape_of(const attention_world& world) {
  return {world.rows, world.query_heads(), static_cast<std::uint32_t>(world.layout.vector_elements(1))};
}

/// Where each row is cut: for each part its begins and ends, so that every token of a row is in one range.
/// Some are empty, and ranges need not follow the order of the parts.
struct row_cuts {
  std::vector<std::vector<std::int32_t>> begins{};
  std::vector<std::vector<std::int32_t>> ends{};

  row_cuts(std::mt19937_64& random, std::uint64_t rows, std::uint32_t parts, std::uint64_t longest = 130) {
    begins.assign(parts, {});
    ends.assign(parts, {});
    std::vector<std::uint32_t> order(parts);
    for (std::uint64_t row = 0; row < rows; ++row) {
      std::vector<std::int32_t> cut{0, 1 << 30};
      for (std::uint32_t i = 1; i < parts; ++i)
        cut.push_back(static_cast<std::int32_t>(random() % longest));
      std::ranges::sort(cut);
      for (std::uint32_t i = 0; i < parts; ++i)
        order[i] = i;
      std::ranges::shuffle(order, random);
      for (std::uint32_t i = 0; i < parts; ++i) {
        begins[order[i]].push_back(cut[i]);
        ends[order[i]].push_back(cut[i + 1]);
      }
    }
  }
};

/// What a context-parallel rank has of a world: the tokens that are dealt to it, in blocks of its own.
/// Lengths stay those of the whole sequences.
[[nodiscard]] inline attention_world dealt(const attention_world& world,
                                           const llmmem::paging::kv_part& part) {
  attention_world local = world;
  local.layout.part = part;
  local.tables.clear();
  std::int32_t next = 0;
  for (std::size_t s = 0; s < world.tokens.size(); ++s) {
    const auto held =
        static_cast<std::int32_t>(part.local_tokens(static_cast<std::uint64_t>(world.tokens[s])));
    local.tokens[s] = held;
    local.tables.emplace_back();
    for (std::int32_t at = 0; at < held; at += static_cast<std::int32_t>(world.layout.block_tokens))
      local.tables.back().push_back(next++);
  }
  local.blocks = static_cast<std::uint64_t>(next) + 1;
  local.cache.assign(local.layout.total_bytes(local.blocks), std::byte{0xFF});  // NaNs
  for (std::size_t s = 0; s < world.tokens.size(); ++s) {
    const auto sequence = static_cast<std::int32_t>(s);
    for (std::int32_t at = 0; at < local.tokens[s]; ++at) {
      const auto token = static_cast<std::int64_t>(part.token_of(static_cast<std::uint64_t>(at)));
      for (std::uint32_t p = 0; p < 2; ++p)
        for (std::uint32_t h = 0; h < world.layout.heads; ++h)
          std::memcpy(local.cache.data() + local.place(p, sequence, at, h),
                      world.cache.data() + world.place(p, sequence, token, h), world.layout.vector_bytes(p));
    }
  }
  local.flatten();
  return local;
}

/// Writes one part on the host.
template <class Run>
std::uint32_t attend_part(const attention_world& world, const Run& run, table_form form, part_memory& part,
                          const std::int32_t* begins = nullptr, const std::int32_t* ends = nullptr) {
  std::uint32_t flag = 0;
  std::vector<std::byte> workspace(world.workspace_bytes(), std::byte{0xFF});
  std::vector<std::byte> cache = world.cache;
  world
      .attend_part(run,
                   {.queries = world.queries.data(),
                    .cache = cache.data(),
                    .workspace = workspace.data(),
                    .indptr = world.indptr.data(),
                    .indices = world.indices.data(),
                    .last_page_len = world.last_page_len.data(),
                    .padded = world.padded.data(),
                    .seq_lens = world.tokens.data(),
                    .sequences = world.sequences.empty() ? nullptr : world.sequences.data(),
                    .lengths = world.lengths.empty() ? nullptr : world.lengths.data(),
                    .begins = begins,
                    .ends = ends,
                    .scales = {world.scales[0].data(), world.scales[1].data()},
                    .flag = &flag},
                   form, part.output())
      .value();
  return flag;
}

}  // namespace llmmem_tests
