/// @file
/// A run with any stores, and the lines that tell how far it has come.
#pragma once

#include <llmmem/space/host.hpp>

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "common/text.hpp"
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
    fmt::print(to_, "{}: step {}/{}  loss {:.4f}  {} tokens/s", program_, now.step, steps_, now.loss,
               example::grouped(static_cast<std::uint64_t>(now.tokens_per_second)));
    for (const tier_usage& tier : now.memory.tiers)
      fmt::print(to_, "  {} {}", tier.name, example::bytes_text(static_cast<double>(tier.resident_bytes)));
    fmt::print(to_, "\n");
    std::fflush(to_);
  }

 private:
  std::FILE* to_;
  std::string program_;
  std::uint64_t steps_;
  std::uint64_t each_;
};

/// Trains with the stores that are given. `memory` tells what they hold.
template <class State, class Activations, class Memory>
[[nodiscard]] run_result train_with(const command_line& asked, worker_team& team,
                                    llmmem::host_space& workspace, State& state, Activations& activations,
                                    const corpus& text, Memory memory, std::FILE* notes) {
  gpt<float, llmmem::host_space> model(asked.shape, team, workspace);
  trainer training(model, team, state, activations, adam_options{}, asked.update);
  training.initialise(asked.seed);
  return run_training(training, text, asked.shape, asked.steps, asked.seed, memory,
                      progress_lines(notes, "train_gpt", asked.steps));
}

}  // namespace train_gpt
