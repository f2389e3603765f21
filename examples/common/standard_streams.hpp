/// @file
/// Notes of a program during its work, which may have no reader.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <utility>

#include "common/standard_descriptors.hpp"

namespace example {

/// Writes a note that the work does not depend on: a full disk, or a closed terminal, does not end it.
template <class... Values>
void tell(std::FILE* to, fmt::format_string<Values...> text, Values&&... values) noexcept {
  try {
    fmt::print(to, text, std::forward<Values>(values)...);
  } catch (...) {  // no reader is left
  }
  static_cast<void>(std::fflush(to));
}

}  // namespace example
