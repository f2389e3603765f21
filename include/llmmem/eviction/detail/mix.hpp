/// @file
/// Spreads the bits of a content's name, so that callers' small numbers can serve as names.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection in which every input bit affects
/// every output bit.
[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBULL;
  return x ^ (x >> 31);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
