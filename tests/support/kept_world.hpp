/// @file
/// Scores of tokens by query heads with the choice by sorting, and caches whose chosen tokens are copied,
/// with the copy vector by vector.
#pragma once

#include <llmmem/kernels/kept_tokens.hpp>
#include <llmmem/kernels/select_tokens.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/latent_record.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "support/cache_world.hpp"

namespace llmmem_tests {

struct scored_world {
  std::uint64_t sequences = 0;
  std::uint32_t kv_heads = 1;
  std::uint32_t group = 1;
  std::uint32_t tokens = 0;
  std::uint64_t stride = 0;
  llmmem::token_budget budget{};
  llmmem::score_join join = llmmem::score_join::sum;
  std::vector<float> scores{};
  std::vector<std::int32_t> lengths{};  // empty: all

  explicit scored_world(std::mt19937_64& random) {
    const auto below = [&](std::uint64_t n) { return static_cast<std::uint32_t>(random() % n); };
    sequences = 1 + below(3);
    kv_heads = 1 + below(3);
    group = 1 + below(4);
    tokens = below(6) == 0 ? below(3) : below(300);
    stride = tokens + below(3);
    join = below(2) == 0 ? llmmem::score_join::sum : llmmem::score_join::largest;
    budget.sinks = below(3) == 0 ? 0 : below(6);
    budget.recent = below(3) == 0 ? 0 : below(40);
    budget.budget = budget.sinks + budget.recent + (below(5) == 0 ? 0 : below(90));
    const std::uint32_t kind = below(3);
    for (std::uint64_t i = 0; i < sequences * kv_heads * group * stride; ++i)
      scores.push_back(draw(random, kind));
    if (below(2) == 0) return;
    for (std::uint64_t i = 0; i < sequences; ++i)
      lengths.push_back(below(9) == 0 ? -4 : static_cast<std::int32_t>(below(330)));
  }

  [[nodiscard]] std::uint32_t length(std::uint64_t sequence) const {
    if (lengths.empty()) return tokens;
    return static_cast<std::uint32_t>(std::clamp<std::int64_t>(lengths[sequence], 0, tokens));
  }
  [[nodiscard]] llmmem::token_scores view() const {
    return {.scores = scores.data(),
            .sequences = sequences,
            .query_heads = kv_heads * group,
            .kv_heads = kv_heads,
            .tokens = tokens,
            .stride = stride,
            .lengths = lengths.empty() ? nullptr : lengths.data(),
            .join = join};
  }
  [[nodiscard]] std::size_t entries() const {
    return static_cast<std::size_t>(sequences * kv_heads * budget.budget);
  }
  template <class Run>
  [[nodiscard]] std::vector<std::int32_t> select(const Run& run) const {
    std::vector<std::int32_t> out(entries(), -7);
    llmmem::select_tokens(run, view(), budget, out.data(), budget.budget).value();
    return out;
  }

  /// By sorting.
  [[nodiscard]] std::vector<std::int32_t> expected() const {
    std::vector<std::int32_t> out;
    for (std::uint64_t list = 0; list < sequences * kv_heads; ++list) {
      const std::uint32_t count = length(list / kv_heads);
      std::vector<std::int32_t> all(count);
      std::iota(all.begin(), all.end(), 0);
      const auto is_certain = [&](std::int32_t t) {
        return static_cast<std::uint32_t>(t) < budget.sinks ||
               static_cast<std::uint32_t>(t) + budget.recent >= count;
      };
      std::ranges::sort(all, [&](std::int32_t a, std::int32_t b) {
        if (is_certain(a) != is_certain(b)) return is_certain(a);
        const float of_a = joined(list, a);
        const float of_b = joined(list, b);
        if (std::isnan(of_a) != std::isnan(of_b)) return std::isnan(of_b);
        return !std::isnan(of_a) && of_a != of_b ? of_a > of_b : a < b;
      });
      if (all.size() > budget.budget) all.resize(budget.budget);
      std::ranges::sort(all);
      all.resize(budget.budget, -1);
      out.insert(out.end(), all.begin(), all.end());
    }
    return out;
  }

