#include <llmmem/paging/kv_layout.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "support/random.hpp"
#include "support/scattered_planes.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr kv_layout llama{.layers = 32, .heads = 8, .head_dim = 128, .block_tokens = 16};
static_assert(llama.block_bytes() == 2ULL * 32 * 8 * 128 * 16 * 2);
static_assert(llama.fragments() == 64);
static_assert(llama.packed().fragments() == 1);
static_assert(llama.checked().planes() == 2);

constexpr kv_layout mla{.layers = 61, .heads = 1, .head_dim = 576, .block_tokens = 64, .has_values = false};
static_assert(mla.block_bytes() == 61ULL * 576 * 64 * 2);

[[nodiscard]] block_order any_order(random_numbers& random) {
  return block_order(random.below(block_order_count));
}

[[nodiscard]] kv_layout random_layout(random_numbers& random) {
  constexpr std::array types{dtype::f32, dtype::bf16, dtype::int8};
  return {.layers = 1 + random.below(std::uint32_t{3}),
          .heads = 1 + random.below(std::uint32_t{3}),
          .head_dim = 1 + random.below(std::uint32_t{4}),
          .value_dim = random.below(std::uint32_t{3}),
          .block_tokens = 1 + random.below(std::uint32_t{4}),
          .has_values = !random.once_in(4),
          .element = types[random.below(std::uint64_t{types.size()})],
          .heads_in_block = llmmem::paging::head_order(random.below(std::uint32_t{2})),
          .order = any_order(random)};
}

/// Where the orders put a vector, counted one by one in the order of their names.
[[nodiscard]] std::uint64_t place(const kv_layout& of, std::uint64_t blocks, std::uint32_t p,
                                  std::uint64_t layer, std::uint64_t block, std::uint64_t token,
                                  std::uint64_t head) {
  using key = std::array<std::uint64_t, 5>;
  const auto rank = [&](std::uint64_t l, std::uint64_t plane, std::uint64_t b, std::uint64_t t,
                        std::uint64_t h) -> key {
    const bool nhd = of.heads_in_block == llmmem::paging::head_order::nhd;
    const std::uint64_t inner = nhd ? t : h;
    const std::uint64_t innermost = nhd ? h : t;
    switch (of.order) {
      case block_order::layer_first:
        return {l, plane, b, inner, innermost};
      case block_order::layer_first_paired:
        return {l, b, plane, inner, innermost};
      case block_order::block_first:
        return {b, l, plane, inner, innermost};
      case block_order::block_first_planes:
        return {b, plane, l, inner, innermost};
      case block_order::layer_first_joined:
        return {l, b, inner, innermost, plane};
      case block_order::block_first_joined:
        return {b, l, inner, innermost, plane};
      case block_order::block_first_separate:
        return {plane, b, l, inner, innermost};
      case block_order::layer_between:
        return {plane, b, inner, l, innermost};
      case block_order::layer_last:
        return {plane, b, inner, innermost, l};
    }
    return {};
  };
  std::uint64_t before = 0;
  for (std::uint64_t l = 0; l < of.layers; ++l)
    for (std::uint32_t plane = 0; plane < of.planes(); ++plane)
      for (std::uint64_t b = 0; b < blocks; ++b)
        for (std::uint64_t t = 0; t < of.block_tokens; ++t)
          for (std::uint64_t h = 0; h < of.heads; ++h)
            if (rank(l, plane, b, t, h) < rank(layer, p, block, token, head))
              before += of.vector_bytes(plane);
  return before;
}

}  // namespace

TEST_CASE("strides place each vector where the names of the orders say") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const kv_layout layout = random_layout(random);
    const std::uint64_t blocks = 1 + random.below(std::uint64_t{3});
    std::uint64_t bytes = 0;
    for (std::uint32_t p = 0; p < layout.planes(); ++p) {
      const plane_strides strides = layout.strides(p, blocks);
      for (std::uint64_t layer = 0; layer < layout.layers; ++layer)
        for (std::uint64_t block = 0; block < blocks; ++block)
          for (std::uint64_t token = 0; token < layout.block_tokens; ++token)
            for (std::uint64_t head = 0; head < layout.heads; ++head) {
              REQUIRE(strides.offset(layer, block, token, head) ==
                      place(layout, blocks, p, layer, block, token, head));
              bytes += strides.vector_bytes;
            }
    }
    CHECK(layout.total_bytes(blocks) == bytes);
    CHECK(layout.block_bytes() * blocks == bytes);
  }
}

