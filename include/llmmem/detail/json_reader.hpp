/// @file
/// A JSON reader for untrusted input: one pass, bounded depth, and an error that names the byte.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns the length of the UTF-8 sequence at the beginning of `text`, or 0 if it is not one: overlong
/// forms, surrogates and code points past U+10FFFF are not valid (RFC 3629).
[[nodiscard]] constexpr std::size_t utf8_length(std::string_view text) noexcept {
  const auto byte = [&](std::size_t i) -> unsigned {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  const auto continues = [&](std::size_t i) { return (byte(i) & 0xC0U) == 0x80U; };
  const unsigned first = byte(0);
  if (text.empty()) return 0;
  if (first < 0x80U) return 1;
  if (first >= 0xC2U && first <= 0xDFU) return continues(1) ? 2 : 0;
  if (first >= 0xE0U && first <= 0xEFU) {
    const bool is_overlong = first == 0xE0U && byte(1) < 0xA0U;
    const bool is_surrogate = first == 0xEDU && byte(1) > 0x9FU;
    return continues(1) && continues(2) && !is_overlong && !is_surrogate ? 3 : 0;
  }
  if (first >= 0xF0U && first <= 0xF4U) {
    const bool is_overlong = first == 0xF0U && byte(1) < 0x90U;
    const bool is_past_the_end = first == 0xF4U && byte(1) > 0x8FU;
    return continues(1) && continues(2) && continues(3) && !is_overlong && !is_past_the_end ? 4 : 0;
  }
  return 0;
}

[[nodiscard]] constexpr bool is_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

/// Reads one value after the other, as its caller expects them; refuses anything else.
///
/// @par Errors   everything throws `format_error`: the name of the input, the byte, what is wrong with it.
class json_reader {
 public:
  /// @param begin  offset of `text` in the file, for error texts.
  json_reader(std::string_view text, std::uint64_t begin, std::string what) noexcept
      : text_(text), begin_(begin), what_(std::move(what)) {}

  /// Returns the next character that is not white space; '\0' at the end.
  [[nodiscard]] char next() noexcept {
    while (at_ < text_.size() && is_space(text_[at_]))
      ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  [[nodiscard]] bool take(char wanted) noexcept {
    if (next() != wanted || at_ == text_.size()) return false;
    ++at_;
    return true;
  }
  void expect(char wanted) {
    if (!take(wanted)) refuse(std::string("'") + wanted + "' must be here");
  }
  /// Requires that only white space is left.
  void expect_end() {
    if (next() != '\0' || at_ != text_.size()) refuse("the JSON must end here");
  }

  /// Reads a string and resolves its escapes.
  [[nodiscard]] std::string string() {
    expect('"');
    std::string made;
    for (;;) {
      if (at_ == text_.size()) refuse("a string has no end");
      const char c = text_[at_];
      if (c == '"') break;
      if (static_cast<unsigned char>(c) < 0x20) refuse("a string contains a control character");
      if (c == '\\') {
        append_escape(made);
        continue;
      }
      const std::size_t length = utf8_length(text_.substr(at_));
      if (length == 0) refuse("a string is not UTF-8");
      made.append(text_.substr(at_, length));
      at_ += length;
    }
    ++at_;
    return made;
  }

  /// Reads a whole number that is not negative, without sign, fraction, exponent or leading zeros.
  [[nodiscard]] std::uint64_t number() {
    if (!is_digit(next())) refuse("a whole number that is not negative is expected here");
    const std::size_t first = at_;
    std::uint64_t value = 0;
    for (; at_ < text_.size() && is_digit(text_[at_]); ++at_) {
      const auto digit = static_cast<std::uint64_t>(text_[at_] - '0');
      if (value > (~std::uint64_t{0} - digit) / 10) refuse("a number of more than 64 bits");
      value = value * 10 + digit;
    }
    if (text_[first] == '0' && at_ - first > 1) refuse("a number with leading zeros");
    if (at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E'))
      refuse("a whole number is expected here");
    return value;
  }

  /// Calls `each(key)` for every key of an object; it reads the value.
  template <class Each>
  void object(Each each) {
    expect('{');
    if (take('}')) return;
    do {
      const std::string key = string();
      expect(':');
      each(key);
    } while (take(','));
    expect('}');
  }
  /// Calls `each()` for every element of an array; it reads the element.
  template <class Each>
  void array(Each each) {
    expect('[');
    if (take(']')) return;
    do {
      each();
    } while (take(','));
    expect(']');
  }

  /// Skips any value at most `depth` deep.
  void skip(unsigned depth) {
    if (depth == 0) refuse("the JSON is nested too deep");
    switch (next()) {
      case '{':
        return object([&](const std::string&) { skip(depth - 1); });
      case '[':
        return array([&] { skip(depth - 1); });
      case '"':
        static_cast<void>(string());
        return;
      case 't':
        return skip_word("true");
      case 'f':
        return skip_word("false");
      case 'n':
        return skip_word("null");
      default:
        return skip_number();
    }
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw format_error(what_ + ": byte " + std::to_string(begin_ + at_) + ": " + why);
  }

 private:
  [[nodiscard]] static constexpr bool is_space(char c) noexcept {
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
  }
  [[nodiscard]] static constexpr bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }

  void skip_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) refuse("not a JSON value");
    at_ += word.size();
  }
  void skip_digits() {
    if (at_ == text_.size() || !is_digit(text_[at_])) refuse("not a JSON value");
    while (at_ < text_.size() && is_digit(text_[at_]))
      ++at_;
  }
  void skip_number() {
    static_cast<void>(take('-'));
    const std::size_t first = at_;
    skip_digits();
    if (text_[first] == '0' && at_ - first > 1) refuse("a number with leading zeros");
    if (at_ < text_.size() && text_[at_] == '.') {
      ++at_;
      skip_digits();
    }
    if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      ++at_;
      if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
      skip_digits();
    }
  }

  /// Reads four hexadecimal digits.
  [[nodiscard]] std::uint32_t code_unit() {
    std::uint32_t unit = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = at_ < text_.size() ? text_[at_] : '\0';
      const bool is_lower = c >= 'a' && c <= 'f';
      const bool is_upper = c >= 'A' && c <= 'F';
      if (!is_digit(c) && !is_lower && !is_upper) refuse("\\u must have four hexadecimal digits");
      unit =
          unit * 16 + static_cast<std::uint32_t>(is_digit(c) ? c - '0' : (is_lower ? c - 'a' : c - 'A') + 10);
      ++at_;
    }
    return unit;
  }
  void append_escape(std::string& to) {
    ++at_;  // the backslash
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    constexpr std::string_view from = "\"\\/bfnrt";
    constexpr std::string_view meant = "\"\\/\b\f\n\r\t";
    if (c != 'u') {
      const std::size_t found = from.find(c);
      if (c == '\0' || found == std::string_view::npos) refuse("an unknown escape");
      to += meant[found];
      ++at_;
      return;
    }
    ++at_;
    std::uint32_t point = code_unit();
    if (point >= 0xDC00 && point <= 0xDFFF) refuse("half of a surrogate pair");
    if (point >= 0xD800 && point <= 0xDBFF) {
      if (text_.substr(at_, 2) != "\\u") refuse("half of a surrogate pair");
      at_ += 2;
      const std::uint32_t low = code_unit();
      if (low < 0xDC00 || low > 0xDFFF) refuse("half of a surrogate pair");
      point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
    }
    append_utf8(to, point);
  }
  static void append_utf8(std::string& to, std::uint32_t point) {
    const auto put = [&](std::uint32_t byte) { to += static_cast<char>(static_cast<unsigned char>(byte)); };
    if (point < 0x80) {
      put(point);
    } else if (point < 0x800) {
      put(0xC0 | (point >> 6));
      put(0x80 | (point & 0x3F));
    } else if (point < 0x10000) {
      put(0xE0 | (point >> 12));
      put(0x80 | ((point >> 6) & 0x3F));
      put(0x80 | (point & 0x3F));
    } else {
      put(0xF0 | (point >> 18));
      put(0x80 | ((point >> 12) & 0x3F));
      put(0x80 | ((point >> 6) & 0x3F));
      put(0x80 | (point & 0x3F));
    }
  }

  std::string_view text_;
  std::uint64_t begin_;
  std::string what_;
  std::size_t at_ = 0;
};

