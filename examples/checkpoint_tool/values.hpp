/// @file
/// Elements of safetensors types, as bits and as numbers.
#pragma once

#include <llmmem/model/safetensors.hpp>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>

namespace checkpoint_tool {

/// Returns element `i` of consecutive values, the first in the lowest bits.
/// @pre bits is at most 64
[[nodiscard]] inline std::uint64_t element_bits(std::span<const std::byte> values, std::uint64_t bits,
                                                std::uint64_t i) noexcept {
  std::uint64_t value = 0;
  if (bits % 8 == 0) {
    for (std::uint64_t k = 0; k < bits / 8; ++k)
      value |= static_cast<std::uint64_t>(values[static_cast<std::size_t>(i * (bits / 8) + k)]) << (8 * k);
    return value;
  }
  for (std::uint64_t k = 0; k < bits; ++k) {
    const std::uint64_t at = i * bits + k;
    const auto byte = static_cast<std::uint64_t>(values[static_cast<std::size_t>(at / 8)]);
    value |= (byte >> (at % 8) & 1U) << k;
  }
  return value;
}

/// A binary floating-point format.
struct float_format {
  int exponent_bits = 0;
  int mantissa_bits = 0;
  int bias = 0;
  enum class specials : std::uint8_t {
    ieee,        ///< the highest exponent is infinity and NaN
    all_ones,    ///< all ones is NaN, and no value is infinite
    minus_zero,  ///< minus zero is NaN, and no value is infinite
  } special = specials::ieee;
};

/// Returns the format of a float type of at most 16 bits, if it is one.
[[nodiscard]] constexpr std::optional<float_format> narrow_format(llmmem::safetensors_type type) noexcept {
  using enum llmmem::safetensors_type;
  switch (type) {
    case f16:
      return float_format{5, 10, 15, float_format::specials::ieee};
    case bf16:
      return float_format{8, 7, 127, float_format::specials::ieee};
    case f8_e5m2:
      return float_format{5, 2, 15, float_format::specials::ieee};
    case f8_e4m3:
      return float_format{4, 3, 7, float_format::specials::all_ones};
    case f8_e5m2fnuz:
      return float_format{5, 2, 16, float_format::specials::minus_zero};
    case f8_e4m3fnuz:
      return float_format{4, 3, 8, float_format::specials::minus_zero};
    default:
      return std::nullopt;
  }
}

[[nodiscard]] inline double narrow_value(const float_format& format, std::uint64_t bits) noexcept {
  const int mantissa_bits = format.mantissa_bits;
  const std::uint64_t mantissa = bits & ((std::uint64_t{1} << mantissa_bits) - 1);
  const std::uint64_t highest = (std::uint64_t{1} << format.exponent_bits) - 1;
  const std::uint64_t exponent = bits >> mantissa_bits & highest;
  const bool is_negative = (bits >> (mantissa_bits + format.exponent_bits) & 1U) != 0;
  const double sign = is_negative ? -1 : 1;
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  switch (format.special) {
    case float_format::specials::ieee:
      if (exponent == highest) return mantissa != 0 ? nan : sign * std::numeric_limits<double>::infinity();
      break;
    case float_format::specials::all_ones:
      if (exponent == highest && mantissa == (std::uint64_t{1} << mantissa_bits) - 1) return nan;
      break;
    case float_format::specials::minus_zero:
      if (is_negative && exponent == 0 && mantissa == 0) return nan;
      break;
  }
  const std::uint64_t whole = exponent == 0 ? mantissa : mantissa | std::uint64_t{1} << mantissa_bits;
  const int power = (exponent == 0 ? 1 : static_cast<int>(exponent)) - format.bias - mantissa_bits;
  return sign * std::ldexp(static_cast<double>(whole), power);
}

/// Returns whether elements of a type are compared as numbers: real floats of a byte or more.
[[nodiscard]] constexpr bool is_float(llmmem::safetensors_type type) noexcept {
  return narrow_format(type) || type == llmmem::safetensors_type::f32 ||
         type == llmmem::safetensors_type::f64;
}

/// Returns the value of an element's bits. @pre is_float(type)
[[nodiscard]] inline double float_value(llmmem::safetensors_type type, std::uint64_t bits) noexcept {
  if (type == llmmem::safetensors_type::f64) return std::bit_cast<double>(bits);
  if (type == llmmem::safetensors_type::f32)
    return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  return narrow_value(*narrow_format(type), bits);
}

}  // namespace checkpoint_tool
