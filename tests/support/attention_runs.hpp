/// @file
/// Runs of `paged_attention` over an `attention_world`, and what they must leave.
#pragma once

#include <llmmem/paging/kv_layout.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "support/attention_world.hpp"
#include "support/scattered_planes.hpp"
#include "support/small_elements.hpp"

namespace llmmem_tests {

/// What a run leaves.
struct attended {
  std::vector<std::byte> out{};
  std::vector<float> log_sum_exp{};
  std::uint32_t flag = 0;

  friend bool operator==(const attended& a, const attended& b) {
    const auto bits = [](float x) { return std::bit_cast<std::uint32_t>(x); };
    return a.out == b.out && std::ranges::equal(a.log_sum_exp, b.log_sum_exp, {}, bits, bits) &&
           a.flag == b.flag;
  }
};

inline constexpr float untold = 12345;

/// @param planes  where the cache lies, if not in one allocation.
template <class Run>
attended attend(const attention_world& world, const Run& run, table_form form = table_form::csr,
                const scattered_planes* planes = nullptr) {
  attended made{world.out, std::vector<float>(world.rows * world.query_heads(), untold)};
  // A heap block of its own, so that a sanitizer sees where it ends; filled with NaNs.
  std::vector<std::byte> workspace(world.workspace_bytes(), std::byte{0xFF});
  std::vector<std::byte> cache = world.cache;
  const llmmem::kv_memory scattered = planes == nullptr ? llmmem::kv_memory{} : planes->memory();
  world
      .attend(run,
              {.queries = world.queries.data(),
               .out = made.out.data(),
               .cache = planes == nullptr ? cache.data() : nullptr,
               .plane_table = scattered.plane_table,
               .plane_alignment = scattered.plane_alignment,
               .workspace = workspace.data(),
               .indptr = world.indptr.data(),
               .indices = world.indices.data(),
               .last_page_len = world.last_page_len.data(),
               .padded = world.padded.data(),
               .seq_lens = world.tokens.data(),
               .sequences = world.sequences.empty() ? nullptr : world.sequences.data(),
               .lengths = world.lengths.empty() ? nullptr : world.lengths.data(),
               .scales = {world.scales[0].data(), world.scales[1].data()},
               .log_sum_exp = made.log_sum_exp.data(),
               .flag = &made.flag},
              form)
      .value();
  CHECK(cache == world.cache);
  if (planes != nullptr) CHECK(planes->image() == world.cache);
  return made;
}

/// Checks what a run left against the definition. Returns how many numbers it looked at.
///
/// @param bound  how far numbers may be off: by default of sums of at most 120 products of numbers up to 2,
/// each
///     rounded to a float. Beside it there is what the type of an output rounds: half a unit in the last of 8
///     or 11 binary digits.
inline std::uint64_t check(const attention_world& world, const attended& made, double bound = 3e-5) {
  const double rounds = world.options.element == llmmem::dtype::f32
                            ? 0
                            : (world.options.element == llmmem::dtype::bf16 ? 0x1p-8 : 0x1p-11);
  std::uint64_t seen = 0;
  std::vector<std::byte> left = made.out;
  for (std::uint64_t row = 0; row < world.rows; ++row) {
    const bool is_padding = !world.sequences.empty() && world.sequences[row] < 0;
    for (std::uint32_t query = 0; query < world.query_heads(); ++query) {
      const std::size_t at = row * world.out_strides[0] + query * world.out_strides[1];
      const float told = made.log_sum_exp[row * world.query_heads() + query];
      if (is_padding) {
        CHECK(told == untold);
        continue;
      }
      const std::vector<double> expected = world.expected(row, query);
      const bool is_empty = std::isinf(expected.back());
      CHECK(std::isinf(told) == is_empty);
      if (!is_empty) CHECK(std::abs(static_cast<double>(told) - expected.back()) < bound);
      for (std::size_t e = 0; e + 1 < expected.size(); ++e) {
        std::byte* const here = left.data() + at + e * element_bytes(world.options.element);
        const double got = load_element(world.options.element, here);
        CHECK(std::abs(got - expected[e]) <= bound + rounds * std::abs(expected[e]));
        store_element(world.options.element, here,
                      load_element(world.options.element,
                                   world.out.data() + at + e * element_bytes(world.options.element)));
        ++seen;
      }
    }
  }
  CHECK(left == world.out);  // and nothing else was touched
  CHECK(made.flag == 0);
  return seen;
}

/// The same sequences in other blocks of another size and layout; where there is no token there are NaNs.
inline attention_world rearranged(const attention_world& world, std::mt19937_64& random) {
  attention_world other = world;
  other.layout.block_tokens = static_cast<std::uint32_t>(1 + random() % 40);
  other.layout.order = static_cast<llmmem::block_order>(random() % llmmem::block_order_count);
  other.layout.heads_in_block = random() % 2 == 0 ? llmmem::head_order::nhd : llmmem::head_order::hnd;
  other.tables.clear();
  std::uint64_t needed = 0;
  const auto length = [&](std::int32_t tokens) {
    return (static_cast<std::uint64_t>(tokens) + other.layout.block_tokens - 1) / other.layout.block_tokens;
  };
  for (const std::int32_t tokens : other.tokens)
    needed += length(tokens);
  other.blocks = needed + 1 + random() % 3;
  std::vector<std::int32_t> free(other.blocks);
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), random);
  for (const std::int32_t tokens : other.tokens) {
    other.tables.emplace_back(free.end() - static_cast<std::ptrdiff_t>(length(tokens)), free.end());
    free.resize(free.size() - length(tokens));
  }
  other.cache.assign(other.layout.total_bytes(other.blocks), std::byte{0xFF});  // NaNs, where no token is
  for (std::size_t s = 0; s < other.tables.size(); ++s) {
    const auto sequence = static_cast<std::int32_t>(s);
    for (std::int32_t t = 0; t < other.tokens[s]; ++t)
      for (std::uint32_t p = 0; p < 2; ++p)
        for (std::uint32_t h = 0; h < other.layout.heads; ++h)
          std::copy_n(world.cache.data() + world.place(p, sequence, t, h), other.layout.vector_bytes(p),
                      other.cache.data() + other.place(p, sequence, t, h));
  }
  other.flatten();
  return other;
}

}  // namespace llmmem_tests
