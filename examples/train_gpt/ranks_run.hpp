/// @file
/// A run on several ranks, each with its own share of every batch; and ranks that are threads.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/space/host.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "train_gpt/command_line.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/gpt.hpp"
#include "train_gpt/host_stores.hpp"
#include "train_gpt/run.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/sharded_stores.hpp"
#include "train_gpt/train_with.hpp"
#include "train_gpt/trainer.hpp"
#include "train_gpt/worker_team.hpp"

namespace train_gpt {

/// What one rank of several computes with: the model's shape, for its share of the batch.
[[nodiscard]] inline gpt_shape shape_of_rank(const gpt_shape& shape, std::size_t ranks) noexcept {
  gpt_shape mine = shape;
  mine.batch = shape.batch / ranks;
  return mine;
}

/// A trainer that is one rank of several: of each batch it takes its own sequences, the first ranks the first
/// ones, and its losses are the means over all.
///
/// @par Thread safety   one thread, and all ranks the same calls.
/// @par Errors          as `trainer`; `comm_error` when losses cannot be exchanged.
template <class Trainer, llmmem::transport Ranks>
class rank_trainer {
 public:
  rank_trainer(Trainer& trainer, Ranks& ranks) : trainer_(&trainer), ranks_(&ranks) {}

  [[nodiscard]] double step(const token_batch& batch, std::uint64_t number) {
    return mean(trainer_->step(share_of(batch), number));
  }
  [[nodiscard]] double evaluate(const token_batch& batch) {
    return mean(trainer_->evaluate(share_of(batch)));
  }
  /// Of all weights: every rank calls it, and gets the same.
  [[nodiscard]] std::uint64_t digest() { return trainer_->digest(); }

 private:
  [[nodiscard]] token_batch share_of(const token_batch& batch) const {
    const std::size_t tokens = batch.tokens.size() / to_number(ranks_->world());
    const auto part = [&](const std::vector<std::uint8_t>& all) {
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(to_index(ranks_->rank()) * tokens);
      return std::vector<std::uint8_t>(first, first + static_cast<std::ptrdiff_t>(tokens));
    };
    return {part(batch.tokens), part(batch.targets)};
  }
  /// Added up in the order of ranks.
  [[nodiscard]] double mean(double mine) {
    std::vector<double> all(to_number(ranks_->world()), mine);
    const auto bytes = std::as_writable_bytes(std::span(all));
    llmmem::all_gather(*ranks_, bytes, llmmem::even_blocks(bytes.size(), ranks_->world(), sizeof(double)),
                       {.by = ranks_->after(patience_ns)})
        .value();
    double sum = 0;
    for (const double each : all)
      sum += each;
    return sum / static_cast<double>(all.size());
  }

  static constexpr std::uint64_t patience_ns = 60'000'000'000;

  Trainer* trainer_;
  Ranks* ranks_;
};

namespace detail {

/// What a rank came to.
struct rank_outcome {
  run_result result;
  rank_usage usage;
};

template <llmmem::transport Ranks>
[[nodiscard]] rank_outcome train_as_rank(const command_line& asked, std::uint64_t budget, Ranks& ranks,
                                         const corpus& text, std::FILE* notes) {
  const gpt_shape mine = shape_of_rank(asked.shape, asked.parallel.ranks);
  const bool is_first = to_index(ranks.rank()) == 0;
  worker_team team(std::max<std::size_t>(asked.threads / asked.parallel.ranks, 1));
  llmmem::host_space kept({.budget = budget, .name = "state"});
  llmmem::host_space host({.budget = budget, .name = "host"});
  sharded_layers<float, llmmem::host_space, Ranks> state(kept, mine, ranks, asked.parallel.stage,
                                                         asked.parallel.gather_ahead);
  host_activations<float, llmmem::host_space> activations(host, mine);
  gpt<float, llmmem::host_space> model(mine, team, host);
  trainer inner(model, team, state, activations, adam_options{}, asked.update);
  inner.initialise(asked.seed);
  rank_trainer training(inner, ranks);
  const auto memory = [&] {
    memory_report report;
    report.tiers.push_back(
        {"rank 0", kept.stats().used + host.stats().used, kept.stats().peak + host.stats().peak});
    return report;
  };
  const progress_lines lines(notes, "train_gpt", asked.steps);
  const auto show = [&](const run_progress& now) {
    if (is_first) lines(now);
  };
  rank_outcome outcome;
  outcome.result = run_training(training, text, asked.shape, asked.steps, asked.seed, memory, show);
  outcome.usage.kept_state_bytes = state.kept_bytes();
  outcome.usage.peak_state_bytes = kept.stats().peak;
  outcome.usage.peak_bytes = kept.stats().peak + host.stats().peak;
  for (const llmmem::seat_id seat : ranks.seats())
    outcome.usage.bytes_sent += ranks.traffic(seat).sent_bytes;
  return outcome;
}

}  // namespace detail

/// Adds to the first rank's result what all of them took.
inline void report_ranks(run_result& result, std::vector<rank_usage> usage) {
  std::uint64_t& most = result.memory.tiers.front().peak_bytes;
  for (const rank_usage& each : usage)
    most = std::max(most, each.peak_bytes);
  result.ranks = std::move(usage);
}

/// Trains on `asked.parallel.ranks` ranks, threads of this process, and tells what each of them took.
/// @throws what a rank threw that failed, and not what befell the others in consequence.
[[nodiscard]] inline run_result train_in_ranks(const command_line& asked, std::uint64_t budget,
                                               const corpus& text, std::FILE* notes) {
  constexpr std::uint64_t patience_ns = 60'000'000'000;
  const auto world = static_cast<std::uint32_t>(asked.parallel.ranks);
  llmmem::thread_network net(world);
  std::vector<detail::rank_outcome> outcomes(world);
  std::mutex mutex;
  std::exception_ptr cause;
  std::exception_ptr consequence;  // that another rank was gone, or had given up
  const auto note = [&](std::exception_ptr& which) {
    const std::lock_guard held(mutex);
    if (!which) which = std::current_exception();
  };
  const auto live = [&](std::uint32_t seat) {
    try {
      llmmem::thread_endpoint end(net, llmmem::seat_id{seat});
      llmmem::communicator ranks(end);
      ranks.join(ranks.after(patience_ns)).value();
      outcomes[seat] = detail::train_as_rank(asked, budget, ranks, text, notes);
      // Nobody leaves while another still reads.
      ranks.agree(0, ranks.after(patience_ns)).value();
    } catch (const llmmem::comm_error&) {
      note(consequence);
    } catch (...) {
      note(cause);
    }
  };
  std::vector<std::thread> threads;
  try {
    for (std::uint32_t seat = 1; seat < world; ++seat)
      threads.emplace_back(live, seat);
  } catch (...) {
    note(cause);  // of those that began, each finds a rank missing
  }
  if (threads.size() + 1 == world) live(0);
  for (std::thread& each : threads)
    each.join();
  if (cause) std::rethrow_exception(cause);
  if (consequence) std::rethrow_exception(consequence);

  run_result result = std::move(outcomes[0].result);
  std::vector<rank_usage> usage;
  for (const detail::rank_outcome& each : outcomes)
    usage.push_back(each.usage);
  report_ranks(result, std::move(usage));
  return result;
}

}  // namespace train_gpt
