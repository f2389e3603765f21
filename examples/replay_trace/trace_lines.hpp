/// @file
/// One line of each trace format, parsed into a request.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "replay_trace/json_line.hpp"
#include "replay_trace/trace.hpp"

namespace replay_trace {

/// What a line says. Reused from line to line, so that `block_ids` is allocated once.
struct parsed_line {
  std::uint64_t timestamp_us = 0;
  std::uint64_t input_tokens = 0;
  std::uint64_t output_tokens = 0;
  std::vector<std::uint64_t> block_ids;
};

namespace detail {

inline void check_tokens(std::size_t offset, std::string_view field, std::uint64_t tokens) {
  if (tokens > max_request_tokens) {
    throw line_fault(offset, std::string(field) + " is " + std::to_string(tokens) +
                                 ", the most a request may have is " + std::to_string(max_request_tokens) +
                                 " tokens");
  }
}

/// `value` in units of `unit_us` microseconds, rounded.
[[nodiscard]] inline std::uint64_t microseconds(std::size_t offset, double value, double unit_us) {
  const double us = value * unit_us;
  if (us > 9e15)
    throw line_fault(offset, "timestamp is more than 285 years");  // beyond it, doubles have gaps
  return static_cast<std::uint64_t>(std::llround(us));
}

}  // namespace detail

/// Parses a line of the Mooncake or the Bailian trace: an object with `timestamp`, `input_length`,
/// `output_length` and `hash_ids`. Other fields (`chat_id`, `parent_chat_id`, `type`, `turn`, ...) may hold
/// any JSON and are passed over.
///
/// @param timestamp_unit_us  1,000 for Mooncake's milliseconds, 1,000,000 for Bailian's seconds.
/// @param block_tokens  tokens an id stands for; there must be exactly `ceil(input_length / block_tokens)`.
/// @throws line_fault
inline void parse_json_request(std::string_view line, double timestamp_unit_us, std::uint32_t block_tokens,
                               parsed_line& into) {
  constexpr std::string_view names[] = {"timestamp", "input_length", "output_length", "hash_ids"};
  constexpr std::size_t fields = std::size(names);
  bool seen[fields] = {};
  std::size_t ids_offset = 0;

  into.block_ids.clear();
  json_line json(line);
  json.begin_object();
  while (const auto key = json.next_key()) {
    std::size_t field = 0;
    while (field < fields && names[field] != *key)
      ++field;
    if (field == fields) {
      json.skip_value();
      continue;
    }
    const std::size_t at = json.key_offset();
    if (seen[field]) throw line_fault(at, "field " + std::string(names[field]) + " stands there twice");
    seen[field] = true;
    switch (field) {
      case 0:
        into.timestamp_us = detail::microseconds(at, json.read_decimal(names[0]), timestamp_unit_us);
        break;
      case 1:
        into.input_tokens = json.read_whole(names[1]);
        detail::check_tokens(at, names[1], into.input_tokens);
        break;
      case 2:
        into.output_tokens = json.read_whole(names[2]);
        detail::check_tokens(at, names[2], into.output_tokens);
        break;
      default:
        ids_offset = at;
        json.read_wholes(names[3], [&](std::uint64_t id) { into.block_ids.push_back(id); });
    }
  }
  json.end();
  for (std::size_t field = 0; field < fields; ++field) {
    if (!seen[field]) throw line_fault(0, "field " + std::string(names[field]) + " is missing");
  }
  const std::uint64_t blocks = (into.input_tokens + block_tokens - 1) / block_tokens;
  if (into.block_ids.size() != blocks) {
    throw line_fault(ids_offset, "hash_ids has " + std::to_string(into.block_ids.size()) +
                                     " ids, but input_length " + std::to_string(into.input_tokens) +
                                     " makes " + std::to_string(blocks) + " blocks of " +
                                     std::to_string(block_tokens) + " tokens");
  }
}

/// The first line of the Azure trace, with or without quotes.
[[nodiscard]] bool is_azure_header(std::string_view line) noexcept;

/// Parses a line of the Azure trace: `2023-11-16 18:15:46.6805900,374,44`. Fields may be quoted. The time may
/// have a `T` for the space, any number of second decimals, and a zone (`Z`, `+00:00`); it is counted from
/// 1970.
/// @throws line_fault
void parse_azure_request(std::string_view line, parsed_line& into);

}  // namespace replay_trace

#include "replay_trace/detail/azure_line.hpp"
