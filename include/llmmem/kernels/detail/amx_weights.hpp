/// @file
/// From products of tiles of AMX to weights of eight bits.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/amx_sums.hpp>
#include <llmmem/kernels/detail/code_tiles.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/detail/integer_lanes.hpp>
#include <llmmem/kernels/detail/integer_tile.hpp>
#include <llmmem/kernels/detail/vector_lanes.hpp>
#include <llmmem/kernels/detail/vector_tile.hpp>
#include <llmmem/model/dtype.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

#if defined(__x86_64__)

// Products below are of a tile's lengths, at most 16384. Tiles are large, and written before they are read.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

/// Reads 64 numbers next to each other's scales, and zeros for tokens that do not count.
LLMMEM_ALWAYS_INLINE void load_amx_numbers(const amx_plane& of,
                                           const basic_code_rows<integer_tile_tokens>& rows,
                                           std::size_t count, std::size_t offset, float* to) noexcept {
  offset += of.scales;
  if (of.plane->scale == dtype::f32) {
    for (std::size_t t = 0; t < count; ++t)
      std::memcpy(to + t, rows.scales[t] + offset, sizeof(float));
  } else {
    for (std::size_t t = 0; t < count; ++t)
      to[t] = load_scale(of.plane->scale, rows.scales[t] + offset);
  }
  if (of.plane->has_global) {
    for (std::size_t t = 0; t < count; ++t)
      to[t] *= rows.global[t];
  } else if (of.global != 1.0F) {
    for (std::size_t t = 0; t < count; ++t)
      to[t] *= of.global;
  }
  std::fill(to + count, to + integer_tile_tokens, 0.0F);
}
/// The same of scales. A negative or infinite one becomes a NaN, which no product and no weight of 0 can
/// hide.
LLMMEM_ALWAYS_INLINE void load_amx_scales(const amx_plane& of,
                                          const basic_code_rows<integer_tile_tokens>& rows, std::size_t count,
                                          float* to) noexcept {
  load_amx_numbers(of, rows, count, 0, to);
  using words = word_lanes<widest_lanes>;
  for (std::size_t t = 0; t < integer_tile_tokens; t += widest_lanes) {
    words bits;
    std::memcpy(&bits, to + t, sizeof(bits));
    const words broken =
        reinterpret_cast<words>(bits > 0x7F7F'FFFFU) & reinterpret_cast<words>(bits != 0x8000'0000U);
    bits = bits | (broken & 0x7FC0'0000U);
    std::memcpy(to + t, &bits, sizeof(bits));
  }
}

/// Spreads numbers of 16 tokens over the lanes of the `J`th vector of their products.
template <unsigned Pitch, unsigned J, int... Lane>
LLMMEM_ALWAYS_INLINE void spread_tokens(const float_lanes<16>& x, float_lanes<16>& to,
                                        std::integer_sequence<int, Lane...> /*lanes*/) noexcept {
  if constexpr (Pitch == 1) {
    to = x;
  } else {
    pick_lanes<16>(x, x, to, std::integer_sequence<int, (int{J * (16 / Pitch)} + Lane / int{Pitch})...>());
  }
}
template <unsigned Pitch, unsigned J>
LLMMEM_ALWAYS_INLINE void spread_tokens(const float_lanes<16>& x, float_lanes<16>& to) noexcept {
  spread_tokens<Pitch, J>(x, to, std::make_integer_sequence<int, 16>());
}
/// Each lane becomes the largest of those of its query head, or their sum.
template <unsigned Pitch, unsigned Step = 8>
LLMMEM_ALWAYS_INLINE void spread_largest_of_head(float_lanes<16>& x) noexcept {
  if constexpr (Step >= Pitch) {
    take_larger_half<16, Step>(x, std::make_integer_sequence<int, 16>());
    spread_largest_of_head<Pitch, Step / 2>(x);
  }
}
template <unsigned Step, int... Lane>
LLMMEM_ALWAYS_INLINE void add_half(float_lanes<16>& x,
                                   std::integer_sequence<int, Lane...> /*lanes*/) noexcept {
  float_lanes<16> other;
  pick_lanes<16>(x, x, other, std::integer_sequence<int, (Lane ^ static_cast<int>(Step))...>());
  x = x + other;
}
template <unsigned Pitch, unsigned Step = 8>
LLMMEM_ALWAYS_INLINE void spread_sum_of_head(float_lanes<16>& x) noexcept {
  if constexpr (Step >= Pitch) {
    add_half<Step>(x, std::make_integer_sequence<int, 16>());
    spread_sum_of_head<Pitch, Step / 2>(x);
  }
}

/// The products of 16 tokens as floats, times their scales.
template <unsigned Pitch, unsigned J = 0>
LLMMEM_ALWAYS_INLINE void scale_products(const amx_head& head, const float_lanes<16>& scales,
                                         const float* zeros, const std::int32_t* products,
                                         float* to) noexcept {
  if constexpr (J < Pitch) {
    integer_lanes<16> product;
    std::memcpy(&product, products + J * 16, sizeof(product));
    float_lanes<16> x;
    convert_lanes<16>(product, x);
    float_lanes<16> scale;
    spread_tokens<Pitch, J>(scales, scale);
    float_lanes<16> by_query;
    load_lanes<16>(head.scales, by_query);
    x = x * (scale * by_query);
    if (zeros != nullptr) {
      float_lanes<16> zero;
      load_lanes<16>(zeros, zero);
      spread_tokens<Pitch, J>(float_lanes<16>(zero), zero);
      load_lanes<16>(head.query_sums, by_query);
      x = zero * by_query + x;
    }
    store_lanes<16>(x, to + J * 16);
    scale_products<Pitch, J + 1>(head, scales, zeros, products, to);
  }
}

/// What the weights of a tile add up to.
struct amx_weights {
  float_lanes<16> total;
  float_lanes<16> zero;     // weights times zeros of values
  float_lanes<16> largest;  // weight times scale of a value
};
/// The weights of 16 tokens, then times the scales of their values.
template <unsigned Pitch, unsigned J = 0>
LLMMEM_ALWAYS_INLINE void weigh_products(const float_lanes<16>& base, const float_lanes<16>& scales,
                                         const float* zeros, float* weights, amx_weights& of) noexcept {
  if constexpr (J < Pitch) {
    float_lanes<16> x;
    load_lanes<16>(weights + J * 16, x);
    x = x - base;
    raise_two<16>(x);
    of.total = of.total + x;
    if (zeros != nullptr) {
      float_lanes<16> zero;
      load_lanes<16>(zeros, zero);
      spread_tokens<Pitch, J>(float_lanes<16>(zero), zero);
      of.zero = x * zero + of.zero;
    }
    float_lanes<16> scale;
    spread_tokens<Pitch, J>(scales, scale);
    x = x * scale;
    const float_lanes<16> broken = float_lanes<16>{} + std::numeric_limits<float>::infinity();
    const float_lanes<16> size = x >= 0.0F ? x : broken;  // of a NaN
    take_larger<16>(of.largest, size);
    store_lanes<16>(x, weights + J * 16);
    weigh_products<Pitch, J + 1>(base, scales, zeros, weights, of);
  }
}

/// Brings the sums of a head to a larger product.
inline void rescale_sums(amx_sums& of, std::size_t walk, const float* factors) noexcept {
  float* to = of.sums + walk * of.queries_of * of.value_stride;
  for (std::size_t h = 0; h < of.queries_of; ++h, to += of.value_stride) {
    if (factors[h] == 1.0F) continue;
    for (std::size_t e = 0; e < of.value_stride; ++e)
      to[e] *= factors[h];
  }
}
inline void add_to_sums(amx_sums& of, std::size_t walk, const float* each) noexcept {
  float* to = of.sums + walk * of.queries_of * of.value_stride;
  for (std::size_t h = 0; h < of.queries_of; ++h, to += of.value_stride) {
    for (std::size_t e = 0; e < of.value_stride; ++e)
      to[e] += each[h];
  }
}

/// Makes weights of a head's products, and codes of the weights times the values' scales.
/// @param scales  what the codes of each query head count
template <unsigned Pitch>
LLMMEM_ALWAYS_INLINE void weigh_head(const attention_codes& codes, amx_sums& of, std::size_t walk,
                                     std::size_t count, amx_scratch& scratch, float* scales) noexcept {
  amx_head& head = of.heads[walk];
  const std::int32_t* const products = scratch.products + walk * Pitch * integer_tile_tokens;
  const float* const key_zeros = codes.keys.has_zero ? scratch.key_zeros : nullptr;
  const float* const value_zeros = codes.values.has_zero ? scratch.value_zeros : nullptr;
  for (std::size_t t = 0; t < integer_tile_tokens; t += 16) {
    float_lanes<16> scale;
    load_lanes<16>(scratch.key_scales + t, scale);
    scale_products<Pitch>(head, scale, key_zeros == nullptr ? nullptr : key_zeros + t, products + t * Pitch,
                          scratch.weights + t * Pitch);
  }
  std::fill(scratch.weights + count * Pitch, scratch.weights + integer_tile_tokens * Pitch, lowest());
  float_lanes<16> most = float_lanes<16>{} + lowest();
  for (std::size_t i = 0; i < integer_tile_tokens * Pitch; i += 16) {
    float_lanes<16> x;
    load_lanes<16>(scratch.weights + i, x);
    take_larger<16>(most, x);
  }
  spread_largest_of_head<Pitch>(most);
  float_lanes<16> before;
  load_lanes<16>(head.most, before);
  take_larger<16>(most, before);
  alignas(64) float lanes[16];
  const float_lanes<16> none = float_lanes<16>{} + lowest();
  // A head for which nothing counts so far has the base 0.
  const auto base = reinterpret_cast<float_lanes<16>>(reinterpret_cast<word_lanes<16>>(most) &
                                                      reinterpret_cast<word_lanes<16>>(most != none));
  amx_weights made{};
  load_lanes<16>(head.totals, made.total);
  using words = word_lanes<16>;
  const words changes = reinterpret_cast<words>(most) ^ reinterpret_cast<words>(before);
  std::uint32_t changed = 0;
  for (unsigned i = 0; i < 16; ++i)
    changed |= changes[i];
  if (changed != 0) {
    float_lanes<16> factor = before - base;
    raise_two<16>(factor);
    made.total = made.total * factor;
    store_lanes<16>(factor, lanes);
    rescale_sums(of, walk, lanes);
    store_lanes<16>(most, head.most);
  }
  for (std::size_t t = 0; t < integer_tile_tokens; t += 16) {
    float_lanes<16> scale;
    load_lanes<16>(scratch.value_scales + t, scale);
    weigh_products<Pitch>(base, scale, value_zeros == nullptr ? nullptr : value_zeros + t,
                          scratch.weights + t * Pitch, made);
  }
  store_lanes<16>(made.total, head.totals);
  if (value_zeros != nullptr) {
    spread_sum_of_head<Pitch>(made.zero);
    store_lanes<16>(made.zero, lanes);
    add_to_sums(of, walk, lanes);
  }
  spread_largest_of_head<Pitch>(made.largest);
  constexpr float least = 0x1p-100F;  // whose reciprocal is a number
  const auto is_number = reinterpret_cast<words>(made.largest <= std::numeric_limits<float>::max());
  const words is_counted = is_number & reinterpret_cast<words>(made.largest >= least);
  const auto inverse =
      reinterpret_cast<float_lanes<16>>(reinterpret_cast<words>(255.0F / made.largest) & is_counted);
  store_lanes<16>(reinterpret_cast<float_lanes<16>>(reinterpret_cast<words>(made.largest * (1.0F / 255.0F)) |
                                                    (~is_number & 0x7FC0'0000U)),
                  scales);
  // The nearest integers are in the lowest bytes; four vectors make one of words.
  for (std::size_t i = 0; i < Pitch; ++i) {
    words word{};
    LLMMEM_LANES_UNROLL
    for (unsigned byte = 0; byte < 4; ++byte) {
      float_lanes<16> x;
      load_lanes<16>(scratch.weights + i * 64 + byte * 16, x);
      x = x * inverse + 0x1p23F;
      const words code = reinterpret_cast<words>(x) & 0xFFU;
      word = word | (code << (8 * byte));
    }
    std::memcpy(scratch.codes + i * 16, &word, sizeof(word));
  }
}

/// Puts the codes of each query head into a row.
template <unsigned Pitch>
LLMMEM_ALWAYS_INLINE void store_weight_rows(const std::uint32_t* codes, std::uint32_t* rows) noexcept {
  if constexpr (Pitch == 1) {
    std::memcpy(rows, codes, tile_row_bytes);
  } else {
    for (std::size_t from = 0; from < 16; from += Pitch) {
      float_lanes<Pitch> x[Pitch];
      LLMMEM_LANES_UNROLL
      for (unsigned i = 0; i < Pitch; ++i)
        std::memcpy(&x[i], codes + (from + i) * Pitch, sizeof(x[i]));
      transpose_lanes<Pitch>(x);
      LLMMEM_LANES_UNROLL
      for (unsigned i = 0; i < Pitch; ++i)
        std::memcpy(rows + transposed_words<Pitch>[i] * 16 + from, &x[i], sizeof(x[i]));
    }
  }
}

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

#endif

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
