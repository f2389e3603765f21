/// @file
/// CRC-32C without tables: 32 words at a time, by exclusive or alone.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

// The square of a polynomial over two elements has the same coefficients: P(x)^32 = P(x^32). So with y =
// x^32, P(y) is a multiple of P(x), and a remainder modulo P(y) determines that modulo P(x). A message of
// 32-bit words is a polynomial in y for each bit of a word, and its remainder modulo P(y) adds whole words to
// whole words, at the terms of P: no shift, no table, no carry. 32 words remain. They are reduced to 16
// modulo P(x^16), to 8 modulo P(x^8), and these to one.

/// Coefficients of the polynomial below x^32, that of x^t in bit t.
inline constexpr std::uint32_t crc32c_terms = 0x1EDC'6F41U;
/// The highest exponent of these terms.
inline constexpr std::uint32_t crc32c_highest_term = 28;

/// The state after the words so far: 32 of them, the first in the message first.
struct crc32c_state {
  std::uint32_t word[32];
};

/// Takes another 32 words.
LLMMEM_HD inline void crc32c_take(crc32c_state& state, const crc32c_state& next) noexcept {
  constexpr std::uint32_t terms = crc32c_terms;
  // y^32 is the sum of the terms below it: word i is added to the words 32 - t after it.
  LLMMEM_UNROLL
  for (std::uint32_t i = 1; i < 32; ++i) {
    LLMMEM_UNROLL
    for (std::uint32_t t = 32 - i; t < 32; ++t) {
      if ((terms >> t & 1U) != 0) state.word[i] ^= state.word[i + t - 32];
    }
  }
  crc32c_state out = next;
  LLMMEM_UNROLL
  for (std::uint32_t i = 0; i < 32; ++i) {
    LLMMEM_UNROLL
    for (std::uint32_t t = 0; t + i < 32; ++t) {
      if ((terms >> t & 1U) != 0) out.word[i] ^= state.word[i + t];
    }
  }
  state = out;
}

/// Halves a state whose last 2 * Width words are left: reduces the part above 32 * Width bits, modulo
/// P(x^Width).
template <std::uint32_t Width>
LLMMEM_HD inline void crc32c_halve(crc32c_state& state) noexcept {
  static_assert(Width == 16 || Width == 8,
                "Width must be 16 or 8: otherwise a word would be added to itself");
  constexpr std::uint32_t terms = crc32c_terms;
  LLMMEM_UNROLL
  for (std::uint32_t i = 32 - 2 * Width; i < 32 - Width; ++i) {
    const std::uint32_t word = state.word[i];
    LLMMEM_UNROLL
    for (std::uint32_t t = 0; t <= crc32c_highest_term; ++t) {
      if ((terms >> t & 1U) == 0) continue;
      // The distance in bits, of which the first of a word is the lowest.
      const std::uint32_t by = Width * (32 - t);
      const std::uint32_t to = i + by / 32;
      if (by % 32 == 0) {
        state.word[to] ^= word;
      } else {
        state.word[to] ^= word << (by % 32);
        state.word[to + 1] ^= word >> (32 - by % 32);
      }
    }
  }
}

/// x^(32 * (8 - i)), the coefficient of x^0 in the highest bit: the factor of word i of the last eight.
struct crc32c_last_powers {
  std::uint32_t of[8];
};
[[nodiscard]] LLMMEM_HD constexpr crc32c_last_powers make_crc32c_last_powers() noexcept {
  crc32c_last_powers out{};
  std::uint32_t word = 0x0080'0000U;  // x^8
  word = crc32c_product(word, word);
  word = crc32c_product(word, word);
  std::uint32_t power = word;
  for (std::uint32_t i = 8; i-- != 0; power = crc32c_product(power, word))
    out.of[i] = power;
  return out;
}

/// `a` times x.
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t crc32c_times_x(std::uint32_t a) noexcept {
  return (a >> 1) ^ ((a & 1U) != 0 ? 0x82F6'3B78U : 0U);
}

/// Returns the remainder of all words taken, times x^32: the register of a CRC that began with zeros.
[[nodiscard]] LLMMEM_HD inline std::uint32_t crc32c_register(crc32c_state state) noexcept {
  constexpr crc32c_last_powers powers = make_crc32c_last_powers();
  crc32c_halve<16>(state);
  crc32c_halve<8>(state);
  std::uint32_t sum = 0;
  // All eight at once, bit by bit from the highest power on.
  for (std::uint32_t bit = 0; bit < 32; ++bit) {
    sum = crc32c_times_x(sum);
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < 8; ++i) {
      std::uint32_t& word = state.word[24 + i];
      sum ^= (0U - (word & 1U)) & powers.of[i];
      word >>= 1;
    }
  }
  return sum;
}

/// Returns the sum after another byte.
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t crc32c_next(std::uint32_t sum, std::uint32_t byte) noexcept {
  sum ^= byte;
  for (std::uint32_t bit = 0; bit < 8; ++bit)
    sum = crc32c_times_x(sum);
  return sum;
}

/// Powers of x^8 by the hexadecimal digits of the exponent: of x^(8 * value * 16^digit). They travel with a
/// launch.
class crc32c_powers {
 public:
  static constexpr std::uint32_t digits = 12;  ///< below 2^48 bytes

  constexpr crc32c_powers() noexcept {
    std::uint32_t power = 0x0080'0000U;  // x^8
    for (auto& of_digit : power_) {
      of_digit[0] = 0x8000'0000U;  // 1
      for (std::uint32_t value = 1; value < 16; ++value)
        of_digit[value] = crc32c_product(of_digit[value - 1], power);
      power = crc32c_product(of_digit[15], power);
    }
  }
  /// Returns a register after `bytes` further zero bytes. @pre bytes < 2^48
  [[nodiscard]] LLMMEM_HD std::uint32_t past(std::uint32_t sum, std::uint64_t bytes) const noexcept {
    for (std::uint32_t digit = 0; bytes != 0; ++digit, bytes >>= 4) {
      if ((bytes & 15U) != 0) sum = crc32c_product(power_[digit][bytes & 15U], sum);
    }
    return sum;
  }

 private:
  std::uint32_t power_[digits][16]{};
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
