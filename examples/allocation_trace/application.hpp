/// @file
/// The program: its arguments, its runs and its output.
#pragma once

#include <llmmem/model/presets.hpp>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "allocation_trace/programs.hpp"
#include "allocation_trace/replay.hpp"
#include "allocation_trace/trace.hpp"
#include "common/program.hpp"
#include "common/text.hpp"
#include "replay_trace/read_trace.hpp"

namespace allocation_trace {

using example::exit_status;
using example::usage_error;

struct command_line {
  std::vector<std::string> programs{std::begin(program_names), std::end(program_names)};
  program_options options{.model = llmmem::find_model("llama2-7b")};
  std::uint64_t seed = 1;
  std::optional<std::string> lengths_file;
  std::optional<std::string> record_file;
  std::optional<std::string> replay_file;
  bool json = false;
};

namespace detail {

template <class Names>
[[nodiscard]] std::string list(const Names& names) {
  std::string text;
  for (const auto& each : names)
    text += (text.empty() ? "" : ", ") + std::string(each);
  return text;
}

[[nodiscard]] inline std::string model_names() {
  std::vector<std::string_view> names;
  for (const auto& each : llmmem::all_models()) {
    if (each.latent.kv_rank == 0 && each.experts.count == 0) names.push_back(each.name);
  }
  return list(names);
}

}  // namespace detail

/// Reads `arguments`, without the program's name; returns the help text if that was requested.
/// @throws usage_error
[[nodiscard]] inline std::pair<command_line, std::optional<std::string>> parse_command_line(
    std::vector<std::string> arguments) {
  CLI::App app(
      "Records the allocations of training and serving programs, and finds the smallest budget at which each "
      "arena survives it.",
      "allocation_trace");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  command_line asked;
  std::optional<std::string> program, model, seed, steps, requests, batch, concurrent, ranks;
  app.add_option("--program", program, "all (default), or one of " + detail::list(program_names))
      ->type_name("NAME");
  app.add_option("--model", model, "(default: llama2-7b) " + detail::model_names())->type_name("PRESET");
  app.add_option("--trace", asked.lengths_file, "take lengths from this trace of requests (default: made up)")
      ->type_name("FILE");
  app.add_option("--seed", seed, "of the lengths that are made up, or the first request taken (default: 1)")
      ->type_name("N");
  app.add_option("--steps", steps, "training steps (default: 24)")->type_name("N");
  app.add_option("--batch", batch, "sequences a training step takes (default: 4)")->type_name("N");
  app.add_option("--ranks", ranks, "that share the training state (default: 16)")->type_name("N");
  app.add_option("--requests", requests, "requests served (default: 400)")->type_name("N");
  app.add_option("--concurrent", concurrent, "requests served at once (default: 24)")->type_name("N");
  app.add_option("--record", asked.record_file, "write the trace of --program to this file and stop")
      ->type_name("FILE");
  app.add_option("--replay", asked.replay_file, "replay a recorded trace")->type_name("FILE");
  app.add_flag("--json", asked.json, "JSON on standard output, all else on standard error");
  if (auto help = example::parse(app, std::move(arguments))) return {asked, std::move(help)};
  if (program && *program != "all") {
    if (std::find(program_names.begin(), program_names.end(), *program) == program_names.end()) {
      throw usage_error(example::given("--program", *program) + ": no such program; there are all, " +
                        detail::list(program_names));
    }
    asked.programs = {*program};
  }
  if (model) {
    const auto models = llmmem::all_models();
    const auto chosen =
        std::find_if(models.begin(), models.end(), [&](const auto& each) { return each.name == *model; });
    if (chosen == models.end() || chosen->latent.kv_rank != 0 || chosen->experts.count != 0) {
      throw usage_error(example::given("--model", *model) + ": no such dense model; there are " +
                        detail::model_names());
    }
    asked.options.model = *chosen;
  }
  const auto count = [](const char* option, const std::optional<std::string>& text, std::uint64_t least,
                        std::uint64_t most, std::uint64_t& into) {
    if (text) into = example::usage_count(option, *text, least, most);
  };
  if (seed) asked.seed = example::usage_seed(*seed);
  count("--steps", steps, 1, 10'000, asked.options.steps);
  count("--batch", batch, 1, 256, asked.options.batch);
  count("--ranks", ranks, 1, 4096, asked.options.ranks);
  count("--requests", requests, 1, 1'000'000, asked.options.requests);
  count("--concurrent", concurrent, 1, 4096, asked.options.concurrent);
  if (asked.replay_file && (program || asked.record_file || asked.lengths_file)) {
    throw usage_error("--replay excludes --program, --record and --trace: the file says it all");
  }
  if (asked.record_file && asked.programs.size() != 1) {
    throw usage_error("--record writes one trace; name it with --program");
  }
  return {asked, std::nullopt};
}

/// The budgets and replays of one trace.
struct finding {
  std::string trace;
  std::size_t events = 0;
  std::uint64_t peak_live = 0;
  std::uint64_t allocations = 0;
  std::vector<replay_result> replays;              ///< at these budgets
  std::vector<std::uint64_t> budgets;              ///< the smallest, by `arena_names`
  std::optional<replay_result> split_at_stitched;  ///< caching_split at the stitched arena's smallest budget
};

[[nodiscard]] inline finding examine(const trace& from) {
  finding found{from.name(), from.events().size(), from.peak_live_bytes(), from.allocations(), {}, {}, {}};
  for (const std::string_view name : arena_names) {
    found.budgets.push_back(smallest_budget(from, name));
    found.replays.push_back(replay(from, name, found.budgets.back()));
  }
  found.split_at_stitched = replay(from, "caching_split", found.budgets[2]);
  return found;
}

/// Calls that a replay made of the system beneath: pieces created and mapped, and unmappings.
[[nodiscard]] inline std::uint64_t system_calls(const replay_result& of) {
  return of.mapped.create_calls + of.mapped.map_calls + of.mapped.unmap_calls;
}

[[nodiscard]] inline std::string to_json(const finding& found) {
  const auto ratio = [&](std::uint64_t budget) {
    return static_cast<double>(budget) / static_cast<double>(found.peak_live);
  };
  std::string arenas;
  for (std::size_t i = 0; i < arena_names.size(); ++i) {
    arenas += fmt::format(
        R"({}{{"arena": "{}", "smallest_budget": {}, "over_peak_live": {:.4f}, "system_calls": {}}})",
        i == 0 ? "" : ", ", arena_names[i], found.budgets[i], ratio(found.budgets[i]),
        system_calls(found.replays[i]));
  }
  std::string at = "null";
  if (const auto& split = found.split_at_stitched; split && split->failed_at) {
    at = fmt::format(R"({{"event": {}, "bytes_needed": {}, "bytes_free": {}, "largest_free": {}}})",
                     *split->failed_at, split->why.wanted, split->stats.free(), split->stats.largest_free);
  }
  return fmt::format(R"({{"trace": {}, "events": {}, "peak_live_bytes": {}, "arenas": [{}], )"
                     R"("caching_split_fails_at_the_budget_of_stitched": {}}})",
                     example::json_string(found.trace), found.events, found.peak_live, arenas, at);
}

[[nodiscard]] inline std::string to_report(const std::vector<finding>& all) {
  using example::bytes_text;
  std::string text =
      fmt::format("{:<34}{:>9}{:>11}", "smallest budget over peak live bytes", "events", "peak");
  for (const std::string_view name : arena_names)
    text += fmt::format("{:>15}", name);
  text += '\n';
  for (const finding& each : all) {
    text += fmt::format("{:<36}{:>9}{:>11}", example::printable(each.trace, 34), each.events,
                        bytes_text(static_cast<double>(each.peak_live)));
    for (const std::uint64_t budget : each.budgets) {
      text += fmt::format("{:>15.3f}", static_cast<double>(budget) / static_cast<double>(each.peak_live));
    }
    text += '\n';
  }
  text += fmt::format("\n{:<56}", "system calls per 1,000 allocations at that budget");
  for (const std::string_view name : arena_names)
    text += fmt::format("{:>15}", name);
  text += '\n';
  for (const finding& each : all) {
    text += fmt::format("{:<56}", example::printable(each.trace, 34));
    for (const replay_result& one : each.replays) {
      text += fmt::format("{:>15.1f}", 1000.0 * static_cast<double>(system_calls(one)) /
                                           static_cast<double>(each.allocations));
    }
    text += '\n';
  }
  text += "\nwith the budget that stitched needs, caching_split\n";
  for (const finding& each : all) {
    const auto& split = each.split_at_stitched;
    text += fmt::format("{:<36}", example::printable(each.trace, 34));
    if (!split->failed_at) {
      text += "survives\n";
      continue;
    }
    text += fmt::format("fails at event {}: wants a segment of {}, holds {} free, in pieces of {} at most\n",
                        *split->failed_at, bytes_text(static_cast<double>(split->why.wanted)),
                        bytes_text(static_cast<double>(split->stats.free())),
                        bytes_text(static_cast<double>(split->stats.largest_free)));
  }
  return text;
}

namespace detail {

[[nodiscard]] inline std::vector<lengths> load_lengths(const command_line& asked) {
  if (!asked.lengths_file) return generate_lengths(asked.seed, 4096);
  const replay_trace::trace from = replay_trace::read_trace_file(*asked.lengths_file);
  std::vector<lengths> all;
  // The seed selects the first request, so that other seeds play other parts of the trace.
  const std::uint64_t part = asked.seed - std::min<std::uint64_t>(asked.seed, 1);
  for (std::size_t i = 0; i < from.size(); ++i) {
    const auto each = from[(i + part % from.size() * 1000) % from.size()];
    all.push_back(
        {std::max<std::uint64_t>(each.input_tokens, 1), std::max<std::uint64_t>(each.output_tokens, 1)});
  }
  return all;
}

inline void run_checked(const command_line& asked, std::FILE* out) {
  std::vector<finding> findings;
  if (asked.replay_file) {
    replay_trace::file_source source(*asked.replay_file);
    findings.push_back(examine(read_allocations(source)));
  } else {
    const std::vector<lengths> from = load_lengths(asked);
    for (const std::string& name : asked.programs) {
      const trace played = play(name, from, asked.options);
      if (asked.record_file) {
        const example::file_handle file = example::open(*asked.record_file, "wb");
        example::write(file.get(), to_text(played), *asked.record_file);
        return;
      }
      findings.push_back(examine(played));
    }
  }
  std::string text;
  if (!asked.json) {
    text = to_report(findings);
  } else {
    for (const finding& each : findings)
      text += (text.empty() ? "[\n  " : ",\n  ") + to_json(each);
    text += "\n]\n";
  }
  example::write(out, text, "standard output");
}

}  // namespace detail

/// Runs the program. Errors become one line on `notes` and an exit status; with `--json`, `out` gets the JSON
/// or nothing.
[[nodiscard]] inline exit_status run_application(const std::vector<std::string>& arguments, std::FILE* out,
                                                 std::FILE* notes) {
  const example::program self{.name = "allocation_trace",
                              .too_large = "the trace is too large for this machine"};
  return example::run(self, arguments, out, notes, parse_command_line,
                      [&](const command_line& asked) { detail::run_checked(asked, out); });
}

}  // namespace allocation_trace
