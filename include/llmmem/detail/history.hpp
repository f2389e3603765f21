/// @file
/// Identifies the object to which version numbers belong: numbers restart in each object, and a new object
/// may have the address of an old one.
#pragma once

#include <llmmem/config.hpp>

#include <time.h>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every bit depends on every other.
[[nodiscard]] constexpr std::uint64_t mixed(std::uint64_t x) noexcept {
  x += 0x9E37'79B9'7F4A'7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBULL;
  return x ^ (x >> 31);
}

/// Returns a number that is unique in the process: no two objects occupy one place at one time.
[[nodiscard]] inline std::uint64_t number_of_its_own(const void* object) noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const std::uint64_t at =
      static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
  return mixed(mixed(at) ^ reinterpret_cast<std::uintptr_t>(object));
}

/// The base of the numbers in a view's tags: a different number for each history, computed from the
/// identities of the bytes' container and their place in it. Tags are not 0, and those of two histories do
/// not collide, except with a chance of versions / 2^62.
class history_tag {
 public:
  constexpr void add(std::uint64_t fact) noexcept { mixed_ = mixed(mixed_ ^ fact); }

  [[nodiscard]] constexpr std::uint64_t tag(std::uint64_t number) const noexcept { return first() + number; }
  /// Returns the number of a tag of this history; for a tag of another history, a number that does not occur.
  [[nodiscard]] constexpr std::uint64_t number(std::uint64_t tag) const noexcept { return tag - first(); }

 private:
  [[nodiscard]] constexpr std::uint64_t first() const noexcept {
    return (mixed_ >> 2) | (std::uint64_t{1} << 63);
  }

  std::uint64_t mixed_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