 private:
  [[nodiscard]] float joined(std::uint64_t list, std::int32_t token) const {
    const auto of = [&](std::uint32_t head) {
      return scores[(list * group + head) * stride + static_cast<std::size_t>(token)];
    };
    float sum = of(0);
    float most = std::numeric_limits<float>::quiet_NaN();
    for (std::uint32_t head = 1; head < group; ++head)
      sum += of(head);
    for (std::uint32_t head = 0; head < group; ++head) {
      if (!std::isnan(of(head))) most = std::isnan(most) ? of(head) : std::max(most, of(head));
    }
    return join == llmmem::score_join::sum ? sum : most;
  }
  static float draw(std::mt19937_64& random, std::uint32_t kind) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    if (kind == 0) return std::bit_cast<float>(static_cast<std::uint32_t>(random()));  // any float
    if (kind == 1) return static_cast<float>(random() % 3);                            // mostly equal
    constexpr float some[] = {0.0F, -0.0F, -infinity, infinity, std::numeric_limits<float>::quiet_NaN(),
                              1.5F};
    return some[random() % std::size(some)];
  }
};

/// Lists of tokens of sequences in a cache of any form, and fresh blocks of another order for them.
struct kept_world {
  llmmem::kv_layout from_layout{};
  llmmem::kv_layout to_layout{};
  std::uint64_t from_blocks = 0;
  std::uint64_t to_blocks = 0;
  std::uint32_t layer = 0;
  std::uint64_t sequences = 0;
  std::uint32_t heads = 1;  // lists of a sequence
  std::uint32_t budget = 0;
  std::vector<std::int32_t> listed{};
  std::vector<std::byte> cache{};
  std::int32_t from_columns = 0;
  std::int32_t to_columns = 0;
  std::vector<std::int32_t> from_table{};
  std::vector<std::int32_t> to_table{};

