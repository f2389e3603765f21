/// @file
/// ZeRO: weights, gradients and optimizer state of data parallelism, each whole or in shards; and hpZ.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/training_state.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/flat_uneven.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <cstdint>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// The three kinds of state that training keeps for each parameter.
enum class state_kind : std::uint8_t { weights, gradients, optimizer };

/// Returns whether a rank holds only its shard of `kind` at `stage`.
[[nodiscard]] constexpr bool is_sharded(zero_stage stage, state_kind kind) noexcept {
  switch (kind) {
    case state_kind::weights:
      return stage >= zero_stage::weights;
    case state_kind::gradients:
      return stage >= zero_stage::gradients;
    case state_kind::optimizer:
      break;
  }
  return stage >= zero_stage::optimizer;
}

/// One kind of training state under ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): a rank **owns** its
/// range of the flat space of all tensors, at every stage, and **holds** that range or everything.
///
/// So the shards of a rank are the same elements in all three kinds: it has the gradient and the moments of
/// the weights that it updates, and a reshard from a whole kind to a sharded one moves nothing.
///
/// @par Complexity      `local` and `owned` O(1), `owner` O(log world).
/// @par Thread safety   as a plain value.
class zero_partition {
 public:
  /// @param cut  the ranges; `flat_uneven::even` unless ranks differ.
  zero_partition(flat_uneven cut, zero_stage stage, state_kind kind)
      : cut_(std::move(cut)), sharded_(is_sharded(stage, kind)) {}

  /// Even ranges: they differ by at most one element.
  /// @throws argument_error  when `world` is 0; length_error when the elements together pass 2^63 - 1.
  zero_partition(std::span<const tensor_facts> tensors, rank_count world, zero_stage stage, state_kind kind)
      : zero_partition(flat_uneven::even(tensors, world), stage, kind) {}

  [[nodiscard]] rank_count world() const noexcept { return cut_.world(); }
  [[nodiscard]] std::uint32_t tensors() const noexcept { return cut_.tensors(); }
  [[nodiscard]] tensor_shape shape(tensor_id tensor) const noexcept { return cut_.shape(tensor); }

  [[nodiscard]] element_runs local(tensor_id tensor, rank_id rank) const noexcept {
    return sharded_ ? cut_.local(tensor, rank) : element_runs::all_of(cut_.shape(tensor).elements());
  }
  [[nodiscard]] element_runs owned(tensor_id tensor, rank_id rank) const noexcept {
    return cut_.owned(tensor, rank);
  }
  [[nodiscard]] rank_id owner(tensor_id tensor, std::uint64_t element) const noexcept {
    return cut_.owner(tensor, element);
  }
  [[nodiscard]] bool is_replicated(tensor_id tensor) const noexcept {
    return !sharded_ || cut_.is_replicated(tensor);
  }

  /// Returns the elements of the flat space that `rank` owns.
  [[nodiscard]] index_range range_of(rank_id rank) const noexcept { return cut_.range_of(rank); }
  /// Returns the number of elements of all tensors.
  [[nodiscard]] std::uint64_t elements() const noexcept {
    const index_range last = cut_.range_of(rank_id{to_number(world()) - 1});
    return last.first + last.count;
  }
  /// Returns the number of elements that `rank` holds.
  [[nodiscard]] std::uint64_t local_elements(rank_id rank) const noexcept {
    return sharded_ ? range_of(rank).count : elements();
  }

 private:
  flat_uneven cut_;
  bool sharded_;
};

static_assert(partition<zero_partition>);

/// All three kinds under one stage of ZeRO, over the same cut.
///
/// With `mixed_precision_adam`, P parameters and N ranks, a rank keeps 4P + 12P/N bytes at stage 1, 2P +
/// 14P/N at stage 2 and 16P/N at stage 3 (Table 1 of the paper): exactly if N divides P, and otherwise by
/// that rank's own share. `training_state` of model/ has the same for the largest rank, without a catalogue.
/// Use it if all ranks see different data; if no rank has space for one gathered layer, split the layers
/// themselves (`split_2d`, `grid2d`).
///
/// @par Complexity      construction O(tensors + world), `bytes` O(1).
/// @par Thread safety   as a plain value.
class zero_state {
 public:
  /// Even ranges.
  /// @param each  bytes of an element of each kind; the `element_bytes` of the catalogue are not used.
  /// @throws argument_error  when `world` is 0; length_error when the bytes of any kind pass 2^63 - 1.
  zero_state(std::span<const tensor_facts> tensors, rank_count world, zero_stage stage,
             const bytes_per_parameter& each = mixed_precision_adam)
      : zero_state(flat_uneven::even(tensors, world), stage, each) {}

  /// Any ranges.
  /// @throws length_error  when the bytes of all kinds together pass 2^63 - 1.
  zero_state(const flat_uneven& cut, zero_stage stage, const bytes_per_parameter& each = mixed_precision_adam)
      : weights_(cut, stage, state_kind::weights),
        gradients_(cut, stage, state_kind::gradients),
        optimizer_(cut, stage, state_kind::optimizer),
        stage_(stage),
        each_(each) {
    std::uint64_t sum = 0;
    for (const std::uint64_t width : {each.weights, each.gradients, each.optimizer}) {
      const auto bytes = checked_multiply(weights_.elements(), width, "zero_state: elements x bytes");
      sum = checked_add(sum, bytes, "zero_state: bytes of all kinds");
    }
  }

  [[nodiscard]] zero_stage stage() const noexcept { return stage_; }
  [[nodiscard]] rank_count world() const noexcept { return weights_.world(); }

  /// Returns which rank holds which part of one kind.
  [[nodiscard]] const zero_partition& of(state_kind kind) const noexcept {
    switch (kind) {
      case state_kind::weights:
        return weights_;
      case state_kind::gradients:
        return gradients_;
      case state_kind::optimizer:
        break;
    }
    return optimizer_;
  }

  /// Returns the bytes of one kind that `rank` keeps.
  [[nodiscard]] std::uint64_t bytes(state_kind kind, rank_id rank) const noexcept {
    const std::uint64_t elements = of(kind).local_elements(rank);
    switch (kind) {
      case state_kind::weights:
        return elements * each_.weights;
      case state_kind::gradients:
        return elements * each_.gradients;
      case state_kind::optimizer:
        break;
    }
    return elements * each_.optimizer;
  }
  /// Returns the bytes of all three kinds that `rank` keeps.
  [[nodiscard]] training_bytes bytes(rank_id rank) const noexcept {
    return {.weights = bytes(state_kind::weights, rank),
            .gradients = bytes(state_kind::gradients, rank),
            .optimizer = bytes(state_kind::optimizer, rank)};
  }

 private:
  zero_partition weights_;
  zero_partition gradients_;
  zero_partition optimizer_;
  zero_stage stage_;
  bytes_per_parameter each_;
};

/// `zero_state` with the stage in the type, for code whose policy is a type.
template <zero_stage Stage>
class zero_state_at : public zero_state {
 public:
  /// As the constructor of `zero_state`.
  zero_state_at(std::span<const tensor_facts> tensors, rank_count world,
                const bytes_per_parameter& each = mixed_precision_adam)
      : zero_state(tensors, world, Stage, each) {}
};

/// Stage 1: optimizer state in shards.
using zero1 = zero_state_at<zero_stage::optimizer>;
/// Stage 2: gradients as well.
using zero2 = zero_state_at<zero_stage::gradients>;
/// Stage 3: weights, too.
using zero3 = zero_state_at<zero_stage::weights>;

}  // namespace v0
}  // namespace llmmem
