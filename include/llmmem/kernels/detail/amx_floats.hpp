/// @file
/// Attention of the query heads of a head of the cache to a tile of tokens, by products of bf16 in tiles of
/// AMX. Floats are three parts of bf16, which add up to them exactly.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/amx_elements.hpp>
#include <llmmem/kernels/detail/amx_sums.hpp>
#include <llmmem/kernels/detail/amx_tiles.hpp>
#include <llmmem/kernels/detail/integer_lanes.hpp>
#include <llmmem/kernels/detail/vector_lanes.hpp>
#include <llmmem/kernels/detail/vector_tile.hpp>
#include <llmmem/model/dtype.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

#if defined(__x86_64__)

// Products below are of a tile's lengths, at most 8192. Tiles are large, and written before they are read.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

/// Parts of a float: eight digits each, of 24.
inline constexpr std::size_t bf16_parts = 3;
/// Returns the next part of a number, and subtracts it.
[[nodiscard]] inline std::uint32_t take_bf16(float& x) noexcept {
  const std::uint32_t part = std::bit_cast<std::uint32_t>(x) & 0xFFFF'0000U;
  x -= std::bit_cast<float>(part);
  return part >> 16;
}

/// The queries of heads of the cache that are read together, and what came of the tokens so far, as
/// `basic_vector_sums`: those of a head of the cache come before those of the next one.
struct amx_float_sums {
  static constexpr std::size_t query_words = bf16_parts * walked_elements / 2;
  /// [head of the cache][tile][chunk of 32 elements][pair of elements][column]: a column is a part of a query
  /// head. A tile has several parts, if they fit.
  alignas(64) std::uint32_t query[query_words];
  alignas(64) float sum[walked_elements];  // [query head][value_stride]
  alignas(64) float totals[walked_lanes * widest_lanes];
  float most[walked_lanes];
  std::size_t walked = 0;
  std::size_t heads = 0;  // query heads of a head of the cache
  std::size_t key_elements = 0;
  std::size_t value_elements = 0;
  std::size_t key_chunks = 0;
  std::size_t value_stride = 0;
  std::size_t query_tiles = 0;
  std::size_t columns = 0;  // of a tile
  std::size_t pitch = 0;    // words of a row of a tile: no row crosses a line, if all fit

  template <dtype Element>
  void begin(std::size_t of_cache, std::size_t of_heads, std::size_t keys, std::size_t values) noexcept {
    constexpr std::size_t group = amx_group<Element>;
    walked = of_cache;
    heads = of_heads;
    key_elements = keys;
    value_elements = values;
    key_chunks = (keys + group - 1) / group * amx_vectors<Element>;
    value_stride = (values + group - 1) / group * group;
    query_tiles = heads * bf16_parts <= tile_rows ? 1 : bf16_parts;
    columns = bf16_parts / query_tiles * heads;
    const std::size_t rows = walked * query_tiles * key_chunks * tile_rows;
    pitch = rows * std::bit_ceil(columns) <= query_words ? std::bit_ceil(columns) : columns;
    std::fill_n(query, rows * pitch, 0U);
    std::fill_n(sum, walked * heads * value_stride, 0.0F);
    std::fill_n(most, walked * heads, lowest());
    std::fill_n(totals, walked * heads * widest_lanes, 0.0F);
  }
  /// Returns the words of a tile's chunk.
  [[nodiscard]] const std::uint32_t* query_at(std::size_t walk, std::size_t tile,
                                              std::size_t chunk) const noexcept {
    return query + ((walk * query_tiles + tile) * key_chunks + chunk) * tile_rows * pitch;
  }
  template <dtype Element>
  void set_query(std::size_t walk, std::size_t head, std::size_t element, float x) noexcept {
    const std::size_t at = amx_place<Element>(element);
    for (std::size_t part = 0; part < bf16_parts; ++part) {
      const std::size_t column = part * heads + head;
      const std::size_t chunks = (walk * query_tiles + column / columns) * key_chunks + at / 32;
      query[(chunks * tile_rows + at % 32 / 2) * pitch + column % columns] |= take_bf16(x) << (at % 2 * 16);
    }
  }
  /// What `finish_vectors` reads of a head of the cache.
  struct of_head {
    const float* sum;
    const float* most;
    const float* totals;
    std::size_t value_stride;
    [[nodiscard]] float total(std::size_t h) const noexcept {
      return sum_of_lanes(totals + h * widest_lanes);
    }
  };
  [[nodiscard]] of_head head(std::size_t walk) const noexcept {
    const std::size_t first = walk * heads;
    return {sum + first * value_stride, most + first, totals + first * widest_lanes, value_stride};
  }
  /// 0 and 1: products; 2: keys or values; 3: queries; 4: sums of values; 5 to 7: parts of weights.
  [[nodiscard]] tile_shapes shapes() const noexcept {
    tile_shapes out;
    for (const unsigned tile : {0U, 1U, 3U})
      out.set(tile, tile_rows, 4 * columns);
    out.set(2, tile_rows, tile_row_bytes);
    for (unsigned tile = 4; tile < 8; ++tile)
      out.set(tile, heads, tile_row_bytes);
    return out;
  }
};
static_assert(max_tile_tokens == 2 * tile_rows);

