/// @file
/// Seeds for randomised tests, which `scripts/soak` multiplies.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace llmmem_tests {

/// The number in environment variable `name`, or `otherwise` when it is not set or empty.
inline std::uint64_t number_from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  errno = 0;
  const std::uint64_t number = std::strtoull(text, &end, 10);
  if (*text < '0' || *text > '9' || *end != '\0' || errno != 0) {
    throw std::invalid_argument(std::string(name) + ": '" + text + "' is not a number");
  }
  return number;
}

/// `count` seeds, times LLMMEM_SEED_FACTOR (1), counting up from LLMMEM_SEED (1).
///
///     for (const auto seed : seeds(200)) {
///       CAPTURE(seed);  // a failure prints it; LLMMEM_SEED=<it> starts there
inline std::vector<std::uint64_t> seeds(std::uint64_t count) {
  std::vector<std::uint64_t> all(count * number_from_environment("LLMMEM_SEED_FACTOR", 1));
  auto seed = number_from_environment("LLMMEM_SEED", 1);
  for (auto& each : all)
    each = seed++;
  return all;
}

}  // namespace llmmem_tests
