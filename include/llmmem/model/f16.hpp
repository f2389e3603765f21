/// @file
/// Half precision (IEEE binary16) as bits.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/small_float.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Returns the bits of the half nearest to the float of these bits; of two equally near, the one with an even
/// last bit. Values too large become an infinity, a NaN of either sign 0x7FFF, as in NVIDIA's hardware.
[[nodiscard]] LLMMEM_HD constexpr std::uint16_t f16_from_f32_bits(std::uint32_t bits) noexcept {
  const std::uint32_t sign = bits >> 16 & 0x8000U;
  const std::uint32_t size = bits & 0x7FFF'FFFFU;
  if (size > 0x7F80'0000U) return 0x7FFFU;
  std::uint32_t out = 0;
  if (size >= 0x3880'0000U) {  // 2^-14, the least normal one
    const std::uint32_t rounded = (size + 0xFFFU + (size >> 13 & 1U)) >> 13;
    out = rounded - (112U << 10);
    if (out > 0x7C00U || size == 0x7F80'0000U) out = 0x7C00U;
  } else if (size > 0x3300'0000U) {  // 2^-25: that and less is nearest to zero
    out = detail::subnormal_of(size, 126U - (size >> 23));
  }
  return static_cast<std::uint16_t>(sign | out);
}

/// Returns the bits of the float that equals the half of these bits.
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t f32_from_f16_bits(std::uint16_t bits) noexcept {
  const std::uint32_t sign = (std::uint32_t{bits} & 0x8000U) << 16;
  const std::uint32_t exponent = bits >> 10 & 0x1FU;
  const std::uint32_t digits = bits & 0x3FFU;
  if (exponent == 0x1F) return sign | 0x7F80'0000U | digits << 13;
  return sign | detail::f32_of_parts<10, 112>(exponent, digits);
}

}  // namespace v0
}  // namespace llmmem
