/// @file
/// The device memory of programs that train and serve: their allocations, in order.
#pragma once

#include <llmmem/model/activations.hpp>
#include <llmmem/model/model_shape.hpp>
#include <llmmem/model/training_state.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "allocation_trace/trace.hpp"
#include "replay_trace/random.hpp"

namespace allocation_trace {

/// Tokens of one request or training example.
struct lengths {
  std::uint64_t prompt = 1;
  std::uint64_t answer = 1;

  [[nodiscard]] constexpr std::uint64_t total() const noexcept { return prompt + answer; }
};

/// Lengths with the quantiles of a production conversation service (Azure's public trace of 2023), drawn
/// independently.
[[nodiscard]] inline std::vector<lengths> generate_lengths(std::uint64_t seed, std::size_t count) {
  constexpr replay_trace::quantile_table<8> prompts{
      {{{0, 2}, {50, 181}, {250, 396}, {500, 1020}, {750, 1189}, {900, 2735}, {950, 4083}, {1000, 4200}}}};
  constexpr replay_trace::quantile_table<7> answers{
      {{{0, 7}, {50, 41}, {250, 85}, {500, 129}, {750, 395}, {950, 451}, {1000, 700}}}};
  replay_trace::splitmix64 random(seed);
  std::vector<lengths> all;
  while (all.size() < count)
    all.push_back({prompts.sample(random), answers.sample(random)});
  return all;
}

/// The program to play.
struct program_options {
  llmmem::model_shape model;
  std::uint64_t ranks = 16;  ///< ranks that share the training state (ZeRO 3)
  std::uint64_t batch = 4;   ///< sequences of a micro-batch
  std::uint64_t steps = 24;  ///< training steps
  std::uint64_t requests = 400;
  std::uint64_t concurrent = 24;  ///< requests served at once
};

/// How a fine-tuning run saves memory.
struct savings {
  llmmem::recompute recomputed = llmmem::recompute::selective;
  bool variable = true;  ///< batches have the length of their longest sequence, not of the context
  bool offload = false;  ///< gradients and optimizer state are on the host
};

/// The activations of one layer, in the order the forward pass makes them, in bytes: the terms whose sum is
/// `activation_bytes_per_layer` (Korthikanti et al. 2022, section 4.1). The first is the layer's input.
[[nodiscard]] inline std::vector<std::uint64_t> layer_activations(const llmmem::model_shape& model,
                                                                  const llmmem::training_step& step) {
  const std::uint64_t sbh = step.sequence * step.batch * model.hidden;
  const std::uint64_t scores = step.sequence * step.sequence * step.batch * model.heads;
  std::vector<std::uint64_t> pieces{2 * sbh,           // input of the first norm
                                    2 * sbh,           // input of the projections
                                    4 * sbh, 2 * sbh,  // queries and keys, values
                                    2 * sbh,           // input of the output projection
                                    sbh,               // mask of the dropout after it
                                    2 * sbh,           // input of the second norm
                                    2 * sbh,           // input of the MLP
                                    8 * sbh, 8 * sbh,  // before and after its non-linearity
                                    sbh};              // mask of the last dropout
  if (step.recomputed == llmmem::recompute::none) {
    pieces.insert(pieces.begin() + 4, {2 * scores, scores, 2 * scores});  // softmax, mask, masked result
  }
  return pieces;
}

namespace detail {

using ids = std::vector<std::uint32_t>;

inline void free_all(trace& to, ids& which) {
  for (const std::uint32_t id : which)
    to.free(id);
  which.clear();
}

/// A fine-tuning rank under ZeRO 3: it keeps a shard of every matrix, gathers a layer's weights one layer
/// ahead, and scatters its gradients.
class trainer {
 public:
  trainer(trace& to, const program_options& options, const savings& how)
      : to_(&to), options_(&options), how_(how) {
    const auto& m = options.model;
    matrices_ = {m.hidden * m.heads * m.head_width,
                 m.hidden * m.kv_heads * m.head_width,
                 m.hidden * m.kv_heads * m.head_width,
                 m.heads * m.head_width * m.hidden,
                 m.hidden * m.intermediate,
                 m.hidden * m.intermediate,
                 m.intermediate * m.hidden};
    kept_.resize(m.layers);
    weights_.resize(m.layers);
    gradients_.resize(m.layers);
    for (std::uint64_t layer = 0; layer < m.layers; ++layer) {
      for (const std::uint64_t each : matrices_)
        keep(each, 2);
    }
    keep(m.embedding_parameters(), 2);
    keep(m.embedding_parameters(), 2);
    if (how_.offload) return;
    for (std::uint64_t layer = 0; layer < m.layers; ++layer) {
      for (const std::uint64_t each : matrices_) {
        for (int state = 0; state < 3; ++state)  // 32-bit weights, mean, variance
          keep(each, 4);
      }
    }
  }

