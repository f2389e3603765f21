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

inline constexpr float unknown_tokens = 12345;

/// @param planes  where the cache lies, if not in one allocation.
template <class Run>
attended attend(const attention_world& world, const Run& run, table_form form = table_form::csr,
                const scattered_planes* planes = nullptr) {
  attended made{world.out, std::vector<float>(world.rows * world.query_heads(), unknown_tokens)};
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

/// The same to the tokens of lists.
template <class Lists, class Run>
attended attend_listed(const attention_world& world, const Lists& lists, const Run& run, table_form form) {
  attended made{world.out, std::vector<float>(world.rows * world.query_heads(), unknown_tokens)};
  std::vector<std::byte> workspace(world.workspace_bytes(), std::byte{0xFF});
  std::vector<std::byte> cache = world.cache;
  world
      .attend_to(run,
                 {.queries = world.queries.data(),
                  .out = made.out.data(),
                  .cache = cache.data(),
                  .workspace = workspace.data(),
                  .indptr = world.indptr.data(),
                  .indices = world.indices.data(),
                  .last_page_len = world.last_page_len.data(),
                  .padded = world.padded.data(),
                  .seq_lens = world.tokens.data(),
                  .scales = {world.scales[0].data(), world.scales[1].data()},
                  .log_sum_exp = made.log_sum_exp.data(),
                  .flag = &made.flag},
                 form, lists)
      .value();
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
        CHECK(told == unknown_tokens);
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

}  // namespace llmmem_tests
