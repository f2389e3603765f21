/// @file
/// Attention of some query heads to a tile of tokens, by vectors of floats.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/detail/vector_lanes.hpp>
#include <llmmem/kernels/vector_path.hpp>
#include <llmmem/model/dtype.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Query heads of an item at most. 16 of 256 floats, with their sums and a tile, are 48 KiB: the first level
/// of a processor's cache, and little of a thread's stack.
inline constexpr std::uint32_t vector_heads = 16;
/// Elements of a vector at most, and floats of the widest lanes, to which lengths are rounded up.
inline constexpr std::uint32_t vector_elements = 256;
inline constexpr std::uint32_t widest_lanes = 16;
/// Floats of a tile's keys or values, and its tokens at most.
inline constexpr std::uint32_t tile_floats = 4096;
inline constexpr std::uint32_t max_tile_tokens = 32;

/// Returns how many floats a vector takes in a tile: whole groups of words of the widest lanes.
template <dtype Element>
[[nodiscard]] constexpr std::uint32_t lane_stride(std::uint32_t elements) noexcept {
  constexpr std::uint32_t group = widest_lanes * elements_in_word<Element>;
  return (elements + group - 1) / group * group;
}
/// Returns the tokens of a tile of vectors of so many floats: a multiple of the widest lanes.
[[nodiscard]] constexpr std::uint32_t tile_tokens(std::uint32_t stride) noexcept {
  return std::min(tile_floats / stride / widest_lanes * widest_lanes, max_tile_tokens);
}
static_assert(tile_tokens(vector_elements) == 16);

/// Tokens, in any places.
struct vector_tokens {
  const std::byte* keys[max_tile_tokens];
  const std::byte* values[max_tile_tokens];
  std::uint32_t count = 0;
};

/// The queries of some heads, and what came of the tokens so far.
struct vector_sums {
  // Elements are where `lane_place` says.
  alignas(64) float query[vector_heads * vector_elements];  // scaled; zeros up to the stride
  alignas(64) float sum[vector_heads * vector_elements];
  float most[vector_heads];   // of the products
  float total[vector_heads];  // of the exponentials
  std::uint32_t heads = 0;
  std::uint32_t key_elements = 0;
  std::uint32_t value_elements = 0;
  std::uint32_t key_stride = 0;
  std::uint32_t value_stride = 0;

  template <dtype Element>
  void begin(std::uint32_t of_heads, std::uint32_t keys, std::uint32_t values) noexcept {
    heads = of_heads;
    key_elements = keys;
    value_elements = values;
    key_stride = lane_stride<Element>(keys);
    value_stride = lane_stride<Element>(values);
    std::fill_n(query, heads * key_stride, 0.0F);
    std::fill_n(sum, heads * value_stride, 0.0F);
    std::fill_n(most, heads, lowest());
    std::fill_n(total, heads, 0.0F);
  }
};

/// A tile's keys or values as floats, and the products, then weights, of each head with its tokens.
struct vector_scratch {
  alignas(64) float elements[tile_floats];
  alignas(64) float weights[vector_heads * max_tile_tokens];
};

// All of these are inlined into a function whose target has vectors of N floats.

