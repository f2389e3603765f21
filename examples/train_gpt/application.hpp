/// @file
/// The program: trains with the requested memory, and reports the result.
#pragma once

#include <llmmem/checkpoint/termination.hpp>
#include <llmmem/model/training_state.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/training/memory_chunks.hpp>

#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/program.hpp"
#include "common/text.hpp"
#include "train_gpt/activation_codec.hpp"
#include "train_gpt/any_stores.hpp"
#include "train_gpt/chunk_store.hpp"
#include "train_gpt/command_line.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/gpt.hpp"
#include "train_gpt/host_stores.hpp"
#include "train_gpt/plan_of_run.hpp"
#include "train_gpt/process_ranks.hpp"
#include "train_gpt/rank_voice.hpp"
#include "train_gpt/ranks_run.hpp"
#include "train_gpt/run.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/tiered_run.hpp"
#include "train_gpt/train_with.hpp"
#include "train_gpt/trainer.hpp"
#include "train_gpt/training_text.hpp"
#include "train_gpt/worker_team.hpp"

namespace train_gpt {

using example::exit_status;

/// The memory of a run, by purpose.
struct planned_bytes {
  llmmem::training_bytes state;
  std::uint64_t activations = 0;
  std::uint64_t workspace = 0;
  std::uint64_t outer = 0;