/// What a tile needs.
struct amx_float_scratch {
  alignas(64) float weights[vector_heads * max_tile_tokens];
  /// [tile of queries][token][column], and what a vector reads behind them.
  alignas(64) float products[bf16_parts * max_tile_tokens * widest_lanes + widest_lanes];
  alignas(64) std::uint32_t parts[bf16_parts][vector_heads][tile_rows];
  /// Keys, [tokens][256]; then values, [pairs of tokens 16 apart][pairs of 256].
  alignas(64) std::byte elements[max_tile_tokens * vector_elements * 2];
};

/// Requests the lines of the next tile, evenly over the work on this one: a processor drops requests while it
/// waits for as many as it can count, and what is dropped is waited for when it is read.
struct amx_float_requests {
  const vector_tokens* next;
  std::uint32_t key_lines;  // of a token
  std::uint32_t value_lines;
  std::uint32_t lines_a_part;  // the same for each: a processor predicts it
  std::uint32_t token = 0;     // keys and values in turns
  const std::byte* at;
  std::uint32_t left;

  /// @param key_bytes  of a token, of all heads that are read together
  /// @param parts  how often `some` is called
  amx_float_requests(const vector_tokens& of, std::size_t key_bytes, std::size_t value_bytes,
                     std::size_t parts) noexcept
      : next(&of),
        key_lines(static_cast<std::uint32_t>(amx_requests::lines_in(key_bytes))),
        value_lines(static_cast<std::uint32_t>(amx_requests::lines_in(value_bytes))),
        lines_a_part(static_cast<std::uint32_t>(
            (max_tile_tokens * std::size_t{key_lines + value_lines} + parts - 1) / parts)),
        at(of.keys[0]),
        left(key_lines) {}
  LLMMEM_ALWAYS_INLINE void some() noexcept {
    for (std::uint32_t i = lines_a_part; i != 0; --i) {
      __builtin_prefetch(at, 0, 2);
      at += 64;
      if (--left == 0) turn();
    }
  }
  /// Goes to the next vector.
  void turn() noexcept {
    if (++token == 2 * max_tile_tokens) {
      lines_a_part = 0;
      token = 0;
    }
    at = token % 2 == 0 ? next->keys[token / 2] : next->values[token / 2];
    left = token % 2 == 0 ? key_lines : value_lines;
  }
};

/// Whether tiles can load 16 keys where they are: rows of whole chunks, equally far apart.
template <dtype Element>
[[nodiscard]] LLMMEM_ALWAYS_INLINE bool find_key_step(const std::byte* const* rows, std::size_t elements,
                                                      std::size_t& step) noexcept {
  if (Element != dtype::bf16 || elements % 32 != 0) return false;
  const auto distance = [&](std::size_t i) {
    return reinterpret_cast<std::uintptr_t>(rows[i + 1]) - reinterpret_cast<std::uintptr_t>(rows[i]);
  };
  step = distance(0);
  bool is_equal = true;
  for (std::size_t i = 1; i + 1 < tile_rows; ++i)
    is_equal = is_equal && distance(i) == step;
  return is_equal;
}

/// Brings 16 keys to where tiles load them.
template <dtype Element>
LLMMEM_AMX_FLOATS LLMMEM_ALWAYS_INLINE void copy_keys(const std::byte* const* rows, std::size_t offset,
                                                      std::size_t elements, std::byte* to_rows,
                                                      amx_float_requests& requests) noexcept {
  for (std::size_t t = 0; t < tile_rows; ++t) {
    std::byte* to = to_rows + t * vector_elements * 2;
    for (std::size_t i = 0; i * amx_group<Element> < elements; ++i) {
      byte_lanes<16> x[amx_vectors<Element>];
      load_bf16<Element>(rows[t] + offset, i, elements, x);
      std::memcpy(to, &x, sizeof(x));
      to += sizeof(x);
      requests.some();
    }
  }
}