/// Converts `count` vectors; those up to the next multiple of the lanes become zeros. Requests the same part of
/// the tile after it.
template <dtype Element, unsigned N>
LLMMEM_LANES_INLINE void expand(const std::byte* const* rows, const std::byte* const* next_rows,
                                std::uint32_t count, std::uint32_t elements, float* to) noexcept {
  constexpr unsigned in_word = elements_in_word<Element>;
  constexpr std::uint32_t group = in_word * N;
  constexpr std::uint32_t bytes = sizeof(element_bits<Element>);
  const std::uint32_t stride = lane_stride<Element>(elements);
  const std::uint32_t whole = elements / group * group;
  float_lanes<N> x[in_word];
  for (std::uint32_t t = 0; t < count; ++t) {
    float* const row = to + t * stride;
    for (std::uint32_t e = 0; e < whole; e += group) {
      __builtin_prefetch(next_rows[t] + e * bytes);
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
  for (std::uint32_t t = count; t % N != 0; ++t)
    std::fill_n(to + t * stride, stride, 0.0F);
}

/// The products of `Heads` heads with N / `Heads` tokens: N sums, so that each of their N lanes ends in one.
template <unsigned Heads, unsigned N>
LLMMEM_LANES_INLINE void multiply_some(const float* keys, const float* query, std::uint32_t stride,
                                       float* products) noexcept {
  constexpr unsigned tokens = N / Heads;
  float_lanes<N> sum[N]{};
  for (std::uint32_t e = 0; e < stride; e += N) {
    float_lanes<N> q[Heads];
    LLMMEM_LANES_UNROLL
    for (unsigned h = 0; h < Heads; ++h)
      load_lanes<N>(query + h * stride + e, q[h]);
    LLMMEM_LANES_UNROLL
    for (unsigned t = 0; t < tokens; ++t) {
      float_lanes<N> key;
      load_lanes<N>(keys + t * stride + e, key);
      LLMMEM_LANES_UNROLL
      for (unsigned h = 0; h < Heads; ++h)
        sum[h * tokens + t] = key * q[h] + sum[h * tokens + t];
    }
  }
  sum_each<N>(sum);
  float lanes[N];
  store_lanes<N>(sum[0], lanes);
  LLMMEM_LANES_UNROLL
  for (unsigned h = 0; h < Heads; ++h)
    std::memcpy(products + h * max_tile_tokens, lanes + h * tokens, tokens * sizeof(float));
}

template <unsigned N>
LLMMEM_LANES_INLINE void multiply(const vector_sums& sums, std::uint32_t count,
                                  vector_scratch& scratch) noexcept {
  const std::uint32_t stride = sums.key_stride;
  std::uint32_t h = 0;
  for (; h + 2 <= sums.heads; h += 2) {
    for (std::uint32_t t = 0; t < count; t += N / 2)
      multiply_some<2, N>(scratch.elements + t * stride, sums.query + h * stride, stride,
                          scratch.weights + h * max_tile_tokens + t);
  }
  if (h == sums.heads) return;
  for (std::uint32_t t = 0; t < count; t += N)
    multiply_some<1, N>(scratch.elements + t * stride, sums.query + h * stride, stride,
                        scratch.weights + h * max_tile_tokens + t);
}

/// Makes weights of a head's products, relative to the largest so far, to which its sums are brought.
template <unsigned N>
LLMMEM_LANES_INLINE void weigh(vector_sums& sums, std::uint32_t h, std::uint32_t count,
                               float* weights) noexcept {
  for (std::uint32_t t = count; t % N != 0; ++t)
    weights[t] = lowest();
  float_lanes<N> largest = float_lanes<N>{} + lowest();
  for (std::uint32_t t = 0; t < count; t += N) {
    float_lanes<N> x;
    load_lanes<N>(weights + t, x);
    take_larger<N>(largest, x);
  }
  const float most = larger_of(sums.most[h], largest_of<N>(largest));
  const float base = most == lowest() ? 0.0F : most;  // nothing counts so far
  if (most != sums.most[h]) {
    const float factor = power_of_two(sums.most[h] - base);
    sums.most[h] = most;
    sums.total[h] *= factor;
    for (std::uint32_t e = 0; e < sums.value_stride; e += N) {
      float_lanes<N> x;
      load_lanes<N>(sums.sum + h * sums.value_stride + e, x);
      x = x * factor;
      store_lanes<N>(x, sums.sum + h * sums.value_stride + e);
    }
  }
  float_lanes<N> total{};
  for (std::uint32_t t = 0; t < count; t += N) {
    float_lanes<N> x;
    load_lanes<N>(weights + t, x);
    x = x - base;
    raise_two<N>(x);
    store_lanes<N>(x, weights + t);
    total = total + x;
  }
  sums.total[h] += sum_of<N>(total);
}

/// Adds the tokens' values, weighted, to `Vectors` x N elements of the sums of `Heads` heads.
template <unsigned Heads, unsigned Vectors, unsigned N>
LLMMEM_LANES_INLINE void add_some(const float* values, const float* weights, std::uint32_t stride,
                                  std::uint32_t count, float* sums) noexcept {
  float_lanes<N> sum[Heads][Vectors];
  LLMMEM_LANES_UNROLL
  for (unsigned h = 0; h < Heads; ++h) {
    LLMMEM_LANES_UNROLL
    for (unsigned v = 0; v < Vectors; ++v)
      load_lanes<N>(sums + h * stride + v * N, sum[h][v]);
  }
  for (std::uint32_t t = 0; t < count; ++t) {
    float_lanes<N> value[Vectors];
    LLMMEM_LANES_UNROLL
    for (unsigned v = 0; v < Vectors; ++v)
      load_lanes<N>(values + t * stride + v * N, value[v]);
    LLMMEM_LANES_UNROLL
    for (unsigned h = 0; h < Heads; ++h) {
      const float weight = weights[h * max_tile_tokens + t];
      LLMMEM_LANES_UNROLL
      for (unsigned v = 0; v < Vectors; ++v)
        sum[h][v] = value[v] * weight + sum[h][v];
    }
  }
  LLMMEM_LANES_UNROLL
  for (unsigned h = 0; h < Heads; ++h) {
    LLMMEM_LANES_UNROLL
    for (unsigned v = 0; v < Vectors; ++v)
      store_lanes<N>(sum[h][v], sums + h * stride + v * N);
  }
}

template <unsigned Heads, unsigned N>
LLMMEM_LANES_INLINE void add_heads(const float* values, const float* weights, std::uint32_t stride,
                                   std::uint32_t count, float* sums) noexcept {
  // As many sums as hide the latency of an addition, and fit into the registers: 32 of 16 floats, else 16.
  constexpr unsigned vectors = (N == 16 ? 16U : 8U) / (Heads == 1 ? 2 : Heads);
  std::uint32_t e = 0;
  for (; e + vectors * N <= stride; e += vectors * N)
    add_some<Heads, vectors, N>(values + e, weights, stride, count, sums + e);
  for (; e < stride; e += N)
    add_some<Heads, 1, N>(values + e, weights, stride, count, sums + e);
}

template <unsigned N>
LLMMEM_LANES_INLINE void add_values(const vector_scratch& scratch, std::uint32_t count,
                                    vector_sums& sums) noexcept {
  const std::uint32_t stride = sums.value_stride;
  std::uint32_t h = 0;
  for (; h + 4 <= sums.heads; h += 4)
    add_heads<4, N>(scratch.elements, scratch.weights + h * max_tile_tokens, stride, count,
                    sums.sum + h * stride);
  for (; h < sums.heads; ++h)
    add_heads<1, N>(scratch.elements, scratch.weights + h * max_tile_tokens, stride, count,
                    sums.sum + h * stride);
}

template <dtype Element, unsigned N>
LLMMEM_LANES_INLINE void attend_by(const vector_tokens& tokens, const vector_tokens& next,
                                   vector_sums& sums) noexcept {
  vector_scratch scratch;
  expand<Element, N>(tokens.keys, next.keys, tokens.count, sums.key_elements, scratch.elements);
  multiply<N>(sums, tokens.count, scratch);
  for (std::uint32_t h = 0; h < sums.heads; ++h)
    weigh<N>(sums, h, tokens.count, scratch.weights + h * max_tile_tokens);
  expand<Element, N>(tokens.values, next.values, tokens.count, sums.value_elements, scratch.elements);
  add_values<N>(scratch, tokens.count, sums);
}

template <dtype Element>
void attend_baseline(const vector_tokens& tokens, const vector_tokens& next, vector_sums& sums) noexcept {
  attend_by<Element, 4>(tokens, next, sums);
}
#if defined(__x86_64__)
template <dtype Element>
[[gnu::target("avx2,fma")]] void attend_avx2(const vector_tokens& tokens, const vector_tokens& next, vector_sums& sums) noexcept {
  attend_by<Element, 8>(tokens, next, sums);
}
template <dtype Element>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]] void attend_avx512(
    const vector_tokens& tokens, const vector_tokens& next, vector_sums& sums) noexcept {
  attend_by<Element, 16>(tokens, next, sums);
}
#endif

/// Returns the floats of a path's vectors.
[[nodiscard]] constexpr std::uint32_t lanes_in(vector_path path) noexcept {
  return path == vector_path::avx512 ? 16 : path == vector_path::avx2 ? 8 : 4;
}

/// Adds a tile of tokens to the sums. @param next  the tile after it, with as many pointers
template <dtype Element>
void attend_tile(vector_path path, const vector_tokens& tokens, const vector_tokens& next, vector_sums& sums) noexcept {
#if defined(__x86_64__)
  if (path == vector_path::avx512) return attend_avx512<Element>(tokens, next, sums);
  if (path == vector_path::avx2) return attend_avx2<Element>(tokens, next, sums);
#endif
  attend_baseline<Element>(tokens, next, sums);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
