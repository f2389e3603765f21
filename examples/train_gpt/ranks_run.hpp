/// @file
/// A run on several ranks, each with its own share of every batch, and ranks in threads.
#pragma once

#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/sharding/piece_store.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/training/memory_chunks.hpp>
#include <llmmem/training/training_plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "train_gpt/activation_codec.hpp"
#include "train_gpt/any_stores.hpp"
#include "train_gpt/chunk_store.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/outer_steps.hpp"
#include "train_gpt/plan_of_run.hpp"
#include "train_gpt/rank_voice.hpp"
#include "train_gpt/run.hpp"
#include "train_gpt/run_options.hpp"
#include "train_gpt/sharded_stores.hpp"
#include "train_gpt/tiered_run.hpp"
#include "train_gpt/train_with.hpp"
#include "train_gpt/worker_team.hpp"

namespace train_gpt {

namespace detail {

/// The result of a rank.
struct rank_outcome {
  run_result result;
  rank_usage usage;
};

/// One rank's run over its stores.
/// @param kept       the space of gathered and summed data, and, in plain memory, of the state.
/// @param workspace  the space of the model's workspace, and, in plain memory, of the activations.
/// @param tiers      or null.
/// @param worker     the ranks of this one's worker.
/// @param chunks_in  of base weights and momentum, if there are outer steps.
template <class Layers, llmmem::transport Ranks>
[[nodiscard]] rank_outcome train_over(const command_line& asked, const planned_run& run, Ranks& ranks,
                                      llmmem::rank_group<Ranks>& worker, Layers& layers,
                                      chunk_store& chunks_in, chunk_store& records_in, worker_team& team,
                                      llmmem::host_space& kept, llmmem::host_space& workspace,
                                      const run_tiers* tiers, const corpus& text, std::FILE* notes) {
  recorded_activations<float> recorded(records_in, run.records.forms,
                                       activation_codec(asked.activation_bits, to_index(ranks.rank())));
  erased_state whole(layers);
  erased_activations activations(recorded);
  rank_voice_of voice(ranks);
  rank_voice_of worker_voice(worker);
  std::optional<outer_steps_over<Ranks>> outer;
  std::optional<joined_state> joined;
  if (asked.parallel.outer.joins()) {
    outer.emplace(ranks, chunks_in, kept, run.shape, whole, asked.parallel.outer);
    joined.emplace(whole, *outer);
  }
  any_state<float>& state = joined ? static_cast<any_state<float>&>(*joined) : whole;
  // With the messages of outer steps.
  const auto kept_peak = [&] { return std::max(kept.stats().peak, outer ? outer->peak_bytes() : 0); };
  const auto memory = [&] {
    memory_report report;
    if (tiers != nullptr) report = tiers->report(asked.steps);
    const std::uint64_t used = kept.stats().used + workspace.stats().used;
    const std::uint64_t peak = kept_peak() + workspace.stats().peak;
    if (tiers == nullptr) {
      report.tiers.push_back({"rank 0", used, peak});
    } else {
      report.tiers.front().resident_bytes += used;
      report.tiers.front().peak_bytes += peak;
    }
    return report;
  };
  rank_outcome outcome;
  outcome.result = train_with(asked, run.shape, team, workspace, state, activations, text, memory, voice,
                              worker_voice, outer ? &*outer : nullptr, notes);
  rank_usage& usage = outcome.usage;
  usage.kept_state_bytes = layers.kept_bytes() + (outer ? outer->kept_bytes() : 0);
  usage.peak_state_bytes = kept_peak();
  usage.peak_bytes = outcome.result.memory.tiers.front().peak_bytes;
  usage.peak_record_bytes = recorded.stats().peak_bytes;
  usage.rebuilds = recorded.stats().rebuilds;
  usage.background_sums = layers.sum_stats().sums;
  usage.sum_waits = layers.sum_stats().waits;
  if (tiers != nullptr) {
    const memory_report report = tiers->report(asked.steps);
    usage.tiers = static_cast<std::uint32_t>(report.tiers.size());
    for (std::size_t i = 0; i < report.tiers.size(); ++i)
      usage.tier_peak_bytes[i] = report.tiers[i].peak_bytes;
  }
  for (const llmmem::seat_id seat : ranks.seats())
    usage.bytes_sent += ranks.traffic(seat).sent_bytes;
  usage.predicted = predict_usage(run, asked, voice.rank(), asked.steps - outcome.result.first_step);
  return outcome;
}

/// The ranks of a rank's worker.
template <llmmem::transport Ranks>
[[nodiscard]] llmmem::rank_group<Ranks> worker_of(Ranks& ranks, const parallel_options& asked) {
  std::vector<llmmem::rank_id> members;
  const std::uint32_t first = asked.worker_of(to_index(ranks.rank())) * asked.ranks_of_worker();
  for (std::uint32_t i = 0; i < asked.ranks_of_worker(); ++i)
    members.push_back(llmmem::rank_id{first + i});
  return {ranks, members};
}

template <llmmem::transport Ranks>
[[nodiscard]] rank_outcome train_as_rank(const command_line& asked, std::uint64_t budget, Ranks& ranks,
                                         const corpus& text, std::FILE* notes) {
  using space = llmmem::host_space;
  const planned_run run = plan_run(asked);
  const sharding how{.stage = asked.parallel.stage,
                     .gather_ahead = asked.parallel.gather_ahead,
                     .wires = asked.parallel.wires,
                     .keeps_secondary = asked.parallel.keeps_secondary,
                     .sums_in_flight = asked.parallel.sums_in_flight,
                     .top_k_density = asked.parallel.top_k.density,
                     .top_k = {.sent = asked.parallel.sent, .form = asked.parallel.top_k.form}};
  using worker_ranks = llmmem::rank_group<Ranks>;
  worker_ranks worker = worker_of(ranks, asked.parallel);
  worker_team team(run.threads);
  space kept({.budget = budget, .name = "state"});
  space workspace({.budget = budget, .name = "host"});
  if (asked.memory == memory_kind::plain) {
    sharded_layers<float, space, worker_ranks> layers(kept, run.shape, worker, how);
    llmmem::memory_chunks<space> memory(workspace);
    erased_chunks<llmmem::memory_chunks<space>> records(memory);
    llmmem::memory_chunks<space> outer_memory(kept);
    erased_chunks<llmmem::memory_chunks<space>> outer(outer_memory);
    return train_over(asked, run, ranks, worker, layers, outer, records, team, kept, workspace, nullptr, text,
                      notes);
  }
  const llmmem::training_prediction predicted = run.of_rank(to_index(ranks.rank()));
  tier_spaces spaces(asked.tiers, predicted.tiers.back().bytes);
  const auto tiers = open_tiers(spaces, asked.tiers.schedule, predicted.largest_lease_bytes);
  const progress_beside_computing beside(team, tiers->chunks());
  sharded_layers<float, space, worker_ranks, llmmem::leased_pieces<chunk_store>> layers(
      kept, tiers->chunks(), run.shape, worker, how);
  return train_over(asked, run, ranks, worker, layers, tiers->chunks(), tiers->chunks(), team, kept,
                    workspace, tiers.get(), text, notes);
}

}  // namespace detail

/// Adds the usage of all ranks to the first rank's result.
inline void report_ranks(run_result& result, std::vector<rank_usage> usage) {
  std::uint64_t& most = result.memory.tiers.front().peak_bytes;
  for (const rank_usage& each : usage)
    most = std::max(most, each.peak_bytes);
  result.ranks = std::move(usage);
}

/// Trains on `asked.parallel.ranks` ranks in threads of this process, and reports the usage of each.
/// @throws the exception of the rank that failed, not its consequences on the others.
[[nodiscard]] inline run_result train_in_ranks(const command_line& asked, std::uint64_t budget,
                                               const corpus& text, std::FILE* notes) {
  constexpr std::uint64_t patience_ns = 60'000'000'000;
  const auto world = static_cast<std::uint32_t>(asked.parallel.ranks);
  llmmem::thread_network net(world);
  std::vector<detail::rank_outcome> outcomes(world);
  std::mutex mutex;
  std::exception_ptr cause;
  std::exception_ptr consequence;  // another rank was dead, or had given up
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
    note(cause);  // each rank that began finds another one missing
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
