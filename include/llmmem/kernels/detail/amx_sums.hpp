/// @file
/// Heads of the cache that attention by AMX reads together: their queries and sums, tiles of their tokens,
/// and requests of the next tile.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/amx_tiles.hpp>
#include <llmmem/kernels/detail/code_tiles.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/detail/integer_tile.hpp>
#include <llmmem/kernels/detail/vector_heads.hpp>
#include <llmmem/kernels/detail/vector_tile.hpp>
#include <llmmem/model/dtype.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

#if defined(__x86_64__)

// Products below are of a tile's lengths, at most 16384. Tiles are large, and written before they are read.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

/// Rows of a tile of AMX, and words and bytes of a row.
inline constexpr std::size_t tile_rows = 16;
inline constexpr std::size_t tile_row_bytes = 64;

/// What a head of the cache needs from tile to tile, for the query head i % pitch in lane i.
struct amx_head {
  alignas(64) float scales[widest_lanes];      // of products
  alignas(64) float query_sums[widest_lanes];  // what zeros of keys multiply
  alignas(64) float most[widest_lanes];        // of the products
  alignas(64) float totals[widest_lanes];      // of the exponentials
};

/// Heads of the cache that are read together, and what came of the tokens so far.
struct amx_sums {
  alignas(64) std::uint32_t queries[walked_elements / 4];  // of each head: [4 codes of keys][pitch]
  alignas(64) float sums[walked_elements];                 // of each head: [queries][value_stride]
  amx_head heads[most_walked];
  dtype key_code = dtype::int8;
  dtype value_code = dtype::int8;
  std::size_t walked = 0;      // heads of the cache
  std::size_t queries_of = 0;  // query heads of each
  std::size_t pitch = 0;
  std::size_t key_bytes = 0;
  std::size_t value_bytes = 0;
  std::size_t key_chunks = 0;  // rows of tiles of codes
  std::size_t value_stride = 0;

  void begin(std::size_t of_heads, std::size_t of_queries, dtype keys, dtype values, std::size_t key_elements,
             std::size_t value_elements) noexcept {
    walked = of_heads;
    queries_of = of_queries;
    pitch = lane_pitch(of_queries);
    key_code = keys;
    value_code = values;
    key_bytes = key_elements / codes_in_byte(keys);
    value_bytes = value_elements / codes_in_byte(values);
    key_chunks = (key_bytes + tile_row_bytes - 1) / tile_row_bytes * codes_in_byte(keys);
    value_stride = integer_stride(values, value_elements, widest_lanes);
    std::fill_n(queries, walked * query_step(), 0U);
    std::fill_n(sums, walked * queries_of * value_stride, 0.0F);
    for (std::size_t w = 0; w < walked; ++w) {
      std::fill_n(heads[w].most, widest_lanes, lowest());
      std::fill_n(heads[w].totals, widest_lanes, 0.0F);
    }
  }
  /// Returns the words of the queries of a head of the cache.
  [[nodiscard]] std::size_t query_step() const noexcept { return key_chunks * tile_rows * pitch; }
  /// Stores a query head. Codes of four bits come as rows of the lower halves of bytes, then of the upper
  /// ones, both times 16.
  void set_query(std::size_t walk, std::size_t h, const integer_query& of) noexcept {
    const std::size_t in_byte = codes_in_byte(key_code);
    std::uint32_t* const words = queries + walk * query_step();
    for (std::size_t i = 0; i < key_bytes * in_byte; ++i) {
      const std::size_t byte = i / in_byte;
      const std::size_t at =
          (byte / tile_row_bytes * in_byte + i % in_byte) * tile_row_bytes + byte % tile_row_bytes;
      words[at / 4 * pitch + h] |= (static_cast<std::uint32_t>(of.codes[i]) & 0xFFU) << (at % 4 * 8);
    }
    const float unit = in_byte == 2 ? 1.0F / 16 : 1.0F;
    for (std::size_t lane = h; lane < widest_lanes; lane += pitch) {
      heads[walk].scales[lane] = of.scale * unit;
      heads[walk].query_sums[lane] = of.all;
    }
  }
  /// What `finish_vectors` reads of a head of the cache.
  struct of_head {
    const float* sum;
    const float* most;
    const float* totals;
    std::size_t value_stride;
    std::size_t pitch;
    [[nodiscard]] float total(std::size_t h) const noexcept {
      float all = 0;
      for (std::size_t lane = h; lane < widest_lanes; lane += pitch)
        all += totals[lane];
      return all;
    }
  };
  [[nodiscard]] of_head head(std::size_t walk) const noexcept {
    return {sums + walk * queries_of * value_stride, heads[walk].most, heads[walk].totals, value_stride,
            pitch};
  }
  /// 0 to 2: keys' products, and queries; 3 and 4: keys or values; 5: weights; 6 and 7: sums of values.
  [[nodiscard]] tile_shapes shapes() const noexcept {
    tile_shapes out;
    for (unsigned tile = 0; tile < 3; ++tile)
      out.set(tile, tile_rows, 4 * pitch);
    for (unsigned tile = 3; tile < 5; ++tile)
      out.set(tile, tile_rows, tile_row_bytes);
    for (unsigned tile = 5; tile < 8; ++tile)
      out.set(tile, queries_of, tile_row_bytes);
    return out;
  }
};

