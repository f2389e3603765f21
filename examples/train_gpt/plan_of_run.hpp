/// @file
/// A run's settings as an `llmmem::training_plan`, and the library's predictions for them.
#pragma once

#include <llmmem/model/training_state.hpp>
#include <llmmem/training/loss_scale.hpp>
#include <llmmem/training/training_plan.hpp>

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "train_gpt/gpt.hpp"
#include "train_gpt/layer_parts.hpp"
#include "train_gpt/rank_voice.hpp"
#include "train_gpt/recomputation.hpp"
#include "train_gpt/run.hpp"
#include "train_gpt/run_options.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// The computation of one rank, and the kept activations.
struct planned_run {
  gpt_shape shape{};  ///< of one rank's share of the batch
  std::size_t threads = 1;
  llmmem::training_plan plan{};
  llmmem::training_shape layers{};
  planned_records records{};
  bool plans_moves = false;  ///< of pieces between tiers

  /// @throws llmmem::argument_error  for an impossible combination, or a tier that is too small.
  [[nodiscard]] llmmem::training_prediction of_rank(std::uint32_t rank) const {
    llmmem::training_prediction of = llmmem::predict(plan, layers, llmmem::rank_id{rank});
    if (plans_moves && plan.tiers.size() > 1 && plan.tiers[1] / 2 < of.largest_chunk_bytes) {
      throw llmmem::argument_error(fmt::format(
          "a second tier of {} bytes; planned moves need two pieces there, and the largest takes {}: raise "
          "--host-mib to {}, or choose --schedule on_demand",
          plan.tiers[1], of.largest_chunk_bytes, ((2 * of.largest_chunk_bytes - 1) >> 20U) + 1));
    }
    return of;
  }
};

/// @throws llmmem::argument_error  for a budget of activations that no choice meets.
[[nodiscard]] inline planned_run plan_run(const command_line& asked) {
  constexpr std::uint64_t mib = std::uint64_t{1} << 20;
  planned_run run;
  const std::size_t ranks = std::max<std::size_t>(asked.parallel.ranks, 1);
  run.shape = shape_of_rank(asked.shape, ranks);
  run.threads = std::max<std::size_t>(asked.threads / ranks, 1);
  run.records = plan_records(run.shape, asked.recompute, asked.activation_bits);
  const outer_options& outer = asked.parallel.outer;
  run.plan = {.ranks = asked.parallel.ranks_of_worker(),
              .zero = asked.parallel.stage,
              .gather_ahead = asked.parallel.gather_ahead,
              .sums_in_flight = asked.parallel.sums_in_flight,
              .optimizer = asked.shape.optimizer,
              .update = asked.update == update_time::in_backward ? llmmem::optimizer_time::in_backward
                                                                 : llmmem::optimizer_time::after_backward,
              .save_every = asked.checkpoints.every,
              .wires = asked.parallel.wires,
              .keeps_secondary = asked.parallel.keeps_secondary,
              .outer = {.local_steps = outer.local_steps, .workers = outer.workers, .wire = outer.wire},
              .top_k = asked.parallel.top_k};
  if (asked.memory == memory_kind::tiered) {
    run.plan.tiers.push_back(asked.tiers.budget_mib * mib);
    if (asked.tiers.host_mib != 0) run.plan.tiers.push_back(asked.tiers.host_mib * mib);
    run.plan.tier_page_bytes = tier_options::page_bytes;
    run.plans_moves = asked.tiers.schedule != schedule_kind::on_demand;
  }
  const std::vector<layer_part> parts = state_parts(run.shape);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const layer_id id = parts[i].layer;
    llmmem::training_layer layer;
    layer.parameters = parts[i].elements;
    layer.tensors = parameter_layout(run.shape, id).tensors.size();
    layer.factors = factor_layout(run.shape, id).elements;
    for (const tensor_place& each : muon_matrices(run.shape, id))
      layer.matrices.push_back(llmmem::tensor_shape::matrix(each.rows, each.columns));
    layer.continues = !begins_layer(parts, i);
    if (i != 0) {
      // What is computed again of a block's record needs no weights, or those of all but its output.
      const llmmem::record_form& form = run.records.forms[to_index(id) - 1];
      layer.is_rebuilt_from = form.kept.size() == 1 && !is_output(run.shape, parts[i]);
      if (!layer.continues) layer.record = form;
    }
    run.layers.layers.push_back(layer);
  }
  run.plan.memory.page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (asked.parallel.ranks == 0) run.plan.ranges = llmmem::state_ranges::per_layer;
  for (const std::size_t elements : gpt<float, llmmem::host_space>::workspace_ranges(run.shape, run.threads))
    run.layers.workspace_bytes += run.plan.memory.taken(elements * sizeof(float));
  return run;
}

/// The library's predictions for a rank's run, in the same terms as its measurements.
/// @param steps  that this process trains, the last ones of the run.
[[nodiscard]] inline predicted_usage predict_usage(const planned_run& run, const command_line& asked,
                                                   std::uint32_t rank, std::uint64_t steps) {
  const llmmem::training_prediction of = run.of_rank(rank);
  const bool is_tiered = !of.tiers.empty();
  const bool is_alone = asked.parallel.ranks == 0;
  const std::uint64_t rounds = asked.parallel.outer.rounds(asked.steps - steps, asked.steps);
  // Gathered layers and rounds take turns.
  const std::uint64_t turns = std::max(of.gathered.bytes, of.round_bytes);
  const std::uint64_t most = rounds == 0 ? of.gathered.bytes : turns;
  predicted_usage all;
  all.kept_state_bytes = of.kept.total() + of.outer_bytes;
  all.peak_state_bytes =
      most + of.resident_state_bytes + of.residual_bytes + of.secondary_bytes + of.resident_outer_bytes;
  all.state_is_bound = of.gathered.is_bound;
  all.peak_record_bytes = of.records_bytes;
  // Without ranks, the measurements also count the workspace separately from the tiers.
  all.peak_bytes = is_tiered && is_alone ? of.tiers.front().bytes : of.fast.bytes - turns + most;
  all.peak_is_bound = of.fast.is_bound;
  all.sent_is_bound = run.plan.gather_ahead != 0;  // `training_prediction::sent_per_step`
  all.tiers = static_cast<std::uint32_t>(of.tiers.size());
  for (std::size_t i = 0; i < of.tiers.size(); ++i)
    all.tier_peak_bytes[i] = of.tiers[i].bytes;
  // Sharded weights are gathered for the evaluation and for the digest; others are refreshed when they are
  // drawn. Ranks exchange a number for each loss, and with checkpoints one for each step, one when they meet
  // in the folder and one when they resume.
  const std::uint64_t once = run.plan.zero == llmmem::zero_stage::weights ? asked.evaluate + 1 : 1;
  const bool saves = !asked.checkpoints.folder.empty();
  const std::uint64_t numbers = steps + asked.evaluate + (run.plan.outer.workers > 1 ? 1U : 0U) +
                                (saves ? steps + 1 + (asked.checkpoints.resumes ? 1U : 0U) : 0U);
  const std::uint64_t others = std::max<std::uint64_t>(asked.parallel.ranks, 1) - 1;
  // A guard merges the norm of each step's gradients, in its worker.
  const std::uint64_t norms = asked.guard.guards() ? steps * sizeof(llmmem::gradient_norm) : 0;
  all.bytes_sent = steps * of.sent_per_step + rounds * of.sent_per_round + once * of.sent_once +
                   numbers * sizeof(std::uint64_t) * others + norms * (run.plan.ranks - 1U);
  return all;
}

}  // namespace train_gpt
