/// @file
/// Texts for reasons of failures, made without exceptions, because a lack of memory may be the failure.
#pragma once

#include <llmmem/config.hpp>

#include <exception>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns the text, or a short one without heap memory if there is no memory for it.
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

/// Returns `first`, followed by the second text.
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
