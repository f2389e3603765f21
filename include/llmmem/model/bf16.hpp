/// @file
/// bfloat16 as bits.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Returns the bits of the bfloat16 nearest to the float of these bits; of two equally near, the one with an
/// even last bit. A NaN becomes a quiet one of the same sign and upper payload; infinities, zeros and their
/// signs stay.
[[nodiscard]] LLMMEM_HD constexpr std::uint16_t bf16_from_f32_bits(std::uint32_t bits) noexcept {
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const std::uint32_t quieted = (bits >> 16) | 0x40U;
  const bool is_nan = (bits & 0x7FFF'FFFFU) > 0x7F80'0000U;
  return static_cast<std::uint16_t>(is_nan ? quieted : rounded);
}

/// Returns the bits of the float that equals the bfloat16 of these bits.
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t f32_from_bf16_bits(std::uint16_t bits) noexcept {
  return std::uint32_t{bits} << 16;
}

}  // namespace v0
}  // namespace llmmem
