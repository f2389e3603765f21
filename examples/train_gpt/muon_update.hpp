/// @file
/// A step of Muon on a layer: the matrices of blocks by Muon, all other tensors by AdamW.
#pragma once

#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/muon.hpp>
#include <llmmem/kernels/optimizer_step.hpp>
#include <llmmem/sharding/tensor_shape.hpp>
#include <llmmem/sharding/whole_matrices.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"
#include "train_gpt/worker_team.hpp"

namespace train_gpt {

/// The bytes that the updates of any layer's matrices and their Newton-Schulz steps need; 0 for other
/// optimizers.
[[nodiscard]] inline std::size_t muon_memory_bytes(const gpt_shape& shape) {
  if (shape.optimizer != llmmem::optimizer_form::muon) return 0;
  std::size_t updates = 0;
  std::size_t scratch = 0;
  for (const tensor_place& each : muon_matrices(shape, shape.layer(1))) {
    updates += each.rows * each.columns;
    scratch = std::max<std::size_t>(scratch, llmmem::muon_shape{each.rows, each.columns}.scratch());
  }
  return (updates + scratch) * sizeof(float);
}

/// One layer, whole.
struct muon_layer {
  const layer_layout* layout = nullptr;
  std::vector<tensor_place> matrices{};  ///< of the layout
  std::span<const float> gradients{};
  std::span<float> weights{};
  std::span<float> mean{};      ///< of AdamW, and Muon's momentum
  std::span<float> variance{};  ///< of the tensors that AdamW updates, without gaps
};

/// Changes weights and state by one step. Each rank makes the updates of its matrices orthogonal. The bits do
/// not depend on ranks or on the team.
/// @param by      AdamW's settings; Muon's are those of `muon_hyper`, with the same factor of gradients.
/// @param memory  of `muon_memory_bytes` at least.
/// @param gather  called with the updates and where each rank's begin: gathers those of all ranks.
/// @throws what `gather` throws; momentum is changed then, and weights are not.
template <class Gather>
void muon_update(const muon_layer& of, const llmmem::optimizer_hyper& by, std::span<std::byte> memory,
                 worker_team& team, const work_share& share, Gather gather) {
  const llmmem::muon_hyper muon{.gradient_scale = by.gradient_scale};
  std::vector<llmmem::tensor_facts> facts;
  for (const tensor_place& each : of.matrices)
    facts.push_back({each.name, llmmem::tensor_shape::matrix(each.rows, each.columns), sizeof(float)});
  const llmmem::whole_matrices split(facts, llmmem::rank_count{share.world});
  // The updates of each rank's matrices are neighbours, in the order of ranks.
  auto* next = reinterpret_cast<float*>(memory.data());
  std::vector<std::span<float>> updates(facts.size());
  std::vector<std::uint64_t> blocks{0};
  for (std::uint32_t rank = 0; rank < share.world; ++rank) {
    blocks.push_back(blocks.back());
    for (std::uint32_t i = 0; i < facts.size(); ++i) {
      if (split.owner(llmmem::tensor_id{i}) != llmmem::rank_id{rank}) continue;
      updates[i] = {next, static_cast<std::size_t>(facts[i].shape.elements())};
      next += updates[i].size();
      blocks.back() += updates[i].size_bytes();
    }
  }
  const auto each_part = [&](std::size_t count, auto act) {
    team.slices(count, 16, [&](std::size_t first, std::size_t end, std::size_t) { act(first, end - first); });
  };
  const auto in_rows = [&](std::uint64_t rows, const auto& act) noexcept {
    team.slices(rows, 1, [&](std::size_t first, std::size_t end, std::size_t) { act(first, end); });
  };
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const tensor_place& at = of.matrices[i];
    each_part(updates[i].size(), [&](std::size_t first, std::size_t count) {
      llmmem::muon_momentum(of.gradients.subspan(at.offset + first, count),
                            of.mean.subspan(at.offset + first, count), updates[i].subspan(first, count), muon)
          .value();
    });
    if (split.owner(llmmem::tensor_id{static_cast<std::uint32_t>(i)}) != llmmem::rank_id{share.rank})
      continue;
    const llmmem::muon_shape shape{at.rows, at.columns};
    const std::span scratch(reinterpret_cast<float*>(memory.data() + blocks.back()), shape.scratch());
    llmmem::orthogonalize(shape, updates[i], scratch, muon, in_rows).value();
  }
  if (!updates.empty()) gather(memory.first(blocks.back()), std::span<const std::uint64_t>(blocks));
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const tensor_place& at = of.matrices[i];
    each_part(updates[i].size(), [&](std::size_t first, std::size_t count) {
      llmmem::muon_apply({at.rows, at.columns}, of.weights.subspan(at.offset + first, count),
                         updates[i].subspan(first, count), muon)
          .value();
    });
  }
  std::size_t in_variance = 0;
  for (const tensor_place& tensor : of.layout->tensors) {
    const bool is_matrix = std::ranges::any_of(
        of.matrices, [&](const tensor_place& each) { return each.offset == tensor.offset; });
    if (is_matrix) continue;
    each_part(tensor.rows * tensor.columns, [&](std::size_t first, std::size_t count) {
      const auto bytes = [](float* values) { return reinterpret_cast<std::byte*>(values); };
      llmmem::optimizer_step(
          llmmem::host_executor{}, llmmem::optimizer_form::adamw,
          {.weights = bytes(of.weights.data() + tensor.offset + first),
           .mean = bytes(of.mean.data() + tensor.offset + first),
           .variance = bytes(of.variance.data() + in_variance + first),
           .first = first,
           .count = count},
          {.data = reinterpret_cast<const std::byte*>(of.gradients.data() + tensor.offset + first),
           .count = count},
          by)
          .value();
    });
    in_variance += tensor.rows * tensor.columns;
  }
}

}  // namespace train_gpt
