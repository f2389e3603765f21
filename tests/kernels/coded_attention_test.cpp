/// Attention over caches in codes with scales in their blocks.
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/host_vector_executor.hpp>
#include <llmmem/kernels/paged_attention.hpp>
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
#include <vector>

#include "support/attention_runs.hpp"
#include "support/attention_world.hpp"
#include "support/coded_world.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

/// The tables themselves.
struct no_lists {
  [[nodiscard]] padded_table_view over(const padded_table_view& tables) const { return tables; }
};
/// Lists of tokens, one for each row.
struct row_lists {
  const std::vector<std::int32_t>& of_row;
  const std::vector<std::int32_t>& listed;
  std::int32_t stride = 0;

  [[nodiscard]] token_lists<padded_table_view> over(const padded_table_view& tables) const {
    return {.tables = tables,
            .of_row = of_row.data(),
            .listed = listed.data(),
            .stride = stride,
            .num_sequences = static_cast<std::int32_t>(of_row.size()),
            .block_tokens = tables.block_tokens};
  }
};

/// Whether planes of a memory aligned to 16 begin where no float can.
bool has_odd_planes(const attention_world& world) {
  std::vector<std::byte> cache = world.cache;
  std::uintptr_t all = 0;
  for (std::byte* const each : world.planes_in(cache.data()))
    all |= reinterpret_cast<std::uintptr_t>(each);
  return all % 4 != 0;
}

/// Attends over padded tables, alone: each kind of tables compiles all kernels once more.
template <class Run, class Lists = no_lists>
attended attend_padded(const attention_world& world, const Run& run, bool is_by_planes = false,
                       const Lists& lists = {}) {
  attended made{world.out, std::vector<float>(world.rows * world.query_heads(), unknown_tokens)};
  std::vector<std::byte> workspace(world.workspace_bytes(), std::byte{0xFF});
  std::vector<std::byte> cache = world.cache;
  const std::vector<std::byte*> planes = world.planes_in(cache.data());
  std::uintptr_t all = 16;
  for (std::byte* const each : planes)
    all |= reinterpret_cast<std::uintptr_t>(each);
  kv_memory memory{cache.data(), world.blocks, world.layout};
  if (is_by_planes)
    memory = {nullptr, world.blocks, world.layout, planes.data(), std::uint32_t{1} << std::countr_zero(all)};
  attention_options how = world.options;
  if (!world.scales[0].empty()) {
    how.scales.keys = world.scales[0].data();
    how.scales.values = world.scales[1].data();
  }
  how.log_sum_exp = made.log_sum_exp.data();
  how.out_of_range = &made.flag;
  const padded_table_view tables{.block_table = world.padded.data(),
                                 .seq_lens = world.tokens.data(),
                                 .num_sequences = static_cast<std::int32_t>(world.tables.size()),
                                 .max_blocks = world.columns,
                                 .block_tokens = static_cast<std::int32_t>(world.layout.block_tokens)};
  paged_attention(run, lists.over(tables),
                  {.rows = world.rows,
                   .sequences = world.sequences.empty() ? nullptr : world.sequences.data(),
                   .lengths = world.lengths.empty() ? nullptr : world.lengths.data()},
                  {world.queries.data(), world.query_strides[0], world.query_strides[1]},
                  {made.out.data(), world.out_strides[0], world.out_strides[1]}, memory, world.layer,
                  workspace, how)
      .value();
  CHECK(cache == world.cache);
  return made;
}

/// Calls `see` with each output of two worlds in floats.
template <class See>
void each_output(const coded_world& of, const std::vector<std::byte>& codes,
                 const std::vector<std::byte>& floats, See see) {
  for (std::uint64_t row = 0; row < of.codes.rows; ++row) {
    if (!of.codes.sequences.empty() && of.codes.sequences[row] < 0) continue;
    for (std::uint32_t q = 0; q < of.codes.query_heads(); ++q) {
      for (std::uint64_t i = 0; i < of.codes.layout.vector_elements(1); ++i)
        see(load_element(dtype::f32,
                         codes.data() + row * of.codes.out_strides[0] + q * of.codes.out_strides[1] + 4 * i),
            load_element(dtype::f32, floats.data() + row * of.floats.out_strides[0] +
                                         q * of.floats.out_strides[1] + 4 * i));
    }
  }
}

}  // namespace

