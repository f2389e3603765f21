#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/kernels/kv_quantize.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
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
#include "support/small_elements.hpp"

using namespace llmmem;
using llmmem::paging::scale_group;
using llmmem::paging::scale_place;
using llmmem_tests::load_element;
using llmmem_tests::random_numbers;
using llmmem_tests::store_element;

namespace {

constexpr std::byte untouched{0xA5};

/// Blocks in memory of a layout, all bytes the same before.
struct blocks_of {
  blocks_of(const kv_layout& layout, std::uint64_t count)
      : bytes(layout.total_bytes(count) + 16, untouched), blocks(count), of(layout.checked()) {}

  [[nodiscard]] kv_memory view() { return {bytes.data() + shift(), blocks, of}; }
  /// To a multiple of 16.
  [[nodiscard]] std::size_t shift() const {
    return (16 - reinterpret_cast<std::uintptr_t>(bytes.data()) % 16) % 16;
  }
  [[nodiscard]] std::byte* vector(std::uint32_t p, std::uint64_t layer, std::uint64_t block,
                                  std::uint64_t token, std::uint64_t head) {
    return bytes.data() + shift() + of.strides(p, blocks).offset(layer, block, token, head);
  }
  [[nodiscard]] std::vector<std::byte> contents() const {
    return {bytes.begin() + static_cast<std::ptrdiff_t>(shift()),
            bytes.begin() + static_cast<std::ptrdiff_t>(shift() + of.total_bytes(blocks))};
  }

  std::vector<std::byte> bytes;
  std::uint64_t blocks;
  kv_layout of;
};

/// The plane of the scales of K or V.
std::uint32_t scales_of(const kv_layout& layout, std::uint32_t p) {
  const auto role = p == 0 ? paging::plane_role::key_scale : paging::plane_role::value_scale;
  for (std::uint32_t at = 0; at < layout.planes(); ++at) {
    if (layout.role_of(at) == role) return at;
  }
  return 0;
}

float number(dtype type, const std::byte* from) {
  return load_element(type, from);
}

std::int32_t code_at(dtype code, const std::byte* vector, std::uint64_t i) {
  if (code == dtype::int8) return static_cast<std::int8_t>(vector[i]);
  const auto nibble = static_cast<std::int32_t>(vector[i / 2] >> (i % 2 * 4)) & 0xF;
  return nibble < 8 ? nibble : nibble - 16;
}

/// Two layouts of the same values, in any order: in floats, and in codes with scales.
struct two_layouts {
  explicit two_layouts(random_numbers& random) {
    values = {.layers = 1 + random.below(std::uint32_t{3}),
              .heads = 1 + random.below(std::uint32_t{3}),
              .head_dim = 8 * (1 + random.below(std::uint32_t{5})),
              .value_dim = random.once_in(2) ? 8 * (1 + random.below(std::uint32_t{5})) : 0,
              .block_tokens = 1 + random.below(std::uint32_t{33}),
              .has_values = !random.once_in(5),
              .element = random.once_in(2) ? dtype::bf16 : dtype::f32};
    if (!values.has_values) values.value_dim = 0;
    codes = values;
    const auto any_order = [&](kv_layout& of) {
      of.heads_in_block = random.once_in(2) ? paging::head_order::hnd : paging::head_order::nhd;
      of.order = block_order(random.below(block_order_count));
      if (!of.has_values) of.order = block_order::block_first;
    };
    any_order(values);
    any_order(codes);
    const auto any_code = [&] { return random.once_in(2) ? dtype::int4 : dtype::int8; };
    const auto any_scales = [&] {
      const bool is_by_channel = random.once_in(2);
      return paging::scale_form{.group = is_by_channel ? scale_group::channel : scale_group::vector,
                                .element = random.once_in(2) ? dtype::bf16 : dtype::f32,
                                .place = random.once_in(2) ? scale_place::separate : scale_place::in_block};
    };
    codes.element = any_code();
    codes.key_scales = any_scales();
    if (codes.has_values) {
      codes.value_element = any_code();
      codes.value_scales = any_scales();
      // Floats behind an odd number of bf16 are not aligned, and refused.
      codes.value_scales.element = codes.key_scales.element;
    }
  }

