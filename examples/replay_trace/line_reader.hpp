/// @file
/// Lines of a byte source, in bounded memory for any contents.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "replay_trace/byte_source.hpp"

namespace replay_trace {

/// One line without its end (`\n` or `\r\n`).
struct text_line {
  std::string_view text;  ///< valid until the next call of `next()`; only the first bytes if not `whole`
  std::uint64_t number;   ///< from 1
  bool whole;             ///< false: the line passes the reader's limit
};

/// Reads lines through one buffer that grows to the longest line, and never past `max_line_bytes` + 2.
///
/// A longer line is returned once, cut and marked; its rest is skipped when the caller asks for the next
/// line. The last line needs no newline.
///
/// @par Complexity   O(bytes); memory O(longest line).
/// @par Errors   the source's exceptions.
template <byte_source Source>
class line_reader {
 public:
  line_reader(Source& source, std::size_t max_line_bytes)
      : source_(&source), max_line_(max_line_bytes), buffer_(std::min(first_buffer, max_line_bytes + 2)) {}

  /// The next line, or nothing at the end.
  [[nodiscard]] std::optional<text_line> next() {
    if (inside_long_line_) skip_line();
    std::size_t searched = 0;
    for (;;) {
      const std::string_view held = unread();
      const std::size_t newline = held.find('\n', searched);
      if (newline != held.npos) {
        begin_ += newline + 1;
        return finish(held.substr(0, newline));
      }
      if (held.size() > max_line_ + 1) {  // one more than the limit may still be a '\r'
        inside_long_line_ = true;
        begin_ = end_;
        return text_line{held.substr(0, max_line_), ++number_, false};
      }
      searched = held.size();
      if (!fill()) {
        const std::string_view last = unread();  // `held` may have moved
        if (last.empty()) return std::nullopt;
        begin_ = end_;
        return finish(last);
      }
    }
  }

 private:
  static constexpr std::size_t first_buffer = std::size_t{256} << 10;

  [[nodiscard]] std::string_view unread() const noexcept { return {buffer_.data() + begin_, end_ - begin_}; }

  text_line finish(std::string_view line) {
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    ++number_;
    if (line.size() > max_line_) return {line.substr(0, max_line_), number_, false};
    return {line, number_, true};
  }

  /// Reads more bytes after the held ones, and moves or grows the buffer for them. Returns false at the end.
  bool fill() {
    if (begin_ > 0) {
      std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
    }
    if (end_ == buffer_.size()) buffer_.resize(std::min(buffer_.size() * 2, max_line_ + 2));
    const std::size_t got = source_->read(std::span(buffer_).subspan(end_));
    end_ += got;
    return got > 0;
  }

  void skip_line() {
    inside_long_line_ = false;
    do {
      const std::size_t newline = unread().find('\n');
      if (newline != std::string_view::npos) {
        begin_ += newline + 1;
        return;
      }
      begin_ = end_ = 0;
    } while (fill());
  }

  Source* source_;
  std::size_t max_line_;
  std::vector<char> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::uint64_t number_ = 0;
  bool inside_long_line_ = false;
};

}  // namespace replay_trace
