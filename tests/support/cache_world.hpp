/// @file
/// Paged caches of any layout, for tests of what moves tokens in and out of them.
#pragma once

#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <cstddef>
#include <cstdint>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "support/small_elements.hpp"

namespace llmmem_tests {

/// What no kernel writes: untouched bytes stay so.
inline constexpr std::byte poison{0xA5};

/// A layout of a few layers, heads and tokens a block, in any order.
inline llmmem::kv_layout any_layout(std::mt19937_64& random) {
  const auto below = [&](std::uint64_t n) { return static_cast<std::uint32_t>(random() % n); };
  return {.layers = 1 + below(3),
          .heads = 1 + below(4),
          .head_dim = below(3) == 0 ? 1 + below(40) : 8 * (1 + below(20)),
          .value_dim = below(3) == 0 ? 1 + below(40) : 0,
          .block_tokens = below(2) == 0 ? 16 : 1 + below(20),
          .has_values = below(4) != 0,
          .heads_in_block = below(2) == 0 ? llmmem::paging::head_order::nhd : llmmem::paging::head_order::hnd,
          .order = static_cast<llmmem::block_order>(below(llmmem::block_order_count))};
}

/// Elements of a batch, and of the cache that they go to or come from.
inline std::pair<llmmem::dtype, llmmem::dtype> any_elements(std::mt19937_64& random) {
  using llmmem::dtype;
  constexpr std::pair<dtype, dtype> kinds[] = {
      {dtype::bf16, dtype::bf16},     {dtype::f32, dtype::f32},      {dtype::fp8_e4m3, dtype::fp8_e4m3},
      {dtype::bf16, dtype::fp8_e4m3}, {dtype::f16, dtype::fp8_e4m3}, {dtype::f32, dtype::fp8_e4m3},
      {dtype::f32, dtype::bf16},      {dtype::f32, dtype::f16}};
  return kinds[random() % std::size(kinds)];
}

/// Values of a type, some of which round, saturate or are zero.
inline void fill_with(std::vector<std::byte>& bytes, llmmem::dtype element, std::mt19937_64& random) {
  for (std::size_t i = 0; i + element_bytes(element) <= bytes.size(); i += element_bytes(element)) {
    const float value = static_cast<float>(static_cast<std::int64_t>(random() % 4001) - 2000) / 7;
    store_element(element, bytes.data() + i, value);
  }
}

/// One plane of a batch: its memory, and the distances in it, which may leave gaps.
struct plane_of_batch {
  std::vector<std::byte> bytes{};
  std::uint64_t token_stride = 0;
  std::uint64_t head_stride = 0;
  std::vector<float> scales{};  // by head

  plane_of_batch() = default;
  plane_of_batch(const llmmem::kv_layout& layout, std::uint32_t plane, llmmem::dtype element,
                 std::uint64_t tokens, std::mt19937_64& random) {
    const std::uint64_t each = element_bytes(element);
    head_stride = layout.vector_elements(plane) * each;
    if (random() % 3 == 0) head_stride += each * (random() % 9);
    token_stride = head_stride * layout.heads;
    if (random() % 3 == 0) token_stride += each * (random() % 33);
    bytes.assign(token_stride * tokens, poison);
    for (std::uint32_t head = 0; head < layout.heads; ++head)
      scales.push_back(static_cast<float>(1 + random() % 100) / 16);
  }
};

/// A cache of any layout, and a batch of any elements that go to it or come from it.
struct cache_and_batch {
  llmmem::kv_layout layout{};
  std::uint64_t blocks = 0;
  llmmem::dtype element = llmmem::dtype::bf16;  // of the batch
  plane_of_batch planes[2];
  bool has_scales = false;
  bool is_by_head = false;

  explicit cache_and_batch(std::mt19937_64& random) : layout(any_layout(random)), blocks(1 + random() % 6) {
    std::tie(element, layout.element) = any_elements(random);
    has_scales = random() % 2 == 0;
    is_by_head = has_scales && random() % 2 == 0;
  }

  void draw_planes(std::uint64_t tokens, std::mt19937_64& random) {
    for (std::uint32_t p = 0; p < layout.planes(); ++p)
      planes[p] = plane_of_batch(layout, p, element, tokens, random);
  }
  [[nodiscard]] llmmem::token_options options(std::uint32_t* flag) const {
    llmmem::token_options made{.element = element, .out_of_range = flag};
    if (has_scales) made.scales = {planes[0].scales.data(), planes[1].scales.data(), is_by_head};
    return made;
  }
};

/// Calls `one(in the batch, in the cache, scale)` for each element of a token, offsets in bytes.
template <class One>
void for_each_element(const llmmem::kv_layout& layout, const llmmem::plane_strides& strides,
                      std::uint32_t plane, const plane_of_batch& batch, llmmem::dtype element,
                      std::uint64_t row, std::uint32_t layer, std::uint64_t slot, bool is_by_head, One one) {
  for (std::uint32_t head = 0; head < layout.heads; ++head) {
    for (std::uint64_t e = 0; e < layout.vector_elements(plane); ++e) {
      one(row * batch.token_stride + head * batch.head_stride + e * element_bytes(element),
          strides.offset(layer, slot / layout.block_tokens, slot % layout.block_tokens, head) +
              e * element_bytes(layout.element),
          batch.scales[is_by_head ? head : 0]);
    }
  }
}

}  // namespace llmmem_tests
