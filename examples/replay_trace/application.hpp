/// @file
/// The program except the replay itself: loads, replays as needed, prints.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/program.hpp"
#include "common/text.hpp"
#include "replay_trace/chart.hpp"
#include "replay_trace/command_line.hpp"
#include "replay_trace/generator.hpp"
#include "replay_trace/json_output.hpp"
#include "replay_trace/progress.hpp"
#include "replay_trace/read_trace.hpp"
#include "replay_trace/replay.hpp"
#include "replay_trace/report.hpp"
#include "replay_trace/tier_chart.hpp"

namespace replay_trace {

using example::exit_status;

/// The program's outputs. Results go to `out`, everything else to `notes`.
struct console {
  std::FILE* out = stdout;
  std::FILE* notes = stderr;
  progress_style progress = progress_style::lines;
  bar_style bars = bar_style::unicode;
};

/// `replay`, or its double in a test.
using replay_function =
    std::function<replay_result(const trace&, const replay_options&, const replay_progress&)>;

namespace detail {

/// The capacities to draw: 1, 2 and 5 of each power of ten from the smallest that can serve the trace to the
/// first without evictions, inclusive.
[[nodiscard]] inline std::vector<std::uint64_t> chart_capacities(const trace& from) {
  const std::uint64_t distinct = std::max<std::uint64_t>(distinct_blocks(from), 1);
  const std::uint64_t least = std::max<std::uint64_t>(longest_request_blocks(from), distinct / 1000);
  std::vector<std::uint64_t> capacities;
  for (std::uint64_t power = 1; power <= distinct; power *= 10) {
    for (const std::uint64_t step : {1U, 2U, 5U}) {
      if (power * step >= least && power * step < distinct) capacities.push_back(power * step);
    }
  }
  capacities.push_back(std::max(distinct, least));
  return capacities;
}

/// The replays of one run of the program, with progress over all of them.
class replay_runner {
 public:
  replay_runner(const trace& from, const command_line& asked, const replay_function& replay,
                const console& to, std::uint64_t replays)
      : from_(&from),
        asked_(&asked),
        replay_(&replay),
        meter_(to.notes, to.progress, replays * from.size()) {}

  [[nodiscard]] replay_result run(const std::string& policy, std::optional<std::uint64_t> capacity) {
    meter_.begin(policy + (capacity ? " at " + example::grouped(*capacity) + " blocks" : " without limit"));
    replay_options options{policy, capacity, from_->block_tokens(), asked_->seed};
    if (capacity) options.tiers = asked_->tiers;
    return run(options);
  }
  [[nodiscard]] replay_result run(const std::string& policy, const tier_budget& budget) {
    meter_.begin(policy + " over tiers of " + example::grouped(budget.hbm) + " blocks and more");
    return run(replay_options{policy, budget.hbm, from_->block_tokens(), asked_->seed, budget.below});
  }

  void finish() noexcept { meter_.finish(); }

 private:
  [[nodiscard]] replay_result run(const replay_options& options) {
    const auto result =
        (*replay_)(*from_, options, [&](std::uint64_t done) { meter_.update(before_ + done); });
    before_ += from_->size();
    return result;
  }

