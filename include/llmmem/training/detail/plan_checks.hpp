/// @file
/// What a `training_plan` refuses.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/sharding/sharded_wires.hpp>
#include <llmmem/training/detail/rank_shares.hpp>
#include <llmmem/training/training_types.hpp>

#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Refuses sums of the largest gradients with what they do not go with.
inline void check_top_k(const training_plan& plan, const training_shape& shape) {
  if (plan.top_k.density == 0) return;
  if (!(plan.top_k.density > 0) || !(plan.top_k.density <= 1))
    throw argument_error("training_plan: top_k.density is not above 0 and at most 1; DGC's is 0.001");
  if (plan.optimizer != optimizer_form::sgd) {
    throw argument_error(
        "training_plan: top_k with an optimizer that has moments of its own, of sums that are mostly zeros; "
        "use sgd, whose momentum each rank then adds before it sends");
  }
  if (plan.zero != zero_stage::none) {
    throw argument_error(
        "training_plan: top_k with shards: each rank keeps momentum and unsent gradients of all weights; use "
        "zero_stage::none");
  }
  if (!plan.wires.is_plain()) {
    throw argument_error(
        "training_plan: top_k with wires, nodes or error feedback: its sums have a form of their own, in one "
        "hop, and what is not sent waits already; leave wires as they are");
  }
  if (plan.sums_in_flight != 0) {
    throw argument_error("training_plan: top_k with sums_in_flight " + std::to_string(plan.sums_in_flight) +
                         ", which sums all gradients of a layer; use 0");
  }
  for (const training_layer& each : shape.layers) {
    if (each.parameters <= std::uint64_t{1} << 32U) continue;
    throw argument_error("training_plan: top_k with a layer of " + std::to_string(each.parameters) +
                         " parameters; its indices reach 2^32");
  }
  if (shape.value_bytes != sizeof(float)) {
    throw argument_error("training_plan: top_k with values of " + std::to_string(shape.value_bytes) +
                         " bytes; it sums floats only");
  }
}

/// Refuses parts of layers that cannot be trained by themselves.
inline void check_parts(const training_plan& plan, const training_shape& shape) {
  for (std::size_t i = 0; i < shape.layers.size(); ++i) {
    const training_layer& each = shape.layers[i];
    if (!each.continues) continue;
    const std::string part = "training_plan: layer " + std::to_string(i) + ", which continues the one before";
    if (i == 0) throw argument_error(part + ", is the first; clear continues");
    if (each.record.bytes != 0) {
      throw argument_error(part + ", has a record of " + std::to_string(each.record.bytes) +
                           " bytes; give it to the layer's first part");
    }
    if (plan.optimizer == optimizer_form::adafactor || plan.optimizer == optimizer_form::muon) {
      throw argument_error(part + ", with " +
                           (plan.optimizer == optimizer_form::muon ? "muon" : "adafactor") +
                           ", which works on whole matrices; use an optimizer of each element");
    }
  }
}

/// Refuses optimizers of whole matrices without what they need.
inline void check_matrices(const training_plan& plan, const training_shape& shape) {
  if (plan.optimizer == optimizer_form::muon) {
    if (shape.value_bytes != sizeof(float)) {
      throw argument_error("training_plan: muon with values of " + std::to_string(shape.value_bytes) +
                           " bytes; its weights are floats");
    }
    if (plan.zero != zero_stage::none) {
      throw argument_error(
          "training_plan: muon with shards, which cut matrices; use zero_stage::none, with which the ranks "
          "share out whole matrices");
    }
    for (const training_layer& each : shape.layers) {
      if (const std::uint64_t elements = elements_of(each.matrices); elements > each.parameters) {
        throw argument_error("training_plan: muon with matrices of " + std::to_string(elements) +
                             " elements in a layer of " + std::to_string(each.parameters) + " parameters");
      }
    }
  }
  if (plan.optimizer == optimizer_form::adafactor) {
    if (shape.value_bytes != sizeof(float)) {
      throw argument_error("training_plan: adafactor with values of " + std::to_string(shape.value_bytes) +
                           " bytes; its weights are floats");
    }
    for (const training_layer& each : shape.layers) {
      if (each.parameters == 0 || (each.factors != 0 && each.tensors != 0)) continue;
      throw argument_error("training_plan: adafactor with a layer of " + std::to_string(each.parameters) +
                           " parameters, and no factors or tensors; add up factor_count of its tensors");
    }
  }
}

}  // namespace detail

inline void check_plan(const training_plan& plan, const training_shape& shape) {
  if (plan.ranks == 0) throw argument_error("training_plan: 0 ranks; 1 means no split");
  if (shape.layers.size() < 2)
    throw argument_error("training_plan: a shape of " + std::to_string(shape.layers.size()) +
                         " layers; give an embedding and at least one more");
  if (plan.gather_ahead != 0 && plan.zero != zero_stage::weights) {
    throw argument_error("training_plan: gather_ahead " + std::to_string(plan.gather_ahead) +
                         " with weights that every rank holds completely; use zero_stage::weights, or 0");
  }
  if (plan.sums_in_flight != 0 && plan.update == optimizer_time::in_backward) {
    throw argument_error("training_plan: sums_in_flight " + std::to_string(plan.sums_in_flight) +
                         " with optimizer_time::in_backward, which needs each sum before the next layer; use "
                         "after_backward, or 0");
  }
  if (shape.value_bytes == 0) throw argument_error("training_plan: values of 0 bytes");
  check_wires(plan.wires, plan.ranks, "training_plan");
  if (!plan.wires.gather.is_plain() && plan.zero != zero_stage::weights) {
    throw argument_error(
        "training_plan: a wire for gathers of weights that every rank holds completely; use "
        "zero_stage::weights, or a plain one");
  }
  if (plan.keeps_secondary) {
    if (plan.zero != zero_stage::weights)
      throw argument_error(
          "training_plan: secondary shards of weights that every rank holds completely; use "
          "zero_stage::weights");
    if (plan.wires.node_ranks < 2)
      throw argument_error("training_plan: secondary shards with nodes of " +
                           std::to_string(plan.wires.node_ranks) +
                           " ranks; give wires.node_ranks, at least 2");
    if (plan.gather_ahead != 0)
      throw argument_error("training_plan: secondary shards with gather_ahead " +
                           std::to_string(plan.gather_ahead) + ", which gathers from all ranks; use 0");
  }
  if (!plan.wires.is_plain() && shape.value_bytes != 4) {
    throw argument_error("training_plan: wires for values of " + std::to_string(shape.value_bytes) +
                         " bytes; they carry floats only");
  }
  detail::check_matrices(plan, shape);
  if (plan.outer.workers == 0) throw argument_error("training_plan: outer steps of 0 workers");
  if (plan.outer.local_steps == 0 && plan.outer.workers != 1) {
    throw argument_error("training_plan: " + std::to_string(plan.outer.workers) +
                         " workers that never join their weights; give outer.local_steps");
  }
  if (plan.outer.local_steps != 0 && shape.value_bytes != sizeof(float)) {
    throw argument_error("training_plan: outer steps of values of " + std::to_string(shape.value_bytes) +
                         " bytes; they change floats only");
  }
  detail::check_top_k(plan, shape);
  detail::check_parts(plan, shape);
  if (plan.granularity == 0) throw argument_error("training_plan: a granularity of 0 bytes; 1 is the least");
  if (plan.tier_page_bytes == 0)
    throw argument_error("training_plan: a tier_page_bytes of 0 bytes; 1 means that a tier has no pages");
}

}  // namespace v0
}  // namespace llmmem
