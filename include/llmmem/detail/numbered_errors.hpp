/// @file
/// Codes by number alone: how a reader of stored codes represents one whose room it does not include.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

template <std::size_t... Number>
[[nodiscard]] consteval std::array<error_info, sizeof...(Number)> number_errors(
    std::index_sequence<Number...>) noexcept {
  return {error_info{.number = static_cast<std::uint8_t>(Number),
                     .name = "unknown",
                     .sentence = "unknown failure {code}"}...};
}

/// All codes, by number.
inline constexpr std::array numbered_errors = number_errors(std::make_index_sequence<256>());

/// Returns the code with that number from one of the tables, or an equal code without a text of its own.
template <class... Table>
[[nodiscard]] constexpr error_code code_numbered(std::uint8_t number, const Table&... tables) noexcept {
  if (number == 0) return {};
  const error_info* found = &numbered_errors[number];
  [[maybe_unused]] const auto look_in = [&](const auto& table) {
    for (const error_info& each : table) {
      if (each.number == number) found = &each;
    }
  };
  (look_in(tables), ...);
  return error_code(*found);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
