/// @file
/// Attention of some query heads to a tile of tokens in codes, by products of integers: keys with queries of
/// eight bits, and values with weights of eight bits.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/code_tiles.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/integer_lanes.hpp>
#include <llmmem/kernels/detail/vector_tile.hpp>
#include <llmmem/model/dtype.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace llmmem {
inline namespace v0 {
namespace detail {

// Products below are of a tile's lengths, at most 16384. Tiles are large, and written before they are read.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)
// NOLINTBEGIN(modernize-use-using, modernize-use-auto, modernize-loop-convert): `using` and `auto` would lose
// the vectors' size, and loops over vectors are unrolled by their number.

/// Tokens of a tile, whose weights share a scale; and words of a vector of `vector_elements` codes, of which
/// those of four bits take two each.
inline constexpr std::size_t integer_tile_tokens = 64;
inline constexpr std::size_t query_words = vector_elements / 4;
using integer_tile = basic_code_tile<integer_tile_tokens>;

/// The queries of some heads as codes, in the order in which keys are transposed.
struct integer_queries {
  alignas(64) std::uint32_t words[vector_heads * query_words];
  std::int32_t offsets[vector_heads];  // what the keys' codes without a sign add to a product
  float scales[vector_heads];
  float sums[vector_heads];  // of the elements, times the scale of a product: what zeros of keys multiply
};

/// What a share of codes needs from tile to tile.
struct integer_sums {
  basic_vector_sums<vector_heads, 1, vector_elements> sums;
  integer_queries queries;
  dtype key_code;
  dtype value_code;
  std::size_t key_bytes = 0;
  std::size_t value_bytes = 0;
};

/// A tile's products, then weights; values with four tokens in a word; and the weights' codes.
struct integer_scratch {
  alignas(64) std::int32_t products[vector_heads * integer_tile_tokens];
  alignas(64) float weights[vector_heads * integer_tile_tokens];
  alignas(64) std::uint8_t codes[vector_heads * integer_tile_tokens];
  alignas(64) std::uint32_t values[integer_tile_tokens * vector_elements / 4];
  alignas(64) float key_scales[integer_tile_tokens];
  alignas(64) float value_scales[integer_tile_tokens];
  alignas(64) float key_zeros[integer_tile_tokens];
  alignas(64) float value_zeros[integer_tile_tokens];
  float scales[vector_heads];  // of the weights' codes
};

[[nodiscard]] constexpr std::size_t codes_in_byte(dtype code) noexcept {
  return is_half_byte(code) ? 2 : 1;
}
/// The floats of a head's sums: whole vectors of N words of bytes.
[[nodiscard]] constexpr std::size_t integer_stride(dtype code, std::size_t elements, std::size_t n) noexcept {
  const std::size_t chunk = 4 * n * codes_in_byte(code);
  return (elements + chunk - 1) / chunk * chunk;
}
/// Returns the place of an element in a head's sums: `alternate_tokens`, and codes of four bits apart.
[[nodiscard]] constexpr std::size_t integer_place(dtype code, std::size_t element, std::size_t n) noexcept {
  const std::size_t in_byte = codes_in_byte(code);
  const std::size_t chunk = 4 * n * in_byte;
  const std::size_t in_chunk = element % chunk;
  const std::size_t byte = in_chunk / in_byte;
  const std::size_t vector = byte % 16 / 4 * in_byte + in_chunk % in_byte;
  return element - in_chunk + vector * n + byte / 16 * 4 + byte % 4;
}

/// A query head as codes: nearest(x / scale), scale = its largest size / 127.
struct integer_query {
  std::int8_t codes[vector_elements];
  std::int32_t sum = 0;  // of the codes
  float scale = 0;       // times the scale of a product
  float all = 0;         // the sum of the elements, times the scale of a product
};
[[nodiscard]] inline integer_query integer_query_of(const float* query, std::size_t elements,
                                                    float scale) noexcept {
  integer_query out;
  float largest = 0;
  bool is_number = true;
  float all = 0;
  for (std::size_t i = 0; i < elements; ++i) {
    all += query[i];
    largest = std::max(largest, __builtin_fabsf(query[i]));
    is_number = is_number && __builtin_fabsf(query[i]) <= std::numeric_limits<float>::max();
  }
  constexpr float least = 0x1p-100F;  // whose reciprocal is a number
  const float inverse = is_number && largest >= least ? 127.0F / largest : 0.0F;
  out.scale = is_number ? largest / 127.0F * scale : std::numeric_limits<float>::quiet_NaN();
  out.all = all * scale;
  for (std::size_t i = 0; i < elements; ++i) {
    // The nearest integer is in the lowest bits, of two equally near the even one. Bits of a NaN are no code.
    const float x = is_number ? query[i] * inverse : 0.0F;
    out.codes[i] =
        static_cast<std::int8_t>(static_cast<std::int32_t>(bits_of_float(x + 0x1.8p23F) << 10) >> 10);
    out.sum += out.codes[i];
  }
  return out;
}

/// Makes codes of the query of a head, in the order of transposed keys.
template <unsigned N>
void set_integer_query(integer_queries& to, std::size_t head, dtype code, const float* query,
                       std::size_t elements, float scale) noexcept {
  std::uint32_t* const words = to.words + head * query_words;
  std::fill_n(words, query_words, 0U);
  const integer_query of = integer_query_of(query, elements, scale);
  to.scales[head] = of.scale;
  to.sums[head] = of.all;
  const std::size_t in_byte = codes_in_byte(code);
  for (std::size_t i = 0; i < elements; ++i) {
    const std::size_t word = i / in_byte / 4;
    const std::size_t place = (word / N * N + transposed_places<N>[word % N]) * in_byte + i % in_byte;
    words[place] |= (static_cast<std::uint32_t>(of.codes[i]) & 0xFFU) << (i / in_byte % 4 * 8);
  }
  to.offsets[head] = of.sum * (is_half_byte(code) ? 8 : 128);
}

/// Loads a vector of each of `Count` tokens from a byte on, zeros past the end of their codes.
/// @param bytes  that are left of each
template <unsigned Count, class Lanes>
LLMMEM_ALWAYS_INLINE void load_tokens(const std::byte* const* rows, std::size_t at, std::size_t bytes,
                                      Lanes (&to)[Count]) noexcept {
  if (bytes >= sizeof(Lanes)) {
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < Count; ++i)
      std::memcpy(&to[i], rows[i] + at, sizeof(Lanes));
    return;
  }
  std::byte some[Count][sizeof(Lanes)]{};
  for (unsigned i = 0; i < Count; ++i)
    std::memcpy(some[i], rows[i] + at, bytes);
  LLMMEM_LANES_UNROLL
  for (unsigned i = 0; i < Count; ++i)
    std::memcpy(&to[i], some[i], sizeof(Lanes));
}

/// What is requested of the tokens after these, one by one between products: a burst of requests would wait.
struct requested_tokens {
  const std::byte* const* codes;
  const std::byte* const* key_scales;  // with the first words alone
  const std::byte* const* value_scales;
  std::size_t at;
};

/// Makes the products of `Heads` queries with N words of N tokens, transposed; adds them unless the words are
/// the first.
template <dtype Code, unsigned Heads, bool Requests, unsigned N, byte_dots Dots>
LLMMEM_ALWAYS_INLINE void multiply_words(const float_lanes<N> (&keys)[N], const requested_tokens& next,
                                         const std::uint32_t* query, std::size_t word,
                                         std::int32_t* products) noexcept {
  constexpr unsigned in_byte = static_cast<unsigned>(codes_in_byte(Code));
  constexpr unsigned chains = Heads == 1 ? 4 : 2;  // so that no sum waits for the one before
  integer_lanes<N> sum[Heads][chains]{};
  LLMMEM_LANES_UNROLL
  for (unsigned k = 0; k < N; ++k) {
    const word_lanes<N> raw = reinterpret_cast<word_lanes<N>>(keys[k]);
    if constexpr (Requests) {
      __builtin_prefetch(next.codes[k] + next.at, 0, 2);
      if (word == 0) {
        __builtin_prefetch(next.key_scales[k], 0, 2);
        __builtin_prefetch(next.value_scales[k], 0, 2);
      }
    }
    if constexpr (Code == dtype::int8) {
      const word_lanes<N> codes = raw ^ 0x8080'8080U;
      LLMMEM_LANES_UNROLL
      for (unsigned h = 0; h < Heads; ++h)
        add_byte_products<N, Dots>(codes, query + h * query_words + k, sum[h][k % chains]);
    } else {
      const word_lanes<N> codes = raw ^ 0x8888'8888U;
      const word_lanes<N> even = codes & 0x0F0F'0F0FU;
      const word_lanes<N> odd = (codes >> 4) & 0x0F0F'0F0FU;
      LLMMEM_LANES_UNROLL
      for (unsigned h = 0; h < Heads; ++h) {
        const std::uint32_t* const q = query + h * query_words + k * in_byte;
        add_byte_products<N, Dots>(even, q, sum[h][0]);
        add_byte_products<N, Dots>(odd, q + 1, sum[h][1]);
      }
    }
  }
  LLMMEM_LANES_UNROLL
  for (unsigned h = 0; h < Heads; ++h) {
    integer_lanes<N> all{};
    if (word != 0) std::memcpy(&all, products + h * integer_tile_tokens, sizeof(all));
    LLMMEM_LANES_UNROLL
    for (unsigned c = 0; c < chains; ++c)
      all = all + sum[h][c];
    std::memcpy(products + h * integer_tile_tokens, &all, sizeof(all));
  }
}

template <dtype Code, unsigned N, byte_dots Dots>
LLMMEM_ALWAYS_INLINE void multiply_codes(const integer_tile& tile, const integer_tile& next,
                                         const integer_sums& of, std::int32_t* products) noexcept {
  const std::size_t heads = of.sums.heads;
  constexpr std::size_t in_byte = codes_in_byte(Code);
  for (std::size_t t = 0; t < tile.count; t += N) {
    for (std::size_t word = 0; word * 4 < of.key_bytes; word += N) {
      float_lanes<N> keys[N];
      load_tokens<N>(tile.keys.codes + t, word * 4, of.key_bytes - word * 4, keys);
      transpose_lanes<N>(keys);
      const requested_tokens requested{next.keys.codes + t, next.keys.scales + t, next.values.scales + t,
                                       word * 4};
      const std::uint32_t* const query = of.queries.words + word * in_byte;
      std::int32_t* const to = products + t;
      std::size_t h = 0;
      if (heads < 4) {
        multiply_words<Code, 1, true, N, Dots>(keys, requested, query, word, to);
        h = 1;
      } else {
        multiply_words<Code, 4, true, N, Dots>(keys, requested, query, word, to);
        h = 4;
      }
      for (; h + 4 <= heads; h += 4)
        multiply_words<Code, 4, false, N, Dots>(keys, requested, query + h * query_words, word,
                                                to + h * integer_tile_tokens);
      for (; h < heads; ++h)
        multiply_words<Code, 1, false, N, Dots>(keys, requested, query + h * query_words, word,
                                                to + h * integer_tile_tokens);
    }
  }
}

/// Reads the scales of a tile, and zeros up to a whole vector.
template <unsigned N>
LLMMEM_ALWAYS_INLINE void load_scales(dtype element, const basic_code_rows<integer_tile_tokens>& rows,
                                      std::size_t count, float* to) noexcept {
  if (element == dtype::f32) {
    for (std::size_t t = 0; t < count; ++t) {
      float scale;
      std::memcpy(&scale, rows.scales[t], sizeof(scale));
      to[t] = scale * rows.global[t];
    }
  } else {
    for (std::size_t t = 0; t < count; ++t)
      to[t] = load_scale(element, rows.scales[t]) * rows.global[t];
  }
  for (std::size_t t = count; t % N != 0; ++t)
    to[t] = 0;
  // A negative or infinite one becomes a NaN, which no product and no weight of 0 can hide. One by one,
  // because nvcc's compiler for devices crashes on the choice of vectors.
  for (std::size_t t = 0; t < count; ++t) {
    const bool is_scale = to[t] >= 0.0F && to[t] <= std::numeric_limits<float>::max();
    to[t] = is_scale ? to[t] : std::numeric_limits<float>::quiet_NaN();
  }
}

/// Reads the zeros of a tile that has them, and zeros up to a whole vector.
template <unsigned N>
LLMMEM_ALWAYS_INLINE void load_zeros(const coded_plane& plane,
                                     const basic_code_rows<integer_tile_tokens>& rows, std::size_t count,
                                     float* to) noexcept {
  if (!plane.has_zero) return;
  for (std::size_t t = 0; t < count; ++t)
    to[t] = load_scale(plane.scale, rows.scales[t] + scale_bytes_of(plane.scale)) * rows.global[t];
  for (std::size_t t = count; t % N != 0; ++t)
    to[t] = 0;
}

/// Adds a tile's weighted zeros, of which all elements of a head have the sum.
template <unsigned N>
LLMMEM_ALWAYS_INLINE void add_zeros(integer_sums& of, std::size_t h, std::size_t count, const float* weights,
                                    const float* zeros) noexcept {
  float_lanes<N> sum{};
  for (std::size_t t = 0; t < count; t += N) {
    float_lanes<N> x;
    float_lanes<N> zero;
    load_lanes<N>(weights + t, x);
    load_lanes<N>(zeros + t, zero);
    sum = x * zero + sum;
  }
  float lanes[N];
  store_lanes<N>(sum, lanes);
  float all = 0;
  for (unsigned i = 0; i < N; ++i)
    all += lanes[i];
  float* const to = of.sums.sum + h * of.sums.value_stride;
  for (std::size_t e = 0; e < of.sums.value_stride; e += N) {
    float_lanes<N> x;
    load_lanes<N>(to + e, x);
    x = x + all;
    store_lanes<N>(x, to + e);
  }
}

/// Makes weights of a head's products, and codes of the weights times the values' scales.
template <unsigned N, byte_dots Dots>
LLMMEM_ALWAYS_INLINE void weigh_codes(const attention_codes& codes_of, integer_sums& of, std::size_t h,
                                      std::size_t count, integer_scratch& scratch) noexcept {
  float* const weights = scratch.weights + h * integer_tile_tokens;
  for (std::size_t t = 0; t < count; t += N) {
    integer_lanes<N> product;
    std::memcpy(&product, scratch.products + h * integer_tile_tokens + t, sizeof(product));
    float_lanes<N> x;
    convert_lanes<N>(product - of.queries.offsets[h], x);
    float_lanes<N> scale;
    load_lanes<N>(scratch.key_scales + t, scale);
    x = x * (scale * of.queries.scales[h]);
    if (codes_of.keys.has_zero) {
      float_lanes<N> zero;
      load_lanes<N>(scratch.key_zeros + t, zero);
      x = zero * of.queries.sums[h] + x;
    }
    store_lanes<N>(x, weights + t);
  }
  weigh<N>(of.sums, h, count, weights);
  if (codes_of.values.has_zero) add_zeros<N>(of, h, count, weights, scratch.value_zeros);
  float_lanes<N> largest{};
  const float_lanes<N> broken = largest + std::numeric_limits<float>::infinity();
  for (std::size_t t = 0; t < count; t += N) {
    float_lanes<N> x;
    float_lanes<N> scale;
    load_lanes<N>(weights + t, x);
    load_lanes<N>(scratch.value_scales + t, scale);
    x = x * scale;
    const float_lanes<N> size = x >= 0.0F ? x : broken;  // of a NaN
    take_larger<N>(largest, size);
    store_lanes<N>(x, weights + t);
  }
  spread_largest<N>(largest);
  const float most = largest[0];
  constexpr float least = 0x1p-100F;  // whose reciprocal is a number
  const bool is_number = most <= std::numeric_limits<float>::max();
  const float inverse = is_number && most >= least ? 255.0F / most : 0.0F;
  scratch.scales[h] = is_number ? most * (1.0F / 255.0F) : std::numeric_limits<float>::quiet_NaN();
  std::uint8_t* const codes = scratch.codes + h * integer_tile_tokens;
  for (std::size_t t = 0; t < count; t += N) {
    float_lanes<N> x;
    load_lanes<N>(weights + t, x);
    const float_lanes<N> rounded = x * inverse + 0x1p23F;  // the nearest integer is in the lowest bits
    const word_lanes<N> words = reinterpret_cast<word_lanes<N>>(rounded);
    store_low_bytes<N, Dots>(words, codes + t);
  }
}

/// Puts the values of four tokens into words, those of four bits times 16.
template <dtype Code, unsigned N>
LLMMEM_ALWAYS_INLINE void arrange_values(const integer_tile& tile, const integer_sums& of,
                                         std::uint32_t* values) noexcept {
  const std::size_t stride = of.sums.value_stride;
  for (std::size_t t = 0; t < tile.count; t += 4) {
    std::uint32_t* to = values + t / 4 * stride;
    for (std::size_t at = 0; at < of.value_bytes; at += 4 * N) {
      byte_lanes<N> x[4];
      load_tokens<4>(tile.values.codes + t, at, of.value_bytes - at, x);
      alternate_tokens<N>(x);
      LLMMEM_LANES_UNROLL
      for (unsigned i = 0; i < 4; ++i) {
        const word_lanes<N> raw = reinterpret_cast<word_lanes<N>>(x[i]);
        if constexpr (Code == dtype::int8) {
          std::memcpy(to, &raw, sizeof(raw));
          to += N;
        } else {
          const word_lanes<N> even = (raw << 4) & 0xF0F0'F0F0U;
          const word_lanes<N> odd = raw & 0xF0F0'F0F0U;
          std::memcpy(to, &even, sizeof(even));
          std::memcpy(to + N, &odd, sizeof(odd));
          to += 2 * N;
        }
      }
    }
  }
}

/// Adds the values of a tile to `Vectors` vectors of the sums of `Heads` heads.
/// @param next  the tokens after these, requested with the first heads
template <unsigned Heads, unsigned Vectors, unsigned N, byte_dots Dots>
LLMMEM_ALWAYS_INLINE void add_integers(const integer_scratch& scratch,
                                       const basic_code_rows<integer_tile_tokens>& next, std::size_t h,
                                       std::size_t from, std::size_t count, float unit,
                                       integer_sums& of) noexcept {
  const std::size_t stride = of.sums.value_stride;
  integer_lanes<N> sum[Heads][Vectors]{};
  const std::uint32_t* values = scratch.values + from;
  const std::size_t in_byte = codes_in_byte(of.value_code);
  for (std::size_t t = 0; t < count; t += 4) {
    if (h == 0) {
      for (std::size_t i = t; i < t + 4; ++i) {
        for (std::size_t at = from / in_byte; at < (from + Vectors * N) / in_byte; at += 64)
          __builtin_prefetch(next.codes[i] + at, 0, 2);
      }
    }
    word_lanes<N> weights[Heads];
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < Heads; ++i)
      spread_word<N>(scratch.codes + (h + i) * integer_tile_tokens + t, weights[i]);
    LLMMEM_LANES_UNROLL
    for (unsigned v = 0; v < Vectors; ++v) {
      word_lanes<N> value;
      std::memcpy(&value, values + v * N, sizeof(value));
      LLMMEM_LANES_UNROLL
      for (unsigned i = 0; i < Heads; ++i)
        add_byte_products<N, Dots>(weights[i], value, sum[i][v]);
    }
    values += stride;
  }
  LLMMEM_LANES_UNROLL
  for (unsigned i = 0; i < Heads; ++i) {
    const float scale = scratch.scales[h + i] * unit;
    float* const to = of.sums.sum + (h + i) * stride + from;
    LLMMEM_LANES_UNROLL
    for (unsigned v = 0; v < Vectors; ++v) {
      float_lanes<N> x;
      float_lanes<N> all;
      convert_lanes<N>(sum[i][v], x);
      load_lanes<N>(to + v * N, all);
      all = x * scale + all;
      store_lanes<N>(all, to + v * N);
    }
  }
}

