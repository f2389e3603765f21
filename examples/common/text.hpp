/// @file
/// Text for people and programs: untrusted bytes made printable or a JSON string, counts with separators,
/// bytes with units, strict counts.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace example {

/// Returns `text` safe for a terminal: at most `limit` bytes, with control and non-ASCII bytes, quotes and
/// backslashes escaped. `...` marks a cut.
[[nodiscard]] inline std::string printable(std::string_view text, std::size_t limit = 64) {
  std::string shown;
  for (const char c : text.substr(0, limit)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      shown += '\\';
      shown += c;
    } else if (c == '\t') {
      shown += "\\t";
    } else if (byte < 0x20 || byte >= 0x7f) {
      shown += fmt::format("\\x{:02x}", byte);
    } else {
      shown += c;
    }
  }
  if (text.size() > limit) shown += "...";
  return shown;
}

/// Returns the part of `line` around `offset`, printable, with `...` at cuts.
[[nodiscard]] inline std::string printable_around(std::string_view line, std::size_t offset) {
  constexpr std::size_t before = 24;
  constexpr std::size_t shown = 56;
  const std::size_t at = std::min(offset, line.size());
  const std::size_t from = at > before ? at - before : 0;
  return (from > 0 ? "..." : "") + printable(line.substr(from), shown);
}

/// `text` as a JSON string with its quotes. Bytes that are not UTF-8, which a path may contain, become
/// U+FFFD.
[[nodiscard]] inline std::string json_string(std::string_view text) {
  const auto continuation = [&](std::size_t at) {
    return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0U) == 0x80;
  };
  std::string out = "\"";
  for (std::size_t i = 0; i < text.size();) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += text[i++];
    } else if (c < 0x20 || c == 0x7f) {
      out += fmt::format("\\u{:04x}", c);
      ++i;
    } else if (c < 0x80) {
      out += text[i++];
    } else {
      const std::size_t length = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : 2;
      const auto second = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
      // Table 3-7 of the Unicode standard: the second byte's range depends on the first.
      bool valid = c >= 0xc2 && c <= 0xf4 && continuation(i + 1) && !(c == 0xe0 && second < 0xa0) &&
                   !(c == 0xed && second > 0x9f) && !(c == 0xf0 && second < 0x90) &&
                   !(c == 0xf4 && second > 0x8f);
      for (std::size_t k = 2; k < length; ++k)
        valid = valid && continuation(i + k);
      out += valid ? text.substr(i, length) : "\xef\xbf\xbd";
      i += valid ? length : 1;
    }
  }
  return out + '"';
}

/// `1234567` as `1,234,567`.
[[nodiscard]] inline std::string grouped(std::uint64_t value) {
  std::string text = std::to_string(value);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<std::size_t>(at), 1, ',');
  }
  return text;
}

/// `value` with three significant digits and one of `units`, each `step` times the previous one.
template <std::size_t N>
[[nodiscard]] std::string scaled(double value, double step, const std::array<const char*, N>& units) {
  std::size_t unit = 0;
  while (value >= step && unit + 1 < N) {
    value /= step;
    ++unit;
  }
  const int digits = unit == 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return fmt::format("{:.{}f} {}", value, digits, units.at(unit));
}

/// `1536` as `1.50 KiB`.
[[nodiscard]] inline std::string bytes_text(double bytes) {
  constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  return scaled(bytes, 1024, units);
}

/// `144793821` as `145 M`, `0` as `0`.
[[nodiscard]] inline std::string count_text(std::uint64_t count) {
  constexpr std::array units{"", "K", "M", "G", "T", "P", "E"};
  std::string text = scaled(static_cast<double>(count), 1000, units);
  if (text.back() == ' ') text.pop_back();
  return text;
}

/// Reads a count of decimal digits only; returns nothing for any other text or a number past 2^64 - 1.
/// (`strtoull` would take "-1", "0x10" and " 7".)
[[nodiscard]] inline std::optional<std::uint64_t> parse_count(std::string_view text) noexcept {
  if (text.empty()) return std::nullopt;
  std::uint64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    const auto digit = static_cast<std::uint64_t>(c - '0');
    if (value > (std::numeric_limits<std::uint64_t>::max() - digit) / 10) return std::nullopt;
    value = value * 10 + digit;
  }
  return value;
}

}  // namespace example
