/// Cold blocks in few bins: errors within their bound, forms that hold all of their side data.
#include <llmmem/offload/kv_bins.hpp>

#include <doctest/doctest.h>
#include <llmmem/eviction/lru.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/offload/detail/tier_stack.hpp>
#include <llmmem/space/host.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using offload::kv_bins;
using offload::kv_bins_options;

namespace {

float read(const kv_layout& of, const std::byte* from) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, from, bits_of(of.element) / 8);
  return of.element == dtype::f32    ? float_of<dtype::f32>(bits)
         : of.element == dtype::bf16 ? float_of<dtype::bf16>(static_cast<std::uint16_t>(bits))
                                     : float_of<dtype::f16>(static_cast<std::uint16_t>(bits));
}
void write(const kv_layout& of, std::byte* to, float value) {
  const std::uint32_t bits = of.element == dtype::f32    ? nearest_of<dtype::f32>(value)
                             : of.element == dtype::bf16 ? std::uint32_t{nearest_of<dtype::bf16>(value)}
                                                         : std::uint32_t{nearest_of<dtype::f16>(value)};
  std::memcpy(to, &bits, bits_of(of.element) / 8);
}

/// A packed block of numbers near a bell curve around a mean of each channel.
std::vector<std::byte> any_block(random_numbers& random, const kv_layout& of, float size) {
  std::vector<std::byte> out(of.block_bytes());
  const std::size_t bytes = bits_of(of.element) / 8;
  for (std::size_t i = 0; i < out.size() / bytes; ++i) {
    float sum = i % 8 == 0 ? 4.0F : 0.0F;
    for (int k = 0; k < 4; ++k)
      sum += static_cast<float>(random.below(std::uint32_t{2001})) / 1000.0F - 1.0F;
    write(of, out.data() + i * bytes, sum * size);
  }
  return out;
}

kv_bins_options any_options(random_numbers& random) {
  constexpr dtype elements[] = {dtype::f32, dtype::bf16, dtype::f16};
  kv_bins_options out{.layout = {.layers = 1 + random.below(std::uint32_t{3}),
                                 .heads = 1 + random.below(std::uint32_t{3}),
                                 .head_dim = 8 * (1 + random.below(std::uint32_t{3})),
                                 .block_tokens = 1 + random.below(std::uint32_t{17}),
                                 .has_values = !random.once_in(4),
                                 .element = elements[random.below(std::uint32_t{3})]},
                      .group_tokens = 1 + random.below(std::uint32_t{6})};
  if (out.layout.has_values && random.once_in(2)) out.layout.value_dim = 16;
  for (std::uint32_t l = 0; l <= random.below(std::uint32_t{2}); ++l) {
    out.layers.push_back({.keys = 3 + 2 * random.below(std::uint32_t{120}),
                          .values = 3 + 2 * random.below(std::uint32_t{120}),
                          .key_differences = random.once_in(2),
                          .value_differences = random.once_in(2)});
  }
  return out;
}

/// The vector of a token in one layer's plane of a packed block.
std::vector<double> vector_of(const kv_layout& of, const std::vector<std::byte>& block, std::uint32_t layer,
                              std::uint32_t plane, std::uint32_t token) {
  const plane_strides strides = of.packed().strides(plane, 1);
  std::vector<double> out;
  for (std::uint32_t h = 0; h < of.heads; ++h) {
    for (std::uint64_t i = 0; i < of.vector_elements(plane); ++i)
      out.push_back(static_cast<double>(
          read(of, block.data() + strides.offset(layer, 0, token, h) + i * (bits_of(of.element) / 8))));
  }
  return out;
}

}  // namespace

