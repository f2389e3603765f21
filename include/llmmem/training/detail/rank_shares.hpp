/// @file
/// One rank's share of a plan's layers, and what it sends for them.
#pragma once

#include <llmmem/comm/sparse_sums.hpp>
#include <llmmem/comm/wired_sums.hpp>
#include <llmmem/model/optimizer_form.hpp>
#include <llmmem/sharding/flat_uneven.hpp>
#include <llmmem/sharding/hierarchical_zero.hpp>
#include <llmmem/sharding/sharded_wires.hpp>
#include <llmmem/sharding/tensor_shape.hpp>
#include <llmmem/sharding/whole_matrices.hpp>
#include <llmmem/sharding/zero.hpp>
#include <llmmem/training/merge_sums.hpp>
#include <llmmem/training/top_k_sums.hpp>
#include <llmmem/training/training_types.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The arrays of an optimizer's state. The scales of 8-bit moments are counted with their codes.
enum class optimizer_array : std::uint8_t { mean, variance, low };
inline constexpr std::array optimizer_arrays{optimizer_array::mean, optimizer_array::variance,
                                             optimizer_array::low};

[[nodiscard]] inline std::uint64_t elements_of(std::span<const tensor_shape> shapes) {
  std::uint64_t sum = 0;
  for (const tensor_shape& each : shapes)
    sum = checked_add(sum, each.elements(), "training_plan: elements of matrices");
  return sum;
}

/// One rank's share of each layer.
class rank_shares_of {
 public:
  rank_shares_of(const training_plan& plan, const training_shape& shape, rank_id rank)
      : plan_(&plan), shape_(&shape), rank_(rank), facts_(facts_of(shape)) {
    for (const state_kind kind : {state_kind::weights, state_kind::gradients, state_kind::optimizer})
      splits_.emplace_back(facts_, rank_count{plan.ranks}, plan.zero, kind);
    if (plan.keeps_secondary)
      secondary_.emplace(facts_, rank_count{plan.ranks}, rank_count{plan.wires.node_ranks});
    if (is_factored() || is_muon())
      variances_.emplace(flat_uneven::even(variance_facts(shape), rank_count{plan.ranks}));
  }