  void step(std::uint64_t tokens) {
    const auto& m = options_->model;
    shape_ = {.sequence = tokens, .batch = options_->batch, .recomputed = how_.recomputed};
    pieces_ = layer_activations(m, shape_);
    gather(0);
    for (std::uint64_t layer = 0; layer < m.layers; ++layer) {
      if (layer + 1 < m.layers) gather(layer + 1);
      forward(layer);
      free_all(*to_, weights_[layer]);
    }
    const std::uint32_t head = to_->allocate(m.embedding_parameters() * 2);
    const std::uint32_t logits = to_->allocate(tokens * options_->batch * m.vocabulary * 2);
    const std::uint32_t loss = to_->allocate(tokens * options_->batch * m.vocabulary * 4);
    to_->free(logits);
    std::uint32_t gradient = to_->allocate(pieces_[0]);
    to_->free(loss);
    to_->free(head);
    gather(m.layers - 1);
    for (std::uint64_t layer = m.layers; layer-- > 0;) {
      if (layer != 0) gather(layer - 1);
      gradient = backward(layer, gradient);
      free_all(*to_, weights_[layer]);
    }
    to_->free(gradient);
    optimizer();
  }

 private:
  [[nodiscard]] std::uint64_t shard(std::uint64_t elements, std::uint64_t bytes) const {
    return (elements + options_->ranks - 1) / options_->ranks * bytes;
  }
  void keep(std::uint64_t elements, std::uint64_t bytes) { to_->allocate(shard(elements, bytes)); }

  void gather(std::uint64_t layer) {
    for (const std::uint64_t each : matrices_)
      weights_[layer].push_back(to_->allocate(each * 2));
  }

  void forward(std::uint64_t layer) {
    ids made;
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      made.push_back(to_->allocate(pieces_[i]));
      // Without a backward pass, a result is freed as soon as the next but one is made from it.
      if (how_.recomputed == llmmem::recompute::full && i >= 3) to_->free(made[i - 2]);
    }
    if (how_.recomputed != llmmem::recompute::full) {
      kept_[layer] = made;
      return;
    }
    to_->free(made[made.size() - 2]);
    to_->free(made[made.size() - 1]);
    kept_[layer] = {made[0]};
  }

  /// Takes the gradient of the layer's output and returns that of its input.
  [[nodiscard]] std::uint32_t backward(std::uint64_t layer, std::uint32_t gradient) {
    ids& kept = kept_[layer];
    for (std::size_t i = kept.size(); i < pieces_.size(); ++i)
      kept.push_back(to_->allocate(pieces_[i]));
    std::size_t matrix = matrices_.size();
    for (std::size_t i = pieces_.size(); i-- > 0;) {
      const std::uint32_t next = to_->allocate(pieces_[i]);
      to_->free(gradient);
      gradient = next;
      to_->free(kept[i]);
      if (i % 2 == 0 && matrix != 0) scatter(layer, --matrix);
    }
    while (matrix != 0)
      scatter(layer, --matrix);
    kept.clear();
    return gradient;
  }

  /// The gradient of one matrix: complete, then this rank's share of it.
  void scatter(std::uint64_t layer, std::size_t matrix) {
    const std::uint32_t whole = to_->allocate(matrices_[matrix] * 2);
    const std::uint32_t share = to_->allocate(shard(matrices_[matrix], 2));
    to_->free(whole);
    gradients_[layer].push_back(share);
    // Offloaded once the next layer's are in progress, because the copy runs during them.
    if (how_.offload && layer + 1 < gradients_.size()) free_all(*to_, gradients_[layer + 1]);
  }

  void optimizer() {
    for (std::uint64_t layer = 0; layer < gradients_.size(); ++layer) {
      ids work;
      for (const std::uint64_t each : matrices_)
        work.push_back(to_->allocate(shard(each, how_.offload ? 2 : 4)));  // new weights, or 32-bit gradients
      free_all(*to_, work);
      free_all(*to_, gradients_[layer]);
    }
  }

  trace* to_;
  const program_options* options_;
  savings how_;
  std::array<std::uint64_t, 7> matrices_{};  // elements
  llmmem::training_step shape_{};
  std::vector<std::uint64_t> pieces_;
  std::vector<ids> kept_;
  std::vector<ids> weights_;
  std::vector<ids> gradients_;
};

}  // namespace detail

