/// @file
/// `block_digest`: a sum of 64 bits over bytes, for many threads in any order. The same on host and device.
#pragma once

#include <llmmem/config.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::uint64_t digest_position = 0x9E37'79B9'7F4A'7C15U;  // 2^64 / the golden ratio, odd
inline constexpr std::uint64_t digest_length = 0xD1B5'4A32'D192'ED03U;

/// Returns the square's halves joined: each bit of `x` affects many, in a way that depends on the others.
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t digest_square(std::uint32_t x) noexcept {
  const std::uint64_t square = std::uint64_t{x} * x;
  return static_cast<std::uint32_t>(square >> 32) ^ static_cast<std::uint32_t>(square);
}

/// Returns what word number `i` adds, with `key` equal to `digest_key(i)`: three rounds of a Feistel network
/// over its halves, so the mapping is one to one for each position.
[[nodiscard]] LLMMEM_HD constexpr std::uint64_t digest_word(std::uint32_t low, std::uint32_t high,
                                                            std::uint64_t key) noexcept {
  const auto first = static_cast<std::uint32_t>(key);
  const auto second = static_cast<std::uint32_t>(key >> 32);
  high ^= digest_square(low + first);
  low ^= digest_square(high + second);
  high ^= digest_square(low + (first ^ second));
  return std::uint64_t{high} << 32 | low;
}

[[nodiscard]] LLMMEM_HD constexpr std::uint64_t digest_key(std::uint64_t word) noexcept {
  return (word + 1) * digest_position;
}

/// Returns the number that a length adds: one to one, as for words.
[[nodiscard]] LLMMEM_HD constexpr std::uint64_t digest_start(std::uint64_t bytes) noexcept {
  return digest_word(static_cast<std::uint32_t>(bytes), static_cast<std::uint32_t>(bytes >> 32),
                     digest_length);
}

}  // namespace detail

/// Returns a digest of `bytes`, with so few operations that the kernels of
/// <llmmem/kernels/block_checksum.hpp> should wait for memory alone (not yet measured). It detects damage by
/// devices, links and mistakes. It is not a cryptographic hash: an attacker can construct other bytes with
/// the same digest.
///
/// **Definition.** The bytes, padded with zeros to a multiple of 16, are little-endian words of 64 bits,
/// numbered from 0. The digest is the sum modulo 2^64 of `f(word, (number + 1) * 0x9E3779B97F4A7C15)` over
/// all of them, and of `f(length, 0xD1B54A32D192ED03)`, the length in bytes. In `f(word, key)` `low` and
/// `high` are the word's halves, `a` and `b` the key's, lower and upper; `q(x)` is the upper half of the
/// 64-bit square of the 32-bit `x`, xor the lower; then
///
///     high ^= q(low + a);  low ^= q(high + b);  high ^= q(low + (a ^ b));  // sums modulo 2^32
///
/// and the halves together are the result.
///
/// **Promised.** `f` is one to one for each key, and so is what a length adds. Of two sequences
/// - of the same length that differ within one word, the digests always differ;
/// - that differ by zeros at the end within the same 16 bytes, the digests always differ;
/// - that differ otherwise, by chance and not by intent, the digests are equal about once in 2^64. That is
///   not proved but tested: of 2^31 pairs of flipped bits, signs among them, and as many exchanged words, in
///   random and in poor data, neither half of the digest stayed the same more often than by chance.
///
/// The order of summation has no effect: any thread may add a part at any time.
///
/// @par Complexity      O(bytes): three multiplications for 8 bytes.
/// @par Thread safety   any number at once.
/// @par Errors          none.
/// @par Source   our own. Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom
///      functions", 1988, for the rounds; sums of functions of words and places are as old as Carter and
///      Wegman, "Universal classes of hash functions", 1979.
[[nodiscard]] constexpr std::uint64_t block_digest(std::span<const std::byte> bytes) noexcept {
  std::uint64_t sum = detail::digest_start(bytes.size());
  const std::size_t words = (bytes.size() + 15) / 16 * 2;
  for (std::size_t i = 0; i < words; ++i) {
    std::uint32_t halves[2]{};
    if (!std::is_constant_evaluated() && bytes.size() >= i * 8 + 8) {
      std::memcpy(halves, bytes.data() + i * 8, 8);
    } else {
      for (std::size_t k = 0; k < 8 && i * 8 + k < bytes.size(); ++k)
        halves[k / 4] |= static_cast<std::uint32_t>(bytes[i * 8 + k]) << (k % 4 * 8);
    }
    sum += detail::digest_word(halves[0], halves[1], detail::digest_key(i));
  }
  return sum;
}

}  // namespace v0
}  // namespace llmmem
