#include <llmmem/kernels/block_summary.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/select_top.hpp>
#include <llmmem/kernels/token_lists.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/attention_runs.hpp"
#include "support/attention_world.hpp"
#include "support/coded_world.hpp"
#include "support/listed_world.hpp"
#include "support/seeds.hpp"
#include "support/summary_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

/// The largest product of any query head of a row with the keys of a block, times the scale, in doubles.
double largest_product(const attention_world& world, std::uint64_t row, std::int32_t first,
                       std::int32_t end) {
  const std::int32_t sequence =
      world.sequences.empty() ? static_cast<std::int32_t>(row) : world.sequences[row];
  const double scale = world.options.scale != 0
                           ? static_cast<double>(world.options.scale)
                           : 1 / std::sqrt(static_cast<double>(world.layout.vector_elements(0)));
  double most = -std::numeric_limits<double>::infinity();
  for (std::uint32_t query = 0; query < world.query_heads(); ++query) {
    const std::uint32_t head = query / world.group;
    const bool is_scaled = !world.scales[0].empty() && world.layout.element != world.options.element;
    const double key_scale =
        is_scaled ? static_cast<double>(world.scales[0][world.options.scales.is_by_head ? head : 0]) : 1;
    const std::byte* const asked =
        world.queries.data() + row * world.query_strides[0] + query * world.query_strides[1];
    for (std::int32_t t = first; t < end; ++t) {
      double sum = 0;
      for (std::uint64_t e = 0; e < world.layout.vector_elements(0); ++e)
        sum += static_cast<double>(
                   load_element(world.options.element, asked + e * element_bytes(world.options.element))) *
               static_cast<double>(
                   load_element(world.layout.element, world.cache.data() + world.place(0, sequence, t, head) +
                                                          e * element_bytes(world.layout.element)));
      most = std::max(most, sum * scale * key_scale);
    }
  }
  return most;
}

}  // namespace