TEST_CASE("every element comes back within the bound of its vector, or of its difference") {
  std::uint64_t binned = 0;
  for (const std::uint64_t seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    kv_bins_options options = any_options(random);
    const kv_layout& of = options.layout;
    const kv_bins recipe(options);
    auto coder = recipe.make(0, of.block_bytes(), {});
    const float size = of.element == dtype::f16 ? 1.0F : std::ldexp(1.0F, static_cast<int>(seed % 60) - 30);
    const std::vector<std::byte> block = any_block(random, of, size);
    std::vector<std::byte> form(recipe.worst_case_bytes(0, block.size()));
    form.resize(coder.encode(block, form).value());
    std::vector<std::byte> back(block.size());
    auto other = recipe.make(0, of.block_bytes(), {});
    other.decode(form, back).value();
    if (form[0] == std::byte{0}) {
      CHECK(back == block);
      continue;
    }
    ++binned;
    CHECK(form.size() < block.size());
    const double rounding = of.element == dtype::f32 ? 0x1p-24 : of.element == dtype::bf16 ? 0x1p-8 : 0x1p-11;
    for (std::uint32_t l = 0; l < of.layers; ++l) {
      const offload::layer_bins& bins = options.layers[std::min<std::size_t>(l, options.layers.size() - 1)];
      for (std::uint32_t p = 0; p < of.kv_planes(); ++p) {
        const bool differs = p == 0 ? bins.key_differences : bins.value_differences;
        for (std::uint32_t t = 0; t < of.block_tokens; ++t) {
          const std::vector<double> right = vector_of(of, block, l, p, t);
          const std::vector<double> found = vector_of(of, back, l, p, t);
          const std::uint32_t anchor = t / options.group_tokens * options.group_tokens;
          const std::vector<double> first = vector_of(of, block, l, p, anchor);
          double largest = 0;
          double largest_first = 0;
          for (std::size_t i = 0; i < right.size(); ++i) {
            const bool is_difference = differs && t != anchor;
            largest = std::max(largest, std::abs(is_difference ? right[i] - first[i] : right[i]));
            largest_first = std::max(largest_first, std::abs(first[i]));
          }
          // The anchor's own error is part of the difference.
          if (differs && t != anchor) largest += kv_bins::bound(options.anchor_bins) * largest_first;
          const std::uint32_t codes = differs && t == anchor ? options.anchor_bins
                                      : p == 0               ? bins.keys
                                                             : bins.values;
          for (std::size_t i = 0; i < right.size(); ++i)
            REQUIRE(std::abs(found[i] - right[i]) <=
                    kv_bins::bound(codes) * largest + rounding * (std::abs(right[i]) + largest) + 1e-300);
        }
      }
    }
  }
  CHECK(binned > 30);
}

TEST_CASE("the form holds scales and tables, and a code takes fewer bits where few are in use") {
  random_numbers random(7);
  const kv_layout layout{.layers = 4, .heads = 2, .head_dim = 64, .block_tokens = 16};
  const std::vector<std::byte> block = any_block(random, layout, 1);
  const auto bits = [&](std::uint32_t bins, std::uint32_t later) {
    const kv_bins recipe({.layout = layout,
                          .layers = {{.keys = bins, .values = bins},
                                     {.keys = bins, .values = bins},
                                     {.keys = later, .values = later}}});
    auto coder = recipe.make(0, block.size(), {});
    std::vector<std::byte> form(1 + block.size());
    const std::uint64_t bytes = coder.encode(block, form).value();
    CHECK(bytes > 2U * 4 * 2 * 16);  // the scales alone
    return 8.0 * static_cast<double>(bytes) / (static_cast<double>(block.size()) / 2);
  };
  CHECK(bits(33, 33) < 4.6);
  CHECK(bits(9, 9) < 2.9);
  CHECK(bits(9, 9) < bits(33, 33));
  CHECK(bits(33, 33) < bits(255, 255));
  CHECK(bits(255, 255) < 8);
  // Half of the layers with other bins: their codes have tables of their own.
  CHECK(bits(33, 9) < (bits(33, 33) + bits(9, 9)) / 2 + 0.1);
}

TEST_CASE("blocks that are not finite, and constant ones, come back") {
  random_numbers random(3);
  const kv_bins_options options{.layout = {.layers = 2, .heads = 1, .head_dim = 16, .block_tokens = 8},
                                .layers = {{.key_differences = true}}};
  const kv_bins recipe(options);
  auto coder = recipe.make(0, options.layout.block_bytes(), {});
  std::vector<std::byte> form(recipe.worst_case_bytes(0, options.layout.block_bytes()));
  const auto round_trip = [&](const std::vector<std::byte>& block) {
    std::vector<std::byte> back(block.size());
    const std::uint64_t bytes = coder.encode(block, form).value();
    coder.decode(std::span(form).first(bytes), back).value();
    return back;
  };
  std::vector<std::byte> block = any_block(random, options.layout, 1);
  for (const float wrong :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    write(options.layout, block.data() + 2 * 77, wrong);
    CHECK(round_trip(block) == block);
  }
  std::ranges::fill(block, std::byte{0xFF});  // tokens that were never written
  CHECK(round_trip(block) == block);
  std::ranges::fill(block, std::byte{0});
  CHECK(round_trip(block) == block);
  kv_bins_options halves{.layout = options.layout, .layers = {{.keys = 33, .values = 33}}};
  halves.layout.element = dtype::f16;  // the scale of 65504 is rounded to 4096, and 16 of these are too many
  for (std::size_t i = 0; i < block.size(); i += 2)
    write(halves.layout, block.data() + i, 65504);
  auto half_coder = kv_bins(halves).make(0, block.size(), {});
  std::vector<std::byte> back(block.size());
  half_coder.decode(std::span(form).first(half_coder.encode(block, form).value()), back).value();
  CHECK(back == block);
}

