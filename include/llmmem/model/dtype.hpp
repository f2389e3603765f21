/// @file
/// Element types of model state, and the bytes that a count of elements takes.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstdint>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// The stored form of one element of a weight, activation, moment or KV entry.
enum class dtype : std::uint8_t { f64, f32, bf16, f16, fp8_e4m3, fp8_e5m2, int8, int4, fp4_e2m1 };

/// Returns the bits of one element, without the scales of block-quantised formats, which belong to the codec.
[[nodiscard]] constexpr std::uint64_t bits_of(dtype type) noexcept {
  switch (type) {
    case dtype::f64:
      return 64;
    case dtype::f32:
      return 32;
    case dtype::bf16:
    case dtype::f16:
      return 16;
    case dtype::fp8_e4m3:
    case dtype::fp8_e5m2:
    case dtype::int8:
      return 8;
    case dtype::int4:
    case dtype::fp4_e2m1:
      return 4;
  }
  return 0;
}

/// Returns the name as command lines and tables write it: `"bf16"`.
[[nodiscard]] constexpr std::string_view name_of(dtype type) noexcept {
  switch (type) {
    case dtype::f64:
      return "f64";
    case dtype::f32:
      return "f32";
    case dtype::bf16:
      return "bf16";
    case dtype::f16:
      return "f16";
    case dtype::fp8_e4m3:
      return "fp8_e4m3";
    case dtype::fp8_e5m2:
      return "fp8_e5m2";
    case dtype::int8:
      return "int8";
    case dtype::int4:
      return "int4";
    case dtype::fp4_e2m1:
      return "fp4_e2m1";
  }
  return "unknown";
}

/// Returns the bytes of `elements` packed elements, rounded up to a whole byte.
/// @throws length_error  when the product passes 2^63 - 1.
[[nodiscard]] constexpr std::uint64_t bytes_of(std::uint64_t elements, dtype type) {
  const std::uint64_t bits = bits_of(type);
  if (bits >= 8) return checked_multiply(elements, bits / 8, "dtype: elements x bytes per element");
  const std::uint64_t per_byte = 8 / bits;
  return elements / per_byte + (elements % per_byte != 0 ? 1 : 0);
}

}  // namespace v0
}  // namespace llmmem
