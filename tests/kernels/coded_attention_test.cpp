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
#include "support/tensor_bounds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::paging::scale_group;
using llmmem::testing::grid_executor;

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

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

/// How far the products of a row's query head and its outputs may be from those of floats, by the bounds of
/// `host_integers`.
struct integer_bounds {
  double product = 0;
  std::vector<double> outputs{};
};
integer_bounds bounds_of(const coded_world& of, std::uint64_t row, std::uint32_t query) {
  const attention_world& world = of.floats;
  const kv_layout& layout = world.layout;
  const std::uint32_t head = query / world.group;
  const auto [sequence, first, end, scale] = world.attended_by(row);
  const std::byte* const asked =
      world.queries.data() + row * world.query_strides[0] + query * world.query_strides[1];
  double largest = 0;
  for (std::uint64_t e = 0; e < layout.vector_elements(0); ++e)
    largest = std::max(largest, std::fabs(static_cast<double>(load_element(dtype::f32, asked + 4 * e))));
  integer_bounds out;
  std::vector<double> products;
  std::vector<double> sizes;  // of the values, over the scale of the tokens
  for (std::int64_t t = first; t < end; ++t) {
    double product = 0;
    double size = 0;
    for (std::uint64_t e = 0; e < layout.vector_elements(0); ++e) {
      const double key = static_cast<double>(
          load_element(dtype::f32, world.cache.data() + world.place(0, sequence, t, head) + 4 * e));
      product += key * static_cast<double>(load_element(dtype::f32, asked + 4 * e));
      size += of.codes.layout.key_scales.numbers == 2 ? of.size_without_zero(0, sequence, t, head, e)
                                                      : std::fabs(key);
    }
    products.push_back(product * scale);
    out.product = std::max(out.product, size * scale * largest / 254);
  }
  out.product += 1e-5;
  double most = -std::numeric_limits<double>::infinity();
  for (const double each : products)
    most = std::max(most, each);
  double total = 0;
  double weighted = 0;  // the largest weight times a value's scale
  const kv_layout& coded = of.codes.layout;
  const auto each_tokens = static_cast<std::int64_t>(coded.block_tokens);
  std::vector<double> scales;
  for (std::size_t i = 0; i < products.size(); ++i) {
    const double weight = std::exp(products[i] - most);
    total += weight;
    const std::int64_t position = first + static_cast<std::int64_t>(i);
    const auto block = static_cast<std::uint64_t>(
        world.tables[static_cast<std::size_t>(sequence)][static_cast<std::size_t>(position / each_tokens)]);
    const auto token = static_cast<std::uint64_t>(position % each_tokens);
    // The scale is what a code of 1 would be.
    double of_code = 0;
    const std::byte* const codes =
        of.codes.cache.data() + coded.strides(1, of.codes.blocks).offset(of.codes.layer, block, token, head);
    for (std::uint64_t e = 0; e < layout.vector_elements(1); ++e) {
      const float code = number_of_code(coded.element_of(1), codes, e);
      if (code != 0)
        of_code = of.size_without_zero(1, sequence, position, head, e) / std::fabs(static_cast<double>(code));
    }
    scales.push_back(of_code);
    weighted = std::max(weighted, weight * of_code);
  }
  const double swing = std::exp(2 * out.product);
  out.outputs.assign(layout.vector_elements(1), 1e-5);
  for (std::size_t i = 0; i < products.size(); ++i) {
    const double weight = std::exp(products[i] - most);
    for (std::uint64_t e = 0; e < layout.vector_elements(1); ++e) {
      const double value = std::fabs(static_cast<double>(load_element(
          dtype::f32, world.cache.data() +
                          world.place(1, sequence, first + static_cast<std::int64_t>(i), head) + 4 * e)));
      const double code =
          scales[i] == 0
              ? 0
              : of.size_without_zero(1, sequence, first + static_cast<std::int64_t>(i), head, e) / scales[i];
      out.outputs[e] += ((swing - 1) * weight * value + swing * weighted / 510 * code) / total;
    }
  }
  return out;
}

