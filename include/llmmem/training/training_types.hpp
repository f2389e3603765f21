/// @file
/// `training_plan`: the state that each rank keeps, its tiers, its recomputation and its checkpoints, as one
/// value; and the model that it is for.
#pragma once

#include <llmmem/comm/sparse_sums.hpp>
#include <llmmem/comm/wire_form.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/optimizer_form.hpp>
#include <llmmem/model/training_state.hpp>
#include <llmmem/sharding/sharded_wires.hpp>
#include <llmmem/sharding/tensor_shape.hpp>
#include <llmmem/training/kept_records.hpp>

#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// One layer of a model, as one rank trains it. Times of 0 omit stalls and steps from a prediction, and
/// change no bytes.
struct training_layer {
  std::uint64_t parameters = 0;
  record_form record{};  ///< for one rank's share of the batch, with the part that is kept; of 0 bytes: none
  std::uint64_t forward_ns = 0;
  std::uint64_t backward_ns = 0;
  std::uint64_t update_ns = 0;
  std::uint64_t rebuild_ns = 0;  ///< of the part that the record does not keep
  std::uint64_t factors = 0;     ///< floats of `adafactor`'s state: the sum of its tensors' `factor_count`
  std::uint64_t tensors = 0;     ///< of the layer, with `adafactor`
  std::vector<tensor_shape> matrices{};  ///< that `muon` updates; `adamw` updates the other parameters
  /// Whether it is another part of the layer before it, such as a tile (`operator_tiles`): weights are
  /// gathered, and gradients summed and updated, part by part. The record is that of the first part, from
  /// the first one's forward pass to the last one's, and in the backward pass the other way round.
  bool continues = false;
  /// In a layer of several parts: whether what is computed again of its record reads this part's weights.
  bool is_rebuilt_from = false;
};

/// A model as a chain of layers, the first of which is an embedding: it has no record, and its backward pass
/// does not read its weights.
struct training_shape {
  std::vector<training_layer> layers{};
  std::uint32_t value_bytes = 4;      ///< of a weight, of a gradient and of each moment
  std::uint64_t workspace_bytes = 0;  ///< for a rank's other computing
};

/// When the optimizer changes a layer's weights.
enum class optimizer_time : std::uint8_t {
  in_backward,    ///< after the layer's backward pass
  after_backward  ///< after all layers' backward passes
};

/// The bytes that a `host_space` takes for a range: whole pages from `from_bytes` on (`page_options`).
struct memory_rounding {
  std::uint64_t from_bytes = std::uint64_t{1} << 20;
  std::uint64_t page_bytes = 4096;

  /// @throws length_error  past 2^63 - 1.
  [[nodiscard]] constexpr std::uint64_t taken(std::uint64_t bytes) const {
    if (bytes < from_bytes || page_bytes == 0 || bytes % page_bytes == 0) return bytes;
    return checked_add(bytes, page_bytes - bytes % page_bytes, "memory_rounding: bytes");
  }
};

/// The parts of the state that have separate ranges of memory, if the state is not in tiers.
enum class state_ranges : std::uint8_t {
  per_kind,  ///< one range for all layers' weights, and so on: `sharded_state`
  per_layer  ///< one range for each piece
};

/// Workers that train apart, each of a plan's ranks and with batches of its own, and join their weights by
/// `outer_rounds`, layer by layer. A rank keeps base weights and momentum of the elements that its optimizer
/// updates, and sums with the ranks that have the same ones in the other workers.
struct outer_plan {
  std::uint64_t local_steps = 0;  ///< of a round; 0: nothing is joined
  std::uint32_t workers = 1;
  wire_form wire{};  ///< of a round's sums
};

/// Sums of the largest gradients of each layer alone (`top_k_all_reduce`). A rank keeps the momentum and the
/// unsent gradients of all weights, as the optimizer's mean and variance, and saves its own.
struct top_k_plan {
  double density =
      0;  ///< of a layer's gradients that are sent (`top_k_count`); 0: all of them, by other sums
  sparse_values form = sparse_values::f32;
};

/// The settings of one training run, in one place.
///
/// Every combination is allowed, except those that `check_plan` names.
struct training_plan {
  std::uint32_t ranks = 1;             ///< ranks that share each batch; with `outer`, those of one worker
  zero_stage zero = zero_stage::none;  ///< the parts of the state that each rank keeps in shards
  std::uint32_t gather_ahead = 0;      ///< layers whose weights are gathered ahead of their use, with stage 3
  /// Layers whose gradients are summed during the backward passes of the next ones (`background_sums`), with
  /// an optimizer that runs after them.
  std::uint32_t sums_in_flight = 0;
  std::vector<std::uint64_t> tiers{};  ///< budgets above the last tier, the fastest first; none: plain memory
  std::uint64_t granularity = 4096;    ///< of chunks in tiers
  /// What a chunk takes of the tiers above the last is a multiple of this: the pages of a stitched space. 1:
  /// they have none.
  std::uint64_t tier_page_bytes = 1;
  /// Moments of `adamw` and `sgd` have a weight's width; those of the other forms have their own
  /// (`widths_of`). Every rank keeps all of `adafactor`'s state, at every stage, and saves its share.
  /// With `muon` every rank keeps everything, and the ranks share out the matrices of each layer
  /// (`whole_matrices`).
  optimizer_form optimizer = optimizer_form::adamw;
  optimizer_time update = optimizer_time::in_backward;
  std::uint64_t save_every = 0;              ///< steps between two checkpoints; 0: none
  std::uint32_t segment_bytes = 256 * 1024;  ///< as in `sharded_options`
  /// The form of messages: `gather` of weights, with stage 3; the rest of gradients' sums. Values of 4 bytes.
  sharded_wires wires{};
  /// Whether each rank keeps the weights of the forward pass in shards of its node, in plain memory, so that
  /// the backward pass sends nothing to other nodes (ZeRO++'s hpZ). With stage 3 and `wires.node_ranks`.
  bool keeps_secondary = false;
  outer_plan outer{};
  top_k_plan top_k{};  ///< with `sgd`, whose momentum is then in the sums, and `zero_stage::none`
  memory_rounding memory{};
  state_ranges ranges = state_ranges::per_kind;
};

}  // namespace v0
}  // namespace llmmem