TEST_SUITE("coded_attention") {
  TEST_CASE("attention over codes of any form has the bits of attention over their dequantised floats") {
    for (const auto seed : seeds(60, 40)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      constexpr dtype types[] = {dtype::f32, dtype::bf16, dtype::f16};
      const coded_world world(random, types[seed % 3]);
      const attended codes = attend_padded(world.codes, host_executor{});
      const attended floats = attend_padded(world.floats, host_executor{});
      CHECK(are_rounded(world, codes.out, floats.out));
      CHECK(codes.log_sum_exp == floats.log_sum_exp);
      CHECK(codes.flag == 0);
    }
  }

  TEST_CASE("a grid, and a table of planes, give the same bits") {
    std::uint64_t by_planes = 0;
    for (const auto seed : seeds(40, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const coded_world world(random);
      const attended host = attend_padded(world.codes, host_executor{});
      CHECK(attend_padded(world.codes, grid_executor({.blocks = 2})) == host);
      // A table says one alignment for all planes: here one of bytes or of bf16 may leave less than floats
      // need.
      if (world.codes.layout.key_scales.element == dtype::f32 &&
          world.codes.layout.value_scales.element == dtype::f32 && !has_odd_planes(world.codes)) {
        ++by_planes;
        CHECK(attend_padded(world.codes, host_executor{}, true) == host);
      }
    }
    CHECK(by_planes > 0);
  }

  TEST_CASE("the host's vectors come near to attention over the dequantised floats on each path") {
    std::uint64_t seen = 0;
    for (const vector_path path : vector_paths) {
      if (!has_vector_path(path)) continue;
      CAPTURE(to_text(path));
      for (const auto seed : seeds(25, 20)) {
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        coded_world world(random);
        const attended floats = attend_padded(world.floats, host_executor{});
        world.codes.options.arithmetic = attention_arithmetic::host_vectors;
        const attended codes = attend_padded(world.codes, host_vector_executor(path));
        for (std::size_t i = 0; i < floats.log_sum_exp.size(); ++i) {
          const float a = codes.log_sum_exp[i];
          const float b = floats.log_sum_exp[i];
          CHECK((a == b || std::fabs(a - b) < 3e-5F * std::max(1.0F, std::fabs(b))));
        }
        double worst = 0;
        each_output(world, codes.out, floats.out, [&](float a, float b) {
          worst = std::max(worst, static_cast<double>(std::fabs(a - b)));
          ++seen;
        });
        CHECK(worst < 1e-4);
      }
    }
    CHECK(seen > 10'000);
  }

  TEST_CASE("a broken scale makes its rows NaN, by vectors too, and no other") {
    for (const auto seed : seeds(12, 6)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      coded_world world(random);
      if (world.codes.rows == 0 || world.codes.tables.empty() || world.codes.tables[0].empty()) continue;
      // All scales of the values of a block in use.
      const auto block = static_cast<std::uint64_t>(world.codes.tables[0][0]);
      const kv_layout& layout = world.codes.layout;
      const std::uint32_t scales = code_places_of(layout, 1).scales;
      const dtype element = layout.value_scales.element;
      for (std::uint64_t t = 0; t < layout.block_tokens; ++t) {
        for (std::uint64_t h = 0; h < layout.heads; ++h) {
          std::byte* const at =
              world.codes.cache.data() +
              layout.strides(scales, world.codes.blocks).offset(world.codes.layer, block, t, h);
          for (std::uint64_t i = 0; i < layout.vector_elements(scales); ++i)
            store_element(element, at + i * element_bytes(element), std::numeric_limits<float>::quiet_NaN());
        }
      }
      world.dequantize();
      const attended codes = attend_padded(world.codes, host_executor{});
      const attended floats = attend_padded(world.floats, host_executor{});
      CHECK(are_rounded(world, codes.out, floats.out));
      world.codes.options.arithmetic = attention_arithmetic::host_vectors;
      const attended vectors = attend_padded(world.codes, host_vector_executor());
      each_output(world, vectors.out, floats.out,
                  [&](float a, float b) { CHECK(std::isnan(a) == std::isnan(b)); });
    }
  }

  TEST_CASE("tensor cores refuse codes, and name what takes them") {
    std::mt19937_64 random(3);
    coded_world world(random);
    world.codes.options.arithmetic = attention_arithmetic::tensor_cores;
    CHECK_THROWS_WITH_AS(static_cast<void>(attend_padded(world.codes, host_executor{})),
                         "paged_attention: cache.layout: tensor cores multiply elements without scales, but "
                         "the layout has scales; choose attention_arithmetic::reproducible, or host_vectors "
                         "with a host_vector_executor",
                         argument_error);
  }

  TEST_CASE(
      "lists of tokens and ranges attend to codes with the bits of floats, and ranges merge to the whole") {
    for (const auto seed : seeds(40, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      coded_world world(random);
      if (world.codes.rows == 0 || world.codes.tables.empty()) continue;
      // A list of every other token of each row's sequence, from the last to the first.
      std::vector<std::int32_t> of_row = world.codes.sequences;
      if (of_row.empty()) {
        of_row.resize(world.codes.rows);
        std::iota(of_row.begin(), of_row.end(), 0);
      }
      const std::int32_t stride = 64;
      std::vector<std::int32_t> listed;
      for (std::int32_t& sequence : of_row) {
        sequence = std::max(sequence, 0);
        for (std::int32_t i = 0; i < stride; ++i)
          listed.push_back(world.codes.tokens[static_cast<std::size_t>(sequence)] - 1 - 2 * i);
      }
      const auto listed_by = [&](attention_world of) {
        of.options.window = 0;
        of.lengths.clear();
        of.sequences.clear();
        return attend_padded(of, host_executor{}, false, row_lists{of_row, listed, stride});
      };
      const attended codes = listed_by(world.codes);
      const attended floats = listed_by(world.floats);
      world.codes.sequences.clear();
      CHECK(are_rounded(world, codes.out, floats.out));
    }
  }
}
