/// @file
/// One line of each trace format, parsed into a request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "replay_trace/detail/line_values.hpp"
#include "replay_trace/json_line.hpp"
#include "replay_trace/trace.hpp"

namespace replay_trace {

/// The contents of a line, reused from line to line so that `block_ids` is allocated once.
struct parsed_line {
  std::optional<std::uint64_t> timestamp_us;
  std::optional<std::uint64_t> delay_us;  ///< after the previous request of its session
  std::optional<std::string> session;
  std::uint64_t input_tokens = 0;
  std::uint64_t output_tokens = 0;
  std::vector<std::uint64_t> block_ids;
  std::size_t ids_offset = 0;  ///< their position in the line
  bool negative_id = false;    ///< an id is below 0, and stored in two's complement
  bool large_id = false;       ///< an id is 2^63 or more
};

/// The longest session id, in bytes, because every session is remembered.
inline constexpr std::size_t max_session_bytes = 256;

namespace detail {

/// A session's name: a string, or a number as one.
[[nodiscard]] inline std::string read_session(json_line& json, std::size_t offset, std::string_view field) {
  if (!json.at_text()) return std::to_string(json.read_integer(field).bits);
  std::string session(json.read_text(field));
  if (session.size() > max_session_bytes) {
    throw line_fault(offset, std::string(field) + " has " + std::to_string(session.size()) +
                                 " bytes, the most is " + std::to_string(max_session_bytes));
  }
  return session;
}

}  // namespace detail

/// Parses a line of the Mooncake or the Bailian trace: an object with `input_length`, `output_length` and
/// `hash_ids`, and optionally with `timestamp`, `delay` and `session_id`, of which null is the same as none.
/// Other fields (`chat_id`, `parent_chat_id`, `type`, `turn`, ...) may hold any JSON and are skipped.
///
/// `line_order` decides whether it may follow the earlier lines, by its times, its ids and their number.
///
/// @param timestamp_unit_us  1,000 for Mooncake's milliseconds, 1,000,000 for Bailian's seconds.
/// @throws line_fault
inline void parse_json_request(std::string_view line, double timestamp_unit_us, parsed_line& into) {
  enum : std::size_t { input, output, ids, timestamp, delay, session, fields };
  constexpr std::size_t required = timestamp;
  constexpr std::string_view names[fields] = {"input_length", "output_length", "hash_ids",
                                              "timestamp",    "delay",         "session_id"};
  bool seen[fields] = {};

  into.timestamp_us.reset();
  into.delay_us.reset();
  into.session.reset();
  into.block_ids.clear();
  into.negative_id = into.large_id = false;
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
    const std::string_view name = names[field];
    if (seen[field]) throw line_fault(at, "field " + std::string(name) + " stands there twice");
    seen[field] = true;
    if (field >= required && json.take_null()) continue;
    switch (field) {
      case timestamp:
        into.timestamp_us = detail::microseconds(at, name, json.read_decimal(name), timestamp_unit_us);
        break;
      case delay:
        into.delay_us = detail::microseconds(at, name, json.read_decimal(name), timestamp_unit_us);
        break;
      case session:
        into.session = detail::read_session(json, at, name);
        break;
      case input:
        into.input_tokens = json.read_whole(name);
        detail::check_tokens(at, name, into.input_tokens);
        break;
      case output:
        into.output_tokens = json.read_whole(name);
        detail::check_tokens(at, name, into.output_tokens);
        break;
      default:
        into.ids_offset = at;
        json.read_integers(name, [&](json_line::integer id) {
          into.block_ids.push_back(id.bits);
          if (id.negative) into.negative_id = true;
          if (!id.negative && id.bits >> 63 != 0) into.large_id = true;
        });
    }
  }
  json.end();
  for (std::size_t field = 0; field < required; ++field) {
    if (!seen[field]) throw line_fault(0, "field " + std::string(names[field]) + " is missing");
  }
}

/// The first line of the Azure trace, with or without quotes.
[[nodiscard]] bool is_azure_header(std::string_view line) noexcept;

/// Parses a line of the Azure trace: `2023-11-16 18:15:46.6805900,374,44`. Fields may be quoted. The time may
/// have a `T` for the space, any number of second decimals, and a zone (`Z`, `+00:00`); it is counted from
/// 1970.
/// @throws line_fault
void parse_azure_request(std::string_view line, parsed_line& into);

/// The columns of a BurstGPT trace, by its header: `Timestamp` (seconds), `Request tokens` and `Response
/// tokens`, in any order among others; `Total tokens`, where it is there, must be their sum.
class burst_columns {
 public:
  /// The columns of the header `line`, or nothing if it does not have each of these columns once.
  [[nodiscard]] static std::optional<burst_columns> find(std::string_view line);

  /// Parses a line after the header. @throws line_fault
  void parse(std::string_view line, parsed_line& into) const;

 private:
  std::vector<std::string> names_;
  std::size_t timestamp_ = 0;
  std::size_t request_ = 0;
  std::size_t response_ = 0;
  std::optional<std::size_t> total_;
};

}  // namespace replay_trace

#include "replay_trace/detail/azure_line.hpp"
#include "replay_trace/detail/burst_line.hpp"
