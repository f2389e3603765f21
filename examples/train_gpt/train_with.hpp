/// @file
/// A run with any stores, and the lines that tell how far it has come.
#pragma once

#include <llmmem/space/host.hpp>

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "common/standard_streams.hpp"
#include "common/text.hpp"
#include "train_gpt/checkpoints.hpp"
#include "train_gpt/command_line.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/gpt.hpp"
#include "train_gpt/run.hpp"
#include "train_gpt/trainer.hpp"
#include "train_gpt/worker_team.hpp"

namespace train_gpt {

/// A line for every step, or twenty where there are more, so that a log of a long run stays short.
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

namespace detail {

/// Whether another thread may read a store's pieces while the trainer does.
template <class State>
[[nodiscard]] consteval bool leases_stay() {
  if constexpr (requires { State::leases_stay; }) return State::leases_stay;
  return false;
}

}  // namespace detail

/// Trains with the stores that are given. `memory` tells what they hold.
template <class State, class Activations, class Memory>
[[nodiscard]] run_result train_with(const command_line& asked, worker_team& team,
                                    llmmem::host_space& workspace, State& state, Activations& activations,
                                    const corpus& text, Memory memory, std::FILE* notes) {
  gpt<float, llmmem::host_space> model(asked.shape, team, workspace);
  const auto train = [&](auto& store, auto& checkpoints, auto before) {
    trainer training(model, team, store, activations, adam_options{}, asked.update);
    training.initialise(asked.seed);
    return run_training(training, text, asked.shape, asked.steps, asked.seed, memory,
                        progress_lines(notes, "train_gpt", asked.steps), before(), checkpoints);
  };
  if (asked.checkpoints.folder.empty()) {
    no_checkpoints none;
    return train(state, none, [] { return std::vector<double>(); });
  }
  run_checkpoints<State, detail::leases_stay<State>()> checkpoints(asked, run_identity(asked, text), state,
                                                                   notes);
  gated_state<State> gated(state, checkpoints.gate());
  return train(gated, checkpoints, [&] { return checkpoints.begin(); });
}

}  // namespace train_gpt
