/// @file
/// A step of a batch through the model, over any cache of keys and values.
#pragma once

#include <llmmem/paging/ids.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "paged_decode/model.hpp"

namespace paged_decode {

/// The form in which a cache keeps keys and values.
enum class kv_form : std::uint8_t {
  f32,
  bf16,
  fp8,
  int8,
  int4_by_token,
  int8_by_channel,
  int4_by_channel,
  k8v4,
  nvfp4,
  int4_rotated,
  int4_by_token_zero
};

/// The growth of a sequence in a step: a chunk of its prompt, a token, or a token and drafts after it.
template <class Sequence>
struct grown {
  Sequence sequence{};
  std::span<const llmmem::token_id> tokens{};
};

/// Keeps keys and values of sequences. `grow` makes space for a batch. `attend` then stores each layer's keys
/// and values, and attends up to each row's own token. `commit` keeps all of it.
template <class C>
concept kv_cache = requires(C& cache, typename C::sequence sequence, std::span<const llmmem::token_id> prompt,
                            std::span<const grown<typename C::sequence>> batch, std::uint32_t layer,
                            const projected& rows, std::uint64_t tokens) {
  { cache.create(prompt) } -> std::same_as<typename C::sequence>;
  { cache.tokens(sequence) } -> std::same_as<std::uint64_t>;
  cache.grow(batch);
  { cache.attend(layer, rows) } -> std::same_as<rows_of_floats>;
  cache.commit(sequence);
  { cache.fork(sequence) } -> std::same_as<typename C::sequence>;
  cache.truncate(sequence, tokens);
  cache.release(sequence);
};

/// All of a decode step except attention: `model`, with random weights, and `trained_model`.
template <class M>
concept decoder_model =
    requires(const M& of, std::span<const llmmem::token_id> tokens, std::span<const std::uint64_t> positions,
             std::uint32_t layer, rows_of_floats& x, const rows_of_floats& attended) {
      { of.config() } -> std::same_as<const model_config&>;
      { of.embed(tokens, positions) } -> std::same_as<rows_of_floats>;
      { of.project(layer, x, positions) } -> std::same_as<projected>;
      of.finish_layer(layer, x, attended);
      { of.logits(x) } -> std::same_as<rows_of_floats>;
    };
static_assert(decoder_model<model>);

/// Runs a batch. @return the logits after each token, in the batch's order.
template <decoder_model Model, kv_cache Cache>
[[nodiscard]] rows_of_floats decode(const Model& of, Cache& cache,
                                    std::span<const grown<typename Cache::sequence>> batch) {
  std::vector<llmmem::token_id> tokens;
  std::vector<std::uint64_t> positions;
  for (const auto& each : batch) {
    const std::uint64_t first = cache.tokens(each.sequence);
    for (std::size_t i = 0; i < each.tokens.size(); ++i) {
      tokens.push_back(each.tokens[i]);
      positions.push_back(first + i);
    }
  }
  cache.grow(batch);
  rows_of_floats x = of.embed(tokens, positions);
  for (std::uint32_t layer = 0; layer < of.config().layers; ++layer)
    of.finish_layer(layer, x, cache.attend(layer, of.project(layer, x, positions)));
  return of.logits(x);
}

}  // namespace paged_decode
