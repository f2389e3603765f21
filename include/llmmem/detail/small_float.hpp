/// @file
/// The common parts of floating-point formats of 16 bits and fewer.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns the digits of a float that is below the smaller format's least normal value, rounded to the
/// nearest step of that format; of two equally near, to the even one.
/// @param size   the float's bits without its sign
/// @param shift  1 to 31
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t subnormal_of(std::uint32_t size,
                                                             std::uint32_t shift) noexcept {
  const std::uint32_t digits = (size & 0x7F'FFFFU) | 0x80'0000U;
  const std::uint32_t rest = digits & ((1U << shift) - 1U);
  const std::uint32_t half = 1U << (shift - 1U);
  const std::uint32_t down = digits >> shift;
  return down + (rest > half || (rest == half && (down & 1U) != 0) ? 1U : 0U);
}

/// Returns the bits, without a sign, of the float that equals a finite value of a smaller format.
/// @tparam Digits  bits of the format's fraction
/// @tparam Lift    a float's exponent bias, minus the format's
template <std::uint32_t Digits, std::uint32_t Lift>
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t f32_of_parts(std::uint32_t exponent,
                                                             std::uint32_t digits) noexcept {
  constexpr std::uint32_t one = 1U << Digits;
  if (exponent == 0) {
    if (digits == 0) return 0;
    exponent = 1;
    while ((digits & one) == 0) {
      digits <<= 1;
      --exponent;  // below zero it wraps, and the bias below restores it
    }
    digits &= one - 1U;
  }
  return (exponent + Lift) << 23 | digits << (23U - Digits);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
