#include <llmmem/paging/kv_contents.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "support/kv_forms_world.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::paging::plane_role;
using llmmem::paging::scale_group;
using llmmem::paging::scale_place;

namespace {

/// Calls `one(plane, offset, bytes)` for each vector of a block.
template <class One>
void each_vector_of(const kv_layout& of, std::uint64_t blocks, std::uint64_t block, std::uint64_t tokens,
                    One one) {
  for (std::uint32_t p = 0; p < of.planes(); ++p) {
    const plane_strides strides = of.strides(p, blocks);
    const std::uint64_t own = std::min<std::uint64_t>(tokens, of.tokens_of(p));
    for (std::uint64_t layer = 0; layer < of.layers; ++layer)
      for (std::uint64_t token = 0; token < own; ++token)
        for (std::uint64_t head = 0; head < of.heads_of(p); ++head)
          one(p, strides.offset(layer, block, token, head), strides.vector_bytes);
  }
}

/// The bytes of a block, vector by vector in an order that depends on no layout.
[[nodiscard]] std::vector<std::byte> values_of(const std::vector<std::byte>& bytes, const kv_layout& of,
                                               std::uint64_t blocks, std::uint64_t block,
                                               std::uint64_t tokens) {
  std::vector<std::byte> out;
  each_vector_of(of, blocks, block, tokens, [&](std::uint32_t, std::uint64_t at, std::uint64_t count) {
    const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    out.insert(out.end(), first, first + static_cast<std::ptrdiff_t>(count));
  });
  return out;
}

/// Where plane `p` has the vector of a token and head of block 0 in layer 0.
[[nodiscard]] std::uint64_t at(const kv_layout& of, plane_role role, std::uint64_t token,
                               std::uint64_t head = 0) {
  for (std::uint32_t p = 0; p < of.planes(); ++p)
    if (of.role_of(p) == role) return of.strides(p, 8).offset(0, 0, token, head);
  return ~std::uint64_t{0};
}

constexpr kv_layout llama{.layers = 32, .heads = 8, .head_dim = 128, .block_tokens = 16};

}  // namespace

TEST_CASE("the planes of any forms cover a memory without overlap") {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const kv_layout layout = any_forms(random);
    const std::uint64_t blocks = 1 + random.below(std::uint64_t{4});
    std::vector<std::uint32_t> owner(layout.total_bytes(blocks), ~0U);
    for (std::uint32_t block = 0; block < blocks; ++block)
      each_vector_of(layout, blocks, block, layout.block_tokens,
                     [&](std::uint32_t, std::uint64_t first, std::uint64_t count) {
                       for (std::uint64_t i = first; i < first + count; ++i) {
                         REQUIRE(owner.at(i) == ~0U);
                         owner[i] = block;
                       }
                     });
    CHECK(std::ranges::count(owner, ~0U) == 0);
    // Pieces, and neighbours side by side in each.
    std::uint64_t pieces = 0;
    for (std::size_t i = 0; i < owner.size(); ++i) {
      if (i != 0 && owner[i] == owner[i - 1]) continue;
      pieces += owner[i] == 0 ? 1U : 0U;
      if (owner[i] != 0) REQUIRE(owner[i] == owner[i - 1] + 1);
    }
    if (blocks > 1) CHECK(pieces == layout.fragments());
  }
}

