/// @file
/// The work of `attention_arithmetic::host_vectors` over records of latents: a tile's records become floats
/// once for eight query heads, which multiply keys and add values from the same floats.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/latent_rows.hpp>
#include <llmmem/kernels/detail/subnormal_guard.hpp>
#include <llmmem/kernels/detail/vector_codes.hpp>
#include <llmmem/kernels/detail/vector_output.hpp>
#include <llmmem/kernels/detail/vector_tile.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/vector_path.hpp>
#include <llmmem/model/dtype.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace llmmem {
inline namespace v0 {
namespace detail {

// Products below are of a tile's lengths. Tiles are large, and written before they are read.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

/// Query heads of an item, tokens of a tile, and floats of a key and of a value at most.
inline constexpr std::uint32_t latent_vector_heads = 8;
inline constexpr std::size_t latent_tile_tokens = 16;
inline constexpr std::size_t latent_key_floats = 768;
inline constexpr std::size_t latent_value_floats = 768;

using latent_sums = basic_vector_sums<latent_vector_heads, latent_key_floats, latent_value_floats>;

/// Elements in a word of 32 bits.
[[nodiscard]] constexpr std::uint32_t record_words(dtype element) noexcept {
  if (element == dtype::f32) return 1;
  return is_record_code(element) ? codes_in_word(element) : 2;
}
/// A part of a key in a tile: latents, or the rotary part.
struct latent_part {
  dtype element = dtype::bf16;
  std::uint32_t elements = 0;
  std::uint32_t stride = 0;  // floats, whole groups of words

  [[nodiscard]] static latent_part of(dtype element, std::uint32_t elements, std::uint32_t n) noexcept {
    const std::uint32_t group = record_words(element) * n;
    return {element, elements, (elements + group - 1) / group * group};
  }
  /// Returns where an element comes to: all first elements of N words, then their second ones.
  [[nodiscard]] std::uint32_t place(std::uint32_t i, std::uint32_t n) const noexcept {
    if (element == dtype::f16 && is_converted_in_order<dtype::f16>(n)) return i;
    const std::uint32_t words = record_words(element);
    const std::uint32_t in_group = i % (words * n);
    return i - in_group + in_group % words * n + in_group / words;
  }
};

/// Records of a tile.
struct latent_tile {
  latent_row rows[latent_tile_tokens];
  std::uint32_t count = 0;
};

/// What a share needs from tile to tile.
struct latent_share {
  latent_sums sums;
  latent_part latents;
  latent_part rotary;
  float outer = 1;
};

template <dtype Element, unsigned N>
LLMMEM_ALWAYS_INLINE void load_latents(const std::byte* from,
                                       float_lanes<N> (&to)[record_words(Element)]) noexcept {
  if constexpr (is_record_code(Element)) {
    load_code_words<Element, N>(from, to);
  } else {
    load_elements<Element, N>(from, to);
  }
}

/// Converts a part of a record, up to its stride. @param by_word  the scale of each word; of codes
template <dtype Element, unsigned N>
LLMMEM_ALWAYS_INLINE void expand_part(const std::byte* from, const latent_part& of, const float* by_word,
                                      float* row) noexcept {
  constexpr unsigned words = record_words(Element);
  constexpr std::size_t group = words * N;
  float_lanes<N> x[words];
  for (std::size_t e = 0; e < of.stride; e += group) {
    const std::byte* at = from + e / words * 4;
    std::byte rest[4 * N];
    if (e + group > of.elements) {
      // Nothing may be read behind the last elements.
      std::memset(rest, 0, sizeof(rest));
      std::memcpy(rest, at, (of.elements - e) / words * 4);
      at = rest;
    }
    load_latents<Element, N>(at, x);
    float_lanes<N> scale{};
    if constexpr (is_record_code(Element)) load_lanes<N>(by_word + e / words, scale);
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < words; ++i) {
      if constexpr (is_record_code(Element)) x[i] = x[i] * scale;
      store_lanes<N>(x[i], row + e + i * N);
    }
  }
}
template <unsigned N>
LLMMEM_ALWAYS_INLINE void expand_any(const std::byte* from, const latent_part& of, const float* by_word,
                                     float* row) noexcept {
  switch (of.element) {
    case dtype::f32:
      return expand_part<dtype::f32, N>(from, of, by_word, row);
    case dtype::f16:
      return expand_part<dtype::f16, N>(from, of, by_word, row);
    case dtype::fp8_e4m3:
      return expand_part<dtype::fp8_e4m3, N>(from, of, by_word, row);
    case dtype::fp4_e2m1:
      return expand_part<dtype::fp4_e2m1, N>(from, of, by_word, row);
    default:
      return expand_part<dtype::bf16, N>(from, of, by_word, row);
  }
}

/// The scale of each word of a part, zeros past its end. @param pack  the first of the part
inline void spread_factors(const latent_plane& plane, const latent_row& row, float outer,
                           const latent_part& of, std::uint32_t pack, float* by_word) noexcept {
  if (!is_record_code(of.element)) return;
  const std::uint32_t words = record_words(of.element);
  const std::uint32_t a_pack = attention_pack / words;
  const bool has_groups = pack < plane.latent_packs && plane.record.group != 0;
  const std::uint32_t a_group = has_groups ? a_pack << plane.group_bits : of.elements / words;
  std::uint32_t w = 0;
  for (; w < of.elements / words; w += a_group)
    std::fill_n(by_word + w, a_group, factor_at(plane, row, outer, pack + w / a_pack));
  std::fill(by_word + w, by_word + of.stride / words, 0.0F);
}

template <unsigned N>
LLMMEM_ALWAYS_INLINE void attend_latents_by(const latent_plane& plane, const latent_tile& tile,
                                            latent_share& of) noexcept {
  alignas(64) float floats[latent_tile_tokens * latent_key_floats];
  alignas(64) float weights[latent_vector_heads * max_tile_tokens];
  alignas(64) float by_word[latent_key_floats];
  const std::byte* rows[max_tile_tokens]{};
  const std::size_t stride = of.sums.key_stride;
  for (std::size_t t = 0; t < tile.count; ++t) {
    const latent_row& at = tile.rows[t];
    float* const row = floats + t * stride;
    rows[t] = reinterpret_cast<const std::byte*>(row);
    spread_factors(plane, at, of.outer, of.latents, 0, by_word);
    expand_any<N>(at.row + plane.record.latents_at, of.latents, by_word, row);
    if (of.rotary.elements == 0) continue;
    spread_factors(plane, at, of.outer, of.rotary, plane.latent_packs, by_word);
    expand_any<N>(at.row + plane.record.rotary_at, of.rotary, by_word, row + of.latents.stride);
  }
  std::fill(rows + tile.count, rows + max_tile_tokens, rows[0]);
  multiply<dtype::f32, false, N>({rows, rows}, of.sums, tile.count, weights);
  for (std::size_t h = 0; h < of.sums.heads; ++h)
    weigh<N>(of.sums, h, tile.count, weights + h * max_tile_tokens);
  add_values<dtype::f32, false, N>({rows, rows}, weights, tile.count, of.sums);
}

inline void attend_latents_baseline(const latent_plane& plane, const latent_tile& tile,
                                    latent_share& of) noexcept {
  attend_latents_by<4>(plane, tile, of);
}
#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] inline void attend_latents_avx2(const latent_plane& plane,
                                                            const latent_tile& tile,
                                                            latent_share& of) noexcept {
  attend_latents_by<8>(plane, tile, of);
}
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]] inline void attend_latents_avx512(
    const latent_plane& plane, const latent_tile& tile, latent_share& of) noexcept {
  attend_latents_by<16>(plane, tile, of);
}
#endif
/// Adds a tile of records to the sums.
inline void attend_latents_tile(vector_path path, const latent_plane& plane, const latent_tile& tile,
                                latent_share& of) noexcept {
#if defined(__x86_64__)
  if (path == vector_path::avx512) return attend_latents_avx512(plane, tile, of);
  if (path == vector_path::avx2) return attend_latents_avx2(plane, tile, of);
#endif
  attend_latents_baseline(plane, tile, of);
}

