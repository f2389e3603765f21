/// @file
/// Arithmetic with nanoseconds that throws past the last representable moment.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The last representable moment, in nanoseconds: 292 years.
inline constexpr std::uint64_t max_ns = (std::uint64_t{1} << 63) - 1;

/// The fastest link that planners accept: a thousand times this value fits 64 bits.
inline constexpr std::uint64_t max_link_bytes_per_second = std::uint64_t{1} << 53;

[[noreturn]] LLMMEM_COLD inline void throw_end_of_time(const char* who, std::uint64_t a, const char* sign,
                                                       std::uint64_t b) {
  throw length_error(std::string(who) + ": " + std::to_string(a) + sign + std::to_string(b) +
                     " exceeds the latest time, 2^63 - 1 ns; lower the times");
}

[[nodiscard]] constexpr std::uint64_t add_ns(std::uint64_t a, std::uint64_t b, const char* who) {
  if (a > max_ns || b > max_ns - a) throw_end_of_time(who, a, " + ", b);
  return a + b;
}

[[nodiscard]] constexpr std::uint64_t multiply_ns(std::uint64_t a, std::uint64_t b, const char* who) {
  if (b != 0 && a > max_ns / b) throw_end_of_time(who, a, " x ", b);
  return a * b;
}

/// Returns the time of `bytes` over a link, latency first, rounded up to whole nanoseconds; 0 for no bytes.
/// @throws argument_error  for a bandwidth of 0 or above `max_link_bytes_per_second`.
/// @throws length_error    past the last representable moment.
[[nodiscard]] constexpr std::uint64_t link_ns(std::uint64_t bytes, std::uint64_t bytes_per_second,
                                              std::uint64_t latency_ns, const char* who) {
  if (bytes_per_second == 0 || bytes_per_second > max_link_bytes_per_second) {
    throw argument_error(std::string(who) + ": bytes_per_second is " + std::to_string(bytes_per_second) +
                         "; it must be 1 to 2^53");
  }
  if (bytes == 0) return 0;
  std::uint64_t whole = bytes / bytes_per_second;
  std::uint64_t rest = bytes % bytes_per_second;
  for (int thousand = 0; thousand < 3; ++thousand) {  // seconds, milli-, micro-, nanoseconds
    whole = add_ns(multiply_ns(whole, 1000, who), rest * 1000 / bytes_per_second, who);
    rest = rest * 1000 % bytes_per_second;
  }
  return add_ns(latency_ns, whole + (rest != 0 ? 1 : 0), who);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
