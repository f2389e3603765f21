/// @file
/// Reads a whole trace from a byte source, telling its format, and names file, line and reason of what is
/// bad.
#pragma once

#include <llmmem/error.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "common/text.hpp"
#include "replay_trace/byte_source.hpp"
#include "replay_trace/line_reader.hpp"
#include "replay_trace/trace.hpp"
#include "replay_trace/trace_lines.hpp"

namespace replay_trace {

/// A trace that cannot be used: a malformed line, or no request at all.
class trace_error : public llmmem::error {
 public:
  using error::error;
};

/// What to do with a malformed line.
enum class bad_lines : std::uint8_t {
  refuse,  ///< throw
  skip,    ///< count it, keep the first reason, go on
};

struct read_options {
  std::optional<trace_format> format{};         ///< told from the content when empty
  std::optional<std::uint32_t> block_tokens{};  ///< tokens a hash id stands for; the format's own when empty
  bad_lines on_bad_line = bad_lines::refuse;
  std::size_t max_line_bytes = std::size_t{16} << 20;  ///< a longer line is malformed; bounds the memory
};

namespace detail {

/// Whether `line` is a JSON request whose ids stand for `block_tokens` tokens each.
[[nodiscard]] inline bool fits_blocks(std::string_view line, std::uint32_t block_tokens) {
  parsed_line unused;
  try {
    parse_json_request(line, 1, block_tokens, unused);
    return true;
  } catch (const line_fault&) {
    return false;
  }
}

/// The format of a trace whose first line is `line`. The two JSON formats are told apart by Bailian's
/// `chat_id`, or by how many ids the prompt's length has.
[[nodiscard]] inline trace_format tell_format(std::string_view line) {
  if (is_azure_header(line)) return trace_format::azure;
  if (line.find_first_not_of(" \t") != line.npos && line[line.find_first_not_of(" \t")] == '{') {
    for (const std::string_view key : {"\"chat_id\"", "\"parent_chat_id\""}) {
      if (line.find(key) != line.npos) return trace_format::bailian;
    }
    constexpr auto bailian = trace_format::bailian;
    return fits_blocks(line, default_block_tokens(bailian)) &&
                   !fits_blocks(line, default_block_tokens(trace_format::mooncake))
               ? bailian
               : trace_format::mooncake;
  }
  if (line.starts_with("\x1f\x8b")) throw line_fault(0, "this is gzip data; unpack it first");
  if (line.starts_with("version https://git-lfs")) {
    throw line_fault(0, "this is a Git LFS pointer; fetch the file itself with git lfs pull");
  }
  throw line_fault(0,
                   "cannot tell the format: neither a JSON object nor the header "
                   "TIMESTAMP,ContextTokens,GeneratedTokens; name it with --format");
}

/// Parses lines of one format; the state between lines is whether the CSV header was seen.
class line_parser {
 public:
  line_parser(trace_format format, std::uint32_t block_tokens)
      : format_(format), block_tokens_(block_tokens) {}

  /// Parses `line` into `into`. False when the line holds no request (the header).
  [[nodiscard]] bool parse(std::string_view line, parsed_line& into) {
    switch (format_) {
      case trace_format::mooncake:
        parse_json_request(line, 1e3, block_tokens_, into);
        return true;
      case trace_format::bailian:
        parse_json_request(line, 1e6, block_tokens_, into);
        return true;
      default:
        break;
    }
    if (!std::exchange(header_seen_, true)) {
      if (is_azure_header(line)) return false;
      throw line_fault(0, "the first line must be the header TIMESTAMP,ContextTokens,GeneratedTokens");
    }
    parse_azure_request(line, into);
    return true;
  }

 private:
  trace_format format_;
  std::uint32_t block_tokens_;
  bool header_seen_ = false;
};

}  // namespace detail

/// Reads the trace in `source` to its end.
///
/// Blank lines and a byte order mark are passed over. Lines are told apart by `\n` or `\r\n`; the last needs
/// none. Requests keep the order of the file: timestamps are read and checked, not sorted by.
///
/// @par Errors   `trace_error`, as `file:line:column: reason; near "text"`, for the first malformed line
/// (unless skipped) and for a trace without a request; `llmmem::length_error` for `block_tokens` 0; what the
/// source throws. Nothing of the trace is kept then.
/// @par Complexity   O(bytes); memory: the trace, and one line.
template <byte_source Source>
[[nodiscard]] trace read_trace(Source& source, const read_options& options = {}) {
  constexpr std::string_view byte_order_mark = "\xef\xbb\xbf";
  const std::string name(source.name());
  const std::string shown_name = example::printable(name, 512);
  if (options.block_tokens == std::uint32_t{0}) {
    throw llmmem::length_error(shown_name + ": a block must hold at least 1 token");
  }

  std::optional<trace> result;
  std::optional<detail::line_parser> parser;
  skipped_lines skipped;
  const auto begin = [&](trace_format format) {
    const std::uint32_t block_tokens = options.block_tokens.value_or(default_block_tokens(format));
    result.emplace(name, format, block_tokens);
    parser.emplace(format, block_tokens);
  };
  if (options.format) begin(*options.format);

  line_reader<Source> lines(source, options.max_line_bytes);
  parsed_line parsed;
  std::uint64_t lines_with_text = 0;
  while (auto line = lines.next()) {
    if (line->number == 1 && line->text.starts_with(byte_order_mark)) {
      line->text.remove_prefix(byte_order_mark.size());
    }
    if (line->text.find_first_not_of(" \t") == line->text.npos && line->whole) continue;
    ++lines_with_text;
    try {
      if (!line->whole) {
        throw line_fault(0, "the line is longer than " + std::to_string(options.max_line_bytes) + " bytes");
      }
      if (const std::size_t nul = line->text.find('\0'); nul != line->text.npos) {
        throw line_fault(nul, "a NUL byte: the file is binary or damaged");
      }
      if (!parser) begin(detail::tell_format(line->text));
      if (parser->parse(line->text, parsed)) {
        result->add(parsed.timestamp_us, parsed.input_tokens, parsed.output_tokens, parsed.block_ids);
      }
    } catch (const line_fault& fault) {
      const bool refuse = options.on_bad_line == bad_lines::refuse;
      if (!refuse && skipped.count++ > 0) continue;
      skipped.first = shown_name + ":" + std::to_string(line->number) + ":" +
                      std::to_string(fault.offset() + 1) + ": " + fault.what() + "; near \"" +
                      example::printable_around(line->text, fault.offset()) + "\"";
      if (refuse) throw trace_error(skipped.first);
    }
  }

  if (lines_with_text == 0) throw trace_error(shown_name + ": no request in it: it is empty");
  if (!result || result->size() == 0) {
    if (skipped.count == 0) throw trace_error(shown_name + ": no request in it, only the header");
    throw trace_error(shown_name + ": no request in it; " + std::to_string(skipped.count) +
                      " malformed lines, the first: " + skipped.first);
  }
  result->set_skipped(std::move(skipped));
  return std::move(*result);
}

/// Reads the trace in the file `path`. @throws also `llmmem::system_error`, see `file_source`.
[[nodiscard]] inline trace read_trace_file(const std::string& path, const read_options& options = {}) {
  file_source source(path);
  return read_trace(source, options);
}

}  // namespace replay_trace