TEST_CASE("a form that is cut or changed is refused, or decoded without a step outside") {
  random_numbers random(5);
  const kv_bins_options options{.layout = {.layers = 1, .heads = 1, .head_dim = 32, .block_tokens = 8}};
  auto coder = kv_bins(options).make(0, options.layout.block_bytes(), {});
  const std::vector<std::byte> block = any_block(random, options.layout, 1);
  std::vector<std::byte> form(1 + block.size());
  form.resize(coder.encode(block, form).value());
  REQUIRE(form[0] == std::byte{1});
  std::vector<std::byte> back(block.size());
  for (std::size_t cut = 0; cut < form.size(); ++cut) {
    const std::vector<std::byte> part(form.begin(), form.begin() + static_cast<std::ptrdiff_t>(cut));
    CHECK(coder.decode(part, back).error().code == errc::damaged_encoding);
  }
  std::uint64_t refused = 0;
  for (std::size_t at = 0; at < form.size() * 8; ++at) {
    std::vector<std::byte> changed = form;
    changed[at / 8] ^= std::byte{1} << at % 8;
    refused += coder.decode(changed, back) ? 0U : 1U;
  }
  CHECK(refused > 20);
  std::vector<std::byte> nan = form;
  nan[1] = std::byte{0xFF};
  nan[2] = std::byte{0x7F};
  CHECK(coder.decode(nan, back).error().code == errc::damaged_encoding);
}

TEST_CASE("a tier with bins gives back what the coder gives, and another tier's bins have another form") {
  random_numbers random(9);
  kv_bins_options options{.layout = {.layers = 2, .heads = 2, .head_dim = 16, .block_tokens = 8}};
  const kv_bins recipe(options);
  const std::uint64_t bytes = options.layout.block_bytes();
  const double share = 1;
  host_space host({.budget = 1 << 20});
  host_space cold({.budget = 1 << 20});
  using cold_tier = offload::kv_tier<host_space, lru_eviction, kv_bins>;
  cold_tier below(cold, 16 * bytes, {}, recipe);
  below.slot_share = 0.4;
  const kv_tiers_options tiers{.load_headroom = 0};
  detail::kv_tier_stack<offload::kv_tier<host_space>, cold_tier> stack(
      tiers, std::span(&bytes, 1), std::span(&share, 1), offload::kv_tier(host, bytes, write_through{}),
      below);
  const auto poll = [&] {
    stack.poll(0, [](const detail::load_cookie&, slot_id, const failure&) noexcept {});
  };
  std::vector<std::vector<std::byte>> blocks;
  for (std::uint64_t id = 0; id < 12; ++id) {
    blocks.push_back(any_block(random, options.layout, 1));
    const auto slot = stack.begin_fill(0, key_from_id(id), detail::parent_digest::none, false);
    REQUIRE(slot.has_value());
    std::ranges::copy(blocks.back(), stack.first().medium.bytes_of(0, *slot).begin());
    stack.settle(0, *slot);
    poll();
  }
  offload::kv_tiers_stats stats;
  stack.count(stats);
  CHECK(stats.tiers[1].slots == 40);  // 16 blocks of 2048 bytes, in slots of 819
  CHECK(stats.tiers[1].stored == 12);
  CHECK(stats.tiers[1].stored_bytes < 12 * bytes * 4 / 10);
  auto coder = recipe.make(0, bytes, {});
  std::vector<std::byte> form(1 + bytes);
  std::vector<std::byte> right(bytes);
  for (std::uint64_t id = 0; id < 11; ++id) {
    const auto found = stack.find(0, key_from_id(id));
    REQUIRE(found.has_value());
    CHECK(found->tier == 1);
    REQUIRE(stack.begin_read(1, 0, found->slot, {}, 0) == decltype(stack)::begun::yes);
    poll();
    const auto here = stack.first().slots[0].find(key_from_id(id));
    REQUIRE(here.has_value());
    coder.decode(std::span(form).first(coder.encode(blocks[id], form).value()), right).value();
    CHECK(std::ranges::equal(stack.first().medium.bytes_of(0, *here), right));
    CHECK(right != blocks[id]);
  }
  options.layers = {{.keys = 35}};
  CHECK(kv_bins(options).format_id(0) != recipe.format_id(0));
  // Caches over these two exchange no blocks; both differ from one without a lossy tier.
  const offload::kv_tier<host_space> plain(host, bytes);
  const cold_tier other(cold, 16 * bytes, {}, kv_bins(options));
  CHECK(detail::lossy_form(1, plain, plain) == 0);
  CHECK(detail::lossy_form(1, plain, below) == detail::lossy_form(1, plain, plain, below));
  CHECK(detail::lossy_form(1, plain, below) != 0);
  CHECK(detail::lossy_form(1, plain, below) != detail::lossy_form(1, plain, other));
}