template <unsigned N, byte_dots Dots>
LLMMEM_ALWAYS_INLINE void add_integer_values(const integer_scratch& scratch,
                                             const basic_code_rows<integer_tile_tokens>& next,
                                             std::size_t count, integer_sums& of) noexcept {
  // As many sums as hide the latency of an addition, and fit into the registers.
  constexpr unsigned vectors = N == 16 ? 8 : 4;
  const float unit = is_half_byte(of.value_code) ? 1.0F / 16 : 1.0F;
  const std::size_t stride = of.sums.value_stride;
  for (std::size_t e = 0; e < stride; e += vectors * N) {
    const bool is_full = e + vectors * N <= stride;  // else four vectors remain
    std::size_t h = 0;
    for (; h + 2 <= of.sums.heads; h += 2) {
      if (is_full) {
        add_integers<2, vectors, N, Dots>(scratch, next, h, e, count, unit, of);
      } else {
        add_integers<2, 4, N, Dots>(scratch, next, h, e, count, unit, of);
      }
    }
    if (h == of.sums.heads) continue;
    if (is_full) {
      add_integers<1, vectors, N, Dots>(scratch, next, h, e, count, unit, of);
    } else {
      add_integers<1, 4, N, Dots>(scratch, next, h, e, count, unit, of);
    }
  }
}

