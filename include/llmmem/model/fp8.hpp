/// @file
/// Eight-bit floating point (OCP e4m3) as bits.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/small_float.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The largest finite e4m3 value. There are no infinities.
inline constexpr float e4m3_max = 448.0F;

/// Returns the bits of the e4m3 value nearest to the float of these bits; of two equally near, the one with
/// an even last bit. Values too large, and infinities, become the largest value of that sign (saturation); a
/// NaN of either sign becomes 0x7F, as in NVIDIA's hardware.
/// @par Source   Micikevicius et al., "FP8 Formats for Deep Learning", 2022; OCP 8-bit floating point 1.0.
[[nodiscard]] LLMMEM_HD constexpr std::uint8_t e4m3_from_f32_bits(std::uint32_t bits) noexcept {
  const std::uint32_t sign = bits >> 24 & 0x80U;
  const std::uint32_t size = bits & 0x7FFF'FFFFU;
  if (size > 0x7F80'0000U) return 0x7FU;
  std::uint32_t out = 0;
  if (size >= 0x43E0'0000U) {  // 448
    out = 0x7EU;
  } else if (size >= 0x3C80'0000U) {  // 2^-6, the least normal one
    const std::uint32_t rounded = (size + 0x7'FFFFU + (size >> 20 & 1U)) >> 20;
    out = rounded - (120U << 3);
  } else if (size > 0x3A80'0000U) {  // 2^-10: that and less is nearest to zero
    out = detail::subnormal_of(size, 141U - (size >> 23));
  }
  return static_cast<std::uint8_t>(sign | out);
}

/// Returns the bits of the float that equals the e4m3 value of these bits.
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t f32_from_e4m3_bits(std::uint8_t bits) noexcept {
  const std::uint32_t sign = (std::uint32_t{bits} & 0x80U) << 24;
  const std::uint32_t exponent = bits >> 3 & 0xFU;
  const std::uint32_t digits = bits & 7U;
  if (exponent == 0xF && digits == 7U) return sign | 0x7FC0'0000U;
  return sign | detail::f32_of_parts<3, 120>(exponent, digits);
}

}  // namespace v0
}  // namespace llmmem