  [[nodiscard]] std::size_t layers() const noexcept { return shape_->layers.size(); }
  /// @name Layers in parts
  /// @{
  [[nodiscard]] std::size_t first_part(std::size_t layer) const noexcept {
    while (shape_->layers[layer].continues)
      --layer;
    return layer;
  }
  [[nodiscard]] bool is_last_part(std::size_t layer) const noexcept {
    return layer + 1 == layers() || !shape_->layers[layer + 1].continues;
  }
  [[nodiscard]] bool is_whole(std::size_t layer) const noexcept {
    return !shape_->layers[layer].continues && is_last_part(layer);
  }
  /// Whether the backward pass reads the weights: not the embedding's.
  [[nodiscard]] bool is_read_back(std::size_t layer) const noexcept { return first_part(layer) != 0; }
  /// Whether the weights are gathered once more, to compute a part of the record again.
  [[nodiscard]] bool is_read_by_rebuild(std::size_t layer) const noexcept {
    return !is_whole(layer) && shape_->layers[layer].is_rebuilt_from &&
           !shape_->layers[first_part(layer)].record.is_complete();
  }
  /// @}
  [[nodiscard]] std::uint64_t whole(std::size_t layer) const { return facts_[layer].bytes(); }
  [[nodiscard]] std::uint64_t local(std::size_t layer, state_kind kind) const {
    return shape_->value_bytes * split(kind).local(id(layer), rank_).elements();
  }
  /// The bytes of an array of the optimizer's state that the rank has of a layer, or saves of it.
  [[nodiscard]] std::uint64_t state(std::size_t layer, optimizer_array array) const {
    if (variances_ && array == optimizer_array::variance)
      return variances_->shape(id(layer)).elements() * sizeof(float);
    if (is_factored()) return 0;
    if (has_top_k()) return array == optimizer_array::low ? 0 : whole(layer);
    return state_of(split(state_kind::optimizer).local(id(layer), rank_).elements(), array);
  }
  [[nodiscard]] std::uint64_t owned_state(std::size_t layer, optimizer_array array) const {
    if (variances_ && array == optimizer_array::variance)
      return variances_->owned(id(layer), rank_).elements() * sizeof(float);
    if (is_factored()) return 0;
    if (has_top_k()) return state(layer, array);  // of each rank
    return state_of(splits_.front().owned(id(layer), rank_).elements(), array);
  }
  [[nodiscard]] std::uint64_t owned(std::size_t layer) const { return owned_by(layer, rank_); }
  [[nodiscard]] std::uint64_t owned_by(std::size_t layer, rank_id rank) const {
    return shape_->value_bytes * splits_.front().owned(id(layer), rank).elements();
  }
  /// Whether a complete layer of that kind is gathered into its own buffer while it is used.
  [[nodiscard]] bool is_gathered(std::size_t layer, state_kind kind) const {
    return local(layer, kind) != whole(layer) || (kind == state_kind::weights && has_wired_gathers());
  }
  [[nodiscard]] bool has_wired_gathers() const noexcept {
    return plan_->ranks > 1 && plan_->zero == zero_stage::weights && !plan_->wires.has_plain_gathers();
  }
  [[nodiscard]] bool has_top_k() const noexcept { return plan_->top_k.density != 0; }
  /// Returns how many elements of a layer each rank sends.
  [[nodiscard]] std::uint64_t top_k_of(std::size_t layer) const {
    return top_k_count(facts_[layer].shape.elements(), plan_->top_k.density);
  }
  [[nodiscard]] bool has_wired_sums() const noexcept {
    return plan_->ranks > 1 && !plan_->wires.has_plain_sums();
  }
  /// Returns the first element of each rank's part of a layer, and the end of the last one.
  [[nodiscard]] std::vector<std::uint64_t> blocks(std::size_t layer) const {
    std::vector<std::uint64_t> made{0};
    for (std::uint32_t rank = 0; rank < plan_->ranks; ++rank)
      made.push_back(made.back() + splits_.front().owned(id(layer), rank_id{rank}).elements());
    return made;
  }
  /// Returns the bytes of messages that a gather of a layer's weights takes: with plain messages none.
  [[nodiscard]] std::uint64_t gather_bytes(std::size_t layer) const {
    return has_wired_gathers() ? gather_scratch_bytes(blocks(layer), plan_->wires.gather) : 0;
  }
  /// Returns what the rank sends to gather a layer's weights.
  [[nodiscard]] std::uint64_t sent_by_gather(std::size_t layer) const {
    if (!has_wired_gathers()) return owned(layer) * (plan_->ranks - 1);
    return gather_traffic(blocks(layer), plan_->wires.gather, plan_->wires, rank_).total();
  }
  /// Returns the bytes of a layer that the rank keeps for its node; 0 without a secondary copy.
  [[nodiscard]] std::uint64_t secondary(std::size_t layer) const {
    return secondary_ ? shape_->value_bytes * secondary_->local(id(layer), rank_).elements() : 0;
  }
  /// Returns what the rank sends to gather a layer's weights again for the backward pass.
  [[nodiscard]] std::uint64_t sent_by_gather_back(std::size_t layer) const {
    return secondary_ ? secondary(layer) * (plan_->wires.node_ranks - 1) : sent_by_gather(layer);
  }
  /// Whether the weights of the backward pass are a piece that the rank has.
  [[nodiscard]] bool has_weights_back(std::size_t layer) const {
    return secondary_ && secondary(layer) == whole(layer);
  }
  /// Returns what the rank sends to sum a layer's gradients: to their owners, or also back to all.
  [[nodiscard]] std::uint64_t sent_by_sum(std::size_t layer) const {
    const bool is_shared = plan_->zero == zero_stage::none;
    if (has_top_k()) return sparse_sent_bytes(top_k_of(layer), rank_count{plan_->ranks}, plan_->top_k.form);
    if (!has_wired_sums())
      return whole(layer) - owned(layer) + (is_shared ? owned(layer) * (plan_->ranks - 1) : 0);
    const std::vector<std::uint64_t> parts = blocks(layer);
    const sharded_wires& wires = plan_->wires;
    std::uint64_t sent = wired_sum_of(parts).traffic(wires.node_ranks, rank_).total();
    if (is_shared) sent += gather_traffic(parts, wires.of_sums(), wires, rank_).total();
    return sent;
  }
  /// Returns what the rank sends for a layer's update: sums, or the updates of its matrices.
  [[nodiscard]] std::uint64_t sent_by_update(std::size_t layer) const {
    if (is_muon()) return sent_by_matrices(shape_->layers[layer].matrices);
    if (!is_factored() || plan_->ranks == 1 || plan_->zero == zero_stage::none) return 0;
    const training_layer& it = shape_->layers[layer];
    const rank_count world{plan_->ranks};
    return merge_bytes(it.factors + it.tensors, world, rank_) + merge_bytes(it.tensors, world, rank_);
  }
  /// Returns the elements of a layer that the rank's optimizer updates, and its outer steps too.
  [[nodiscard]] std::uint64_t updated(std::size_t layer) const {
    return plan_->zero == zero_stage::none ? facts_[layer].shape.elements()
                                           : splits_.front().owned(id(layer), rank_).elements();
  }
  /// Returns the bytes of messages that an outer step of a layer takes, and what it sends.
  [[nodiscard]] std::uint64_t outer_sum_bytes(std::size_t layer) const {
    const outer_plan& outer = plan_->outer;
    return all_reduce_scratch_bytes(updated(layer), rank_count{outer.workers}, outer.wire,
                                    plan_->segment_bytes);
  }
  [[nodiscard]] std::uint64_t sent_by_round(std::size_t layer, std::uint32_t worker) const {
    const outer_plan& outer = plan_->outer;
    const std::uint64_t summed =
        all_reduce_sent_bytes(updated(layer), rank_count{outer.workers}, outer.wire, rank_id{worker});
    const bool is_refreshed =
        plan_->zero != zero_stage::none && !is_sharded(plan_->zero, state_kind::weights);
    return summed + (is_refreshed ? owned(layer) * (plan_->ranks - 1) : 0);
  }
  /// Returns the bytes of messages that a sum of a layer's gradients takes: one message per rank, or the
  /// lists of all ranks.
  [[nodiscard]] std::uint64_t sum_bytes(std::size_t layer) const {
    if (has_top_k())
      return sparse_scratch_bytes(top_k_of(layer), rank_count{plan_->ranks}, plan_->top_k.form);
    if (plan_->ranks == 1) return 0;
    if (has_wired_sums()) {
      const std::vector<std::uint64_t> parts = blocks(layer);
      const std::uint64_t summed = wired_sum_of(parts).scratch_bytes();
      if (plan_->zero != zero_stage::none) return summed;
      return std::max(summed, gather_scratch_bytes(parts, plan_->wires.of_sums()));
    }
    const std::uint64_t width = shape_->value_bytes;
    const std::uint64_t segment = std::max<std::uint64_t>(plan_->segment_bytes / width, 1) * width;
    return plan_->ranks * std::min(owned(layer), segment);
  }

