/// @file
/// The arithmetic of floats as integers of few bits with a scale for a group, rounded by random bits of a
/// counter: of `block_int`, and of its kernels.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/model/random_bits.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The arithmetic of one element. Products of doubles are never added to, so that no compiler fuses them, and
/// all else is of integers: every machine has the same bits.
template <unsigned Bits>
struct int_rounding {
  static constexpr std::int32_t largest = (1 << (Bits - 1)) - 1;
  /// With these, a restored float has its code again: the float is within 2^-24 of itself from a whole number
  /// of steps, which is less than half of a unit of the fraction.
  static constexpr unsigned fraction_bits = 24 - Bits;

  /// The factor that takes a size to half units of the fraction. @pre the scale is positive and finite
  [[nodiscard]] static LLMMEM_HD constexpr double factor(float scale) noexcept {
    return static_cast<double>(largest << (fraction_bits + 1)) / static_cast<double>(scale);
  }
  /// Returns the steps of a size, in units of the fraction, rounded to the nearest.
  /// @pre the size is at most 1 + 2^-8 of the scale, and `factor` is the scale's
  [[nodiscard]] static LLMMEM_HD constexpr std::int32_t steps(float size, double factor) noexcept {
    const auto half_units = static_cast<std::int32_t>(static_cast<double>(size) * factor);
    const std::int32_t units = (half_units + 1) >> 1;
    constexpr std::int32_t most = largest << fraction_bits;
    return units < most ? units : most;
  }
  /// Returns the whole steps below or above: above for as many of all random bits as the fraction says,
  /// exactly.
  [[nodiscard]] static LLMMEM_HD constexpr std::int32_t rounded(std::int32_t steps,
                                                                std::uint32_t random) noexcept {
    return (steps + static_cast<std::int32_t>(random >> (32 - fraction_bits))) >> fraction_bits;
  }
  [[nodiscard]] static LLMMEM_HD constexpr float restored(std::int32_t code, double step) noexcept {
    return static_cast<float>(code * step);
  }
};

/// The bits of a scale: of a group with a NaN or an infinity those of `no_number`, and the largest of bf16.
struct int_scale {
  static constexpr std::uint32_t infinity = 0x7F80'0000U;
  static constexpr std::uint32_t no_number = 0x7FC0'0000U;
  static constexpr std::uint32_t largest_bf16 = 0x7F7F'0000U;

  [[nodiscard]] static LLMMEM_HD constexpr std::uint32_t bytes(dtype scale) noexcept {
    return scale == dtype::f32 ? 4 : 2;
  }
  /// Returns the bits of the scale of a group whose largest size has these bits.
  [[nodiscard]] static LLMMEM_HD constexpr std::uint32_t of(dtype scale, std::uint32_t largest) noexcept {
    if (largest >= infinity) return no_number;
    if (scale == dtype::f32) return largest;
    return largest > largest_bf16 ? largest_bf16 : (largest + 0xFFFFU) & 0xFFFF'0000U;
  }
};

/// The keys of random bits: of a chunk in a version, and of a group of it.
struct int_rounding_key {
  static constexpr std::uint64_t golden = 0x9E37'79B9'7F4A'7C15U;

  [[nodiscard]] static LLMMEM_HD constexpr std::uint64_t of_chunk(std::uint64_t chunk,
                                                                  std::uint64_t version) noexcept {
    return mixed_bits(mixed_bits(chunk + golden) + version);
  }
  [[nodiscard]] static LLMMEM_HD constexpr std::uint64_t of_group(std::uint64_t key,
                                                                  std::uint64_t group) noexcept {
    return mixed_bits(key + group * golden);
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