/// Arranges the values of pairs of tokens, 16 apart: their elements alternate.
template <dtype Element>
LLMMEM_AMX_FLOATS LLMMEM_ALWAYS_INLINE void arrange_values(const vector_tokens& tokens, std::size_t offset,
                                                           const amx_float_sums& sums,
                                                           amx_float_requests& requests,
                                                           amx_float_scratch& scratch) noexcept {
  constexpr std::size_t vectors = amx_vectors<Element>;
  constexpr auto all = std::make_integer_sequence<int, 64>();
  for (std::size_t t = 0; t < tile_rows; ++t) {
    std::byte* to = scratch.elements + t * vector_elements * 4;
    for (std::size_t i = 0; i < sums.value_stride / amx_group<Element>; ++i) {
      byte_lanes<16> a[vectors];
      byte_lanes<16> b[vectors];
      load_bf16<Element>(tokens.values[t] + offset, i, sums.value_elements, a);
      load_bf16<Element>(tokens.values[t + tile_rows] + offset, i, sums.value_elements, b);
      LLMMEM_LANES_UNROLL
      for (unsigned v = 0; v < vectors; ++v) {
        byte_lanes<16> half[2];
        alternate_bytes<16, 2, false>(a[v], b[v], half[0], all);
        alternate_bytes<16, 2, true>(a[v], b[v], half[1], all);
        std::memcpy(to, &half, sizeof(half));
        to += sizeof(half);
        requests.some();
      }
    }
  }
}

/// The products of all columns with a tile's keys, [tile][token][column].
template <dtype Element>
LLMMEM_AMX_FLOATS LLMMEM_ALWAYS_INLINE void multiply_bf16(const vector_tokens& tokens,
                                                          const amx_float_sums& sums, std::size_t walk,
                                                          std::size_t offset, amx_float_requests& requests,
                                                          amx_float_scratch& scratch) noexcept {
  const std::byte* from[2];
  std::size_t step[2];
  for (std::size_t half = 0; half < 2; ++half) {
    const std::byte* const* const rows = tokens.keys + half * tile_rows;
    from[half] = rows[0] + offset;
    if (find_key_step<Element>(rows, sums.key_elements, step[half])) continue;
    from[half] = scratch.elements + half * tile_rows * vector_elements * 2;
    step[half] = vector_elements * 2;
    copy_keys<Element>(rows, offset, sums.key_elements,
                       scratch.elements + half * tile_rows * vector_elements * 2, requests);
  }
  for (std::size_t tile = 0; tile < sums.query_tiles; ++tile) {
    clear_tile<0>();
    clear_tile<1>();
    for (std::size_t chunk = 0; chunk < sums.key_chunks; ++chunk) {
      load_tile<3>(sums.query_at(walk, tile, chunk), 4 * sums.pitch);
      load_tile<2>(from[0] + chunk * tile_row_bytes, step[0]);
      add_bf16_dots<0, 2, 3>();
      load_tile<2>(from[1] + chunk * tile_row_bytes, step[1]);
      add_bf16_dots<1, 2, 3>();
      requests.some();
    }
    float* const products = scratch.products + tile * max_tile_tokens * widest_lanes;
    store_tile<0>(products, widest_lanes * sizeof(float));
    store_tile<1>(products + tile_rows * widest_lanes, widest_lanes * sizeof(float));
  }
}

