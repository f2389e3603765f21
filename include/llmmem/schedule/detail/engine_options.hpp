/// @file
/// The rules of a planner's engine, and the state it must reach. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/tiering/plan.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The rules of an engine.
struct engine_options {
  enum class order : std::uint8_t { least_recent, furthest_use };
  enum class prefetch : std::uint8_t { none, by_count, by_time };

  order evict = order::furthest_use;
  prefetch ahead = prefetch::by_time;
  std::uint32_t count = 0;  ///< by count: acquires to look ahead
  std::uint64_t ahead_bytes =
      max_bytes;  ///< by time: the most unused bytes that tier 0 holds, at least one chunk
  std::uint64_t ahead_bytes_below = max_bytes;  ///< the same for the tiers below; 0: only on the way to tier
                                                ///< 0
  std::uint64_t within_ns =
      ~std::uint64_t{0};           ///< by time: chunks used after more computing than this can wait
  std::uint64_t dirty_weight = 1;  ///< the cost of a write-back, in fetches of as many bytes
  bool clean_early = false;        ///< writes back on release the chunks that the iteration before evicted
                                   ///< dirty
  bool clean_ahead = false;        ///< writes back the next chunks to leave tier 0 while its link has time
  bool cyclic = true;              ///< false: no iteration follows
};

/// The state in which an iteration must end, for each chunk and each tier except the last.
class engine_goal {
 public:
  engine_goal(const std::vector<plan_placement>& placements, std::size_t chunks, std::size_t tiers)
      : tiers_(tiers), held_(chunks * tiers), home_(chunks, true) {
    for (const plan_placement& each : placements) {
      if (!each.newest) continue;
      held_[to_index(each.chunk) * tiers_ + each.tier] = true;
      home_[to_index(each.chunk)] = each.home;
    }
  }
  [[nodiscard]] bool holds(chunk_id chunk, std::size_t tier) const noexcept {
    return held_[to_index(chunk) * tiers_ + tier];
  }
  /// Whether the last tier's copy must be the newest as well.
  [[nodiscard]] bool home(chunk_id chunk) const noexcept { return home_[to_index(chunk)]; }
  void all_home() { home_.assign(home_.size(), true); }

 private:
  std::size_t tiers_;
  std::vector<bool> held_;
  std::vector<bool> home_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