TEST_CASE("each group of layers has its own bins, in slots of its own, through one coding buffer") {
  random_numbers random(21);
  const std::vector<kv_bins_options> groups{
      {.layout = {.layers = 2, .heads = 2, .head_dim = 16, .block_tokens = 8}, .layers = {{.keys = 9}}},
      {.layout = {.layers = 1,
                  .heads = 3,
                  .head_dim = 8,
                  .value_dim = 16,
                  .block_tokens = 5,
                  .element = dtype::f32},
       .layers = {{.keys = 255, .values = 3, .key_differences = true}},
       .group_tokens = 2}};
  const kv_bins recipe(groups);
  const std::uint64_t bytes[] = {groups[0].layout.block_bytes(), groups[1].layout.block_bytes()};
  const double shares[] = {1, 1};
  host_space host({.budget = 1 << 20});
  host_space cold({.budget = 1 << 20});
  using cold_tier = offload::kv_tier<host_space, lru_eviction, kv_bins>;
  cold_tier below(cold, 1 << 15, {}, recipe);
  below.slot_share = 0.8;
  below.coding_buffers = 1;
  const kv_tiers_options tiers{.load_headroom = 0};
  detail::kv_tier_stack<offload::kv_tier<host_space>, cold_tier> stack(
      tiers, bytes, shares, offload::kv_tier(host, 3 * (bytes[0] + bytes[1]), write_through{}), below);
  const auto poll = [&] {
    stack.poll(0, [](const detail::load_cookie&, slot_id, const failure&) noexcept {});
  };
  std::vector<std::vector<std::byte>> blocks;
  for (std::uint64_t id = 0; id < 12; ++id) {
    const std::size_t g = id % 2;
    blocks.push_back(any_block(random, groups[g].layout, 1));
    const auto slot = stack.begin_fill(g, key_from_id(id), detail::parent_digest::none, false);
    REQUIRE(slot.has_value());
    std::ranges::copy(blocks.back(), stack.first().medium.bytes_of(g, *slot).begin());
    stack.settle(g, *slot);
    poll();
  }
  for (std::uint64_t id = 0; id < 4; ++id) {
    const std::size_t g = id % 2;
    const auto found = stack.find(g, key_from_id(id));
    REQUIRE(found.has_value());
    REQUIRE(found->tier == 1);
    REQUIRE(stack.begin_read(1, g, found->slot, {}, 0) == decltype(stack)::begun::yes);
    poll();
    const auto here = stack.first().slots[g].find(key_from_id(id));
    REQUIRE(here.has_value());
    auto coder = recipe.make(g, bytes[g], {});
    std::vector<std::byte> form(1 + bytes[g]);
    std::vector<std::byte> right(bytes[g]);
    const std::uint64_t length = coder.encode(blocks[id], form).value();
    CHECK(form[0] == std::byte{1});
    coder.decode(std::span(form).first(length), right).value();
    CHECK(std::ranges::equal(stack.first().medium.bytes_of(g, *here), right));
  }
  CHECK(stack.audit() == std::vector<std::string>{});
}

TEST_CASE("forms and bins that it cannot take are refused") {
  kv_bins_options options{.layout = {.layers = 1, .heads = 1, .head_dim = 32, .element = dtype::int8}};
  CHECK_THROWS_WITH_AS(
      static_cast<void>(kv_bins(options)),
      "kv_bins: plane 0 of the layout has codes, scales, a separate rotary part or an indexer's "
      "keys; it takes keys and values of f32, bf16 or f16 alone: store other forms as they are, "
      "or by a lossless codec",
      argument_error);
  options.layout.element = dtype::bf16;
  options.layers = {{.keys = 32}};
  CHECK_THROWS_WITH_AS(static_cast<void>(kv_bins(options)),
                       "kv_bins: a layer's keys is 32; it must be odd, from 3 to 255, so that 0 has a code",
                       argument_error);
  options.layers = {};
  CHECK_THROWS_AS(static_cast<void>(kv_bins(options).make(0, 7, {})), argument_error);
  CHECK_THROWS_AS(static_cast<void>(kv_bins(options).make(1, 2048, {})), argument_error);
}
