/// @file
/// The program: its arguments, its run and its output.
#pragma once

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/program.hpp"
#include "common/standard_streams.hpp"
#include "common/text.hpp"
#include "refit/job.hpp"
#include "refit/saved_run.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/training_text.hpp"

namespace refit_example {

using example::exit_status;
using example::usage_error;

struct command_line {
  job_options job;
  std::optional<std::string> text;
  std::optional<std::string> from;  ///< a folder of checkpoints, in place of training
  bool prints_plan = false;
  bool json = false;
};

/// Reads `arguments`, without the program's name; returns the help text if that was requested.
/// @throws usage_error
[[nodiscard]] inline std::pair<command_line, std::optional<std::string>> parse_command_line(
    std::vector<std::string> arguments) {
  CLI::App app("Trains a small GPT in shards, and refits an engine in another split with its weights.",
               "refit");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  command_line asked;
  job_options& job = asked.job;
  std::optional<std::string> trainers, engines, steps, every, blocks, width, seed, rate, form, sends;
  app.add_option("--trainers", trainers, "ranks that train, with ZeRO 3 (default: 2)")->type_name("N");
  app.add_option("--engines", engines, "ranks that serve, with tensor parallelism (default: 2)")
      ->type_name("N");
  app.add_option("--steps", steps, "of training (default: 8)")->type_name("N");
  app.add_option("--refit-every", every, "steps from one refit to the next (default: 1)")->type_name("N");
  app.add_option("--blocks", blocks, "transformer blocks (default: 2)")->type_name("N");
  app.add_option("--width", width, "of the residual stream, a multiple of 4 (default: 64)")->type_name("N");
  app.add_option("--rate", rate, "of Adam, in millionths (default: 10)")->type_name("N");
  app.add_option("--form", form, "of the engine's matrices: bf16 (default), int8, fp8")->type_name("FORM");
  app.add_option("--send", sends, "changes (default), all")->type_name("WHAT");
  app.add_option("--text", asked.text, "what to train on (default: that of train_gpt)")->type_name("FILE");
  app.add_option("--seed", seed, "of weights and batches (default: 1)")->type_name("N");
  app.add_option(
         "--from", asked.from,
         "take the weights of the newest checkpoint that train_gpt --checkpoint-dir saved here, and train "
         "nothing")
      ->type_name("DIR");
  app.add_flag("--plan", asked.prints_plan, "the bytes of each link on standard error");
  app.add_flag("--json", asked.json, "JSON on standard output, all else on standard error");
  if (auto help = example::parse(app, std::move(arguments))) return {asked, std::move(help)};
  const bool trains = trainers || steps || every || blocks || width || seed || rate || sends || asked.text;
  if (asked.from && trains) {
    throw usage_error(
        "--from takes weights that are trained: --engines, --form, --plan and --json go with it; leave the "
        "other options out");
  }
  const auto count = [](const char* option, const std::optional<std::string>& text, std::uint64_t least,
                        std::uint64_t most, auto& into) {
    if (!text) return;
    const std::uint64_t value = example::usage_count(option, *text, least, most);
    into = static_cast<std::remove_reference_t<decltype(into)>>(value);
  };
  count("--trainers", trainers, 1, 16, job.trainers);
  count("--engines", engines, 1, 16, job.engines);
  count("--steps", steps, 1, 100'000, job.steps);
  count("--refit-every", every, 1, 100'000, job.every);
  count("--blocks", blocks, 1, 64, job.shape.blocks);
  count("--width", width, 4, 4096, job.shape.width);
  std::uint64_t millionths = 10;
  count("--rate", rate, 1, 1'000'000, millionths);
  job.rate = static_cast<double>(millionths) * 1e-6;
  if (seed) job.seed = example::usage_seed(*seed);
  if (job.shape.width % 4 != 0)
    throw usage_error(example::given("--width", *width) + ": must be a multiple of 4, the heads");
  if (form && *form != "bf16") {
    if (*form != "int8" && *form != "fp8")
      throw usage_error(example::given("--form", *form) + ": there are bf16, int8, fp8");
    job.form = *form == "int8" ? weight_form::int8 : weight_form::fp8;
  }
  if (sends && *sends != "changes") {
    if (*sends != "all") throw usage_error(example::given("--send", *sends) + ": there are changes, all");
    job.sends = llmmem::refit_sends::all;
  }
  return {asked, std::nullopt};
}

namespace detail {

/// JSON has no number that is not finite, and a run may have diverged.
[[nodiscard]] inline std::string loss_json(double loss) {
  return std::isfinite(loss) ? fmt::format("{:.6f}", loss) : std::string("null");
}

}  // namespace detail

[[nodiscard]] inline std::string to_json(const job_result& result) {
  std::string lines;
  for (const refit_line& each : result.lines) {
    lines += fmt::format(
        R"({}{{"step": {}, "version": {}, "loss": {}, "elements_bytes": {}, "sent_bytes": {}, "links": {}, )"
        R"("changed_links": {}, "dropped_blocks": {}, "matched_tokens": {}, "wrong_tensors": {}}})",
        lines.empty() ? "\n  " : ",\n  ", each.step, each.version, detail::loss_json(each.loss),
        each.elements_bytes, each.sent_bytes, each.links, each.changed_links, each.dropped_blocks,
        each.matched_tokens, each.wrong_tensors);
  }
  return fmt::format("{{\"image_bytes\": {}, \"base_bytes\": {}, \"arrival_bytes\": {}, \"refits\": [{}]}}\n",
                     result.image_bytes, result.base_bytes, result.arrival_bytes, lines);
}

[[nodiscard]] inline std::string to_report(const command_line& asked, const job_result& result) {
  const auto bytes = [](std::uint64_t n) { return example::bytes_text(static_cast<double>(n)); };
  std::string text = fmt::format(
      "{} trainers, {} engines; a version {} on all engines, two of them; trainers keep {}, engines {}\n\n"
      "  {:>6} {:>8} {:>8} {:>11} {:>11} {:>7} {:>9} {:>9} {:>6}\n",
      asked.job.trainers, asked.job.engines, bytes(result.image_bytes), bytes(result.base_bytes),
      bytes(result.arrival_bytes), "step", "version", "loss", "weights", "sent", "of it", "changes",
      "KV blocks", "wrong");
  for (const refit_line& each : result.lines) {
    text += fmt::format(
        "  {:>6} {:>8} {:>8.4f} {:>11} {:>11} {:>6.1f}% {:>4} of {:<2} {:>9} {:>6}\n", each.step,
        each.version, each.loss, bytes(each.elements_bytes), bytes(each.sent_bytes),
        100 * static_cast<double>(each.sent_bytes) / static_cast<double>(each.elements_bytes),
        each.changed_links, each.links, each.dropped_blocks, each.wrong_tensors + each.matched_tokens);
  }
  return text;
}

namespace detail {

inline void refit_from(const command_line& asked, std::FILE* out, std::FILE* notes) {
  const saved_result result = refit_saved(*asked.from, asked.job.engines, asked.job.form);
  if (asked.prints_plan) fmt::print(notes, "{}", result.plan);
  const refit_line& line = result.line;
  const auto bytes = [](std::uint64_t n) { return example::bytes_text(static_cast<double>(n)); };
  const auto counted = [](std::uint32_t n, const char* one) {
    return fmt::format("{} {}{}", n, one, n == 1 ? "" : "s");
  };
  example::write(
      out,
      asked.json
          ? fmt::format(R"({{"checkpoint": {}, "saved_by": {}, "step": {}, "loss": {}, "image_bytes": {}, )"
                        R"("elements_bytes": {}, "read_bytes": {}, "sent_bytes": {}, "checksum": "{:08x}", )"
                        R"("wrong_tensors": {}}})"
                        "\n",
                        example::json_string(result.checkpoint), result.saved_by, line.step,
                        loss_json(line.loss), result.image_bytes, line.elements_bytes, result.read_bytes,
                        line.sent_bytes, result.checksum, line.wrong_tensors)
          : fmt::format("{}: step {} of {}, loss {:.4f}\n{}: a version {} on all of them, {} read, {} "
                        "sent, {} tensors wrong; checksum {:08x}\n",
                        result.checkpoint, line.step, counted(result.saved_by, "rank"), line.loss,
                        counted(asked.job.engines, "engine"), bytes(result.image_bytes),
                        bytes(result.read_bytes), bytes(line.sent_bytes), line.wrong_tensors,
                        result.checksum),
      "standard output");
  if (line.wrong_tensors != 0)
    throw llmmem::error(
        fmt::format("{} tensors of the engines differ from the checkpoint's", line.wrong_tensors));
}

inline void run_checked(const command_line& asked, std::FILE* out, std::FILE* notes) {
  if (asked.from) return refit_from(asked, out, notes);
  train_gpt::named_text from = train_gpt::load_text(asked.text);
  const train_gpt::corpus text(from.name, std::move(from.text), asked.job.shape);
  const job_result result = run_job(asked.job, text);
  if (asked.prints_plan) fmt::print(notes, "{}", result.plan);
  example::write(out, asked.json ? to_json(result) : to_report(asked, result), "standard output");
  for (const refit_line& each : result.lines) {
    if (each.wrong_tensors + each.matched_tokens != 0)
      throw llmmem::error(fmt::format("after step {} engines differ from the trainers", each.step));
  }
}

}  // namespace detail

/// Runs the program. Errors become one line on `notes` and an exit status; with `--json`, `out` gets the JSON
/// or nothing.
[[nodiscard]] inline exit_status run_application(const std::vector<std::string>& arguments, std::FILE* out,
                                                 std::FILE* notes) {
  const example::program self{.name = "refit", .too_large = "ask for a smaller model"};
  return example::run(self, arguments, out, notes, parse_command_line,
                      [&](const command_line& asked) { detail::run_checked(asked, out, notes); });
}

}  // namespace refit_example
