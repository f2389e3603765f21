/// @file
/// The texts of failures, and the exceptions that they raise.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/failure.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Returns the system's error text for a file's failure.
[[nodiscard]] LLMMEM_COLD inline std::string failed_because(std::uint32_t error_number) {
  if (error_number == 0) return " failed: the system moved no bytes but reported success";
  return " failed: " + std::generic_category().message(static_cast<int>(error_number)) + " (errno " +
         std::to_string(error_number) + ")";
}

/// Returns where in a file something failed.
[[nodiscard]] LLMMEM_COLD inline std::string place_text(const failure& why) {
  return std::to_string(why.wanted) + " bytes at offset " + std::to_string(why.found);
}

/// Returns the text of a failure after the name of the object.
[[nodiscard]] LLMMEM_COLD inline const char* sentence_of(const failure& why) noexcept {
  const error_info* const info = why.code.info();
  if (info == nullptr) return "no failure";
  return info->sentence_for == nullptr ? info->sentence : info->sentence_for(why);
}

/// Returns the text for a name in braces.
[[nodiscard]] LLMMEM_COLD inline std::string failure_term(const failure& why, std::string_view name) {
  if (name == "wanted") return std::to_string(why.wanted);
  if (name == "found") return std::to_string(why.found);
  if (name == "index") return std::to_string(why.index);
  if (name == "code") return std::to_string(unsigned{why.code.number()});
  const error_info* const info = why.code.info();
  return info->term == nullptr ? std::string(name) : info->term(why, name);
}

}  // namespace detail

inline std::string failure::message() const {
  std::string text(where.empty() ? std::string_view("llmmem") : where.view());
  text += ": ";
  std::string_view left = detail::sentence_of(*this);
  while (!left.empty()) {
    const std::size_t plain = left.find('{');
    text += left.substr(0, plain);
    if (plain == std::string_view::npos) break;
    const std::size_t end = left.find('}', plain);
    text += detail::failure_term(*this, left.substr(plain + 1, end - plain - 1));
    left.remove_prefix(end + 1);
  }
  return text;
}

inline void failure::raise() const {
  switch (code.info() == nullptr ? error_kind::argument : code.info()->raises) {
    case error_kind::argument:
      break;
    case error_kind::out_of_memory:
      throw out_of_memory(message());
    case error_kind::handle:
      throw handle_error(message());
    case error_kind::length:
      throw length_error(message());
    case error_kind::io:
      throw io_error(message());
    case error_kind::comm:
      throw comm_error(message());
  }
  throw argument_error(message());
}

}  // namespace v0
}  // namespace llmmem