TEST_CASE("parts that all tokens or heads of a block share are found for each of them") {
  constexpr kv_layout layout{.layers = 2,
                             .heads = 3,
                             .head_dim = 4,
                             .block_tokens = 8,
                             .element = dtype::int4,
                             .key_scales = {.group = scale_group::channel, .has_global = true},
                             .index_dim = 4};
  constexpr std::uint32_t scale = 2;
  static_assert(layout.role_of(scale) == plane_role::key_scale);
  static_assert(layout.role_of(3) == plane_role::key_global && layout.role_of(4) == plane_role::index_key);
  static_assert(layout.planes() == 5 && layout.kv_planes() == 2);
  static_assert(layout.tokens_of(scale) == 1 && layout.heads_of(scale) == 3);
  static_assert(layout.vector_bytes(scale) == 4 * 4);
  static_assert(layout.tokens_of(4) == 8 && layout.heads_of(4) == 1);
  const plane_strides scales = layout.strides(scale, 5);
  CHECK(scales.offset(1, 2, 7, 1) == scales.offset(1, 2, 0, 1));
  const plane_strides global = layout.strides(3, 5);
  CHECK(global.offset(1, 2, 7, 2) == global.offset(1, 2, 0, 0));
  CHECK(global.vector_bytes == 4);
  const plane_strides keys = layout.strides(4, 5);
  CHECK(keys.offset(1, 2, 7, 2) == keys.offset(1, 2, 7, 0));
}

TEST_CASE("values survive a round trip through every pair of orders") {
  constexpr std::array shapes{
      kv_layout{.layers = 2, .heads = 3, .head_dim = 4, .value_dim = 2, .block_tokens = 4},
      kv_layout{.layers = 2, .heads = 1, .head_dim = 4, .block_tokens = 2, .has_values = false},
      kv_layout{.layers = 3,
                .heads = 2,
                .head_dim = 4,
                .block_tokens = 4,
                .element = dtype::int8,
                .value_element = dtype::int4,
                .key_scales = {.group = scale_group::vector},
                .value_scales = {.group = scale_group::run, .element = dtype::fp8_e4m3, .run = 2},
                .rotary_dim = 1,
                .index_dim = 2,
                .index_scales = {.group = scale_group::vector}}};
  std::uint64_t pairs = 0;
  for (const kv_layout& shape : shapes) {
    constexpr std::uint32_t arrangements = 2 * block_order_count;
    const auto arranged = [&](std::uint32_t i) {
      kv_layout out = shape;
      out.heads_in_block = llmmem::paging::head_order(i % 2);
      out.order = block_order(i / 2);
      return out;
    };
    for (std::uint32_t i = 0; i < arrangements * arrangements; ++i, ++pairs) {
      CAPTURE(i);
      const kv_layout here = arranged(i / arrangements);
      const kv_layout there = arranged(i % arrangements);
      REQUIRE(here.content_fingerprint() == there.content_fingerprint());
      std::vector<std::byte> first(here.total_bytes(3));
      random_numbers random(i);
      for (std::byte& each : first)
        each = std::byte(random.below(std::uint32_t{256}));
      std::vector<std::byte> between(there.total_bytes(2));
      std::vector<std::byte> last(first.size());
      const std::uint64_t tokens = shape.block_tokens;
      copy_kv_block({between.data(), 2, there}, 1, {first.data(), 3, here}, 2, tokens);
      REQUIRE(values_of(between, there, 2, 1, tokens) == values_of(first, here, 3, 2, tokens));
      copy_kv_block({last.data(), 3, here}, 0, {between.data(), 2, there}, 1, tokens);
      REQUIRE(values_of(last, here, 3, 0, tokens) == values_of(first, here, 3, 2, tokens));
    }
  }
  CHECK(pairs == 3 * 324);
}

