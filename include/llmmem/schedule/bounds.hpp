/// @file
/// The bytes and stall that every plan needs at least.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/tiering/machine.hpp>
#include <llmmem/tiering/plan.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The iterations that a bound holds for.
enum class bounded_iteration : std::uint8_t {
  first,   ///< one iteration, from a machine with all chunks in the last tier only
  steady,  ///< each of endlessly many, on average
};

/// Returns a lower bound on the stall of an iteration and on the bytes over each edge, for any plan.
///
/// **Bytes onboard.** Consider the edge below tier k, and B, the budgets of tiers 0 to k together. Between
/// two uses of a chunk of which the second reads it, its contents either are in these tiers all the time, or
/// come over the edge in between: a *gap* is either kept or costs the chunk's bytes. At every instant what is
/// kept and what is leased fit B. Drop the restriction to whole chunks and decide for each byte separately:
/// that can only be cheaper. To keep as many intervals of equal weight as possible under a capacity that
/// varies over time, go through time and, wherever there are too many, give up the one that ends last: any
/// choice must give up one of those, and giving up the last to end leaves the others, point for point, under
/// the least load. That is Belady's rule, applied to bytes; what it gives up is the bound. For one tier of
/// equal chunks no chunk is divided (if sizes and budget are multiples), so the bound is what MIN itself
/// needs.
///
/// **Bytes offload.** Between two writes of a chunk without a discard, its contents either are in tiers 0 to
/// k all the time, from write to write, or move over the edge: the same argument, with these gaps, which
/// contain their own leases, and with the leases of other chunks left out, which can only be cheaper.
///
/// **Steady.** The contents of the tiers at the beginning of an iteration are unknown: assume that they are
/// free. Then n iterations cost at least what the rule above gives from the best such beginning, and one, on
/// average, an n-th of it, rounded up to whole chunks if all are equal, because every iteration of a plan
/// moves the same.
///
/// **What has moved down by a given moment.** Cut the gaps between writes at that moment: a gap that was
/// given up before it has moved down, regardless of its next write, because until then the space above was
/// taken. Of gaps that end together any may be given up, and the order of their true ends is one of the ways.
///
/// **Stall.** Let a window begin after some event and end with an acquire. The contents of tier 0 at its
/// beginning, including transfers in flight, take space; assume that they are free. All that the byte bound
/// gives for the window comes over the link after the window began and before it ends; and what is written in
/// the window and given up in it moves down in it, if all bytes that were dirty before are ignored. The
/// window lasts at least as long as the longer of both takes, over a half-duplex link as long as both
/// together, of which at most its computing is no stall. Stalls of windows that do not overlap add up; the
/// bound is the best such sum (of windows that begin at chosen events; at all events, when they are few). In
/// the steady state, furthermore, an iteration cannot be shorter than its bytes take each way.
///
/// @par Complexity   O(n log n) for n events; windows are searched from every event up to some thousand
///                   events, beyond that from the first alone.
/// @throws argument_error  as planners do.
[[nodiscard]] plan_bound lower_bound(const schedule_trace& trace, const schedule_machine& machine,
                                     bounded_iteration of);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/schedule/detail/bounds_body.hpp>
