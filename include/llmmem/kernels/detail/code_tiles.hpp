/// @file
/// Tiles of tokens in codes, for the host's vectors: where their codes and scales are, and the queries that
/// meet them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/kv_tokens.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

// NOLINTBEGIN(cppcoreguidelines-pro-type-member-init): tiles are large, and written before they are read

/// Tokens of a tile: a plane's codes, their scales and what scales these.
template <std::size_t Tokens>
struct basic_code_rows {
  const std::byte* codes[Tokens];
  const std::byte* scales[Tokens];
  float global[Tokens];
};
template <std::size_t Tokens>
struct basic_code_tile {
  basic_code_rows<Tokens> keys;
  basic_code_rows<Tokens> values;
  std::uint32_t count = 0;
};

// NOLINTEND(cppcoreguidelines-pro-type-member-init)

template <std::size_t Tokens>
void add_code_run(const coded_plane& plane, const coded_head& head, const token_place& first,
                  std::uint32_t run, std::uint32_t from, basic_code_rows<Tokens>& rows) noexcept {
  const std::byte* codes = codes_at(plane, head, first.block, first.token, 0);
  const std::byte* scales =
      head.scales + first.block * plane.scales.strides.block + first.token * plane.scales.strides.token;
  float global = head.global;
  if (plane.has_global)
    global = load_scale(dtype::f32, head.globals + first.block * plane.globals.strides.block);
  for (std::uint32_t i = from; i < from + run; ++i) {
    rows.codes[i] = codes;
    rows.scales[i] = scales;
    rows.global[i] = global;
    codes += plane.codes.strides.token;
    scales += plane.scales.strides.token;
  }
}

/// The planes of a head of the cache.
struct code_heads {
  coded_head keys;
  coded_head values;
};

/// Finds the next tokens that count, from a position on, at most `most`. Returns the position after them.
template <class Tables, std::size_t Tokens>
std::uint32_t gather_codes(const attention_shape& shape, const attention_codes& codes, const Tables& tables,
                           const attention_place& at, const code_heads& heads, std::uint32_t position,
                           std::uint32_t most, basic_code_tile<Tokens>& tile) noexcept {
  tile.count = 0;
  position = std::max(position, at.span.first);
  while (position < at.to && tile.count < most) {
    const token_place first = counted_place(shape, tables, at, position);
    std::uint32_t run = 1;
    if constexpr (!token_tables<Tables>)
      run = std::min(shape.by.by() - shape.by.remainder(position), at.to - position);
    if (first.what == token_place::kind::in_cache) {
      run = std::min(run, most - tile.count);
      add_code_run(codes.keys, heads.keys, first, run, tile.count, tile.keys);
      add_code_run(codes.values, heads.values, first, run, tile.count, tile.values);
      tile.count += run;
    }
    position += run;
  }
  // The rest of a tile is requested as its first token.
  const auto fill = [&](basic_code_rows<Tokens>& rows, const coded_head& head) {
    std::fill(rows.codes + tile.count, rows.codes + most, tile.count == 0 ? head.codes : rows.codes[0]);
    std::fill(rows.scales + tile.count, rows.scales + most, tile.count == 0 ? head.scales : rows.scales[0]);
  };
  fill(tile.keys, heads.keys);
  fill(tile.values, heads.values);
  return position;
}

/// Turns a vector as `rotate_lanes` does. @param packs  of a block
inline void rotate_vector(float* x, std::size_t elements, std::size_t packs, float factor) noexcept {
  for (std::size_t step = 1; step < packs * attention_pack; step *= 2) {
    for (std::size_t i = 0; i < elements; ++i) {
      if ((i & step) != 0) continue;
      const float a = x[i];
      const float b = x[i + step];
      x[i] = a + b;
      x[i + step] = a - b;
    }
  }
  for (std::size_t i = 0; i < elements; ++i)
    x[i] = product_of(x[i], factor);
}

/// Reads the query of a head, turned as the keys are.
inline void read_query(const attention_shape& shape, const attention_codes& codes, const attention_place& at,
                       std::uint32_t head, float* query) noexcept {
  for (std::uint32_t pack = 0; pack < shape.key_packs; ++pack) {
    const attention_floats some = read_floats(query_at(shape, at, head, pack), shape.element);
    std::copy(some.of, some.of + attention_pack, query + std::size_t{pack} * attention_pack);
  }
  if (codes.keys.rotated_packs != 0)
    rotate_vector(query, std::size_t{shape.key_packs} * attention_pack, codes.keys.rotated_packs,
                  codes.keys.rotation);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