TEST_SUITE("block_summary") {
  TEST_CASE("every product is at most its block's bound, and rows without tokens have none") {
    std::uint64_t seen = 0;
    std::uint64_t tight = 0;
    for (const auto seed : seeds(80, 30)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const summary_world world(random);
      std::vector<std::byte> summaries = world.empty_summaries();
      CHECK(world.summarize(host_executor{}, summaries, false) == 0);
      const std::vector<float> bounds = world.bound(host_executor{}, summaries);
      CHECK(world.bound(grid_executor({.blocks = 2}), summaries) == bounds);
      const attention_world& of = world.world;
      for (std::uint64_t row = 0; row < of.rows; ++row) {
        const std::int32_t sequence =
            of.sequences.empty() ? static_cast<std::int32_t>(row) : of.sequences[row];
        const auto block_tokens = static_cast<std::int32_t>(of.layout.block_tokens);
        for (std::uint32_t b = 0; b < world.columns; ++b) {
          const float bound = bounds[row * world.columns + b];
          if (sequence < 0) {
            CHECK(bound == unknown_tokens);
            continue;
          }
          const std::int32_t length =
              of.lengths.empty() ? of.tokens[static_cast<std::size_t>(sequence)] : of.lengths[row];
          const std::int32_t from =
              of.options.window == 0
                  ? 0
                  : std::max<std::int32_t>(0, length - static_cast<std::int32_t>(of.options.window));
          const std::int32_t first = static_cast<std::int32_t>(b) * block_tokens;
          const std::int32_t end = std::min(first + block_tokens, length);
          if (end <= std::max(first, from)) {
            CHECK(bound == -std::numeric_limits<float>::infinity());
            continue;
          }
          CHECK(largest_product(of, row, std::max(first, from), end) <= static_cast<double>(bound));
          ++seen;
          // Of a single key whose type bf16 holds, and whose block has no other, there is little room.
          const bool is_exact = of.layout.element == dtype::bf16 || of.layout.element == dtype::fp8_e4m3;
          const std::int32_t held =
              std::min(block_tokens, of.tokens[static_cast<std::size_t>(sequence)] - first);
          if (!is_exact || held != 1) continue;
          CHECK(static_cast<double>(bound) - largest_product(of, row, first, end) < 0.02);
          ++tight;
        }
      }
    }
    CHECK(seen > 300);
    CHECK(tight > 20);
  }

  TEST_CASE("summaries have the same bits token by token and all at once, on every executor") {
    for (const auto seed : seeds(60, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const summary_world world(random);
      std::vector<std::byte> at_once = world.empty_summaries();
      std::vector<std::byte> stepwise = at_once;
      world.summarize(host_executor{}, at_once, false);
      world.summarize(grid_executor{}, stepwise, true);
      CHECK(at_once == stepwise);
    }
  }

  TEST_CASE("every product with a key in codes is at most its block's bound, and rotated keys are refused") {
    std::uint64_t seen = 0;
    for (const auto seed : seeds(40, 30)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      coded_world made(random);
      summary_world summarized(random);
      // The summaries of the world in codes.
      summarized.world = made.codes;
      summarized.columns = static_cast<std::uint32_t>(made.codes.columns) + 1;
      summarized.blocks.clear();
      summarized.ends.clear();
      const auto block_tokens = static_cast<std::int32_t>(made.codes.layout.block_tokens);
      for (std::size_t s = 0; s < made.codes.tables.size(); ++s) {
        for (std::size_t b = 0; b < made.codes.tables[s].size(); ++b) {
          summarized.blocks.push_back(made.codes.tables[s][b]);
          summarized.ends.push_back(
              std::min(block_tokens, made.codes.tokens[s] - static_cast<std::int32_t>(b) * block_tokens));
        }
      }
      std::vector<std::byte> summaries = summarized.empty_summaries();
      if (made.codes.layout.key_scales.is_rotated) {
        CHECK_THROWS_AS(static_cast<void>(summarized.summarize(host_executor{}, summaries, false)),
                        argument_error);
        continue;
      }
      REQUIRE(summarized.summarize(host_executor{}, summaries, false) == 0);
      std::vector<std::byte> stepwise = summarized.empty_summaries();
      REQUIRE(summarized.summarize(grid_executor(), stepwise, true) == 0);
      CHECK(stepwise == summaries);
      summarized.world.options.window = 0;
      const std::vector<float> bounds = summarized.bound(host_executor{}, summaries);
      // Attention's own products over the floats of the same values.
      attention_world& floats = made.floats;
      const double scale = floats.options.scale != 0
                               ? static_cast<double>(floats.options.scale)
                               : 1 / std::sqrt(static_cast<double>(floats.layout.vector_elements(0)));
      for (std::uint64_t row = 0; row < floats.rows; ++row) {
        const std::int32_t sequence =
            floats.sequences.empty() ? static_cast<std::int32_t>(row) : floats.sequences[row];
        if (sequence < 0) continue;
        const std::int32_t end =
            floats.lengths.empty() ? floats.tokens[static_cast<std::size_t>(sequence)] : floats.lengths[row];
        for (std::int32_t t = 0; t < end; ++t) {
          double most = -1e30;
          for (std::uint32_t q = 0; q < floats.query_heads(); ++q) {
            double product = 0;
            for (std::uint64_t e = 0; e < floats.layout.vector_elements(0); ++e)
              product += static_cast<double>(
                             load_element(dtype::f32, floats.queries.data() + row * floats.query_strides[0] +
                                                          q * floats.query_strides[1] + 4 * e)) *
                         static_cast<double>(load_element(
                             dtype::f32,
                             floats.cache.data() + floats.place(0, sequence, t, q / floats.group) + 4 * e));
            most = std::max(most, product * scale);
          }
          CHECK(most <= static_cast<double>(
                            bounds[row * summarized.columns + static_cast<std::size_t>(t / block_tokens)]));
          ++seen;
        }
      }
    }
    CHECK(seen > 500);
  }

  TEST_CASE("summaries are rounded outward, by at most a step of bf16") {
    std::mt19937_64 random(5);
    for (int i = 0; i < 200'000; ++i) {
      const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
      if (std::isnan(x)) continue;
      const auto below = std::bit_cast<float>(std::uint32_t{detail::bf16_below(x)} << 16U);
      const auto above = std::bit_cast<float>(std::uint32_t{detail::bf16_above(x)} << 16U);
      CHECK((below <= x && x <= above));
      const std::uint32_t gap = detail::bf16_above(x) ^ detail::bf16_below(x);
      CHECK((below == above || gap != 0));
      if (std::isfinite(x) && std::abs(x) > 1e-30F && std::isfinite(above) && std::isfinite(below))
        CHECK(static_cast<double>(above) - static_cast<double>(below) <=
              std::abs(static_cast<double>(x)) / 128);
    }
    constexpr float infinity = std::numeric_limits<float>::infinity();
    CHECK(detail::bf16_below(infinity) == 0x7F80U);
    CHECK(detail::bf16_above(std::numeric_limits<float>::max()) == 0x7F80U);
    CHECK(detail::bf16_below(std::nanf("")) == 0xFF80U);
    CHECK(detail::bf16_above(std::nanf("")) == 0x7F80U);
  }

  TEST_CASE("a block with a NaN key is not skipped") {
    const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 4, .element = dtype::f32};
    alignas(16) float cache[64]{};
    cache[8 + 3] = std::nanf("");  // a key of block 0
    alignas(16) std::byte summaries[32]{};
    const std::int32_t block = 0;
    const std::int32_t end = 4;
    const kv_memory memory{reinterpret_cast<std::byte*>(cache), 1, layout};
    summarize_keys(host_executor{}, {.blocks = &block, .ends = &end, .count = 1}, memory, 0, summaries)
        .value();
    alignas(16) float query[8]{};
    const padded_table_view tables{
        .block_table = &block, .seq_lens = &end, .num_sequences = 1, .max_blocks = 1, .block_tokens = 4};
    for (const float asked : {-1.0F, 0.0F, 1.0F}) {
      query[3] = asked;
      float score = 0;
      bound_scores(host_executor{}, tables, {.rows = 1}, {reinterpret_cast<const std::byte*>(query), 32, 32},
                   memory, summaries, 1, &score, {.query_heads = 1, .element = dtype::f32})
          .value();
      CHECK(score == std::numeric_limits<float>::infinity());
    }
  }

  TEST_CASE("a choice of all blocks has the bits of attention to the whole sequence") {
    for (const auto seed : seeds(40, 10)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      summary_world world(random);
      world.world.options.window = 0;
      const attention_world& of = world.world;
      if (!of.sequences.empty() || of.rows == 0) continue;
      std::vector<std::byte> summaries = world.empty_summaries();
      world.summarize(host_executor{}, summaries, false);
      const std::vector<float> bounds = world.bound(host_executor{}, summaries);
      std::vector<std::int32_t> chosen(of.rows * world.columns, -7);
      select_top(
          host_executor{},
          {.scores = bounds.data(), .rows = of.rows, .stride = world.columns, .candidates = world.columns},
          world.columns, chosen.data(), world.columns)
          .value();
      std::vector<std::int32_t> listed(chosen.size() * of.layout.block_tokens, -7);
      list_block_tokens(host_executor{},
                        {.blocks = chosen.data(),
                         .lengths = of.tokens.data(),
                         .rows = of.rows,
                         .k = world.columns,
                         .block_tokens = of.layout.block_tokens},
                        listed.data())
          .value();
      const auto stride = static_cast<std::size_t>(world.columns) * of.layout.block_tokens;
      for (std::uint64_t row = 0; row < of.rows; ++row) {
        for (std::size_t i = 0; i < stride; ++i)
          CHECK(listed[row * stride + i] ==
                (static_cast<std::int32_t>(i) < of.tokens[row] ? static_cast<std::int32_t>(i) : -1));
      }
      attention_world whole = of;
      whole.lengths.clear();
      CHECK(attend_listed(whole, listed_rows{listed, static_cast<std::int32_t>(stride)}, host_executor{},
                          table_form::csr) == attend(whole, host_executor{}));
    }
  }

  TEST_CASE("input that does not fit is refused, and invalid blocks are flagged") {
    const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 4, .element = dtype::f32};
    alignas(16) std::byte cache[512]{};
    alignas(16) std::byte summaries[64]{};
    const kv_memory memory{cache, 2, layout};
    const auto told = [&](const changed_blocks& changed, const kv_memory& of, std::size_t bytes,
                          std::uint32_t layer = 0) {
      std::uint32_t flag = 0;
      const auto done =
          summarize_keys(host_executor{}, changed, of, layer, std::span(summaries).first(bytes), &flag);
      return done ? failure{} : done.error();
    };
    const std::int32_t blocks[] = {0, 1};
    const std::int32_t ends[] = {4, 2};
    const changed_blocks well{.blocks = blocks, .ends = ends, .count = 2};
    CHECK(told(well, memory, 64) == failure{});
    CHECK(told(well, memory, 63) == failure{errc::too_short, 0, 64, 63});
    CHECK(told(well, memory, 64, 1) == failure{errc::out_of_range, 0, 1, 0});
    kv_memory other = memory;
    other.layout.element = dtype::int8;
    CHECK(told(well, other, 64).code == errc::no_conversion);
    other = memory;
    other.layout.head_dim = 12;
    CHECK(told(well, other, 64) == failure{errc::bad_granularity, 0, 12, 8});
    CHECK(told({.blocks = blocks, .count = 2}, memory, 64) == failure{errc::too_short, 0, 2, 0});
    for (const std::int32_t block : {2, 1 << 30}) {
      std::uint32_t flag = 0;
      summarize_keys(host_executor{}, {.blocks = &block, .ends = ends, .count = 1}, memory, 0, summaries,
                     &flag)
          .value();
      CHECK(flag == 1);
    }
    for (const std::int32_t end : {5, -1}) {
      std::uint32_t flag = 0;
      summarize_keys(host_executor{}, {.blocks = blocks, .ends = &end, .count = 1}, memory, 0, summaries,
                     &flag)
          .value();
      CHECK(flag == 1);
    }
    std::int32_t listed = 0;
    CHECK(list_block_tokens(host_executor{}, {.rows = 1, .k = 1}, &listed).code() == errc::size_mismatch);
    CHECK(list_block_tokens(host_executor{}, {.rows = 1, .k = 1, .block_tokens = 4}, &listed).code() ==
          errc::too_short);
    static_assert(key_summary_bytes({.layers = 1, .heads = 8, .head_dim = 128}, 10) == 10 * 8 * 2 * 128 * 2);
  }
}
