#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/hot_rows.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/kernels/token_lists.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
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

namespace {

/// A buffer of rows by its definition: a list by last use, searched from its beginning.
struct rows_by_use {
  explicit rows_by_use(std::size_t count) : slots(count) {
    for (std::size_t slot = count; slot > 0; --slot)
      free.push_back(static_cast<std::int32_t>(slot - 1));
  }

  std::size_t slots;
  std::vector<hot_miss> rows{};      // the oldest first
  std::vector<std::int32_t> free{};  // the last is the next

  std::vector<std::int32_t> resolve(const std::vector<std::int32_t>& wanted, std::int32_t newest,
                                    std::int32_t positions, std::vector<hot_miss>& misses) {
    misses.clear();
    const auto find = [&](std::int32_t position) {
      return std::find_if(rows.begin(), rows.end(),
                          [&](const hot_miss& each) { return each.position == position; });
    };
    const auto renew = [&](std::int32_t position) {
      if (const auto at = find(position); at != rows.end()) std::rotate(at, at + 1, rows.end());
    };
    const auto is_kept = [&](std::int32_t position) {
      return position >= 0 && position < positions && position != newest;
    };
    if (const auto at = find(newest); at != rows.end()) {
      free.push_back(at->slot);
      rows.erase(at);
    }
    for (const std::int32_t each : wanted)
      if (is_kept(each)) renew(each);
    std::vector<std::int32_t> out;
    for (const std::int32_t each : wanted) {
      if (!is_kept(each)) {
        out.push_back(each >= 0 && each == newest ? static_cast<std::int32_t>(slots) : -1);
        continue;
      }
      if (find(each) == rows.end()) {
        if (free.empty()) {
          free.push_back(rows.front().slot);
          rows.erase(rows.begin());
        }
        const hot_miss made{each, free.back()};
        free.pop_back();
        rows.push_back(made);
        misses.push_back(made);
      }
      out.push_back(find(each)->slot);
    }
    return out;
  }
};

}  // namespace

