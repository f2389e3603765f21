/// @file
/// A step of Adafactor on a layer, of which a rank may own a part.
#pragma once

#include <llmmem/kernels/adafactor.hpp>
#include <llmmem/kernels/unordered_sum.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"
#include "train_gpt/worker_team.hpp"

namespace train_gpt {

/// The sums of a layer's step: for each tensor those of `adafactor_add` and one of its updates.
[[nodiscard]] inline std::size_t update_sums(const gpt_shape& shape, layer_id layer) {
  return factor_layout(shape, layer).elements + 2 * parameter_layout(shape, layer).tensors.size();
}

/// The bytes that hold the sums of any layer; 0 for other optimizers.
[[nodiscard]] inline std::size_t update_sum_bytes(const gpt_shape& shape) {
  std::size_t most = 0;
  for (std::size_t i = 0; i < shape.layers() && shape.optimizer == llmmem::optimizer_form::adafactor; ++i)
    most = std::max(most, update_sums(shape, shape.layer(i)));
  return most * sizeof(llmmem::unordered_sum);
}

/// One layer's elements that this rank owns, and all of its factors.
struct adafactor_layer {
  const layer_layout* layout = nullptr;
  element_range owned{};
  float* weights = nullptr;          ///< of the owned elements
  const float* gradients = nullptr;  ///< of the owned elements
  std::span<float> factors{};
};

/// Changes weights and factors by one step. The bits depend neither on what a rank owns nor on the team.
/// @param memory  of `update_sum_bytes` at least, aligned as an `unordered_sum`.
/// @param merge   called with sums, adds those of all ranks.
/// @throws what `merge` throws; weights are unchanged then, and factors may be changed.
template <class Merge>
void adafactor_update(const adafactor_layer& of, const llmmem::adafactor_hyper& by,
                      std::span<std::byte> memory, worker_team& team, Merge merge) {
  constexpr std::size_t most_tensors = 12;  // of a block
  struct part {
    llmmem::adafactor_shape shape{};
    llmmem::optimizer_piece weights{};
    llmmem::gradient_piece gradients{};
    std::span<llmmem::unordered_sum> sums{};
    std::span<float> factors{};
    llmmem::adafactor_terms terms{};
  };
  std::array<part, most_tensors> parts{};
  const std::size_t tensors = of.layout->tensors.size();
  std::size_t sums = tensors;
  for (const tensor_place& each : of.layout->tensors)
    sums += llmmem::factor_count(each.rows, each.columns);
  auto* const all = reinterpret_cast<llmmem::unordered_sum*>(memory.data());
  for (std::size_t i = 0; i < sums + tensors; ++i)
    new (all + i) llmmem::unordered_sum();
  llmmem::unordered_sum* const updates = all + sums;
  std::size_t next_sum = 0;
  std::size_t next_factor = 0;
  for (std::size_t i = 0; i < tensors; ++i) {
    const tensor_place& tensor = of.layout->tensors[i];
    part& it = parts[i];
    it.shape = {tensor.rows, tensor.columns};
    it.sums = {all + next_sum, it.shape.sums()};
    it.factors = of.factors.subspan(next_factor, it.shape.factors());
    next_sum += it.sums.size();
    next_factor += it.factors.size();
    const std::size_t first = std::max(tensor.offset, of.owned.first);
    const std::size_t end = std::min(tensor.offset + it.shape.elements(), of.owned.first + of.owned.count);
    if (first >= end) continue;
    const std::size_t at = first - of.owned.first;
    it.weights = {.weights = reinterpret_cast<std::byte*>(of.weights + at),
                  .first = first - tensor.offset,
                  .count = end - first};
    it.gradients = {.data = reinterpret_cast<const std::byte*>(of.gradients + at), .count = end - first};
  }
  const auto each_tensor = [&](auto act) {
    team.slices(tensors, 1, [&](std::size_t first, std::size_t end, std::size_t) {
      for (std::size_t i = first; i < end; ++i)
        act(parts[i], updates[i]);
    });
  };
  each_tensor([&](part& it, llmmem::unordered_sum&) {
    llmmem::adafactor_add(it.shape, it.weights, it.gradients, by, it.sums).value();
  });
  merge(std::span(all, sums));
  for (std::size_t i = 0; i < tensors; ++i)
    parts[i].terms = llmmem::adafactor_factors(parts[i].shape, parts[i].sums, by, parts[i].factors).value();
  each_tensor([&](part& it, llmmem::unordered_sum& update) {
    llmmem::adafactor_add_updates(it.shape, it.weights, it.gradients, by, it.factors, it.terms, update)
        .value();
  });
  merge(std::span(updates, tensors));
  each_tensor([&](part& it, llmmem::unordered_sum& update) {
    llmmem::adafactor_apply(it.shape, it.weights, it.gradients, by, it.factors, it.terms, update).value();
  });
}

}  // namespace train_gpt