TEST_CASE("any forms are copied between any orders and places, and nothing else is written") {
  for (const auto seed : seeds(400)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const kv_layout from = any_forms(random);
    const kv_layout to = rearranged(from, random);
    REQUIRE(from.content_fingerprint() == to.content_fingerprint());
    REQUIRE(check_contents(to, from, "test").has_value());
    const std::uint64_t from_blocks = 1 + random.below(std::uint64_t{3});
    const std::uint64_t to_blocks = 1 + random.below(std::uint64_t{3});
    std::vector<std::byte> source(from.total_bytes(from_blocks));
    for (std::byte& each : source)
      each = std::byte{static_cast<std::uint8_t>(random.below(std::uint32_t{0xEE}))};
    std::vector<std::byte> target(to.total_bytes(to_blocks), std::byte{0xEE});
    const std::uint64_t a = random.below(from_blocks);
    const std::uint64_t b = random.below(to_blocks);
    const std::uint64_t tokens = random.below(std::uint64_t{from.block_tokens} + 1);
    copy_kv_block({target.data(), to_blocks, to}, b, {source.data(), from_blocks, from}, a, tokens);
    const auto wanted = values_of(source, from, from_blocks, a, tokens);
    REQUIRE(values_of(target, to, to_blocks, b, tokens) == wanted);
    const auto untouched =
        static_cast<std::uint64_t>(std::count(target.begin(), target.end(), std::byte{0xEE}));
    REQUIRE(untouched + wanted.size() == target.size());
  }
}

TEST_CASE("records of current engines are where those engines put them") {
  // vLLM: fp8 with a scale for each token and head right behind its values, K and V joined.
  constexpr kv_layout fp8{.layers = 1,
                          .heads = 8,
                          .head_dim = 128,
                          .element = dtype::fp8_e4m3,
                          .order = block_order::layer_first_joined,
                          .key_scales = {.group = scale_group::vector, .place = scale_place::after_vector},
                          .value_scales = {.group = scale_group::vector, .place = scale_place::after_vector}};
  static_assert(fp8.checked().block_bytes() == 16ULL * 8 * 264);
  CHECK(at(fp8, plane_role::key_scale, 0) == 128);
  CHECK(at(fp8, plane_role::value, 0) == 132);
  CHECK(at(fp8, plane_role::value_scale, 0) == 260);
  CHECK(at(fp8, plane_role::key, 1, 2) == (8 + 2) * 264);
  // NVFP4: [K data | K scales | V data | V scales] of a page, 144 bytes of a token and head.
  constexpr paging::scale_form nvfp4_scales{.group = scale_group::run, .element = dtype::fp8_e4m3};
  constexpr kv_layout nvfp4{.layers = 1,
                            .heads = 8,
                            .head_dim = 128,
                            .element = dtype::fp4_e2m1,
                            .heads_in_block = paging::head_order::hnd,
                            .order = block_order::layer_first_paired,
                            .key_scales = nvfp4_scales,
                            .value_scales = nvfp4_scales};
  static_assert(nvfp4.checked().block_bytes() == 16ULL * 8 * 144);
  CHECK(at(nvfp4, plane_role::key_scale, 0) == 16 * 8 * 64);
  CHECK(at(nvfp4, plane_role::value, 0) == 16 * 8 * (64 + 8));
  CHECK(at(nvfp4, plane_role::value_scale, 1, 2) == 16 * 8 * (64 + 8 + 64) + (2 * 16 + 1) * 8);
  // The same with its global scale in the block, and with scales in pools of their own.
  kv_layout global = nvfp4;
  global.key_scales.has_global = global.value_scales.has_global = true;
  CHECK(global.checked().block_bytes() == 16 * 8 * 144 + 8);
  CHECK(at(global, plane_role::key_global, 0) == 16 * 8 * 72);
  CHECK(at(global, plane_role::value, 0) == 16 * 8 * 72 + 4);
  kv_layout pools = nvfp4;
  pools.order = block_order::layer_first;
  pools.key_scales.place = pools.value_scales.place = scale_place::separate;
  CHECK(pools.fragments() == 4);
  CHECK(at(pools, plane_role::value, 0) == 8 * 16 * 8 * 64);
  CHECK(at(pools, plane_role::key_scale, 0) == 8 * 16 * 8 * 128);
  // fp8_ds_mla: 512 of e4m3, 4 scales, 64 of bf16; and the indexer's page beside it.
  constexpr kv_layout mla{
      .layers = 1,
      .heads = 1,
      .head_dim = 512,
      .block_tokens = 64,
      .has_values = false,
      .element = dtype::fp8_e4m3,
      .key_scales = {.group = scale_group::run, .run = 128, .place = scale_place::after_vector},
      .rotary_dim = 64,
      .index_dim = 128,
      .index_scales = {.group = scale_group::vector},
      .part = {.tp_rank = 3, .tp_size = 8, .heads_of_model = 1}};
  static_assert(mla.checked().block_bytes() == 64ULL * (656 + 132));
  CHECK(at(mla, plane_role::key_scale, 1) == 656 + 512);
  CHECK(at(mla, plane_role::rotary, 1) == 656 + 528);
  CHECK(at(mla, plane_role::index_key, 3) == 8 * 64 * 656 + 3 * 128);
  CHECK(at(mla, plane_role::index_scale, 3) == 8 * 64 * 656 + 64 * 128 + 3 * 4);
  CHECK(mla.fragments() == 2);
  // nvfp4_ds_mla: 512 of e2m1, 64 of e4m3, 32 scales.
  constexpr kv_layout nvfp4_mla{.layers = 1,
                                .heads = 1,
                                .head_dim = 512,
                                .block_tokens = 64,
                                .has_values = false,
                                .element = dtype::fp4_e2m1,
                                .key_scales = {.group = scale_group::run,
                                               .element = dtype::fp8_e4m3,
                                               .place = scale_place::after_rotary},
                                .rotary_dim = 64,
                                .rotary_element = dtype::fp8_e4m3};
  static_assert(nvfp4_mla.checked().block_bytes() == 64ULL * 352);
  CHECK(at(nvfp4_mla, plane_role::rotary, 1) == 352 + 256);
  CHECK(at(nvfp4_mla, plane_role::key_scale, 1) == 352 + 320);
}

