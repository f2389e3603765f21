/// @file
/// `unordered_sum`: a sum of numbers that are not negative, whose bits do not depend on their order.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Carries digits of 32 bits, so that equal sums have equal digits: each but the last is below 2^32.
template <std::size_t N>
[[nodiscard]] constexpr std::array<std::uint64_t, N> carried(
    std::span<const std::uint64_t, N> digits) noexcept {
  std::array<std::uint64_t, N> out{};
  std::uint64_t carry = 0;
  for (std::size_t i = 0; i < N; ++i) {
    const std::uint64_t sum = digits[i] + carry;
    out[i] = sum & 0xFFFF'FFFFU;
    carry = sum >> 32U;
  }
  out[N - 1] += carry << 32U;
  return out;
}

}  // namespace detail

/// Adds floats, or their squares, as integers. So parts of a sum may be made by any threads and ranks, in any
/// order, and joined by `merge`: the result has the same bits.
///
/// It keeps four digits of 32 bits, the highest that any number so far has needed. Each number is cut off
/// below them, by less than 2^-77 of the largest number. So `value` is within 2^-45 of the exact sum.
/// `gradient_norm` keeps all digits, in four times the bytes: use it for one sum of many numbers, and this
/// for one sum of each row and column.
///
/// @par Complexity   O(1) for each number; 40 bytes, trivially copyable: ranks send it as it is.
/// @par Thread safety   one thread at a time; each thread may have its own object, and `merge` joins them.
/// @pre at most 2^31 numbers in total
/// @par Source   Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Transactions on Computers 64,
///      2015: bins of fixed exponents, of which the highest are kept.
class unordered_sum {
 public:
  /// Adds a number's square. Zeros change nothing; a number that is not finite makes the sum NaN.
  LLMMEM_HD void add_square(float number) noexcept {
    const std::uint32_t bits = bits_of(number) & 0x7FFF'FFFFU;
    if (bits == 0) return;
    const std::uint32_t exponent = bits >> 23U;
    if (exponent == 0xFFU) return set_nan();
    const std::uint64_t mantissa = (bits & 0x7F'FFFFU) | (exponent == 0 ? 0 : 0x80'0000U);
    add_integer(mantissa * mantissa, 2 * (exponent == 0 ? 0 : exponent - 1));
  }
  /// Adds a number, which is not negative. A number that is negative or not finite makes the sum NaN.
  LLMMEM_HD void add(float number) noexcept {
    const std::uint32_t bits = bits_of(number);
    if ((bits & 0x7FFF'FFFFU) == 0) return;
    const std::uint32_t exponent = bits >> 23U;
    if (exponent >= 0xFFU) return set_nan();  // the sign is its highest bit
    const std::uint64_t mantissa = (bits & 0x7F'FFFFU) | (exponent == 0 ? 0 : 0x80'0000U);
    add_integer(mantissa, 149 + (exponent == 0 ? 0 : exponent - 1));
  }
  /// Adds another sum.
  LLMMEM_HD void merge(const unordered_sum& other) noexcept {
    if (other.base_ == is_nan) return set_nan();
    if (base_ == is_nan) return;
    unordered_sum more = other;
    raise(more.base_);
    more.raise(base_);
    LLMMEM_UNROLL
    for (std::size_t i = 0; i < digits; ++i)
      digits_[i] += more.digits_[i];
  }

  /// Returns the sum: within 2^-45 of the exact one, and equal for equal numbers in any order.
  [[nodiscard]] LLMMEM_HD double value() const noexcept {
    if (base_ == is_nan) return no_number;
    std::uint64_t whole[digits] = {};
    std::uint64_t carry = 0;
    LLMMEM_UNROLL
    for (std::size_t i = 0; i < digits; ++i) {  // equal sums have equal digits: all but the last below 2^32
      whole[i] = digits_[i] + carry;
      carry = whole[i] >> 32U;
      if (i + 1 < digits) whole[i] &= 0xFFFF'FFFFU;
    }
    double sum = 0;
    LLMMEM_UNROLL
    for (std::size_t i = digits; i-- > 0;)
      sum += static_cast<double>(whole[i]) * unit_of(i);  // exact products, so that fusing changes nothing
    return sum;
  }

  friend bool operator==(const unordered_sum&, const unordered_sum&) noexcept = default;

 private:
  static constexpr std::size_t digits = 4;
  static constexpr std::uint64_t is_nan = std::uint64_t{1} << 63U;  // numbers are below the kept digits
  static constexpr double no_number = std::numeric_limits<double>::quiet_NaN();

  [[nodiscard]] static LLMMEM_HD std::uint32_t bits_of(float number) noexcept {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(number);
#else
    return std::bit_cast<std::uint32_t>(number);
#endif
  }
  LLMMEM_HD void set_nan() noexcept {
    LLMMEM_UNROLL
    for (auto& digit : digits_)
      digit = 0;
    base_ = is_nan;
  }
  /// Adds number * 2^place, in units of 2^-298, the square of the least float. @pre number < 2^48
  LLMMEM_HD void add_integer(std::uint64_t number, std::uint32_t place) noexcept {
    const std::uint64_t digit = place / 32;
    const std::uint64_t base = digit == 0 ? 0 : digit - 1;  // keeps one digit below the number's own three
    if (base > base_) raise(base);                          // never for a NaN, whose base is the largest
    const std::uint32_t shift = place % 32;
    const std::uint64_t low = (number & 0xFFFF'FFFFU) << shift;
    const std::uint64_t high = (number >> 32U) << shift;
    const std::uint64_t parts[3] = {low & 0xFFFF'FFFFU, (low >> 32U) + (high & 0xFFFF'FFFFU), high >> 32U};
    LLMMEM_UNROLL
    for (std::size_t i = 0; i < 3; ++i) {
      const std::uint64_t at = digit + i - base_;  // wraps to a large number below the kept digits
#if defined(__CUDA_ARCH__)
      LLMMEM_UNROLL
      for (std::size_t each = 0; each < digits; ++each)  // registers have no index
        digits_[each] += each == at ? parts[i] : 0;
#else
      if (at < digits) digits_[at] += parts[i];
#endif
    }
  }
  /// Drops the digits below `base`.
  LLMMEM_HD void raise(std::uint64_t base) noexcept {
    if (base <= base_) return;
    const std::uint64_t by = base - base_;
#if defined(__CUDA_ARCH__)
    for (std::uint64_t done = 0; done < by && done < digits; ++done) {
      digits_[0] = digits_[1];
      digits_[1] = digits_[2];
      digits_[2] = digits_[3];
      digits_[3] = 0;
    }
#else
    for (std::size_t i = 0; i < digits; ++i)
      digits_[i] = i + by < digits ? digits_[i + by] : 0;
#endif
    base_ = base;
  }
  /// Returns the value of a one in a digit.
  [[nodiscard]] LLMMEM_HD double unit_of(std::size_t digit) const noexcept {
    const std::uint64_t exponent = 32 * (base_ + digit) + 1023 - 298;  // of a normal double
#if defined(__CUDA_ARCH__)
    return __longlong_as_double(static_cast<long long>(exponent << 52U));
#else
    return std::bit_cast<double>(exponent << 52U);
#endif
  }

  std::uint64_t digits_[digits] = {};  // not carried, so that equal numbers have equal digits
  std::uint64_t base_ = 0;             // of the lowest kept digit
};

}  // namespace v0
}  // namespace llmmem