  explicit kept_world(std::mt19937_64& random) {
    using namespace llmmem;
    const auto below = [&](std::uint64_t n) { return static_cast<std::uint32_t>(random() % n); };
    from_layout = any_layout(random);
    draw_form(random);
    to_layout = from_layout;
    if (below(2) == 0) {
      to_layout.heads_in_block = below(2) == 0 ? paging::head_order::nhd : paging::head_order::hnd;
      to_layout.order = static_cast<block_order>(below(block_order_count));
    }
    layer = below(from_layout.layers);
    sequences = 1 + below(3);
    heads = below(2) == 0 ? 1 : from_layout.heads;
    if (heads == 1 && !from_layout.has_values && below(2) == 0 && from_layout.model == 0) {
      from_layout.index_dim = 16;
      to_layout.index_dim = 16;
    }
    budget = 1 + below(40);
    const std::uint32_t tokens = budget + below(60);
    const auto columns_of = [&](std::uint32_t count) {
      return static_cast<std::int32_t>((count + from_layout.block_tokens - 1) / from_layout.block_tokens);
    };
    from_columns = columns_of(tokens);
    to_columns = columns_of(budget);
    from_blocks = make_table(random, from_table, from_columns);
    to_blocks = make_table(random, to_table, to_columns);
    for (std::uint64_t list = 0; list < sequences * heads; ++list) {
      std::vector<std::int32_t> all(tokens);
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random);
      all.resize(below(3) == 0 ? below(budget + 1) : budget);
      std::ranges::sort(all);
      all.resize(budget, -1);
      listed.insert(listed.end(), all.begin(), all.end());
    }
    cache.resize(from_layout.total_bytes(from_blocks));
    for (std::byte& each : cache)
      each = static_cast<std::byte>(random());
  }

  [[nodiscard]] llmmem::kept_tokens kept(const std::int32_t* lists) const {
    return {.listed = lists, .sequences = sequences, .heads = heads, .budget = budget, .stride = budget};
  }
  [[nodiscard]] llmmem::padded_table_view from_view(const std::int32_t* table) const {
    return {.block_table = table,
            .num_sequences = static_cast<std::int32_t>(sequences),
            .max_blocks = from_columns,
            .block_tokens = static_cast<std::int32_t>(from_layout.block_tokens)};
  }
  [[nodiscard]] llmmem::padded_table_view to_view(const std::int32_t* table) const {
    return {.block_table = table,
            .num_sequences = static_cast<std::int32_t>(sequences),
            .max_blocks = to_columns,
            .block_tokens = static_cast<std::int32_t>(to_layout.block_tokens)};
  }
  [[nodiscard]] std::vector<std::byte> fresh() const {
    return std::vector<std::byte>(to_layout.total_bytes(to_blocks), poison);
  }
  template <class Run>
  [[nodiscard]] std::vector<std::byte> copy(const Run& run) {
    std::vector<std::byte> out = fresh();
    std::uint32_t flag = 0;
    llmmem::copy_kept_tokens(run, {out.data(), to_blocks, to_layout}, to_view(to_table.data()),
                             {cache.data(), from_blocks, from_layout}, from_view(from_table.data()),
                             kept(listed.data()), layer, &flag)
        .value();
    if (flag != 0) out.clear();
    return out;
  }

  /// Each vector of each plane of each token.
  [[nodiscard]] std::vector<std::byte> expected() const {
    std::vector<std::byte> out = fresh();
    for (std::uint32_t p = 0; p < from_layout.planes(); ++p) {
      for (std::uint64_t s = 0; s < sequences; ++s) {
        for (std::uint32_t h = 0; h < from_layout.heads_of(p); ++h) {
          for (std::uint32_t i = 0; i < budget; ++i) {
            const std::int32_t position = listed[(s * heads + (heads == 1 ? 0 : h)) * budget + i];
            if (position < 0) continue;
            std::memcpy(out.data() + place(to_layout, to_blocks, p, to_table, to_columns, s, i, h),
                        cache.data() + place(from_layout, from_blocks, p, from_table, from_columns, s,
                                             static_cast<std::uint32_t>(position), h),
                        from_layout.vector_bytes(p));
          }
        }
      }
    }
    return out;
  }

 private:
  [[nodiscard]] std::size_t place(const llmmem::kv_layout& layout, std::uint64_t blocks, std::uint32_t p,
                                  const std::vector<std::int32_t>& table, std::int32_t columns,
                                  std::uint64_t sequence, std::uint32_t token, std::uint32_t head) const {
    const auto block = static_cast<std::uint64_t>(
        table[sequence * static_cast<std::uint64_t>(columns) + token / layout.block_tokens]);
    return layout.strides(p, blocks).offset(layer, block, token % layout.block_tokens, head);
  }
  /// Elements; codes with scales by token or by run, at any place, or with an indexer's keys; or latents.
  void draw_form(std::mt19937_64& random) {
    using namespace llmmem;
    const std::uint64_t kind = random() % 4;
    if (kind == 3) {
      from_layout = paging::latent_layout({.layers = from_layout.layers, .block_tokens = 16},
                                          random() % 2 == 0 ? paging::fp8_v4_mla : paging::fp8_ds_mla);
      return;
    }
    if (kind == 0) {
      from_layout.element = random() % 2 == 0 ? dtype::bf16 : dtype::f32;
      return;
    }
    from_layout.head_dim = 64;
    from_layout.value_dim = 0;
    from_layout.element = random() % 2 == 0 ? dtype::int8 : dtype::int4;
    from_layout.key_scales = {
        .group = kind == 1 ? paging::scale_group::vector : paging::scale_group::run,
        .element = random() % 2 == 0 ? dtype::f32 : dtype::bf16,
        .place = random() % 2 == 0 ? paging::scale_place::in_block : paging::scale_place::after_vector};
    if (from_layout.has_values) from_layout.value_scales = from_layout.key_scales;
  }
  [[nodiscard]] std::uint64_t make_table(std::mt19937_64& random, std::vector<std::int32_t>& table,
                                         std::int32_t columns) const {
    table.resize(static_cast<std::size_t>(sequences) * static_cast<std::size_t>(columns));
    std::iota(table.begin(), table.end(), 1);
    std::shuffle(table.begin(), table.end(), random);
    return table.size() + 2;
  }
};

}  // namespace llmmem_tests
