/// @file
/// Keys and values in codes as tensor cores take them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/aligned_access.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/coded_planes.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/tensor_forms.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/model/dtype.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Two halves, the first in the lower bits: a - b, and a b + c. For numbers whose results halves can hold.
[[nodiscard]] LLMMEM_HD inline std::uint32_t halves_less(std::uint32_t a, std::uint32_t b) noexcept {
#if defined(__CUDA_ARCH__)
  std::uint32_t out = 0;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
#else
  const float_pair x = floats_of_pair<dtype::f16>(a);
  const float_pair y = floats_of_pair<dtype::f16>(b);
  return nearest_pair<dtype::f16>(x.first - y.first, x.second - y.second);
#endif
}
[[nodiscard]] LLMMEM_HD inline std::uint32_t halves_fused(std::uint32_t a, std::uint32_t b,
                                                          std::uint32_t c) noexcept {
#if defined(__CUDA_ARCH__)
  std::uint32_t out = 0;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
#else
  const float_pair x = floats_of_pair<dtype::f16>(a);
  const float_pair y = floats_of_pair<dtype::f16>(b);
  const float_pair z = floats_of_pair<dtype::f16>(c);
  return nearest_pair<dtype::f16>(x.first * y.first + z.first, x.second * y.second + z.second);
#endif
}
[[nodiscard]] LLMMEM_HD inline std::uint32_t halves_times(std::uint32_t a, std::uint32_t b) noexcept {
#if defined(__CUDA_ARCH__)
  std::uint32_t out = 0;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
#else
  const float_pair x = floats_of_pair<dtype::f16>(a);
  const float_pair y = floats_of_pair<dtype::f16>(b);
  return nearest_pair<dtype::f16>(x.first * y.first, x.second * y.second);
#endif
}

