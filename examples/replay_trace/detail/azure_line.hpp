/// @file
/// The Azure CSV's lines, and their timestamps.
#pragma once

#include <array>
#include <optional>

#include "common/text.hpp"
#include "replay_trace/detail/csv_line.hpp"
#include "replay_trace/trace_lines.hpp"

namespace replay_trace {
namespace detail {

inline constexpr std::array<std::string_view, 3> azure_columns{"TIMESTAMP", "ContextTokens",
                                                               "GeneratedTokens"};

/// Takes a number of exactly `digits` digits from the front of `text`.
inline std::optional<std::uint32_t> take_digits(std::string_view& text, std::size_t digits) {
  const auto value = text.size() < digits ? std::nullopt : example::parse_count(text.substr(0, digits));
  if (!value) return std::nullopt;
  text.remove_prefix(digits);
  return static_cast<std::uint32_t>(*value);
}

inline bool take(std::string_view& text, std::string_view one_of) {
  if (text.empty() || one_of.find(text.front()) == one_of.npos) return false;
  text.remove_prefix(1);
  return true;
}

/// Days from 1970-01-01 of a Gregorian date, or nothing if there is no such day from 1970 on.
constexpr std::optional<std::uint64_t> days_since_1970(std::uint32_t year, std::uint32_t month,
                                                       std::uint32_t day) {
  constexpr std::array<std::uint32_t, 12> lengths{31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
  const auto leap = [](std::uint32_t y) { return (y % 4 == 0 && y % 100 != 0) || y % 400 == 0; };
  if (year < 1970 || month < 1 || month > 12 || day < 1) return std::nullopt;
  const auto length = [&](std::uint32_t m) { return lengths.at(m - 1) + (m == 2 && leap(year) ? 1U : 0U); };
  if (day > length(month)) return std::nullopt;
  std::uint64_t days = day - 1;
  for (std::uint32_t m = 1; m < month; ++m)
    days += length(m);
  const std::uint64_t before = year - 1;
  return days + before * 365 + before / 4 - before / 100 + before / 400 - 719162;
}

/// Microseconds since 1970, or nothing if `text` is not a time.
inline std::optional<std::uint64_t> parse_time(std::string_view text) {
  const auto year = take_digits(text, 4);
  if (!year || !take(text, "-")) return std::nullopt;
  const auto month = take_digits(text, 2);
  if (!month || !take(text, "-")) return std::nullopt;
  const auto day = take_digits(text, 2);
  if (!day || !take(text, " T")) return std::nullopt;
  const auto hour = take_digits(text, 2);
  if (!hour || !take(text, ":")) return std::nullopt;
  const auto minute = take_digits(text, 2);
  if (!minute || !take(text, ":")) return std::nullopt;
  const auto second = take_digits(text, 2);
  if (!second || *hour > 23 || *minute > 59 || *second > 60) return std::nullopt;
  std::uint64_t fraction_us = 0;
  if (take(text, ".")) {
    std::uint64_t unit = 1'000'000;
    if (text.empty() || text.front() < '0' || text.front() > '9') return std::nullopt;
    while (!text.empty() && text.front() >= '0' && text.front() <= '9') {
      unit /= 10;
      fraction_us += static_cast<std::uint64_t>(text.front() - '0') * unit;
      text.remove_prefix(1);
    }
  }
  std::uint64_t zone_s = 0;
  const bool east = text.starts_with('+');
  if (take(text, "+-")) {
    const auto hours = take_digits(text, 2);
    if (!hours || !take(text, ":")) return std::nullopt;
    const auto minutes = take_digits(text, 2);
    if (!minutes || *hours > 14 || *minutes > 59) return std::nullopt;
    zone_s = *hours * 3600ULL + *minutes * 60ULL;
  } else {
    take(text, "Z");
  }
  const auto days = days_since_1970(*year, *month, *day);
  if (!text.empty() || !days) return std::nullopt;
  const std::uint64_t local_s = *days * 86400 + *hour * 3600ULL + *minute * 60ULL + *second;
  if (east && zone_s > local_s) return std::nullopt;
  return (east ? local_s - zone_s : local_s + zone_s) * 1'000'000 + fraction_us;
}

}  // namespace detail

inline bool is_azure_header(std::string_view line) noexcept {
  for (const std::string_view column : detail::azure_columns) {
    const bool quoted = line.starts_with('"');
    if (quoted) line.remove_prefix(1);
    if (!line.starts_with(column)) return false;
    line.remove_prefix(column.size());
    if (quoted && !detail::take(line, "\"")) return false;
    if (column != detail::azure_columns.back() && !detail::take(line, ",")) return false;
  }
  return line.empty();
}

inline void parse_azure_request(std::string_view line, parsed_line& into) {
  std::array<detail::csv_field, 3> fields;
  detail::split_csv(line, detail::azure_columns, fields);
  const auto time = detail::parse_time(fields[0].text);
  if (!time) {
    throw line_fault(fields[0].offset, "TIMESTAMP is not a time such as 2023-11-16 18:15:46.6805900: " +
                                           (fields[0].text.empty() ? std::string("nothing there")
                                                                   : example::printable(fields[0].text, 40)));
  }
  into.timestamp_us = time;
  into.input_tokens = detail::csv_tokens(fields[1], detail::azure_columns[1]);
  into.output_tokens = detail::csv_tokens(fields[2], detail::azure_columns[2]);
  into.block_ids.clear();
}

}  // namespace replay_trace
