/// @file
/// `trainer`: steps of a `gpt` with Adam, SGD, Adafactor or Muon, with all data in a `state_store` and an
/// `activation_store`.
#pragma once

#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/optimizer_step.hpp>
#include <llmmem/space/concepts.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "train_gpt/adafactor_update.hpp"
#include "train_gpt/adam.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/gpt.hpp"
#include "train_gpt/layer_parts.hpp"
#include "train_gpt/muon_update.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/step_guard.hpp"
#include "train_gpt/stores.hpp"
#include "train_gpt/worker_team.hpp"

namespace train_gpt {

/// Trains. It accesses parameters, gradients, the optimizer's state and activations only under leases;
/// between two calls it holds only its options.
///
/// A step is `forward_backward`, then `update`; or both together, layer by layer (`update_time`), with the
/// same bits. A technique that works between the two, or runs the first for several micro-batches, calls them
/// itself.
///
/// @par Thread safety   one caller.
/// @par Errors          the exceptions of the stores.
template <state_store State, activation_store Activations, llmmem::memory_space Space>
  requires(std::is_same_v<typename State::value_type, typename Activations::value_type>)
class trainer {
 public:
  using value_type = typename State::value_type;

  /// All outlive the trainer. The stores hold layers of `model.shape()`.
  trainer(gpt<value_type, Space>& model, worker_team& team, State& state, Activations& activations,
          const adam_options& adam = {}, update_time when = update_time::after_backward)
      : model_(&model),
        team_(&team),
        state_(&state),
        activations_(&activations),
        adam_(adam),
        when_(when),
        parts_(state_parts(model.shape())) {}

  /// Lets `guard`, which outlives the trainer, decide each step. Updates then come after the backward pass,
  /// because the decision needs all gradients.
  void guard_steps(step_guard& guard) noexcept
    requires(std::is_same_v<value_type, float>)
  {
    guard_ = &guard;
    when_ = update_time::after_backward;
    if constexpr (requires { state_->adds_gradients_to(&guard.norm()); })
      store_adds_ = state_->adds_gradients_to(&guard.norm());
  }

  /// Draws weights, which depend only on the seed and not on what the store owns.
  void draw_weights(std::uint64_t seed) {
    for (std::size_t i = 0; i < parts_.size(); ++i)
      draw_weights(i, seed);
  }

  /// Draws weights, and sets the optimizer's state to zero.
  void initialise(std::uint64_t seed) {
    draw_weights(seed);
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      for (const state_kind kind : optimizer_kinds(shape())) {
        const lease<lease_mode::write> moment(*state_, piece(i), kind);
        std::fill(moment.values().begin(), moment.values().end(), value_type{0});
      }
    }
  }

  /// Returns the loss of a batch, and changes nothing.
  [[nodiscard]] double evaluate(const token_batch& batch) {
    return forward(batch, [](saved_activations<Activations>&) {});
  }

  /// Returns the loss of a batch, and writes its gradients to the store.
  double forward_backward(const token_batch& batch) {
    const double loss = forward(batch, [](saved_activations<Activations>& record) { record.keep(); });
    backward(batch, [](layer_id) {});
    if constexpr (requires { state_->finish_sums(); }) state_->finish_sums();
    return loss;
  }

  /// Changes weights and moments by the gradients in the store.
  /// @param step  of the run, from 0.
  void update(std::uint64_t step) {
    for (std::size_t i = 0; i < parts_.size(); ++i)
      update_layer(piece(i), step, decision_);
  }

  /// One step of training; returns the loss before the update.
  double step(const token_batch& batch, std::uint64_t number) {
    if constexpr (follows_steps<State>) state_->begin_step(number);
    if constexpr (follows_steps<Activations>) activations_->begin_step(number);
    double loss = 0;
    if (when_ == update_time::in_backward) {
      loss = forward(batch, [](saved_activations<Activations>& record) { record.keep(); });
      backward(batch, [&](layer_id layer) { update_layer(layer, number, decision_); });
    } else if (guard_ == nullptr) {
      loss = forward_backward(batch);
      update(number);
    } else {
      model_->scale_loss(static_cast<value_type>(guard_->begin()));
      loss = forward_backward(batch);
      decision_ = guard_->decide();
      update(number - guard_->skipped());  // the steps that the optimizer has taken
    }
    if constexpr (follows_steps<Activations>) activations_->end_step(number);
    if constexpr (follows_steps<State>) state_->end_step(number);
    return loss;
  }