TEST_CASE("a block has as many pieces as its layout says, and neighbours are adjacent in each") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const kv_layout layout = random_layout(random);
    constexpr std::uint64_t blocks = 4;
    std::vector<std::uint64_t> owner(layout.total_bytes(blocks), blocks);
    for (std::uint32_t p = 0; p < layout.planes(); ++p) {
      const plane_strides strides = layout.strides(p, blocks);
      for (std::uint64_t layer = 0; layer < layout.layers; ++layer)
        for (std::uint64_t block = 0; block < blocks; ++block)
          for (std::uint64_t token = 0; token < layout.block_tokens; ++token)
            for (std::uint64_t head = 0; head < layout.heads; ++head)
              std::fill_n(
                  owner.begin() + static_cast<std::ptrdiff_t>(strides.offset(layer, block, token, head)),
                  strides.vector_bytes, block);
    }
    std::uint64_t pieces = 0;
    for (std::size_t i = 0; i < owner.size(); ++i) {
      if (i != 0 && owner[i] == owner[i - 1]) continue;
      pieces += owner[i] == 1 ? 1U : 0U;
      if (owner[i] != 0) REQUIRE(owner[i] == owner[i - 1] + 1);
    }
    CHECK(pieces == layout.fragments());
  }
}

TEST_CASE("the requested tokens of a block are copied between any two orders, and nothing else is written") {
  for (const auto seed : seeds(400)) {
    CAPTURE(seed);
    random_numbers random(seed);
    kv_layout from = random_layout(random);
    kv_layout to = from;
    to.heads_in_block = llmmem::paging::head_order(random.below(std::uint32_t{2}));
    to.order = any_order(random);
    const std::uint64_t from_blocks = 1 + random.below(std::uint64_t{3});
    const std::uint64_t to_blocks = 1 + random.below(std::uint64_t{3});
    std::vector<std::byte> source(from.total_bytes(from_blocks));
    std::vector<std::byte> target(to.total_bytes(to_blocks), std::byte{0xEE});
    for (std::byte& each : source)
      each = std::byte{static_cast<std::uint8_t>(random.below(std::uint32_t{0xEE}))};
    const std::uint64_t a = random.below(from_blocks);
    const std::uint64_t b = random.below(to_blocks);
    const std::uint64_t tokens = random.below(std::uint64_t{from.block_tokens} + 1);
    copy_kv_block({.data = target.data(), .blocks = to_blocks, .layout = to}, b,
                  {.data = source.data(), .blocks = from_blocks, .layout = from}, a, tokens);
    std::uint64_t written = 0;
    for (std::uint32_t p = 0; p < from.planes(); ++p) {
      for (std::uint64_t layer = 0; layer < from.layers; ++layer)
        for (std::uint64_t token = 0; token < tokens; ++token)
          for (std::uint64_t head = 0; head < from.heads; ++head)
            for (std::uint64_t i = 0; i < from.vector_bytes(p); ++i, ++written)
              REQUIRE(target[to.strides(p, to_blocks).offset(layer, b, token, head) + i] ==
                      source[from.strides(p, from_blocks).offset(layer, a, token, head) + i]);
    }
    const auto untouched =
        static_cast<std::uint64_t>(std::count(target.begin(), target.end(), std::byte{0xEE}));
    REQUIRE(untouched + written == target.size());
  }
}

