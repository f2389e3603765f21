/// @file
/// `predict`: the cost of a `training_plan` before the run.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/model/training_state.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/training/training_types.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The bytes that a plan takes: exactly, or at most.
struct predicted_bytes {
  std::uint64_t bytes = 0;
  bool is_bound = false;

  [[nodiscard]] constexpr bool holds(std::uint64_t measured) const noexcept {
    return is_bound ? measured <= bytes : measured == bytes;
  }
};

/// The memory and traffic of one rank.
struct training_prediction {
  training_bytes kept{};                   ///< weights, gradients and moments between operations, in any tier
  std::uint64_t resident_state_bytes = 0;  ///< what these take in plain memory; 0 in tiers
  predicted_bytes gathered{};              ///< the most at once of gathered layers and of a sum's messages
  std::uint64_t records_bytes = 0;         ///< the most at once of activations, in any tier
  std::uint64_t resident_records_bytes = 0;  ///< what these take in plain memory; 0 in tiers
  std::uint64_t residual_bytes =
      0;  ///< of what sums have lost, in plain memory (`sharded_wires::keeps_errors`)
  std::uint64_t secondary_bytes =
      0;  ///< of the node's copy of the weights, in plain memory (`keeps_secondary`)
  std::uint64_t workspace_bytes = 0;
  std::uint64_t outer_bytes = 0;           ///< of base weights and momentum of outer steps, in any tier
  std::uint64_t resident_outer_bytes = 0;  ///< what these take in plain memory; 0 in tiers
  /// The most at once of what a round adds: in plain memory the change of a layer, and the messages of its
  /// sum, which are on the heap. Then nothing is gathered, and no activation is kept.
  std::uint64_t round_bytes = 0;
  std::vector<predicted_bytes> tiers{};  ///< the most in each tier at once; none in plain memory
  predicted_bytes fast{};  ///< everything in the fastest memory; gathered layers and a round take turns
  /// The least budget of the first tier that works: the most that a step holds at once, in the tier's pages.
  /// With `gather_ahead` at most, because how far the gathers are depends on timing.
  std::uint64_t largest_lease_bytes = 0;
  /// What the largest chunk takes of a tier: the least budget of one between the first and the last. A
  /// planned `prefetch_schedule` needs two there, one on its way up and one on its way down.
  std::uint64_t largest_chunk_bytes = 0;
  /// To other ranks: gathers, sums, refreshes. With `gather_ahead` at most, if layers differ in size: a plan
  /// of gathers that has memory for more layers gathers fewer of them twice.
  std::uint64_t sent_per_step = 0;
  /// By an outer step, to other workers and within this one. `stall_ns` and `step_ns` have each step's share.
  std::uint64_t sent_per_round = 0;
  std::uint64_t sent_once = 0;    ///< by the setup of weights, and by each use of all weights in turn (zero
                                  ///< 3)
  std::uint64_t saved_bytes = 0;  ///< of each checkpoint, by this rank
  std::vector<std::uint64_t> min_moved_bytes{};  ///< per step over each edge between tiers, both ways; a
                                                 ///< bound
  std::uint64_t stall_ns = 0;                    ///< a lower bound for every schedule, for tiers and for
                                                 ///< ranks
  std::uint64_t step_ns = 0;                     ///< computing and stalls
};

/// Refuses plans and shapes that cannot be trained.
/// @throws argument_error  for no ranks, a shape without layers, and gathers ahead, or over a wire, of
///                         weights that every rank holds completely, because there is nothing to gather; for
///                         wires of values that are not 4 bytes, and those that `check_wires` refuses; for
///                         secondary shards without stage 3, without nodes of at least two ranks, or with
///                         gathers ahead, which gather from all ranks; for `adafactor` with values that are
///                         not 4 bytes, or with a layer that has parameters, and no factors or tensors; for
///                         `muon` with values that are not 4 bytes, with shards, which cut matrices, or with
///                         matrices of more elements than their layer; for outer steps of no workers, or of
///                         values that are not 4 bytes, and for several workers without outer steps; for
///                         sums of the largest gradients with another optimizer than `sgd`, shards, wires,
///                         sums in flight, values that are not 4 bytes, or a layer past 2^32 parameters;
///                         for a layer that continues none or has a record of its own, and for parts of
///                         layers with `adafactor` or `muon`.
void check_plan(const training_plan& plan, const training_shape& shape);

/// Returns the chunks and the calls of one rank's step on a store of chunks (`leased_pieces`,
/// `kept_records`). The chunks are the layers' weights, gradients and optimizer arrays (means, variances, low
/// halves), then each record and, if only a part of it is kept, that part. Chunks without bytes are omitted.
/// A run that gathers weights ahead leases them earlier than this trace. Outer steps are between steps: their
/// chunks are in no trace.
/// @throws as `check_plan`.
[[nodiscard]] schedule_trace step_trace(const training_plan& plan, const training_shape& shape, rank_id rank);

/// Returns the memory that `rank` takes under `plan`, counted to the byte as the parts of the library
/// allocate it. Two terms depend on timing, so they are upper bounds and have `is_bound` set: the tiers above
/// the last one, within their budgets, and the weights gathered ahead.
///
/// @param rank    of all workers' ranks: worker w has the ranks w x `ranks` to (w + 1) x `ranks` - 1.
/// @param links   between tiers, as many as budgets; none: predicts no stalls.
/// @param network between ranks; without bandwidth, predicts no stalls of the network.
/// @par Complexity      O(layers x (ranks + workers)), in memory O(layers + ranks + workers); with links, in
///                      addition that of `lower_bound`.
/// @par Thread safety   pure.
/// @throws argument_error  as `check_plan`; for a rank that is not below the plan's, of all workers; for a
///                         number of links other than that of budgets; for a first tier below
///                         `largest_lease_bytes`, or another one below `largest_chunk_bytes`, with both
///                         numbers.
/// @throws length_error    past 2^63 - 1 bytes.
/// @par Source          Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, Table 1, for the kept bytes.
[[nodiscard]] training_prediction predict(const training_plan& plan, const training_shape& shape,
                                          rank_id rank, std::span<const link_model> links = {},
                                          const link_model& network = {});

}  // namespace v0
}  // namespace llmmem

#include <llmmem/training/detail/training_plan_body.hpp>
