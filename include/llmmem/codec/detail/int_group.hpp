/// @file
/// A group of floats in memory as integers of few bits: its largest size, and its codes in bytes.
#pragma once

#include <llmmem/model/int_rounding.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The bits of the largest size of `count` floats: floats are ordered as their bits, infinity and NaNs above
/// all.
[[nodiscard]] inline std::uint32_t largest_size(const std::byte* in, std::size_t count) noexcept {
  std::array<std::uint32_t, 16> most{};
  std::array<std::uint32_t, 16> some{};
  for (std::size_t at = 0; at < count; at += most.size()) {
    const std::size_t now = std::min(most.size(), count - at);
    if (now != some.size()) some = {};
    std::memcpy(some.data(), in + 4 * at, 4 * now);
    for (std::size_t k = 0; k < most.size(); ++k)
      most[k] = std::max(most[k], some[k] & 0x7FFF'FFFFU);
  }
  return *std::ranges::max_element(most);
}

/// Codes of `Bits` bits in bytes, the first in the lowest bits.
template <unsigned Bits>
struct packed_codes {
  static constexpr std::size_t per_byte = 8 / Bits;
  static constexpr std::size_t tile = 32;
  static constexpr std::uint32_t mask = (1U << Bits) - 1;
  /// The code that has no positive counterpart: no encoder writes it.
  static constexpr std::uint32_t unused = 1U << (Bits - 1);

  [[nodiscard]] static constexpr std::size_t bytes(std::size_t codes) noexcept {
    return codes / per_byte + (codes % per_byte != 0 ? 1 : 0);
  }

  /// Writes `bytes(count)` bytes of codes. @param code_of  `int32_t(float, element)`
  template <class CodeOf>
  static void write(const std::byte* in, std::size_t count, std::byte* out, CodeOf code_of) noexcept {
    std::array<float, tile> values{};
    std::array<std::uint32_t, tile> codes{};
    std::array<std::uint8_t, tile / per_byte> packed{};
    for (std::size_t at = 0; at < count; at += tile) {
      const std::size_t now = std::min(tile, count - at);
      if (now != tile) values = {};
      std::memcpy(values.data(), in + 4 * at, 4 * now);
      for (std::size_t k = 0; k < tile; ++k)
        codes[k] = static_cast<std::uint32_t>(code_of(values[k], static_cast<std::uint32_t>(at + k))) & mask;
      for (std::size_t k = 0; k < packed.size(); ++k) {
        std::uint32_t byte = 0;
        for (std::size_t part = 0; part < per_byte; ++part)
          byte |= codes[k * per_byte + part] << (part * Bits);
        packed[k] = static_cast<std::uint8_t>(byte);
      }
      std::memcpy(out + at / per_byte, packed.data(), bytes(now));
    }
  }

  /// Reads `bytes(count)` bytes of codes. Returns how many codes no encoder writes, bits behind the last
  /// included.
  /// @param value_of  `float(int32_t)`
  template <class ValueOf>
  [[nodiscard]] static std::uint32_t read(const std::byte* in, std::size_t count, std::byte* out,
                                          ValueOf value_of) noexcept {
    std::array<std::uint8_t, tile / per_byte> packed{};
    std::array<float, tile> values{};
    std::uint32_t wrong = 0;
    for (std::size_t at = 0; at < count; at += tile) {
      const std::size_t now = std::min(tile, count - at);
      if (now != tile) packed = {};
      std::memcpy(packed.data(), in + at / per_byte, bytes(now));
      for (std::size_t k = 0; k < tile; ++k) {
        const std::uint32_t code = (std::uint32_t{packed[k / per_byte]} >> (k % per_byte * Bits)) & mask;
        wrong += code == unused || (k >= now && code != 0) ? 1U : 0U;
        values[k] = value_of(static_cast<std::int32_t>(code ^ unused) - static_cast<std::int32_t>(unused));
      }
      std::memcpy(out + 4 * at, values.data(), 4 * now);
    }
    return wrong;
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
