/// @file
/// The arithmetic of quantised groups: scales, and packets of values and codes.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/small_float.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

template <dtype E>
concept group_value = E == dtype::f32 || E == dtype::bf16 || E == dtype::f16;
template <dtype E>
concept group_code = E == dtype::int8 || E == dtype::fp8_e4m3 || E == dtype::int4;

/// The largest code.
template <dtype Code>
  requires group_code<Code>
inline constexpr float largest_code = Code == dtype::int8   ? 127.0F
                                      : Code == dtype::int4 ? 7.0F
                                                            : e4m3_max;

/// Returns the integer nearest to a float, of two equally near the even one; 0 for a NaN. @pre a number is
/// below 2^23
[[nodiscard]] LLMMEM_HD inline std::int32_t nearest_integer(float value) noexcept {
#if defined(__CUDA_ARCH__)
  return __float2int_rn(value);
#else
  const std::uint32_t bits = bits_of_float(value);
  const std::uint32_t size = bits & 0x7FFF'FFFFU;
  if (size < 0x3F00'0000U || size > 0x7F80'0000U) return 0;  // below a half, or a NaN
  const auto nearest = static_cast<std::int32_t>(subnormal_of(size, 150U - (size >> 23U)));
  return bits >> 31U != 0 ? -nearest : nearest;
#endif
}

/// The factors of a group's elements in both directions.
struct group_factors {
  float scale = 0;
  float inverse = 0;
};

/// By the largest size of a group's elements, as `largest_size` returns it.
template <dtype Value, dtype Code>
[[nodiscard]] LLMMEM_HD inline group_factors factors_of(std::uint32_t largest) noexcept {
  if (largest == 0) return {};
  const float amax = float_of<Value>(static_cast<element_bits<Value>>(largest));
  constexpr std::uint32_t infinity = 0x7F80'0000U;
  if (bits_of_float(amax) >= infinity) return {float_of_bits(0x7FFF'FFFFU), 0};
  constexpr float least = 0x1p-126F;
  const float quotient = quotient_of(amax, largest_code<Code>);
  const float scale = quotient < least ? least : quotient;
  return {scale, quotient_of(1.0F, scale)};
}

/// Returns the bits of the largest element without its sign: floats are ordered as their bits, with infinity
/// and NaNs above all numbers.
template <dtype Value, unsigned Bytes>
[[nodiscard]] LLMMEM_HD inline std::uint32_t largest_size(const packet<Bytes>& in) noexcept {
  using bits = element_bits<Value>;
  constexpr bits without_sign = static_cast<bits>(~0U) >> 1U;
  std::uint32_t largest = 0;
  LLMMEM_UNROLL
  for (unsigned i = 0; i < Bytes / sizeof(bits); ++i) {
    const std::uint32_t size = static_cast<bits>(element_of<bits>(in, i) & without_sign);
    largest = size > largest ? size : largest;
  }
  return largest;
}

/// Bytes of a packet of codes whose values are 16 bytes.
template <dtype Value, dtype Code>
inline constexpr unsigned code_bytes = 16 / sizeof(element_bits<Value>) * (Code == dtype::int4 ? 4 : 8) / 8;

/// Returns the codes of values. Integers need no saturation: a product exceeds the largest code by roundings
/// alone, far less than the half that would change the code.
template <dtype Value, dtype Code>
  requires group_value<Value> && group_code<Code>
[[nodiscard]] LLMMEM_HD inline packet<code_bytes<Value, Code>> codes_of(const packet<16>& in,
                                                                        float inverse) noexcept {
  constexpr unsigned elements = 16 / sizeof(element_bits<Value>);
  if constexpr (Code == dtype::fp8_e4m3) {
    return scaling_step<Value, Code>{inverse}.template apply<elements>(in);
  } else {
    constexpr unsigned bits = Code == dtype::int4 ? 4 : 8;
    packet<code_bytes<Value, Code>> out{};
    using word = typename packet<code_bytes<Value, Code>>::word;
    constexpr unsigned per_word = 8 * sizeof(word) / bits;
    LLMMEM_UNROLL
    for (unsigned i = 0; i < elements; ++i) {
      const float value = float_of<Value>(element_of<element_bits<Value>>(in, i));
      const auto code = static_cast<std::uint32_t>(nearest_integer(product_of(value, inverse)));
      const std::uint32_t placed = (code & ((1U << bits) - 1U)) << (i % per_word * bits);
      out.words[i / per_word] = static_cast<word>(out.words[i / per_word] | placed);
    }
    return out;
  }
}

/// The values of codes.
template <dtype Value, dtype Code>
  requires group_value<Value> && group_code<Code>
[[nodiscard]] LLMMEM_HD inline packet<16> values_of(const packet<code_bytes<Value, Code>>& in,
                                                    float scale) noexcept {
  constexpr unsigned elements = 16 / sizeof(element_bits<Value>);
  if constexpr (Code == dtype::fp8_e4m3) {
    return scaling_step<Code, Value>{scale}.template apply<elements>(in);
  } else {
    constexpr unsigned bits = Code == dtype::int4 ? 4 : 8;
    using word = typename packet<code_bytes<Value, Code>>::word;
    constexpr unsigned per_word = 8 * sizeof(word) / bits;
    const auto value = [&](unsigned i) {
      const std::uint32_t at_top = std::uint32_t{in.words[i / per_word]} << (32 - bits - i % per_word * bits);
      return product_of(static_cast<float>(static_cast<std::int32_t>(at_top) >> (32 - bits)), scale);
    };
    packet<16> out{};
    LLMMEM_UNROLL
    for (unsigned i = 0; i < elements; i += 2) {
      if constexpr (Value == dtype::f32) {
        set_element(out, i, nearest_of<Value>(value(i)));
        set_element(out, i + 1, nearest_of<Value>(value(i + 1)));
      } else {
        set_element(out, i / 2, nearest_pair<Value>(value(i), value(i + 1)));
      }
    }
    return out;
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
