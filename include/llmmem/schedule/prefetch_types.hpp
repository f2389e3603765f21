/// @file
/// The input and output of a `prefetch_schedule`: options, state and counters.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/cursor.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The construction parameters of a `prefetch_schedule`.
struct prefetch_options {
  /// The links between the buffer's tiers, as in `schedule_machine`; the budgets are the buffer's. One link
  /// for each pair of neighbours, starting below tier 0: three tiers have two. Empty: the constructor
  /// measures them (`measure_links`), which moves two chunks of its own through the buffer.
  std::vector<link_model> links{};
  /// The link of each pair, if two pairs share one; empty: each pair has its own.
  std::vector<std::uint32_t> edges{};
  on_divergence divergence = on_divergence::repair;
  schedule_cursor::options follow{};
  /// With `on_divergence::repair`: after this many consecutive iterations that left the plan, the schedule
  /// records another iteration.
  std::uint32_t re_record_after = 3;
  /// The schedule times this many iterations that followed the plan, and plans again with their times,
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
  std::uint64_t inserted = 0;    ///< calls that the trace lacks at that place
  std::uint64_t diverged = 0;    ///< times that the plan was given up
  std::uint64_t between = 0;     ///< calls between two iterations, which no plan covers
  std::uint64_t steps = 0;       ///< executed steps of plans, without the next two counts
  std::uint64_t unneeded = 0;    ///< steps whose effect already existed (a drop of discarded contents), or
                                 ///< was no longer possible
  std::uint64_t late = 0;        ///< steps whose event came before they could begin; the lease does their
                                 ///< work
  std::uint64_t recordings = 0;  ///< iterations recorded and planned
  std::uint64_t replans = 0;     ///< plans made again with the times of an iteration that followed one
};

/// Why a step of a plan was late.
enum class step_cause : std::uint8_t {
  link_busy,    ///< other transfers came first, or this one took longer than planned: the link is slower than
                ///< the plan's, or others use it
  no_room,      ///< copies that had to leave the destination tier had not left
  leased,       ///< a lease held the chunk, or delayed an earlier step
  issued_late,  ///< it began and took as long as planned: the program computed for less time before it than
                ///< was recorded
};
inline constexpr std::size_t step_causes = 4;
[[nodiscard]] constexpr const char* to_string(step_cause cause) noexcept {
  constexpr std::array<const char*, step_causes> names{"link_busy", "no_room", "leased", "issued_late"};
  return names[static_cast<std::size_t>(cause)];
}

/// Counters of one step of a plan, over all iterations in which it was due.
struct step_record {
  std::uint64_t begun = 0;     ///< times that the step was executed
  std::uint64_t late = 0;      ///< times that its event, or a lease of the chunk that it fetches, came before
                               ///< its end
  std::uint64_t late_ns = 0;   ///< total time that those leases waited
  std::uint64_t unneeded = 0;  ///< times that its effect already existed, or was no longer possible
  std::uint64_t unused = 0;  ///< a fetch to tier 0: times that the chunk was dropped or fetched again without
                             ///< a lease in between
  std::array<std::uint64_t, step_causes>
      causes{};  ///< of `late`, by `step_cause`: the largest share of each wait

  friend constexpr bool operator==(const step_record&, const step_record&) noexcept = default;
};

/// A record for each step of a plan, in the plan's order.
struct step_records {
  std::vector<step_record> first{};   ///< of `schedule_plan::first`
  std::vector<step_record> steady{};  ///< of `schedule_plan::steady`

  friend bool operator==(const step_records&, const step_records&) noexcept = default;
};

}  // namespace v0
}  // namespace llmmem