TEST_SUITE("hot_rows") {
  TEST_CASE(
      "buffers are those of the definition after each step, on hosts and in grids, and hold the pool's "
      "rows") {
    std::uint64_t hits = 0;
    std::uint64_t missed = 0;
    for (const auto seed : seeds(60, 12)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const bool is_large = seed % 6 == 5;  // more slots, and wanted rows, than a warp has lanes
      const hot_rows_shape shape{
          .sequences = static_cast<std::uint32_t>(1 + random() % 3),
          .slots = static_cast<std::uint32_t>(1 + random() % (is_large ? 100 : 12)),
          .positions = static_cast<std::uint32_t>(1 + random() % (is_large ? 250 : 40))};
      const auto k = static_cast<std::uint32_t>(random() % (shape.slots + 1));
      const std::uint32_t stride = k + static_cast<std::uint32_t>(random() % 3);
      constexpr std::uint64_t row_bytes = 32;
      constexpr std::int32_t block_tokens = 4;
      const auto columns = static_cast<std::int32_t>((shape.positions + 3) / 4);
      const std::uint64_t blocks = static_cast<std::uint64_t>(columns) * shape.sequences;
      std::vector<std::int32_t> table(blocks);
      std::iota(table.begin(), table.end(), 0);
      std::shuffle(table.begin(), table.end(), random);
      if (seed % 3 == 0) table[random() % table.size()] = -1;  // of which the pool has no row
      const padded_table_view tables{.block_table = table.data(),
                                     .num_sequences = static_cast<std::int32_t>(shape.sequences),
                                     .max_blocks = columns,
                                     .block_tokens = block_tokens};
      struct alignas(16) packet_of_pool {
        std::uint64_t of[2];
        bool operator==(const packet_of_pool&) const = default;
      };
      std::vector<packet_of_pool> pool(blocks * 4 * 2);
      for (packet_of_pool& each : pool)
        each = {{random(), random()}};
      std::vector<std::int32_t> state[2];
      std::vector<packet_of_pool> rows[2];
      for (auto& each : state)
        each.assign(hot_rows_words(shape) * shape.sequences, 77);
      for (auto& each : rows)
        each.resize((shape.slots + 1) * shape.sequences * 2);
      reset_hot_rows(host_executor{}, shape, state[0]).value();
      reset_hot_rows(grid_executor({.blocks = 2}), shape, state[1]).value();
      std::vector<rows_by_use> wanted_state(shape.sequences, rows_by_use{shape.slots});
      for (int turn = 0; turn < 25; ++turn) {
        CAPTURE(turn);
        std::vector<std::int32_t> wanted(std::size_t{stride} * shape.sequences, 5);
        std::vector<std::int32_t> newest(shape.sequences);
        for (auto& each : wanted)
          each = static_cast<std::int32_t>(random() % (shape.positions + 2)) - 1;
        for (auto& each : newest)
          each = static_cast<std::int32_t>(random() % (shape.positions + 1)) - 1;
        if (turn == 12) {  // a new sequence takes the place of one of them
          const auto which = static_cast<std::uint32_t>(random() % shape.sequences);
          reset_hot_rows(host_executor{}, shape, state[0], which, 1).value();
          reset_hot_rows(grid_executor(), shape, state[1], which, 1).value();
          wanted_state[which] = rows_by_use{shape.slots};
        }
        std::vector<std::int32_t> slots[2];
        std::vector<hot_miss> misses[2];
        std::vector<std::uint32_t> counts[2];
        const auto step_of = [&](std::size_t i, const auto& run) {
          slots[i].assign(wanted.size(), -9);
          misses[i].assign(wanted.size(), {-9, -9});
          counts[i].assign(shape.sequences, 99);
          const hot_rows_step step{.wanted = wanted.data(),
                                   .newest = turn % 4 == 0 ? nullptr : newest.data(),
                                   .slots = slots[i].data(),
                                   .misses = misses[i].data(),
                                   .counts = counts[i].data(),
                                   .wanted_count = k,
                                   .stride = stride};
          resolve_hot_rows(run, shape, state[i], step).value();
          fetch_hot_rows(
              run, shape, step, tables,
              {reinterpret_cast<const std::byte*>(pool.data()), blocks, row_bytes * block_tokens, row_bytes},
              std::as_writable_bytes(std::span(rows[i])), row_bytes)
              .value();
        };
        step_of(0, host_executor{});
        step_of(1, grid_executor({.blocks = 3}));
        CHECK(state[0] == state[1]);
        CHECK(slots[0] == slots[1]);
        CHECK(misses[0] == misses[1]);
        CHECK(counts[0] == counts[1]);
        CHECK(rows[0] == rows[1]);
        for (std::uint32_t s = 0; s < shape.sequences; ++s) {
          const auto from = wanted.begin() + static_cast<std::ptrdiff_t>(std::size_t{s} * stride);
          std::vector<hot_miss> lost;
          const std::vector<std::int32_t> where =
              wanted_state[s].resolve({from, from + k}, turn % 4 == 0 ? -1 : newest[s],
                                      static_cast<std::int32_t>(shape.positions), lost);
          REQUIRE(counts[0][s] == lost.size());
          missed += lost.size();
          CHECK(std::equal(lost.begin(), lost.end(),
                           misses[0].begin() + static_cast<std::ptrdiff_t>(s * stride)));
          for (std::uint32_t i = 0; i < k; ++i) {
            const std::int32_t slot = slots[0][std::size_t{s} * stride + i];
            REQUIRE(slot == where[i]);
            if (slot < 0 || slot == static_cast<std::int32_t>(shape.slots)) continue;
            ++hits;
            const std::int32_t position = wanted[std::size_t{s} * stride + i];
            const std::int32_t block = table[static_cast<std::size_t>(columns) * s +
                                             static_cast<std::size_t>(position / block_tokens)];
            for (std::size_t part = 0; part < 2; ++part) {
              const packet_of_pool there =
                  block < 0
                      ? packet_of_pool{}
                      : pool[(static_cast<std::size_t>(block) * 4 + static_cast<std::size_t>(position % 4)) *
                                 2 +
                             part];
              REQUIRE(rows[0][((shape.slots + 1) * s + static_cast<std::size_t>(slot)) * 2 + part] == there);
            }
          }
          if (k < stride) CHECK(slots[0][std::size_t{s} * stride + k] == -9);
        }
      }
    }
    CHECK(missed > 1'000);
    CHECK(hits > missed);
  }

  TEST_CASE(
      "attention over the slots has the bits of attention over the pool, also where sequences are cut") {
    std::uint64_t cuts = 0;
    for (const auto seed : seeds(24, 8)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const hot_rows_shape shape{.sequences = static_cast<std::uint32_t>(1 + random() % 3),
                                 .slots = static_cast<std::uint32_t>(1 + random() % 10),
                                 .positions = 32};
      const auto k = static_cast<std::uint32_t>(1 + random() % shape.slots);
      constexpr std::uint64_t columns = 8;
      // A token's keys and values are a row of 128 bytes: of the pool by blocks of 4, of the buffers by
      // sequences.
      kv_layout layout{.layers = 1,
                       .heads = 2,
                       .head_dim = 8,
                       .block_tokens = 4,
                       .element = dtype::f32,
                       .order = block_order::layer_first_joined};
      kv_layout near = layout;
      near.block_tokens = shape.slots + 1;
      struct alignas(16) row {
        float of[32];
      };
      const std::uint64_t blocks = columns * shape.sequences;
      std::vector<row> pool(blocks * 4);
      std::vector<row> rows((shape.slots + 1) * shape.sequences);
      REQUIRE(layout.total_bytes(blocks) == pool.size() * sizeof(row));
      REQUIRE(near.total_bytes(shape.sequences) == rows.size() * sizeof(row));
      std::vector<std::int32_t> table(blocks);
      std::iota(table.begin(), table.end(), 0);
      std::shuffle(table.begin(), table.end(), random);
      std::vector<std::int32_t> lengths(shape.sequences, 0);
      std::vector<std::int32_t> near_table(shape.sequences);
      std::iota(near_table.begin(), near_table.end(), 0);
      const std::vector<std::int32_t> near_lengths(shape.sequences,
                                                   static_cast<std::int32_t>(shape.slots + 1));
      std::vector<std::int32_t> state(hot_rows_words(shape) * shape.sequences);
      reset_hot_rows(host_executor{}, shape, state).value();
      for (int turn = 0; turn < 40; ++turn) {
        CAPTURE(turn);
        std::vector<std::int32_t> wanted(std::size_t{k} * shape.sequences, -1);
        std::vector<std::int32_t> newest(shape.sequences);
        for (std::uint32_t s = 0; s < shape.sequences; ++s) {
          std::int32_t& length = lengths[s];
          if (length == 32 || (length > 3 && random() % 6 == 0)) {
            length -= static_cast<std::int32_t>(1 + random() % 3);
            ++cuts;
          }
          newest[s] = length++;
          row made{};
          for (float& each : made.of)
            each = static_cast<float>(random() % 401) / 100 - 2;
          const std::int32_t block = table[columns * s + static_cast<std::size_t>(newest[s] / 4)];
          pool[static_cast<std::size_t>(block) * 4 + static_cast<std::size_t>(newest[s] % 4)] = made;
          rows[(shape.slots + 1) * s + shape.slots] = made;
          std::vector<std::int32_t> all(static_cast<std::size_t>(length));
          std::iota(all.begin(), all.end(), 0);
          std::shuffle(all.begin(), all.end(), random);
          all.resize(std::min<std::size_t>(all.size(), 1 + random() % k));
          if (random() % 2 == 0) all[random() % all.size()] = newest[s];
          std::copy(all.begin(), all.end(), wanted.begin() + static_cast<std::ptrdiff_t>(k * s));
        }
        const padded_table_view tables{.block_table = table.data(),
                                       .seq_lens = lengths.data(),
                                       .num_sequences = static_cast<std::int32_t>(shape.sequences),
                                       .max_blocks = columns,
                                       .block_tokens = 4};
        std::vector<std::int32_t> slots(wanted.size());
        std::vector<hot_miss> misses(wanted.size());
        std::vector<std::uint32_t> counts(shape.sequences);
        const hot_rows_step step{
            wanted.data(), newest.data(), slots.data(), misses.data(), counts.data(), k, k};
        const grid_executor grid({.blocks = 2});
        resolve_hot_rows(grid, shape, state, step).value();
        fetch_hot_rows(
            grid, shape, step, tables,
            {reinterpret_cast<const std::byte*>(pool.data()), blocks, 4 * sizeof(row), sizeof(row)},
            std::as_writable_bytes(std::span(rows)), sizeof(row))
            .value();
        std::vector<float> queries(std::size_t{16} * shape.sequences);
        for (float& each : queries)
          each = static_cast<float>(random() % 401) / 100 - 2;
        const auto attended_to = [&](const padded_table_view& by, const std::vector<std::int32_t>& listed,
                                     std::vector<row>& of, std::uint64_t count, const kv_layout& in) {
          std::vector<float> out(queries.size(), unknown_tokens);
          const token_lists<padded_table_view> lists{.tables = by,
                                                     .listed = listed.data(),
                                                     .stride = static_cast<std::int32_t>(k),
                                                     .num_sequences = by.num_sequences,
                                                     .block_tokens = by.block_tokens};
          std::uint32_t flag = 0;
          paged_attention(grid, lists, {.rows = shape.sequences},
                          {reinterpret_cast<const std::byte*>(queries.data()), 64, 32},
                          {reinterpret_cast<std::byte*>(out.data()), 64, 32},
                          {reinterpret_cast<std::byte*>(of.data()), count, in}, 0, {},
                          {.query_heads = 2, .element = dtype::f32, .out_of_range = &flag})
              .value();
          CHECK(flag == 0);
          return out;
        };
        const padded_table_view near_tables{.block_table = near_table.data(),
                                            .seq_lens = near_lengths.data(),
                                            .num_sequences = static_cast<std::int32_t>(shape.sequences),
                                            .max_blocks = 1,
                                            .block_tokens = static_cast<std::int32_t>(shape.slots + 1)};
        CHECK(attended_to(near_tables, slots, rows, shape.sequences, near) ==
              attended_to(tables, wanted, pool, blocks, layout));
      }
    }
    CHECK(cuts > 40);
  }

  TEST_CASE("hot rows refuse more wanted rows than slots, short memory and odd rows") {
    const hot_rows_shape shape{.sequences = 2, .slots = 4, .positions = 8};
    std::vector<std::int32_t> state(hot_rows_words(shape) * 2);
    std::vector<std::int32_t> wanted(8), slots(8);
    std::vector<hot_miss> misses(8);
    std::vector<std::uint32_t> counts(2);
    hot_rows_step step{.wanted = wanted.data(),
                       .slots = slots.data(),
                       .misses = misses.data(),
                       .counts = counts.data(),
                       .wanted_count = 4,
                       .stride = 4};
    const auto told = [&](auto change) {
      hot_rows_step changed = step;
      change(changed);
      const auto done = resolve_hot_rows(host_executor{}, shape, state, changed);
      return done ? failure{} : done.error();
    };
    reset_hot_rows(host_executor{}, shape, state).value();
    CHECK(told([](hot_rows_step&) {}) == failure{});
    CHECK(told([](hot_rows_step& of) { of.wanted_count = 5; }) ==
          failure{errc::out_of_range, 0, 5, 4, "resolve_hot_rows: wanted_count"});
    CHECK(told([](hot_rows_step& of) { of.stride = 3; }).code == errc::too_short);
    CHECK(told([](hot_rows_step& of) { of.counts = nullptr; }).code == errc::too_short);
    CHECK(told([](hot_rows_step& of) { of.slots = nullptr; }).code == errc::too_short);
    CHECK(reset_hot_rows(host_executor{}, shape, std::span(state).first(3)).error() ==
          failure{errc::too_short, 0, hot_rows_words(shape) * 2, 3, "reset_hot_rows: state"});
    CHECK(reset_hot_rows(host_executor{}, {.sequences = 1}, state).error().message() ==
          "reset_hot_rows: shape.slots: 1 entries needed, but 0 given; make it longer");
    CHECK(reset_hot_rows(host_executor{}, shape, state, 3).error().index == 1);
    const std::vector<std::int32_t> table{0, 1, 2, 3};
    const padded_table_view tables{
        .block_table = table.data(), .num_sequences = 2, .max_blocks = 2, .block_tokens = 4};
    alignas(16) std::byte pool[256]{};
    alignas(16) std::byte rows[160]{};
    const auto fetched = [&](std::uint64_t row_bytes, std::size_t bytes, const std::byte* data) {
      const auto done = fetch_hot_rows(host_executor{}, shape, step, tables, {data, 4, 64, 16},
                                       std::span(rows).first(bytes), row_bytes);
      return done ? failure{} : done.error();
    };
    CHECK(fetched(16, 160, pool) == failure{});
    CHECK(fetched(24, 160, pool).code == errc::bad_granularity);
    CHECK(fetched(16, 159, pool) == failure{errc::too_short, 0, 160, 159, "fetch_hot_rows: rows"});
    CHECK(fetched(16, 160, nullptr).code == errc::too_short);
    // 2^66 bytes, of which 64 bits would keep none.
    const hot_rows_shape beyond{.sequences = 1U << 31U, .slots = (1U << 31U) - 1};
    CHECK(fetch_hot_rows(host_executor{}, beyond, step, tables, {pool, 4, 64, 16}, rows, 16).error() ==
          failure{errc::too_short, 0, ~std::uint64_t{0}, 160, "fetch_hot_rows: rows"});
  }
}