/// The halves of a pack's codes of int8: bytes with 0x64 above are 1,024 + code + 128. Words hold elements 2w
/// and 2w + 1.
[[nodiscard]] LLMMEM_HD inline tensor_pack halves_of_int8(std::uint32_t first,
                                                          std::uint32_t second) noexcept {
  constexpr std::uint32_t above = 0x6400'6400U;
  constexpr std::uint32_t offset = 0x6480'6480U;  // 1,152
  tensor_pack out{};
  LLMMEM_UNROLL
  for (unsigned w = 0; w < 4; ++w) {
    const std::uint32_t codes = (w < 2 ? first : second) ^ 0x8080'8080U;
#if defined(__CUDA_ARCH__)
    const std::uint32_t spread = __byte_perm(codes, above, w % 2 == 0 ? 0x5150 : 0x5352);
#else
    const std::uint32_t both = codes >> (w % 2 * 16);
    const std::uint32_t spread = (both & 0xFFU) | (both & 0xFF00U) << 8U | above;
#endif
    out.word[w] = halves_less(spread, offset);
  }
  return out;
}
/// Those of int4: halves of 1,024 + code + 8, and four bits higher of 1,024 + 16 x (code + 8). Words hold
/// elements w and w + 4.
[[nodiscard]] LLMMEM_HD inline tensor_pack halves_of_int4(std::uint32_t codes) noexcept {
  constexpr std::uint32_t above = 0x6400'6400U;
  constexpr std::uint32_t offset = 0x6408'6408U;     // 1,032
  constexpr std::uint32_t sixteenth = 0x2C00'2C00U;  // 1 / 16
  constexpr std::uint32_t rest = 0xD480'D480U;       // -72
  const std::uint32_t low = codes ^ 0x8888'8888U;
  const std::uint32_t high = low >> 8U;
  return {{halves_less((low & 0x000F'000FU) | above, offset),
           halves_fused((low & 0x00F0'00F0U) | above, sixteenth, rest),
           halves_less((high & 0x000F'000FU) | above, offset),
           halves_fused((high & 0x00F0'00F0U) | above, sixteenth, rest)}};
}
/// Those of e2m1, times 2^-14: its exponent and mantissa in the place of a half's, subnormal ones too. Words
/// hold elements w and w + 4.
inline constexpr float e2m1_factor = 0x1p14F;
[[nodiscard]] LLMMEM_HD inline tensor_pack halves_of_e2m1(std::uint32_t codes) noexcept {
  tensor_pack out{};
  LLMMEM_UNROLL
  for (unsigned w = 0; w < 4; ++w) {
    const std::uint32_t size = w < 3 ? codes << (9 - 4 * w) : codes >> 3U;
    out.word[w] = (codes << (12 - 4 * w) & 0x8000'8000U) | (size & 0x0E00'0E00U);
  }
  return out;
}
[[nodiscard]] LLMMEM_HD inline tensor_pack halves_of_e4m3_pack(std::uint32_t first,
                                                               std::uint32_t second) noexcept {
  return {{halves_of_pair(static_cast<std::uint16_t>(first)),
           halves_of_pair(static_cast<std::uint16_t>(first >> 16U)),
           halves_of_pair(static_cast<std::uint16_t>(second)),
           halves_of_pair(static_cast<std::uint16_t>(second >> 16U))}};
}

/// Neighbouring packs of codes in their form in memory: those of four bits take the first half of the words.
template <std::uint32_t Packs>
struct code_run {
  std::uint32_t word[2 * Packs];

  /// @param width  the alignment, a power of two, at most the bytes of the run.
  LLMMEM_HD void load(dtype code, const std::byte* from, std::uint32_t width) noexcept {
    if (is_half_byte(code)) {
      load_words<Packs>(from, width);
    } else {
      load_words<2 * Packs>(from, width);
    }
  }
  [[nodiscard]] LLMMEM_HD tensor_pack halves(dtype code, std::uint32_t pack) const noexcept {
    if (code == dtype::int8) return halves_of_int8(word[2 * pack], word[2 * pack + 1]);
    if (code == dtype::int4) return halves_of_int4(word[pack]);
    if (code == dtype::fp4_e2m1) return halves_of_e2m1(word[pack]);
    return halves_of_e4m3_pack(word[2 * pack], word[2 * pack + 1]);
  }

 private:
  template <std::uint32_t Words>
  LLMMEM_HD void load_words(const std::byte* from, std::uint32_t width) noexcept {
    const packet<4 * Words> in =
        load_aligned<4 * Words, cache_hint::streaming, group_access::pieces>(from, width);
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < Words; ++i)
      word[i] = in.words[i];
  }
};

/// Codes whose numbers halves hold, with a scale for each token's vector. Products of codes are exact as in
/// floats: the scales of keys multiply them afterwards, and those of values the weights before.
///
/// Packs of a lane are neighbours, so that it reads up to 16 bytes at once.
template <std::uint32_t Dim>
class tensor_codes {
 public:
  static constexpr dtype type = dtype::f16;
  static constexpr std::uint32_t dim = Dim;
  static constexpr bool has_token_scales = true;
  static constexpr bool has_codes = true;

  struct read {
    code_run<2> key[2][Dim / 64];
    code_run<Dim / 64> value[2][2];
    float key_scale[2];    // of tokens g and g + 8
    float value_scale[2];  // of the same
    bool counts[2] = {false, false};
  };

  tensor_codes() noexcept = default;
  explicit tensor_codes(const attention_codes& codes) noexcept
      : codes_(codes),
        key_width_(std::min(plane_width(codes.keys.codes), 2 * codes.keys.pack_bytes())),
        value_width_(std::min(plane_width(codes.values.codes), Dim / 64 * codes.values.pack_bytes())) {}

  [[nodiscard]] LLMMEM_HD static std::uint32_t key_pack(std::uint32_t c, std::uint32_t lane) noexcept {
    return c / 2 * 8 + lane % 4 * 2 + c % 2;
  }
  [[nodiscard]] LLMMEM_HD static std::uint32_t value_pack(std::uint32_t s, std::uint32_t lane) noexcept {
    return lane / 4 * (Dim / 64) + s;
  }
  [[nodiscard]] LLMMEM_HD bool splits_keys() const noexcept { return is_half_byte(codes_.keys.code); }
  [[nodiscard]] LLMMEM_HD bool splits_values() const noexcept { return is_half_byte(codes_.values.code); }
  [[nodiscard]] LLMMEM_HD float key_factor() const noexcept { return factor_of(codes_.keys); }
  [[nodiscard]] LLMMEM_HD float value_factor() const noexcept { return factor_of(codes_.values); }
  [[nodiscard]] LLMMEM_HD bool is_rotated() const noexcept { return codes_.keys.rotated_packs != 0; }
  [[nodiscard]] LLMMEM_HD float rotation() const noexcept { return codes_.keys.rotation; }

  LLMMEM_HD void load_key(const attention_shape& shape, const attention_place& at, const token_place& token,
                          std::uint32_t half, std::uint32_t lane, read& into) const noexcept {
    const std::byte* const from = at.keys + token.block * shape.keys.strides.block +
                                  token.token * shape.keys.strides.token +
                                  std::uint64_t{key_pack(0, lane)} * codes_.keys.pack_bytes();
    LLMMEM_UNROLL
    for (std::uint32_t r = 0; r < Dim / 64; ++r)
      into.key[half][r].load(codes_.keys.code, from + std::uint64_t{r} * 8 * codes_.keys.pack_bytes(),
                             key_width_);
    into.key_scale[half] = scale_at(codes_.keys, at.head, token);
    into.value_scale[half] = scale_at(codes_.values, at.head, token);
  }
  LLMMEM_HD void load_value(const attention_shape& shape, const attention_place& at, const token_place& token,
                            std::uint32_t half, std::uint32_t which, std::uint32_t lane,
                            read& into) const noexcept {
    into.value[half][which].load(codes_.values.code,
                                 at.values + token.block * shape.values.strides.block +
                                     token.token * shape.values.strides.token +
                                     std::uint64_t{value_pack(0, lane)} * codes_.values.pack_bytes(),
                                 value_width_);
  }
  LLMMEM_HD static void clear_key(std::uint32_t half, read& into) noexcept {
    LLMMEM_UNROLL
    for (auto& each : into.key[half])
      each = {};
    into.key_scale[half] = into.value_scale[half] = 0;
  }
  LLMMEM_HD static void clear_value(std::uint32_t half, std::uint32_t which, read& into) noexcept {
    into.value[half][which] = {};
  }

  [[nodiscard]] LLMMEM_HD tensor_keys<Dim> keys_of(const read& from) const noexcept {
    tensor_keys<Dim> out;
    with_code(codes_.keys.code, [&](dtype code) {
      LLMMEM_UNROLL
      for (std::uint32_t half = 0; half < 2; ++half) {
        LLMMEM_UNROLL
        for (std::uint32_t c = 0; c < Dim / 32; ++c)
          out.of[half][c] = from.key[half][c / 2].halves(code, c % 2);
      }
    });
    return out;
  }
  [[nodiscard]] LLMMEM_HD tensor_values<Dim> values_of(const read& from) const noexcept {
    tensor_values<Dim> out;
    with_code(codes_.values.code, [&](dtype code) {
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) {
        LLMMEM_UNROLL
        for (std::uint32_t s = 0; s < Dim / 64; ++s)
          out.of[i / 2][i % 2][s] = from.value[i / 2][i % 2].halves(code, s);
      }
    });
    return out;
  }

 private:
  /// One branch for all of a lane's codes: within it the code is a constant.
  template <class Act>
  LLMMEM_HD static void with_code(dtype code, const Act& act) noexcept {
    if (code == dtype::int8) return act(dtype::int8);
    if (code == dtype::int4) return act(dtype::int4);
    if (code == dtype::fp4_e2m1) return act(dtype::fp4_e2m1);
    act(dtype::fp8_e4m3);
  }
  [[nodiscard]] LLMMEM_HD static float factor_of(const coded_plane& plane) noexcept {
    return plane.code == dtype::fp4_e2m1 ? e2m1_factor : 1.0F;
  }
  [[nodiscard]] LLMMEM_HD float scale_at(const coded_plane& plane, std::uint32_t head,
                                         const token_place& token) const noexcept {
    const coded_head of = head_of(plane, codes_.layer, head);
    float global = of.global;
    if (plane.has_global)
      global = load_scale(dtype::f32, of.globals + token.block * plane.globals.strides.block);
    const float stored = load_scale(plane.scale, of.scales + token.block * plane.scales.strides.block +
                                                     token.token * plane.scales.strides.token);
    return global != 1.0F ? product_of(stored, global) : stored;
  }

  attention_codes codes_{};
  std::uint32_t key_width_ = 1;
  std::uint32_t value_width_ = 1;
};

/// Codes of any scales: each value, code x scale, is rounded to bf16, and the rest is that of a cache of
/// bf16.
template <std::uint32_t Dim>
class tensor_rounded_codes : public tensor_elements<dtype::bf16, Dim> {
  using base = tensor_elements<dtype::bf16, Dim>;

 public:
  using typename base::read;
  static constexpr bool has_codes = true;

  tensor_rounded_codes() noexcept = default;
  explicit tensor_rounded_codes(const attention_codes& codes) noexcept : codes_(codes) {}

  [[nodiscard]] LLMMEM_HD bool is_rotated() const noexcept { return codes_.keys.rotated_packs != 0; }
  [[nodiscard]] LLMMEM_HD float rotation() const noexcept { return codes_.keys.rotation; }

  LLMMEM_HD void load_key(const attention_shape& /*shape*/, const attention_place& at,
                          const token_place& token, std::uint32_t half, std::uint32_t lane,
                          read& into) const noexcept {
    const coded_head of = head_of(codes_.keys, codes_.layer, at.head);
    LLMMEM_UNROLL
    for (std::uint32_t c = 0; c < Dim / 32; ++c)
      into.key[half][c] = value_at(codes_.keys, of, token, base::key_pack(c, lane));
  }
  LLMMEM_HD void load_value(const attention_shape& /*shape*/, const attention_place& at,
                            const token_place& token, std::uint32_t half, std::uint32_t which,
                            std::uint32_t lane, read& into) const noexcept {
    const coded_head of = head_of(codes_.values, codes_.layer, at.head);
    LLMMEM_UNROLL
    for (std::uint32_t s = 0; s < Dim / 64; ++s)
      into.value[half][which][s] = value_at(codes_.values, of, token, base::value_pack(s, lane));
  }

 private:
  [[nodiscard]] LLMMEM_HD static attention_raw<dtype::bf16> value_at(const coded_plane& plane,
                                                                     const coded_head& head,
                                                                     const token_place& token,
                                                                     std::uint32_t pack) noexcept {
    const code_words words =
        load_codes(plane.code, codes_at(plane, head, token.block, token.token, pack), plane.code_width);
    const attention_floats floats = pack_scales(plane, head, token.block, pack)
                                        .scaled(plane, token.token, floats_of_codes(plane.code, words));
    attention_raw<dtype::bf16> out{};
    LLMMEM_UNROLL
    for (unsigned i = 0; i < 4; ++i)
      out.part[0].words[i] = nearest_pair<dtype::bf16>(floats.of[2 * i], floats.of[2 * i + 1]);
    return out;
  }

  attention_codes codes_{};
};

/// Whether tensor cores take a plane's codes as they are: each vector has one scale.
[[nodiscard]] constexpr bool has_token_scales(const kv_layout& layout, std::uint32_t p) noexcept {
  const paging::scale_form& scales = scales_of_plane(layout, p);
  return scales.group == paging::scale_group::vector ||
         (scales.group == paging::scale_group::run && scales.run >= layout.vector_elements(p));
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
