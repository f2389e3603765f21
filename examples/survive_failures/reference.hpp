/// @file
/// The run without failures, as the reference for the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "survive_failures/part_state.hpp"
#include "survive_failures/plan.hpp"
#include "survive_failures/shard_model.hpp"
#include "train_gpt/adam.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/worker_team.hpp"

namespace survive_failures {

/// Computes the whole job in this process, without ranks, messages or copies, and returns the digest of the
/// final weights.
[[nodiscard]] inline std::uint64_t reference_digest(const job_plan& plan, const train_gpt::corpus& text,
                                                    std::size_t threads) {
  train_gpt::worker_team team(threads);
  shard_model model(plan, text, team);
  model.draw_weights();
  part_state all(plan.elements());
  all.begin(model.weights());
  std::vector<float> gradients(plan.elements());
  for (std::uint64_t step = 0; step < plan.steps; ++step) {
    all.clear_gradient();
    for (std::uint32_t shard = 0; shard < plan.ranks; ++shard) {
      model.compute(step, shard, gradients);
      all.add_gradient(gradients.data());
    }
    all.update(train_gpt::adam_step<float>({}, step), plan.ranks);
    std::ranges::copy(all.weights(), model.weights().begin());
  }
  return model.digest();
}

}  // namespace survive_failures
