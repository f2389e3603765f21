/// @file
/// A run with any stores, and its progress lines.
#pragma once

#include <llmmem/space/host.hpp>

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/standard_streams.hpp"
#include "common/text.hpp"
#include "train_gpt/any_stores.hpp"
#include "train_gpt/checkpoints.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/gpt.hpp"
#include "train_gpt/outer_steps.hpp"
#include "train_gpt/rank_voice.hpp"
#include "train_gpt/run.hpp"
#include "train_gpt/run_options.hpp"
#include "train_gpt/step_guard.hpp"
#include "train_gpt/trainer.hpp"
#include "train_gpt/worker_team.hpp"

namespace train_gpt {

/// A line for every step, or twenty if there are more steps, so that the log of a long run stays short.
class progress_lines {
 public:
  progress_lines(std::FILE* to, std::string program, std::uint64_t steps)
      : to_(to), program_(std::move(program)), steps_(steps), each_(steps / 20 + 1) {}

  void operator()(const run_progress& now) const {
    if (now.step % each_ != 0 && now.step != steps_) return;
    example::tell(to_, "{}: step {}/{}  loss {:.4f}  {} tokens/s", program_, now.step, steps_, now.loss,
                  example::grouped(static_cast<std::uint64_t>(now.tokens_per_second)));
    for (const tier_usage& tier : now.memory.tiers)
      example::tell(to_, "  {} {}", tier.name, example::bytes_text(static_cast<double>(tier.resident_bytes)));
    example::tell(to_, "\n");
  }

 private:
  std::FILE* to_;
  std::string program_;
  std::uint64_t steps_;
  std::uint64_t each_;
};

/// Trains with the given stores, as one of several ranks or alone. `memory` reports their usage.
/// @param shape  of this rank's computation.
/// @param worker the ranks that share each step's batch.
/// @param outer  or null, if this worker is the only one.
template <class Memory>
[[nodiscard]] run_result train_with(const command_line& asked, const gpt_shape& shape, worker_team& team,
                                    llmmem::host_space& workspace, any_state<float>& state,
                                    any_activations<float>& activations, const corpus& text, Memory memory,
                                    rank_voice& ranks, rank_voice& worker, outer_steps* outer,
                                    std::FILE* notes) {
  gpt<float, llmmem::host_space> model(shape, team, workspace);
  const progress_lines lines(notes, "train_gpt", asked.steps);
  const auto show = [&](const run_progress& now) {
    if (ranks.rank() == 0) lines(now);
  };
  adam_options options;
  // Without a variance, steps are as large as gradients; Adafactor's are relative to the size of the weights.
  const bool is_large =
      shape.optimizer == llmmem::optimizer_form::sgd || shape.optimizer == llmmem::optimizer_form::adafactor;
  if (is_large) options.rate = 0.05;
  std::optional<step_guard> guard;
  if (asked.guard.guards()) guard.emplace(asked.guard, worker);
  const auto train = [&](any_state<float>& store, auto& checkpoints, auto before) {
    trainer<any_state<float>, any_activations<float>, llmmem::host_space> inner(
        model, team, store, activations, options, asked.update);
    inner.initialise(asked.seed);
    if (guard) inner.guard_steps(*guard);
    if (outer != nullptr) outer->begin();
    joining_trainer joining(inner, store, outer);
    shared_batch_trainer training(joining, ranks, asked.parallel.outer.workers);
    run_result result = run_training(training, text, asked.shape, asked.steps, asked.seed, memory, show,
                                     before(), checkpoints, asked.evaluate);
    if (guard) {
      result.skipped_steps = guard->skipped();
      result.loss_scale = guard->scale();
    }
    return result;
  };
  const auto saving = [&](auto& checkpoints) {
    gated_state gated(state, checkpoints.gate());
    return train(gated, checkpoints, [&] { return checkpoints.begin(); });
  };
  if (asked.checkpoints.folder.empty()) {
    no_checkpoints none;
    return train(state, none, [] { return std::vector<double>(); });
  }
  if (state.stays()) {
    run_checkpoints<true> checkpoints(asked, run_identity(asked, text), state, ranks, notes,
                                      guard ? &*guard : nullptr);
    return saving(checkpoints);
  }
  run_checkpoints<false> checkpoints(asked, run_identity(asked, text), state, ranks, notes,
                                     guard ? &*guard : nullptr);
  return saving(checkpoints);
}

/// As above, alone.
template <class Memory>
[[nodiscard]] run_result train_with(const command_line& asked, worker_team& team,
                                    llmmem::host_space& workspace, any_state<float>& state,
                                    any_activations<float>& activations, const corpus& text, Memory memory,
                                    std::FILE* notes) {
  rank_voice alone;
  return train_with(asked, asked.shape, team, workspace, state, activations, text, memory, alone, alone,
                    nullptr, notes);
}

}  // namespace train_gpt
