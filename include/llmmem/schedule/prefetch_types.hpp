/// @file
/// The input and output of a `prefetch_schedule`: options, state and counters.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/cursor.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// How a schedule is set up.
struct prefetch_options {
  /// The links between the buffer's tiers, as in `schedule_machine`; the budgets are the buffer's. One link
  /// for each pair of neighbours, the one below tier 0 first: three tiers have two.
  std::vector<link_model> links{};
  /// The link of each pair, if two pairs share one; empty: each pair has its own.
  std::vector<std::uint32_t> edges{};
  on_divergence divergence = on_divergence::repair;
  schedule_cursor::options follow{};
  /// With `on_divergence::repair`: after so many consecutive iterations that left the plan, the schedule
  /// records another iteration.
  std::uint32_t re_record_after = 3;
  /// So many iterations that followed the plan are timed, and the plan is made again with their times,
  /// because the recorded iteration waited for every chunk, and its caches were cold. Planning takes tens of
  /// milliseconds for some hundred events.
  std::uint32_t replans = 0;
  std::string name = "prefetch_schedule";  ///< for error texts
};

/// The state of a schedule.
enum class schedule_state : std::uint8_t {
  idle,       ///< calls are passed to the buffer only
  recording,  ///< the schedule also notes each call
  replaying,  ///< the schedule also executes the plan's steps
};

/// Counters of a schedule.
struct prefetch_stats {
  std::uint64_t on_plan = 0;     ///< calls that were the next event
  std::uint64_t skipped = 0;     ///< calls that were a later event
  std::uint64_t inserted = 0;    ///< calls that are absent from the trace there
  std::uint64_t diverged = 0;    ///< how often the plan was given up
  std::uint64_t between = 0;     ///< calls between two iterations, which no plan covers
  std::uint64_t steps = 0;       ///< executed steps of plans, without the two counts below
  std::uint64_t unneeded = 0;    ///< steps whose effect was there already (a drop of discarded contents), or
                                 ///< was no longer possible
  std::uint64_t late = 0;        ///< steps whose event came before they could begin: left to the lease
  std::uint64_t recordings = 0;  ///< iterations recorded and planned
  std::uint64_t replans = 0;     ///< plans made again with the times of an iteration that followed one
};

}  // namespace v0
}  // namespace llmmem
