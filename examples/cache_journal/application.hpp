/// @file
/// The program: what it was asked, what it runs, what it prints.
#pragma once

#include <llmmem/error.hpp>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "cache_journal/record.hpp"
#include "replay_trace/generator.hpp"
#include "replay_trace/json_output.hpp"
#include "replay_trace/read_trace.hpp"
#include "replay_trace/text.hpp"

namespace cache_journal {

/// The command line asks for something that cannot be: exit status 2.
class usage_error : public llmmem::error {
 public:
  using error::error;
};

enum class exit_status : int { success = 0, failure = 1, wrong_usage = 2 };

struct command_line {
  std::optional<std::string> trace_file;
  std::optional<std::string> record_file;
  std::optional<std::string> replay_file;
  std::optional<std::uint64_t> capacity;
  std::uint64_t seed = 1;
  bool json = false;
};

/// What a journal says.
struct finding {
  std::string journal;
  std::uint64_t bytes = 0;
  std::uint64_t records = 0;
  std::string torn;      ///< why it ends before its bytes do; empty: it does not
  std::string diverged;  ///< where its replay differs; empty: nowhere
  std::uint64_t capacity = 0;
  std::vector<llmmem::what_if_result> policies;
};

namespace detail {

[[nodiscard]] inline std::uint64_t usage_count(const char* option, const std::string& text) {
  constexpr std::uint64_t most = 1'000'000'000;
  const auto value = replay_trace::parse_count(text);
  if (!value || *value == 0 || *value > most) {
    throw usage_error(fmt::format("{} \"{}\": must be a whole number from 1 to {}", option,
                                  replay_trace::printable(text, 40), most));
  }
  return *value;
}

using file_handle = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

[[nodiscard]] inline file_handle open(const std::string& path, const char* how) {
  file_handle file(std::fopen(path.c_str(), how), &std::fclose);
  if (!file) {
    throw llmmem::system_error(replay_trace::printable(path, 512) +
                               ": cannot open it: " + std::generic_category().message(errno));
  }
  return file;
}

inline void write(std::FILE* to, const void* from, std::size_t bytes, const std::string& name) {
  if (std::fwrite(from, 1, bytes, to) != bytes || std::fflush(to) != 0) {
    throw llmmem::system_error(replay_trace::printable(name, 512) +
                               ": cannot write it: " + std::generic_category().message(errno));
  }
}

[[nodiscard]] inline std::vector<std::byte> read_file(const std::string& path) {
  const file_handle file = open(path, "rb");
  std::vector<std::byte> bytes;
  std::vector<std::byte> part(1 << 20);
  while (const std::size_t got = std::fread(part.data(), 1, part.size(), file.get()))
    bytes.insert(bytes.end(), part.begin(), part.begin() + static_cast<std::ptrdiff_t>(got));
  if (std::ferror(file.get()) != 0) {
    throw llmmem::system_error(replay_trace::printable(path, 512) +
                               ": cannot read it: " + std::generic_category().message(errno));
  }
  return bytes;
}

}  // namespace detail

/// Reads `arguments`, the program's name left out; the help text instead where it was asked for.
/// @throws usage_error
[[nodiscard]] inline std::pair<command_line, std::optional<std::string>> parse_command_line(
    std::vector<std::string> arguments) {
  CLI::App app(
      "Journals a KV cache while it serves a trace, and asks the journal what other policies would "
      "have hit.",
      "cache_journal");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  command_line asked;
  std::optional<std::string> capacity, seed;
  app.add_option("--trace", asked.trace_file, "serve this trace of requests (default: made up)")
      ->type_name("FILE");
  app.add_option("--seed", seed, "of the trace that is made up (default: 1)")->type_name("N");
  app.add_option("--capacity-blocks", capacity,
                 "idle blocks that keep their contents (default: 10000, or the journal's)")
      ->type_name("N");
  app.add_option("--record", asked.record_file, "write the journal to this file and stop")->type_name("FILE");
  app.add_option("--replay", asked.replay_file, "ask this journal instead of a new one")->type_name("FILE");
  app.add_flag("--json", asked.json, "JSON on standard output, all else on standard error");
  try {
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
    app.parse(arguments);
  } catch (const CLI::CallForHelp&) {
    return {asked, app.help()};
  } catch (const CLI::ParseError& wrong) {
    throw usage_error(replay_trace::printable(wrong.what(), 200));
  }
  if (capacity) asked.capacity = detail::usage_count("--capacity-blocks", *capacity);
  if (seed) asked.seed = detail::usage_count("--seed", *seed);
  if (asked.replay_file && (asked.trace_file || asked.record_file || seed)) {
    throw usage_error("--replay excludes --trace, --record and --seed: the file says it all");
  }
  return {asked, std::nullopt};
}

/// Replays a journal in its own configuration, then under every policy at `capacity`.
[[nodiscard]] inline finding examine(const std::string& name, std::span<const std::byte> journal,
                                     std::optional<std::uint64_t> capacity) {
  finding found;
  found.journal = name;
  found.bytes = journal.size();
  const auto same = llmmem::replay(journal, make_cache);
  found.records = same.end().records;
  found.torn = same.end().reason;
  if (same.divergence()) found.diverged = same.divergence()->message();
  llmmem::what_if_options other;
  other.max_idle_blocks = capacity;
  found.capacity = capacity.value_or(same.header().options.max_idle_blocks);
  if (capacity && *capacity != same.header().options.max_idle_blocks) {
    // As many blocks beside the idle ones as there were.
    const llmmem::paged_options& then = same.header().options;
    other.blocks = *capacity + (then.blocks - std::min(then.blocks, then.max_idle_blocks));
  }
  found.policies = llmmem::what_if<cache_traits>(journal, llmmem::eviction_names, other);
  return found;
}

[[nodiscard]] inline std::string to_json(const finding& found) {
  std::string text = fmt::format(
      R"({{"journal": {}, "bytes": {}, "records": {}, "torn": {}, "diverged": {}, "capacity_blocks": {}, )"
      R"("policies": [)",
      replay_trace::json_string(found.journal), found.bytes, found.records,
      found.torn.empty() ? "null" : replay_trace::json_string(found.torn),
      found.diverged.empty() ? "null" : replay_trace::json_string(found.diverged), found.capacity);
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
  using replay_trace::grouped;
  std::string text =
      fmt::format("{}\n  journal   {} records in {} bytes\n  replay    {}\n",
                  replay_trace::printable(found.journal, 512), grouped(found.records), grouped(found.bytes),
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
      throw llmmem::argument_error(replay_trace::printable(from.name(), 512) +
                                   ": has lengths only, so nothing can be shared");
    }
    name = from.name();
    journal = record(from, asked.capacity.value_or(10'000));
  }
  if (asked.record_file) {
    const file_handle file = open(*asked.record_file, "wb");
    return write(file.get(), journal.data(), journal.size(), *asked.record_file);
  }
  const finding found = examine(name, journal, asked.replay_file ? asked.capacity : std::nullopt);
  const std::string text = asked.json ? to_json(found) : to_report(found);
  write(out, text.data(), text.size(), "standard output");
}

}  // namespace detail

/// Runs the program. Errors become one line on `notes` and an exit status; with `--json`, `out` gets the JSON
/// or nothing.
[[nodiscard]] inline exit_status run_application(const std::vector<std::string>& arguments, std::FILE* out,
                                                 std::FILE* notes) {
  try {
    const auto [asked, help] = parse_command_line(arguments);
    if (help) {
      std::fputs(help->c_str(), out);
      return exit_status::success;
    }
    detail::run_checked(asked, out);
    return exit_status::success;
  } catch (const usage_error& wrong) {
    fmt::print(notes, "cache_journal: {}\nrun cache_journal --help for the options\n", wrong.what());
    return exit_status::wrong_usage;
  } catch (const std::bad_alloc&) {
    fmt::print(notes, "cache_journal: out of memory; the trace is too large for this machine\n");
  } catch (const std::exception& failed) {
    fmt::print(notes, "cache_journal: {}\n", failed.what());
  }
  return exit_status::failure;
}

}  // namespace cache_journal