/// Appends a JSON string; escapes only what must be escaped. @pre it is UTF-8.
inline void append_json_string(std::string& to, std::string_view text) {
  constexpr std::string_view digits = "0123456789abcdef";
  constexpr std::string_view special = "\"\\\b\f\n\r\t";
  constexpr std::string_view letters = "\"\\bfnrt";
  to += '"';
  for (const char c : text) {
    if (const std::size_t found = special.find(c); found != std::string_view::npos) {
      to += '\\';
      to += letters[found];
    } else if (static_cast<unsigned char>(c) < 0x20) {
      to += "\\u00";
      to += digits[static_cast<unsigned char>(c) >> 4];
      to += digits[static_cast<unsigned char>(c) & 0xFU];
    } else {
      to += c;
    }
  }
  to += '"';
}

/// Returns a name for an error text, quoted as in JSON; long names are truncated.
[[nodiscard]] inline std::string json_quoted(std::string_view name) {
  if (!is_utf8(name)) return "(a name that is not UTF-8)";
  constexpr std::size_t most = 200;
  std::size_t shown = name.size();
  if (shown > most) {
    shown = 0;
    while (shown < most)
      shown += utf8_length(name.substr(shown));
  }
  std::string text;
  append_json_string(text, name.substr(0, shown));
  return shown == name.size() ? text : text + "...";
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
