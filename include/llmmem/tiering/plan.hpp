/// @file
/// A plan says what to move and when: plain data that a runner follows by the index of the event it has
/// reached.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/machine.hpp>
#include <llmmem/transfer/flow.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// What a step does. A tier's *copy* of a chunk takes the chunk's bytes of its budget.
enum class plan_operation : std::uint8_t {
  fetch,  ///< copies `from` = `to` + 1 to `to`: takes its space when it starts; the source keeps its copy
  write_back,  ///< copies `from` to `to` = `from` + 1, and takes space there if there is no copy yet; for
               ///< clean contents this is wasted work, not an error
  drop,  ///< frees the copy in `from` once no transfer reads it; another copy is as new, or the contents are
         ///< no longer needed
  allocate,  ///< takes space in tier 0 for contents that the program is about to write
};

/// When the runner issues a step, relative to event `at_event`.
enum class plan_moment : std::uint8_t {
  ahead,    ///< as soon as the event before it is done, or the iteration has begun: during the computation
            ///< that precedes the event
  at_call,  ///< when the program calls, before it waits
};

/// One step. Steps are sorted by (`at_event`, `when`); the runner issues the steps of one moment in the
/// plan's order.
///
/// Transfers of one link and direction (of one link, when it is half duplex) run one after another in the
/// order of their issue; each starts when the link is free, its source is complete and its destination has
/// space. Times are predictions, in nanoseconds from the iteration's beginning; a runner needs none of them.
/// A step of `at_event` = number of events belongs after the last event.
struct plan_step {
  std::uint32_t at_event = 0;
  chunk_id chunk{};
  plan_moment when = plan_moment::ahead;
  plan_operation operation = plan_operation::fetch;
  std::uint8_t from = 0;        ///< tier
  std::uint8_t to = 0;          ///< tier; for a drop and an allocation the same as `from`
  std::uint64_t bytes = 0;      ///< the chunk's
  std::uint64_t start_ns = 0;   ///< predicted start
  std::uint64_t finish_ns = 0;  ///< predicted end; may be in the next iteration
  std::uint64_t latest_ns = 0;  ///< a fetch: the latest start that keeps the predicted stall, if the fetches
                                ///< after it start as late as they may; otherwise `start_ns`

  friend constexpr bool operator==(const plan_step&, const plan_step&) noexcept = default;
};

/// A copy of a chunk at the beginning of an iteration, in addition to the one in the last tier.
struct plan_placement {
  chunk_id chunk{};
  std::uint8_t tier = 0;
  bool newest = true;  ///< false: an outdated copy that only holds its place
  bool home = true;    ///< the last tier's copy is as new; false: it may be older

  friend constexpr bool operator==(const plan_placement&, const plan_placement&) noexcept = default;
};

/// The time and traffic of one iteration, predicted or simulated.
struct plan_forecast {
  std::uint64_t iteration_ns = 0;  ///< computing and stalls
  std::uint64_t compute_ns = 0;
  stall_times stalls{};
  std::vector<link_flow> edges{};  ///< bytes and transfers between tier i and tier i + 1

  /// Bytes over the edge below `tier`, both ways.
  [[nodiscard]] std::uint64_t bytes(std::size_t tier = 0) const noexcept {
    return edges[tier].onboard.bytes + edges[tier].offload.bytes;
  }
  friend bool operator==(const plan_forecast&, const plan_forecast&) noexcept = default;
};

/// The minimum that any plan needs: see schedule/bounds.hpp for the proofs.
struct plan_bound {
  std::uint64_t stall_ns = 0;
  std::vector<link_flow> edges{};  ///< bytes; the operations are a bound, too

  [[nodiscard]] std::uint64_t bytes(std::size_t tier = 0) const noexcept {
    return edges[tier].onboard.bytes + edges[tier].offload.bytes;
  }
  friend bool operator==(const plan_bound&, const plan_bound&) noexcept = default;
};

/// The excess of a plan over the bound; 0 proves the plan optimal.
struct plan_regret {
  std::uint64_t stall_ns = 0;
  std::uint64_t bytes = 0;  ///< over the edge below tier 0, both ways

  friend constexpr bool operator==(const plan_regret&, const plan_regret&) noexcept = default;
};

/// One iteration of a plan. The steady iteration's forecast is that of the fourth iteration from a cold
/// start, when the transfers in flight at its beginning have settled; for traces of more than 100,000 events,
/// of the second.
struct plan_iteration {
  std::vector<plan_step> steps{};
  plan_forecast forecast{};
  plan_bound bound{};

  [[nodiscard]] plan_regret regret() const noexcept {
    return {.stall_ns = forecast.stalls.total() - bound.stall_ns, .bytes = forecast.bytes() - bound.bytes()};
  }
  friend bool operator==(const plan_iteration&, const plan_iteration&) noexcept = default;
};

/// A complete plan: the first iteration, from a machine with all chunks in the last tier only, and the steady
/// iteration that repeats from then on. Both end in the state that `start` describes, and the steady one
/// begins with it. Transfers that an iteration has issued and not finished count as done in `start`, and
/// carry over.
///
/// A planner makes it (schedule/planners.hpp), `simulate` executes it in virtual time
/// (schedule/simulate.hpp), and schedule/plan_text.hpp writes and reads it.
///
/// @par Thread safety   a plain value.
struct schedule_plan {
  std::string planner{};                ///< the planner that made it: "next_use"
  std::uint64_t trace_fingerprint = 0;  ///< of the trace it was made for
  std::uint32_t events = 0;             ///< of that trace
  std::uint32_t chunks = 0;             ///< of that trace
  schedule_machine machine{};
  std::vector<plan_placement> start{};  ///< by chunk, then tier
  plan_iteration first{};
  plan_iteration steady{};

  friend bool operator==(const schedule_plan&, const schedule_plan&) noexcept = default;
};

}  // namespace v0
}  // namespace llmmem