  /// 64 bits of all weights, in the order of the layers: equal for equal bits, and otherwise different except
  /// by chance.
  [[nodiscard]] std::uint64_t digest() {
    std::uint64_t sum = 0;
    std::vector<std::size_t> order(parts_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return std::pair(parts_[a].layer, parts_[a].first) < std::pair(parts_[b].layer, parts_[b].first);
    });
    for (const std::size_t i : order) {
      const lease<lease_mode::read> weights(*state_, piece(i), state_kind::weights);
      using bits = std::conditional_t<sizeof(value_type) == 8, std::uint64_t, std::uint32_t>;
      for (const value_type value : weights.values())
        sum = mixed(sum, std::bit_cast<bits>(value));
    }
    return sum;
  }

 private:
  template <lease_mode Mode>
  using lease = state_lease<State, Mode>;

  [[nodiscard]] const gpt_shape& shape() const noexcept { return model_->shape(); }
  /// The number of a piece of the state.
  [[nodiscard]] layer_id piece(std::size_t i) const noexcept { return shape().layer(i); }

  /// Norms begin as the identity, biases at zero, matrices evenly distributed with a standard deviation of
  /// 0.02, and those that add to the residual stream less by the square root of their number, as in GPT-2.
  /// Embeddings begin at 0.1: the first norm would enlarge 0.02 so much that, without warm-up, Adam's first
  /// steps turn it.
  void draw_weights(std::size_t i, std::uint64_t seed) {
    const lease<lease_mode::write> weights(*state_, piece(i), state_kind::weights);
    const layer_id layer = parts_[i].layer;
    element_range owned = state_->owned(piece(i));
    owned.first += parts_[i].first;  // in its layer
    for (const tensor_place& tensor : model_->parameters(layer).tensors) {
      const bool is_bias = tensor.name.ends_with(".bias");
      const bool is_norm = tensor.name.find("ln_") != tensor.name.npos;
      const bool is_residual = tensor.name.ends_with(".c_proj.weight");
      double deviation = layer == shape().embedding() ? 0.1 : 0.02;
      if (is_residual) deviation /= std::sqrt(2.0 * static_cast<double>(shape().blocks));
      const double step =
          deviation * 1.7320508075688772 * 0x1p-23;  // of a uniform distribution over 2^24 values
      const std::size_t first = std::max(tensor.offset, owned.first);
      const std::size_t end =
          std::min(tensor.offset + tensor.rows * tensor.columns, owned.first + owned.count);
      for (std::size_t k = first; k < end; ++k) {
        double value = is_norm && !is_bias ? 1 : 0;
        if (!is_norm && !is_bias) {
          const std::uint64_t drawn = mixed(mixed(seed, to_index(layer)), k) >> 40;
          value = (static_cast<double>(drawn) - 0x1p23 + 0.5) * step;
        }
        weights.values()[k - owned.first] = static_cast<value_type>(value);
      }
    }
  }

  /// @param filled  called with each filled record.
  template <class Filled>
  double forward(const token_batch& batch, Filled filled) {
    {
      const lease<lease_mode::read> weights(*state_, shape().embedding(), state_kind::weights);
      model_->embed(batch.tokens, weights.values());
    }
    double loss = 0;
    for (std::size_t i = 1; i < parts_.size();) {
      const layer_id layer = parts_[i].layer;
      saved_activations<Activations> record(*activations_, layer);
      for (bool is_first = true; i < parts_.size() && parts_[i].layer == layer; ++i, is_first = false) {
        const lease<lease_mode::read> weights(*state_, piece(i), state_kind::weights);
        if (is_first) model_->save_input(record.values());
        model_->forward_part(parts_[i], weights.values(), record.values());
        if (layer == shape().head() && ends_layer(parts_, i))
          loss = model_->loss(batch.targets, record.values());
      }
      filled(record);
    }
    return loss;
  }

  /// @param step      of the run, from 0.
  /// @param decision  a skipped step makes the same leases, in the same order, and changes nothing.
  void update_layer(layer_id layer, std::uint64_t step, const llmmem::step_decision& decision) {
    if constexpr (std::is_same_v<value_type, float>) {
      if (shape().optimizer == llmmem::optimizer_form::adafactor)
        return update_factored(layer, step, decision);
      if (shape().optimizer == llmmem::optimizer_form::muon) return update_by_muon(layer, step, decision);
    }
    if (shape().corrects_momentum) return update_corrected(layer);
    const lease<lease_mode::read> gradients(*state_, layer, state_kind::gradients);
    const lease<lease_mode::read_write> weights(*state_, layer, state_kind::weights);
    const lease<lease_mode::read_write> mean(*state_, layer, state_kind::mean);
    std::optional<lease<lease_mode::read_write>> variance;
    if (shape().optimizer != llmmem::optimizer_form::sgd)
      variance.emplace(*state_, layer, state_kind::variance);
    const value_type* const g = gradients.values().data();
    value_type* const w = weights.values().data();
    value_type* const m = mean.values().data();
    value_type* const v = variance ? variance->values().data() : nullptr;
    if (!decision.is_taken) return;
    const element_range owned = state_->owned(layer);
    team_->slices(weights.values().size(), 16, [&](std::size_t first, std::size_t end, std::size_t) {
      if constexpr (std::is_same_v<value_type, float>) {
        const auto bytes = [&](float* of) { return reinterpret_cast<std::byte*>(of + first); };
        llmmem::optimizer_step(llmmem::host_executor{},
                               v == nullptr ? llmmem::optimizer_form::sgd : llmmem::optimizer_form::adamw,
                               {.weights = bytes(w),
                                .mean = bytes(m),
                                .variance = v == nullptr ? nullptr : bytes(v),
                                .first = owned.first + first,
                                .count = end - first},
                               {.data = reinterpret_cast<const std::byte*>(g + first), .count = end - first},
                               hyper(step, decision))
            .value();
      } else {
        adam_step<value_type>(adam_, step).apply(w + first, m + first, v + first, g + first, end - first);
      }
    });
  }

  [[nodiscard]] llmmem::optimizer_hyper hyper(std::uint64_t step,
                                              const llmmem::step_decision& decision) const noexcept {
    return {.rate = adam_.rate,
            .mean_decay = adam_.mean_decay,
            .variance_decay = adam_.variance_decay,
            .epsilon = adam_.epsilon,
            .step = step + 1,
            .gradient_scale = decision.gradient_scale};
  }

  /// By gradients that have the momentum already. No step is skipped (`training_options`).
  void update_corrected(layer_id layer) {
    const lease<lease_mode::read> gradients(*state_, layer, state_kind::gradients);
    const lease<lease_mode::read_write> weights(*state_, layer, state_kind::weights);
    const value_type* const g = gradients.values().data();
    value_type* const w = weights.values().data();
    const auto rate = static_cast<value_type>(adam_.rate);
    team_->slices(weights.values().size(), 16, [&](std::size_t first, std::size_t end, std::size_t) {
      for (std::size_t k = first; k < end; ++k)
        w[k] -= rate * g[k];
    });
  }

  void update_by_muon(layer_id layer, std::uint64_t step, const llmmem::step_decision& decision) {
    const lease<lease_mode::read> gradients(*state_, layer, state_kind::gradients);
    const lease<lease_mode::read_write> weights(*state_, layer, state_kind::weights);
    const lease<lease_mode::read_write> mean(*state_, layer, state_kind::mean);
    const lease<lease_mode::read_write> variance(*state_, layer, state_kind::variance);
    if (!decision.is_taken) return;
    work_share share;
    if constexpr (requires { state_->shared_by(); }) share = state_->shared_by();
    muon_update({.layout = &model_->parameters(layer),
                 .matrices = muon_matrices(shape(), layer),
                 .gradients = gradients.values(),
                 .weights = weights.values(),
                 .mean = mean.values(),
                 .variance = variance.values()},
                hyper(step, decision), model_->update_memory(), *team_, share,
                [&](std::span<std::byte> all, std::span<const std::uint64_t> blocks) {
                  if constexpr (requires { state_->gather_blocks(all, blocks); })
                    state_->gather_blocks(all, blocks);
                });
  }

  void update_factored(layer_id layer, std::uint64_t step, const llmmem::step_decision& decision) {
    const lease<lease_mode::read> gradients(*state_, layer, state_kind::gradients);
    const lease<lease_mode::read_write> weights(*state_, layer, state_kind::weights);
    const lease<lease_mode::read_write> factors(*state_, layer, state_kind::factors);
    if (!decision.is_taken) return;
    adafactor_update({.layout = &model_->parameters(layer),
                      .owned = state_->owned(layer),
                      .weights = weights.values().data(),
                      .gradients = gradients.values().data(),
                      .factors = factors.values()},
                     {.rate = adam_.rate, .step = step + 1, .gradient_scale = decision.gradient_scale},
                     model_->update_memory(), *team_, [&](std::span<llmmem::unordered_sum> sums) {
                       if constexpr (requires { state_->merge_sums(sums); }) state_->merge_sums(sums);
                     });
  }

  /// Computes the missing part of a layer's record with its weights, which are leased, or in tiles.
  struct rebuilding {
    trainer* of;
    std::span<const value_type> weights;

    [[nodiscard]] rebuild_activations<value_type> call() noexcept {
      return {[](void* self, layer_id layer, std::span<value_type> record, rebuilt_part part) {
                const auto& me = *static_cast<rebuilding*>(self);
                if (me.of->shape().tiles == 0 || part == rebuilt_part::attention) {
                  me.of->model_->refill(layer, me.weights, record, part);
                } else {
                  me.of->refill_by_parts(layer, record);
                }
              },
              this};
    }
  };
  void refill_by_parts(layer_id layer, std::span<value_type> record) {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      if (parts_[i].layer != layer || is_output(shape(), parts_[i])) continue;
      const lease<lease_mode::read> weights(*state_, piece(i), state_kind::weights);
      model_->forward_part(parts_[i], weights.values(), record);
    }
  }

  /// @param done  called with each layer whose gradients are complete and which this pass no longer needs.
  template <class Done>
  void backward(const token_batch& batch, Done done) {
    std::optional<fetched_activations<Activations>> record;
    for (std::size_t i = parts_.size() - 1; i > 0; --i) {
      const layer_part& part = parts_[i];
      const auto fetch = [&](std::span<const value_type> weights) {
        rebuilding with{this, weights};
        record.emplace(*activations_, part.layer, with.call());
      };
      // The weights of tiles are not leased together with those that rebuild the record.
      if (!part.is_whole() && ends_layer(parts_, i)) fetch({});
      {
        const lease<lease_mode::read> weights(*state_, piece(i), state_kind::weights);
        if (part.is_whole()) fetch(weights.values());
        {
          const lease<lease_mode::write> gradients(*state_, piece(i), state_kind::gradients);
          model_->backward_part(part, batch.targets, weights.values(), record->values(), gradients.values());
          add_to_norm(gradients.values());
        }
        if (begins_layer(parts_, i)) record.reset();
      }
      done(piece(i));
    }
    {
      const lease<lease_mode::write> gradients(*state_, shape().embedding(), state_kind::gradients);
      model_->embed_backward(batch.tokens, gradients.values());
      add_to_norm(gradients.values());
    }
    done(shape().embedding());
  }

  /// Stores that sum over ranks add the sums themselves.
  void add_to_norm(std::span<const value_type> gradients) noexcept {
    if constexpr (std::is_same_v<value_type, float>) {
      if (guard_ != nullptr && !store_adds_) guard_->norm().add(gradients);
    }
  }

  gpt<value_type, Space>* model_;
  worker_team* team_;
  State* state_;
  Activations* activations_;
  adam_options adam_;
  update_time when_;
  std::vector<layer_part> parts_;  // of the state
  step_guard* guard_ = nullptr;
  bool store_adds_ = false;
  llmmem::step_decision decision_{};
};

}  // namespace train_gpt