/// Fine-tuning: each step takes the next `batch` examples, as long as the longest of them (in whole 8 tokens,
/// up to the model's context).
[[nodiscard]] inline trace play_training(std::string name, std::span<const lengths> examples,
                                         const program_options& options, const savings& how) {
  trace to(std::move(name));
  detail::trainer trainer(to, options, how);
  std::size_t next = 0;
  for (std::uint64_t step = 0; step < options.steps; ++step) {
    std::uint64_t tokens = 1;
    for (std::uint64_t i = 0; i < options.batch; ++i, next = (next + 1) % examples.size())
      tokens = std::max(tokens, examples[next].total());
    const std::uint64_t most = std::min<std::uint64_t>(options.model.context, 4096);
    tokens = how.variable ? std::min((tokens + 7) / 8 * 8, most) : most;
    trainer.step(tokens);
  }
  return to;
}

/// How a server without paging allocates memory for a request's keys and values.
enum class kv_growth : std::uint8_t {
  exact,    ///< for the tokens of prompt and answer, known in advance
  growing,  ///< for 256 more tokens whenever it is full: a new buffer, a copy, and a free of the old one
};

/// Serving: up to `concurrent` requests at a time, each with one buffer of keys and one of values; the batch
/// makes one token for each a step. A prompt's pass makes the activations of one layer, and frees them.
[[nodiscard]] inline trace play_serving(std::string name, std::span<const lengths> requests,
                                        const program_options& options, kv_growth room) {
  struct running {
    std::uint64_t tokens, end, held;
    std::uint32_t keys, values;
  };
  trace to(std::move(name));
  const auto& m = options.model;
  const std::uint64_t token_bytes = m.kv_bytes_per_token() / 2;
  for (std::uint64_t layer = 0; layer < m.layers; ++layer)
    to.allocate((m.attention_parameters() + m.mlp_parameters(m.intermediate)) * 2);
  to.allocate(m.embedding_parameters() * 2);
  to.allocate(m.embedding_parameters() * 2);

  std::vector<running> batch;
  for (std::size_t next = 0;
       next < std::min<std::size_t>(options.requests, requests.size()) || !batch.empty();) {
    if (batch.size() < options.concurrent &&
        next < std::min<std::size_t>(options.requests, requests.size())) {
      const lengths& asked = requests[next++];
      const std::uint64_t prompt = std::min(asked.prompt, m.context);
      const std::uint64_t end = std::min(asked.total(), m.context);
      const std::uint64_t held = room == kv_growth::exact ? end : (prompt + 255) / 256 * 256;
      const std::uint32_t keys = to.allocate(held * token_bytes);
      const std::uint32_t values = to.allocate(held * token_bytes);
      detail::ids work;
      for (const std::uint64_t piece :
           layer_activations(m, {.sequence = prompt, .recomputed = llmmem::recompute::selective}))
        work.push_back(to.allocate(piece));
      detail::free_all(to, work);
      batch.push_back({prompt, end, held, keys, values});
    }
    for (running& each : batch) {
      if (++each.tokens <= each.held || each.tokens >= each.end) continue;
      each.held += 256;
      for (std::uint32_t* buffer : {&each.keys, &each.values}) {
        const std::uint32_t larger = to.allocate(each.held * token_bytes);
        to.free(*buffer);
        *buffer = larger;
      }
    }
    std::erase_if(batch, [&](const running& each) {
      if (each.tokens < each.end) return false;
      to.free(each.keys);
      to.free(each.values);
      return true;
    });
  }
  return to;
}

/// The programs by the names of the command line.
inline constexpr std::array<std::string_view, 6> program_names{
    "train-fixed", "train", "train-recompute", "train-recompute-offload", "serve-exact", "serve-growing"};

/// @pre `name` is one of `program_names`.
[[nodiscard]] inline trace play(std::string_view name, std::span<const lengths> examples,
                                const program_options& options) {
  const std::string shown = std::string(name) + " " + std::string(options.model.name);
  using llmmem::recompute;
  if (name == "train-fixed") {
    return play_training(shown, examples, options, {.variable = false});
  }
  if (name == "train") return play_training(shown, examples, options, {});
  if (name == "train-recompute") {
    return play_training(shown, examples, options, {.recomputed = recompute::full});
  }
  if (name == "train-recompute-offload") {
    return play_training(shown, examples, options, {.recomputed = recompute::full, .offload = true});
  }
  return play_serving(shown, examples, options,
                      name == "serve-exact" ? kv_growth::exact : kv_growth::growing);
}

}  // namespace allocation_trace