TEST_CASE("planes in several allocations hold the same as in one allocation") {
  std::uint64_t moved = 0;
  for (const auto seed : llmmem_tests::seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const kv_layout from = random_layout(random);
    kv_layout to = from;
    to.heads_in_block = llmmem::paging::head_order(random.below(std::uint32_t{2}));
    to.order = any_order(random);
    const std::uint64_t from_blocks = 1 + random.below(std::uint64_t{3});
    const std::uint64_t to_blocks = 1 + random.below(std::uint64_t{3});
    std::vector<std::byte> source(from.total_bytes(from_blocks));
    for (std::byte& each : source)
      each = std::byte(random.below(std::uint32_t{256}));
    std::vector<std::byte> expected(to.total_bytes(to_blocks), std::byte{0xEE});
    const scattered_planes source_planes(from, from_blocks, source);
    const scattered_planes target_planes(to, to_blocks, expected);
    const std::uint64_t a = random.below(from_blocks);
    const std::uint64_t b = random.below(to_blocks);
    const std::uint64_t tokens = random.below(std::uint64_t{from.block_tokens} + 1);
    copy_kv_block({expected.data(), to_blocks, to}, b, {source.data(), from_blocks, from}, a, tokens);
    copy_kv_block(target_planes.memory(), b, source_planes.memory(), a, tokens);
    REQUIRE(target_planes.image() == expected);
    // Into one allocation, out of several.
    std::vector<std::byte> target(expected.size(), std::byte{0xEE});
    copy_kv_block({target.data(), to_blocks, to}, b, source_planes.memory(), a, tokens);
    REQUIRE(target == expected);
    moved += tokens;
  }
  CHECK(moved > 100);
}

TEST_CASE("a plane begins where the table says, otherwise where the strides do") {
  const kv_layout layout{.layers = 3, .heads = 2, .head_dim = 4, .order = block_order::layer_first};
  std::vector<std::byte> bytes(layout.total_bytes(5));
  std::array<std::byte*, 6> table{};
  for (std::size_t i = 0; i < table.size(); ++i)
    table[i] = bytes.data() + 7 * i;
  const kv_memory one{bytes.data(), 5, layout};
  const kv_memory several{.blocks = 5, .layout = layout, .plane_table = table.data(), .plane_alignment = 1};
  for (std::uint32_t p = 0; p < 2; ++p) {
    const plane_strides strides = layout.strides(p, 5);
    const kv_plane plane = kv_plane_of(several, p);
    for (std::uint32_t layer = 0; layer < 3; ++layer) {
      CHECK(plane_base(plane, layer) == table[p * std::size_t{3} + layer]);
      CHECK(plane_base(kv_plane_of(one, p), layer) == bytes.data() + strides.offset(layer, 0, 0, 0));
    }
    CHECK(plane.alignment == 1);
    CHECK(plane.strides.offset(0, 4, 3, 1) == strides.offset(0, 4, 3, 1) - strides.base);
  }
}

TEST_CASE(
    "any difference changes the fingerprint, and a difference of order keeps the contents' fingerprint") {
  std::vector<kv_layout> contents(10, llama);
  contents[1].layers = 33;
  contents[2].heads = 4;
  contents[3].head_dim = 64;
  contents[4].value_dim = 64;
  contents[5].block_tokens = 32;
  contents[6].has_values = false;
  contents[7].element = dtype::f16;
  contents[8].model = 7;
  contents[9].element = dtype::fp8_e4m3;
  std::set<std::uint64_t> of_contents;
  std::set<std::uint64_t> of_all;
  for (const kv_layout& each : contents) {
    CHECK(of_contents.insert(each.content_fingerprint()).second);
    for (const auto heads : {llmmem::paging::head_order::nhd, llmmem::paging::head_order::hnd}) {
      for (std::uint32_t order = 0; order < block_order_count; ++order) {
        kv_layout arranged = each;
        arranged.heads_in_block = heads;
        arranged.order = block_order(order);
        CHECK(of_all.insert(arranged.fingerprint()).second);
        CHECK(arranged.content_fingerprint() == each.content_fingerprint());
      }
    }
  }
  kv_layout spelled_out = llama;
  spelled_out.value_dim = llama.head_dim;
  CHECK(spelled_out.fingerprint() == llama.fingerprint());
  // Without values there is no length of theirs.
  kv_layout keys_alone = contents[6];
  keys_alone.value_dim = 64;
  CHECK(keys_alone.fingerprint() == contents[6].fingerprint());
  CHECK(keys_alone.content_fingerprint() == contents[6].content_fingerprint());
}

