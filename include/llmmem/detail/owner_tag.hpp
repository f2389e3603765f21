/// @file
/// A number that distinguishes the handles of one object from those of another.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns a tag for handles, never 0, that differs between objects alive at the same time.
[[nodiscard]] inline std::uint32_t owner_tag(const void* address) noexcept {
  // The finaliser of MurmurHash3: neighbouring addresses get unrelated tags.
  auto bits = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(address));
  bits = (bits ^ (bits >> 33)) * 0xFF51'AFD7'ED55'8CCDULL;
  bits = (bits ^ (bits >> 33)) * 0xC4CE'B9FE'1A85'EC53ULL;
  return static_cast<std::uint32_t>(bits >> 32) | 1U;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
