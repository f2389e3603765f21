/// @file
/// The GPT with all weights in one flat range, which computes the gradients of a shard of the batch.
#pragma once

#include <llmmem/space/host.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "survive_failures/plan.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/gpt.hpp"
#include "train_gpt/host_stores.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"
#include "train_gpt/trainer.hpp"
#include "train_gpt/worker_team.hpp"

namespace survive_failures {

/// Weights in the order of the layers, and gradients in the same layout in the caller's memory. It has no
/// moments, because the optimizer works on parts.
class flat_state {
 public:
  using value_type = float;

  explicit flat_state(const train_gpt::gpt_shape& shape) {
    std::size_t at = 0;
    for (std::size_t i = 0; i < shape.layers(); ++i) {
      const std::size_t count = parameter_layout(shape, shape.layer(i)).elements;
      layers_.push_back({at, count});
      at += count;
    }
    weights_.resize(at);
  }

  [[nodiscard]] std::span<float> weights() noexcept { return weights_; }
  /// @pre the span has the number of weights
  void put_gradients_into(std::span<float> gradients) noexcept { gradients_ = gradients; }

  [[nodiscard]] std::span<float> acquire(train_gpt::layer_id layer, train_gpt::state_kind kind,
                                         train_gpt::lease_mode /*mode*/) noexcept {
    const value_range at = layers_[to_index(layer)];
    if (kind == train_gpt::state_kind::weights) return std::span(weights_).subspan(at.first, at.count);
    if (kind == train_gpt::state_kind::gradients) return gradients_.subspan(at.first, at.count);
    return {};
  }
  void release(train_gpt::layer_id, train_gpt::state_kind, train_gpt::lease_mode) noexcept {}
  [[nodiscard]] train_gpt::element_range owned(train_gpt::layer_id layer) const noexcept {
    return {0, layers_[to_index(layer)].count};
  }

 private:
  std::vector<value_range> layers_;
  std::vector<float> weights_;
  std::span<float> gradients_;
};

/// Computes a step's loss and gradients for one shard.
///
/// @par Thread safety   one thread, in addition to the team's.
class shard_model {
 public:
  /// `text` and `team` outlive it.
  shard_model(const job_plan& plan, const train_gpt::corpus& text, train_gpt::worker_team& team)
      : plan_(plan),
        text_(&text),
        state_(plan.shape),
        activations_(host_, plan.shard_shape()),
        model_(plan.shard_shape(), team, host_),
        trainer_(model_, team, state_, activations_) {}

  [[nodiscard]] std::span<float> weights() noexcept { return state_.weights(); }
  /// The initial weights of the job.
  void draw_weights() { trainer_.draw_weights(plan_.seed); }

  /// The loss of shard `shard` of the batch of `step`, and its gradients.
  double compute(std::uint64_t step, std::uint32_t shard, std::span<float> gradients) {
    state_.put_gradients_into(gradients);
    return trainer_.forward_backward(batch_of(step, shard));
  }

  /// A digest of 64 bits of all weights.
  [[nodiscard]] std::uint64_t digest() { return trainer_.digest(); }

 private:
  [[nodiscard]] train_gpt::token_batch batch_of(std::uint64_t step, std::uint32_t shard) const {
    const train_gpt::token_batch all = text_->batch(plan_.shape, plan_.seed, step);
    const std::size_t tokens = all.tokens.size() / plan_.ranks;
    const auto part = [&](const std::vector<std::uint8_t>& of) {
      const auto first = of.begin() + static_cast<std::ptrdiff_t>(shard * tokens);
      return std::vector<std::uint8_t>(first, first + static_cast<std::ptrdiff_t>(tokens));
    };
    return {part(all.tokens), part(all.targets)};
  }

  job_plan plan_;
  const train_gpt::corpus* text_;
  llmmem::host_space host_{{.budget = std::uint64_t{1} << 40, .name = "model"}};
  flat_state state_;
  train_gpt::host_activations<float, llmmem::host_space> activations_;
  train_gpt::gpt<float, llmmem::host_space> model_;
  train_gpt::trainer<flat_state, train_gpt::host_activations<float, llmmem::host_space>, llmmem::host_space>
      trainer_;
};

}  // namespace survive_failures
