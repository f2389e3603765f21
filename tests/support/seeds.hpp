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

/// Whether a sanitizer watches this program: every run takes many times longer, and says more.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool is_watched = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool is_watched = true;
#else
inline constexpr bool is_watched = false;
#endif
#else
inline constexpr bool is_watched = false;
#endif

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

/// The same, or `watched` seeds where a sanitizer watches: of tests that hold to an oracle what another build
/// holds to it with all of them, and from which a sanitizer learns no more after the first.
inline std::vector<std::uint64_t> seeds(std::uint64_t count, std::uint64_t watched) {
  return seeds(is_watched ? watched : count);
}

}  // namespace llmmem_tests
