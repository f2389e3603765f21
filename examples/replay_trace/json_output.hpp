/// @file
/// Replay results as JSON.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "replay_trace/replay.hpp"

namespace replay_trace {

/// `text` as a JSON string with its quotes. Bytes that are not UTF-8 (a path may hold any) become U+FFFD.
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

/// The shortest digits that read back as the same double; `null` for nothing, infinities and NaN.
[[nodiscard]] inline std::string json_number(std::optional<double> value) {
  return value && std::isfinite(*value) ? fmt::format("{}", *value) : "null";
}

/// One result as an object on one line. Figures that do not exist (a ratio of no references) are `null`.
/// `capacity_blocks` is always a number: for an unlimited replay, the blocks it came to hold.
[[nodiscard]] inline std::string to_json(std::string_view trace_name, const replay_result& result) {
  return fmt::format(
      R"({{"trace": {}, "requests": {}, "block_refs": {}, "hits": {}, "hit_ratio": {}, "capacity_blocks": {}, )"
      R"("policy": {}, "evictions": {}, "useful_over_reserved": {}, "ns_per_block_ref": {}, )"
      R"("peak_metadata_bytes": {}}})",
      json_string(trace_name), result.requests, result.block_refs, result.hits,
      json_number(result.hit_ratio()), result.capacity_blocks, json_string(result.policy), result.evictions,
      json_number(result.useful_over_reserved()), json_number(result.ns_per_block_ref()),
      result.peak_metadata_bytes);
}

/// Results as an array, one object a line.
[[nodiscard]] inline std::string to_json(std::string_view trace_name,
                                         std::span<const replay_result> results) {
  std::string out = "[";
  for (std::size_t i = 0; i < results.size(); ++i) {
    out += i == 0 ? "\n  " : ",\n  ";
    out += to_json(trace_name, results[i]);
  }
  return out + "\n]";
}

}  // namespace replay_trace