  kv_layout values{};
  kv_layout codes{};
};

void fill(blocks_of& memory, random_numbers& random) {
  for (std::uint32_t p = 0; p < memory.of.kv_planes(); ++p) {
    for (std::uint64_t layer = 0; layer < memory.of.layers; ++layer) {
      for (std::uint64_t block = 0; block < memory.blocks; ++block) {
        for (std::uint64_t token = 0; token < memory.of.block_tokens; ++token) {
          for (std::uint64_t head = 0; head < memory.of.heads; ++head) {
            std::byte* const at = memory.vector(p, layer, block, token, head);
            const std::uint64_t size = bits_of(memory.of.element) / 8;
            for (std::uint64_t i = 0; i < memory.of.vector_elements(p); ++i) {
              const float large = i % 7 == 3 ? 90.0F : 1.0F;
              const float drawn = static_cast<float>(random.below(std::uint32_t{20'001})) / 10'000 - 1;
              store_element(memory.of.element, at + i * size, drawn * large);
            }
          }
        }
      }
    }
  }
}

/// The contract, value by value, of one block: codes, scales, and how far the values restored are.
void check_block(blocks_of& values, blocks_of& codes, blocks_of& restored, std::uint64_t from,
                 std::uint64_t to) {
  const kv_layout& layout = codes.of;
  for (std::uint32_t p = 0; p < layout.kv_planes(); ++p) {
    const dtype code = layout.element_of(p);
    const paging::scale_form& form = p == 0 ? layout.key_scales : layout.value_scales;
    const bool is_by_channel = form.group == scale_group::channel;
    const float qmax = code == dtype::int4 ? 7.0F : 127.0F;
    const std::uint64_t value_bytes = bits_of(values.of.element) / 8;
    const std::uint64_t scale_bytes = bits_of(form.element) / 8;
    const auto value = [&](blocks_of& of, std::uint64_t block, std::uint64_t layer, std::uint64_t token,
                           std::uint64_t head, std::uint64_t i) {
      return number(of.of.element, of.vector(p, layer, block, token, head) + i * value_bytes);
    };
    for (std::uint64_t layer = 0; layer < layout.layers; ++layer) {
      for (std::uint64_t head = 0; head < layout.heads; ++head) {
        for (std::uint64_t token = 0; token < layout.block_tokens; ++token) {
          for (std::uint64_t i = 0; i < layout.vector_elements(p); ++i) {
            float amax = 0;
            if (is_by_channel) {
              for (std::uint64_t t = 0; t < layout.block_tokens; ++t)
                amax = std::max(amax, std::fabs(value(values, from, layer, t, head, i)));
            } else {
              for (std::uint64_t j = 0; j < layout.vector_elements(p); ++j)
                amax = std::max(amax, std::fabs(value(values, from, layer, token, head, j)));
            }
            std::byte rounded[4];
            store_element(form.element, rounded, amax / qmax);
            const float scale = number(form.element, rounded);
            const std::byte* const scales = codes.vector(scales_of(layout, p), layer, to, token, head);
            REQUIRE(number(form.element, scales + (is_by_channel ? i * scale_bytes : 0)) == scale);
            const float x = value(values, from, layer, token, head, i);
            const std::int32_t q = code_at(code, codes.vector(p, layer, to, token, head), i);
            const volatile float inverse = 1.0F / scale;
            const volatile float product = scale == 0 ? 0 : x * inverse;
            REQUIRE(q == static_cast<std::int32_t>(std::nearbyint(product)));
            const volatile float exact = static_cast<float>(q) * scale;
            REQUIRE(std::fabs(static_cast<double>(exact) - static_cast<double>(x)) <=
                    static_cast<double>(scale) / 2 + static_cast<double>(amax) * 0x1p-21);
            std::byte back[4];
            store_element(values.of.element, back, exact);
            REQUIRE(value(restored, from, layer, token, head, i) == number(values.of.element, back));
          }
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("blocks of any order become the contract's codes and scales, and come back") {
  for (const auto seed : llmmem_tests::seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const two_layouts of(random);
    blocks_of values(of.values, 4);
    fill(values, random);
    const std::vector<block_pair> pairs{{2, 1}, {-1, 0}, {0, 3}, {3, -1}};
    blocks_of codes(of.codes, 4);
    blocks_of restored(of.values, 4);
    std::uint32_t flag = 0;
    REQUIRE(quantize_kv_blocks(host_executor{}, codes.view(), values.view(), pairs, {.out_of_range = &flag}));
    const std::vector<block_pair> back{{1, 2}, {3, 0}};
    REQUIRE(dequantize_kv_blocks(host_executor{}, restored.view(), codes.view(), back));
    check_block(values, codes, restored, 2, 1);
    check_block(values, codes, restored, 0, 3);
    CHECK(flag == 0);

    // A device's threads, few and many of them.
    for (const std::uint32_t blocks : {0U, 1U}) {
      blocks_of device_codes(of.codes, 4);
      blocks_of device_values(of.values, 4);
      const testing::grid_executor grid({.blocks = blocks});
      REQUIRE(quantize_kv_blocks(grid, device_codes.view(), values.view(), pairs));
      REQUIRE(dequantize_kv_blocks(grid, device_values.view(), device_codes.view(), back));
      CHECK(device_codes.contents() == codes.contents());  // with every byte of the other blocks
      CHECK(device_values.contents() == restored.contents());
    }
    // Some layers: the others stay.
    blocks_of one_layer(of.codes, 4);
    for (std::uint32_t layer = 0; layer < of.codes.layers; ++layer)
      REQUIRE(quantize_kv_blocks(host_executor{}, one_layer.view(), values.view(), pairs,
                                 {.layers = {layer, 1}}));
    CHECK(one_layer.contents() == codes.contents());
    const std::vector<block_pair> beyond{{4, 0}, {0, 4}};
    blocks_of none(of.codes, 4);
    REQUIRE(quantize_kv_blocks(host_executor{}, none.view(), values.view(), beyond, {.out_of_range = &flag}));
    CHECK(flag == 1);
    CHECK(none.contents() == blocks_of(of.codes, 4).contents());
  }
}

TEST_CASE("every bf16 value is restored within half a step, by scales of floats and of bf16") {
  constexpr kv_layout values{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 2, .has_values = false};
  for (const dtype code : {dtype::int4, dtype::int8}) {
    for (const dtype scale_type : {dtype::f32, dtype::bf16}) {
      kv_layout coded = values;
      coded.element = code;
      coded.key_scales = {.group = scale_group::channel, .element = scale_type};
      kv_layout exact = values;
      exact.element = dtype::f32;
      // One token has a value, the other one as large or larger: each of eight channels another share.
      blocks_of in(values, 1);
      blocks_of out(coded, 1);
      blocks_of back(exact, 1);
      const std::vector<block_pair> pair{{0, 0}};
      const float qmax = code == dtype::int4 ? 7.0F : 127.0F;
      std::uint64_t wrong = 0;
      for (std::uint32_t bits = 0; bits < 0x7F80; ++bits) {
        for (std::uint32_t i = 0; i < 8; ++i) {
          const auto first = static_cast<std::uint16_t>(bits | (i % 2 << 15U));
          const auto second = static_cast<std::uint16_t>(std::min<std::uint32_t>(bits + i * 61, 0x7F7F));
          std::memcpy(in.vector(0, 0, 0, 0, 0) + 2 * i, &first, 2);
          std::memcpy(in.vector(0, 0, 0, 1, 0) + 2 * i, &second, 2);
        }
        REQUIRE(quantize_kv_blocks(host_executor{}, out.view(), in.view(), pair));
        REQUIRE(dequantize_kv_blocks(host_executor{}, back.view(), out.view(), pair));
        for (std::uint32_t i = 0; i < 8; ++i) {
          const auto amax =
              static_cast<double>(std::max(std::fabs(number(dtype::bf16, in.vector(0, 0, 0, 0, 0) + 2 * i)),
                                           std::fabs(number(dtype::bf16, in.vector(0, 0, 0, 1, 0) + 2 * i))));
          const double scale = std::max(amax / static_cast<double>(qmax) * (1 + 0x1p-8), 0x1p-126);
          for (std::uint32_t token = 0; token < 2; ++token) {
            const double x = static_cast<double>(number(dtype::bf16, in.vector(0, 0, 0, token, 0) + 2 * i));
            const double y = static_cast<double>(number(dtype::f32, back.vector(0, 0, 0, token, 0) + 4 * i));
            wrong += std::abs(x - y) <= scale / 2 + amax * 0x1p-21 ? 0U : 1U;
          }
        }
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("the largest bf16 values come back as finite bf16 values") {
  constexpr kv_layout values{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 1};
  for (const dtype code : {dtype::int4, dtype::int8}) {
    for (const dtype scale_type : {dtype::f32, dtype::bf16}) {
      kv_layout coded = values;
      coded.element = code;
      coded.key_scales = {.group = scale_group::channel, .element = scale_type};
      coded.value_scales = {.group = scale_group::vector, .element = scale_type};
      blocks_of in(values, 1);
      blocks_of out(coded, 1);
      blocks_of back(values, 1);
      const std::vector<block_pair> pair{{0, 0}};
      for (std::uint32_t bits = 0x7F70; bits < 0x7F80; ++bits) {
        for (std::uint32_t i = 0; i < 8; ++i) {
          const auto each = static_cast<std::uint16_t>(bits | (i % 2 << 15U));
          for (std::uint32_t plane = 0; plane < 2; ++plane)
            std::memcpy(in.vector(plane, 0, 0, 0, 0) + 2 * i, &each, 2);
        }
        REQUIRE(quantize_kv_blocks(host_executor{}, out.view(), in.view(), pair));
        REQUIRE(dequantize_kv_blocks(host_executor{}, back.view(), out.view(), pair));
        for (std::uint32_t plane = 0; plane < 2; ++plane) {
          for (std::uint32_t i = 0; i < 8; ++i) {
            const float x = number(dtype::bf16, in.vector(plane, 0, 0, 0, 0) + 2 * i);
            const float y = number(dtype::bf16, back.vector(plane, 0, 0, 0, 0) + 2 * i);
            CAPTURE(x);
            CHECK(std::abs(y / x - 1) < 0x1p-6F);
          }
        }
      }
    }
  }
}

TEST_CASE("a channel with a NaN or an infinity comes back as NaNs, and the others do not") {
  constexpr kv_layout values{.layers = 1, .heads = 1, .head_dim = 8, .block_tokens = 3, .has_values = false};
  kv_layout coded = values;
  coded.element = dtype::int4;
  for (const dtype scale_type : {dtype::f32, dtype::bf16}) {
    coded.key_scales = {.group = scale_group::channel, .element = scale_type};
    for (const float wrong :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      blocks_of in(values, 1);
      blocks_of out(coded, 1);
      blocks_of back(values, 1);
      for (std::uint32_t token = 0; token < 3; ++token) {
        for (std::uint32_t i = 0; i < 8; ++i)
          store_element(dtype::bf16, in.vector(0, 0, 0, token, 0) + 2 * i,
                        token == 1 && i == 5 ? wrong : 1.0F);
      }
      const std::vector<block_pair> pair{{0, 0}};
      REQUIRE(quantize_kv_blocks(host_executor{}, out.view(), in.view(), pair));
      REQUIRE(dequantize_kv_blocks(host_executor{}, back.view(), out.view(), pair));
      for (std::uint32_t token = 0; token < 3; ++token) {
        for (std::uint32_t i = 0; i < 8; ++i) {
          const float restored = number(dtype::bf16, back.vector(0, 0, 0, token, 0) + 2 * i);
          CHECK(std::isnan(restored) == (i == 5));
          if (i != 5) CHECK(restored == 1.0F);
        }
      }
    }
  }
}

namespace {

/// One sequence of a cache of closed blocks, with its open block in a pool: as an engine keeps it.
struct growing {
  growing(const kv_layout& codes, std::int64_t open) : closed(codes, 8), open_block(open) {}

  /// Appends tokens, and closes the block when it is full.
  template <class Run>
  void append(const Run& run, blocks_of& pool, std::span<const float> keys, std::span<const float> values) {
    const kv_layout& of = pool.of;
    const std::uint64_t elements = std::uint64_t{of.heads} * of.head_dim;
    for (std::size_t at = 0; at < keys.size() / elements;) {
      const std::uint64_t in_block = tokens % of.block_tokens;
      const std::size_t some = std::min<std::size_t>(keys.size() / elements - at, of.block_tokens - in_block);
      std::vector<std::int64_t> slots;
      for (std::size_t i = 0; i < some; ++i)
        slots.push_back(open_block * of.block_tokens + static_cast<std::int64_t>(in_block + i));
      const slot_front front(slots, of.block_tokens, pool.blocks);
      const auto rows = [&](std::span<const float> from) {
        return batch_vectors{std::as_bytes(from.subspan(at * elements)).data(), elements * 4,
                             std::uint64_t{of.head_dim} * 4};
      };
      for (std::uint32_t layer = 0; layer < of.layers; ++layer)
        REQUIRE(append_kv(run, front, rows(keys), rows(values), pool.view(), layer, {.element = dtype::f32}));
      tokens += some;
      at += some;
      if (tokens % of.block_tokens != 0) continue;
      const auto full = static_cast<std::int64_t>(tokens / of.block_tokens - 1);
      const std::vector<block_pair> pair{{open_block, full}};
      REQUIRE(quantize_kv_blocks(run, closed.view(), pool.view(), pair));
    }
  }
  /// The rule of a truncation into a closed block: it is reopened.
  template <class Run>
  void truncate(const Run& run, blocks_of& pool, std::uint64_t to) {
    const std::uint64_t now = tokens;
    tokens = to;
    if (to % pool.of.block_tokens == 0 || to / pool.of.block_tokens == now / pool.of.block_tokens) return;
    const std::vector<block_pair> pair{{static_cast<std::int64_t>(to / pool.of.block_tokens), open_block}};
    REQUIRE(dequantize_kv_blocks(run, pool.view(), closed.view(), pair));
  }

  blocks_of closed;
  std::int64_t open_block;
  std::uint64_t tokens = 0;
};

std::vector<float> any_floats(random_numbers& random, std::size_t count) {
  std::vector<float> out(count);
  for (std::size_t i = 0; i < count; ++i)
    out[i] =
        (static_cast<float>(random.below(std::uint32_t{20'001})) / 10'000 - 1) * (i % 16 == 3 ? 30.0F : 1.0F);
  return out;
}

constexpr kv_layout growing_values{.layers = 2, .heads = 2, .head_dim = 16, .block_tokens = 5};
constexpr kv_layout growing_codes{.layers = 2,
                                  .heads = 2,
                                  .head_dim = 16,
                                  .block_tokens = 5,
                                  .element = dtype::int4,
                                  .order = block_order::block_first,
                                  .key_scales = {.group = scale_group::channel, .element = dtype::bf16},
                                  .value_scales = {.group = scale_group::vector, .element = dtype::bf16}};

}  // namespace

TEST_CASE("closed and open blocks have the same bits token by token, in chunks and at once") {
  constexpr std::uint64_t elements = 2 * 16;
  for (const auto seed : llmmem_tests::seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::size_t tokens = 1 + random.below(std::uint32_t{40});
    const std::vector<float> keys = any_floats(random, tokens * elements);
    const std::vector<float> values = any_floats(random, tokens * elements);
    blocks_of pool(growing_values, 3);
    growing at_once(growing_codes, 0);
    growing one_by_one(growing_codes, 1);
    growing in_chunks(growing_codes, 2);
    at_once.append(host_executor{}, pool, keys, values);
    const auto part = [&](const std::vector<float>& of, std::size_t at, std::size_t count) {
      return std::span(of).subspan(at * elements, count * elements);
    };
    for (std::size_t at = 0; at < tokens; ++at)
      one_by_one.append(testing::grid_executor{}, pool, part(keys, at, 1), part(values, at, 1));
    for (std::size_t at = 0; at < tokens;) {
      const std::size_t some = std::min<std::size_t>(1 + random.below(std::uint32_t{9}), tokens - at);
      in_chunks.append(host_executor{}, pool, part(keys, at, some), part(values, at, some));
      at += some;
    }
    CHECK(one_by_one.closed.contents() == at_once.closed.contents());
    CHECK(in_chunks.closed.contents() == at_once.closed.contents());
    for (std::uint64_t token = 0; token < tokens % 5; ++token) {
      for (const std::uint64_t block : {1U, 2U}) {
        CHECK(std::memcmp(pool.vector(0, 1, 0, token, 1), pool.vector(0, 1, block, token, 1), 32) == 0);
        CHECK(std::memcmp(pool.vector(1, 1, 0, token, 1), pool.vector(1, 1, block, token, 1), 32) == 0);
      }
    }
  }
}

TEST_CASE("a truncation into a closed block reopens it, and a fork that writes leaves its parent's bits") {
  constexpr std::uint64_t elements = 2 * 16;
  random_numbers random(7);
  const std::vector<float> keys = any_floats(random, 15 * elements);
  const std::vector<float> values = any_floats(random, 15 * elements);
  blocks_of pool(growing_values, 2);
  growing parent(growing_codes, 0);
  parent.append(host_executor{}, pool, keys, values);  // three closed blocks
  const std::vector<std::byte> before = parent.closed.contents();

  // The child shares the closed blocks, truncates into the last, and writes: into its own open block.
  growing child(growing_codes, 1);
  child.closed.bytes = parent.closed.bytes;
  child.tokens = parent.tokens;
  child.truncate(host_executor{}, pool, 12);
  blocks_of read(growing_values, 1);  // what readers of the closed block saw
  const std::vector<block_pair> last{{2, 0}};
  REQUIRE(dequantize_kv_blocks(host_executor{}, read.view(), parent.closed.view(), last));
  for (std::uint32_t p = 0; p < 2; ++p) {
    for (std::uint64_t token = 0; token < 2; ++token)
      CHECK(std::memcmp(read.vector(p, 1, 0, token, 1), pool.vector(p, 1, 1, token, 1), 32) == 0);
  }
  const auto rest = [&](const std::vector<float>& of) { return std::span(of).subspan(12 * elements); };
  child.append(host_executor{}, pool, rest(keys), rest(values));
  CHECK(parent.closed.contents() == before);
  // Of keys by channel, the tokens that stayed keep their codes: a scale may move by its rounding alone.
  for (std::uint64_t token = 0; token < 2; ++token)
    CHECK(std::memcmp(child.closed.vector(0, 1, 2, token, 1), parent.closed.vector(0, 1, 2, token, 1), 8) ==
          0);

  // Codes and scales go together into another cache, of another order, whose bytes were others.
  kv_layout elsewhere = growing_codes;
  elsewhere.order = block_order::layer_first;
  elsewhere.key_scales.place = scale_place::separate;
  blocks_of moved(elsewhere, 8);
  const std::vector<block_pair> pairs{{0, 7}, {1, 5}, {2, 0}};
  REQUIRE(copy_kv_blocks(host_executor{}, moved.view(), parent.closed.view(), pairs));
  blocks_of here(growing_values, 3);
  blocks_of there(growing_values, 3);
  const std::vector<block_pair> in_order{{0, 0}, {1, 1}, {2, 2}};
  const std::vector<block_pair> from_there{{7, 0}, {5, 1}, {0, 2}};
  REQUIRE(dequantize_kv_blocks(host_executor{}, here.view(), parent.closed.view(), in_order));
  REQUIRE(dequantize_kv_blocks(host_executor{}, there.view(), moved.view(), from_there));
  CHECK(here.contents() == there.contents());
}

TEST_CASE("for keys with four outlier channels, scales by channel are four times as accurate as by token") {
  constexpr std::uint32_t dim = 128;
  constexpr kv_layout values{.layers = 1,
                             .heads = 4,
                             .head_dim = dim,
                             .block_tokens = 32,
                             .has_values = false,
                             .element = dtype::f32};
  random_numbers random(11);
  const auto normal = [&] {  // a sum of twelve
    float sum = -6;
    for (int i = 0; i < 12; ++i)
      sum += static_cast<float>(random.below(std::uint32_t{10'001})) / 10'000;
    return sum;
  };
  blocks_of in(values, 8);
  for (std::uint64_t block = 0; block < 8; ++block) {
    for (std::uint64_t token = 0; token < 32; ++token) {
      for (std::uint64_t head = 0; head < 4; ++head) {
        for (std::uint32_t i = 0; i < dim; ++i)
          store_element(dtype::f32, in.vector(0, 0, block, token, head) + 4 * i,
                        normal() * (i % 32 == 5 ? 20.0F : 1.0F));
      }
    }
  }
  // Over the channels that are no outliers: these are what a scale for all of a vector rounds to nothing.
  const auto error = [&](dtype code, scale_group group) {
    kv_layout coded = values;
    coded.element = code;
    coded.key_scales = {.group = group, .element = dtype::bf16};
    blocks_of out(coded, 8);
    blocks_of back(values, 8);
    std::vector<block_pair> pairs;
    for (std::int64_t i = 0; i < 8; ++i)
      pairs.push_back({i, i});
    REQUIRE(quantize_kv_blocks(host_executor{}, out.view(), in.view(), pairs));
    REQUIRE(dequantize_kv_blocks(host_executor{}, back.view(), out.view(), pairs));
    double wrong = 0;
    double all = 0;
    for (std::uint64_t block = 0; block < 8; ++block) {
      for (std::uint64_t token = 0; token < 32; ++token) {
        for (std::uint32_t i = 0; i < dim; ++i) {
          if (i % 32 == 5) continue;
          const auto x = static_cast<double>(number(dtype::f32, in.vector(0, 0, block, token, 1) + 4 * i));
          const auto y = static_cast<double>(number(dtype::f32, back.vector(0, 0, block, token, 1) + 4 * i));
          wrong += (x - y) * (x - y);
          all += x * x;
        }
      }
    }
    return std::sqrt(wrong / all);
  };
  const double by_token = error(dtype::int4, scale_group::vector);
  const double by_channel = error(dtype::int4, scale_group::channel);
  const double eight = error(dtype::int8, scale_group::channel);
  CHECK(by_token > 0.5);
  CHECK(by_channel < 0.12);
  CHECK(by_channel > 0.05);
  CHECK(eight < 0.008);
  CHECK(4 * by_channel < by_token);
}

TEST_CASE("forms that blocks cannot quantise are refused with a valid alternative") {
  constexpr kv_layout values{.layers = 2, .heads = 1, .head_dim = 16, .block_tokens = 4};
  kv_layout codes = values;
  codes.element = dtype::int4;
  codes.key_scales = {.group = scale_group::channel, .element = dtype::bf16};
  codes.value_scales = codes.key_scales;
  const auto refused = [](const kv_layout& to, const kv_layout& from, const std::string& text) {
    blocks_of out(to, 1);
    blocks_of in(from, 1);
    const std::vector<block_pair> pair{{0, 0}};
    const auto done = quantize_kv_blocks(host_executor{}, out.view(), in.view(), pair);
    REQUIRE(!done);
    CAPTURE(done.error().message());
    CHECK(done.error().message().find(text) != std::string::npos);
    CHECK(out.contents() == blocks_of(to, 1).contents());
  };
  refused(values, values, "takes keys and values both in codes");
  kv_layout other = codes;
  other.value_scales.group = scale_group::run;
  other.value_scales.run = 4;
  refused(other, values, "granularity");
  other = codes;
  other.key_scales.numbers = 2;
  refused(other, values, "for int8 and int4 by vector or run a zero point (numbers = 2)");
  other = codes;
  other.element = dtype::fp8_e4m3;
  refused(other, values, "writes scales by channel (scale_group 3) for int8 and int4 alone");
  other = codes;
  other.key_scales.has_global = true;
  refused(other, values, "writes scales by channel (scale_group 3) for int8 and int4 alone");
  refused(codes, codes, "with scales");
  other = codes;
  other.heads = 2;
  refused(other, values, "heads");
  kv_layout odd = values;
  odd.head_dim = 12;
  other = codes;
  other.head_dim = 12;
  refused(other, odd, "quantize_kv_blocks");
  kv_layout f16 = values;
  f16.element = dtype::f16;
  refused(codes, f16, "no kernel converts f16 to int4");

  blocks_of out(codes, 1);
  blocks_of in(values, 1);
  const std::vector<block_pair> pair{{0, 0}};
  CHECK(quantize_kv_blocks(host_executor{}, out.view(), in.view(), pair, {.layers = {2, 1}}).error().code ==
        errc::out_of_range);
  kv_memory none = in.view();
  none.data = nullptr;
  CHECK(quantize_kv_blocks(host_executor{}, out.view(), none, pair).error().code == errc::too_short);
  kv_memory shifted = in.view();
  shifted.data += 1;
  CHECK(quantize_kv_blocks(host_executor{}, out.view(), shifted, pair).error().code == errc::bad_granularity);
  CHECK(quantize_kv_blocks(host_executor{}, out.view(), none, std::span<const block_pair>{}));
}