/// A sequence for each code of a form, of one token whose keys and values have this code first, then zeros.
struct one_code_each {
  kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 1};
  std::int32_t codes = 0;
  std::vector<std::byte> cache{};
  std::vector<std::int32_t> table{};
  std::vector<std::int32_t> lengths{};

  one_code_each(dtype code, float scale) {
    layout.element = code;
    layout.key_scales = layout.value_scales = {.group = scale_group::vector};
    codes = code == dtype::int8 ? 256 : 16;
    const auto blocks = static_cast<std::uint64_t>(codes);
    cache.resize(layout.total_bytes(blocks));
    for (std::uint32_t p = 0; p < 2; ++p) {
      for (std::uint64_t block = 0; block < blocks; ++block) {
        cache[layout.strides(p, blocks).offset(0, block, 0, 0)] = static_cast<std::byte>(block);
        store_element(
            dtype::f32,
            cache.data() + layout.strides(code_places_of(layout, p).scales, blocks).offset(0, block, 0, 0),
            scale);
      }
    }
    table.resize(blocks);
    std::iota(table.begin(), table.end(), 0);
    lengths.assign(blocks, 1);
  }
  [[nodiscard]] float number(std::int32_t code) const {
    const auto byte = static_cast<std::byte>(code);
    return number_of_code(layout.element, &byte, 0);
  }
};

}  // namespace