/// A tile for all heads that are read together: addresses are those of the first.
struct amx_tile {
  integer_tile of;
  std::size_t key_steps[integer_tile_tokens / tile_rows];  // between 16 tokens, or 0: not one
};

/// Values are arranged and added up to this many elements of a vector at a time.
inline constexpr std::size_t value_part = 128;
static_assert(vector_elements == 2 * value_part);

/// Steps go through all heads of a tile, so that the processor begins with a head while it waits for another.
/// Two buffers serve twice, because a thread's stack is small.
struct amx_scratch {
  /// Of each head: [tokens][pitch]. After the weights, of one part of values: [16 elements][queries][16].
  alignas(64) std::int32_t products[walked_lanes * integer_tile_tokens];
  alignas(64) float weights[vector_heads * integer_tile_tokens];  // of one, in the same way
  /// Two parts of values. Before them, keys of 32 tokens.
  alignas(64) std::uint32_t values[2][integer_tile_tokens * value_part / 4]{};
  alignas(64) std::uint32_t codes[vector_heads * integer_tile_tokens / 4];
  alignas(64) std::uint32_t weight_rows[walked_lanes * integer_tile_tokens / 4];  // of each head: [pitch][16]
  alignas(64) float key_scales[integer_tile_tokens];
  alignas(64) float value_scales[integer_tile_tokens];
  alignas(64) float key_zeros[integer_tile_tokens];
  alignas(64) float value_zeros[integer_tile_tokens];
  float scales[most_walked][widest_lanes];  // of the weights' codes

  [[nodiscard]] std::int32_t* added() noexcept { return products; }
  [[nodiscard]] std::byte* keys() noexcept { return reinterpret_cast<std::byte*>(values); }
};
static_assert(vector_heads * value_part <= walked_lanes * integer_tile_tokens);
static_assert(2 * tile_rows * vector_elements <= 2 * integer_tile_tokens * value_part);

/// A head's planes within those of the first head: what to add to addresses, and what scales the scales.
struct amx_plane {
  const coded_plane* plane;
  std::size_t codes;
  std::size_t scales;
  float global;
};

/// Requests the tile after this one in the order of memory, all heads of a token at once, a part at a time.
struct amx_requests {
  const integer_tile* next;
  std::size_t key_lines;  // of the codes of all heads, and of their scales
  std::size_t value_lines;
  std::size_t key_scale_lines;
  std::size_t value_scale_lines;
  std::size_t parts;
  std::size_t part = 0;

  /// Returns the lines of 64 bytes that bytes take, from any on: those of planes begin at multiples of 8.
  [[nodiscard]] static constexpr std::size_t lines_in(std::size_t bytes) noexcept {
    return bytes % 64 == 0 ? bytes / 64 : (bytes + 56) / 64 + 1;
  }
  LLMMEM_ALWAYS_INLINE static void request(const std::byte* from, std::size_t lines) noexcept {
    for (; lines != 0; --lines, from += 64)
      __builtin_prefetch(from, 0, 2);
  }
  LLMMEM_ALWAYS_INLINE void some() noexcept {
    constexpr std::size_t all = 2 * integer_tile_tokens;
    std::size_t from = part * all / parts;
    const std::size_t to = ++part * all / parts;
    for (; from < to; ++from) {
      const std::size_t t = from / 2;
      if (from % 2 == 0) {
        request(next->keys.codes[t], key_lines);
        request(next->keys.scales[t], key_scale_lines);
      } else {
        request(next->values.codes[t], value_lines);
        request(next->values.scales[t], value_scale_lines);
      }
    }
  }
};
/// Parts for each head of the cache.
inline constexpr std::size_t requests_a_head = 16;

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

#endif

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