/// As `vector_attention_work`, over records.
template <class Tables>
class vector_latents_work {
 public:
  vector_latents_work(const attention_shape& shape, const latent_plane& plane, const Tables& tables,
                      vector_path path) noexcept
      : shape_(shape), plane_(plane), tables_(tables), shares_(shape), path_(path) {}

  [[nodiscard]] std::uint64_t items() const noexcept { return shares_.items(shape_); }

  void run(std::uint64_t item) const noexcept {
    const attention_place at = shares_.at(item, shape_, tables_);
    if (at.queries == 0) return;
    // The smallest codes of fp8 and fp4 are subnormal floats on their way to be floats.
    const subnormal_guard exact;
    const latent_base base = base_of(plane_, shape_.layer);
    latent_share of;
    begin(at, base, of);
    latent_tile tile;
    for (std::uint32_t position = gather(at, base, at.from, tile); tile.count != 0;
         position = gather(at, base, position, tile))
      attend_latents_tile(path_, plane_, tile, of);
    finish_vectors(shape_, at, of.sums,
                   [&](std::uint32_t pack, std::uint32_t i) { return place(of, pack * attention_pack + i); });
  }

 private:
  [[nodiscard]] std::uint32_t place(const latent_share& of, std::uint32_t i) const noexcept {
    const std::uint32_t n = lanes_in(path_);
    if (i < of.latents.elements) return of.latents.place(i, n);
    return of.latents.stride + of.rotary.place(i - of.latents.elements, n);
  }

  void begin(const attention_place& at, const latent_base& base, latent_share& of) const noexcept {
    const paging::latent_record& record = plane_.record;
    of.latents = latent_part::of(record.latent_element, record.latents, lanes_in(path_));
    of.rotary = latent_part::of(record.rotary_element, record.rotary, lanes_in(path_));
    of.outer = base.outer;
    const std::size_t all = of.latents.stride + of.rotary.stride;
    of.sums.template begin<dtype::f32>(at.queries, record.key_elements(), record.value_elements(), all,
                                       record.rotary_in_values ? all : of.latents.stride);
    for (std::uint32_t h = 0; h < at.queries; ++h) {
      for (std::uint32_t pack = 0; pack < shape_.key_packs; ++pack) {
        const attention_floats query = read_floats(query_at(shape_, at, h, pack), shape_.element);
        for (std::uint32_t i = 0; i < attention_pack; ++i)
          of.sums.query[h * all + place(of, pack * attention_pack + i)] = query.of[i] * shape_.scale;
      }
    }
  }

  /// Finds the next tokens that count, from a position on. Returns the position after them.
  std::uint32_t gather(const attention_place& at, const latent_base& base, std::uint32_t position,
                       latent_tile& tile) const noexcept {
    tile.count = 0;
    position = std::max(position, at.span.first);
    for (; position < at.to && tile.count < latent_tile_tokens; ++position) {
      const token_place token = counted_place(shape_, tables_, at, position);
      if (token.what == token_place::kind::in_cache) tile.rows[tile.count++] = row_at(plane_, base, token);
    }
    return position;
  }

  attention_shape shape_;
  latent_plane plane_;
  Tables tables_;
  attention_shares<latent_vector_heads> shares_;
  vector_path path_;
};

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