TEST_CASE("each form and part has its own fingerprint; places leave the contents' fingerprint unchanged") {
  std::vector<kv_layout> all;
  const auto add = [&](auto change) {
    kv_layout out = llama;
    change(out);
    all.push_back(out.checked());
  };
  add([](kv_layout&) {});
  add([](kv_layout& l) { l.value_element = dtype::int4; });
  for (paging::scale_form kv_layout::* const scales : {&kv_layout::key_scales, &kv_layout::value_scales}) {
    for (const scale_group group : {scale_group::vector, scale_group::run, scale_group::channel})
      add([&](kv_layout& l) { (l.*scales).group = group; });
    add([&](kv_layout& l) { l.*scales = {.group = scale_group::run, .run = 32}; });
    add([&](kv_layout& l) { l.*scales = {.group = scale_group::run, .element = dtype::f16}; });
    add([&](kv_layout& l) { l.*scales = {.group = scale_group::run, .numbers = 2}; });
    add([&](kv_layout& l) { l.*scales = {.group = scale_group::run, .has_global = true}; });
  }
  add([](kv_layout& l) { l.rotary_dim = 64; });
  add([](kv_layout& l) {
    l.rotary_dim = 64;
    l.rotary_element = dtype::f16;
  });
  add([](kv_layout& l) { l.index_dim = 128; });
  add([](kv_layout& l) {
    l.index_dim = 128;
    l.index_element = dtype::bf16;
  });
  add([](kv_layout& l) {
    l.index_dim = 128;
    l.index_scales.group = scale_group::vector;
  });
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    add([&](kv_layout& l) { l.part = {.tp_rank = rank, .tp_size = 2}; });
    add([&](kv_layout& l) { l.part = {.tp_rank = rank, .tp_size = 4}; });
    add([&](kv_layout& l) { l.part = {.cp_rank = rank, .cp_size = 2}; });
    add([&](kv_layout& l) { l.part = {.cp_rank = rank, .cp_size = 4}; });
    add([&](kv_layout& l) { l.part = {.cp_rank = rank, .cp_size = 2, .cp_interleave = 16}; });
  }
  std::set<std::uint64_t> of_contents;
  std::set<std::uint64_t> of_all;
  for (const kv_layout& each : all) {
    CHECK(of_contents.insert(each.content_fingerprint()).second);
    for (std::uint32_t order = 0; order < block_order_count; ++order) {
      kv_layout arranged = each;
      arranged.order = block_order(order);
      CHECK(of_all.insert(arranged.fingerprint()).second);
      CHECK(arranged.content_fingerprint() == each.content_fingerprint());
      if (each.key_scales.group == scale_group::none) continue;
      arranged.key_scales.place = scale_place::separate;
      CHECK(of_all.insert(arranged.fingerprint()).second);
      CHECK(arranged.content_fingerprint() == each.content_fingerprint());
    }
  }
}

