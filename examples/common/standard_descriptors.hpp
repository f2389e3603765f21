/// @file
/// A program's standard descriptors, which may be full, closed or missing.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>
#include <system_error>

namespace example {

/// Reserves the standard descriptors that the program was started without, so that no file, pipe or socket
/// gets their numbers, and with them the output for people. Writes to one fail as before. Call it first in
/// `main`.
inline void hold_standard_descriptors() noexcept {
  for (int number = 0; number <= 2; ++number) {
    if (::fcntl(number, F_GETFD) >= 0 || errno != EBADF) continue;
    // The lowest free number is this one, because a program that has just begun has closed nothing.
    static_cast<void>(::open("/dev/null", number == 0 ? O_WRONLY : O_RDONLY));
  }
}

/// Call it last in `main` of a program that prints during its work: returns success only if all output was
/// written.
/// @param status  the exit status otherwise
[[nodiscard]] inline int after_printing(const char* program, int status) {
  const bool is_flushed = std::fflush(stdout) == 0;
  if (is_flushed && std::ferror(stdout) == 0) return status;
  const std::string why = is_flushed ? "a write failed before" : std::generic_category().message(errno);
  std::fprintf(stderr, "%s: cannot write standard output: %s\n", program, why.c_str());
  return status == 0 ? 1 : status;
}

}  // namespace example
