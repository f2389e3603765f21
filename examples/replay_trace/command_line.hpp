/// @file
/// The command line of `replay_trace`.
#pragma once

#include <llmmem/model/presets.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/program.hpp"
#include "common/text.hpp"
#include "replay_trace/replay.hpp"
#include "replay_trace/trace.hpp"

namespace replay_trace {

using example::usage_error;

struct command_line {
  std::optional<std::string> trace_file;         ///< empty: generate one
  std::optional<trace_format> format;            ///< empty: recognise it by the content
  std::optional<std::uint64_t> capacity_blocks;  ///< empty: unlimited
  std::vector<std::string> policies{"lru"};      ///< all of them for `--policy all`
  std::optional<std::uint32_t> block_tokens;     ///< empty: the trace's own
  llmmem::model_shape model = llmmem::find_model("llama3-70b");
  std::optional<std::string> chart_file;
  std::uint64_t seed = 1;
  bool json = false;
  bool skip_bad = false;
  std::optional<tier_blocks> tiers;  ///< below a cache of `capacity_blocks`
};

/// A command line, or the requested help text.
struct parsed_command_line {
  command_line asked;
  std::optional<std::string> help;
};

namespace detail {

/// All policies' names: `a, b, c`.
[[nodiscard]] inline std::string policy_list() {
  std::string names;
  for (const std::string_view policy : policy_names)
    names += (names.empty() ? "" : ", ") + std::string(policy);
  return names;
}

[[nodiscard]] inline std::vector<std::string> usage_policies(const std::string& name) {
  if (name == "all") return {std::begin(policy_names), std::end(policy_names)};
  for (const std::string_view known : policy_names) {
    if (name == known) return {name};
  }
  for (const std::string_view known : lookahead_names) {
    if (name == known) return {name};
  }
  throw usage_error(example::given("--policy", name) + ": no such policy; there are " + policy_list() +
                    ", lookahead_N (N 4, 16, 64, 256 or 1024) and all");
}

/// All models' names, for an error text: `a, b, c`.
[[nodiscard]] inline std::string model_names() {
  std::string names;
  for (const llmmem::model_shape& model : llmmem::all_models()) {
    names += (names.empty() ? "" : ", ") + std::string(model.name);
  }
  return names;
}

}  // namespace detail

namespace detail {

/// Returns whether one of the policies knows future requests.
[[nodiscard]] inline bool sees_future(const std::vector<std::string>& policies) {
  return std::any_of(policies.begin(), policies.end(), [](const std::string& each) {
    return each == "min" ||
           std::find(lookahead_names.begin(), lookahead_names.end(), each) != lookahead_names.end();
  });
}

}  // namespace detail

/// Reads `arguments`, without the program's name.
/// @throws usage_error  with a text that names the option, its value and valid ones.
[[nodiscard]] inline parsed_command_line parse_command_line(std::vector<std::string> arguments) {
  CLI::App app("Replays a trace of LLM requests through a paged KV cache with prefix sharing and eviction.",
               "replay_trace");
  // The last of several wins, because scripts that pass arguments on may already have given some.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  std::optional<std::string> trace_file, format, capacity, block_tokens, model, chart, seed, tiers,
      block_bytes, tier_folder, pool;
  std::string policy = "lru";
  bool generate = false;
  command_line asked;
  app.add_option(
         "--trace", trace_file,
         "the trace: Mooncake JSONL, Azure CSV, Qwen-Bailian JSONL or BurstGPT CSV, plain or packed with "
         "gzip or zstd")
      ->type_name("FILE");
  app.add_flag("--generate", generate, "replay a built-in synthetic trace instead");
  app.add_option("--format", format,
                 "mooncake, azure, bailian or burstgpt (default: recognised by the content)")
      ->type_name("NAME");
  app.add_option("--capacity-blocks", capacity, "blocks the cache holds (default: unlimited)")
      ->type_name("N");
  app.add_option("--policy", policy,
                 detail::policy_list() +
                     ", lookahead_N (sees N waiting requests), or all; min knows the future (default: lru)")
      ->type_name("NAME");
  app.add_option("--block-tokens", block_tokens,
                 "tokens a block holds, and a hash id of the trace stands for (default: 512 or 16, as the "
                 "lines of mooncake "
                 "tell, else 16)")
      ->type_name("N");
  app.add_option("--model", model,
                 "model whose KV cache is sized (default: llama3-70b): " + detail::model_names())
      ->type_name("PRESET");
  app.add_option("--tiers", tiers,
                 "hbm=N,host=N,nvme=N: blocks of the cache, and of two slower tiers for evicted blocks")
      ->type_name("BLOCKS");
  app.add_option("--block-bytes", block_bytes,
                 "bytes of a block that --tiers move and check, a multiple of 8 (default: 16)")
      ->type_name("B");
  app.add_option("--tier-dir", tier_folder,
                 "folder for the file of the nvme tier (default: host memory replaces it)")
      ->type_name("DIR");
  app.add_option("--pool", pool,
                 "nodes that serve the trace alternately, each with --tiers of that size: separately, and as "
                 "one pool")
      ->type_name("NODES");
  app.add_flag("--json", asked.json, "JSON on standard output, all else on standard error");
  app.add_option(
         "--chart", chart,
         "draw hit ratio against capacity for all policies to this SVG file; with --tiers against the "
         "bytes of the tiers")
      ->type_name("FILE.svg");
  app.add_option("--seed", seed, "of the generator and of all other random numbers (default: 1)")
      ->type_name("N");
  app.add_flag("--skip-bad", asked.skip_bad,
               "count malformed lines and continue, instead of stopping at the first");
  if (auto help = example::parse(app, std::move(arguments))) return {asked, std::move(help)};

  if (trace_file && generate) throw usage_error("--trace and --generate exclude each other; give one");
  if (!trace_file && !generate) throw usage_error("nothing to replay; give --trace FILE or --generate");
  if (generate && (format || asked.skip_bad)) {
    throw usage_error(std::string(format ? "--format" : "--skip-bad") +
                      " is about a file; --generate reads none");
  }
  asked.trace_file = trace_file;
  if (format) {
    asked.format = find_format(*format);
    if (!asked.format) {
      throw usage_error(example::given("--format", *format) +
                        ": no such format; there are mooncake, azure, bailian and burstgpt");
    }
  }
  if (capacity) {
    asked.capacity_blocks = example::usage_count("--capacity-blocks", *capacity, 1, llmmem::max_blocks);
  }
  if (block_tokens) {
    asked.block_tokens = static_cast<std::uint32_t>(
        example::usage_count("--block-tokens", *block_tokens, 1, llmmem::max_block_tokens));
  }
  if (seed) asked.seed = example::usage_seed(*seed);
  asked.policies = detail::usage_policies(policy);
  if (model) {
    const auto models = llmmem::all_models();
    const auto chosen =
        std::find_if(models.begin(), models.end(), [&](const auto& each) { return each.name == *model; });
    if (chosen == models.end()) {
      throw usage_error(example::given("--model", *model) + ": no such model; there are " +
                        detail::model_names());
    }
    asked.model = *chosen;
  }
  asked.chart_file = chart;
  if (chart && trace_file) example::check_not_overwritten("--chart", *chart, "--trace", *trace_file);
  if (tiers) {
    if (capacity) throw usage_error("--tiers has the cache's blocks, as hbm=N; leave out --capacity-blocks");
    if (chart && pool) throw usage_error("--chart draws the tiers of one node; leave out --pool");
    if (chart && asked.policies.size() > 1)
      throw usage_error("--chart draws tiers under one policy; name it instead of --policy all");
    const auto [hbm, host, nvme] = example::usage_named_counts(
        "--tiers", *tiers, std::array<std::string_view, 3>{"hbm", "host", "nvme"}, 1U << 26);
    asked.capacity_blocks = hbm;
    asked.tiers = tier_blocks{.host = host, .nvme = nvme, .folder = tier_folder};
    if (block_bytes) {
      asked.tiers->block_bytes = example::usage_count("--block-bytes", *block_bytes, 8, 1U << 28);
      if (asked.tiers->block_bytes % 8 != 0)
        throw usage_error(example::given("--block-bytes", *block_bytes) + ": must be a multiple of 8");
    }
    if (pool) asked.tiers->nodes = static_cast<std::uint32_t>(example::usage_count("--pool", *pool, 2, 64));
    if (pool && detail::sees_future(asked.policies)) {
      throw usage_error("--policy " + policy + " sees one queue, and each node of --pool has its own; " +
                        "choose another policy");
    }
  } else if (block_bytes || tier_folder || pool) {
    throw usage_error(std::string(block_bytes   ? "--block-bytes"
                                  : tier_folder ? "--tier-dir"
                                                : "--pool") +
                      " is about the tiers; give --tiers hbm=N,host=N,nvme=N");
  }
  return {asked, std::nullopt};
}

}  // namespace replay_trace
