/// @file
/// Checksums in text form.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Appends eight lower-case hexadecimal digits.
inline void append_hex(std::string& to, std::uint32_t value) {
  constexpr std::string_view digits = "0123456789abcdef";
  for (int shift = 28; shift >= 0; shift -= 4)
    to += digits[(value >> shift) & 0xFU];
}

/// Returns the number that `append_hex` wrote, or nothing.
[[nodiscard]] inline std::optional<std::uint32_t> read_hex(std::string_view text) noexcept {
  if (text.size() != 8) return std::nullopt;
  std::uint32_t value = 0;
  for (const char c : text) {
    const bool is_digit = c >= '0' && c <= '9';
    if (!is_digit && !(c >= 'a' && c <= 'f')) return std::nullopt;
    value = value << 4 | static_cast<std::uint32_t>(is_digit ? c - '0' : c - 'a' + 10);
  }
  return value;
}

/// Returns the checksum of a text's bytes.
[[nodiscard]] inline std::uint32_t crc32c_of(std::string_view text) noexcept {
  return crc32c(0, std::as_bytes(std::span(text.data(), text.size())));
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
