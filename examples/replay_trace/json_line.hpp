/// @file
/// A strict forward reader of one line of JSON, for input that may be hostile.
#pragma once

#include <llmmem/error.hpp>

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "common/text.hpp"

namespace replay_trace {

/// The fault of a line and its position; the trace reader adds file and line number.
class line_fault : public llmmem::error {
 public:
  line_fault(std::size_t offset, const std::string& reason) : error(reason), offset_(offset) {}
  /// The byte in the line, from 0.
  [[nodiscard]] std::size_t offset() const noexcept { return offset_; }

 private:
  std::size_t offset_;
};

/// Walks one JSON object (RFC 8259) from left to right: `begin_object`, then `next_key` and one value read or
/// skipped for each key, then `end`.
///
/// Accepts only valid JSON: no trailing commas, no comments, no NaN, strings of valid UTF-8 with valid
/// escapes, at most 64 levels deep. Numbers are read as their target type, so no length passes through a
/// double.
///
/// @par Complexity   one pass; allocates only for strings with escapes or non-ASCII bytes.
/// @par Errors   every function throws `line_fault`.
class json_line {
 public:
  static constexpr int max_depth = 64;

  /// @param text  must live as long as this object.
  explicit json_line(std::string_view text) noexcept : text_(text) {}

  [[nodiscard]] std::size_t offset() const noexcept { return at_; }

  void begin_object() {
    skip_space();
    if (peek() != '{') fault("a JSON object must begin with '{'");
    ++at_;
    first_ = true;
  }

  /// The next key with its escapes resolved, or nothing at the object's end. Valid until the next call.
  [[nodiscard]] std::optional<std::string_view> next_key() {
    skip_space();
    if (peek() == '}') {
      ++at_;
      return std::nullopt;
    }
    if (!first_) {
      if (peek() != ',') fault("expected ',' or '}'");
      ++at_;
      skip_space();
    }
    first_ = false;
    key_offset_ = at_;
    const std::string_view key = read_string("a field name");
    skip_space();
    if (peek() != ':') fault("expected ':' after a field name");
    ++at_;
    return key;
  }

  /// Where the last returned key begins.
  [[nodiscard]] std::size_t key_offset() const noexcept { return key_offset_; }

  /// A whole number from 0 to 2^64 - 1, written without fraction or exponent.
  [[nodiscard]] std::uint64_t read_whole(std::string_view field) {
    skip_space();
    return read_digits(at_, field);
  }

  /// A whole number from -2^63 to 2^64 - 1.
  struct integer {
    std::uint64_t bits;  ///< two's complement for one below 0
    bool negative;
  };
  [[nodiscard]] integer read_integer(std::string_view field) {
    constexpr std::uint64_t lowest = std::uint64_t{1} << 63;
    skip_space();
    const std::size_t start = at_;
    if (peek() != '-') return {read_digits(start, field), false};
    ++at_;
    if (!is_digit(peek())) refuse(start, field, "is not a number");
    const std::uint64_t value = read_digits(start, field);
    if (value > lowest) refuse(start, field, "passes -2^63");
    return {~value + 1, value != 0};
  }

  /// A string. Valid until the next call.
  [[nodiscard]] std::string_view read_text(std::string_view field) {
    skip_space();
    if (peek() != '"') refuse(at_, field, "is not a string");
    return read_string("a string");
  }

  /// Whether the next value is a string.
  [[nodiscard]] bool at_text() noexcept {
    skip_space();
    return peek() == '"';
  }

  /// Skips the next value if it is null, and returns whether it was.
  [[nodiscard]] bool take_null() {
    skip_space();
    if (peek() != 'n') return false;
    skip_word("null");
    return true;
  }

  /// A nonnegative number; fractions and exponents are allowed.
  [[nodiscard]] double read_decimal(std::string_view field) {
    skip_space();
    const std::size_t start = at_;
    if (peek() == '-') refuse(start, field, "is negative");
    if (!is_digit(peek())) refuse(start, field, "is not a number");
    skip_number();
    if (!ends_value(peek())) refuse(start, field, "is not a number");
    double value = 0;
    const auto status = std::from_chars(text_.data() + start, text_.data() + at_, value).ec;
    if (status != std::errc{}) refuse(start, field, "is out of range");
    return value;
  }

  /// An array of whole numbers from -2^63 to 2^64 - 1, each given to `take` as an `integer`.
  template <class Take>
  void read_integers(std::string_view field, Take&& take) {
    skip_space();
    if (peek() != '[') refuse(at_, field, "is not an array");
    ++at_;
    skip_space();
    if (peek() == ']') {
      ++at_;
      return;
    }
    for (;;) {
      take(read_integer(field));
      skip_space();
      const int next = peek();
      if (next != ',' && next != ']') fault("expected ',' or ']' in " + std::string(field));
      ++at_;
      if (next == ']') return;
    }
  }

