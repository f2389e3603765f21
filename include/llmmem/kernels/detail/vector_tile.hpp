/// @file
/// Attention of some query heads to a tile of tokens, by vectors of floats.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/detail/vector_heads.hpp>
#include <llmmem/kernels/detail/vector_lanes.hpp>
#include <llmmem/kernels/detail/vector_sums.hpp>
#include <llmmem/kernels/vector_path.hpp>
#include <llmmem/model/dtype.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace llmmem {
inline namespace v0 {
namespace detail {

// Products below are of a tile's lengths, at most 4096. Tiles are large, and written before they are read.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

/// The products, then weights, of each head with a tile's tokens; and its keys or values as floats, where
/// they are converted once for many heads.
struct vector_scratch {
  alignas(64) float weights[vector_heads * max_tile_tokens];
  alignas(64) float elements[tile_floats];
  const std::byte* rows[max_tile_tokens];
};

// All functions below are inlined into one whose target has vectors of N floats.

/// Converts vectors to floats, in the order of `lane_place`, up to the stride.
template <dtype Element, unsigned N>
LLMMEM_ALWAYS_INLINE void expand(const std::byte* const* rows, const std::byte* const* next_rows,
                                 std::size_t count, std::size_t elements, vector_scratch& scratch) noexcept {
  constexpr unsigned in_word = elements_in_word<Element>;
  constexpr std::size_t group = in_word * N;
  constexpr std::size_t bytes = sizeof(element_bits<Element>);
  const std::size_t stride = lane_stride<Element>(elements);
  const std::size_t whole = elements / group * group;
  float_lanes<N> x[in_word];
  for (std::size_t t = 0; t < count; ++t) {
    float* const row = scratch.elements + t * stride;
    scratch.rows[t] = reinterpret_cast<const std::byte*>(row);
    for (std::size_t e = 0; e < whole; e += group) {
      __builtin_prefetch(next_rows[t] + e * bytes, 0, 2);
      load_elements<Element, N>(rows[t] + e * bytes, x);
      LLMMEM_LANES_UNROLL
      for (unsigned i = 0; i < in_word; ++i)
        store_lanes<N>(x[i], row + e + i * N);
    }
    if (whole == stride) continue;
    std::fill(row + whole, row + stride, 0.0F);
    if (whole == elements) continue;
    // Nothing may be read behind the last elements.
    std::byte rest[group * bytes]{};
    std::memcpy(rest, rows[t] + whole * bytes, (elements - whole) * bytes);
    load_elements<Element, N>(rest, x);
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < in_word; ++i)
      store_lanes<N>(x[i], row + whole + i * N);
  }
  for (std::size_t t = count; t < max_tile_tokens; ++t)
    scratch.rows[t] = scratch.rows[0];
}

/// The vectors of a tile, and of the tile after it, which are requested meanwhile; null: they are not.
struct vector_rows {
  const std::byte* const* rows;
  const std::byte* const* next_rows;
};

/// The products of `Heads` heads with N / `Heads` tokens: N sums, so that each of their N lanes ends in one.
template <dtype Element, unsigned Heads, bool Requests, unsigned N>
LLMMEM_ALWAYS_INLINE void multiply_some(const vector_rows& keys, const float* query, std::size_t stride,
                                        float* products) noexcept {
  constexpr unsigned tokens = N / Heads;
  constexpr unsigned in_word = elements_in_word<Element>;
  constexpr std::size_t bytes = sizeof(element_bits<Element>);
  float_lanes<N> sum[N]{};
  for (std::size_t e = 0; e < stride; e += in_word * N) {
    float_lanes<N> q[Heads][in_word];
    LLMMEM_LANES_UNROLL
    for (unsigned h = 0; h < Heads; ++h) {
      LLMMEM_LANES_UNROLL
      for (unsigned i = 0; i < in_word; ++i)
        load_lanes<N>(query + h * stride + e + i * N, q[h][i]);
    }
    LLMMEM_LANES_UNROLL
    for (unsigned t = 0; t < tokens; ++t) {
      if constexpr (Requests) __builtin_prefetch(keys.next_rows[t] + e * bytes, 0, 2);
      float_lanes<N> key[in_word];
      load_elements<Element, N>(keys.rows[t] + e * bytes, key);
      LLMMEM_LANES_UNROLL
      for (unsigned h = 0; h < Heads; ++h) {
        LLMMEM_LANES_UNROLL
        for (unsigned i = 0; i < in_word; ++i)
          sum[h * tokens + t] = key[i] * q[h][i] + sum[h * tokens + t];
      }
    }
  }
  sum_each<N>(sum);
  float lanes[N];
  store_lanes<N>(sum[0], lanes);
  LLMMEM_LANES_UNROLL
  for (unsigned h = 0; h < Heads; ++h)
    std::memcpy(products + h * max_tile_tokens, lanes + h * tokens, tokens * sizeof(float));
}

template <dtype Element, unsigned Heads, bool Requests, unsigned N, class Sums>
LLMMEM_ALWAYS_INLINE void multiply_heads(const vector_rows& keys, const Sums& sums, std::size_t h,
                                         std::size_t count, float* products) noexcept {
  for (std::size_t t = 0; t < count; t += N / Heads)
    multiply_some<Element, Heads, Requests, N>({keys.rows + t, keys.next_rows + t},
                                               sums.query + h * sums.key_stride, sums.key_stride,
                                               products + h * max_tile_tokens + t);
}

/// Products past `count`, up to a multiple of the lanes, are of any tokens.
template <dtype Element, bool Requests, unsigned N, class Sums>
LLMMEM_ALWAYS_INLINE void multiply(const vector_rows& keys, const Sums& sums, std::size_t count,
                                   float* products) noexcept {
  if (sums.heads < 4) {
    multiply_heads<Element, 1, Requests, N>(keys, sums, 0, count, products);
    for (std::size_t h = 1; h < sums.heads; ++h)
      multiply_heads<Element, 1, false, N>(keys, sums, h, count, products);
    return;
  }
  multiply_heads<Element, 4, Requests, N>(keys, sums, 0, count, products);
  std::size_t h = 4;
  for (; h + 4 <= sums.heads; h += 4)
    multiply_heads<Element, 4, false, N>(keys, sums, h, count, products);
  for (; h < sums.heads; ++h)
    multiply_heads<Element, 1, false, N>(keys, sums, h, count, products);
}

/// Makes weights of a head's products, relative to the largest so far, to which its sums are brought.
template <unsigned N, class Sums>
LLMMEM_ALWAYS_INLINE void weigh(Sums& sums, std::size_t h, std::size_t count, float* weights) noexcept {
  for (std::size_t t = count; t % N != 0; ++t)
    weights[t] = lowest();
  float_lanes<N> largest = float_lanes<N>{} + lowest();
  for (std::size_t t = 0; t < count; t += N) {
    float_lanes<N> x;
    load_lanes<N>(weights + t, x);
    take_larger<N>(largest, x);
  }
  spread_largest<N>(largest);
  const float most = larger_of(sums.most[h], largest[0]);
  const float base = most == lowest() ? 0.0F : most;  // nothing counts so far
  float_lanes<N> total;
  load_lanes<N>(sums.totals + h * widest_lanes, total);
  if (most != sums.most[h]) {
    const float factor = power_of_two(sums.most[h] - base);
    sums.most[h] = most;
    total = total * factor;
    for (std::size_t e = 0; e < sums.value_stride; e += N) {
      float_lanes<N> x;
      load_lanes<N>(sums.sum + h * sums.value_stride + e, x);
      x = x * factor;
      store_lanes<N>(x, sums.sum + h * sums.value_stride + e);
    }
  }
  for (std::size_t t = 0; t < count; t += N) {
    float_lanes<N> x;
    load_lanes<N>(weights + t, x);
    x = x - base;
    raise_two<N>(x);
    store_lanes<N>(x, weights + t);
    total = total + x;
  }
  store_lanes<N>(total, sums.totals + h * widest_lanes);
}

/// Adds the tokens' values, weighted, to `Groups` groups of words of the sums of `Heads` heads.
template <dtype Element, unsigned Heads, unsigned Groups, bool Requests, unsigned N>
LLMMEM_ALWAYS_INLINE void add_some(const vector_rows& values, std::size_t from, const float* weights,
                                   std::size_t count, std::size_t stride, float* sums) noexcept {
  constexpr unsigned in_word = elements_in_word<Element>;
  constexpr unsigned vectors = Groups * in_word;
  constexpr std::size_t bytes = sizeof(element_bits<Element>);
  float_lanes<N> sum[Heads][vectors];
  LLMMEM_LANES_UNROLL
  for (unsigned h = 0; h < Heads; ++h) {
    LLMMEM_LANES_UNROLL
    for (unsigned v = 0; v < vectors; ++v)
      load_lanes<N>(sums + h * stride + from + v * N, sum[h][v]);
  }
  for (std::size_t t = 0; t < count; ++t) {
    LLMMEM_LANES_UNROLL
    for (unsigned g = 0; g < Groups; ++g) {
      const std::size_t at = (from + g * in_word * N) * bytes;
      if constexpr (Requests) __builtin_prefetch(values.next_rows[t] + at, 0, 2);
      float_lanes<N> value[in_word];
      load_elements<Element, N>(values.rows[t] + at, value);
      LLMMEM_LANES_UNROLL
      for (unsigned h = 0; h < Heads; ++h) {
        const float weight = weights[h * max_tile_tokens + t];
        LLMMEM_LANES_UNROLL
        for (unsigned i = 0; i < in_word; ++i)
          sum[h][g * in_word + i] = value[i] * weight + sum[h][g * in_word + i];
      }
    }
  }
  LLMMEM_LANES_UNROLL
  for (unsigned h = 0; h < Heads; ++h) {
    LLMMEM_LANES_UNROLL
    for (unsigned v = 0; v < vectors; ++v)
      store_lanes<N>(sum[h][v], sums + h * stride + from + v * N);
  }
}

template <dtype Element, unsigned Heads, bool Requests, unsigned N>
LLMMEM_ALWAYS_INLINE void add_heads(const vector_rows& values, const float* weights, std::size_t count,
                                    std::size_t stride, float* sums) noexcept {
  // As many sums as hide the latency of an addition, and fit into the registers: 32 of 16 floats, else 16.
  constexpr unsigned in_word = elements_in_word<Element>;
  constexpr unsigned groups = std::max((N == 16 ? 16U : 8U) / (Heads == 1 ? 2 : Heads) / in_word, 1U);
  constexpr std::size_t group = in_word * N;
  std::size_t e = 0;
  for (; e + groups * group <= stride; e += groups * group)
    add_some<Element, Heads, groups, Requests, N>(values, e, weights, count, stride, sums);
  for (; e < stride; e += group)
    add_some<Element, Heads, 1, Requests, N>(values, e, weights, count, stride, sums);
}

template <dtype Element, bool Requests, unsigned N, class Sums>
LLMMEM_ALWAYS_INLINE void add_values(const vector_rows& values, const float* weights, std::size_t count,
                                     Sums& sums) noexcept {
  const std::size_t stride = sums.value_stride;
  std::size_t h = 0;
  if (sums.heads < 4) {
    add_heads<Element, 1, Requests, N>(values, weights, count, stride, sums.sum);
    h = 1;
  } else {
    add_heads<Element, 4, Requests, N>(values, weights, count, stride, sums.sum);
    h = 4;
  }
  for (; h + 4 <= sums.heads; h += 4)
    add_heads<Element, 4, false, N>(values, weights + h * max_tile_tokens, count, stride,
                                    sums.sum + h * stride);
  for (; h < sums.heads; ++h)
    add_heads<Element, 1, false, N>(values, weights + h * max_tile_tokens, count, stride,
                                    sums.sum + h * stride);
}

/// Whether a tile is converted before it is used: where its vectors are no whole groups, so that the rest
/// must not be read past its end; or where a conversion takes several instructions a vector, and as many
/// registers.
template <dtype Element, unsigned N>
[[nodiscard]] constexpr bool is_expanded(std::size_t elements) noexcept {
  if (elements != lane_stride<Element>(elements)) return true;
  return Element != dtype::f32 && Element != dtype::bf16 && !is_converted_in_order<Element>(N);
}

template <dtype Element, unsigned N>
LLMMEM_ALWAYS_INLINE void attend_by(const vector_tokens& tokens, const vector_tokens& next,
                                    vector_sums_view& sums) noexcept {
  vector_scratch scratch;
  const std::size_t count = tokens.count;
  if (is_expanded<Element, N>(sums.key_elements)) {
    expand<Element, N>(tokens.keys, next.keys, count, sums.key_elements, scratch);
    multiply<dtype::f32, false, N>({scratch.rows, scratch.rows}, sums, count, scratch.weights);
  } else {
    multiply<Element, true, N>({tokens.keys, next.keys}, sums, count, scratch.weights);
  }
  for (std::size_t h = 0; h < sums.heads; ++h)
    weigh<N>(sums, h, count, scratch.weights + h * max_tile_tokens);
  if (is_expanded<Element, N>(sums.value_elements)) {
    expand<Element, N>(tokens.values, next.values, count, sums.value_elements, scratch);
    add_values<dtype::f32, false, N>({scratch.rows, scratch.rows}, scratch.weights, count, sums);
  } else {
    add_values<Element, true, N>({tokens.values, next.values}, scratch.weights, count, sums);
  }
}

template <dtype Element>
void attend_baseline(const vector_tokens& tokens, const vector_tokens& next,
                     vector_sums_view& sums) noexcept {
  attend_by<Element, 4>(tokens, next, sums);
}
#if defined(__x86_64__)
template <dtype Element>
[[gnu::target("avx2,fma")]] void attend_avx2(const vector_tokens& tokens, const vector_tokens& next,
                                             vector_sums_view& sums) noexcept {
  attend_by<Element, 8>(tokens, next, sums);
}
template <dtype Element>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]] void attend_avx512(
    const vector_tokens& tokens, const vector_tokens& next, vector_sums_view& sums) noexcept {
  attend_by<Element, 16>(tokens, next, sums);
}
#endif

/// Returns the floats of a path's vectors.
[[nodiscard]] constexpr std::uint32_t lanes_in(vector_path path) noexcept {
  return path == vector_path::avx512 ? 16 : path == vector_path::avx2 ? 8 : 4;
}

/// Adds a tile of tokens to the sums. @param next  the tile after it, with as many pointers
template <dtype Element>
void attend_tile(vector_path path, const vector_tokens& tokens, const vector_tokens& next,
                 vector_sums_view& sums) noexcept {
#if defined(__x86_64__)
  if (path == vector_path::avx512) return attend_avx512<Element>(tokens, next, sums);
  if (path == vector_path::avx2) return attend_avx2<Element>(tokens, next, sums);
#endif
  attend_baseline<Element>(tokens, next, sums);
}

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
