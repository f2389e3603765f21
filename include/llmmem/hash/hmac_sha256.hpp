/// @file
/// HMAC-SHA256, with which two processes prove to each other that they know the same secret.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/detail/sha256_state.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

using sha256_words = std::array<std::uint32_t, 8>;

/// SHA-256 of bytes, added in parts.
class sha256_bytes {
 public:
  constexpr void absorb(std::span<const std::byte> bytes) noexcept {
    for (const std::byte each : bytes) {
      word_ |= std::to_integer<std::uint32_t>(each) << (24 - 8 * filled_);
      if (++filled_ != 4) continue;
      state_.absorb(word_);
      word_ = 0;
      filled_ = 0;
    }
  }
  constexpr void absorb(const sha256_words& words) noexcept {
    for (const std::uint32_t word : words) {
      const std::array<std::byte, 4> bytes{std::byte(word >> 24), std::byte((word >> 16) & 0xFFU),
                                           std::byte((word >> 8) & 0xFFU), std::byte(word & 0xFFU)};
      absorb(bytes);
    }
  }
  [[nodiscard]] constexpr sha256_words finish() noexcept { return state_.finish(word_, filled_); }

 private:
  sha256_state state_;
  std::uint32_t word_ = 0;
  std::uint32_t filled_ = 0;
};

/// HMAC (RFC 2104) with SHA-256, of messages under one key.
///
/// @par Source   RFC 2104; its vectors for SHA-256 are those of RFC 4231.
class hmac_sha256 {
 public:
  constexpr explicit hmac_sha256(std::span<const std::byte> key) noexcept {
    std::array<std::byte, 64> block{};
    if (key.size() > block.size()) {
      sha256_bytes shorter;
      shorter.absorb(key);
      const sha256_words words = shorter.finish();
      for (std::size_t i = 0; i < 32; ++i)
        block[i] = std::byte((words[i / 4] >> (24 - 8 * (i % 4))) & 0xFFU);
    } else {
      for (std::size_t i = 0; i < key.size(); ++i)
        block[i] = key[i];
    }
    for (std::byte& each : block)
      each ^= std::byte{0x36};
    inner_.absorb(block);
    for (std::byte& each : block)
      each ^= std::byte{0x36} ^ std::byte{0x5c};
    outer_.absorb(block);
  }

  /// Returns the HMAC of the concatenated parts.
  template <class... Parts>
  [[nodiscard]] constexpr sha256_words of(const Parts&... parts) const noexcept {
    sha256_bytes inner = inner_;
    (inner.absorb(std::span<const std::byte>(parts)), ...);
    sha256_bytes outer = outer_;
    outer.absorb(inner.finish());
    return outer.finish();
  }

 private:
  sha256_bytes inner_;
  sha256_bytes outer_;
};

/// Compares in the same time, regardless of where the bytes differ.
[[nodiscard]] constexpr bool is_equal_in_constant_time(std::span<const std::byte> a,
                                                       std::span<const std::byte> b) noexcept {
  if (a.size() != b.size()) return false;
  std::byte differs{0};
  for (std::size_t i = 0; i < a.size(); ++i)
    differs |= a[i] ^ b[i];
  return differs == std::byte{0};
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
