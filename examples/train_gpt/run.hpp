/// @file
/// A run of training with any stores, and its result as JSON.
#pragma once

#include <fmt/format.h>

#include <array>
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

/// The usage of one tier, as its space measures it.
struct tier_usage {
  std::string name;
  std::uint64_t resident_bytes = 0;
  std::uint64_t peak_bytes = 0;
};

/// The traffic of the link between two tiers.
struct link_traffic {
  std::string name;
  std::uint64_t bytes = 0;
};

/// The memory of a run, and the cost of moving state. Stores that move nothing leave the latter 0.
struct memory_report {
  std::vector<tier_usage> tiers;  ///< the fastest first
  std::vector<link_traffic> links;
  double stall_seconds = 0;  ///< computation waited for transfers; in a run's result: during its steps
  std::array<double, llmmem::stall_causes> stalls{};  ///< the same by cause
  double first_step_stall_seconds = 0;                ///< of a run's result: of the step before all plans
  double stall_lower_bound_seconds = 0;               ///< the minimum of every schedule
  double regret = 0;                                  ///< bytes moved beyond the minimum, as a share of it
};

/// The progress of a run.
struct run_progress {
  std::uint64_t step = 0;  ///< 0 to the number of steps
  double loss = 0;
  double tokens_per_second = 0;  ///< since the beginning of the run
  const memory_report& memory;
};

/// The library's predictions for one rank before the run. `is_bound` marks values that may turn out lower.
struct predicted_usage {
  std::uint64_t kept_state_bytes = 0;
  std::uint64_t peak_state_bytes = 0;
  std::uint64_t peak_record_bytes = 0;
  std::uint64_t peak_bytes = 0;
  std::uint64_t bytes_sent = 0;
  std::uint32_t tiers = 0;
  std::array<std::uint64_t, 3> tier_peak_bytes{};  ///< bounds, except for the last
  bool state_is_bound = false;                     ///< of `peak_state_bytes`
  bool peak_is_bound = false;                      ///< of `peak_bytes`
  bool sent_is_bound = false;                      ///< of `bytes_sent`
};

/// The bytes that one rank of several kept and sent.
struct rank_usage {
  std::uint64_t kept_state_bytes = 0;   ///< weights, gradients and moments, between operations
  std::uint64_t peak_state_bytes = 0;   ///< with gathered layers and buffers of sums, as their space measured
  std::uint64_t peak_bytes = 0;         ///< also with activations and workspace
  std::uint64_t bytes_sent = 0;         ///< of messages, in all of the run
  std::uint64_t peak_record_bytes = 0;  ///< of activations at once, in any tier
  std::uint64_t rebuilds = 0;           ///< recomputed records
  std::uint64_t background_sums = 0;    ///< of gradients, with `--sums-in-flight`
  std::uint64_t sum_waits = 0;          ///< those that the rank had to wait for
  std::uint32_t tiers = 0;              ///< tiers that held its state; 0: plain memory
  std::array<std::uint64_t, 3> tier_peak_bytes{};
  predicted_usage predicted{};
};

struct run_result {
  std::vector<double> losses;  ///< of step i's batch, before its update; one more than there are updates
  std::uint64_t digest = 0;    ///< of the weights at the end
  double tokens_per_second = 0;
  memory_report memory;
  std::string unsaved{};            ///< why the last step's checkpoint is not committed, if it should be
  std::uint64_t skipped_steps = 0;  ///< whose gradients were not finite, if a guard looks
  double loss_scale = 1;            ///< at the end
  std::uint64_t first_step = 0;     ///< of this process; earlier ones were loaded
  std::vector<rank_usage> ranks{};  ///< of a run on several ranks, by rank
  predicted_usage predicted{};      ///< of a run without ranks
};

/// Saves nothing: see `run_checkpoints`.
struct no_checkpoints {
  void after_step(std::uint64_t /*done*/, std::span<const double> /*losses*/, double /*step_seconds*/) {}
  [[nodiscard]] std::string finish() { return {}; }
};

/// Trains for `steps` steps, then evaluates the batches that would be next.
///
/// @param trainer  initialised; see `trainer`.
/// @param memory   called without arguments, returns a `memory_report`.
/// @param show     called with a `run_progress` after every loss.
/// @param before   losses of earlier steps; the trainer has the state after them.
/// @param checkpoints  called after every step.
/// @param evaluated    batches of the last loss, at least 1.
template <class Trainer, class Memory, class Show, class Checkpoints>
[[nodiscard]] run_result run_training(Trainer& trainer, const corpus& text, const gpt_shape& shape,
                                      std::uint64_t steps, std::uint64_t seed, Memory memory, Show show,
                                      std::vector<double> before, Checkpoints& checkpoints,
                                      std::uint64_t evaluated = 1) {
  using clock = std::chrono::steady_clock;
  run_result result;
  result.losses = std::move(before);
  const std::uint64_t first = result.losses.size();
  result.first_step = first;
  std::chrono::duration<double> training{0};
  const memory_report at_first = memory();
  memory_report in_steps = at_first;
  for (std::uint64_t step = first; step <= steps; ++step) {
    const token_batch batch = text.batch(shape, seed, step);
    if (step < steps) {
      const auto began = clock::now();
      result.losses.push_back(trainer.step(batch, step));
      const std::chrono::duration<double> took = clock::now() - began;
      training += took;
      memory_report now = memory();
      now.first_step_stall_seconds =
          step == first ? now.stall_seconds - at_first.stall_seconds : in_steps.first_step_stall_seconds;
      in_steps = std::move(now);
      result.tokens_per_second = static_cast<double>((step + 1 - first) * shape.tokens()) / training.count();
      checkpoints.after_step(step + 1, result.losses, took.count());
    } else {
      double sum = trainer.evaluate(batch);
      for (std::uint64_t more = 1; more < evaluated; ++more)
        sum += trainer.evaluate(text.batch(shape, seed, steps + more));
      result.losses.push_back(sum / static_cast<double>(evaluated));
    }
    result.memory = memory();
    show(run_progress{step, result.losses.back(), result.tokens_per_second, result.memory});
  }
  result.unsaved = checkpoints.finish();
  result.digest = trainer.digest();
  result.memory = memory();
  result.memory.stall_seconds = in_steps.stall_seconds - at_first.stall_seconds;
  for (std::size_t i = 0; i < llmmem::stall_causes; ++i)
    result.memory.stalls[i] = in_steps.stalls[i] - at_first.stalls[i];
  result.memory.first_step_stall_seconds = in_steps.first_step_stall_seconds;
  return result;
}

