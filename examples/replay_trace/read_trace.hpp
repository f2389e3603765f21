/// @file
/// Reads a whole trace from a byte source: unpacks it, recognises its format, and reports errors with file,
/// line and reason.
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
#include "replay_trace/line_order.hpp"
#include "replay_trace/line_reader.hpp"
#include "replay_trace/trace.hpp"
#include "replay_trace/trace_lines.hpp"
#include "replay_trace/unpacking_source.hpp"

namespace replay_trace {

/// What to do with a malformed line.
enum class bad_lines : std::uint8_t {
  refuse,  ///< throw
  skip,    ///< count it, keep the first reason, continue
};

struct read_options {
  std::optional<trace_format> format{};         ///< recognised by the content if empty
  std::optional<std::uint32_t> block_tokens{};  ///< tokens per hash id; the format's own if empty
  bad_lines on_bad_line = bad_lines::refuse;
  std::size_t max_line_bytes = std::size_t{16} << 20;  ///< a longer line is malformed; bounds the memory
  /// gzip or zstd data that unpacks to more is refused, because a file of a megabyte may unpack to many
  /// gigabytes.
  std::uint64_t max_unpacked_bytes = std::uint64_t{4} << 30;
};

namespace detail {

/// The format of a trace whose first line, a JSON object, is `line`. The two JSON formats are distinguished
/// by Bailian's `chat_id`, by fields that only Mooncake's tools write, or by the number of ids for the
/// prompt's length.
[[nodiscard]] inline trace_format tell_json_format(std::string_view line) {
  for (const std::string_view key : {"\"chat_id\"", "\"parent_chat_id\""}) {
    if (line.find(key) != line.npos) return trace_format::bailian;
  }
  parsed_line parsed;
  try {
    parse_json_request(line, 1, parsed);
  } catch (const line_fault&) {
    return trace_format::mooncake;  // its parser reports the error
  }
  if (!parsed.timestamp_us || parsed.delay_us || parsed.session) return trace_format::mooncake;
  const auto fits = [&](trace_format format) {
    return block_rules(format, default_block_tokens(format)).fits(parsed);
  };
  return fits(trace_format::bailian) && !fits(trace_format::mooncake) ? trace_format::bailian
                                                                      : trace_format::mooncake;
}

/// The format of a trace whose first line is `line`.
[[nodiscard]] inline trace_format tell_format(std::string_view line) {
  if (is_azure_header(line)) return trace_format::azure;
  const std::size_t text = line.find_first_not_of(" \t");
  if (text != line.npos && line[text] == '{') return tell_json_format(line);
  if (burst_columns::find(line)) return trace_format::burstgpt;
  throw line_fault(
      0,
      "cannot tell the format: neither a JSON object nor the header TIMESTAMP,ContextTokens,GeneratedTokens "
      "(Azure) nor one with Timestamp, Request tokens and Response tokens (BurstGPT); name it with --format");
}

/// Parses lines of one format, and checks each against the earlier ones.
class line_parser {
 public:
  line_parser(trace_format format, std::optional<std::uint32_t> block_tokens)
      : format_(format), order_(format, block_tokens) {}

  /// Parses line `number` into `into`. Returns false if the line has no request (the header).
  [[nodiscard]] bool parse(std::string_view line, std::uint64_t number, parsed_line& into) {
    switch (format_) {
      case trace_format::mooncake:
        parse_json_request(line, 1e3, into);
        into.timestamp_us = order_.take(into, number);
        return true;
      case trace_format::bailian:
        parse_json_request(line, 1e6, into);
        into.timestamp_us = order_.take(into, number);
        return true;
      case trace_format::burstgpt:
        return parse_burst(line, into);
      default:
        return parse_azure(line, into);
    }
  }

  /// Returns the tokens per id, as far as the lines so far show.
  [[nodiscard]] std::uint32_t block_tokens() const noexcept { return order_.block_tokens(); }
  /// Returns whether any request had a time.
  [[nodiscard]] bool has_timestamps() const noexcept {
    return format_ == trace_format::azure || format_ == trace_format::burstgpt || order_.has_timestamps();
  }

