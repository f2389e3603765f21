/// @file
/// `double_buffer`: readers hold one slot, the writer fills the other slot.
#pragma once

#include <llmmem/version/concepts.hpp>
#include <llmmem/version/detail/version_slots.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Two slots: one with the published version, and one to write next, which readers of the version before may
/// still hold.
///
/// For state of which a second copy is affordable and a third is not, such as a staged snapshot that is
/// written out while the next step computes. Publishing never waits: while readers pin the other slot, it is
/// refused with `errc::version_pinned`, which names the pinned version. A version ends when the next one is
/// published and no reader pins it. Use `latest` if readers may be more than one version late.
///
/// Complexity, thread safety and errors: `detail::version_slots`.
struct double_buffer {
  static constexpr const char* default_name = "double_buffer";
  [[deprecated("its name is default_name")]] static constexpr const char* usual_name = default_name;

  [[nodiscard]] static constexpr std::uint32_t slots() noexcept { return 2; }
  [[nodiscard]] static constexpr std::uint32_t kept() noexcept { return 1; }

  template <class T>
  using state = detail::version_slots<T, double_buffer>;
};

static_assert(retain_policy<double_buffer, int>);

}  // namespace v0
}  // namespace llmmem
