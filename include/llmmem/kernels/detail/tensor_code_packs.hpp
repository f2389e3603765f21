/// @file
/// Codes as halves, exactly, by a few instructions for eight of them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/aligned_access.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/tensor_forms.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/model/dtype.hpp>

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

/// Scales of e4m3, a byte for each of a lane's neighbouring packs.
template <std::uint32_t Packs>
struct run_scales {
  std::uint32_t of[Packs];

  /// @param from  the vector's scales.
  LLMMEM_HD void load(const coded_plane& plane, const std::byte* from, std::uint32_t first) noexcept {
    const bool is_even = plane.run.by() % 2 == 0;
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < Packs; ++i) {
      if (i % 2 == 1 && is_even) {
        of[i] = of[i - 1];
      } else {
        of[i] = load_packet<1>(from + plane.run.quotient(first + i)).words[0];
      }
    }
  }
  /// A product of a number of e2m1 and one of e4m3 has six digits at most, and times 2^-14 its last one is
  /// that of the smallest half: it is exact.
  [[nodiscard]] LLMMEM_HD tensor_pack times(const tensor_pack& numbers, std::uint32_t i) const noexcept {
    const std::uint32_t scale = halves_of_pair(static_cast<std::uint16_t>(of[i] * 0x101U));
    tensor_pack out{};
    LLMMEM_UNROLL
    for (unsigned w = 0; w < 4; ++w)
      out.word[w] = halves_times(numbers.word[w], scale);
    return out;
  }
};

/// Whether halves hold the products of a plane's codes and scales by run: e2m1 with e4m3, as in NVFP4.
[[nodiscard]] LLMMEM_HD inline bool has_exact_runs(const coded_plane& plane, std::uint32_t packs) noexcept {
  return plane.run.by() < packs && plane.code == dtype::fp4_e2m1 && plane.scale == dtype::fp8_e4m3;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