 private:
  [[nodiscard]] wired_sum<wire_form> wired_sum_of(std::span<const std::uint64_t> parts) const noexcept {
    return {parts, plan_->wires.sum, plan_->wires.node_ranks, plan_->segment_bytes};
  }
  [[nodiscard]] std::uint64_t state_of(std::uint64_t elements, optimizer_array array) const {
    const optimizer_widths each = widths_of(plan_->optimizer);
    if (array == optimizer_array::low) return elements * each.low;
    const std::uint32_t width = array == optimizer_array::mean ? each.mean : each.variance;
    const bool is_wide =
        plan_->optimizer == optimizer_form::adamw || plan_->optimizer == optimizer_form::sgd || is_muon();
    if (is_wide) return width == 0 ? 0 : elements * shape_->value_bytes;
    return elements * width + (elements + optimizer_group - 1) / optimizer_group * each.group_scale;
  }
  [[nodiscard]] static std::vector<tensor_facts> facts_of(const training_shape& shape) {
    std::vector<tensor_facts> facts;
    facts.reserve(shape.layers.size());
    for (const training_layer& each : shape.layers) {
      facts.push_back({"layer " + std::to_string(facts.size()), tensor_shape::vector(each.parameters),
                       shape.value_bytes});
    }
    return facts;
  }
  [[nodiscard]] bool is_factored() const noexcept { return plan_->optimizer == optimizer_form::adafactor; }
  [[nodiscard]] bool is_muon() const noexcept { return plan_->optimizer == optimizer_form::muon; }
  /// The variances, or factors, that every rank keeps.
  [[nodiscard]] std::vector<tensor_facts> variance_facts(const training_shape& shape) const {
    std::vector<tensor_facts> facts;
    for (const training_layer& each : shape.layers) {
      const std::uint64_t count = is_factored() ? each.factors : each.parameters - elements_of(each.matrices);
      facts.push_back({"variances of a layer", tensor_shape::vector(count), sizeof(float)});
    }
    return facts;
  }
  [[nodiscard]] std::uint64_t sent_by_matrices(std::span<const tensor_shape> matrices) const {
    std::vector<tensor_facts> facts;
    for (const tensor_shape& each : matrices)
      facts.push_back({"matrix", each, sizeof(float)});
    const whole_matrices split(facts, rank_count{plan_->ranks});
    std::uint64_t elements = 0;
    for (std::uint32_t i = 0; i < facts.size(); ++i)
      elements += split.local(tensor_id{i}, rank_).elements();
    return elements * sizeof(float) * (plan_->ranks - 1);
  }
  [[nodiscard]] static tensor_id id(std::size_t layer) noexcept {
    return tensor_id{static_cast<std::uint32_t>(layer)};
  }
  [[nodiscard]] const zero_partition& split(state_kind kind) const noexcept {
    return splits_[static_cast<std::size_t>(kind)];
  }

  const training_plan* plan_;
  const training_shape* shape_;
  rank_id rank_;
  std::vector<tensor_facts> facts_;
  std::vector<zero_partition> splits_{};
  std::optional<hierarchical_zero> secondary_{};
  std::optional<flat_uneven> variances_{};  // with another number of elements than the weights
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
