/// @file
/// The program: its runs and its output.
#pragma once

#include <llmmem/error.hpp>

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "common/program.hpp"
#include "paged_decode/command_line.hpp"
#include "paged_decode/comparison.hpp"
#include "paged_decode/form_chart.hpp"
#include "paged_decode/latent_report.hpp"

namespace paged_decode {

using example::exit_status;

[[nodiscard]] inline std::string to_json(const command_line& asked, const finding& found) {
  std::string errors;
  for (const form_error& each : found.errors) {
    errors += fmt::format(R"({}{{"kv": "{}", "rms": {:.3g}, "most": {:.3g}, "changed": {}, "rows": {}}})",
                          errors.empty() ? "" : ", ", name_of(each.form), each.root_mean_square, each.most,
                          each.changed, each.rows);
  }
  const paged_counts& of = found.counts;
  return fmt::format(
      R"({{"tokens": {}, "digest": "{:016x}", "contiguous_digest": "{:016x}", "permuted_digest": "{:016x}", )"
      R"("identical": {}, "kv": "{}", "steps": {}, "contiguous_steps": {}, "most_blocks": {}, )"
      R"("most_unshared_blocks": {}, "prompt_tokens": {}, "shared_tokens": {}, "copies_on_write": {}, )"
      R"("drafted": {}, "accepted": {}, "rolled_back": {}, "logits_rms": {}, "errors": [{}]}})"
      "\n",
      found.paged.answer_tokens(asked.what.plan), found.paged.digest(), found.contiguous.digest(),
      found.permuted.digest(), found.is_identical(), name_of(asked.what.cache.form), found.paged.steps,
      found.contiguous.steps, of.block_capacity, of.most_unshared, of.prompt_tokens, of.shared_tokens,
      of.copies_on_write, found.paged.drafted, found.paged.accepted, of.rolled_back,
      found.errors.empty() ? "null" : fmt::format("{:.3g}", found.logits_size), errors);
}

[[nodiscard]] inline std::string to_report(const command_line& asked, const finding& found) {
  const paged_counts& of = found.counts;
  std::string text = fmt::format(
      "{} tokens in {} answers, keys and values in {}\n"
      "  contiguous cache   digest {:016x}, {} steps\n"
      "  paged cache        digest {:016x}, {} steps\n"
      "  blocks permuted    digest {:016x}\n"
      "  {}\n"
      "  blocks             {} at most, {} if nothing were shared\n"
      "  prefixes           {} of {} prompt tokens found in the cache\n"
      "  samples            {} copies on write\n"
      "  drafts             {} guessed, {} right, {} taken back\n",
      found.paged.answer_tokens(asked.what.plan), found.paged.transcripts.size(),
      name_of(asked.what.cache.form), found.contiguous.digest(), found.contiguous.steps, found.paged.digest(),
      found.paged.steps, found.permuted.digest(),
      found.is_identical() ? "identical: every token, every bit of every logit" : "NOT IDENTICAL",
      of.block_capacity, of.most_unshared, of.shared_tokens, of.prompt_tokens, of.copies_on_write,
      found.paged.drafted, found.paged.accepted, of.rolled_back);
  if (found.errors.empty()) return text;
  text += fmt::format("told the same tokens, logits differ from those of floats, whose rms is {:.3g}, by\n",
                      found.logits_size);
  for (const form_error& each : found.errors) {
    text +=
        fmt::format("  {:<5} rms {:.2e}, at most {:.2e}; the likeliest token is another in {} of {} rows\n",
                    name_of(each.form), each.root_mean_square, each.most, each.changed, each.rows);
  }
  return text;
}

/// Conversations over tiers.
inline void run_tiers(const command_line& asked, std::FILE* out) {
  const tiers_finding found = compare_tiers(asked.what, *asked.tiers);
  example::write(out, asked.json ? to_json(found) : to_report(*asked.tiers, asked.what, found),
                 "standard output");
  if (!found.is_identical())
    throw llmmem::error("the cache with tiers came to other bits than the one with room for all");
}

/// Requests over a cache that is split between a device and the host.
inline void run_split(const command_line& asked, std::FILE* out) {
  const split_finding found = compare_split(asked.what, *asked.split);
  example::write(
      out, asked.json ? to_json(*asked.split, asked.what, found) : to_report(*asked.split, asked.what, found),
      "standard output");
  if (!found.is_identical())
    throw llmmem::error("the split cache came to other bits than the contiguous one");
}

/// Requests to a model with latents.
inline void run_latents(const command_line& asked, std::FILE* out) {
  const latent_finding found = compare_latents(asked.what, *asked.latents);
  example::write(
      out,
      asked.json ? to_json(asked.what, *asked.latents, found) : to_report(asked.what, *asked.latents, found),
      "standard output");
  if (!found.is_identical())
    throw llmmem::error("the paged cache of latents came to other bits than the contiguous one");
  if (!found.is_expanded())
    throw llmmem::error(
        "attention to latents is farther from that to keys and values than roundings explain");
}

/// A trained model on a text.
inline void run_perplexity(const command_line& asked, std::FILE* out, std::FILE* notes) {
  const perplexity_plan& plan = *asked.quality;
  if (plan.chart) static_cast<void>(example::open_for_writing(*plan.chart));  // fail before the work
  const trained_model made = load_trained_model(plan.weights, notes);
  const std::vector<std::uint8_t> text = detail::read_tokens(plan.text, plan.most_tokens);
  const perplexity_finding found =
      measure_perplexity(made, plan.text, text, asked.what.cache, plan.windows, plan.budgets,
                         plan.with_cold ? cold_forms() : std::vector<cold_form>{});
  example::write(out, asked.json ? to_json(found) : to_report(plan, found), "standard output");
  if (plan.chart) example::write_file(*plan.chart, draw_svg(found));
}

/// @param arguments  without the program's name.
/// @return failure if the paged cache gave different bits.
[[nodiscard]] inline exit_status run_application(const std::vector<std::string>& arguments, std::FILE* out,
                                                 std::FILE* notes) {
  return example::run({"paged_decode", "lower --requests, --answer or the model's numbers"}, arguments, out,
                      notes, parse_command_line, [&](const command_line& asked) {
                        if (asked.tiers) return run_tiers(asked, out);
                        if (asked.split) return run_split(asked, out);
                        if (asked.latents) return run_latents(asked, out);
                        if (asked.quality) return run_perplexity(asked, out, notes);
                        const finding found = compare(asked.what);
                        const std::string text = asked.json ? to_json(asked, found) : to_report(asked, found);
                        example::write(out, text, "standard output");
                        if (!found.is_identical())
                          throw llmmem::error("the paged cache came to other bits than the contiguous one");
                      });
}

}  // namespace paged_decode
