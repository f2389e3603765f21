/// @file
/// The outcome of a step, and of an iteration's end. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/tiering/plan.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Why a step is impossible.
enum class refusal : std::uint8_t {
  none,
  not_there,      ///< the source has no copy, or one that is not the newest
  already_there,  ///< the destination has the newest contents
  leased,         ///< a lease of the program forbids the step
  only_copy,      ///< no other copy has the contents
  over_budget,
  in_use,  ///< a transfer that waits for space needs it
  home,    ///< the last tier keeps its copies
};

[[nodiscard]] constexpr const char* text_of(refusal why) noexcept {
  constexpr std::array<const char*, 8> texts{"nothing",
                                             "the newest contents are not in the tier it comes from",
                                             "the newest contents are there already",
                                             "the program holds it",
                                             "no other tier has the newest contents",
                                             "no space, and none that will be free",
                                             "a transfer that waits for space needs it",
                                             "the last tier keeps its copies"};
  return texts[static_cast<std::size_t>(why)];
}

/// Start and end of an issued step; `unresolved` while it waits for space that no decided step frees.
struct issued {
  refusal why = refusal::none;
  std::uint64_t start_ns = 0;
  std::uint64_t finish_ns = 0;
};

/// Returns whether an iteration that begins with `start` may also begin with `found`: the same copies, of
/// which more may be clean.
[[nodiscard]] inline bool as_good(const std::vector<plan_placement>& found,
                                  const std::vector<plan_placement>& start) {
  return std::ranges::equal(found, start, [](const plan_placement& a, const plan_placement& b) {
    return a.chunk == b.chunk && a.tier == b.tier && a.newest == b.newest && (a.home || !b.home);
  });
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
