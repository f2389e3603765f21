/// @file
/// Lines of comma-separated values, quoted or not.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/text.hpp"
#include "replay_trace/detail/line_values.hpp"
#include "replay_trace/json_line.hpp"

namespace replay_trace {
namespace detail {

struct csv_field {
  std::string_view text;   ///< without the quotes around it
  std::size_t offset = 0;  ///< in the line
};

/// Returns the field of `line` that begins at `at`, and moves `at` to the comma after it, or to the line's
/// end. (RFC 4180; a doubled quote stays doubled, because none of these fields has one.)
inline csv_field take_csv_field(std::string_view line, std::size_t& at) {
  const std::size_t begin = at;
  if (at >= line.size() || line[at] != '"') {
    at = std::min(line.find(',', at), line.size());
    return {line.substr(begin, at - begin), begin};
  }
  ++at;
  while (at < line.size() && (line[at] != '"' || (at + 1 < line.size() && line[at + 1] == '"'))) {
    at += line[at] == '"' ? 2U : 1U;
  }
  if (at >= line.size()) throw line_fault(begin, "a quote is not closed");
  ++at;
  if (at < line.size() && line[at] != ',') throw line_fault(at, "something follows a closing quote");
  return {line.substr(begin + 1, at - begin - 2), begin + 1};
}

/// Splits `line` into exactly one field for each of `columns`, which name a missing one. @pre `fields` is as
/// long.
template <class Columns, class Fields>
void split_csv(std::string_view line, const Columns& columns, Fields& fields) {
  const std::size_t count = columns.size();
  std::size_t at = 0;
  for (std::size_t i = 0; i < count; ++i) {
    fields[i] = take_csv_field(line, at);
    const bool last = i + 1 == count;
    if (last && at < line.size()) throw line_fault(at, "more than " + std::to_string(count) + " fields");
    if (!last && at >= line.size()) {
      throw line_fault(line.size(), std::to_string(i + 1) + " of " + std::to_string(count) +
                                        " fields: " + example::printable(columns[i + 1], 24) + " is missing");
    }
    ++at;
  }
}

/// A count of tokens in `field`, of the column `column`.
inline std::uint64_t csv_tokens(const csv_field& field, std::string_view column) {
  const auto refuse = [&](const char* why) {
    throw line_fault(field.offset,
                     std::string(column) + " " + why + ": " +
                         (field.text.empty() ? "nothing there" : example::printable(field.text, 24)));
  };
  const auto digits = [](std::string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789") == text.npos;
  };
  const auto value = example::parse_count(field.text);
  if (!value) {
    if (digits(field.text)) refuse("passes 2^64 - 1");
    if (field.text.starts_with('-') && digits(field.text.substr(1))) refuse("is negative");
    refuse("is not a whole number");
  }
  check_tokens(field.offset, column, *value);
  return *value;
}

}  // namespace detail
}  // namespace replay_trace
