/// @file
/// Why something failed, for texts that are made where nothing may throw: memory may be what was short.
#pragma once

#include <llmmem/config.hpp>

#include <exception>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The text, or a short one where there is no memory for it: that takes none of the heap.
[[nodiscard]] inline std::string reason(std::string_view text) noexcept {
  try {
    return std::string(text);
  } catch (...) {
    return "out of memory";
  }
}
[[nodiscard]] inline std::string reason_of(const std::exception& error) noexcept {
  return reason(error.what());
}

/// `first`, and what comes behind it.
[[nodiscard]] inline std::string reason(std::string_view first, std::string_view then) noexcept {
  try {
    return std::string(first).append(then);
  } catch (...) {
    return reason(then);
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
