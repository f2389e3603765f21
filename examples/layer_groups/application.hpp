/// @file
/// The program: its arguments, its runs and its output.
#pragma once

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "allocation_trace/programs.hpp"
#include "common/program.hpp"
#include "common/text.hpp"
#include "layer_groups/models.hpp"
#include "layer_groups/service.hpp"
#include "replay_trace/read_trace.hpp"

namespace layer_groups {

using example::exit_status;
using example::usage_error;

struct command_line {
  std::vector<hybrid_model> chosen = models();
  carving how;
  std::uint64_t budget_gib = 16;
  std::uint64_t requests = 2000;
  std::uint64_t stretch = 1;
  std::uint64_t seed = 1;
  std::optional<std::string> trace_file;
  bool json = false;
};

/// Reads `arguments`, without the program's name; returns the help text if that was requested.
/// @throws usage_error
[[nodiscard]] inline std::pair<command_line, std::optional<std::string>> parse_command_line(
    std::vector<std::string> arguments) {
  CLI::App app(
      "Serves requests with layers of several kinds from one budget, and shows where the memory goes.",
      "layer_groups");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  command_line asked;
  std::string names;
  for (const hybrid_model& each : asked.chosen)
    names += ", " + std::string(each.name);
  std::optional<std::string> model, budget, requests, stretch, seed, block, snapshot;
  app.add_option("--model", model, "all (default)" + names)->type_name("NAME");
  app.add_option("--budget", budget, "GiB of KV memory (default: 16)")->type_name("N");
  app.add_option("--requests", requests, "served (default: 2000)")->type_name("N");
  app.add_option("--trace", asked.trace_file, "take lengths from this trace of requests (default: made up)")
      ->type_name("FILE");
  app.add_option("--stretch", stretch, "times as long prompts and answers (default: 1)")->type_name("N");
  app.add_option("--block-tokens", block, "of attention blocks (default: 16)")->type_name("N");
  app.add_option("--snapshot-tokens", snapshot, "from one state kept to the next (default: 512)")
      ->type_name("N");
  app.add_option("--seed", seed, "seed of the generated requests (default: 1)")->type_name("N");
  app.add_flag("--json", asked.json, "JSON on standard output, all else on standard error");
  if (auto help = example::parse(app, std::move(arguments))) return {asked, std::move(help)};
  if (model && *model != "all") {
    std::erase_if(asked.chosen, [&](const hybrid_model& each) { return each.name != *model; });
    if (asked.chosen.empty()) {
      throw usage_error(example::given("--model", *model) + ": no such model; there are all" + names);
    }
  }
  const auto count = [](const char* option, const std::optional<std::string>& text, std::uint64_t least,
                        std::uint64_t most, auto& into) {
    if (!text) return;
    const std::uint64_t value = example::usage_count(option, *text, least, most);
    into = static_cast<std::remove_reference_t<decltype(into)>>(value);
  };
  count("--budget", budget, 1, 512, asked.budget_gib);
  count("--requests", requests, 1, 1'000'000, asked.requests);
  count("--stretch", stretch, 1, 64, asked.stretch);
  if (seed) asked.seed = example::usage_seed(*seed);
  count("--block-tokens", block, 1, 256, asked.how.block_tokens);
  count("--snapshot-tokens", snapshot, 1, 16'384, asked.how.snapshot_tokens);
  if (asked.how.snapshot_tokens % asked.how.block_tokens != 0) {
    throw usage_error(
        fmt::format("{}: must be a multiple of --block-tokens, {}",
                    example::given("--snapshot-tokens", fmt::to_string(asked.how.snapshot_tokens)),
                    asked.how.block_tokens));
  }
  return {asked, std::nullopt};
}

/// One scheme, and its result.
struct finding {
  std::string model;
  scheme how;
  service_result result;
};

[[nodiscard]] inline std::string to_json(const finding& found) {
  const service_result& of = found.result;
  const byte_causes& bytes = of.bytes;
  std::string groups;
  for (const auto& each : found.how.groups) {
    groups += fmt::format(R"({}{{"name": "{}", "block_tokens": {}, "block_bytes": {}}})",
                          groups.empty() ? "" : ", ", each.name, each.block_tokens, each.block_bytes);
  }
  return fmt::format(
      R"({{"model": {}, "scheme": "{}", "page_bytes": {}, "groups": [{}], "requests": {}, "refused": {}, )"
      R"("mean_running": {:.2f}, "most_running": {}, "steps": {}, "preemptions": {}, "prompt_tokens": {}, )"
      R"("hit_tokens": {}, "byte_samples": {{"samples": {}, "budget": {}, "needed": {}, "cached": {}, )"
      R"("unlooked": {}, "unfilled": {}, "padding": {}, "partial_pages": {}, "null_block": {}, "free": {}}}, )"
      R"("evictions": {}, "pages_emptied": {}}})",
      example::json_string(found.model), found.how.name, found.how.page_bytes, groups, of.requests,
      of.refused, of.mean_running(), of.running_most, of.steps, of.preemptions, of.prompt_tokens,
      of.hit_tokens, of.samples, of.stats.pages.budget_bytes, bytes.needed, bytes.cached, bytes.unlooked,
      bytes.unfilled, bytes.padding, bytes.partial_pages, bytes.null_block, bytes.free,
      of.stats.pages.evictions, of.stats.pages.pages_emptied);
}

[[nodiscard]] inline std::string to_report(const std::vector<finding>& all) {
  std::string text = fmt::format("{:<15}{:<14}{:>8}{:>8}{:>7} |{:>8}{:>8}{:>8} |{:>9}{:>9}{:>9}{:>9}{:>8}\n",
                                 "", "", "running", "most", "hits", "needed", "cached", "free", "unlooked",
                                 "unfilled", "padding", "partial", "null");
  std::string_view model;
  for (const finding& each : all) {
    const service_result& of = each.result;
    const auto percent = [&](std::uint64_t part) { return fmt::format("{:.2f}%", 100 * of.share(part)); };
    text +=
        fmt::format("{:<15}{:<14}{:>8.1f}{:>8}{:>6.1f}% |{:>8}{:>8}{:>8} |{:>9}{:>9}{:>9}{:>9}{:>8}",
                    each.model == model ? "" : each.model, each.how.name, of.mean_running(), of.running_most,
                    100 * of.hit_ratio(), percent(of.bytes.needed), percent(of.bytes.cached),
                    percent(of.bytes.free), percent(of.bytes.unlooked), percent(of.bytes.unfilled),
                    percent(of.bytes.padding), percent(of.bytes.partial_pages), percent(of.bytes.null_block));
    if (of.refused != 0) text += fmt::format("  {} refused", of.refused);
    text += '\n';
    model = each.model;
  }
  return text;
}

namespace detail {

[[nodiscard]] inline std::vector<allocation_trace::lengths> load_lengths(const command_line& asked) {
  std::vector<allocation_trace::lengths> all;
  if (!asked.trace_file) {
    all = allocation_trace::generate_lengths(asked.seed, 4 * asked.requests);
  } else {
    const replay_trace::trace from = replay_trace::read_trace_file(*asked.trace_file);
    for (std::size_t i = 0; i < from.size(); ++i) {
      all.push_back({std::max<std::uint64_t>(from[i].input_tokens, 2),
                     std::max<std::uint64_t>(from[i].output_tokens, 1)});
    }
  }
  for (auto& each : all) {
    each.prompt *= asked.stretch;
    each.answer *= asked.stretch;
  }
  return all;
}

[[nodiscard]] inline std::vector<finding> serve(const command_line& asked, std::FILE* notes) {
  const auto from = load_lengths(asked);
  std::vector<finding> findings;
  for (const hybrid_model& model : asked.chosen) {
    const auto requests = make_requests(from, asked.requests, model.context, asked.seed);
    std::uint64_t longest = 1;
    for (const request& each : requests)
      longest = std::max<std::uint64_t>(longest, each.tokens.size());
    for (const scheme& how : schemes_for(model, asked.how)) {
      fmt::print(notes, "{} {}\n", model.name, how.name);
      service runs(how, asked.budget_gib << 30, longest);
      findings.push_back({std::string(model.name), how, runs.run(requests)});
    }
  }
  return findings;
}

inline void run_checked(const command_line& asked, std::FILE* out, std::FILE* notes) {
  const std::vector<finding> findings = serve(asked, notes);
  std::string text;
  if (asked.json) {
    for (const finding& each : findings)
      text += (text.empty() ? "[\n  " : ",\n  ") + to_json(each);
    text += "\n]\n";
  } else {
    text = to_report(findings);
  }
  example::write(out, text, "standard output");
}

}  // namespace detail

/// Runs the program. Errors become one line on `notes` and an exit status; with `--json`, `out` gets the JSON
/// or nothing.
[[nodiscard]] inline exit_status run_application(const std::vector<std::string>& arguments, std::FILE* out,
                                                 std::FILE* notes) {
  const example::program self{.name = "layer_groups", .too_large = "ask for fewer requests"};
  return example::run(self, arguments, out, notes, parse_command_line,
                      [&](const command_line& asked) { detail::run_checked(asked, out, notes); });
}

}  // namespace layer_groups