/// Adds a tile of tokens to the sums. @param next  the tile after it, with as many pointers
template <unsigned N, byte_dots Dots>
LLMMEM_ALWAYS_INLINE void attend_integers_by(const attention_codes& codes, const integer_tile& tile,
                                             const integer_tile& next, integer_sums& of) noexcept {
  integer_scratch scratch;
  const std::size_t count = tile.count;
  load_scales<N>(codes.keys.scale, tile.keys, count, scratch.key_scales);
  load_scales<N>(codes.values.scale, tile.values, count, scratch.value_scales);
  load_zeros<N>(codes.keys, tile.keys, count, scratch.key_zeros);
  load_zeros<N>(codes.values, tile.values, count, scratch.value_zeros);
  if (of.key_code == dtype::int8) {
    multiply_codes<dtype::int8, N, Dots>(tile, next, of, scratch.products);
  } else {
    multiply_codes<dtype::int4, N, Dots>(tile, next, of, scratch.products);
  }
  for (std::size_t h = 0; h < of.sums.heads; ++h)
    weigh_codes<N, Dots>(codes, of, h, count, scratch);
  if (of.value_code == dtype::int8) {
    arrange_values<dtype::int8, N>(tile, of, scratch.values);
  } else {
    arrange_values<dtype::int4, N>(tile, of, scratch.values);
  }
  add_integer_values<N, Dots>(scratch, next.values, count, of);
}

inline void attend_integers_baseline(const attention_codes& codes, const integer_tile& tile,
                                     const integer_tile& next, integer_sums& of) noexcept {
  attend_integers_by<4, byte_dots::by_halves>(codes, tile, next, of);
}
#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] inline void attend_integers_avx2(const attention_codes& codes,
                                                             const integer_tile& tile,
                                                             const integer_tile& next,
                                                             integer_sums& of) noexcept {
  attend_integers_by<8, byte_dots::by_halves>(codes, tile, next, of);
}
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]] inline void attend_integers_avx512(
    const attention_codes& codes, const integer_tile& tile, const integer_tile& next,
    integer_sums& of) noexcept {
  attend_integers_by<16, byte_dots::by_fours>(codes, tile, next, of);
}
#endif

// NOLINTEND(modernize-use-using, modernize-use-auto, modernize-loop-convert)
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
