/// @file
/// What a program tells while it works, where nobody may be there to hear it.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

namespace example {

/// Tells something that the work does not depend on: a full disk, or a closed terminal, does not end it.
template <class... Values>
void tell(std::FILE* to, fmt::format_string<Values...> text, Values&&... values) noexcept {
  try {
    fmt::print(to, text, std::forward<Values>(values)...);
  } catch (...) {  // who could be told?
  }
  static_cast<void>(std::fflush(to));
}

/// Standard descriptors that the program was started without: no file, pipe or socket is to get their
/// numbers, and with them what is meant for people. Writing to one fails as before. First thing in `main`.
inline void hold_standard_descriptors() noexcept {
  for (int number = 0; number <= 2; ++number) {
    if (::fcntl(number, F_GETFD) >= 0 || errno != EBADF) continue;
    // The lowest number that is free is this one; nothing is closed in a program that has just begun.
    static_cast<void>(::open("/dev/null", number == 0 ? O_WRONLY : O_RDONLY));
  }
}

}  // namespace example
