/// @file
/// The work of `attention_arithmetic::host_vectors` over codes with scales: a tile's codes become floats once
/// for all query heads.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/code_tiles.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/subnormal_guard.hpp>
#include <llmmem/kernels/detail/vector_output.hpp>
#include <llmmem/kernels/detail/vector_tile.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/vector_path.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/model/fp8.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace llmmem {
inline namespace v0 {
namespace detail {

// Products below are of a tile's lengths, at most 4096. Tiles are large, and written before they are read.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)
// NOLINTBEGIN(modernize-use-using, modernize-use-auto): `using` and `auto` would lose the vectors' size.

/// Codes in a word of 32 bits.
[[nodiscard]] constexpr std::uint32_t codes_in_word(dtype code) noexcept {
  return is_half_byte(code) ? 8 : 4;
}
/// The stride of vectors of codes in a tile: whole groups of words of N lanes.
[[nodiscard]] constexpr std::size_t code_stride(dtype code, std::size_t elements, std::uint32_t n) noexcept {
  const std::size_t group = std::size_t{codes_in_word(code)} * n;
  return (elements + group - 1) / group * group;
}
/// Returns the place of an element of a vector of codes in a tile: as `lane_place`, all first codes of N
/// words, then their second ones.
[[nodiscard]] constexpr std::uint32_t code_place(dtype code, std::uint32_t element,
                                                 std::uint32_t n) noexcept {
  const std::uint32_t words = codes_in_word(code);
  const std::uint32_t in_group = element % (words * n);
  return element - in_group + in_group % words * n + in_group / words;
}

using code_rows = basic_code_rows<max_tile_tokens>;
using code_tile = basic_code_tile<max_tile_tokens>;

/// A plane's scales by channel, of one block, in the order of `code_place`.
struct channel_scales {
  alignas(64) float of[vector_elements];
  const std::byte* from = nullptr;
  float global = 1;
};

/// Which scales a plane has.
enum class scaling : std::uint8_t { by_vector, by_run, by_channel };

/// Converts N words of codes, in the order of `code_place`.
template <dtype Code, unsigned N>
LLMMEM_ALWAYS_INLINE void load_code_words(const std::byte* from,
                                          float_lanes<N> (&to)[codes_in_word(Code)]) noexcept {
  using words = typename lanes_of<N>::words;
  using integers = typename lanes_of<N>::integers;
  using floats = float_lanes<N>;
  words raw;
  std::memcpy(&raw, from, sizeof(raw));
  constexpr int bits = is_half_byte(Code) ? 4 : 8;
  if constexpr (Code == dtype::fp8_e4m3) {
    load_elements<dtype::fp8_e4m3, N>(from, to);
  } else if constexpr (Code == dtype::fp4_e2m1) {
    LLMMEM_LANES_UNROLL
    for (int i = 0; i < 8; ++i) {
      const words code = raw >> (bits * i);
      // With an exponent, the code's bits are those of a float, of another bias. Without one, 1 is added and
      // subtracted: subnormal floats would take a processor a hundred cycles each.
      const words is_small = reinterpret_cast<words>((code & 6U) == 0U);
      const words size = ((code & 7U) << 22) + 0x3F00'0000U + (is_small & 0x0080'0000U);
      const floats number =
          reinterpret_cast<floats>(size) - reinterpret_cast<floats>(words(is_small & 0x3F80'0000U));
      to[i] = reinterpret_cast<floats>(reinterpret_cast<words>(number) | (code & 8U) << 28);
    }
  } else {
    LLMMEM_LANES_UNROLL
    for (int i = 0; i < 32 / bits; ++i) {
      // A signed shift repeats the sign.
      const integers code = reinterpret_cast<integers>(raw << (32 - bits - bits * i)) >> (32 - bits);
#if defined(__CUDACC__)  // nvcc does not know the built-in function
      for (unsigned lane = 0; lane < N; ++lane)
        to[i][lane] = static_cast<float>(code[lane]);
#else
      to[i] = __builtin_convertvector(code, floats);
#endif
    }
  }
}

/// The numbers of all codes of e4m3.
struct e4m3_table {
  float of[256]{};
  constexpr e4m3_table() noexcept {
    for (std::uint32_t code = 0; code < 256; ++code)
      of[code] = std::bit_cast<float>(f32_from_e4m3_bits(static_cast<std::uint8_t>(code)));
  }
};
inline constexpr e4m3_table e4m3_numbers{};

/// Reads a scale: of e4m3 from a table, because vectors have several.
LLMMEM_ALWAYS_INLINE float load_vector_scale(dtype element, const std::byte* from) noexcept {
  return element == dtype::fp8_e4m3 ? e4m3_numbers.of[static_cast<std::size_t>(*from)]
                                    : load_scale(element, from);
}

/// Whether a code may have a zero next to its scale.
template <dtype Code>
inline constexpr bool may_have_zero = Code == dtype::int8 || Code == dtype::int4;

/// The scales of a token's runs, each for as many lanes as it has words; or its zeros, from the first one on.
template <dtype Code>
LLMMEM_ALWAYS_INLINE void spread_runs(const coded_plane& plane, const std::byte* scales, float global,
                                      std::size_t elements, float* to) noexcept {
  const std::size_t run = std::size_t{plane.run.by()} * attention_pack;
  const std::size_t lanes = run / codes_in_word(Code);
  const std::uint32_t bytes = plane.group_bytes();
  for (std::size_t at = 0; at < elements; at += run) {
    const float scale = load_vector_scale(plane.scale, scales) * global;
    scales += bytes;
    to[0] = scale;
    if (lanes > 1) to[1] = scale;  // as most forms have it
    for (std::size_t i = 2; i < lanes; ++i)
      to[i] = scale;
    to += lanes;
  }
}

/// A token's scales and zeros: of its vector, or of its runs.
template <unsigned N>
struct token_scales {
  float_lanes<N> by_vector;
  float_lanes<N> zero_by_vector;
  alignas(64) float by_run[vector_elements];
  alignas(64) float zero_by_run[vector_elements];
};

/// Converts N words of codes from element `e` of a vector on, each code times its scale, plus its zero.
template <dtype Code, scaling Scaling, unsigned N>
LLMMEM_ALWAYS_INLINE void expand_group(const std::byte* from, std::size_t e, const token_scales<N>& of,
                                       const channel_scales& channels, float* row) noexcept {
  constexpr unsigned vectors = codes_in_word(Code);
  float_lanes<N> x[vectors];
  load_code_words<Code, N>(from, x);
  float_lanes<N> scale = of.by_vector;
  float_lanes<N> zero = of.zero_by_vector;
  if constexpr (Scaling == scaling::by_run) {
    load_lanes<N>(of.by_run + e / vectors, scale);
    if constexpr (may_have_zero<Code>) load_lanes<N>(of.zero_by_run + e / vectors, zero);
  }
  LLMMEM_LANES_UNROLL
  for (unsigned i = 0; i < vectors; ++i) {
    if constexpr (Scaling == scaling::by_channel) load_lanes<N>(channels.of + e + i * N, scale);
    if constexpr (may_have_zero<Code> && Scaling != scaling::by_channel) {
      x[i] = x[i] * scale + zero;  // as fast as the product alone, where there are fused sums
    } else {
      x[i] = x[i] * scale;
    }
    store_lanes<N>(x[i], row + e + i * N);
  }
}

/// Converts a tile's vectors of a plane to floats, in the order of `code_place`, up to the stride.
template <dtype Code, scaling Scaling, unsigned N>
LLMMEM_ALWAYS_INLINE void expand_codes(const coded_plane& plane, const code_rows& rows, const code_rows& next,
                                       std::size_t count, std::size_t elements, channel_scales& channels,
                                       vector_scratch& scratch) noexcept {
  constexpr unsigned vectors = codes_in_word(Code);
  constexpr std::size_t group = vectors * N;
  const std::size_t stride = code_stride(Code, elements, N);
  const std::size_t whole = elements / group * group;
  token_scales<N> of;
  if constexpr (may_have_zero<Code> && Scaling == scaling::by_run) {
    if (!plane.has_zero) std::fill_n(of.zero_by_run, vector_elements, 0.0F);
  }
  for (std::size_t t = 0; t < count; ++t) {
    float* const row = scratch.elements + t * stride;
    scratch.rows[t] = reinterpret_cast<const std::byte*>(row);
    of.by_vector = of.zero_by_vector = float_lanes<N>{};
    const std::byte* const zeros = rows.scales[t] + scale_bytes_of(plane.scale);
    if constexpr (Scaling == scaling::by_vector) {
      of.by_vector = of.by_vector + load_vector_scale(plane.scale, rows.scales[t]) * rows.global[t];
      if constexpr (may_have_zero<Code>) {
        if (plane.has_zero)
          of.zero_by_vector = of.zero_by_vector + load_scale(plane.scale, zeros) * rows.global[t];
      }
    } else if constexpr (Scaling == scaling::by_run) {
      spread_runs<Code>(plane, rows.scales[t], rows.global[t], elements, of.by_run);
      if constexpr (may_have_zero<Code>) {
        if (plane.has_zero) spread_runs<Code>(plane, zeros, rows.global[t], elements, of.zero_by_run);
      }
    } else if (channels.from != rows.scales[t] || channels.global != rows.global[t]) {
      channels.from = rows.scales[t];
      channels.global = rows.global[t];
      const std::uint32_t bytes = scale_bytes_of(plane.scale);
      for (std::uint32_t e = 0; e < elements; ++e)
        channels.of[code_place(Code, e, N)] =
            load_scale(plane.scale, channels.from + std::size_t{e} * bytes) * channels.global;
    }
    for (std::size_t e = 0; e < whole; e += group) {
      __builtin_prefetch(next.codes[t] + e / vectors * 4, 0, 2);
      expand_group<Code, Scaling, N>(rows.codes[t] + e / vectors * 4, e, of, channels, row);
    }
    if (whole == elements) continue;
    // Nothing may be read behind the last codes, and a product with what is past the end is nothing.
    std::byte rest[4 * N]{};
    std::memcpy(rest, rows.codes[t] + whole / vectors * 4, (elements - whole) / vectors * 4);
    expand_group<Code, Scaling, N>(rest, whole, of, channels, row);
    for (std::size_t e = elements; e < stride; ++e)
      row[code_place(Code, static_cast<std::uint32_t>(e), N)] = 0;
  }
  for (std::size_t t = count; t < max_tile_tokens; ++t)
    scratch.rows[t] = scratch.rows[0];
}

template <dtype Code, unsigned N>
LLMMEM_ALWAYS_INLINE void expand_scaled(const coded_plane& plane, const code_rows& rows,
                                        const code_rows& next, std::size_t count, std::size_t elements,
                                        channel_scales& channels, vector_scratch& scratch) noexcept {
  if (plane.is_by_channel)
    return expand_codes<Code, scaling::by_channel, N>(plane, rows, next, count, elements, channels, scratch);
  if (plane.run.by() * attention_pack < elements)
    return expand_codes<Code, scaling::by_run, N>(plane, rows, next, count, elements, channels, scratch);
  expand_codes<Code, scaling::by_vector, N>(plane, rows, next, count, elements, channels, scratch);
}
template <unsigned N>
LLMMEM_ALWAYS_INLINE void expand_plane(const coded_plane& plane, const code_rows& rows, const code_rows& next,
                                       std::size_t count, std::size_t elements, channel_scales& channels,
                                       vector_scratch& scratch) noexcept {
  switch (plane.code) {
    case dtype::int8:
      return expand_scaled<dtype::int8, N>(plane, rows, next, count, elements, channels, scratch);
    case dtype::int4:
      return expand_scaled<dtype::int4, N>(plane, rows, next, count, elements, channels, scratch);
    case dtype::fp8_e4m3:
      return expand_scaled<dtype::fp8_e4m3, N>(plane, rows, next, count, elements, channels, scratch);
    default:
      return expand_scaled<dtype::fp4_e2m1, N>(plane, rows, next, count, elements, channels, scratch);
  }
}

/// What a share of codes needs from tile to tile.
struct code_sums {
  vector_sums sums;
  channel_scales key_channels;
  channel_scales value_channels;
};

/// Converts a tile's vectors of a plane: a function of each target, which keys and values share.
using expand_function = void (*)(const coded_plane&, const code_rows&, const code_rows&, std::size_t,
                                 std::size_t, channel_scales&, vector_scratch&) noexcept;

template <unsigned N, expand_function Expand>
LLMMEM_ALWAYS_INLINE void attend_codes_by(const attention_codes& codes, const code_tile& tile,
                                          const code_tile& next, code_sums& of) noexcept {
  vector_scratch scratch;
  vector_sums& sums = of.sums;
  const std::size_t count = tile.count;
  Expand(codes.keys, tile.keys, next.keys, count, sums.key_elements, of.key_channels, scratch);
  multiply<dtype::f32, false, N>({scratch.rows, scratch.rows}, sums, count, scratch.weights);
  for (std::size_t h = 0; h < sums.heads; ++h)
    weigh<N>(sums, h, count, scratch.weights + h * max_tile_tokens);
  Expand(codes.values, tile.values, next.values, count, sums.value_elements, of.value_channels, scratch);
  add_values<dtype::f32, false, N>({scratch.rows, scratch.rows}, scratch.weights, count, sums);
}

inline void expand_baseline(const coded_plane& plane, const code_rows& rows, const code_rows& next,
                            std::size_t count, std::size_t elements, channel_scales& channels,
                            vector_scratch& scratch) noexcept {
  expand_plane<4>(plane, rows, next, count, elements, channels, scratch);
}
inline void attend_codes_baseline(const attention_codes& codes, const code_tile& tile, const code_tile& next,
                                  code_sums& of) noexcept {
  attend_codes_by<4, expand_baseline>(codes, tile, next, of);
}
#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] inline void expand_avx2(const coded_plane& plane, const code_rows& rows,
                                                    const code_rows& next, std::size_t count,
                                                    std::size_t elements, channel_scales& channels,
                                                    vector_scratch& scratch) noexcept {
  expand_plane<8>(plane, rows, next, count, elements, channels, scratch);
}
[[gnu::target("avx2,fma")]] inline void attend_codes_avx2(const attention_codes& codes, const code_tile& tile,
                                                          const code_tile& next, code_sums& of) noexcept {
  attend_codes_by<8, expand_avx2>(codes, tile, next, of);
}
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]] inline void expand_avx512(
    const coded_plane& plane, const code_rows& rows, const code_rows& next, std::size_t count,
    std::size_t elements, channel_scales& channels, vector_scratch& scratch) noexcept {
  expand_plane<16>(plane, rows, next, count, elements, channels, scratch);
}
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]] inline void attend_codes_avx512(
    const attention_codes& codes, const code_tile& tile, const code_tile& next, code_sums& of) noexcept {
  attend_codes_by<16, expand_avx512>(codes, tile, next, of);
}
#endif
/// Adds a tile of tokens to the sums. @param next  the tile after it, with as many pointers
inline void attend_codes_tile(vector_path path, const attention_codes& codes, const code_tile& tile,
                              const code_tile& next, code_sums& of) noexcept {
#if defined(__x86_64__)
  if (path == vector_path::avx512) return attend_codes_avx512(codes, tile, next, of);
  if (path == vector_path::avx2) return attend_codes_avx2(codes, tile, next, of);
#endif
  attend_codes_baseline(codes, tile, next, of);
}

