/// @file
/// The stores of one rank of several: weights, gradients and moments whole or in shards, as ZeRO has them.
#pragma once

#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/training_state.hpp>
#include <llmmem/result.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/zero.hpp>
#include <llmmem/space/concepts.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// The layers as a catalogue: one tensor each, so that a layer is one range of the flat space.
[[nodiscard]] inline std::vector<llmmem::tensor_facts> layer_catalogue(const gpt_shape& shape,
                                                                       std::uint32_t value_bytes) {
  std::vector<llmmem::tensor_facts> all;
  for (std::size_t i = 0; i < shape.layers(); ++i) {
    all.push_back({"layer " + std::to_string(i),
                   llmmem::tensor_shape::vector(parameter_layout(shape, shape.layer(i)).elements),
                   value_bytes});
  }
  return all;
}

/// One rank's part of everything, at a stage of ZeRO; `zero_stage::none` is plain data parallelism. Each rank
/// has batches of its own; after a layer's backward pass its gradients are those of all, summed in the order
/// of ranks and divided by their number.
///
/// | | weights | gradients | moments | a step sends |
/// |---|---|---|---|---|
/// | none | whole | whole, all-reduced | whole | 2P (N-1)/N |
/// | optimizer | whole, gathered after the update | whole, reduced to owners | shard | 2P |
/// | gradients | the same | shard; a layer's whole while it is computed | shard | 2P |
/// | weights | shard; a layer's whole while it is used | the same | shard | 3P |
///
/// @par Thread safety   one thread, and all ranks the same calls.
/// @par Errors          as `state_store` says: what fails behind a release is thrown by the next `acquire` or
///                      at the end of the step.
template <std::floating_point T, llmmem::memory_space Space, llmmem::transport Ranks>
  requires(sizeof(T) == 4)
class sharded_layers {
 public:
  using value_type = T;

  /// Transport and space outlive it.
  /// @throws what the constructors of `sharded_state` throw.
  sharded_layers(Space& space, const gpt_shape& shape, Ranks& ranks, llmmem::zero_stage stage)
      : ranks_(&ranks),
        stage_(stage),
        facts_(layer_catalogue(shape, sizeof(T))),
        weights_(of(llmmem::state_kind::weights), facts_, ranks, space, {.name = "weights"}),
        gradients_(of(llmmem::state_kind::gradients), facts_, ranks, space, {.name = "gradients"}),
        mean_(of(llmmem::state_kind::optimizer), facts_, ranks, space, {.name = "mean"}),
        variance_(of(llmmem::state_kind::optimizer), facts_, ranks, space, {.name = "variance"}) {}

  [[nodiscard]] std::span<T> acquire(layer_id layer, state_kind kind, lease_mode mode) {
    throw_what_failed();
    const llmmem::tensor_id tensor{to_index(layer)};
    if (kind == state_kind::mean) return mine(mean_, tensor);
    if (kind == state_kind::variance) return mine(variance_, tensor);
    if (kind == state_kind::weights) {
      if (mode != lease_mode::read) return mine(weights_, tensor);
      whole_weights_ = weights_.gather({&tensor, 1}).value();
      return as_values(whole_weights_.tensor(0));
    }
    if (mode != lease_mode::write) return mine(gradients_, tensor);
    whole_gradients_ = gradients_.room_for({&tensor, 1}).value();
    return as_values(whole_gradients_.tensor(0));
  }

  void release(layer_id layer, state_kind kind, lease_mode mode) noexcept {
    const llmmem::tensor_id tensor{to_index(layer)};
    if (kind == state_kind::weights) {
      if (mode == lease_mode::read) {
        whole_weights_ = {};
      } else {
        share(tensor, kind);
      }
    } else if (kind == state_kind::gradients && mode == lease_mode::write) {
      share(tensor, kind);
      whole_gradients_ = {};
    }
  }

  [[nodiscard]] element_range owned(layer_id layer) const noexcept {
    const llmmem::tensor_id tensor{to_index(layer)};
    if (stage_ == llmmem::zero_stage::none) return {0, facts_[to_index(tensor)].shape.elements()};
    const llmmem::element_runs runs = weights_.who().owned(tensor, ranks_->rank());
    return {runs.begin, runs.elements()};
  }

  void begin_step(std::uint64_t /*step*/) { throw_what_failed(); }
  void end_step(std::uint64_t /*step*/) { throw_what_failed(); }

  /// Bytes that this rank keeps of all four, without what lives for an operation's length.
  [[nodiscard]] std::uint64_t kept_bytes() const noexcept {
    return weights_.stats().local_bytes + gradients_.stats().local_bytes + mean_.stats().local_bytes +
           variance_.stats().local_bytes;
  }

 private:
  using state = llmmem::sharded_state<llmmem::zero_partition, Ranks, Space>;

  [[nodiscard]] llmmem::zero_partition of(llmmem::state_kind kind) const {
    return {facts_, ranks_->world(), stage_, kind};
  }
  [[nodiscard]] static std::span<T> as_values(std::span<std::byte> bytes) noexcept {
    return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  /// What this rank's optimizer updates: its shard, or with plain data parallelism everything.
  [[nodiscard]] std::span<T> mine(state& from, llmmem::tensor_id tensor) const noexcept {
    return as_values(stage_ == llmmem::zero_stage::none ? from.local(tensor) : from.owned(tensor));
  }

  /// What was written becomes what all ranks make of it.
  void share(llmmem::tensor_id tensor, state_kind kind) noexcept {
    if (!failed_ || thrown_) return;  // it is over for this rank
    // Unfinished, and the others wait for what will not come.
    if (std::uncaught_exceptions() != 0) return ranks_->revoke();
    try {
      const bool is_whole = stage_ == llmmem::zero_stage::none;
      llmmem::result<void> done;
      if (kind == state_kind::gradients) {
        done = is_whole ? gradients_.all_reduce(whole_gradients_, llmmem::sum_f32)
                        : gradients_.reduce_scatter(whole_gradients_, llmmem::sum_f32);
        const auto ranks = static_cast<T>(to_number(ranks_->world()));
        for (T& each : mine(gradients_, tensor))
          each /= ranks;
      } else if (!is_whole) {
        done = weights_.refresh({&tensor, 1});
      }
      if (!done) failed_ = done;
    } catch (...) {
      thrown_ = std::current_exception();
      ranks_->revoke();
    }
  }

  void throw_what_failed() const {
    if (thrown_) std::rethrow_exception(thrown_);
    failed_.value();
  }

  Ranks* ranks_;
  llmmem::zero_stage stage_;
  std::vector<llmmem::tensor_facts> facts_;
  state weights_;
  state gradients_;
  state mean_;
  state variance_;
  typename state::whole whole_weights_{};
  typename state::whole whole_gradients_{};
  llmmem::result<void> failed_{};
  std::exception_ptr thrown_{};
};

}  // namespace train_gpt
