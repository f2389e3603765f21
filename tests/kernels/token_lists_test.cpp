#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/kernels/token_lists.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "support/attention_runs.hpp"
#include "support/attention_world.hpp"
#include "support/listed_world.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

}  // namespace

TEST_SUITE("token_lists") {
  TEST_CASE("attention to listed tokens has the bits of attention to a sequence of only these") {
    std::uint64_t listed = 0;
    for (const auto seed : seeds(160, 40)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto arithmetic = seed % 4 == 0 ? attention_arithmetic::tensor_cores : attention_arithmetic{};
      const listed_world world(random, arithmetic);
      const attended dense = attend(world.dense, host_executor{});
      CHECK(attend_listed(world.world, world, host_executor{}, table_form::csr) == dense);
      CHECK(attend_listed(world.world, world, grid_executor({.blocks = 2}), table_form::padded) == dense);
      for (const std::int32_t count : world.counts)
        listed += static_cast<std::uint64_t>(count);
    }
    CHECK(listed > 2'000);
  }

  TEST_CASE(
      "a number without a place is left out and flagged, padding is left out, and a duplicate counts twice") {
    const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 8, .element = dtype::f32};
    std::vector<float> cache(layout.total_bytes(2) / sizeof(float));
    for (std::uint64_t t = 0; t < 16; ++t)
      cache[layout.strides(1, 2).offset(0, t / 8, t % 8, 0) / sizeof(float)] = static_cast<float>(t);
    const std::int32_t blocks[] = {0, 1};
    const std::int32_t length = 16;
    const padded_table_view tables{
        .block_table = blocks, .seq_lens = &length, .num_sequences = 1, .max_blocks = 2, .block_tokens = 8};
    const std::vector<float> query(8);
    std::uint32_t flag = 0;
    const auto attended_to = [&](const std::vector<std::int32_t>& listed, std::int32_t count) {
      std::vector<float> out(8, unknown_tokens);
      flag = 0;
      const token_lists<padded_table_view> lists{.tables = tables,
                                                 .listed = listed.data(),
                                                 .counts = &count,
                                                 .stride = static_cast<std::int32_t>(listed.size()),
                                                 .num_sequences = 1,
                                                 .block_tokens = 8};
      paged_attention(grid_executor{}, lists, {.rows = 1},
                      {reinterpret_cast<const std::byte*>(query.data()), 32, 32},
                      {reinterpret_cast<std::byte*>(out.data()), 32, 32},
                      {reinterpret_cast<std::byte*>(cache.data()), 2, layout}, 0, {},
                      {.query_heads = 1, .element = dtype::f32, .out_of_range = &flag})
          .value();
      return out[0];
    };
    CHECK(attended_to({3, 9}, 2) == 6);
    CHECK(attended_to({9, 3, -1, -1}, 4) == 6);
    CHECK(flag == 0);
    CHECK(attended_to({3, 9, 100}, 3) == 6);
    CHECK(flag == 1);
    CHECK(attended_to({3, 9, 9}, 3) == 7);
    CHECK(attended_to({3, 9, 15}, 2) == 6);
    CHECK(attended_to({3, 9}, 9) == 6);  // as many as the list has
    CHECK(flag == 0);
    CHECK(attended_to({3, 9}, 0) == 0);
    CHECK(attended_to({-1, -1}, 2) == 0);
  }

  TEST_CASE("windows, tokens dealt to ranks, and missing lists are refused") {
    const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 8, .element = dtype::f32};
    alignas(16) std::byte memory[4096]{};
    const std::int32_t block = 0;
    const std::int32_t length = 8;
    const padded_table_view tables{
        .block_table = &block, .seq_lens = &length, .num_sequences = 1, .max_blocks = 1, .block_tokens = 8};
    const std::int32_t token = 3;
    const auto told = [&](const token_lists<padded_table_view>& lists, const kv_layout& of,
                          std::uint32_t window) {
      const auto done = paged_attention(host_executor{}, lists, {.rows = 1}, {memory, 32, 32},
                                        {memory + 64, 32, 32}, {memory + 128, 1, of}, 0, {},
                                        {.query_heads = 1, .element = dtype::f32, .window = window});
      return done ? std::string() : done.error().message();
    };
    token_lists<padded_table_view> lists{
        .tables = tables, .listed = &token, .stride = 1, .num_sequences = 1, .block_tokens = 8};
    CHECK(told(lists, layout, 0).empty());
    CHECK(told(lists, layout, 4) ==
          "paged_attention: options.window, over lists of tokens; list the window's tokens: 4 requested, but "
          "the highest allowed is 0");
    kv_layout dealt = layout;
    dealt.part = {.cp_size = 2};
    CHECK(told(lists, dealt, 0).find("paged_attention: cache.layout: the kernel needs all tokens") == 0);
    lists.listed = nullptr;
    CHECK(told(lists, layout, 0).find("tables.listed: ") == 0);
  }
}