TEST_SUITE("integer_attention") {
  TEST_CASE("integer dots come within their bounds of attention over the dequantised floats on each path") {
    std::uint64_t seen = 0;
    double error = 0;
    double allowed = 0;
    for (const auto seed : seeds(6, 4)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      coded_world world(random, dtype::f32, coded_kind::integers);
      const attended floats = attend_padded(world.floats, host_executor{});
      world.codes.options.arithmetic = attention_arithmetic::host_integers;
      std::vector<integer_bounds> bounds;
      for (std::size_t at = 0; at < floats.log_sum_exp.size(); ++at) {
        const std::uint64_t row = at / world.codes.query_heads();
        const bool is_padding = !world.codes.sequences.empty() && world.codes.sequences[row] < 0;
        bounds.push_back(
            is_padding ? integer_bounds{}
                       : bounds_of(world, row, static_cast<std::uint32_t>(at % world.codes.query_heads())));
      }
      for (const vector_path path : vector_paths) {
        if (!has_vector_path(path)) continue;
        CAPTURE(to_text(path));
        const attended codes = attend_padded(world.codes, host_vector_executor(path));
        CHECK(codes.flag == floats.flag);
        for (std::size_t at = 0; at < bounds.size(); ++at) {
          if (bounds[at].outputs.empty()) continue;
          const float a = codes.log_sum_exp[at];
          const float b = floats.log_sum_exp[at];
          CHECK((a == b || std::fabs(a - b) <= bounds[at].product + 1e-6 * std::fabs(b)));
          const std::uint64_t row = at / world.codes.query_heads();
          const std::uint64_t q = at % world.codes.query_heads();
          for (std::uint64_t e = 0; e < world.codes.layout.vector_elements(1); ++e) {
            const auto output = [&](const std::vector<std::byte>& out, const attention_world& of) {
              return static_cast<double>(load_element(
                  dtype::f32, out.data() + row * of.out_strides[0] + q * of.out_strides[1] + 4 * e));
            };
            const double off = std::fabs(output(codes.out, world.codes) - output(floats.out, world.floats));
            if (off > bounds[at].outputs[e]) CHECK(off <= bounds[at].outputs[e]);
            error += off;
            allowed += bounds[at].outputs[e];
            ++seen;
          }
        }
      }
    }
    CHECK(error < allowed / 4);
    CHECK(seen > 5'000);
  }

  TEST_CASE("every code of keys, queries and values has its product, and every code of weights its weight") {
    for (const vector_path path : vector_paths) {
      if (!has_vector_path(path)) continue;
      CAPTURE(to_text(path));
      for (const dtype code : {dtype::int8, dtype::int4}) {
        CAPTURE(name_of(code));
        const one_code_each all(code, 0.25F);
        const padded_table_view tables{.block_table = all.table.data(),
                                       .seq_lens = all.lengths.data(),
                                       .num_sequences = all.codes,
                                       .max_blocks = 1,
                                       .block_tokens = 1};
        // 255 codes of queries, in 16 heads a call. The second element makes the scale 1.
        constexpr std::uint32_t heads = 16;
        std::vector<float> out(static_cast<std::size_t>(all.codes) * heads * 8);
        std::vector<float> logs(static_cast<std::size_t>(all.codes) * heads);
        for (int from = -127; from <= 127; from += int{heads}) {
          std::vector<float> queries(out.size());
          for (std::size_t i = 0; i < logs.size(); ++i) {
            queries[8 * i] = static_cast<float>(std::min(from + static_cast<int>(i % heads), 127));
            queries[8 * i + 1] = 127;
          }
          attention_options how{.query_heads = heads,
                                .element = dtype::f32,
                                .scale = 1,
                                .arithmetic = attention_arithmetic::host_integers,
                                .log_sum_exp = logs.data()};
          paged_attention(
              host_vector_executor(path), tables, {.rows = static_cast<std::uint64_t>(all.codes)},
              {reinterpret_cast<const std::byte*>(queries.data()), std::uint64_t{32} * heads, 32},
              {reinterpret_cast<std::byte*>(out.data()), std::uint64_t{32} * heads, 32},
              {const_cast<std::byte*>(all.cache.data()), static_cast<std::uint64_t>(all.codes), all.layout},
              0, {}, how)
              .value();
          for (std::size_t i = 0; i < logs.size(); ++i) {
            const float number = all.number(static_cast<std::int32_t>(i / heads)) * 0.25F;
            const bool is_product =
                std::fabs(logs[i] - number * queries[8 * i]) <= 2e-6F * std::fabs(logs[i]);
            if (!is_product) CHECK(logs[i] == number * queries[8 * i]);
            const bool is_value = std::fabs(out[8 * i] - number) <= 2e-6F * std::fabs(number) &&
                                  out[8 * i + 1] == 0 && out[8 * i + 7] == 0;
            if (!is_value) CHECK(out[8 * i] == number);
          }
        }
      }
    }
  }

  TEST_CASE("a scale that is negative, infinite or NaN, and such a query, make rows NaN") {
    one_code_each all(dtype::int8, 1);
    const std::int32_t length = 3;
    const padded_table_view tables{.block_table = all.table.data() + 1,
                                   .seq_lens = &length,
                                   .num_sequences = 1,
                                   .max_blocks = 3,
                                   .block_tokens = 1};
    const auto attend = [&](float query, float value_scale, float key_scale = 1) {
      for (const std::uint32_t p : {0U, 1U}) {
        store_element(dtype::f32,
                      all.cache.data() +
                          all.layout.strides(code_places_of(all.layout, p).scales, 256).offset(0, 2, 0, 0),
                      p == 0 ? key_scale : value_scale);
      }
      const std::vector<float> queries{query, 0, 0, 0, 0, 0, 0, 0};
      std::vector<float> out(8);
      paged_attention(
          host_vector_executor(), tables, {.rows = 1},
          {reinterpret_cast<const std::byte*>(queries.data()), 32, 32},
          {reinterpret_cast<std::byte*>(out.data()), 32, 32}, {all.cache.data(), 256, all.layout}, 0, {},
          {.query_heads = 1, .element = dtype::f32, .arithmetic = attention_arithmetic::host_integers})
          .value();
      return out[0];
    };
    constexpr float infinity = std::numeric_limits<float>::infinity();
    CHECK(attend(0, 1) == doctest::Approx(2));
    CHECK(attend(0, 0) == doctest::Approx(4.0 / 3));
    CHECK(std::isnan(attend(0, -1)));
    CHECK(std::isnan(attend(0, nan_value)));
    CHECK(std::isnan(attend(0, infinity)));
    CHECK(std::isnan(attend(infinity, 1)));
    CHECK(std::isnan(attend(nan_value, 1)));
    CHECK(attend(1e-38F, 1) == doctest::Approx(2));
    // A weight of 0 hides none of them.
    CHECK(attend(-1000, 1) == doctest::Approx(1));
    for (const float broken : {-1.0F, infinity, nan_value}) {
      CHECK(std::isnan(attend(-1000, broken)));
      CHECK(std::isnan(attend(-1, 1, broken)));
      CHECK(std::isnan(attend(1, 1, broken)));
    }
  }

  TEST_CASE("integer dots refuse other forms and other executors, and name what takes them") {
    std::mt19937_64 random(3);
    coded_world world(random, dtype::f32, coded_kind::integers);
    world.codes.options.arithmetic = attention_arithmetic::host_integers;
    CHECK_THROWS_WITH_AS(
        static_cast<void>(attend_padded(world.codes, host_executor{})),
        "paged_attention: options.arithmetic (host_integers needs a host_vector_executor): 3 "
        "requested, but the highest allowed is 1",
        argument_error);
    const kv_layout shape = world.codes.layout;
    const auto refused = [&](const auto& change) {
      kv_layout layout = shape;
      change(layout);
      return detail::check_integers(layout);
    };
    CHECK(refused([](kv_layout&) {}));
    for (const auto& done : {refused([](kv_layout& of) { of.element = dtype::fp8_e4m3; }),
                             refused([](kv_layout& of) { of.value_element = dtype::fp4_e2m1; }),
                             refused([](kv_layout& of) { of.key_scales.group = scale_group::channel; }),
                             refused([](kv_layout& of) { of.key_scales = of.value_scales = {}; })}) {
      REQUIRE(!done);
      CHECK(done.error().code == errc::unsupported_layout);
      CHECK(done.error().index == 16);
    }
    CHECK(refused([](kv_layout& of) { of.key_scales.group = scale_group::channel; }).error().message() ==
          "paged_attention: options.arithmetic: integer dots take keys and values in int8 or int4 with one "
          "scale for each vector; plane 0 of the cache has other elements or scales (scale_group 3); choose "
          "attention_arithmetic::host_vectors");
  }
}

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

  TEST_CASE("tensor cores over codes come within their bounds of attention over the dequantised floats") {
    std::uint64_t worlds = 0;
    double error = 0;
    double allowed = 0;
    std::uint64_t seen[2] = {0, 0};  // with rounded values, and exact ones
    for (const auto seed : seeds_within(60, 6)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      // The first ones have packs with a scale each, and zeros next to scales.
      const bool is_first = worlds < 2;
      const coded_kind kind = worlds == 0     ? coded_kind::short_runs
                              : worlds == 1   ? coded_kind::zeros
                              : seed % 2 == 0 ? coded_kind::any
                                              : coded_kind::exact;
      ++worlds;
      coded_world world(random, dtype::f32, kind, attention_arithmetic::tensor_cores);
      while (is_first && (world.codes.rows == 0 || world.codes.indices.size() < 2))
        world = coded_world(random, dtype::f32, kind, attention_arithmetic::tensor_cores);
      const attended floats = attend_padded(world.floats, host_executor{});
      const attended codes = attend_padded(world.codes, host_executor{});
      if (seed % 4 < 2)
        CHECK(attend_padded(world.codes, grid_executor({.blocks = 3}), !has_odd_planes(world.codes)) ==
              codes);
      CHECK(codes.flag == floats.flag);
      const bool is_exact = has_exact_numbers(world.codes.layout);
      for (std::size_t at = 0; at < floats.log_sum_exp.size(); ++at) {
        const std::uint64_t row = at / world.codes.query_heads();
        const auto query = static_cast<std::uint32_t>(at % world.codes.query_heads());
        if (!world.codes.sequences.empty() && world.codes.sequences[row] < 0) continue;
        const tensor_bounds bounds = tensor_bounds_of(world, row, query);
        const float a = codes.log_sum_exp[at];
        const float b = floats.log_sum_exp[at];
        CHECK((a == b || std::fabs(static_cast<double>(a) - static_cast<double>(b)) <= bounds.product));
        for (std::uint64_t e = 0; e < world.codes.layout.vector_elements(1); ++e) {
          const auto output = [&](const std::vector<std::byte>& out, const attention_world& of) {
            return static_cast<double>(load_element(
                dtype::f32, out.data() + row * of.out_strides[0] + query * of.out_strides[1] + 4 * e));
          };
          const double off = std::fabs(output(codes.out, world.codes) - output(floats.out, world.floats));
          if (off > bounds.outputs[e]) CHECK(off <= bounds.outputs[e]);
          error += off;
          allowed += bounds.outputs[e];
          ++seen[is_exact ? 1 : 0];
        }
      }
    }
    CHECK(error < allowed / 4);
    CHECK(seen[0] > 1'000);
    CHECK(seen[1] > 1'000);
  }

  TEST_CASE("tensor cores give the same digits over scales of any size") {
    std::mt19937_64 random(21);
    const auto draw = [&] {
      return coded_world(random, dtype::f32, coded_kind::exact, attention_arithmetic::tensor_cores);
    };
    coded_world world = draw();
    while (world.codes.rows == 0 || world.codes.layout.key_scales.has_global ||
           world.codes.layout.value_scales.has_global || world.codes.layout.element_of(1) != dtype::fp4_e2m1)
      world = draw();
    world.codes.options.scales.is_by_head = false;
    const auto attend = [&](float keys, float values) {
      attention_world of = world.codes;
      of.scales[0].assign(1, keys);
      of.scales[1].assign(1, values);
      of.options.scale = 0.125F / keys;
      return attend_padded(of, host_executor{});
    };
    const attended one = attend(1, 1);
    for (const float size : {0x1p-90F, 0x1p-20F, 0x1p+20F, 0x1p+90F, 0x1p+117F}) {
      CAPTURE(size);
      if (size < 0x1p+100F) CHECK(attend(size, 1) == one);  // a key's products are larger than the key
      const attended large = attend(1, size);
      for (std::size_t i = 0; i + 4 <= one.out.size(); i += 4) {
        if (std::equal(one.out.begin() + static_cast<std::ptrdiff_t>(i),
                       one.out.begin() + static_cast<std::ptrdiff_t>(i + 4),
                       world.codes.out.begin() + static_cast<std::ptrdiff_t>(i)))
          continue;
        CHECK(load_element(dtype::f32, large.out.data() + i) ==
              load_element(dtype::f32, one.out.data() + i) * size);
      }
    }
  }

  TEST_CASE("tensor cores keep the digits of a query's elements next to one that is far larger") {
    std::mt19937_64 random(22);
    const auto draw = [&] {
      return coded_world(random, dtype::f32, coded_kind::exact, attention_arithmetic::tensor_cores);
    };
    coded_world world = draw();
    while (world.codes.rows == 0 || world.codes.indices.size() < 2 ||
           world.codes.layout.key_scales.is_rotated)
      world = draw();
    // The first element, to which every key has a zero.
    const auto enlarge = [](attention_world& of) {
      for (std::uint64_t row = 0; row < of.rows; ++row) {
        for (std::uint32_t q = 0; q < of.query_heads(); ++q)
          store_element(dtype::f32, of.queries.data() + row * of.query_strides[0] + q * of.query_strides[1],
                        0x1p24F);
      }
    };
    enlarge(world.codes);
    enlarge(world.floats);
    attention_world& of = world.codes;
    for (std::uint64_t b = 0; b < of.blocks; ++b) {
      for (std::uint64_t t = 0; t < of.layout.block_tokens; ++t) {
        for (std::uint64_t h = 0; h < of.layout.heads; ++h)
          of.cache[of.layout.strides(0, of.blocks).offset(of.layer, b, t, h)] = std::byte{0};
      }
    }
    world.dequantize();
    const attended floats = attend_padded(world.floats, host_executor{});
    const attended codes = attend_padded(of, host_executor{});
    for (std::size_t at = 0; at < floats.log_sum_exp.size(); ++at) {
      const std::uint64_t row = at / of.query_heads();
      if (!of.sequences.empty() && of.sequences[row] < 0) continue;
      const tensor_bounds bounds =
          tensor_bounds_of(world, row, static_cast<std::uint32_t>(at % of.query_heads()));
      const float a = codes.log_sum_exp[at];
      const float b = floats.log_sum_exp[at];
      CHECK((a == b || std::fabs(static_cast<double>(a) - static_cast<double>(b)) <= bounds.product));
    }
  }

  TEST_CASE("tensor cores keep a NaN among codes and scales to its own rows and heads") {
    for (const auto seed : seeds_within(24, 4)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      coded_world world(random, dtype::f32, seed % 2 == 0 ? coded_kind::any : coded_kind::exact,
                        attention_arithmetic::tensor_cores);
      const attention_world& of = world.codes;
      if (of.tables.empty() || of.tables[0].empty()) continue;
      const auto p = static_cast<std::uint32_t>(seed / 2 % 2);
      const std::uint32_t scales = code_places_of(of.layout, p).scales;
      const auto& form = p == 0 ? of.layout.key_scales : of.layout.value_scales;
      store_element(
          form.element,
          world.codes.cache.data() + of.layout.strides(scales, of.blocks)
                                         .offset(of.layer, static_cast<std::uint64_t>(of.tables[0][0]), 0, 0),
          nan_value);
      world.dequantize();
      const attended codes = attend_padded(world.codes, host_executor{});
      const attended floats = attend_padded(world.floats, host_executor{});
      each_output(world, codes.out, floats.out,
                  [&](float a, float b) { CHECK(std::isnan(a) == std::isnan(b)); });
    }
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
