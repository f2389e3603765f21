/// @file
/// `stash`: the newest n versions, for passes that must see the weights they began with.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/version/concepts.hpp>
#include <llmmem/version/detail/version_slots.hpp>

#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {

/// Returns how many versions stage `stage` of `stages` keeps, counted from 0: `stages - stage`, because under
/// 1F1B at most that many micro-batches are between their forward and backward pass in this stage (weight
/// stashing: Narayanan et al., PipeDream, SOSP 2019, section 3.3). For one stage per device;
/// `stashed_versions` handles other orders.
/// @throws argument_error  for a stage outside the pipeline.
[[nodiscard]] constexpr std::uint32_t stash_depth(std::uint32_t stages, std::uint32_t stage) {
  if (stage >= stages) {
    throw argument_error("stash_depth: stage " + std::to_string(stage) + " of a pipeline of " +
                         std::to_string(stages) + " stages; they count from 0");
  }
  return stages - stage;
}

/// Keeps exactly the newest `Depth` versions, pinned or not: a number finds its version until there are
/// `Depth` newer ones.
///
/// A forward pass takes the newest version and remembers its number. The backward pass of the same
/// micro-batch pins that number, releases it, and publishes the update. The oldest version makes space for
/// the next write; if a late backward pass still pins it, publishing is refused with `errc::version_pinned`.
/// With one version, as in the last stage, the update happens in place.
///
/// Complexity, thread safety and errors: `detail::version_slots`.
///
/// @tparam Depth  versions; 0 for a depth known at run time: `stash{stash_depth(stages, stage)}`.
template <std::uint32_t Depth = 0>
struct stash {
  static constexpr const char* default_name = "stash";
  [[deprecated("its name is default_name")]] static constexpr const char* usual_name = default_name;

  [[nodiscard]] static constexpr std::uint32_t slots() noexcept { return Depth; }
  [[nodiscard]] static constexpr std::uint32_t kept() noexcept { return Depth; }

  template <class T>
  using state = detail::version_slots<T, stash>;
};

/// The same with the depth as a value of at least 1; the state's constructor refuses 0.
template <>
struct stash<0> {
  static constexpr const char* default_name = "stash";
  [[deprecated("its name is default_name")]] static constexpr const char* usual_name = default_name;

  std::uint32_t depth = 0;

  [[nodiscard]] constexpr std::uint32_t slots() const noexcept { return depth; }
  [[nodiscard]] constexpr std::uint32_t kept() const noexcept { return depth; }

  template <class T>
  using state = detail::version_slots<T, stash>;
};

/// `stash{3}` has the depth as a value.
stash(std::uint32_t) -> stash<0>;

static_assert(retain_policy<stash<3>, int>);
static_assert(retain_policy<stash<>, int>);

}  // namespace v0
}  // namespace llmmem
