/// @file
/// Values of every trace format: counts of tokens and times, within their limits.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "replay_trace/json_line.hpp"
#include "replay_trace/trace.hpp"

namespace replay_trace {
namespace detail {

inline void check_tokens(std::size_t offset, std::string_view field, std::uint64_t tokens) {
  if (tokens > max_request_tokens) {
    throw line_fault(offset, std::string(field) + " is " + std::to_string(tokens) +
                                 ", the most a request may have is " + std::to_string(max_request_tokens) +
                                 " tokens");
  }
}

inline constexpr double max_time_us = 9e15;  // beyond it, doubles have gaps

/// `value` in units of `unit_us` microseconds, rounded.
[[nodiscard]] inline std::uint64_t microseconds(std::size_t offset, std::string_view field, double value,
                                                double unit_us) {
  const double us = value * unit_us;
  if (us > max_time_us) throw line_fault(offset, std::string(field) + " is more than 285 years");
  return static_cast<std::uint64_t>(std::llround(us));
}

}  // namespace detail
}  // namespace replay_trace
