#include <llmmem/kernels/detail/tensor_tiles.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "support/attention_runs.hpp"
#include "support/attention_world.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

attention_world tensor_world(std::mt19937_64& random) {
  return attention_world(random, attention_arithmetic::tensor_cores);
}

/// How far outputs of numbers up to 2 may be off whose weights, and queries of another type, were rounded to
/// 8 binary digits, or to 11.
double bound_of(const attention_world& world) {
  return world.layout.element == dtype::bf16 ? 0.03 : 0.004;
}

}  // namespace

TEST_SUITE("attention_tensor") {
  TEST_CASE("lanes find the elements of a product where the PTX specification places them") {
    // Of integers, so that no order of a sum makes another.
    std::mt19937_64 random(1);
    std::array<std::array<float, 16>, 16> a{};
    std::array<std::array<float, 8>, 16> b{};
    for (auto& row : a)
      for (float& each : row)
        each = static_cast<float>(random() % 17) - 8;
    for (auto& row : b)
      for (float& each : row)
        each = static_cast<float>(random() % 17) - 8;
    const auto pair = [](float first, float second) {
      return detail::nearest_pair<dtype::f16>(first, second);
    };
    host_lanes::held<detail::tensor_left> left;
    host_lanes::held<detail::tensor_right> right;
    host_lanes::held<detail::tensor_sum> sum;
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      const std::uint32_t g = lane / 4;
      const std::uint32_t t = lane % 4 * 2;
      left[lane] = {{pair(a[g][t], a[g][t + 1]), pair(a[g + 8][t], a[g + 8][t + 1]),
                     pair(a[g][t + 8], a[g][t + 9]), pair(a[g + 8][t + 8], a[g + 8][t + 9])}};
      right[lane] = {{pair(b[t][g], b[t + 1][g]), pair(b[t + 8][g], b[t + 9][g])}};
      sum[lane] = {{1, 2, 3, 4}};
    }
    detail::multiply_add<dtype::f16>(host_lanes(32), sum, left, right);
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      for (std::uint32_t i = 0; i < 4; ++i) {
        const std::uint32_t row = lane / 4 + i / 2 * 8;
        const std::uint32_t column = lane % 4 * 2 + i % 2;
        float expected = static_cast<float>(i + 1);
        for (std::uint32_t k = 0; k < 16; ++k)
          expected += a[row][k] * b[k][column];
        CHECK(sum[lane].of[i] == expected);
      }
    }
  }

  TEST_CASE("a matrix of eight rows is transposed among the lanes") {
    host_lanes::held<std::uint32_t> words;
    const auto element = [](std::uint32_t row, std::uint32_t column) { return 100 * row + column; };
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      const std::uint32_t column = lane % 4 * 2;
      words[lane] = element(lane / 4, column) | element(lane / 4, column + 1) << 16;
    }
    detail::transpose(host_lanes(32), words);
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      const std::uint32_t row = lane % 4 * 2;
      CHECK(words[lane] == (element(row, lane / 4) | element(row + 1, lane / 4) << 16));
    }
  }

  TEST_CASE("each output is close to the definition of attention, and nothing else is written") {
    std::uint64_t seen = 0;
    for (const auto seed : seeds(200, 60)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const attention_world world = tensor_world(random);
      seen += check(world, attend(world, host_executor{}), bound_of(world));
    }
    CHECK(seen > 100'000);
  }

  TEST_CASE("a grid of any size and tables of either form give the same bits") {
    for (const auto seed : seeds(60, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const attention_world world = tensor_world(random);
      const attended host = attend(world, host_executor{});
      const grid_executor grid({.blocks = static_cast<std::uint32_t>(random() % 4)});
      CHECK(attend(world, grid) == host);
      CHECK(attend(world, grid, table_form::padded) == host);
    }
  }

  TEST_CASE("the places, layout and length of blocks change no bit") {
    for (const auto seed : seeds(60, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const attention_world world = tensor_world(random);
      const attention_world other = rearranged(world, random);
      CHECK(attend(other, host_executor{}) == attend(world, host_executor{}));
    }
  }

  TEST_CASE("a NaN in a key or value makes only its own rows NaN") {
    std::mt19937_64 random(7);
    attention_world world = tensor_world(random);
    world.layout = {.layers = 1, .heads = 2, .head_dim = 64, .block_tokens = 16, .element = dtype::bf16};
    world.layer = 0;
    world.group = 3;
    world.options = {
        .query_heads = 6, .element = dtype::bf16, .arithmetic = attention_arithmetic::tensor_cores};
    world.scales[0].clear();
    world.scales[1].clear();
    world.tables = {{0, 1}, {2, 3}};
    world.tokens = {20, 32};
    world.sequences.clear();
    world.lengths.clear();
    world.rows = 2;
    world.blocks = 4;
    world.query_strides[1] = world.out_strides[1] = 128;
    world.query_strides[0] = world.out_strides[0] = 6 * 128;
    world.queries.assign(2 * 6 * 128, std::byte{0x3F});  // of bf16 each 0.747
    world.out.assign(world.queries.size(), std::byte{0});
    world.flatten();
    for (const std::uint32_t plane : {0U, 1U}) {
      CAPTURE(plane);
      world.cache.assign(world.layout.total_bytes(4), std::byte{0x3C});
      const std::size_t at = world.place(plane, 0, 17, 1);  // the second of the cache's heads
      world.cache[at] = world.cache[at + 1] = std::byte{0xFF};
      const attended made = attend(world, host_executor{});
      for (std::uint64_t row = 0; row < 2; ++row) {
        for (std::uint32_t query = 0; query < 6; ++query) {
          const std::byte* const out = made.out.data() + row * world.out_strides[0] + query * 128;
          const bool is_none = std::isnan(load_element(dtype::bf16, out));
          CHECK(is_none == (row == 0 && query >= 3));
          CHECK(std::isnan(made.log_sum_exp[row * 6 + query]) == (plane == 0 && row == 0 && query >= 3));
        }
      }
    }
  }

  TEST_CASE("queries of any magnitude are scaled to where halves keep all their digits") {
    for (const dtype element : {dtype::bf16, dtype::f32}) {
      CAPTURE(element);
      for (const float size : {0x1p-100F, 0x1p-20F, 1.0F, 0x1p+20F, 0x1p+100F}) {
        CAPTURE(size);
        std::mt19937_64 random(11);
        attention_world world = tensor_world(random);
        while (world.layout.element != dtype::fp8_e4m3 || world.options.element != element || world.rows < 2)
          world = tensor_world(random);
        world.options.scale = 0.1F / size;  // the products are the same
        for (std::size_t i = 0; i < world.queries.size(); i += element_bytes(element))
          store_element(element, world.queries.data() + i,
                        load_element(element, world.queries.data() + i) * size);
        check(world, attend(world, host_executor{}), bound_of(world));
      }
    }
  }

  TEST_CASE("forms that tensor cores cannot multiply are refused before anything runs") {
    std::mt19937_64 random(3);
    attention_world world = tensor_world(random);
    const auto error = [&](kv_layout layout) {
      layout.heads = 1;
      attention_options options{
          .query_heads = 1, .element = layout.element, .arithmetic = attention_arithmetic::tensor_cores};
      return paged_attention(host_executor{}, padded_table_view{.block_tokens = 16}, {}, {}, {},
                             {{}, 0, layout}, 0, {}, options)
          .error();
    };
    CHECK(error({.layers = 1, .head_dim = 64, .element = dtype::f32}) ==
          failure{errc::no_conversion, 0, static_cast<std::uint64_t>(dtype::f16),
                  static_cast<std::uint64_t>(dtype::f32)});
    CHECK(error({.layers = 1, .head_dim = 96}) == failure{errc::size_mismatch, 0, 96, 128});
    CHECK(error({.layers = 1, .head_dim = 256}) == failure{errc::size_mismatch, 0, 256, 128});
    CHECK(error({.layers = 1, .head_dim = 128, .value_dim = 64}) == failure{errc::size_mismatch, 0, 64, 128});
  }

  TEST_CASE("shares are planned for the warps that eight heads take") {
    const kv_layout layout{.layers = 1, .heads = 8, .head_dim = 128};
    const auto plan = [&](std::uint32_t query_heads, std::uint64_t rows) {
      return plan_attention(rows, query_heads, layout, 100'000, {}, attention_arithmetic::tensor_cores);
    };
    CHECK(plan(64, 4) == plan(8, 4));  // one warp for a head of the cache either way
    CHECK(plan(72, 4) == plan(64, 8));
    CHECK(plan(64, 10'000) == attention_split{});
    CHECK(plan(64, 4).count == 98);
    for (const std::uint64_t tokens : {1000U, 1500U, 20'000U})  // whole steps of a warp
      CHECK(plan_attention(1, 64, layout, tokens, {}, attention_arithmetic::tensor_cores).tokens % 16 == 0);
  }
}
