#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/cache_world.hpp"
#include "support/kv_forms_world.hpp"
#include "support/scattered_planes.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

/// Different blocks of both memories, some of them none, in pairs.
std::vector<block_pair> any_pairs(std::mt19937_64& random, std::uint64_t from_blocks,
                                  std::uint64_t to_blocks) {
  std::vector<std::int64_t> targets;
  for (std::uint64_t i = 0; i < to_blocks; ++i)
    targets.push_back(static_cast<std::int64_t>(i));
  std::shuffle(targets.begin(), targets.end(), random);
  std::vector<block_pair> pairs;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    pairs.push_back({static_cast<std::int64_t>(random() % from_blocks), targets[i]});
    const std::uint64_t what = random() % 10;
    if (what == 0) pairs.back().from = -1;
    if (what == 1) pairs.back().to = -5;
    if (what == 2) pairs.back().from = static_cast<std::int64_t>(from_blocks);
    if (what == 3) pairs.back().to = static_cast<std::int64_t>(to_blocks + (std::uint64_t{1} << 40));
    if (random() % 4 == 0) break;
  }
  return pairs;
}

/// By the definition: a vector at a time.
void copy_vectors(const kv_memory& to, const kv_memory& from, const std::vector<block_pair>& pairs,
                  const layer_range& layers) {
  const kv_layout& layout = from.layout;
  for (const block_pair& pair : pairs) {
    if (pair.from < 0 || pair.to < 0) continue;
    const auto source = static_cast<std::uint64_t>(pair.from);
    const auto target = static_cast<std::uint64_t>(pair.to);
    if (source >= from.blocks || target >= to.blocks) continue;
    for (std::uint32_t p = 0; p < layout.planes(); ++p) {
      for (std::uint32_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
        for (std::uint32_t token = 0; token < layout.tokens_of(p); ++token) {
          for (std::uint32_t head = 0; head < layout.heads_of(p); ++head)
            std::memcpy(to.data + to.layout.strides(p, to.blocks).offset(layer, target, token, head),
                        from.data + layout.strides(p, from.blocks).offset(layer, source, token, head),
                        layout.vector_bytes(p));
        }
      }
    }
  }
}

bool has_stray(const std::vector<block_pair>& pairs, std::uint64_t from_blocks, std::uint64_t to_blocks) {
  return std::ranges::any_of(pairs, [&](const block_pair& pair) {
    if (pair.from < 0 || pair.to < 0) return false;
    return static_cast<std::uint64_t>(pair.from) >= from_blocks ||
           static_cast<std::uint64_t>(pair.to) >= to_blocks;
  });
}

}  // namespace

