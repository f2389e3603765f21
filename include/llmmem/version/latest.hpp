/// @file
/// `latest`: only the newest version, and what somebody still reads.
#pragma once

#include <llmmem/version/concepts.hpp>
#include <llmmem/version/detail/version_slots.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Keeps the newest version and every pinned one; a version that is neither is gone at once.
///
/// For state that is replaced as a whole while slow readers go on with what they began: weights of a serving
/// engine, a routing table. Memory is `versions` values, taken at construction; when all but the newest are
/// pinned, publishing is refused and says which version is in the way. With one slot only, the newest itself
/// is overwritten, once nobody has it pinned.
///
/// Complexity, thread safety and errors: `detail::version_slots`.
struct latest {
  static constexpr const char* usual_name = "latest";

  std::uint32_t versions = 4;  ///< slots: the newest, one to write into, and what readers may hold

  [[nodiscard]] constexpr std::uint32_t slots() const noexcept { return versions; }
  [[nodiscard]] static constexpr std::uint32_t kept() noexcept { return 1; }

  template <class T>
  using state = detail::version_slots<T, latest>;
};

static_assert(retain_policy<latest, int>);

}  // namespace v0
}  // namespace llmmem