  [[nodiscard]] std::uint64_t total() const { return state.total() + activations + workspace + outer; }
};

/// The memory of a run, or of its largest rank.
[[nodiscard]] inline planned_bytes plan_bytes(const gpt_shape& shape, std::size_t threads,
                                              const parallel_options& parallel = {}) {
  using value = float;
  planned_bytes plan;
  const bool is_whole = shape.optimizer == llmmem::optimizer_form::adafactor ||
                        shape.optimizer == llmmem::optimizer_form::muon;  // on every rank
  plan.state =
      llmmem::training_state(shape.model().parameters(), parallel.stage, parallel.ranks_of_worker(),
                             {.weights = sizeof(value),
                              .gradients = sizeof(value),
                              .optimizer = is_whole ? 0 : optimizer_kinds(shape).size() * sizeof(value)});
  for (std::size_t layer = 0; layer < shape.layers() && is_whole; ++layer) {
    for (const state_kind kind : optimizer_kinds(shape))
      plan.state.optimizer += state_layout(shape, shape.layer(layer), kind).elements * sizeof(value);
  }
  for (std::size_t layer = 1; layer < shape.layers(); ++layer)
    plan.activations += activation_layout(shape, shape.layer(layer)).elements * sizeof(value);
  if (parallel.outer.joins()) {
    const std::uint64_t shards = parallel.stage == llmmem::zero_stage::none ? 1 : parallel.ranks_of_worker();
    plan.outer = 2 * sizeof(value) * (shape.model().parameters() / shards + 1);
  }
  plan.workspace = gpt<value, llmmem::host_space>::workspace_elements(shape, threads) * sizeof(value);
  return plan;
}

[[nodiscard]] inline std::string to_report(const command_line& asked, const std::string& text_name,
                                           const planned_bytes& plan, const run_result& result) {
  const auto bytes = [](std::uint64_t n) { return example::bytes_text(static_cast<double>(n)); };
  const gpt_shape& shape = asked.shape;
  std::string text = fmt::format(
      "{} blocks of width {} with {} heads, {} parameters; {} x {} bytes of {} a step\n"
      "  loss         {:.4f} to {:.4f} in {} steps\n"
      "  weights      {:016x}\n"
      "  speed        {} tokens/s on {} threads\n"
      "  kept         weights {}, gradients {}, optimizer {}, activations {}, workspace {}\n",
      shape.blocks, shape.width, shape.heads, example::count_text(shape.model().parameters()), shape.batch,
      shape.context, text_name, result.losses.front(), result.losses.back(), asked.steps, result.digest,
      example::grouped(static_cast<std::uint64_t>(result.tokens_per_second)), asked.threads,
      bytes(plan.state.weights), bytes(plan.state.gradients), bytes(plan.state.optimizer),
      bytes(plan.activations), bytes(plan.workspace));
  const auto predicted = [&](const predicted_usage& of) {
    return fmt::format("  {:<12} peak {}{}\n", "predicted", bytes(of.peak_bytes),
                       of.peak_is_bound ? " at most" : "");
  };
  if (result.ranks.empty()) {
    text += predicted(result.predicted);
    for (const tier_usage& tier : result.memory.tiers)
      text += fmt::format("  {:<12} peak {}\n", tier.name, bytes(tier.peak_bytes));
  }
  for (std::size_t rank = 0; rank < result.ranks.size(); ++rank) {
    const rank_usage& each = result.ranks[rank];
    text += fmt::format("  {:<12} state {}, peak {}; with activations peak {}; sent {}\n",
                        fmt::format("rank {}", rank), bytes(each.kept_state_bytes),
                        bytes(each.peak_state_bytes), bytes(each.peak_bytes), bytes(each.bytes_sent));
    text += predicted(each.predicted);
  }
  return text;
}

namespace detail {

/// The machine's memory, because more is impossible.
[[nodiscard]] inline std::uint64_t physical_bytes() noexcept {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long page = ::sysconf(_SC_PAGESIZE);
  return pages > 0 && page > 0 ? static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(page)
                               : std::uint64_t{1} << 40;
}

[[nodiscard]] inline run_result train_in_plain_memory(const command_line& asked, const planned_run& run,
                                                      std::uint64_t budget, worker_team& team,
                                                      const corpus& text, std::FILE* notes) {
  using space = llmmem::host_space;
  space host({.budget = budget, .name = "host"});
  host_state<float, space> state(host, asked.shape);
  erased_state held(state);
  const auto memory = [&] {
    const llmmem::space_stats stats = host.stats();
    memory_report report;
    report.tiers.push_back({std::string(host.name()), stats.used, stats.peak});
    return report;
  };
  const auto train = [&](auto& activations) {
    erased_activations kept(activations);
    return train_with(asked, team, host, held, kept, text, memory, notes);
  };
  if (asked.recompute.kind == recompute_kind::none && asked.activation_bits == 0) {
    host_activations<float, space> activations(host, asked.shape);
    return train(activations);
  }
  llmmem::memory_chunks<space> chunks(host);
  erased_chunks<llmmem::memory_chunks<space>> store(chunks);
  recorded_activations<float> activations(store, run.records.forms, activation_codec(asked.activation_bits));
  return train(activations);
}

[[nodiscard]] inline run_result train_as_asked(const command_line& asked, const planned_run& run,
                                               std::uint64_t budget, const corpus& text, std::FILE* notes) {
  if (asked.parallel.ranks != 0) {
    return asked.parallel.are_processes ? train_in_processes(asked, budget, text, notes)
                                        : train_in_ranks(asked, budget, text, notes);
  }
  worker_team team(asked.threads);
  if (asked.memory == memory_kind::plain) return train_in_plain_memory(asked, run, budget, team, text, notes);
  if (asked.recompute.kind == recompute_kind::none && asked.activation_bits == 0)
    return train_in_tiers(asked, run.of_rank(0), team, text, notes);
  return train_in_tiers(asked, run.records, run.of_rank(0), team, text, notes);
}

inline void run_checked(command_line asked, std::FILE* out, std::FILE* notes) {
  const gpt_shape& shape = asked.shape;
  const std::size_t ranks = std::max<std::size_t>(asked.parallel.ranks, 1);
  const planned_run run = plan_run(asked);
  planned_bytes plan = plan_bytes(run.shape, run.threads, asked.parallel);
  plan.activations = run.records.plan.peak_bytes;
  const std::uint64_t budget = physical_bytes();
  if (llmmem::checked_multiply(plan.total(), ranks, "train_gpt: bytes of all ranks") > budget) {
    throw example::usage_error(fmt::format(
        "this model would keep {}, the machine has {}; lower --layers, --width, --context or --batch",
        example::bytes_text(static_cast<double>(plan.total() * ranks)),
        example::bytes_text(static_cast<double>(budget))));
  }
  named_text from = load_text(asked.text_file);
  const corpus text(from.name, std::move(from.text), shape);

  std::optional<llmmem::termination_request> termination;  // before any other thread starts
  if (!asked.checkpoints.folder.empty()) asked.checkpoints.termination = &termination.emplace();
  run_result result = train_as_asked(asked, run, budget, text, notes);
  result.predicted = predict_usage(run, asked, 0, asked.steps - result.first_step);
  example::write(out, asked.json ? to_json(result) : to_report(asked, from.name, plan, result),
                 "standard output");
  if (!result.unsaved.empty())
    throw llmmem::error("the last step is not saved: " + example::printable(result.unsaved, 1024));
}

}  // namespace detail

/// Runs the program. Errors become one line on `notes` and an exit status; with `--json`, `out` gets the JSON
/// or nothing.
[[nodiscard]] inline exit_status run_application(const std::vector<std::string>& arguments, std::FILE* out,
                                                 std::FILE* notes) {
  const auto parse = [](const std::vector<std::string>& given) {
    CLI::App app("Trains a small GPT on any text, in plain memory or in tiers.", "train_gpt");
    const training_options options(app);
    const auto help = example::parse(app, given);
    return std::pair(help ? command_line{} : options.asked(), help);
  };
  return example::run({"train_gpt", "lower --layers, --width, --context or --batch"}, arguments, out, notes,
                      parse, [&](const command_line& asked) { detail::run_checked(asked, out, notes); });
}

}  // namespace train_gpt
