/// @file
/// The program: its arguments, its runs and its output.
#pragma once

#include <llmmem/error.hpp>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache_journal/record.hpp"
#include "cache_journal/record_groups.hpp"
#include "common/program.hpp"
#include "common/text.hpp"
#include "replay_trace/generator.hpp"
#include "replay_trace/read_trace.hpp"

namespace cache_journal {

using example::exit_status;
using example::usage_error;

struct command_line {
  std::optional<std::string> trace_file;
  std::optional<std::string> record_file;
  std::optional<std::string> replay_file;
  std::optional<std::uint64_t> capacity;
  std::optional<std::uint64_t> window;
  std::uint64_t seed = 1;
  bool json = false;
};

/// The results of a journal.
struct finding {
  std::string journal;
  std::uint64_t bytes = 0;
  std::uint64_t records = 0;
  std::string torn;      ///< why the journal ends before its bytes do; empty if it does not
  std::string diverged;  ///< where its replay differs; empty if it does not
  std::uint64_t capacity = 0;
  std::vector<llmmem::what_if_result> policies;
};

namespace detail {

[[nodiscard]] inline std::vector<std::byte> read_file(const std::string& path) {
  const example::file_handle file = example::open(path, "rb");
  std::vector<std::byte> bytes;
  std::vector<std::byte> part(1 << 20);
  while (const std::size_t got = std::fread(part.data(), 1, part.size(), file.get()))
    bytes.insert(bytes.end(), part.begin(), part.begin() + static_cast<std::ptrdiff_t>(got));
  if (std::ferror(file.get()) != 0) {
    throw example::file_error(path, "read");
  }
  return bytes;
}

}  // namespace detail

/// Reads `arguments`, without the program's name; returns the help text if that was requested.
/// @throws usage_error
[[nodiscard]] inline std::pair<command_line, std::optional<std::string>> parse_command_line(
    std::vector<std::string> arguments) {
  CLI::App app(
      "Journals a KV cache while it serves a trace, and asks the journal what other policies would "
      "have hit.",
      "cache_journal");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  command_line asked;
  std::optional<std::string> capacity, window, seed;
  app.add_option("--trace", asked.trace_file, "serve this trace of requests (default: made up)")
      ->type_name("FILE");
  app.add_option("--seed", seed, "of the trace that is made up (default: 1)")->type_name("N");
  app.add_option("--capacity-blocks", capacity,
                 "idle blocks that keep their contents (default: 10000, or the journal's)")
      ->type_name("N");
  app.add_option("--window", window,
                 "half of the layers read only so many blocks of the trace (default: all layers read all)")
      ->type_name("BLOCKS");
  app.add_option("--record", asked.record_file, "write the journal to this file and stop")->type_name("FILE");
  app.add_option("--replay", asked.replay_file, "ask this journal instead of a new one")->type_name("FILE");
  app.add_flag("--json", asked.json, "JSON on standard output, all else on standard error");
  if (auto help = example::parse(app, std::move(arguments))) return {asked, std::move(help)};
  if (capacity) asked.capacity = example::usage_count("--capacity-blocks", *capacity, 1, 1'000'000'000);
  if (window) asked.window = example::usage_count("--window", *window, 1, 1'000'000'000);
  if (seed) asked.seed = example::usage_seed(*seed);
  if (asked.replay_file && (asked.trace_file || asked.record_file || seed || window)) {
    throw usage_error(window ? "--replay excludes --window: the file says it all"
                             : "--replay excludes --trace, --record and --seed: the file says it all");
  }
  return {asked, std::nullopt};
}

/// Replays a journal in its own configuration, then under every policy at `capacity`.
[[nodiscard]] inline finding examine(const std::string& name, std::span<const std::byte> journal,
                                     std::optional<std::uint64_t> capacity) {
  finding found;
  found.journal = name;
  found.bytes = journal.size();
  const auto same = llmmem::paging::replay(journal, make_cache);
  found.records = same.end().records;
  found.torn = same.end().reason;
  if (same.divergence()) found.diverged = same.divergence()->message();
  llmmem::what_if_options other;
  other.max_idle_blocks = capacity;
  found.capacity = capacity.value_or(same.header().options.max_idle_blocks);
  if (capacity && *capacity != same.header().options.max_idle_blocks) {
    // In addition to the idle blocks, as many as there were.
    const llmmem::paged_options& then = same.header().options;
    other.blocks = *capacity + (then.blocks - std::min(then.blocks, then.max_idle_blocks));
  }
  found.policies = llmmem::what_if<cache_traits>(journal, llmmem::eviction_names, other);
  return found;
}

/// The same for the journal of a cache with groups: its tokens are blocks of the trace.
[[nodiscard]] inline finding examine_groups(const std::string& name, std::span<const std::byte> journal,
                                            std::optional<std::uint64_t> capacity) {
  finding found;
  found.journal = name;
  found.bytes = journal.size();
  const auto same = llmmem::paging::replay(journal, make_group_cache);
  found.records = same.end().records;
  found.torn = same.end().reason;
  if (same.divergence()) found.diverged = same.divergence()->message();
  const llmmem::hybrid_options& then = same.header().options;
  const std::uint64_t longest = then.max_sequence_tokens;
  const std::uint64_t blocks = then.budget_bytes / 2;
  found.capacity = capacity.value_or(blocks > longest ? blocks - longest : 0);
  llmmem::paging::hybrid_what_if_options other;
  if (capacity) other.budget_bytes = group_budget(*capacity, longest);
  found.policies = llmmem::paging::hybrid_what_if(journal, llmmem::eviction_names, other);
  for (llmmem::what_if_result& each : found.policies) {
    each.hit_blocks = each.hit_tokens;
    each.requested_blocks = each.requested_tokens;
  }
  return found;
}

[[nodiscard]] inline std::string to_json(const finding& found) {
  std::string text = fmt::format(
      R"({{"journal": {}, "bytes": {}, "records": {}, "torn": {}, "diverged": {}, "capacity_blocks": {}, )"
      R"("policies": [)",
      example::json_string(found.journal), found.bytes, found.records,
      found.torn.empty() ? "null" : example::json_string(found.torn),
      found.diverged.empty() ? "null" : example::json_string(found.diverged), found.capacity);
  for (const llmmem::what_if_result& each : found.policies) {
    text += fmt::format(
        R"({}{{"policy": "{}", "hit_ratio": {}, "hit_blocks": {}, "requested_blocks": {}, "hit_tokens": {}, )"
        R"("requested_tokens": {}, "evictions": {}, "sequences": {}, "skipped": {}}})",
        &each == found.policies.data() ? "\n  " : ",\n  ", each.policy, each.hit_ratio(), each.hit_blocks,
        each.requested_blocks, each.hit_tokens, each.requested_tokens, each.evictions, each.sequences,
        each.skipped);
  }
  return text + "\n]}\n";
}

[[nodiscard]] inline std::string to_report(const finding& found) {
  using example::grouped;
  std::string text =
      fmt::format("{}\n  journal   {} records in {} bytes\n  replay    {}\n",
                  example::printable(found.journal, 512), grouped(found.records), grouped(found.bytes),
                  found.diverged.empty() ? "every outcome and the final state as recorded" : found.diverged);
  if (!found.torn.empty()) text += "  cut at    " + found.torn + '\n';
  text += fmt::format("\nwhat if, with {} idle blocks\n  {:<14}{:>9}  {:>12}{:>12}{:>9}\n",
                      grouped(found.capacity), "policy", "tokens", "blocks hit", "evictions", "skipped");
  for (const llmmem::what_if_result& each : found.policies) {
    text += fmt::format("  {:<14}{:>7.2f} %  {:>12}{:>12}{:>9}\n", each.policy, each.hit_ratio() * 100,
                        grouped(each.hit_blocks), grouped(each.evictions), grouped(each.skipped));
  }
  return text;
}

namespace detail {

inline void run_checked(const command_line& asked, std::FILE* out) {
  std::vector<std::byte> journal;
  std::string name;
  if (asked.replay_file) {
    name = *asked.replay_file;
    journal = read_file(name);
  } else {
    const replay_trace::trace from = asked.trace_file ? replay_trace::read_trace_file(*asked.trace_file)
                                                      : replay_trace::generate_trace({.seed = asked.seed});
    if (!from.has_block_ids()) {
      throw llmmem::argument_error(example::printable(from.name(), 512) +
                                   ": has lengths only, so nothing can be shared");
    }
    name = from.name();
    const std::uint64_t capacity = asked.capacity.value_or(10'000);
    journal = asked.window ? record_groups(from, capacity, *asked.window) : record(from, capacity);
  }
  if (asked.record_file) {
    const example::file_handle file = example::open(*asked.record_file, "wb");
    const std::string_view bytes(reinterpret_cast<const char*>(journal.data()), journal.size());
    return example::write(file.get(), bytes, *asked.record_file);
  }
  const std::optional<std::uint64_t> other = asked.replay_file ? asked.capacity : std::nullopt;
  const finding found =
      is_of_groups(journal) ? examine_groups(name, journal, other) : examine(name, journal, other);
  example::write(out, asked.json ? to_json(found) : to_report(found), "standard output");
}

}  // namespace detail

/// Runs the program. Errors become one line on `notes` and an exit status; with `--json`, `out` gets the JSON
/// or nothing.
[[nodiscard]] inline exit_status run_application(const std::vector<std::string>& arguments, std::FILE* out,
                                                 std::FILE* notes) {
  const example::program self{.name = "cache_journal",
                              .too_large = "the trace is too large for this machine"};
  return example::run(self, arguments, out, notes, parse_command_line,
                      [&](const command_line& asked) { detail::run_checked(asked, out); });
}

}  // namespace cache_journal
