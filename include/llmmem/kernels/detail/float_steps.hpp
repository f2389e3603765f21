/// @file
/// Steps of sums and exponentials of floats with the same rounding on hosts and devices.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/elements.hpp>

#include <cstdint>
#include <numbers>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// -infinity.
[[nodiscard]] LLMMEM_HD inline float lowest() noexcept {
  return float_of_bits(0xFF80'0000U);
}

/// a b + c, rounded once.
[[nodiscard]] LLMMEM_HD inline float fused(float a, float b, float c) noexcept {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

/// a / b, rounded once.
[[nodiscard]] LLMMEM_HD inline float quotient_of(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

/// Returns the number without its sign.
[[nodiscard]] LLMMEM_HD inline float size_of(float x) noexcept {
  return float_of_bits(bits_of_float(x) & 0x7FFF'FFFFU);
}

/// A power of two, and its inverse.
struct float_size {
  float power = 1;
  float inverse = 1;
};
/// Returns the power of two at or below a positive number: 2^-126 for smaller ones, 2^126 for larger ones,
/// which still come below 4. The inverse brings a number of its size to between 1 and 2; with `raise` the
/// power is 2^raise times smaller, not below 2^-126, and numbers come to between 2^raise and 2^(raise + 1).
[[nodiscard]] LLMMEM_HD inline float_size power_of_two_below(float x, std::uint32_t raise = 0) noexcept {
  const std::uint32_t exponent = bits_of_float(x) >> 23U;  // biased by 127
  const std::uint32_t held = exponent < 1 + raise ? 1 + raise : exponent > 253 ? 253 : exponent;
  return {float_of_bits((held - raise) << 23U), float_of_bits((254 + raise - held) << 23U)};
}

/// Returns the larger, in either order; of a NaN and a number, the number.
[[nodiscard]] LLMMEM_HD inline float larger_of(float a, float b) noexcept {
  return a >= b || b != b ? a : b;
}

/// Returns 2^x for x up to 0, within one unit in the last place; 0 below 2^-126. A device's own exponential
/// differs from a host's.
///
/// @par Source   Cody and Waite, "Software Manual for the Elementary Functions", 1980, for the reduction; the
///      polynomial, of degree 6, is the best on [-1/2, 1/2] by the relative error (Remez), which is 1.9e-9
///      before its coefficients are rounded.
[[nodiscard]] LLMMEM_HD inline float power_of_two(float x) noexcept {
  if (!(x >= -126.0F)) return x == x ? 0.0F : x;
  constexpr float to_integer = 0x1.8p23F;  // a float near it has no fraction
  const float shifted = x + to_integer;
  const float rest = x - (shifted - to_integer);
  float power = fused(0x1.41d334p-13F, rest, 0x1.5f456ap-10F);
  power = fused(power, rest, 0x1.3b2dbcp-7F);
  power = fused(power, rest, 0x1.c6aed4p-5F);
  power = fused(power, rest, 0x1.ebfbdap-3F);
  power = fused(power, rest, std::numbers::ln2_v<float>);
  power = fused(power, rest, 1.0F);
  // The integer is in the lowest bits of `shifted`, and must move into the exponent.
  return float_of_bits(bits_of_float(power) + (bits_of_float(shifted) << 23U));
}

/// Returns the natural logarithm of a number from 2^-126 to infinity, within 2e-7 of it or, near 1, of 1.
[[nodiscard]] LLMMEM_HD inline float logarithm_of(float x) noexcept {
  const std::uint32_t bits = bits_of_float(x);
  // Between sqrt(1/2) and sqrt(2), and the remaining power of two.
  const std::uint32_t from_root = bits - 0x3F35'04F3U;
  const auto exponent = static_cast<float>(static_cast<std::int32_t>(from_root) >> 23);
  const float mantissa = float_of_bits((from_root & 0x007F'FFFFU) + 0x3F35'04F3U);
  // ln m = 2 artanh((m - 1) / (m + 1)), whose series has only odd powers.
  const float s = quotient_of(mantissa - 1.0F, mantissa + 1.0F);
  const float square = product_of(s, s);
  float series = fused(square, 2.0F / 9.0F, 2.0F / 7.0F);
  series = fused(series, square, 2.0F / 5.0F);
  series = fused(series, square, 2.0F / 3.0F);
  series = fused(series, square, 2.0F);
  return fused(exponent, std::numbers::ln2_v<float>, product_of(series, s));
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
