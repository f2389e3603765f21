/// @file
/// The strings of `json_line` with more than plain ASCII: escapes, surrogate pairs and UTF-8.
#pragma once

#include "replay_trace/json_line.hpp"

namespace replay_trace {

inline std::string_view json_line::read_escaped_string(std::size_t start) {
  unescaped_.assign(text_.substr(start, at_ - start));
  for (;;) {
    const int c = peek();
    if (c == none) fault("a string is not closed");
    if (c == '"') {
      ++at_;
      return unescaped_;
    }
    if (c < 0x20) fault("a control byte stands in a string");
    if (c == '\\') {
      read_escape();
    } else if (c >= 0x80) {
      read_utf8();
    } else {
      unescaped_ += text_[at_++];
    }
  }
}

inline void json_line::read_escape() {
  constexpr std::string_view letters = "\"\\/bfnrt";
  constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
  ++at_;
  const int c = peek();
  if (c == 'u') {
    ++at_;
    std::uint32_t code = read_hex4();
    if (code >= 0xdc00 && code <= 0xdfff) fault("half of a surrogate pair stands alone");
    if (code >= 0xd800 && code <= 0xdbff) {
      if (text_.substr(at_, 2) != "\\u") fault("half of a surrogate pair stands alone");
      at_ += 2;
      const std::uint32_t low = read_hex4();
      if (low < 0xdc00 || low > 0xdfff) fault("half of a surrogate pair stands alone");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    append_utf8(code);
    return;
  }
  const std::size_t which = c == none ? letters.npos : letters.find(static_cast<char>(c));
  if (which == letters.npos) fault("a string has an unknown escape");
  unescaped_ += meanings[which];
  ++at_;
}

inline std::uint32_t json_line::read_hex4() {
  std::uint32_t code = 0;
  for (int i = 0; i < 4; ++i, ++at_) {
    const int c = peek();
    if (is_digit(c)) {
      code = code * 16 + static_cast<std::uint32_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      code = code * 16 + static_cast<std::uint32_t>(c - 'a' + 10);
    } else if (c >= 'A' && c <= 'F') {
      code = code * 16 + static_cast<std::uint32_t>(c - 'A' + 10);
    } else {
      fault("\\u needs four hexadecimal digits");
    }
  }
  return code;
}

inline void json_line::read_utf8() {
  const auto lead = static_cast<unsigned char>(text_[at_]);
  const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  std::uint32_t code = lead & (0xffU >> (length + 1));
  bool valid = lead >= 0xc2 && lead <= 0xf4 && text_.size() - at_ >= length;
  for (std::size_t i = 1; valid && i < length; ++i) {
    const auto next = static_cast<unsigned char>(text_[at_ + i]);
    valid = (next & 0xc0U) == 0x80;
    code = (code << 6) | (next & 0x3fU);
  }
  const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  if (!valid || overlong || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) {
    fault("a string is not valid UTF-8");
  }
  unescaped_.append(text_.substr(at_, length));
  at_ += length;
}

inline void json_line::append_utf8(std::uint32_t code) {
  const auto put = [this](std::uint32_t byte) { unescaped_ += static_cast<char>(byte); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xc0 | (code >> 6));
    put(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    put(0xe0 | (code >> 12));
    put(0x80 | ((code >> 6) & 0x3f));
    put(0x80 | (code & 0x3f));
  } else {
    put(0xf0 | (code >> 18));
    put(0x80 | ((code >> 12) & 0x3f));
    put(0x80 | ((code >> 6) & 0x3f));
    put(0x80 | (code & 0x3f));
  }
}

}  // namespace replay_trace
