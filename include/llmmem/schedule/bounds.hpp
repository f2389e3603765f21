/// @file
/// Bytes and stall that no plan whatever can do with less.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/tiering/machine.hpp>
#include <llmmem/tiering/plan.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// What a bound holds for.
enum class bounded_iteration : std::uint8_t {
  first,   ///< one iteration, from a machine whose chunks all lie in the last tier
  steady,  ///< each of endlessly many, on the average
};

/// A lower bound on the stall of an iteration and on the bytes over each edge, whatever plan is followed.
///
/// **Bytes onboard.** Consider the edge below tier k, and B, the budgets of tiers 0 to k together. Between
/// two uses of a chunk of which the second reads it, its contents either lie in these tiers all the time, or
/// come over the edge in between: a *gap* is either kept or costs the chunk's bytes. At every instant what is
/// kept and what is leased fit B. Let go of whole chunks and decide for each byte by itself: that can only be
/// cheaper. Of intervals of equal weight, as many as possible under a capacity that varies over time are had
/// by going through time and giving up, wherever there are too many, the one that ends last: any choice must
/// give up one of those, and to give up the last to end leaves the others, point for point, under the least
/// load. That is Belady's rule, applied to bytes; what it gives up is the bound. For one tier of equal chunks
/// no byte is torn (sizes and budget being multiples), so the bound is what MIN itself needs.
///
/// **Bytes offload.** Between two writes of a chunk without a discard, its contents either lie in tiers 0 to
/// k all the time, from write to write, or go over the edge: the same argument, with these gaps, whose own
/// leases lie within them, and with the leases of others left out, which can only be cheaper.
///
/// **Steady.** What lies in the tiers when an iteration begins is not known: let it be had for nothing. Then
/// n iterations cost at least what the rule above gives from the best such beginning, and one, on the
/// average, an n-th of it, rounded up to whole chunks if all are equal, as every iteration of a plan moves
/// the same.
///
/// **What goes down by a given moment.** Cut the gaps between writes off there: one that was given up before
/// has gone down, whenever its next write comes, as until then the room above was taken. Of gaps that end
/// together any may be given up, and the order of their true ends is one of the ways.
///
/// **Stall.** Let a window begin after some event and end with an acquire. What lies in tier 0 at its
/// beginning, transfers under way included, takes room; let it be had for nothing. All that the byte bound
/// gives for the window comes over the link after the window began and before it ends; and what is written in
/// the window and given up in it goes down in it, whatever was dirty before being forgotten. The window lasts
/// at least as long as the longer of both takes, over a link that goes one way at a time as long as both
/// together, of which at most its computing is no stall. Stalls of windows that do not
/// overlap add up; the bound is the best such sum (of windows that begin at chosen events; all, when they are
/// few). In the steady state, furthermore, an iteration cannot be shorter than its bytes take each way.
///
/// @par Complexity   O(n log n) for n events; windows are looked for from every event up to some thousand
///      events, beyond that from the first alone.
/// @throws argument_error  as planners do.
[[nodiscard]] plan_bound lower_bound(const schedule_trace& trace, const schedule_machine& machine,
                                     bounded_iteration of);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/schedule/detail/bounds_body.hpp>
