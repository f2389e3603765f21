/// @file
/// Where a program's output goes, which may be full, closed or nowhere.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>
#include <system_error>

namespace example {

/// Standard descriptors that the program was started without: no file, pipe or socket is to get their
/// numbers, and with them what is meant for people. Writing to one fails as before. First thing in `main`.
inline void hold_standard_descriptors() noexcept {
  for (int number = 0; number <= 2; ++number) {
    if (::fcntl(number, F_GETFD) >= 0 || errno != EBADF) continue;
    // The lowest number that is free is this one; nothing is closed in a program that has just begun.
    static_cast<void>(::open("/dev/null", number == 0 ? O_WRONLY : O_RDONLY));
  }
}

/// Last thing in `main` of a program that prints as it goes: an exit status of success only where all that
/// was printed is written.
/// @param status  that the program ends with otherwise
[[nodiscard]] inline int after_printing(const char* program, int status) {
  const bool is_flushed = std::fflush(stdout) == 0;
  if (is_flushed && std::ferror(stdout) == 0) return status;
  const std::string why = is_flushed ? "a write failed before" : std::generic_category().message(errno);
  std::fprintf(stderr, "%s: cannot write standard output: %s\n", program, why.c_str());
  return status == 0 ? 1 : status;
}

}  // namespace example
