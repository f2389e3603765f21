/// @file
/// A small transformer with random weights: all of a decode step except attention over the cache.
#pragma once

#include <llmmem/paging/ids.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "train_gpt/exact_math.hpp"

namespace paged_decode {

/// SplitMix64 (Steele, Lea and Flood, 2014) of a seed and a number: the random value of `number`.
[[nodiscard]] constexpr std::uint64_t made_up(std::uint64_t seed, std::uint64_t number) noexcept {
  std::uint64_t x = seed + (number + 1) * 0x9E37'79B9'7F4A'7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBULL;
  return x ^ (x >> 31);
}

/// A number between 0 and 1, both excluded.
[[nodiscard]] constexpr double made_up_share(std::uint64_t seed, std::uint64_t number) noexcept {
  return (static_cast<double>(made_up(seed, number) >> 11) + 0.5) * 0x1p-53;
}

struct model_config {
  std::uint32_t layers = 4;
  std::uint32_t query_heads = 8;
  std::uint32_t kv_heads = 2;
  std::uint32_t head_dim = 64;
  std::uint32_t hidden = 256;
  std::uint32_t inner = 512;
  std::uint32_t vocabulary = 256;
  /// Every second layer attends to this many last tokens; 0: all layers attend to all.
  std::uint32_t window = 64;
  /// Multi-head latent attention: elements that a token's keys and values are made of; 0: it has keys and
  /// values themselves. A head's key then has `head_dim` elements of latents and `rotary_dim` rotated ones,
  /// which all heads share.
  std::uint32_t latents = 0;
  std::uint32_t rotary_dim = 16;
  std::uint32_t value_dim = 32;

  [[nodiscard]] constexpr std::uint32_t window_of(std::uint32_t layer) const noexcept {
    return layer % 2 == 1 ? window : 0;
  }
  [[nodiscard]] constexpr bool has_latents() const noexcept { return latents != 0; }
  /// Elements that a query head multiplies in the cache, and that its output has.
  [[nodiscard]] constexpr std::uint32_t cached_key_dim() const noexcept {
    return has_latents() ? latents + rotary_dim : head_dim;
  }
  [[nodiscard]] constexpr std::uint32_t cached_value_dim() const noexcept {
    return has_latents() ? latents : head_dim;
  }
  [[nodiscard]] constexpr std::size_t query_elements() const noexcept {
    return std::size_t{query_heads} * cached_key_dim();
  }
  [[nodiscard]] constexpr std::size_t attended_elements() const noexcept {
    return std::size_t{query_heads} * cached_value_dim();
  }
  [[nodiscard]] constexpr std::size_t kv_elements() const noexcept {
    return std::size_t{kv_heads} * head_dim;
  }
};

/// Rows of equal numbers of floats, one per token.
class rows_of_floats {
 public:
  rows_of_floats() = default;
  rows_of_floats(std::size_t rows, std::size_t columns) : columns_(columns), floats_(rows * columns) {}

  [[nodiscard]] std::size_t rows() const noexcept { return columns_ == 0 ? 0 : floats_.size() / columns_; }
  [[nodiscard]] std::size_t columns() const noexcept { return columns_; }
  [[nodiscard]] std::span<float> operator[](std::size_t row) noexcept {
    return std::span(floats_).subspan(row * columns_, columns_);
  }
  [[nodiscard]] std::span<const float> operator[](std::size_t row) const noexcept {
    return std::span(floats_).subspan(row * columns_, columns_);
  }
  [[nodiscard]] std::span<const float> all() const noexcept { return floats_; }
  [[nodiscard]] std::span<float> all() noexcept { return floats_; }

 private:
  std::size_t columns_ = 0;
  std::vector<float> floats_{};
};

/// A weight matrix, [inputs][outputs].
class linear {
 public:
  linear(std::size_t inputs, std::size_t outputs, std::uint64_t seed)
      : outputs_(outputs), weights_(inputs * outputs) {
    // Uniform, with a variance of 1 / inputs, which keeps the magnitude from layer to layer.
    const double width = std::sqrt(12.0 / static_cast<double>(inputs));
    for (std::size_t i = 0; i < weights_.size(); ++i)
      weights_[i] = static_cast<float>((made_up_share(seed, i) - 0.5) * width);
  }

