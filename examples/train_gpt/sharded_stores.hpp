/// @file
/// The stores of one rank of several: weights, gradients and moments whole or in shards, as ZeRO has them.
#pragma once

#include <llmmem/comm/operation_queue.hpp>
#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/training_state.hpp>
#include <llmmem/result.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/gather_schedule.hpp>
#include <llmmem/sharding/zero.hpp>
#include <llmmem/space/concepts.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
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

/// The layers whose weights a step reads, in order.
[[nodiscard]] inline std::vector<std::uint32_t> weight_reads(const gpt_shape& shape) {
  std::vector<std::uint32_t> layers;
  for (const step_event& each : step_schedule(shape, update_time::after_backward)) {
    if (each.what == step_event::call::acquire && each.kind == state_kind::weights &&
        each.mode == lease_mode::read)
      layers.push_back(to_index(each.layer));
  }
  return layers;
}

/// Gathers of a step's weights, each layer's `ahead` reads before its own. They have room for as many layers
/// in a row, and one: what is whole anyway and used again soon stays, as the last layers of the forward pass.
[[nodiscard]] inline llmmem::schedule_plan plan_weight_gathers(std::span<const llmmem::tensor_facts> layers,
                                                               std::span<const std::uint32_t> reads,
                                                               std::uint32_t ahead) {
  std::vector<std::uint64_t> bytes;
  for (const llmmem::tensor_facts& each : layers)
    bytes.push_back(each.bytes());
  std::vector<llmmem::gather_use> uses;
  std::uint64_t budget = 0;
  for (std::size_t i = 0; i < reads.size(); ++i) {
    uses.push_back({.scope = reads[i], .compute_ns = bytes[reads[i]]});
    std::uint64_t together = 0;
    for (std::size_t k = i; k < reads.size() && k <= i + ahead; ++k)
      together += bytes[reads[k]];
    budget = std::max(budget, together);
  }
  // By count and not by time: any link will do, the same for all ranks.
  return llmmem::plan_gathers(bytes, uses, budget, {.bytes_per_second = 1'000'000'000},
                              llmmem::schedule::lookahead{.accesses = ahead});
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
/// With `gather_ahead`, weights are gathered before they are asked for, by a thread of its own, while the
/// caller computes with other layers'. All messages of a step are then that thread's; between steps nothing
/// is under way, and the transport is free for others. Weights that are read beside what `step_schedule`
/// lists are gathered when they are.
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
  /// @param gather_ahead  how many reads before its own a layer's weights are gathered; where all have them
  ///                      whole, none are. All ranks the same.
  /// @throws what the constructors of `sharded_state` throw; `std::system_error` where there is no thread.
  sharded_layers(Space& space, const gpt_shape& shape, Ranks& ranks, llmmem::zero_stage stage,
                 std::uint32_t gather_ahead = 0)
      : ranks_(&ranks),
        stage_(stage),
        facts_(layer_catalogue(shape, sizeof(T))),
        weights_(of(llmmem::state_kind::weights), facts_, ranks, space, {.name = "weights"}),
        gradients_(of(llmmem::state_kind::gradients), facts_, ranks, space, {.name = "gradients"}),
        mean_(of(llmmem::state_kind::optimizer), facts_, ranks, space, {.name = "mean"}),
        variance_(of(llmmem::state_kind::optimizer), facts_, ranks, space, {.name = "variance"}) {
    if (stage != llmmem::zero_stage::weights || gather_ahead == 0) return;
    reads_ = weight_reads(shape);
    next_read_ = reads_.size();  // until a step begins
    std::vector<std::vector<llmmem::tensor_id>> layers;
    for (std::uint32_t i = 0; i < facts_.size(); ++i)
      layers.push_back({llmmem::tensor_id{i}});
    queue_.emplace();
    schedule_.emplace(weights_, *queue_, std::move(layers), reads_,
                      plan_weight_gathers(facts_, reads_, gather_ahead));
  }

  [[nodiscard]] std::span<T> acquire(layer_id layer, state_kind kind, lease_mode mode) {
    throw_what_failed();
    const llmmem::tensor_id tensor{to_index(layer)};
    if (kind == state_kind::mean) return mine(mean_, tensor);
    if (kind == state_kind::variance) return mine(variance_, tensor);
    if (kind == state_kind::weights) {
      if (mode != lease_mode::read) return mine(weights_, tensor);
      return as_values(whole_weights_of(tensor));
    }
    if (mode != lease_mode::write) return mine(gradients_, tensor);
    whole_gradients_ = gradients_.allocate_whole({&tensor, 1}).value();
    return as_values(whole_gradients_.tensor(0));
  }

  void release(layer_id layer, state_kind kind, lease_mode mode) noexcept {
    const llmmem::tensor_id tensor{to_index(layer)};
    if (kind == state_kind::weights) {
      if (mode == lease_mode::read) {
        // The plan goes on with the lease's end, and this rank will not: what it gathers then would meet what
        // the others sum.
        if (schedule_ && std::uncaught_exceptions() != 0) revoke();
        planned_weights_.end();
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

  void begin_step(std::uint64_t /*step*/) {
    throw_what_failed();
    if (!schedule_) return;
    schedule_->begin_iteration();
    next_read_ = 0;
  }
  void end_step(std::uint64_t /*step*/) {
    throw_what_failed();
    if (!schedule_) return;
    next_read_ = reads_.size();
    schedule_->end_iteration().value();
  }

  /// What was gathered ahead: nothing without `gather_ahead`.
  [[nodiscard]] llmmem::gather_schedule_stats gather_stats() const noexcept {
    return schedule_ ? schedule_->stats() : llmmem::gather_schedule_stats{};
  }

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

  /// Has it done by the thread that talks, if there is one.
  template <class Work>
  llmmem::result<void> talk(Work&& work) {
    return queue_ ? queue_->run(work) : work();
  }
  void revoke() {
    static_cast<void>(talk([&]() -> llmmem::result<void> {
      ranks_->revoke();
      return {};
    }));
  }

  [[nodiscard]] std::span<std::byte> whole_weights_of(llmmem::tensor_id tensor) {
    if (next_read_ < reads_.size() && reads_[next_read_] == to_index(tensor)) {
      ++next_read_;
      planned_weights_ = schedule_->next().value();
      return planned_weights_.whole().tensor(0);
    }
    talk([&]() -> llmmem::result<void> {
      auto gathered = weights_.gather({&tensor, 1});
      if (!gathered) return gathered.error();
      whole_weights_ = std::move(*gathered);
      return {};
    }).value();
    return whole_weights_.tensor(0);
  }

  /// What was written becomes what all ranks make of it.
  void share(llmmem::tensor_id tensor, state_kind kind) noexcept {
    if (!failed_ || thrown_) return;  // it is over for this rank
    // Unfinished, and the others wait for what will not come.
    if (std::uncaught_exceptions() != 0) return revoke();
    try {
      const bool is_whole = stage_ == llmmem::zero_stage::none;
      llmmem::result<void> done;
      if (kind == state_kind::gradients) {
        done = talk([&] {
          return is_whole ? gradients_.all_reduce(whole_gradients_, llmmem::sum_f32)
                          : gradients_.reduce_scatter(whole_gradients_, llmmem::sum_f32);
        });
        const auto ranks = static_cast<T>(to_number(ranks_->world()));
        for (T& each : mine(gradients_, tensor))
          each /= ranks;
      } else if (!is_whole) {
        done = talk([&] { return weights_.refresh({&tensor, 1}); });
      }
      if (!done) failed_ = done;
    } catch (...) {
      thrown_ = std::current_exception();
      revoke();
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

  // Of gathers ahead. They end before the state that they gather.
  std::vector<std::uint32_t> reads_{};  // the layers of a step's plan
  std::size_t next_read_ = 0;           // behind all between steps
  std::optional<llmmem::operation_queue> queue_{};
  std::optional<llmmem::gather_schedule<state>> schedule_{};
  typename llmmem::gather_schedule<state>::lease planned_weights_{};
};

}  // namespace train_gpt
