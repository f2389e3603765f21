/// @file
/// Division by a number that is fixed long before the divisions.
#pragma once

#include <llmmem/config.hpp>

#include <bit>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Divides by one number, many times: a multiplication and a shift, instead of a device's hundred
/// instructions for 64 bits or a processor's division of up to 40 cycles. Trivially copyable.
///
/// @par Source   Granlund and Montgomery, "Division by Invariant Integers using Multiplication", PLDI 1994:
///      for dividends below 2^63 a multiplier of 64 bits is exact.
class divider {
  __extension__ typedef unsigned __int128 wide;  // NOLINT(modernize-use-using): no alias takes __extension__

 public:
  /// By 1.
  constexpr divider() noexcept = default;
  /// @pre by is not 0
  explicit constexpr divider(std::uint32_t by) noexcept : by_(by) {
    const auto bits = static_cast<std::uint32_t>(std::bit_width(by - 1));  // 2^bits is by, or the next power
    // ceil(2^(63 + bits) / by): at least 2^63, and below 2^64.
    const wide power = static_cast<wide>(1) << (63U + bits);
    multiplier_ = static_cast<std::uint64_t>((power + (by - 1)) / by);
    shift_ = bits;
  }

  [[nodiscard]] LLMMEM_HD constexpr std::uint32_t by() const noexcept { return by_; }

  /// @pre dividend < 2^63
  [[nodiscard]] LLMMEM_HD std::uint64_t quotient(std::uint64_t dividend) const noexcept {
    // Twice the dividend, so that the upper half of the product holds the part from 2^63 on.
    return high(2 * dividend, multiplier_) >> shift_;
  }
  /// @pre dividend < 2^63
  [[nodiscard]] LLMMEM_HD std::uint32_t remainder(std::uint64_t dividend) const noexcept {
    return static_cast<std::uint32_t>(dividend - quotient(dividend) * by_);
  }

 private:
  [[nodiscard]] static LLMMEM_HD std::uint64_t high(std::uint64_t a, std::uint64_t b) noexcept {
#if defined(__CUDA_ARCH__)
    return __umul64hi(a, b);
#else
    return static_cast<std::uint64_t>((static_cast<wide>(a) * b) >> 64U);
#endif
  }

  std::uint64_t multiplier_ = std::uint64_t{1} << 63U;
  std::uint32_t by_ = 1;
  std::uint32_t shift_ = 0;
};

}  // namespace v0
}  // namespace llmmem
