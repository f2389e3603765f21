/// @file
/// The reference for absorbed attention: keys and values of each head, made of every token's latents.
#pragma once

#include <llmmem/paging/ids.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "paged_decode/decoder.hpp"
#include "paged_decode/latent_model.hpp"

namespace paged_decode {

/// Attention by its definition, in doubles, for a `latent_model` whose matrices are expanded. Latents stay
/// floats.
class expanded_cache {
 public:
  using sequence = std::size_t;

  explicit expanded_cache(const latent_model& of) : model_(&of) {}

  [[nodiscard]] sequence create(std::span<const llmmem::token_id> /*prompt*/) {
    sequences_.push_back({std::vector<layer_tokens>(model_->config().layers), 0});
    return sequences_.size() - 1;
  }
  [[nodiscard]] std::uint64_t tokens(sequence of) const { return sequences_[of].tokens; }
  void grow(std::span<const grown<sequence>> batch) {
    rows_.clear();
    for (const auto& each : batch) {
      for (std::size_t i = 0; i < each.tokens.size(); ++i)
        rows_.push_back({each.sequence, sequences_[each.sequence].tokens++});
    }
  }
  [[nodiscard]] rows_of_floats attend(std::uint32_t layer, const projected& in) {
    const model_config& config = model_->config();
    rows_of_floats out(in.queries.rows(), std::size_t{config.query_heads} * config.value_dim);
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      layer_tokens& kept = sequences_[rows_[row].of].layers[layer];
      const std::span<const float> record = in.keys[row];
      kept.resize(rows_[row].position * config.query_heads);  // a truncation leaves tokens behind
      for (std::size_t head = 0; head < config.query_heads; ++head)
        kept.push_back({model_->key_of(layer, head, record), model_->value_of(layer, head, record)});
      for (std::size_t head = 0; head < config.query_heads; ++head)
        attend_head(kept, head, config.window_of(layer),
                    in.queries[row].subspan(head * model_->query_dim(), model_->query_dim()),
                    out[row].subspan(head * config.value_dim, config.value_dim));
    }
    return out;
  }
  void commit(sequence /*of*/) {}
  [[nodiscard]] sequence fork(sequence parent) {
    kept_sequence copy = sequences_[parent];
    sequences_.push_back(std::move(copy));
    return sequences_.size() - 1;
  }
  void truncate(sequence of, std::uint64_t tokens) { sequences_[of].tokens = tokens; }
  void release(sequence of) { sequences_[of] = {}; }

 private:
  struct token_of_head {
    std::vector<float> key{};
    std::vector<float> value{};
  };
  using layer_tokens = std::vector<token_of_head>;  // [token][head]
  struct kept_sequence {
    std::vector<layer_tokens> layers{};
    std::uint64_t tokens = 0;
  };
  struct batch_row {
    sequence of = 0;
    std::uint64_t position = 0;
  };

  void attend_head(const layer_tokens& kept, std::size_t head, std::size_t window,
                   std::span<const float> query, std::span<float> out) const {
    const std::size_t heads = model_->config().query_heads;
    const std::size_t end = kept.size() / heads;
    const std::size_t first = window != 0 && end > window ? end - window : 0;
    const double scale = 1 / std::sqrt(static_cast<double>(query.size()));
    std::vector<double> weights;
    for (std::size_t t = first; t < end; ++t) {
      double product = 0;
      for (std::size_t i = 0; i < query.size(); ++i)
        product += static_cast<double>(query[i]) * static_cast<double>(kept[t * heads + head].key[i]);
      weights.push_back(product * scale);
    }
    const double most = *std::ranges::max_element(weights);
    double total = 0;
    for (double& each : weights) {
      each = std::exp(each - most);
      total += each;
    }
    std::vector<double> sums(out.size());
    for (std::size_t t = first; t < end; ++t) {
      for (std::size_t i = 0; i < out.size(); ++i)
        sums[i] += weights[t - first] / total * static_cast<double>(kept[t * heads + head].value[i]);
    }
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = static_cast<float>(sums[i]);
  }

  const latent_model* model_;
  std::vector<kept_sequence> sequences_{};
  std::vector<batch_row> rows_{};
};
static_assert(kv_cache<expanded_cache>);

}  // namespace paged_decode