  const trace* from_;
  const command_line* asked_;
  const replay_function* replay_;
  progress_meter meter_;
  std::uint64_t before_ = 0;
};

[[nodiscard]] inline trace load_trace(const command_line& asked) {
  if (!asked.trace_file) {
    generator_options options{.seed = asked.seed};
    if (asked.block_tokens) options.block_tokens = *asked.block_tokens;
    return generate_trace(options);
  }
  return read_trace_file(*asked.trace_file,
                         {.format = asked.format,
                          .block_tokens = asked.block_tokens,
                          .on_bad_line = asked.skip_bad ? bad_lines::skip : bad_lines::refuse});
}

inline void run_checked(const command_line& asked, const replay_function& replay, const console& to) {
  const trace from = load_trace(asked);
  if (asked.chart_file && !from.has_block_ids()) {
    throw trace_error(example::printable(from.name(), 512) +
                      ": has lengths only, so no hit ratio to draw; leave out --chart");
  }
  if (asked.chart_file)
    static_cast<void>(example::open_for_writing(*asked.chart_file));  // fail before the work, not after it
  if (from.skipped().count > 0) {
    fmt::print(to.notes, "replay_trace: skipped {} malformed lines, the first: {}\n", from.skipped().count,
               from.skipped().first);
  }

  const auto asked_for = [&](std::string_view policy) {
    return std::find(asked.policies.begin(), asked.policies.end(), policy) != asked.policies.end();
  };
  if (asked.tiers && !from.has_block_ids()) {
    throw trace_error(example::printable(from.name(), 512) +
                      ": has lengths only, so no block is ever found again; leave out --tiers");
  }
  std::vector<std::string> compared;  // without evictions all policies are equal
  const bool is_pool = asked.tiers && asked.tiers->nodes > 1;
  const bool compares = !asked.json && asked.capacity_blocks && from.has_block_ids() && !is_pool;
  for (const char* policy : {"lru", "min"}) {
    if (compares && !asked_for(policy)) compared.push_back(policy);
  }
  const bool ceiling_wanted = from.has_block_ids() && (compares || is_pool || asked.chart_file);
  const bool draws_tiers = asked.chart_file && asked.tiers;
  const auto capacities =
      asked.chart_file && !asked.tiers ? chart_capacities(from) : std::vector<std::uint64_t>{};
  const auto budgets = draws_tiers
                           ? tier_budgets(*asked.capacity_blocks, *asked.tiers, longest_request_blocks(from))
                           : std::vector<tier_budget>{};

  replay_runner runner(from, asked, replay, to,
                       asked.policies.size() + compared.size() + (ceiling_wanted ? 1 : 0) +
                           capacities.size() * std::size(policy_names) + budgets.size());
  std::vector<replay_result> results;
  for (const auto& policy : asked.policies)
    results.push_back(runner.run(policy, asked.capacity_blocks));
  std::vector<reference_line> references;
  for (const auto& policy : compared) {
    references.push_back({policy, runner.run(policy, asked.capacity_blocks).hit_ratio().value_or(0)});
  }
  std::optional<double> ceiling;
  if (ceiling_wanted) ceiling = runner.run("lru", std::nullopt).hit_ratio();
  if (draws_tiers) {
    std::vector<replay_result> by_budget;
    for (const tier_budget& each : budgets)
      by_budget.push_back(runner.run(asked.policies.front(), each));
    hit_ratio_chart chart = tier_chart(budgets, by_budget, asked.model);
    chart.ceiling = ceiling;
    example::write_file(*asked.chart_file, draw_svg(chart));
  } else if (asked.chart_file) {
    hit_ratio_chart chart{"Block hit ratio by cache capacity", {}, ceiling};
    for (const std::string_view policy : policy_names) {
      chart_series line{std::string(policy), {}};
      for (const std::uint64_t capacity : capacities) {
        line.points.push_back({capacity, runner.run(line.name, capacity).hit_ratio().value_or(0)});
      }
      chart.series.push_back(std::move(line));
    }
    example::write_file(*asked.chart_file, draw_svg(chart));
  }
  runner.finish();

  std::string text;
  if (asked.json) {
    text = asked.policies.size() > 1 ? to_json(from.name(), results, asked.model)
                                     : to_json(from.name(), results.front(), asked.model);
    text += '\n';
  } else {
    text = report_text({&from, results, references, ceiling, asked.model, to.bars});
  }
  example::write(to.out, text, "standard output");
  if (asked.chart_file)
    fmt::print(to.notes, "replay_trace: chart in {}\n", example::printable(*asked.chart_file, 512));
}

}  // namespace detail

/// Runs the program. Errors become one line on `to.notes` and an exit status; with `--json`, `to.out` gets
/// the JSON or nothing.
[[nodiscard]] inline exit_status run_application(const std::vector<std::string>& arguments,
                                                 const replay_function& replay, const console& to) {
  const example::program self{.name = "replay_trace",
                              .too_large = "the trace or the capacity is too large for this machine"};
  return example::run(self, arguments, to.out, to.notes, parse_command_line,
                      [&](const command_line& asked) { detail::run_checked(asked, replay, to); });
}

}  // namespace replay_trace
