/// @file
/// A small transformer with multi-head latent attention and random weights (DeepSeek-AI, "DeepSeek-V2",
/// 2024).
#pragma once

#include <llmmem/paging/ids.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "paged_decode/decoder.hpp"
#include "paged_decode/model.hpp"

namespace paged_decode {

/// Where the matrices that make a head's keys and values of latents are applied.
enum class latent_matrices : std::uint8_t {
  absorbed,  ///< to queries and to outputs: the cache attends to latents
  expanded,  ///< to the latents of every token: the cache attends to keys and values of each head
};

/// Every row's bits depend only on its own token, position and context, as in `model`.
///
/// A token leaves a record in the cache: `latents` elements, and `rotary_dim` rotated ones that all heads
/// share. Of head h, a key is [U_h latents | rotated], and a value V_h latents. Because q (U c) = (U^T q) c,
/// and the weighted sum of V c is V times that of c, U and V can be applied to queries and outputs instead.
class latent_model {
 public:
  latent_model(const model_config& config, std::size_t positions, std::uint64_t seed)
      : config_(config), turns_(config.rotary_dim, positions), vocabulary_(config, seed) {
    const auto seed_of = [&](std::uint64_t layer, std::uint64_t part) {
      return made_up(seed, (layer + 1) * 1024 + part);
    };
    const std::size_t heads = config.query_heads;
    for (std::uint32_t l = 0; l < config.layers; ++l) {
      weights of{{config.hidden, heads * query_dim(), seed_of(l, 0)},
                 {config.hidden, config.latents, seed_of(l, 1)},
                 {config.hidden, config.rotary_dim, seed_of(l, 2)},
                 {},
                 {},
                 {heads * config.value_dim, config.hidden, seed_of(l, 3)},
                 {{config.hidden, config.inner, seed_of(l, 4)},
                  {config.hidden, config.inner, seed_of(l, 5)},
                  {config.inner, config.hidden, seed_of(l, 6)}}};
      for (std::size_t h = 0; h < heads; ++h) {
        of.keys.emplace_back(config.head_dim, config.latents, seed_of(l, 16 + 2 * h));
        of.values.emplace_back(config.latents, config.value_dim, seed_of(l, 17 + 2 * h));
      }
      layers_.push_back(std::move(of));
    }
  }
  /// Returns the same model with its matrices elsewhere.
  [[nodiscard]] latent_model with(latent_matrices where) const {
    latent_model out = *this;
    out.where_ = where;
    return out;
  }

  [[nodiscard]] const model_config& config() const noexcept { return config_; }
  /// Elements of a head's query before absorption.
  [[nodiscard]] std::size_t query_dim() const noexcept {
    return std::size_t{config_.head_dim} + config_.rotary_dim;
  }

  [[nodiscard]] rows_of_floats embed(std::span<const llmmem::token_id> tokens,
                                     std::span<const std::uint64_t> /*positions*/) const {
    return vocabulary_.embed(tokens);
  }

  /// Keys are records; there are no values.
  [[nodiscard]] projected project(std::uint32_t layer, const rows_of_floats& x,
                                  std::span<const std::uint64_t> positions) const {
    const weights& of = layers_[layer];
    const bool is_absorbed = where_ == latent_matrices::absorbed;
    const std::size_t dim = is_absorbed ? config_.cached_key_dim() : query_dim();
    projected out{{x.rows(), config_.query_heads * dim}, {x.rows(), config_.cached_key_dim()}, {}};
    for (std::size_t row = 0; row < x.rows(); ++row) {
      const auto position = static_cast<std::size_t>(positions[row]);
      const std::vector<float> in = normalized(x[row]);
      std::vector<float> latents(config_.latents);
      of.latents.add_product(latents, in);
      std::ranges::copy(normalized(latents), out.keys[row].begin());
      const std::span<float> rotated = out.keys[row].subspan(config_.latents);
      of.rotated.add_product(rotated, in);
      turns_.turn_heads(rotated, position);
      std::vector<float> queries(config_.query_heads * query_dim());
      of.queries.add_product(queries, in);
      for (std::size_t h = 0; h < config_.query_heads; ++h) {
        const std::span<float> query = std::span(queries).subspan(h * query_dim(), query_dim());
        turns_.turn_heads(query.subspan(config_.head_dim), position);
        const std::span<float> to = out.queries[row].subspan(h * dim, dim);
        if (is_absorbed) {
          of.keys[h].add_product(to.first(config_.latents), query.first(config_.head_dim));
          std::ranges::copy(query.subspan(config_.head_dim), to.subspan(config_.latents).begin());
        } else {
          std::ranges::copy(query, to.begin());
        }
      }
    }
    return out;
  }

  /// Adds a layer's output to `x`. `attended` is of latents if these matrices are absorbed, else of values.
  void finish_layer(std::uint32_t layer, rows_of_floats& x, const rows_of_floats& attended) const {
    const weights& of = layers_[layer];
    for (std::size_t row = 0; row < x.rows(); ++row) {
      std::vector<float> values(std::size_t{config_.query_heads} * config_.value_dim);
      if (where_ == latent_matrices::absorbed) {
        for (std::size_t h = 0; h < config_.query_heads; ++h)
          of.values[h].add_product(std::span(values).subspan(h * config_.value_dim, config_.value_dim),
                                   attended[row].subspan(h * config_.latents, config_.latents));
      } else {
        std::ranges::copy(attended[row], values.begin());
      }
      of.output.add_product(x[row], values);
      of.after.add_to(x[row]);
    }
  }

  [[nodiscard]] rows_of_floats logits(const rows_of_floats& x) const { return vocabulary_.logits(x); }

  /// The key and the value of a head that a record stands for.
  [[nodiscard]] std::vector<float> key_of(std::uint32_t layer, std::size_t head,
                                          std::span<const float> record) const {
    std::vector<float> out(query_dim());
    layers_[layer].keys[head].add_transposed(std::span(out).first(config_.head_dim),
                                             record.first(config_.latents));
    std::ranges::copy(record.subspan(config_.latents), out.begin() + config_.head_dim);
    return out;
  }
  [[nodiscard]] std::vector<float> value_of(std::uint32_t layer, std::size_t head,
                                            std::span<const float> record) const {
    std::vector<float> out(config_.value_dim);
    layers_[layer].values[head].add_product(out, record.first(config_.latents));
    return out;
  }

 private:
  struct weights {
    linear queries;
    linear latents;
    linear rotated;
    std::vector<linear> keys;    // of each head, [head_dim][latents]
    std::vector<linear> values;  // of each head, [latents][value_dim]
    linear output;
    feed_forward after;
  };

  model_config config_;
  latent_matrices where_ = latent_matrices::absorbed;
  rotary turns_;
  vocabulary vocabulary_;
  std::vector<weights> layers_{};
};
static_assert(decoder_model<latent_model>);

}  // namespace paged_decode
