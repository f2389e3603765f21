/// @file
/// A run of training, whatever stores are behind it, and its result as JSON.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/text.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/shape.hpp"

namespace train_gpt {

/// What one tier of memory holds, as its space measures it.
struct tier_usage {
  std::string name;
  std::uint64_t resident_bytes = 0;
  std::uint64_t peak_bytes = 0;
};

/// What went over the link between two tiers.
struct link_traffic {
  std::string name;
  std::uint64_t bytes = 0;
};

/// What memory a run takes, and what it cost to move state about. Stores that move nothing leave the rest
/// zero.
struct memory_report {
  std::vector<tier_usage> tiers;  ///< the fastest first
  std::vector<link_traffic> links;
  double stall_seconds = 0;              ///< compute waited for transfers; of a run's result: in its steps
  double stall_lower_bound_seconds = 0;  ///< no schedule could wait less
  double regret = 0;                     ///< bytes moved beyond the fewest that would do, as a share of these
};

/// How far a run has come.
struct run_progress {
  std::uint64_t step = 0;  ///< 0 to the number of steps
  double loss = 0;
  double tokens_per_second = 0;  ///< since the run began
  const memory_report& memory;
};

/// What one rank of several kept and sent.
struct rank_usage {
  std::uint64_t kept_state_bytes = 0;  ///< weights, gradients and moments, between operations
  std::uint64_t peak_state_bytes = 0;  ///< with gathered layers and what a sum takes, as their space measured
  std::uint64_t peak_bytes = 0;        ///< and activations and workspace
  std::uint64_t bytes_sent = 0;        ///< of messages, in all of the run
};

struct run_result {
  std::vector<double> losses;  ///< of step i's batch, before its update; one more than there are updates
  std::uint64_t digest = 0;    ///< of the weights at the end
  double tokens_per_second = 0;
  memory_report memory;
  std::string unsaved{};            ///< why the last step's checkpoint is not committed, if it was to be
  std::vector<rank_usage> ranks{};  ///< of a run on several, by rank
};

/// Saves nothing: see `run_checkpoints`.
struct no_checkpoints {
  void after_step(std::uint64_t /*done*/, std::span<const double> /*losses*/, double /*step_seconds*/) {}
  [[nodiscard]] std::string finish() { return {}; }
};

/// Trains for `steps` steps, then evaluates the batch that would be next.
///
/// @param trainer  initialised; see `trainer`.
/// @param memory   called without arguments, gives a `memory_report`.
/// @param show     called with a `run_progress` after every loss.
/// @param before   losses of steps that are done already; the trainer's state is that after them.
/// @param checkpoints  told after every step.
template <class Trainer, class Memory, class Show, class Checkpoints>
[[nodiscard]] run_result run_training(Trainer& trainer, const corpus& text, const gpt_shape& shape,
                                      std::uint64_t steps, std::uint64_t seed, Memory memory, Show show,
                                      std::vector<double> before, Checkpoints& checkpoints) {
  using clock = std::chrono::steady_clock;
  run_result result;
  result.losses = std::move(before);
  const std::uint64_t first = result.losses.size();
  std::chrono::duration<double> training{0};
  const double stalled_before = memory().stall_seconds;
  double stalled = 0;
  for (std::uint64_t step = first; step <= steps; ++step) {
    const token_batch batch = text.batch(shape, seed, step);
    if (step < steps) {
      const auto began = clock::now();
      result.losses.push_back(trainer.step(batch, step));
      const std::chrono::duration<double> took = clock::now() - began;
      training += took;
      stalled = memory().stall_seconds - stalled_before;
      result.tokens_per_second = static_cast<double>((step + 1 - first) * shape.tokens()) / training.count();
      checkpoints.after_step(step + 1, result.losses, took.count());
    } else {
      result.losses.push_back(trainer.evaluate(batch));
    }
    result.memory = memory();
    show(run_progress{step, result.losses.back(), result.tokens_per_second, result.memory});
  }
  result.unsaved = checkpoints.finish();
  result.digest = trainer.digest();
  result.memory = memory();
  result.memory.stall_seconds = stalled;
  return result;
}

/// The same, from the beginning, without checkpoints.
template <class Trainer, class Memory, class Show>
[[nodiscard]] run_result run_training(Trainer& trainer, const corpus& text, const gpt_shape& shape,
                                      std::uint64_t steps, std::uint64_t seed, Memory memory, Show show) {
  no_checkpoints none;
  return run_training(trainer, text, shape, steps, seed, memory, show, {}, none);
}

/// One object. Losses are hexadecimal floating point, so that equal bits are equal texts.
[[nodiscard]] inline std::string to_json(const run_result& result) {
  std::string losses;
  for (const double loss : result.losses)
    losses += fmt::format("{}\"{:a}\"", losses.empty() ? "" : ", ", loss);
  std::string moved;
  for (const link_traffic& link : result.memory.links)
    moved += fmt::format("{}{}: {}", moved.empty() ? "" : ", ", example::json_string(link.name), link.bytes);
  const std::uint64_t peak = result.memory.tiers.empty() ? 0 : result.memory.tiers.front().peak_bytes;
  std::string ranks;
  for (const rank_usage& each : result.ranks) {
    ranks += fmt::format(
        R"({}{{"kept_state_bytes": {}, "peak_state_bytes": {}, "peak_bytes": {}, "bytes_sent": {}}})",
        ranks.empty() ? "" : ", ", each.kept_state_bytes, each.peak_state_bytes, each.peak_bytes,
        each.bytes_sent);
  }
  if (!ranks.empty()) ranks = R"(, "ranks": [)" + ranks + "]";
  return fmt::format(
      R"({{"losses": [{}], "digest": "{:016x}", "tokens_per_second": {}, "peak_resident_bytes": {}, )"
      R"("bytes_moved": {{{}}}, "stall_seconds": {}, "stall_lower_bound_seconds": {}, "regret": {}{}}})"
      "\n",
      losses, result.digest, result.tokens_per_second, peak, moved, result.memory.stall_seconds,
      result.memory.stall_lower_bound_seconds, result.memory.regret, ranks);
}

}  // namespace train_gpt