 private:
  [[nodiscard]] bool parse_azure(std::string_view line, parsed_line& into) {
    if (!std::exchange(header_seen_, true)) {
      if (is_azure_header(line)) return false;
      throw line_fault(0, "the first line must be the header TIMESTAMP,ContextTokens,GeneratedTokens");
    }
    parse_azure_request(line, into);
    return true;
  }

  [[nodiscard]] bool parse_burst(std::string_view line, parsed_line& into) {
    if (!columns_) {
      columns_ = burst_columns::find(line);
      if (columns_) return false;
      throw line_fault(
          0,
          "no header yet with the columns Timestamp, Request tokens and Response tokens, each of them once");
    }
    columns_->parse(line, into);
    return true;
  }

  trace_format format_;
  line_order order_;
  bool header_seen_ = false;
  std::optional<burst_columns> columns_;
};

}  // namespace detail

/// Reads the trace in `source` to its end.
///
/// gzip and zstd data, told by its first bytes, is unpacked as it is read.
/// Blank lines and a byte order mark are passed over. Lines are told apart by `\n` or `\r\n`; the last needs
/// none. Requests keep the order of the file: timestamps are read and checked, not sorted by.
///
/// @par Errors   `trace_error`, as `file:line:column: reason; near "text"`, for the first malformed line
/// (unless skipped), and for a trace without a request; as `file: reason` for packed data that cannot be
/// unpacked and for a Git LFS pointer; `llmmem::length_error` for `block_tokens` 0; and the source's
/// exceptions. No part of the trace is kept then.
/// @par Complexity   O(bytes); memory: the trace, one line, each session's name, and the unpacker's.
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
    result.emplace(name, format, options.block_tokens.value_or(default_block_tokens(format)));
    parser.emplace(format, options.block_tokens);
  };
  if (options.format) begin(*options.format);

  unpacking_source<Source> unpacked(source, options.max_unpacked_bytes);
  line_reader lines(unpacked, options.max_line_bytes);
  parsed_line parsed;
  std::uint64_t lines_with_text = 0;
  while (auto line = lines.next()) {
    if (line->number == 1 && line->text.starts_with(byte_order_mark)) {
      line->text.remove_prefix(byte_order_mark.size());
    }
    if (line->text.find_first_not_of(" \t") == line->text.npos && line->whole) continue;
    if (++lines_with_text == 1) {
      if (line->text.starts_with("version https://git-lfs.github.com/spec/")) {
        throw trace_error(shown_name + ": is a Git LFS pointer, not the data: run `git lfs pull`");
      }
      if (const packing* again = find_packing(line->text)) {
        throw trace_error(shown_name + ": is packed twice: unpack it, and what is in it with `" +
                          std::string(again->unpack_command) + "`");
      }
    }
    try {
      if (!line->whole) {
        throw line_fault(0, "the line is longer than " + std::to_string(options.max_line_bytes) + " bytes");
      }
      if (const std::size_t nul = line->text.find('\0'); nul != line->text.npos) {
        throw line_fault(nul, "a NUL byte: the file is binary or damaged");
      }
      if (!parser) begin(detail::tell_format(line->text));
      if (parser->parse(line->text, line->number, parsed)) {
        result->add(parsed.timestamp_us.value_or(0), parsed.input_tokens, parsed.output_tokens,
                    parsed.block_ids);
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
  if (result->has_block_ids()) result->set_block_tokens(parser->block_tokens());
  result->set_has_timestamps(parser->has_timestamps());
  result->set_skipped(std::move(skipped));
  return std::move(*result);
}

/// Reads the trace in the file `path`. @throws also `llmmem::system_error`, see `file_source`.
[[nodiscard]] inline trace read_trace_file(const std::string& path, const read_options& options = {}) {
  file_source source(path);
  return read_trace(source, options);
}

}  // namespace replay_trace
