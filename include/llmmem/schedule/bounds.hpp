/// @file
/// Lower bounds on the bytes and the stall of every plan.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/detail/bodies.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/tiering/machine.hpp>
#include <llmmem/tiering/plan.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The iterations that a bound holds for.
enum class bounded_iteration : std::uint8_t {
  first,   ///< one iteration that begins with all chunks in the last tier only
  steady,  ///< the average of endlessly many
};

/// Returns a lower bound on the stall of an iteration and on the bytes over each edge, for any plan.
///
/// **Bytes onboard.** Consider the edge below tier k, and let B be the budgets of tiers 0 to k together. Take
/// two uses of a chunk, the second of which reads it. Between them, the chunk's contents either stay in these
/// tiers or come over the edge: a *gap* is either kept or costs the chunk's bytes. At every instant, kept
/// gaps and leases fit B. Decide for each byte separately instead of for each chunk: that can only be
/// cheaper. Now the task is to keep as many intervals of equal weight as possible under a capacity that
/// varies over time. Go through time and, wherever there are too many, give up the interval that ends last.
/// Every choice must give up one of these, and giving up the last to end leaves the least load at each later
/// instant. This is Belady's rule, applied to bytes; the bytes that it gives up are the bound. For one tier
/// of equal chunks no chunk is divided (if the budget is a multiple of their size), so the bound is what MIN
/// itself needs.
///
/// **Bytes offload.** Between two writes of a chunk without a discard, its contents either stay in tiers 0 to
/// k from write to write, or move over the edge. The same argument holds for these gaps, which contain the
/// chunk's own leases. It leaves out the leases of other chunks, which can only be cheaper.
///
/// **Steady.** The contents of the tiers at the beginning of an iteration are unknown: assume that they cost
/// nothing. Then n iterations cost at least the rule's result for the best beginning, and one iteration, on
/// average, an n-th of it, rounded up to whole chunks if all are equal, because every iteration of a plan
/// moves the same bytes.
///
/// **Bytes moved down by a given moment.** Cut the gaps between writes at that moment. A gap that was given
/// up before the moment has moved down, regardless of its next write, because the space above was taken until
/// then. Of gaps that end together, the rule may give up any, so it may use the order of their true ends.
///
/// **Stall.** Let a window begin after some event and end with an acquire. The contents of tier 0 at its
/// beginning, including transfers in flight, take space; assume that they cost nothing. All bytes of the
/// window's byte bound cross the link within the window. Contents that are written in the window and given up
/// in it move down in it; bytes that were dirty before are ignored. So the window lasts at least as long as
/// the longer of the two directions takes, and over a half-duplex link as long as both together. Of this
/// time, at most the window's computing is not stall. Stalls of windows that do not overlap add up; the bound
/// is the largest such sum (over windows that begin at chosen events, or at all events if they are few). In
/// the steady state, an iteration also lasts at least as long as its bytes take in each direction.
///
/// **Transfers.** A gap moves at most once in each direction, and whole, so that bytes need at least as many
/// transfers as the largest gaps that have so many bytes together; each takes the link's latency. A window
/// has the gaps that end in it (to come up), or open in it (to go down).
///
/// @par Complexity   O(n log n) for n events. For up to some thousand events, the search for windows begins
///                   at every event; for more, only at the first.
/// @throws argument_error  as planners do.
[[nodiscard]] plan_bound lower_bound(const schedule_trace& trace, const schedule_machine& machine,
                                     bounded_iteration of);

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_SCHEDULE_BODIES
#include <llmmem/schedule/detail/bounds_body.hpp>
#endif
