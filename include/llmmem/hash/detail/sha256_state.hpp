/// @file
/// SHA-256 over 32-bit words.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// SHA-256 (FIPS 180-4) over 32-bit words, big-endian as in the standard. The standard's tables are the first
/// 32 bits of the fractional parts of the cube and square roots of the first primes.
class sha256_state {
 public:
  constexpr void absorb(std::uint32_t word) noexcept {
    block_[filled_++] = word;
    words_ += 1;
    if (filled_ == block_words) compress();
  }

  constexpr void absorb64(std::uint64_t word) noexcept {
    absorb(static_cast<std::uint32_t>(word >> 32));
    absorb(static_cast<std::uint32_t>(word));
  }

  /// Adds `count` more bytes, 0 to 3, the highest bytes of `last`, whose other bytes are 0. Returns the
  /// digest.
  [[nodiscard]] constexpr std::array<std::uint32_t, 8> finish(std::uint32_t last = 0,
                                                              std::uint32_t count = 0) noexcept {
    const std::uint64_t bits = words_ * 32 + std::uint64_t{count} * 8;
    absorb(last | (0x8000'0000U >> (8 * count)));
    while (filled_ != 14)
      absorb(0);
    absorb64(bits);
    return state_;
  }

 private:
  static constexpr std::size_t block_words = 16;
  static constexpr std::array<std::uint32_t, 64> constants{
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

  constexpr void compress() noexcept {
    std::array<std::uint32_t, 64> w{};
    for (std::size_t i = 0; i < block_words; ++i)
      w[i] = block_[i];
    for (std::size_t i = block_words; i < 64; ++i) {
      const std::uint32_t a = w[i - 15];
      const std::uint32_t b = w[i - 2];
      w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) + w[i - 7] +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                                  ((e & f) ^ (~e & g)) + constants[i] + w[i];
      const std::uint32_t second =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + first;
      d = c;
      c = b;
      b = a;
      a = first + second;
    }
    const std::array<std::uint32_t, 8> turned{a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i)
      state_[i] += turned[i];
    filled_ = 0;
  }

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::uint32_t block_[block_words]{};  // no std::array: nvcc 13.0 writes its length as an invalid cast
  std::size_t filled_ = 0;
  std::uint64_t words_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