/// Makes weights of the products, in parts of bf16; the tokens of a pair are 16 apart.
LLMMEM_AMX_FLOATS LLMMEM_ALWAYS_INLINE void weigh_bf16(amx_float_sums& sums, std::size_t walk,
                                                       std::size_t count, amx_float_requests& requests,
                                                       amx_float_scratch& scratch) noexcept {
  // From a part's products to those of the next one.
  const std::size_t step = sums.query_tiles == 1 ? sums.heads : max_tile_tokens * widest_lanes;
  for (std::size_t from = 0; from < max_tile_tokens; from += tile_rows) {
    float_lanes<16> x[16];
    LLMMEM_LANES_UNROLL
    for (unsigned t = 0; t < 16; ++t) {
      const float* const parts = scratch.products + (from + t) * widest_lanes;
      float_lanes<16> second;
      float_lanes<16> third;
      load_lanes<16>(parts, x[t]);
      load_lanes<16>(parts + step, second);
      load_lanes<16>(parts + 2 * step, third);
      x[t] = x[t] + (second + third);
    }
    transpose_lanes<16>(x);
    LLMMEM_LANES_UNROLL
    for (unsigned k = 0; k < 16; ++k)
      store_lanes<16>(x[k], scratch.weights + transposed_words<16>[k] * max_tile_tokens + from);
  }
  using words = word_lanes<16>;
  for (std::size_t h = 0; h < sums.heads; ++h) {
    float* const weights = scratch.weights + h * max_tile_tokens;
    weigh<16>(sums, walk * sums.heads + h, count, weights);
    requests.some();
    if (count <= tile_rows) std::fill_n(weights + tile_rows, tile_rows, 0.0F);
    float_lanes<16> first;
    float_lanes<16> second;
    load_lanes<16>(weights, first);
    load_lanes<16>(weights + tile_rows, second);
    LLMMEM_LANES_UNROLL
    for (auto& part : scratch.parts) {
      const words a = reinterpret_cast<words>(first) & 0xFFFF'0000U;
      const words b = reinterpret_cast<words>(second) & 0xFFFF'0000U;
      const words both = (a >> 16) | b;
      std::memcpy(part[h], &both, sizeof(both));
      first = first - reinterpret_cast<float_lanes<16>>(a);
      second = second - reinterpret_cast<float_lanes<16>>(b);
    }
  }
}

/// Adds the weighted values of a tile, as they were arranged, to the sums.
LLMMEM_AMX_FLOATS LLMMEM_ALWAYS_INLINE void add_bf16(amx_float_sums& sums, std::size_t walk,
                                                     const amx_float_scratch& scratch) noexcept {
  load_tile<5>(scratch.parts[0], tile_row_bytes);
  load_tile<6>(scratch.parts[1], tile_row_bytes);
  load_tile<7>(scratch.parts[2], tile_row_bytes);
  float* const sum = sums.sum + walk * sums.heads * sums.value_stride;
  for (std::size_t e = 0; e < sums.value_stride; e += 16) {
    load_tile<4>(sum + e, sums.value_stride * sizeof(float));
    load_tile<2>(scratch.elements + e * 4, vector_elements * 4);
    add_bf16_dots<4, 5, 2>();
    add_bf16_dots<4, 6, 2>();
    add_bf16_dots<4, 7, 2>();
    store_tile<4>(sum + e, sums.value_stride * sizeof(float));
  }
}

/// Adds a tile of tokens to the sums, whose addresses are those of the first head of the cache.
/// @param next  the tile after it, with as many pointers
/// @param key_step  from a head's key to the next one's
template <dtype Element>
LLMMEM_AMX_FLOATS void attend_amx_floats([[maybe_unused]] const vector_tokens& tokens,
                                         [[maybe_unused]] const vector_tokens& next,
                                         [[maybe_unused]] std::size_t key_step,
                                         [[maybe_unused]] std::size_t value_step,
                                         [[maybe_unused]] amx_float_sums& sums,
                                         [[maybe_unused]] amx_float_scratch& scratch) noexcept {
#if !defined(__CUDACC__)
  constexpr std::size_t bytes = sizeof(element_bits<Element>);
  const std::size_t last = sums.walked - 1;
  constexpr std::size_t group = amx_group<Element>;
  // The calls for a head: of its keys, if they are converted, of its values and of its weights.
  const std::size_t of_keys = Element == dtype::bf16 ? 0 : max_tile_tokens * (sums.key_chunks * 32 / group);
  const std::size_t parts =
      of_keys + sums.query_tiles * sums.key_chunks + sums.heads + tile_rows * (sums.value_stride / 32);
  amx_float_requests requests(next, last * key_step + sums.key_elements * bytes,
                              last * value_step + sums.value_elements * bytes, sums.walked * parts);
  for (std::size_t walk = 0; walk < sums.walked; ++walk) {
    multiply_bf16<Element>(tokens, sums, walk, walk * key_step, requests, scratch);
    weigh_bf16(sums, walk, tokens.count, requests, scratch);
    arrange_values<Element>(tokens, walk * value_step, sums, requests, scratch);
    add_bf16(sums, walk, scratch);
  }
#endif
}

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

#endif

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