/// As above, from the beginning, without checkpoints.
template <class Trainer, class Memory, class Show>
[[nodiscard]] run_result run_training(Trainer& trainer, const corpus& text, const gpt_shape& shape,
                                      std::uint64_t steps, std::uint64_t seed, Memory memory, Show show) {
  no_checkpoints none;
  return run_training(trainer, text, shape, steps, seed, memory, show, {}, none);
}

namespace detail {

[[nodiscard]] inline std::string json_list(const std::array<std::uint64_t, 3>& values, std::uint32_t count) {
  std::string list;
  for (std::uint32_t i = 0; i < count; ++i)
    list += fmt::format("{}{}", i == 0 ? "" : ", ", values[i]);
  return "[" + list + "]";
}

[[nodiscard]] inline std::string to_json(const predicted_usage& it) {
  std::string bounds;
  const auto is_bound = [&](const char* name, bool it_is) {
    if (it_is) bounds += fmt::format("{}\"{}\"", bounds.empty() ? "" : ", ", name);
  };
  is_bound("peak_state_bytes", it.state_is_bound);
  is_bound("peak_bytes", it.peak_is_bound);
  is_bound("bytes_sent", it.sent_is_bound);
  is_bound("tier_peak_bytes", it.tiers != 0);
  return fmt::format(
      R"({{"kept_state_bytes": {}, "peak_state_bytes": {}, "peak_record_bytes": {}, "peak_bytes": {}, )"
      R"("bytes_sent": {}, "tier_peak_bytes": {}, "bounds": [{}]}})",
      it.kept_state_bytes, it.peak_state_bytes, it.peak_record_bytes, it.peak_bytes, it.bytes_sent,
      json_list(it.tier_peak_bytes, it.tiers), bounds);
}

}  // namespace detail

/// One object. Losses are hexadecimal floating point, so that equal bits are equal texts.
[[nodiscard]] inline std::string to_json(const run_result& result) {
  std::string losses;
  for (const double loss : result.losses)
    losses += fmt::format("{}\"{:a}\"", losses.empty() ? "" : ", ", loss);
  std::string moved;
  for (const link_traffic& link : result.memory.links)
    moved += fmt::format("{}{}: {}", moved.empty() ? "" : ", ", example::json_string(link.name), link.bytes);
  std::string stalls;
  for (std::size_t i = 0; i < llmmem::stall_causes; ++i) {
    stalls += fmt::format("{}\"{}\": {}", stalls.empty() ? "" : ", ",
                          llmmem::name_of(static_cast<llmmem::stall_cause>(i)), result.memory.stalls[i]);
  }
  const std::uint64_t peak = result.memory.tiers.empty() ? 0 : result.memory.tiers.front().peak_bytes;
  std::string ranks;
  for (const rank_usage& each : result.ranks) {
    ranks += fmt::format(
        R"({}{{"kept_state_bytes": {}, "peak_state_bytes": {}, "peak_bytes": {}, "bytes_sent": {}, )"
        R"("peak_record_bytes": {}, "rebuilds": {}, "background_sums": {}, "sum_waits": {}, "tier_peak_bytes": {}, "predicted": {}}})",
        ranks.empty() ? "" : ", ", each.kept_state_bytes, each.peak_state_bytes, each.peak_bytes,
        each.bytes_sent, each.peak_record_bytes, each.rebuilds, each.background_sums, each.sum_waits,
        detail::json_list(each.tier_peak_bytes, each.tiers), detail::to_json(each.predicted));
  }
  ranks = ranks.empty() ? R"(, "predicted": )" + detail::to_json(result.predicted)
                        : R"(, "ranks": [)" + ranks + "]";
  return fmt::format(
      R"({{"losses": [{}], "digest": "{:016x}", "tokens_per_second": {}, "peak_resident_bytes": {}, )"
      R"("bytes_moved": {{{}}}, "stall_seconds": {}, "stalls": {{{}}}, "first_step_stall_seconds": {}, )"
      R"("stall_lower_bound_seconds": {}, "regret": {}, )"
      R"("skipped_steps": {}, "loss_scale": {}{}}})"
      "\n",
      losses, result.digest, result.tokens_per_second, peak, moved, result.memory.stall_seconds, stalls,
      result.memory.first_step_stall_seconds, result.memory.stall_lower_bound_seconds, result.memory.regret,
      result.skipped_steps, result.loss_scale, ranks);
}

}  // namespace train_gpt