  /// Skips one value of any type, and checks it.
  void skip_value(int depth = 1) {
    skip_space();
    switch (peek()) {
      case '{':
      case '[':
        skip_nested(depth);
        return;
      case '"':
        read_string("a string");
        return;
      case 't':
        skip_word("true");
        return;
      case 'f':
        skip_word("false");
        return;
      case 'n':
        skip_word("null");
        return;
      default:
        skip_number();
    }
  }

  /// Checks that only space is left.
  void end() {
    skip_space();
    if (at_ != text_.size()) fault("something follows the end of the object");
  }

 private:
  static constexpr int none = -1;

  [[nodiscard]] int peek() const noexcept {
    return at_ < text_.size() ? static_cast<unsigned char>(text_[at_]) : none;
  }
  static constexpr bool is_digit(int c) noexcept { return c >= '0' && c <= '9'; }
  static constexpr bool ends_value(int c) noexcept {
    return c == none || c == ',' || c == ']' || c == '}' || c == ' ' || c == '\t' || c == '\r' || c == '\n';
  }
  void skip_space() noexcept {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\r'))
      ++at_;
  }

  [[noreturn]] void fault(std::string reason) const {
    if (at_ >= text_.size()) reason += ", but the line ends";
    throw line_fault(at_, reason);
  }
  /// Throws a fault for `field`, with the text there.
  [[noreturn]] void refuse(std::size_t start, std::string_view field, const char* why) const {
    std::size_t end = start;
    while (end < text_.size() && !ends_value(static_cast<unsigned char>(text_[end])))
      ++end;
    const std::string_view token = text_.substr(start, end - start);
    throw line_fault(start, std::string(field) + " " + why + ": " +
                                (token.empty() ? "nothing there" : example::printable(token, 24)));
  }

  /// The digits of a whole number that begins at `start`, a sign included.
  [[nodiscard]] std::uint64_t read_digits(std::size_t start, std::string_view field) {
    const std::size_t first = at_;
    std::uint64_t value = 0;
    while (is_digit(peek())) {
      const auto digit = static_cast<std::uint64_t>(text_[at_] - '0');
      if (value > (std::numeric_limits<std::uint64_t>::max() - digit) / 10) {
        refuse(start, field, start == first ? "passes 2^64 - 1" : "passes -2^63");
      }
      value = value * 10 + digit;
      ++at_;
    }
    const std::size_t digits = at_ - first;
    const int next = peek();
    if (digits == 0) refuse(start, field, next == '-' ? "is negative" : "is not a number");
    if (digits > 1 && text_[first] == '0') refuse(start, field, "has a leading zero");
    if (next == '.' || next == 'e' || next == 'E') refuse(start, field, "is not a whole number");
    if (!ends_value(next)) refuse(start, field, "is not a number");
    return value;
  }

  void skip_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) fault("expected a value");
    at_ += word.size();
    if (!ends_value(peek())) fault("expected a value");
  }

  void skip_digits() {
    if (!is_digit(peek())) fault("expected a digit");
    while (is_digit(peek()))
      ++at_;
  }

  void skip_number() {
    if (peek() == '-') ++at_;
    if (!is_digit(peek())) fault("expected a value");
    if (peek() == '0') {
      ++at_;
    } else {
      skip_digits();
    }
    if (peek() == '.') {
      ++at_;
      skip_digits();
    }
    if (peek() == 'e' || peek() == 'E') {
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      skip_digits();
    }
  }

  void skip_nested(int depth) {
    if (depth >= max_depth) fault("nested more than 64 levels deep");
    const bool object = peek() == '{';
    const int close = object ? '}' : ']';
    ++at_;
    skip_space();
    if (peek() == close) {
      ++at_;
      return;
    }
    for (;;) {
      if (object) {
        skip_space();
        read_string("a field name");
        skip_space();
        if (peek() != ':') fault("expected ':' after a field name");
        ++at_;
      }
      skip_value(depth + 1);
      skip_space();
      const int next = peek();
      if (next != ',' && next != close) fault(object ? "expected ',' or '}'" : "expected ',' or ']'");
      ++at_;
      if (next == close) return;
    }
  }

  std::string_view read_string(const char* what) {
    if (peek() != '"') fault(std::string("expected ") + what + " in quotes");
    const std::size_t start = ++at_;
    while (plain(peek()))
      ++at_;
    if (peek() == '"') return text_.substr(start, at_++ - start);
    return read_escaped_string(start);
  }
  /// The slow path: escapes, UTF-8, and all errors.
  std::string_view read_escaped_string(std::size_t start);
  void read_escape();
  [[nodiscard]] std::uint32_t read_hex4();
  void read_utf8();
  void append_utf8(std::uint32_t code);

  static constexpr bool plain(int c) noexcept { return c >= 0x20 && c < 0x80 && c != '"' && c != '\\'; }

  std::string_view text_;
  std::size_t at_ = 0;
  std::size_t key_offset_ = 0;
  bool first_ = true;
  std::string unescaped_;
};

}  // namespace replay_trace

#include "replay_trace/detail/json_string.hpp"