TEST_CASE("unused fields change no fingerprint") {
  kv_layout said = llama;
  said.value_element = llama.element;
  said.key_scales = {.element = dtype::f16, .run = 4, .numbers = 2, .place = scale_place::separate};
  said.rotary_element = dtype::f16;
  said.index_element = dtype::bf16;
  said.index_scales.run = 7;
  said.part.cp_interleave = 8;
  CHECK(said.fingerprint() == llama.fingerprint());
  CHECK(said.content_fingerprint() == llama.content_fingerprint());
  CHECK(check_contents(said, llama, "").has_value());
}

TEST_CASE("ranks with the same heads have the same contents, and all others do not") {
  const auto of_rank = [](std::uint32_t rank, std::uint32_t size, std::uint32_t heads_of_model) {
    kv_layout out = llama;
    out.heads = std::max(heads_of_model / size, 1U);
    out.part = {.tp_rank = rank, .tp_size = size, .heads_of_model = heads_of_model};
    return out.checked().content_fingerprint();
  };
  CHECK(of_rank(0, 8, 2) == of_rank(3, 8, 2));
  CHECK(of_rank(3, 8, 2) != of_rank(4, 8, 2));
  CHECK(of_rank(4, 8, 2) == of_rank(1, 2, 2));
  CHECK(of_rank(0, 2, 8) != of_rank(1, 2, 8));
  // MLA: each rank has it all, as one would alone.
  for (std::uint32_t rank = 0; rank < 8; ++rank)
    CHECK(of_rank(rank, 8, 1) == of_rank(0, 1, 1));
  // Told or not, all heads of a model are what a layout without a part holds.
  CHECK(of_rank(0, 1, 8) == llama.content_fingerprint());
}

TEST_CASE("a context-parallel rank holds the tokens that the rule assigns to it") {
  for (std::uint32_t size = 1; size <= 4; ++size) {
    for (const std::uint32_t interleave : {1U, 2U, 3U, 8U}) {
      CAPTURE(size);
      CAPTURE(interleave);
      std::vector<std::uint64_t> counts(size);
      for (std::uint64_t token = 0; token < 200; ++token) {
        for (std::uint32_t rank = 0; rank < size; ++rank) {
          const paging::kv_part part{.cp_rank = rank, .cp_size = size, .cp_interleave = interleave};
          REQUIRE(part.local_tokens(token) == counts[rank]);
          REQUIRE(part.cp_rank_of(token) == (token / interleave) % size);
          if (part.cp_rank_of(token) != rank) continue;
          REQUIRE(part.local_of(token) == counts[rank]);
          REQUIRE(part.token_of(counts[rank]) == token);
        }
        ++counts[(token / interleave) % size];
      }
    }
  }
  kv_layout layout = llama;
  layout.part = {.cp_rank = 1, .cp_size = 4, .cp_interleave = 8};
  CHECK(layout.checked().virtual_block_tokens() == 64);
}