  /// out += in W, by inputs in order, so that the bits depend only on the row.
  void add_product(std::span<float> out, std::span<const float> in) const noexcept {
    for (std::size_t i = 0; i < in.size(); ++i) {
      const float* const row = weights_.data() + i * outputs_;
      for (std::size_t o = 0; o < outputs_; ++o)
        out[o] += in[i] * row[o];
    }
  }
  /// out += W in: the product of the transposed matrix.
  void add_transposed(std::span<float> out, std::span<const float> in) const noexcept {
    for (std::size_t i = 0; i < out.size(); ++i) {
      for (std::size_t o = 0; o < outputs_; ++o)
        out[i] += weights_[i * outputs_ + o] * in[o];
    }
  }
  [[nodiscard]] std::size_t outputs() const noexcept { return outputs_; }

 private:
  std::size_t outputs_;
  std::vector<float> weights_;
};

/// By the root of the mean square (Zhang and Sennrich, 2019).
[[nodiscard]] inline std::vector<float> normalized(std::span<const float> x) {
  float squares = 0;
  for (const float each : x)
    squares += each * each;
  const float factor = 1 / std::sqrt(squares / static_cast<float>(x.size()) + 1e-6F);
  std::vector<float> out(x.begin(), x.end());
  for (float& each : out)
    each *= factor;
  return out;
}

/// A layer's part after attention.
struct feed_forward {
  linear gate;
  linear up;
  linear down;

  void add_to(std::span<float> x) const {
    const std::vector<float> in = normalized(x);
    std::vector<float> gated(gate.outputs());
    std::vector<float> inner(up.outputs());
    gate.add_product(gated, in);
    up.add_product(inner, in);
    for (std::size_t i = 0; i < inner.size(); ++i)
      inner[i] *= gated[i] / (1 + train_gpt::exact_exp(-gated[i]));
    down.add_product(x, inner);
  }
};

/// The embedding of tokens, and the head that tells their logits.
class vocabulary {
 public:
  vocabulary(const model_config& config, std::uint64_t seed)
      : embedding_(config.vocabulary, config.hidden),
        head_(config.hidden, config.vocabulary, made_up(seed, 1)) {
    for (std::size_t i = 0; i < embedding_.all().size(); ++i)
      embedding_.all()[i] = static_cast<float>((made_up_share(seed, i) - 0.5) * 3.46);
  }
  [[nodiscard]] rows_of_floats embed(std::span<const llmmem::token_id> tokens) const {
    rows_of_floats out(tokens.size(), embedding_.columns());
    for (std::size_t row = 0; row < tokens.size(); ++row)
      std::ranges::copy(embedding_[static_cast<std::size_t>(tokens[row])], out[row].begin());
    return out;
  }
  /// For each row, the logit of each token.
  [[nodiscard]] rows_of_floats logits(const rows_of_floats& x) const {
    rows_of_floats out(x.rows(), head_.outputs());
    for (std::size_t row = 0; row < x.rows(); ++row)
      head_.add_product(out[row], normalized(x[row]));
    return out;
  }

 private:
  rows_of_floats embedding_;
  linear head_;
};

/// The cosine and sine of each pair of a head's elements at each position (Su et al., "RoFormer", 2021), by
/// additions and multiplications alone.
class rotary {
 public:
  rotary(std::uint32_t head_dim, std::size_t positions) : pairs_(head_dim / 2), turns_(pairs_ * positions) {
    for (std::size_t pair = 0; pair < pairs_; ++pair) {
      constexpr double ln_of_base = 9.210340371976184;  // of 10,000
      const double share = static_cast<double>(pair) / static_cast<double>(pairs_);
      const turn one = turn_of(train_gpt::exact_exp(-ln_of_base * share));
      turn at{1, 0};
      for (std::size_t position = 0; position < positions; ++position) {
        turns_[position * pairs_ + pair] = at;
        at = {at.cosine * one.cosine - at.sine * one.sine, at.cosine * one.sine + at.sine * one.cosine};
      }
    }
  }

  void turn_heads(std::span<float> heads, std::size_t position) const noexcept {
    const std::span<const turn> turns = std::span(turns_).subspan(position * pairs_, pairs_);
    for (std::size_t head = 0; head < heads.size(); head += 2 * pairs_) {
      for (std::size_t pair = 0; pair < pairs_; ++pair) {
        float& x = heads[head + pair];
        float& y = heads[head + pairs_ + pair];
        const auto cosine = static_cast<float>(turns[pair].cosine);
        const auto sine = static_cast<float>(turns[pair].sine);
        const float turned = x * cosine - y * sine;
        y = x * sine + y * cosine;
        x = turned;
      }
    }
  }

