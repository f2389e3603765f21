/// @file
/// `latest`: keeps the newest version, and every version that a reader holds.
#pragma once

#include <llmmem/version/concepts.hpp>
#include <llmmem/version/detail/version_slots.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Keeps the newest version and every pinned one; drops any other at once.
///
/// For state that is replaced as a whole while slow readers finish with an older version: weights of a
/// serving engine, a routing table. Memory is `versions` values, allocated at construction. If all slots
/// except the newest version's are pinned, publishing is refused, and the error names the pinned version.
/// With only one slot, publishing overwrites the newest version itself, once no reader pins it.
///
/// Complexity, thread safety and errors: `detail::version_slots`.
struct latest {
  static constexpr const char* default_name = "latest";
  [[deprecated("its name is default_name")]] static constexpr const char* usual_name = default_name;

  std::uint32_t versions = 4;  ///< slots: for the newest, for the next write, and for versions that readers
                               ///< hold

  [[nodiscard]] constexpr std::uint32_t slots() const noexcept { return versions; }
  [[nodiscard]] static constexpr std::uint32_t kept() noexcept { return 1; }

  template <class T>
  using state = detail::version_slots<T, latest>;
};

static_assert(retain_policy<latest, int>);

}  // namespace v0
}  // namespace llmmem