TEST_CASE("impossible forms and parts are refused") {
  const auto text_of = [](auto change) {
    kv_layout out = llama;
    change(out);
    try {
      static_cast<void>(out.checked());
    } catch (const error& refused) {
      return std::string(refused.what());
    }
    return std::string();
  };
  CHECK(text_of([](kv_layout& l) { l.value_element = static_cast<dtype>(200); }) ==
        "kv_layout: there is no element of number 200; was it written by a newer version?");
  CHECK(text_of([](kv_layout& l) { l.key_scales.group = static_cast<scale_group>(4); }) ==
        "kv_layout: there is no scale_group of number 4; was it written by a newer version?");
  CHECK(text_of([](kv_layout& l) { l.key_scales.place = static_cast<scale_place>(4); }) ==
        "kv_layout: there is no scale_place of number 4; was it written by a newer version?");
  CHECK(text_of([](kv_layout& l) { l.value_scales.element = static_cast<dtype>(99); }) ==
        "kv_layout: there is no element of number 99; was it written by a newer version?");
  CHECK(text_of([](kv_layout& l) { l.key_scales.has_global = true; }) ==
        "kv_layout: key_scales.has_global is set without a group; a global scale scales the scales of a "
        "group, so set the group too");
  CHECK(text_of([](kv_layout& l) { l.key_scales = {.group = scale_group::vector, .numbers = 0}; }) ==
        "kv_layout: key_scales.numbers is 0; at least 1 is needed");
  CHECK(text_of([](kv_layout& l) { l.value_scales = {.group = scale_group::run, .run = 24}; }) ==
        "kv_layout: value_scales.run: vectors of 128 elements are not a whole number of runs of 24");
  CHECK(text_of([](kv_layout& l) { l.value_scales = {.group = scale_group::run, .run = 0}; }) ==
        "kv_layout: value_scales.run: vectors of 128 elements are not a whole number of runs of 0");
  CHECK(text_of([](kv_layout& l) {
          l.key_scales = {.group = scale_group::channel, .place = scale_place::after_vector};
        }) ==
        "kv_layout: key_scales.place: scales by channel apply to all tokens of a block, so they cannot be "
        "after a vector; use in_block or separate");
  CHECK(text_of([](kv_layout& l) {
          l.has_values = false;
          l.value_scales.group = scale_group::vector;
        }) == "kv_layout: value_scales without values; set has_values, or leave out the scales");
  CHECK(text_of([](kv_layout& l) {
          l.has_values = false;
          l.value_element = dtype::int8;
        }) == "kv_layout: value_element without values; set has_values, or leave out value_element");
  CHECK(text_of([](kv_layout& l) { l.index_scales.group = scale_group::vector; }) ==
        "kv_layout: index_scales without index keys; set index_dim, or leave out the scales");
  CHECK(text_of([](kv_layout& l) {
          l.index_dim = 3;
          l.index_element = dtype::int4;
        }) == "kv_layout: 3 elements of 4 bits are not a whole number of bytes");
  CHECK(text_of([](kv_layout& l) { l.part.tp_size = 0; }) ==
        "kv_layout: part.tp_size is 0; at least 1 is needed");
  CHECK(text_of([](kv_layout& l) { l.part.cp_size = 0; }) ==
        "kv_layout: part.cp_size is 0; at least 1 is needed");
  CHECK(text_of([](kv_layout& l) { l.part.cp_interleave = 0; }) ==
        "kv_layout: part.cp_interleave is 0; at least 1 is needed");
  CHECK(text_of([](kv_layout& l) { l.part = {.tp_rank = 2, .tp_size = 2}; }) ==
        "kv_layout: part.tp_rank is 2 of 2 ranks; use 0 to 1");
  CHECK(text_of([](kv_layout& l) { l.part = {.cp_rank = 5, .cp_size = 4}; }) ==
        "kv_layout: part.cp_rank is 5 of 4 ranks; use 0 to 3");
  CHECK(text_of([](kv_layout& l) { l.part = {.tp_size = 2, .heads_of_model = 8}; }) ==
        "kv_layout: part.heads_of_model: 8 heads cannot be distributed over 2 ranks as 8 heads each");
  CHECK(text_of([](kv_layout& l) { l.part = {.cp_size = 2, .cp_interleave = 6}; }) ==
        "kv_layout: part.cp_interleave: a block of 16 tokens is not a whole number of runs of 6");
  kv_layout large{.layers = 0xFFFF'FFFF, .heads = 0xFFFF'FFFF, .head_dim = 2, .block_tokens = 1};
  large.key_scales = {.group = scale_group::channel, .numbers = 0xFFFF'FFFF};
  CHECK_THROWS_AS(static_cast<void>(large.checked()), length_error);
}

TEST_CASE("different contents are refused with the name of the field") {
  const auto text_of = [](auto change) {
    kv_layout theirs = llama;
    change(theirs);
    const auto same = check_contents(theirs, llama, "decode");
    if (same) return std::string();
    CHECK(same.error().code == errc::layout_mismatch);
    return same.error().message();
  };
  const auto sentence = [](const std::string& field, const std::string& there, const std::string& here) {
    return "decode: the layouts' " + field + ": " + there + " there, " + here +
           " here; both sides must hold the same values; nothing was copied";
  };
  CHECK(text_of([](kv_layout&) {}).empty());
  CHECK(text_of([](kv_layout& l) { l.order = block_order::layer_first_joined; }).empty());
  CHECK(text_of([](kv_layout& l) { l.layers = 33; }) == sentence("layers", "33", "32"));
  CHECK(text_of([](kv_layout& l) { l.model = 7; }) == sentence("model", "7", "0"));
  CHECK(text_of([](kv_layout& l) { l.has_values = false; }) == sentence("has_values", "0", "1"));
  CHECK(text_of([](kv_layout& l) { l.value_element = dtype::fp8_e4m3; }) ==
        sentence("value_element", "5", "0"));
  CHECK(text_of([](kv_layout& l) { l.key_scales.group = scale_group::run; }) ==
        sentence("key_scales.group", "2", "0"));
  CHECK(text_of([](kv_layout& l) { l.value_scales = {.group = scale_group::run, .run = 32}; }) ==
        sentence("value_scales.group", "2", "0"));
  CHECK(text_of([](kv_layout& l) { l.rotary_dim = 64; }) == sentence("rotary_dim", "64", "0"));
  CHECK(text_of([](kv_layout& l) { l.index_dim = 128; }) == sentence("index_dim", "128", "0"));
  // A rank's part before the number of heads that follows from it.
  CHECK(text_of([](kv_layout& l) {
          l.heads = 4;
          l.part.tp_size = 2;
        }) == sentence("part.tp_size", "2", "1"));
  CHECK(text_of([](kv_layout& l) { l.part.cp_size = 2; }) == sentence("part.cp_size", "2", "1"));
  const auto of_part = [](const paging::kv_part& part) {
    kv_layout out = llama;
    out.part = part;
    return out;
  };
  CHECK(check_contents(of_part({.tp_rank = 1, .tp_size = 2}), of_part({.tp_size = 2}), "decode")
            .error()
            .message() == sentence("part.tp_rank", "1", "0"));
  CHECK(check_contents(of_part({.cp_rank = 1, .cp_size = 2}), of_part({.cp_size = 2}), "decode")
            .error()
            .message() == sentence("part.cp_rank", "1", "0"));
  CHECK(check_contents(of_part({.cp_size = 2, .cp_interleave = 16}), of_part({.cp_size = 2}), "decode")
            .error()
            .message() == sentence("part.cp_interleave", "16", "1"));
  // However long the name: the field stays.
  const std::string text =
      check_contents(of_part({.cp_size = 2}), llama, std::string(300, 'x')).error().message();
  CHECK(text.find("part.cp_size: 2 there, 1 here") != std::string::npos);
}
