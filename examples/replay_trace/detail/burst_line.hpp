/// @file
/// The BurstGPT CSV's lines: columns by the names in the header.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "common/text.hpp"
#include "replay_trace/detail/csv_line.hpp"
#include "replay_trace/trace_lines.hpp"

namespace replay_trace {
namespace detail {

inline constexpr std::string_view burst_timestamp = "Timestamp";
inline constexpr std::string_view burst_request = "Request tokens";
inline constexpr std::string_view burst_response = "Response tokens";
inline constexpr std::string_view burst_total = "Total tokens";

/// Reads nonnegative seconds, possibly with a fraction, as microseconds.
inline std::uint64_t csv_seconds(const csv_field& field, std::string_view column) {
  const std::string_view text = field.text;
  double value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool begins_well = !text.empty() && text.front() >= '0' && text.front() <= '9';  // "inf", "-1", ".5"
  if (!begins_well || status != std::errc{} || end != text.data() + text.size()) {
    throw line_fault(field.offset, std::string(column) + " is not a time in seconds, such as 45 or 45.5: " +
                                       (text.empty() ? "nothing there" : example::printable(text, 24)));
  }
  return microseconds(field.offset, column, value, 1e6);
}

}  // namespace detail

inline std::optional<burst_columns> burst_columns::find(std::string_view line) {
  constexpr std::size_t most = 64;
  std::optional<std::size_t> timestamp;
  std::optional<std::size_t> request;
  std::optional<std::size_t> response;
  burst_columns found;
  try {
    for (std::size_t at = 0; at <= line.size(); ++at) {
      const std::string_view name = detail::take_csv_field(line, at).text;
      const std::size_t column = found.names_.size();
      if (column == most) return std::nullopt;
      auto* const place = name == detail::burst_timestamp  ? &timestamp
                          : name == detail::burst_request  ? &request
                          : name == detail::burst_response ? &response
                          : name == detail::burst_total    ? &found.total_
                                                           : nullptr;
      if (place != nullptr) {
        if (*place) return std::nullopt;
        *place = column;
      }
      found.names_.emplace_back(name);
    }
  } catch (const line_fault&) {
    return std::nullopt;
  }
  if (!timestamp || !request || !response) return std::nullopt;
  found.timestamp_ = *timestamp;
  found.request_ = *request;
  found.response_ = *response;
  return found;
}

inline void burst_columns::parse(std::string_view line, parsed_line& into) const {
  std::vector<detail::csv_field> fields(names_.size());
  detail::split_csv(line, names_, fields);
  into.timestamp_us = detail::csv_seconds(fields[timestamp_], detail::burst_timestamp);
  into.input_tokens = detail::csv_tokens(fields[request_], detail::burst_request);
  into.output_tokens = detail::csv_tokens(fields[response_], detail::burst_response);
  into.block_ids.clear();
  if (!total_) return;
  const std::uint64_t total = detail::csv_tokens(fields[*total_], detail::burst_total);
  if (total != into.input_tokens + into.output_tokens) {
    throw line_fault(fields[*total_].offset, "Total tokens is " + std::to_string(total) +
                                                 ", but Request tokens and Response tokens make " +
                                                 std::to_string(into.input_tokens + into.output_tokens));
  }
}

}  // namespace replay_trace
