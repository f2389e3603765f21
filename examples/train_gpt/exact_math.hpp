/// @file
/// exp, tanh and log by additions and multiplications alone, so that all compilers, processors and C
/// libraries give the same bits.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace train_gpt {

namespace detail {

template <class T>
struct exp_constants;

template <>
struct exp_constants<float> {
  using bits = std::int32_t;
  static constexpr int degree = 7;  // the next term is below half a unit in the last place
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float least = -87, most = 88;
  static constexpr float log2_e = 0x1.715476p+0F;
  static constexpr float ln2_high = 0x1.62e4p-1F, ln2_low = 0x1.7f7d1cp-20F;  // the first leaves bits for n
  // Its addition leaves the nearest whole number in the low bits.
  static constexpr float to_whole = 0x1.8p+23F;
};

template <>
struct exp_constants<double> {
  using bits = std::int64_t;
  static constexpr int degree = 13;
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr double least = -708, most = 709;
  static constexpr double log2_e = 0x1.71547652b82fep+0;
  static constexpr double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;
  static constexpr double to_whole = 0x1.8p+52;
};

/// 1 / k!.
template <class T>
[[nodiscard]] constexpr T inverse_factorial(int k) noexcept {
  double product = 1;
  for (int i = 2; i <= k; ++i)
    product *= i;
  return static_cast<T>(1 / product);
}

}  // namespace detail

/// e^x, to about one unit in the last place: 2^n times the Taylor polynomial of the rest. Arguments are
/// clamped to the range with normal results (-87 to 88 for float); NaN stays NaN. Vectorises.
template <class T>
[[nodiscard]] inline T exact_exp(T x) noexcept {
  using c = detail::exp_constants<T>;
  x = x < c::least ? c::least : x;
  x = x > c::most ? c::most : x;
  const T shifted = x * c::log2_e + c::to_whole;
  const T n = shifted - c::to_whole;
  const T rest = (x - n * c::ln2_high) - n * c::ln2_low;
  T sum = detail::inverse_factorial<T>(c::degree);
  [&]<std::size_t... K>(std::index_sequence<K...>) {
    ((sum = sum * rest + detail::inverse_factorial<T>(c::degree - 1 - static_cast<int>(K))), ...);
  }(std::make_index_sequence<static_cast<std::size_t>(c::degree)>{});
  using bits = typename c::bits;
  const bits whole = std::bit_cast<bits>(shifted) - std::bit_cast<bits>(c::to_whole);
  return sum * std::bit_cast<T>(static_cast<bits>((whole + c::bias) << c::mantissa));
}

/// tanh x, to about one unit in the last place of 1.
template <class T>
[[nodiscard]] inline T exact_tanh(T x) noexcept {
  return 1 - 2 / (exact_exp(x + x) + 1);
}

/// ln x, to a few units in the last place. @pre x is positive, finite and normal; NaN stays NaN.
[[nodiscard]] inline double exact_log(double x) noexcept {
  if (x != x) return x;
  constexpr std::uint64_t root_half = std::bit_cast<std::uint64_t>(0x1.6a09e667f3bcdp-1);
  const auto bits = std::bit_cast<std::uint64_t>(x);
  const std::int64_t exponent = static_cast<std::int64_t>(bits - root_half) >> 52;
  const double m = std::bit_cast<double>(bits - (static_cast<std::uint64_t>(exponent) << 52));
  const double s = (m - 1) / (m + 1);  // ln m = 2 artanh s, |s| < 0.172
  double sum = 0;
  for (int k = 23; k >= 1; k -= 2)
    sum = sum * (s * s) + 1.0 / k;
  return static_cast<double>(exponent) * 0x1.62e42fefa39efp-1 + 2 * s * sum;
}

}  // namespace train_gpt