TEST_SUITE("kv_blocks") {
  TEST_CASE(
      "between memories of any two layouts every vector arrives at its place, and nothing else is written") {
    std::uint64_t moved = 0;
    std::uint64_t worlds = 0;
    for (const auto seed : llmmem_tests::seeds_within(600, 100)) {
      CAPTURE(seed);
      ++worlds;
      std::mt19937_64 random(seed);
      kv_layout layout = any_layout(random);
      if (random() % 4 == 0) layout.block_tokens *= 32;  // several tiles
      kv_layout other = layout;
      if (random() % 2 == 0)
        other.heads_in_block =
            random() % 2 == 0 ? llmmem::paging::head_order::nhd : llmmem::paging::head_order::hnd;
      if (random() % 2 == 0) other.order = static_cast<block_order>(random() % block_order_count);
      const std::uint64_t from_blocks = 1 + random() % 4;
      const std::uint64_t to_blocks = 1 + random() % 5;
      std::vector<std::byte> source(layout.total_bytes(from_blocks));
      fill_with(source, dtype::bf16, random);
      const std::vector<block_pair> pairs = any_pairs(random, from_blocks, to_blocks);
      layer_range layers{.first = static_cast<std::uint32_t>(random() % layout.layers)};
      layers.count = 1 + static_cast<std::uint32_t>(random() % (layout.layers - layers.first));
      const bool is_all = random() % 2 == 0;
      if (is_all) layers = {.first = 0, .count = layout.layers};
      const kv_memory from{source.data(), from_blocks, layout};
      std::vector<std::byte> expected(other.total_bytes(to_blocks), poison);
      copy_vectors({expected.data(), to_blocks, other}, from, pairs, layers);
      const auto check = [&](const auto& run) {
        std::vector<std::byte> target(expected.size(), poison);
        std::uint32_t flag = 0;
        copy_kv_blocks(run, {target.data(), to_blocks, other}, from, pairs,
                       {.layers = is_all ? layer_range{} : layers, .out_of_range = &flag})
            .value();
        CHECK(target == expected);
        CHECK(flag == (has_stray(pairs, from_blocks, to_blocks) ? 1 : 0));
        // Into several allocations, out of one or several.
        const scattered_planes cut(layout, from_blocks, source, seed % 17);
        const std::vector<std::byte> untouched(expected.size(), poison);
        for (const kv_memory& there : {from, cut.memory()}) {
          const scattered_planes into(other, to_blocks, untouched, seed % 5);
          copy_kv_blocks(run, into.memory(), there, pairs, {.layers = is_all ? layer_range{} : layers})
              .value();
          CHECK(into.image() == expected);
        }
      };
      check(host_executor{});
      check(grid_executor({.multiprocessors = static_cast<std::uint32_t>(1 + random() % 3),
                           .blocks = static_cast<std::uint32_t>(random() % 4)}));
      moved += pairs.size();
    }
    CHECK(moved > worlds);
  }

  TEST_CASE("scales, rotary parts and index keys go with the blocks, between any orders and places") {
    for (const auto seed : llmmem_tests::seeds_within(400, 100)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      random_numbers forms(seed);
      const kv_layout layout = any_forms(forms);
      const kv_layout other = seed % 3 == 0 ? layout : rearranged(layout, forms);
      const std::uint64_t from_blocks = 1 + random() % 4;
      const std::uint64_t to_blocks = 1 + random() % 5;
      std::vector<std::byte> source(layout.total_bytes(from_blocks));
      for (std::byte& each : source)
        each = std::byte(forms.below(std::uint32_t{256}));
      const std::vector<block_pair> pairs = any_pairs(random, from_blocks, to_blocks);
      layer_range layers{.first = static_cast<std::uint32_t>(random() % layout.layers)};
      layers.count = 1 + static_cast<std::uint32_t>(random() % (layout.layers - layers.first));
      if (random() % 2 == 0) layers = {.first = 0, .count = layout.layers};
      const kv_memory from{source.data(), from_blocks, layout};
      std::vector<std::byte> expected(other.total_bytes(to_blocks), poison);
      copy_vectors({expected.data(), to_blocks, other}, from, pairs, layers);
      const auto check = [&](const auto& run) {
        std::vector<std::byte> target(expected.size(), poison);
        copy_kv_blocks(run, {target.data(), to_blocks, other}, from, pairs, {.layers = layers}).value();
        CHECK(target == expected);
      };
      check(host_executor{});
      check(grid_executor({.multiprocessors = static_cast<std::uint32_t>(1 + random() % 3)}));
      std::vector<std::byte> target(expected.size(), poison);
      std::vector<block_pair> few;
      for (const block_pair& each : pairs)
        if (each.from < static_cast<std::int64_t>(from_blocks) &&
            each.to < static_cast<std::int64_t>(to_blocks))
          few.push_back(each);
      copy_few_kv_blocks(host_executor{}, {target.data(), to_blocks, other}, from, few, {.layers = layers})
          .value();
      CHECK(target == expected);
    }
  }

  TEST_CASE("K and V that are adjacent at both ends move as one, and in one run if the order is the same") {
    const kv_layout layout{
        .layers = 2, .heads = 8, .head_dim = 128, .order = block_order::layer_first_joined};
    alignas(16) std::byte base{};
    const std::vector<block_pair> pairs{{1, 2}};
    const kv_memory memory{&base, 8, layout};
    const kv_block_map same(memory, memory, std::span(pairs), {0, 2}, nullptr);
    CHECK(same.parts() == 2);
    CHECK(same.rows() * same.longest_row() == layout.layer_bytes());
    kv_layout by_head = layout;
    by_head.heads_in_block = llmmem::paging::head_order::hnd;
    const kv_block_map turned({&base, 8, by_head}, memory, std::span(pairs), {0, 2}, nullptr);
    CHECK(turned.longest_row() == 2 * 128 * 2);
    CHECK(turned.rows() == 8 * 16);
    // Layers between vectors have distances that joined vectors may have as well.
    kv_layout last = layout;
    last.order = block_order::layer_last;
    const kv_block_map parted({&base, 8, last}, memory, std::span(pairs), {0, 2}, nullptr);
    CHECK(parted.longest_row() == 128 * 2);
    CHECK(parted.parts() * parted.rows() == 2 * 2 * 8 * 16);
  }

  TEST_CASE("bytes in one run at both ends move in long rows") {
    const kv_layout layout{.layers = 32, .heads = 8, .head_dim = 128, .order = block_order::block_first};
    alignas(16) std::byte base{};
    const std::vector<block_pair> pairs{{1, 2}, {3, 4}};
    const kv_memory memory{&base, 8, layout};
    const kv_block_map whole(memory, memory, std::span(pairs), {0, 32}, nullptr);
    CHECK(whole.parts() == 1);
    CHECK(whole.longest_row() == kv_block_map::tile_bytes);
    CHECK(whole.rows() * whole.longest_row() == 2 * layout.block_bytes());
    CHECK(whole.alignment().from == 16);
    kv_layout layered = layout;
    layered.order = block_order::layer_first;
    const kv_block_map apart({&base, 8, layered}, memory, std::span(pairs), {0, 32}, nullptr);
    CHECK(apart.parts() == 64);
    CHECK(apart.rows() * apart.longest_row() * apart.parts() == 2 * layout.block_bytes());
    const auto rows_between = [&](block_order one, block_order other, const layer_range& layers) {
      kv_layout from = layout;
      kv_layout to = layout;
      from.order = one;
      to.order = other;
      const kv_block_map map({&base, 8, to}, {&base, 8, from}, std::span(pairs).first(1), layers, nullptr);
      return std::pair{map.rows() * map.parts(), map.longest_row()};
    };
    using enum block_order;
    const std::uint64_t tiles = layout.block_bytes() / kv_block_map::tile_bytes;
    for (const block_order order : {block_first_planes, block_first_separate, layer_between, layer_last})
      CHECK(rows_between(order, order, {0, 32}) == std::pair{tiles, kv_block_map::tile_bytes});
    // Some layers of many: by a token's heads, and vector by vector where a layer's vectors are apart.
    CHECK(rows_between(layer_between, layer_between, {4, 2}) == std::pair{std::uint64_t{64}, 8 * 256U});
    CHECK(rows_between(layer_between, layer_first, {0, 32}) == std::pair{std::uint64_t{1024}, 8 * 256U});
    CHECK(rows_between(layer_last, block_first, {0, 32}) == std::pair{std::uint64_t{8192}, 256U});
    // Where planes lie is in a table that a host cannot read: each goes by itself, as aligned as is promised.
    std::byte* table[64]{};
    const kv_memory by_table{.blocks = 8, .layout = layout, .plane_table = table, .plane_alignment = 4};
    const kv_block_map out_of(memory, by_table, std::span(pairs), {0, 32}, nullptr);
    CHECK(out_of.parts() == 64);
    CHECK(out_of.alignment().from == 4);
    CHECK(out_of.alignment().to == 16);
    const kv_block_map into(by_table, memory, std::span(pairs), {0, 32}, nullptr);
    CHECK(into.parts() == 64);
    CHECK(into.alignment().from == 16);
    CHECK(into.alignment().to == 4);
    kv_layout between = layout;
    between.order = layer_between;
    const kv_memory scattered{.blocks = 8, .layout = between, .plane_table = table};
    const kv_block_map each(scattered, scattered, std::span(pairs), {0, 32}, nullptr);
    CHECK(each.parts() == 64);
    CHECK(each.longest_row() == 8 * 256);
  }

  TEST_CASE("blocks far beyond 2^31 bytes are addressed correctly") {
    const kv_layout layout{.layers = 1, .heads = 64, .head_dim = 256, .block_tokens = 256};
    const std::uint64_t blocks = std::uint64_t{1} << 31;
    std::byte base{};
    const kv_memory memory{&base, blocks, layout};
    const auto offset = [&](const std::byte* end) {
      return reinterpret_cast<std::uintptr_t>(end) - reinterpret_cast<std::uintptr_t>(&base);
    };
    const std::vector<block_pair> pairs{
        {static_cast<std::int64_t>(blocks - 1), static_cast<std::int64_t>(blocks - 2)}};
    const kv_block_map map(memory, memory, std::span(pairs), {0, 1}, nullptr);
    const row_move row = map.at(map.rows() - 1, 1);
    const plane_strides values = layout.strides(1, blocks);
    const std::uint64_t last_tile = layout.unit_bytes(1) - kv_block_map::tile_bytes;
    CHECK(offset(row.from) == values.base + (blocks - 1) * values.block + last_tile);
    CHECK(offset(row.to) == values.base + (blocks - 2) * values.block + last_tile);
    std::byte* table[2]{nullptr, &base};
    const kv_memory by_table{.blocks = blocks, .layout = layout, .plane_table = table};
    const row_move other =
        kv_block_map(by_table, by_table, std::span(pairs), {0, 1}, nullptr).at(map.rows() - 1, 1);
    CHECK(offset(other.from) == (blocks - 1) * values.block + last_tile);
    CHECK(offset(other.to) == (blocks - 2) * values.block + last_tile);
  }

  TEST_CASE("a few blocks move as a list of the same pairs would") {
    std::uint64_t moved = 0;
    std::uint64_t worlds = 0;
    for (const auto seed : llmmem_tests::seeds_within(150, 40)) {
      CAPTURE(seed);
      ++worlds;
      std::mt19937_64 random(seed);
      const kv_layout layout = any_layout(random);
      kv_layout other = layout;
      other.order = static_cast<block_order>(random() % block_order_count);
      const std::uint64_t blocks = 2 + random() % 5;
      std::vector<std::byte> source(layout.total_bytes(blocks));
      fill_with(source, dtype::bf16, random);
      std::vector<block_pair> pairs;
      for (const block_pair& pair : any_pairs(random, blocks, blocks)) {
        if (pair.from < static_cast<std::int64_t>(blocks) && pair.to < static_cast<std::int64_t>(blocks))
          pairs.push_back(pair);
      }
      std::vector<std::byte> expected(other.total_bytes(blocks), poison);
      const kv_memory from{source.data(), blocks, layout};
      copy_vectors({expected.data(), blocks, other}, from, pairs, {0, layout.layers});
      const scattered_planes cut(layout, blocks, source);
      for (const kv_memory& there : {from, cut.memory()}) {
        std::vector<std::byte> target(expected.size(), poison);
        copy_few_kv_blocks(grid_executor(), {target.data(), blocks, other}, there, pairs).value();
        CHECK(target == expected);
      }
      moved += pairs.size();
    }
    CHECK(moved > worlds);
  }

  TEST_CASE("an allocator's copies need no list on the device") {
    const kv_layout layout{.layers = 2, .heads = 1, .head_dim = 8};
    std::vector<std::byte> bytes(layout.total_bytes(4));
    std::mt19937_64 random(3);
    fill_with(bytes, dtype::bf16, random);
    std::vector<std::byte> expected = bytes;
    copy_vectors({expected.data(), 4, layout}, {bytes.data(), 4, layout}, {{1, 3}}, {0, 2});
    CHECK(bytes != expected);
    const auto after = [&](const auto& asked) {
      std::vector<std::byte> out = bytes;
      copy_few_kv_blocks(grid_executor(), {out.data(), 4, layout}, std::span(&asked, 1)).value();
      return out;
    };
    CHECK(after(block_copy{block_id{1}, block_id{3}, 5}) == expected);
    CHECK(after(block_copy{block_id{1}, block_id{3}, 0}) == bytes);
    CHECK(after(block_move{block_id{1}, block_id{3}}) == expected);
  }

  TEST_CASE("the few blocks of one launch are at most as many as fit, and all are there") {
    const kv_layout layout{.layers = 2, .heads = 1, .head_dim = 8};
    std::vector<std::byte> bytes(layout.total_bytes(130), poison);
    const kv_memory memory{bytes.data(), 130, layout};
    const auto copy = [&](const std::vector<block_pair>& pairs) {
      const auto done = copy_few_kv_blocks(host_executor{}, memory, memory, pairs);
      return done ? "" : done.error().message();
    };
    CHECK(copy(std::vector<block_pair>(128)) == "");
    CHECK(copy(std::vector<block_pair>(129)) ==
          "copy_few_kv_blocks: pairs: 129 requested, but the highest allowed is 128");
    const std::vector<block_copy> copies(129);
    CHECK(copy_few_kv_blocks(host_executor{}, memory, std::span(copies)).error() ==
          failure{errc::out_of_range, 0, 129, 128});
    CHECK(copy({{0, 1}, {-1, 500}, {500, -1}, {129, 2}}) == "");
    CHECK(copy({{0, 1}, {130, 2}}).starts_with("copy_few_kv_blocks: pairs: block 130 asked for"));
    CHECK(copy({{0, 130}}).starts_with("copy_few_kv_blocks: pairs: block 130 asked for"));
    CHECK(copy_few_kv_blocks(host_executor{}, memory, memory, std::vector<block_pair>{{0, 1}, {2, 130}})
              .error() == failure{errc::no_such_block, 1, 130, 130});
    CHECK(copy_few_kv_blocks(host_executor{}, {nullptr, 130, layout}, memory, std::vector<block_pair>{{0, 1}})
              .error()
              .message() == "copy_few_kv_blocks: to: 1024 entries needed, but 0 given; make it longer");
  }

  TEST_CASE("what does not fit is refused, and nothing has begun") {
    const kv_layout layout{.layers = 2, .heads = 2, .head_dim = 8};
    kv_layout other = layout;
    other.head_dim = 16;
    std::vector<std::byte> bytes(layout.total_bytes(2), poison);
    const kv_memory memory{bytes.data(), 2, layout};
    const std::vector<block_pair> pairs{{0, 1}};
    const auto copy = [&](const kv_memory& to, const layer_range& layers) {
      return copy_kv_blocks(host_executor{}, to, memory, pairs, {.layers = layers}).error();
    };
    CHECK(copy({bytes.data(), 2, other}, {}).code == errc::layout_mismatch);
    const kv_layout as_long{.layers = 2, .heads = 4, .head_dim = 4};
    CHECK(as_long.block_bytes() == layout.block_bytes());
    CHECK(copy({bytes.data(), 2, as_long}, {}).code == errc::layout_mismatch);
    // More layers and planes than a launch counts.
    const kv_layout many{.layers = 1U << 31, .heads = 1, .head_dim = 8, .block_tokens = 1};
    const kv_memory of_many{bytes.data(), 2, many};
    CHECK(copy_kv_blocks(host_executor{}, of_many, of_many, pairs).error() ==
          failure{errc::out_of_range, 0, std::uint64_t{1} << 31, 0x3FFF'FFFF});
    const auto differs = [&](auto change) {
      kv_layout changed = layout;
      change(changed);
      const std::string text = copy({bytes.data(), 2, changed}, {}).message();
      return text.substr(0, text.find(": the contents"));
    };
    CHECK(differs([](kv_layout& of) { of.layers = 3; }) == "the layouts' layers");
    CHECK(differs([](kv_layout& of) { of.heads = 4; }) == "the layouts' heads");
    CHECK(differs([](kv_layout& of) { of.head_dim = 4; }) == "the layouts' head_dim");
    CHECK(differs([](kv_layout& of) { of.value_dim = 4; }) == "the layouts' value_dim");
    CHECK(differs([](kv_layout& of) { of.has_values = false; }) == "the layouts' has_values");
    CHECK(differs([](kv_layout& of) { of.block_tokens = 8; }) == "the layouts' block_tokens");
    CHECK(differs([](kv_layout& of) { of.element = dtype::f16; }) == "the layouts' element");
    CHECK(differs([](kv_layout& of) { of.model = 1; }) == "the layouts' model");
    CHECK(differs([](kv_layout& of) { of.value_element = dtype::int8; }) == "the layouts' value_element");
    CHECK(differs([](kv_layout& of) { of.key_scales.group = llmmem::paging::scale_group::vector; }) ==
          "the layouts' key_scales.group");
    CHECK(differs([](kv_layout& of) { of.part.cp_size = 2; }) == "the layouts' part.cp_size");
    CHECK(copy(memory, {2, 0}).message() ==
          "copy_kv_blocks: layers: 2 requested, but the highest allowed is 1");
    CHECK(copy(memory, {1, 2}).message() ==
          "copy_kv_blocks: layers: 2 requested, but the highest allowed is 1");
    CHECK(copy({nullptr, 2, layout}, {}).message() ==
          "copy_kv_blocks: to: 2048 entries needed, but 0 given; make it longer");
    const kv_memory none{nullptr, 2, layout};
    CHECK(copy_kv_blocks(host_executor{}, memory, none, pairs).error().message() ==
          "copy_kv_blocks: from: 2048 entries needed, but 0 given; make it longer");
    CHECK(copy_kv_blocks(host_executor{}, none, none, {}).has_value());
    std::byte* const table[4]{};
    const kv_memory odd{.blocks = 2, .layout = layout, .plane_table = table, .plane_alignment = 3};
    CHECK(copy(odd, {}).message() == "copy_kv_blocks: to.plane_alignment: alignment 3 is not a power of two");
    const block_pair* const no_pairs = nullptr;
    CHECK(copy_kv_blocks(host_executor{}, memory, memory, std::span(no_pairs, 3)).error().message() ==
          "copy_kv_blocks: pairs: 3 entries needed, but 0 given; make it longer");
    CHECK(std::ranges::count(bytes, poison) == static_cast<std::ptrdiff_t>(bytes.size()));
  }
}
