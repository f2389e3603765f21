/// @file
/// Random numbers for tests: the same on every platform for the same seed.
#pragma once

#include <cstdint>

namespace llmmem_tests {

/// SplitMix64 (Steele, Lea and Flood, 2014).
class random_numbers {
 public:
  explicit constexpr random_numbers(std::uint64_t seed) noexcept : state_(seed) {}

  constexpr std::uint64_t next() noexcept {
    std::uint64_t x = state_ += 0x9E37'79B9'7F4A'7C15ULL;
    x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBULL;
    return x ^ (x >> 31);
  }

  /// 0 to `bound` - 1.
  constexpr std::uint64_t below(std::uint64_t bound) noexcept { return next() % bound; }
  constexpr std::uint32_t below(std::uint32_t bound) noexcept {
    return static_cast<std::uint32_t>(next() % bound);
  }

  /// True once in `times`.
  constexpr bool once_in(std::uint64_t times) noexcept { return below(times) == 0; }

 private:
  std::uint64_t state_;
};

}  // namespace llmmem_tests
