/// @file
/// The machine's monotonic clock in nanoseconds. Not <chrono>, which costs 13,000 lines wherever it is
/// included.
#pragma once

#include <llmmem/config.hpp>

#include <time.h>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

[[nodiscard]] inline std::uint64_t monotonic_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