 private:
  struct turn {
    double cosine = 1;
    double sine = 0;
  };
  /// By their series, for angles up to 1.
  [[nodiscard]] static turn turn_of(double angle) noexcept {
    turn out{0, 0};
    double term = 1;
    for (int n = 0; n < 24; ++n) {
      double& sum = n % 2 == 0 ? out.cosine : out.sine;
      sum += n % 4 < 2 ? term : -term;
      term *= angle / (n + 1);
    }
    return out;
  }

  std::size_t pairs_;
  std::vector<turn> turns_;
};

/// Queries, keys and values of a batch in one layer.
struct projected {
  rows_of_floats queries{};  ///< [rows][query_heads][head_dim]
  rows_of_floats keys{};     ///< [rows][kv_heads][head_dim]
  rows_of_floats values{};   ///< the same
};

/// Every row's bits depend only on its own token, position and context, and not on the rest of the batch.
///
/// All operations are additions, multiplications, divisions and square roots of floats, each rounded once
/// (compile with -ffp-contract=off), so that hosts agree on every bit.
class model {
 public:
  model(const model_config& config, std::size_t positions, std::uint64_t seed)
      : config_(config), turns_(config.head_dim, positions), vocabulary_(config, seed) {
    const auto seed_of = [&](std::uint64_t layer, std::uint64_t part) {
      return made_up(seed, (layer + 1) * 16 + part);
    };
    layers_.reserve(config.layers);
    for (std::uint32_t l = 0; l < config.layers; ++l) {
      layers_.push_back({{config.hidden, config.query_elements(), seed_of(l, 0)},
                         {config.hidden, config.kv_elements(), seed_of(l, 1)},
                         {config.hidden, config.kv_elements(), seed_of(l, 2)},
                         {config.query_elements(), config.hidden, seed_of(l, 3)},
                         {{config.hidden, config.inner, seed_of(l, 4)},
                          {config.hidden, config.inner, seed_of(l, 5)},
                          {config.inner, config.hidden, seed_of(l, 6)}}});
    }
  }

  [[nodiscard]] const model_config& config() const noexcept { return config_; }

  [[nodiscard]] rows_of_floats embed(std::span<const llmmem::token_id> tokens,
                                     std::span<const std::uint64_t> /*positions*/) const {
    return vocabulary_.embed(tokens);
  }

  [[nodiscard]] projected project(std::uint32_t layer, const rows_of_floats& x,
                                  std::span<const std::uint64_t> positions) const {
    const weights& of = layers_[layer];
    projected out{{x.rows(), config_.query_elements()},
                  {x.rows(), config_.kv_elements()},
                  {x.rows(), config_.kv_elements()}};
    for (std::size_t row = 0; row < x.rows(); ++row) {
      const std::vector<float> in = normalized(x[row]);
      of.queries.add_product(out.queries[row], in);
      of.keys.add_product(out.keys[row], in);
      of.values.add_product(out.values[row], in);
      turns_.turn_heads(out.queries[row], static_cast<std::size_t>(positions[row]));
      turns_.turn_heads(out.keys[row], static_cast<std::size_t>(positions[row]));
    }
    return out;
  }

  /// Adds a layer's output to `x`, given the results of its heads' attention.
  void finish_layer(std::uint32_t layer, rows_of_floats& x, const rows_of_floats& attended) const {
    const weights& of = layers_[layer];
    for (std::size_t row = 0; row < x.rows(); ++row) {
      of.output.add_product(x[row], attended[row]);
      of.after.add_to(x[row]);
    }
  }

  /// For each row, the logit of each token of the vocabulary.
  [[nodiscard]] rows_of_floats logits(const rows_of_floats& x) const { return vocabulary_.logits(x); }

 private:
  struct weights {
    linear queries;
    linear keys;
    linear values;
    linear output;
    feed_forward after;
  };

  model_config config_;
  rotary turns_;
  vocabulary vocabulary_;
  std::vector<weights> layers_{};
};

}  // namespace paged_decode