/// As `vector_attention_work`, over codes.
template <class Tables>
class vector_codes_work {
 public:
  vector_codes_work(const attention_shape& shape, const attention_codes& codes, const Tables& tables,
                    vector_path path) noexcept
      : shape_(shape), codes_(codes), tables_(tables), shares_(shape), path_(path) {}

  [[nodiscard]] std::uint64_t items() const noexcept { return shares_.items(shape_); }

  void run(std::uint64_t item) const noexcept {
    const attention_place at = shares_.at(item, shape_, tables_);
    if (at.queries == 0) return;
    // The smallest codes of fp8 and fp4 are subnormal floats on their way to be floats.
    const subnormal_guard exact;
    code_sums of;
    begin(at, of.sums);
    const code_heads heads{head_of(codes_.keys, codes_.layer, at.head),
                           head_of(codes_.values, codes_.layer, at.head)};
    const auto most = static_cast<std::uint32_t>(tile_tokens(
        std::max(stride_of(codes_.keys, shape_.key_packs), stride_of(codes_.values, shape_.value_packs))));
    const auto gather_next = [&](std::uint32_t position, code_tile& tile) {
      return gather_codes(shape_, codes_, tables_, at, heads, position, most, tile);
    };
    code_tile tiles[2];
    std::uint32_t position = gather_next(at.from, tiles[0]);
    for (unsigned turn = 0; tiles[turn].count != 0; turn ^= 1U) {
      position = gather_next(position, tiles[turn ^ 1U]);
      attend_codes_tile(path_, codes_, tiles[turn], tiles[turn ^ 1U], of);
    }
    finish_vectors(shape_, at, of.sums, [&](std::uint32_t pack, std::uint32_t i) {
      return code_place(codes_.values.code, pack * attention_pack + i, lanes_in(path_));
    });
  }

 private:
  void begin(const attention_place& at, vector_sums& sums) const noexcept {
    const std::size_t elements = std::size_t{shape_.key_packs} * attention_pack;
    sums.begin<dtype::f32>(at.queries, elements, std::size_t{shape_.value_packs} * attention_pack,
                           stride_of(codes_.keys, shape_.key_packs),
                           stride_of(codes_.values, shape_.value_packs));
    for (std::uint32_t h = 0; h < at.queries; ++h) {
      float query[vector_elements];
      read_query(shape_, codes_, at, h, query);
      for (std::uint32_t i = 0; i < elements; ++i)
        sums.query[h * sums.key_stride + code_place(codes_.keys.code, i, lanes_in(path_))] =
            query[i] * shape_.scale;
    }
  }

  [[nodiscard]] std::size_t stride_of(const coded_plane& plane, std::uint32_t packs) const noexcept {
    return code_stride(plane.code, std::size_t{packs} * attention_pack, lanes_in(path_));
  }

  attention_shape shape_;
  attention_codes codes_;
  Tables tables_;
  attention_shares<vector_heads> shares_;
  vector_path path_;
};

// NOLINTEND(modernize-use-using, modernize-use-auto)
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result, cppcoreguidelines-pro-type-member-init)

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
