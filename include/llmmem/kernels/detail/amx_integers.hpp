/// @file
/// Attention of the query heads of heads of the cache to a tile of tokens in codes, by products of AMX: keys
/// are multiplied where they are in the cache.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/amx_sums.hpp>
#include <llmmem/kernels/detail/amx_tiles.hpp>
#include <llmmem/kernels/detail/amx_weights.hpp>
#include <llmmem/kernels/detail/code_tiles.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/integer_lanes.hpp>
#include <llmmem/kernels/detail/integer_tile.hpp>
#include <llmmem/kernels/detail/vector_lanes.hpp>
#include <llmmem/kernels/detail/vector_tile.hpp>
#include <llmmem/model/dtype.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace llmmem {
inline namespace v0 {
namespace detail {

#if defined(__x86_64__)

// Products below are of a tile's lengths, at most 16384. Tiles are large, and written before they are read.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

/// Copies a row of keys: those of four bits as bytes, 16 times as large.
template <dtype Code>
LLMMEM_ALWAYS_INLINE void copy_key_row(const word_lanes<widest_lanes>& raw, std::byte* to) noexcept {
  using words = word_lanes<widest_lanes>;
  if constexpr (Code == dtype::int8) {
    std::memcpy(to, &raw, tile_row_bytes);
  } else {
    const words even = (raw << 4) & 0xF0F0'F0F0U;
    const words odd = raw & 0xF0F0'F0F0U;
    std::memcpy(to, &even, tile_row_bytes);
    std::memcpy(to + tile_row_bytes, &odd, tile_row_bytes);
  }
}
/// Copies the keys of 16 tokens to rows of 256 bytes, with zeros after their last.
template <dtype Code>
LLMMEM_ALWAYS_INLINE void copy_keys(std::size_t bytes, const std::byte* const* rows, std::size_t offset,
                                    std::byte* to) noexcept {
  constexpr std::size_t in_byte = codes_in_byte(Code);
  word_lanes<widest_lanes> raw{};
  if (bytes == tile_row_bytes) {
    for (std::size_t t = 0; t < tile_rows; ++t) {
      std::memcpy(&raw, rows[t] + offset, tile_row_bytes);
      copy_key_row<Code>(raw, to + t * vector_elements);
    }
    return;
  }
  for (std::size_t t = 0; t < tile_rows; ++t) {
    for (std::size_t from = 0; from < bytes; from += tile_row_bytes) {
      raw = word_lanes<widest_lanes>{};
      std::memcpy(&raw, rows[t] + offset + from, std::min(bytes - from, tile_row_bytes));
      copy_key_row<Code>(raw, to + t * vector_elements + from * in_byte);
    }
  }
}

/// Makes the products of a head's queries with the tokens of a tile.
LLMMEM_ALWAYS_INLINE void multiply_keys(const amx_sums& of, const amx_tile& tile, std::size_t walk,
                                        std::size_t offset, amx_requests& next,
                                        amx_scratch& scratch) noexcept {
  const std::uint32_t* const query = of.queries + walk * of.query_step();
  std::int32_t* const products = scratch.products + walk * of.pitch * integer_tile_tokens;
  const bool is_whole = of.key_code == dtype::int8 && of.key_bytes % tile_row_bytes == 0;
  for (std::size_t pair = 0; pair < integer_tile_tokens; pair += 2 * tile_rows) {
    const std::byte* from[2];
    std::size_t step[2];
    for (std::size_t i = 0; i < 2; ++i) {
      const std::size_t t = pair + i * tile_rows;
      step[i] = tile.key_steps[t / tile_rows];
      from[i] = tile.of.keys.codes[t] + offset;
      if (is_whole && step[i] != 0) continue;
      std::byte* const copy = scratch.keys() + i * tile_rows * vector_elements;
      if (of.key_code == dtype::int8) {
        copy_keys<dtype::int8>(of.key_bytes, tile.of.keys.codes + t, offset, copy);
      } else {
        copy_keys<dtype::int4>(of.key_bytes, tile.of.keys.codes + t, offset, copy);
      }
      from[i] = copy;
      step[i] = vector_elements;
    }
    clear_tile<0>();
    clear_tile<1>();
    for (std::size_t chunk = 0; chunk < of.key_chunks; ++chunk) {
      load_tile<2>(query + chunk * tile_rows * of.pitch, 4 * of.pitch);
      load_tile<3>(from[0] + chunk * tile_row_bytes, step[0]);
      add_signed_dots<0, 3, 2>();
      load_tile<4>(from[1] + chunk * tile_row_bytes, step[1]);
      add_signed_dots<1, 4, 2>();
    }
    next.some();
    next.some();
    store_tile<0>(products + pair * of.pitch, 4 * of.pitch);
    store_tile<1>(products + (pair + tile_rows) * of.pitch, 4 * of.pitch);
  }
}

/// Puts a part of the values of four tokens into words, those of four bits times 16: the tokens whose weights
/// are in a word.
/// @param first  the part's first element
template <dtype Code, unsigned Pitch>
LLMMEM_ALWAYS_INLINE void arrange_amx_values(const amx_sums& of, const amx_tile& tile, std::size_t offset,
                                             std::size_t first, amx_requests& next,
                                             std::uint32_t* to) noexcept {
  constexpr std::size_t apart = 16 / Pitch;
  const std::size_t from = first / codes_in_byte(Code);
  const std::size_t end = std::min(of.value_bytes, from + value_part / codes_in_byte(Code));
  for (std::size_t word = 0; word < tile_rows; ++word) {
    const std::size_t token = word / apart * apart * 4 + word % apart;
    const std::byte* rows[4];
    for (std::size_t i = 0; i < 4; ++i)
      rows[i] = tile.of.values.codes[token + i * apart] + offset;
    for (std::size_t at = from; at < end; at += tile_row_bytes) {
      byte_lanes<16> x[4];
      load_tokens<4>(rows, at, of.value_bytes - at, x);
      alternate_tokens<16>(x);
      LLMMEM_LANES_UNROLL
      for (const byte_lanes<16>& each : x) {
        const auto raw = reinterpret_cast<word_lanes<16>>(each);
        if constexpr (Code == dtype::int8) {
          std::memcpy(to, &raw, sizeof(raw));
          to += 16;
        } else {
          const word_lanes<16> even = (raw << 4) & 0xF0F0'F0F0U;
          const word_lanes<16> odd = raw & 0xF0F0'F0F0U;
          std::memcpy(to, &even, sizeof(even));
          std::memcpy(to + 16, &odd, sizeof(odd));
          to += 32;
        }
      }
    }
    if (first == 0 && word % 2 == 0) next.some();
  }
}

/// Adds a part of the weighted values of a tile to the sums of a head.
/// @param part  of all heads
/// @param two  1 if each head has two parts, else 0
LLMMEM_ALWAYS_INLINE void add_amx_values(amx_sums& of, std::size_t part, std::size_t two,
                                         amx_scratch& scratch) noexcept {
  const std::size_t walk = part >> two;
  const std::size_t first = (part & two) * value_part;
  const std::uint32_t* const values = scratch.values[part % 2];
  std::int32_t* const sums = scratch.added();
  const std::size_t length = std::min(value_part, of.value_stride - first);
  load_tile<5>(scratch.weight_rows + walk * of.pitch * 16, tile_row_bytes);
  const std::size_t step = length * 4;
  for (std::size_t e = 0; e < length; e += 32) {
    clear_tile<6>();
    load_tile<3>(values + e, step);
    add_unsigned_dots<6, 5, 3>();
    store_tile<6>(sums + e * vector_heads, tile_row_bytes);
    clear_tile<7>();
    load_tile<4>(values + e + 16, step);
    add_unsigned_dots<7, 5, 4>();
    store_tile<7>(sums + (e + 16) * vector_heads, tile_row_bytes);
  }
  const float unit = is_half_byte(of.value_code) ? 1.0F / 16 : 1.0F;
  float* to = of.sums + walk * of.queries_of * of.value_stride + first;
  for (std::size_t h = 0; h < of.queries_of; ++h, to += of.value_stride) {
    const float scale = scratch.scales[walk][h] * unit;
    for (std::size_t e = 0; e < length; e += 16) {
      integer_lanes<16> added;
      std::memcpy(&added, sums + e * vector_heads + h * 16, sizeof(added));
      float_lanes<16> x;
      float_lanes<16> all;
      convert_lanes<16>(added, x);
      load_lanes<16>(to + e, all);
      all = x * scale + all;
      store_lanes<16>(all, to + e);
    }
  }
}

/// The planes of each of the heads that are read together.
struct amx_planes {
  amx_plane keys[most_walked];
  amx_plane values[most_walked];
};

/// Makes weights of all products.
template <unsigned Pitch>
LLMMEM_ALWAYS_INLINE void weigh_heads(const attention_codes& codes, const amx_tile& tile, amx_sums& of,
                                      const amx_planes& planes, amx_requests& next,
                                      amx_scratch& scratch) noexcept {
  const std::size_t count = tile.of.count;
  for (std::size_t w = 0; w < of.walked; ++w) {
    const amx_plane& keys = planes.keys[w];
    const amx_plane& values = planes.values[w];
    load_amx_scales(keys, tile.of.keys, count, scratch.key_scales);
    next.some();
    load_amx_scales(values, tile.of.values, count, scratch.value_scales);
    next.some();
    if (codes.keys.has_zero)
      load_amx_numbers(keys, tile.of.keys, count, scale_bytes_of(codes.keys.scale), scratch.key_zeros);
    if (codes.values.has_zero)
      load_amx_numbers(values, tile.of.values, count, scale_bytes_of(codes.values.scale),
                       scratch.value_zeros);
    weigh_head<Pitch>(codes, of, w, count, scratch, scratch.scales[w]);
    next.some();
    next.some();
    store_weight_rows<Pitch>(scratch.codes, scratch.weight_rows + w * Pitch * 16);
  }
}

/// Adds a tile to the sums.
template <unsigned Pitch>
LLMMEM_ALWAYS_INLINE void attend_amx_by(const attention_codes& codes, const amx_tile& tile, amx_sums& of,
                                        const amx_planes& planes, amx_requests& next,
                                        amx_scratch& scratch) noexcept {
  for (std::size_t w = 0; w < of.walked; ++w)
    multiply_keys(of, tile, w, planes.keys[w].codes, next, scratch);
  weigh_heads<Pitch>(codes, tile, of, planes, next, scratch);
  const std::size_t two = of.value_stride > value_part ? 1 : 0;
  const std::size_t parts = of.walked << two;
  for (std::size_t i = 0; i < parts; ++i) {
    const std::size_t from = planes.values[i >> two].codes;
    const std::size_t first = (i & two) * value_part;
    if (of.value_code == dtype::int8) {
      arrange_amx_values<dtype::int8, Pitch>(of, tile, from, first, next, scratch.values[i % 2]);
    } else {
      arrange_amx_values<dtype::int4, Pitch>(of, tile, from, first, next, scratch.values[i % 2]);
    }
    // What was just stored is read later: tiles would wait for it.
    if (i != 0) add_amx_values(of, i - 1, two, scratch);
  }
  add_amx_values(of, parts - 1, two, scratch);
}

/// Adds a tile to the sums. nvcc's compiler for devices crashes on its body, and needs none.
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,amx-tile,amx-int8")]] inline void attend_amx(
    [[maybe_unused]] const attention_codes& codes, [[maybe_unused]] const amx_tile& tile,
    [[maybe_unused]] amx_sums& of, [[maybe_unused]] const amx_planes& planes,
    [[maybe_unused]] amx_requests& next, [[maybe_unused]] amx_scratch& scratch) noexcept {
#if !defined(__CUDA_ARCH__)
  if (of.pitch == 1) return attend_amx_by<1>(codes, tile, of, planes, next, scratch);
  if (of.pitch == 4) return attend_amx_by<4>(codes, tile, of, planes, next, scratch);
  if (of.pitch == 8) return attend_amx_by<8>(codes, tile, of, planes, next, scratch);
  attend_amx_by<16>(codes, tile, of, planes, next, scratch);
#endif
}

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

#endif

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
