/// @file
/// What the run of a model with latents prints.
#pragma once

#include <fmt/format.h>

#include <string>

#include "paged_decode/latent_run.hpp"

namespace paged_decode {

[[nodiscard]] inline std::string to_json(const experiment& what, latent_form form,
                                         const latent_finding& found) {
  std::string errors;
  for (const latent_error& each : found.errors) {
    errors += fmt::format(R"({}{{"kv": "{}", "rms": {:.3g}, "most": {:.3g}, "changed": {}, "rows": {}}})",
                          errors.empty() ? "" : ", ", name_of(each.form), each.of.root_mean_square,
                          each.of.most, each.of.changed, each.of.rows);
  }
  const paged_counts& of = found.counts;
  return fmt::format(
      R"({{"model": "mla", "tokens": {}, "digest": "{:016x}", "contiguous_digest": "{:016x}", )"
      R"("permuted_digest": "{:016x}", "one_by_one_digest": "{:016x}", "identical": {}, "kv": "{}", )"
      R"("bytes_per_token": {}, "steps": {}, "contiguous_steps": {}, "most_blocks": {}, )"
      R"("most_unshared_blocks": {}, "prompt_tokens": {}, "shared_tokens": {}, "copies_on_write": {}, )"
      R"("drafted": {}, "accepted": {}, "rolled_back": {}, "logits_rms": {:.3g}, "expanded_most": {:.3g}, )"
      R"("errors": [{}]}})"
      "\n",
      found.paged.answer_tokens(what.plan), found.paged.digest(), found.contiguous.digest(),
      found.permuted.digest(), found.one_by_one.digest(), found.is_identical(), name_of(form),
      found.bytes_per_token, found.paged.steps, found.contiguous.steps, of.block_capacity, of.most_unshared,
      of.prompt_tokens, of.shared_tokens, of.copies_on_write, found.paged.drafted, found.paged.accepted,
      of.rolled_back, found.logits_size, found.expanded.most, errors);
}

[[nodiscard]] inline std::string to_report(const experiment& what, latent_form form,
                                           const latent_finding& found) {
  const paged_counts& of = found.counts;
  std::string text = fmt::format(
      "{} tokens in {} answers, records of {} latents and {} rotary elements in {}: {} bytes a token in {} "
      "layers\n"
      "  contiguous cache   digest {:016x}, {} steps\n"
      "  token by token     digest {:016x}, {} steps\n"
      "  paged cache        digest {:016x}, {} steps\n"
      "  blocks permuted    digest {:016x}\n"
      "  {}\n"
      "  blocks             {} at most, {} if nothing were shared\n"
      "  prefixes           {} of {} prompt tokens found in the cache\n"
      "  drafts             {} guessed, {} right, {} taken back\n"
      "  keys and values    of each head, made of the latents: latents in floats give their logits within "
      "{:.1e}, of an rms of {:.3g}\n",
      found.paged.answer_tokens(what.plan), found.paged.transcripts.size(), what.shape.latents,
      what.shape.rotary_dim, name_of(form), found.bytes_per_token, what.shape.layers,
      found.contiguous.digest(), found.contiguous.steps, found.one_by_one.digest(), found.one_by_one.steps,
      found.paged.digest(), found.paged.steps, found.permuted.digest(),
      found.is_identical() ? "identical: every token, every bit of every logit" : "NOT IDENTICAL",
      of.block_capacity, of.most_unshared, of.shared_tokens, of.prompt_tokens, found.paged.drafted,
      found.paged.accepted, of.rolled_back, found.expanded.most, found.logits_size);
  if (found.errors.empty()) return text;
  text += "told the same tokens, logits differ from those of keys and values by\n";
  for (const latent_error& each : found.errors) {
    text += fmt::format(
        "  {:<12} rms {:.2e}, at most {:.2e}; the likeliest token is another in {} of {} rows\n",
        name_of(each.form), each.of.root_mean_square, each.of.most, each.of.changed, each.of.rows);
  }
  return text;
}

}  // namespace paged_decode