TEST_CASE("fingerprints have not changed since the first data was stored") {
  CHECK(llama.fingerprint() == 16'463'231'453'443'522'407U);
  CHECK(llama.content_fingerprint() == 10'809'706'092'779'207'337U);
  CHECK(mla.fingerprint() == 13'048'386'617'486'644'335U);
  constexpr kv_layout other{.layers = 4,
                            .heads = 2,
                            .head_dim = 192,
                            .value_dim = 128,
                            .block_tokens = 32,
                            .element = dtype::fp8_e4m3,
                            .order = block_order::block_first,
                            .model = 0x1234};
  CHECK(other.fingerprint() == 3'819'473'234'546'066'141U);
  CHECK(other.content_fingerprint() == 3'819'473'234'546'066'141U);
  // By head order, then by the order of blocks.
  constexpr std::array of_llama{
      16'463'231'453'443'522'407U, 6'573'029'906'234'053'201U,  10'809'706'092'779'207'337U,
      13'892'964'833'836'104'205U, 17'301'450'831'642'464'381U, 5'403'436'244'483'751'011U,
      3'853'813'603'552'426'937U,  3'883'267'812'258'111'249U,  6'800'570'218'449'043'323U,
      5'035'489'326'734'578'859U,  14'505'487'139'199'977'843U, 1'149'024'201'871'922'345U,
      15'532'666'482'233'335'391U, 9'154'876'727'248'979'687U};
  constexpr std::array of_mla{
      13'048'386'617'486'644'335U, 12'175'449'432'613'189'081U, 5'622'698'721'268'979'931U,
      7'854'301'328'028'302'015U,  12'494'287'831'557'572'819U, 4'434'976'883'531'767'149U,
      5'969'256'651'045'722'089U,  2'436'534'903'414'960'115U,  9'287'680'946'128'749'083U,
      10'293'338'667'670'808'153U, 1'171'352'592'192'730'883U,  10'555'208'630'447'850'821U,
      9'093'130'691'121'634'651U,  10'613'235'923'733'359'349U};
  for (std::uint32_t i = 0; i < 14; ++i) {
    CAPTURE(i);
    const auto arranged = [&](kv_layout layout) {
      layout.heads_in_block = llmmem::paging::head_order(i / 7);
      layout.order = block_order(i % 7);
      return layout;
    };
    CHECK(arranged(llama).fingerprint() == of_llama.at(i));
    CHECK(arranged(llama).content_fingerprint() == 10'809'706'092'779'207'337U);
    CHECK(arranged(mla).fingerprint() == of_mla.at(i));
    CHECK(arranged(mla).content_fingerprint() == 5'622'698'721'268'979'931U);
  }
}

TEST_CASE("impossible dimensions are refused") {
  const auto changed = [](auto change) {
    kv_layout out = llama;
    change(out);
    return out;
  };
  CHECK_THROWS_WITH_AS(changed([](kv_layout& l) { l.layers = 0; }).checked(),
                       "kv_layout: layers is 0; at least 1 is needed", length_error);
  CHECK_THROWS_WITH_AS(changed([](kv_layout& l) { l.block_tokens = 0; }).checked(),
                       "kv_layout: block_tokens is 0; at least 1 is needed", length_error);
  CHECK_THROWS_WITH_AS(changed([](kv_layout& l) {
                         l.element = dtype::int4;
                         l.head_dim = 63;
                       }).checked(),
                       "kv_layout: 63 elements of 4 bits are not a whole number of bytes", length_error);
  CHECK_THROWS_AS(changed([](kv_layout& l) { l.layers = l.heads = l.head_dim = 0xFFFF'FFFF; }).checked(),
                  length_error);
  CHECK_NOTHROW(llama.checked());
}

TEST_CASE("unknown numbers of elements and orders are refused") {
  kv_layout out = llama;
  out.element = static_cast<dtype>(200);
  CHECK_THROWS_WITH_AS(out.checked(),
                       "kv_layout: there is no element of number 200; was it written by a newer version?",
                       argument_error);
  out = llama;
  out.heads_in_block = static_cast<llmmem::paging::head_order>(2);
  CHECK_THROWS_WITH_AS(out.checked(),
                       "kv_layout: there is no head_order of number 2; was it written by a newer version?",
                       argument_error);
  out = llama;
  out.order = static_cast<block_order>(block_order_count);
  CHECK_THROWS_WITH_AS(out.checked(),
                       "kv_layout: there is no block_order of number 9; was it written by a newer version?",
                       argument_error);
  for (std::uint32_t order = 0; order < block_order_count; ++order) {
    out.order = static_cast<block_order>(order);
    CHECK_NOTHROW(out.checked());
  }
}
