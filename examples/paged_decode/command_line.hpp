/// @file
/// The command line.
#pragma once

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/program.hpp"
#include "common/text.hpp"
#include "paged_decode/comparison.hpp"
#include "paged_decode/latent_run.hpp"
#include "paged_decode/perplexity.hpp"
#include "paged_decode/split_run.hpp"
#include "paged_decode/stored_form.hpp"
#include "paged_decode/tiers_run.hpp"

namespace paged_decode {

using example::usage_error;

struct command_line {
  experiment what{};
  std::optional<tiers_experiment> tiers{};   ///< conversations instead of requests
  std::optional<split_experiment> split{};   ///< requests on a device and the host
  std::optional<perplexity_plan> quality{};  ///< a trained model on a text instead of requests
  std::optional<latent_form> latents{};      ///< requests to a model with latents
  bool json = false;
};

namespace detail {

[[nodiscard]] inline kv_form form_of(const std::string& name) {
  for (const kv_form form : all_forms) {
    if (name == name_of(form)) return form;
  }
  throw usage_error(example::given("--kv", name) +
                    ": no such form; there are f32, bf16, fp8, int8, int4_by_token");
}

[[nodiscard]] inline latent_form latent_form_of(const std::string& name) {
  for (const latent_form form : latent_forms) {
    if (name == name_of(form)) return form;
  }
  throw usage_error(example::given("--kv", name) +
                    ": no record of latents; with --model mla there are f32, bf16, fp8_ds_mla, nvfp4_ds_mla");
}

/// The requirements of records, and options that a model with latents does not have.
inline void check_latents(const model_config& shape, const std::vector<std::string>& given) {
  if (shape.latents % 16 != 0)
    throw usage_error(example::given("--latents", fmt::to_string(shape.latents)) +
                      ": must be a multiple of 16, a group of nvfp4_ds_mla");
  if (shape.rotary_dim % 8 != 0)
    throw usage_error(example::given("--rotary", fmt::to_string(shape.rotary_dim)) +
                      ": must be a multiple of 8");
  for (const std::string& each : given) {
    if (each == "--keep-tokens" || each == "--sinks" || each == "--recent" || each == "--cold" ||
        each == "--chart")
      throw usage_error(each +
                        " is measured on a trained model, and train_gpt trains none with latents: not for "
                        "--model mla; leave it out");
    if (each == "--weights" || each == "--kv-heads" || each == "--hnd")
      throw usage_error(each + " is not for --model mla, whose cache has one head of records; leave it out");
  }
}

/// The requirements of the attention and int8 kernels on a head.
inline void check_shape(const model_config& shape, bool with_int8) {
  const auto wrong = [](const char* option, std::uint32_t value, const std::string& why) {
    return usage_error(example::given(option, fmt::to_string(value)) + ": " + why);
  };
  if (shape.query_heads % shape.kv_heads != 0)
    throw wrong("--query-heads", shape.query_heads,
                fmt::format("must be a multiple of --kv-heads, {}", shape.kv_heads));
  const std::uint32_t unit = with_int8 ? int8_group : 8;
  if (shape.head_dim % unit != 0)
    throw wrong("--head-dim", shape.head_dim,
                with_int8
                    ? fmt::format("must be a multiple of {}, a group of int8 (--no-errors and another --kv "
                                  "than int8 and int4_by_token take multiples of 8)",
                                  unit)
                    : fmt::format("must be a multiple of {}", unit));
}

/// How many tokens to keep, for each budget of a list.
/// @param list  `16,32`.
[[nodiscard]] inline std::vector<llmmem::token_budget> budgets_of(const std::string& list,
                                                                  const std::optional<std::string>& sinks,
                                                                  const std::optional<std::string>& recent) {
  constexpr std::uint64_t most = std::uint64_t{1} << 20U;
  std::vector<llmmem::token_budget> out;
  for (std::size_t at = 0; at <= list.size();) {
    const std::size_t end = std::min(list.find(',', at), list.size());
    const auto budget =
        static_cast<std::uint32_t>(example::usage_count("--keep-tokens", list.substr(at, end - at), 2, most));
    llmmem::token_budget each{.budget = budget, .sinks = std::min(4U, budget / 4), .recent = budget / 2};
    if (sinks) each.sinks = static_cast<std::uint32_t>(example::usage_count("--sinks", *sinks, 0, most));
    if (recent) each.recent = static_cast<std::uint32_t>(example::usage_count("--recent", *recent, 1, most));
    if (std::uint64_t{each.sinks} + each.recent > budget) {
      throw usage_error(
          fmt::format("--keep-tokens {}: {} sinks and {} recent tokens are more; lower --sinks or "
                      "--recent",
                      budget, each.sinks, each.recent));
    }
    out.push_back(each);
    at = end + 1;
  }
  return out;
}

/// A trained model determines its shape, and a text its tokens, so options about either would have no effect.
/// @param given  the names of all given options.
[[nodiscard]] inline perplexity_plan quality_of(const std::optional<std::string>& weights,
                                                const std::optional<std::string>& text,
                                                const std::optional<std::string>& tokens,
                                                const std::vector<std::string>& given) {
  constexpr std::array<std::string_view, 12> fitting{"--cold",  "--weights",      "--text",  "--tokens",
                                                     "--chart", "--block-tokens", "--hnd",   "--permute",
                                                     "--json",  "--keep-tokens",  "--sinks", "--recent"};
  if (!weights) throw usage_error("--text and --tokens are about a trained model; give --weights DIR");
  if (!text) throw usage_error("--weights needs a text to tell perplexity on; give --text FILE");
  for (const std::string& each : given) {
    if (std::find(fitting.begin(), fitting.end(), each) == fitting.end()) {
      throw usage_error(each +
                        " is of no effect with --weights, which measures the trained model with all "
                        "forms; leave it out");
    }
  }
  perplexity_plan out{.weights = *weights, .text = *text};
  if (tokens) out.most_tokens = example::usage_count("--tokens", *tokens, 2, std::uint64_t{1} << 30U);
  return out;
}

}  // namespace detail

/// Reads `arguments`, without the program's name; returns the help text if that was requested.
/// @throws usage_error
[[nodiscard]] inline std::pair<command_line, std::optional<std::string>> parse_command_line(
    std::vector<std::string> arguments) {
  CLI::App app(
      "Decodes with a small transformer over a paged cache, and compares it with a contiguous one, bit for "
      "bit.",
      "paged_decode");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  command_line asked;
  bool without_errors = false;
  bool with_cold = false;
  bool is_hnd = false;
  std::optional<std::string> form, seed, permutation, tiers, split, tier_folder, device_blocks, weights, text,
      text_tokens, model_name, budgets, sinks, recent, chart;
  std::uint32_t latents = 128;
  conversation_plan talks;
  struct number {
    const char* option;
    const char* about;
    std::uint32_t least;
    std::uint32_t most;
    std::uint32_t* into;
    std::optional<std::string> text{};
  };
  service_plan& plan = asked.what.plan;
  model_config& shape = asked.what.shape;
  std::vector<number> numbers{
      {"--requests", "with a prompt each", 1, 64, &plan.requests},
      {"--prefix", "tokens that all prompts begin with", 0, 4096, &plan.prefix_tokens},
      {"--own", "tokens behind them, of each prompt alone", 1, 4096, &plan.own_tokens},
      {"--answer", "tokens of each answer", 1, 4096, &plan.answer_tokens},
      {"--chunk", "tokens of a prompt, a step", 1, 4096, &plan.chunk_tokens},
      {"--samples", "of every second request", 1, 32, &plan.samples},
      {"--drafts", "tokens guessed ahead for the others", 0, 16, &plan.drafts},
      {"--block-tokens", "of the cache", 1, 256, &asked.what.cache.block_tokens},
      {"--layers", "of the model", 1, 64, &shape.layers},
      {"--query-heads", "of the model", 1, 64, &shape.query_heads},
      {"--kv-heads", "of the model", 1, 64, &shape.kv_heads},
      {"--head-dim", "elements of a key and of a value", 8, 256, &shape.head_dim},
      {"--conversations", "with --tiers", 1, 1024, &talks.conversations},
      {"--turns", "of each conversation", 1, 64, &talks.turns},
      {"--message", "tokens that a turn begins with", 1, 4096, &talks.message_tokens},
      {"--latents", "with --model mla: elements that a token's keys and values are made of", 16, 512,
       &latents},
      {"--rotary", "with --model mla: rotated elements of a key, which all heads share", 8, 256,
       &shape.rotary_dim},
      {"--value-dim", "with --model mla: elements of a head's value", 8, 256, &shape.value_dim},
      {"--window", "tokens that every second layer attends to, 0 for all", 0, 4096, &shape.window},
  };
  app.add_option("--model", model_name,
                 "gqa, grouped queries, or mla, multi-head latent attention (default: gqa)")
      ->type_name("KIND");
  app.add_option("--kv", form,
                 "form of keys and values: f32, bf16, fp8, int8, int4_by_token; with --model mla f32, bf16, "
                 "fp8_ds_mla, nvfp4_ds_mla (default: bf16)")
      ->type_name("FORM");
  for (number& each : numbers)
    app.add_option(each.option, each.text, fmt::format("{} (default: {})", each.about, *each.into))
        ->type_name("N");
  app.add_flag("--hnd", is_hnd, "a head's tokens lie side by side, not a token's heads");
  app.add_option("--permute", permutation, "hand blocks out in an order made up of this (default: in turn)")
      ->type_name("N");
  app.add_option("--seed", seed, "of the weights and prompts (default: 1)")->type_name("N");
  app.add_flag("--no-errors", without_errors, "leave out what other forms than f32 change");
  app.add_option(
         "--tiers", tiers,
         "host=N,file=N: serve conversations whose contexts do not fit the cache, with tiers of so many "
         "blocks beneath it")
      ->type_name("BLOCKS");
  app.add_option("--split", split,
                 "device=N,host=N: some sequences attend on a device, the others on the host, each with so "
                 "many threads")
      ->type_name("THREADS");
  app.add_option("--device-blocks", device_blocks,
                 "of the cache above --tiers (default: a tenth of all contexts), or of the device with "
                 "--split (default: half of what all sequences take)")
      ->type_name("N");
  app.add_option("--tier-dir", tier_folder,
                 "folder of the file tier (default: the system's for temporary files)")
      ->type_name("DIR");
  app.add_option(
         "--weights", weights,
         "folder of train_gpt's checkpoints: tell that model's perplexity on --text with every form of "
         "keys and values")
      ->type_name("DIR");
  app.add_option("--text", text,
                 "with --weights: a text that the model was not trained on; each byte is a token")
      ->type_name("FILE");
  app.add_option("--tokens", text_tokens,
                 fmt::format("with --weights: of the text, from its beginning (default: {})",
                             perplexity_plan{}.most_tokens))
      ->type_name("N");
  app.add_option(
         "--keep-tokens", budgets,
         "with --weights: also measure caches that keep this many tokens of each window (several: 16,32): "
         "sinks, recent ones, and those with the largest sums of attention weights")
      ->type_name("N,...");
  app.add_option(
         "--sinks", sinks,
         "with --keep-tokens: first tokens, always kept (default: 4, at most a quarter of the budget)")
      ->type_name("N");
  app.add_option("--recent", recent,
                 "with --keep-tokens: last tokens, always kept (default: half of the budget)")
      ->type_name("N");
  app.add_flag("--cold", with_cold,
               "with --weights: also measure bf16 blocks that have been to a cold tier, through each codec");
  app.add_option("--chart", chart,
                 "with --weights: draw divergence against bytes for all that is measured to this SVG file")
      ->type_name("FILE.svg");
  app.add_flag("--json", asked.json, "JSON on standard output");
  const auto given_options = [&] {
    std::vector<std::string> names;
    for (const CLI::Option* const each : app.get_options()) {
      if (each->count() != 0) names.push_back(each->get_name());
    }
    return names;
  };
  if (auto help = example::parse(app, std::move(arguments))) return {asked, std::move(help)};
  if (model_name && *model_name != "gqa" && *model_name != "mla")
    throw usage_error(example::given("--model", *model_name) + ": no such model; there are gqa, mla");
  const bool is_mla = model_name && *model_name == "mla";
  if (form && !is_mla) asked.what.cache.form = detail::form_of(*form);
  for (const number& each : numbers) {
    if (each.text)
      *each.into =
          static_cast<std::uint32_t>(example::usage_count(each.option, *each.text, each.least, each.most));
  }
  if (seed) plan.seed = example::usage_seed(*seed);
  if (permutation)
    asked.what.cache.permutation =
        example::usage_count("--permute", *permutation, 1, std::uint64_t{1} << 32U);
  if (is_hnd) asked.what.cache.heads_in_block = llmmem::paging::head_order::hnd;
  asked.what.with_errors = !without_errors;
  const auto add_place = [&] {
    if (tiers && split)
      throw usage_error("--split and --tiers are runs of different kinds; leave one of them out");
    if (split && tier_folder)
      throw usage_error("--tier-dir is about the tiers, and has no effect with --split; leave it out");
    if (split) {
      const auto [device, host] = example::usage_named_counts(
          "--split", *split, std::array<std::string_view, 2>{"device", "host"}, 256, "threads");
      asked.split.emplace();
      asked.split->device_threads = static_cast<std::uint32_t>(device);
      asked.split->host_threads = static_cast<std::uint32_t>(host);
      if (device_blocks)
        asked.split->device_blocks = example::usage_count("--device-blocks", *device_blocks, 1, 1U << 24);
      asked.what.with_errors = false;
    } else if (tiers) {
      asked.tiers.emplace();
      asked.tiers->plan = talks;
      asked.tiers->plan.answer_tokens = plan.answer_tokens;
      asked.tiers->plan.chunk_tokens = plan.chunk_tokens;
      asked.tiers->plan.seed = plan.seed;
      const auto [host, file] = example::usage_named_counts(
          "--tiers", *tiers, std::array<std::string_view, 2>{"host", "file"}, 1U << 24);
      asked.tiers->sizes = {.host = host, .file = file};
      asked.tiers->sizes.folder = tier_folder.value_or(std::filesystem::temp_directory_path().string());
      if (device_blocks)
        asked.tiers->device_blocks = example::usage_count("--device-blocks", *device_blocks, 1, 1U << 24);
      asked.what.with_errors = false;
    } else if (tier_folder || device_blocks) {
      throw usage_error(std::string(tier_folder ? "--tier-dir" : "--device-blocks") +
                        " is about the tiers; give --tiers host=N,file=N" +
                        (tier_folder ? "" : ", or --split device=N,host=N for a device and its host"));
    }
  };
  if (is_mla) {
    const std::vector<std::string> given = given_options();
    if (std::find(given.begin(), given.end(), "--head-dim") == given.end()) shape.head_dim = 32;
    shape.latents = latents;
    detail::check_latents(shape, given);
    asked.latents = form ? detail::latent_form_of(*form) : latent_form::bf16;
    asked.what.cache.record = record_of(*asked.latents, shape.latents, shape.rotary_dim);
    asked.what.cache.record_name = name_of(*asked.latents);
    add_place();
    return {asked, std::nullopt};
  }
  for (const std::string& each : given_options()) {
    if (each == "--latents" || each == "--rotary" || each == "--value-dim")
      throw usage_error(each + " is about a model with latents; give --model mla");
  }
  if ((sinks || recent) && !budgets)
    throw usage_error("--sinks and --recent are about tokens to keep; give --keep-tokens N");
  if (budgets && !weights) {
    throw usage_error(
        "--keep-tokens measures what dropped tokens cost a trained model; give --weights DIR and --text "
        "FILE");
  }
  if (with_cold && !weights) {
    throw usage_error(
        "--cold measures what the codecs of a cold tier cost a trained model; give --weights DIR and --text "
        "FILE");
  }
  if (chart && !weights)
    throw usage_error("--chart draws what forms cost a trained model; give --weights DIR and --text FILE");
  if (weights || text || text_tokens) {
    asked.quality = detail::quality_of(weights, text, text_tokens, given_options());
    if (budgets) asked.quality->budgets = detail::budgets_of(*budgets, sinks, recent);
    asked.quality->with_cold = with_cold;
    asked.quality->chart = chart;
    if (chart) example::check_not_overwritten("--chart", *chart, "--text", *text);
    return {asked, std::nullopt};
  }
  add_place();
  detail::check_shape(shape, asked.what.with_errors || is_grouped(asked.what.cache.form));
  return {asked, std::nullopt};
}

}  // namespace paged_decode
