/// @file
/// The cost of each form of keys and values for a trained model: its perplexity on unseen text.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/paging/ids.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/program.hpp"
#include "common/text.hpp"
#include "paged_decode/closing_cache.hpp"
#include "paged_decode/cold_cache.hpp"
#include "paged_decode/decoder.hpp"
#include "paged_decode/host_place.hpp"
#include "paged_decode/keeping_cache.hpp"
#include "paged_decode/paged_cache.hpp"
#include "paged_decode/stored_form.hpp"
#include "paged_decode/trained_model.hpp"
#include "train_gpt/exact_math.hpp"

namespace paged_decode {

/// The measurement to make.
struct perplexity_plan {
  std::string weights{};                        ///< a folder of train_gpt's checkpoints
  std::string text{};                           ///< a file
  std::uint64_t most_tokens = 8192;             ///< of the text, from its beginning
  std::uint32_t windows = 32;                   ///< windows that are decoded at once
  std::vector<llmmem::token_budget> budgets{};  ///< also measured, with each form that attention reads
  bool with_cold = false;                       ///< also blocks that have been to a cold tier
  std::optional<std::string> chart{};           ///< an SVG file to draw all of it to
};

/// The result of one form.
struct form_quality {
  kv_form form = kv_form::f32;
  std::uint64_t bytes_per_token = 0;  ///< of keys and values in all layers, scales included
  double perplexity = 0;              ///< e to the mean of -ln(probability of the actual token)
  double divergence = 0;              ///< mean over tokens of KL(floats || form), in nats
  double divergence_999 = 0;          ///< the divergence that 99.9% of all tokens are below
  std::uint64_t changed = 0;          ///< tokens whose likeliest successor differs from that with floats
  llmmem::token_budget budget{};      ///< of tokens to keep; 0: all
  std::uint64_t most_held = 0;        ///< tokens of a window in the cache at once, with a budget
  std::string cold_name{};            ///< of a cold tier's codec
  cold_counts cold{};
};

struct perplexity_finding {
  train_gpt::gpt_shape shape{};
  std::uint64_t predicted = 0;        ///< tokens
  std::vector<form_quality> forms{};  ///< f32, the reference, first
  std::vector<kv_form> left_out{};    ///< forms whose groups do not fit the model's heads
  std::vector<form_quality> kept{};   ///< with each budget and form of `all_forms`
  std::vector<form_quality> cold{};   ///< bf16 through each codec of `cold_forms`
};

/// ln of each token's probability.
[[nodiscard]] inline std::vector<double> log_probabilities(std::span<const float> logits) {
  const double most = static_cast<double>(*std::ranges::max_element(logits));
  std::vector<double> out(logits.size());
  double sum = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    out[i] = static_cast<double>(logits[i]) - most;
    sum += train_gpt::exact_exp(out[i]);
  }
  const double ln_sum = train_gpt::exact_log(sum);
  for (double& each : out)
    each -= ln_sum;
  return out;
}

namespace detail {

/// Reads the bytes of a file, up to that many; each is a token, as in train_gpt.
/// @throws llmmem::system_error  if it cannot be read.
[[nodiscard]] inline std::vector<std::uint8_t> read_tokens(const std::string& path, std::uint64_t most) {
  const example::file_handle file = example::open(path, "rb");
  std::vector<std::uint8_t> out(static_cast<std::size_t>(most));
  const std::size_t got = std::fread(out.data(), 1, out.size(), file.get());
  if (std::ferror(file.get()) != 0) throw example::file_error(path, "read");
  out.resize(got);
  return out;
}

/// One form's cache, and the sums of its results.
struct form_run {
  form_quality found{};
  std::unique_ptr<paged_cache<host_place>> cache{};
  std::unique_ptr<closing_cache> closing{};  // used instead for a form with closed blocks
  std::unique_ptr<keeping_cache> keeping{};  // used instead with a budget
  std::unique_ptr<cold_cache> cold{};        // used instead with a cold tier's codec
  double surprise = 0;                       // sum of -ln p
  std::vector<double> divergences{};
};

/// A window of a text: its tokens, after each of which the model predicts the next.
using text_window = std::span<const std::uint8_t>;

/// Decodes windows side by side, one token of each per step, as an engine does, so that all attended tokens
/// have gone through the cache.
/// @param windows  each of 2 tokens or more; longer ones first.
/// @param told     called with a window's number, the position and the logits after it.
template <kv_cache Cache, class Told>
void decode_windows(const trained_model& of, Cache& cache, std::span<const text_window> windows,
                    const Told& told) {
  using sequence = typename Cache::sequence;
  std::vector<sequence> sequences;
  std::vector<llmmem::token_id> tokens(windows.size());
  for (const text_window& each : windows) {
    const llmmem::token_id first = each.front();
    sequences.push_back(cache.create(std::span(&first, 1)));
  }
  std::vector<grown<sequence>> batch;
  for (std::size_t position = 0; position + 1 < windows.front().size(); ++position) {
    batch.clear();
    for (std::size_t w = 0; w < windows.size() && position + 1 < windows[w].size(); ++w) {
      tokens[w] = windows[w][position];
      batch.push_back({sequences[w], std::span(&tokens[w], 1)});
    }
    const rows_of_floats logits = decode(of, cache, std::span<const grown<sequence>>(batch));
    for (std::size_t w = 0; w < batch.size(); ++w)
      told(w, position, logits[w]);
  }
  for (const sequence each : sequences)
    cache.release(each);
}

[[nodiscard]] inline std::size_t likeliest_of(std::span<const double> of) noexcept {
  return static_cast<std::size_t>(std::ranges::max_element(of) - of.begin());
}

}  // namespace detail

/// Decodes a text with a cache of each form, and compares the model's predictions. The text is cut into
/// windows of the model's context, because its positions end there; every token except the text's first is
/// predicted once.
/// @throws llmmem::argument_error  for a text of fewer than 2 tokens, and heads that attention cannot read;
///   `llmmem::error` for a model whose logits are not finite.
[[nodiscard]] inline perplexity_finding measure_perplexity(const trained_model& of, const std::string& name,
                                                           std::span<const std::uint8_t> text,
                                                           const paged_config& how, std::uint32_t at_once,
                                                           std::span<const llmmem::token_budget> budgets = {},
                                                           std::span<const cold_form> colds = {}) {
  if (text.size() < 2) {
    throw llmmem::argument_error(fmt::format(
        "{}: it has {}, and perplexity needs 2: one to begin with, and one to predict; give a longer --text, "
        "or more --tokens",
        example::printable(name, 512), text.empty() ? "no token" : "1 token"));
  }
  if (of.config().head_dim % 8 != 0 || of.config().head_dim > 256) {
    throw llmmem::argument_error(
        fmt::format("--weights: the model's heads have {} elements, and attention over a cache needs a "
                    "multiple of 8, 256 at most; train with another --width or --heads",
                    of.config().head_dim));
  }
  perplexity_finding out{.shape = of.shape(), .predicted = text.size() - 1};
  const std::size_t context = of.shape().context;
  std::vector<detail::text_window> windows;
  for (std::size_t first = 0; first + 1 < text.size(); first += context)
    windows.push_back(text.subspan(first, std::min(context + 1, text.size() - first)));

  host_place place;
  paged_config cache = how;
  cache.most_tokens = (context + share_tokens - 1) / share_tokens * share_tokens;
  cache.blocks = at_once * ((context + cache.block_tokens - 1) / cache.block_tokens);
  std::vector<detail::form_run> runs;
  for (const kv_form form : all_forms) {
    if (is_grouped(form) && of.config().head_dim % int8_group != 0) {
      out.left_out.push_back(form);
      continue;
    }
    cache.form = form;
    runs.push_back({.found = {.form = form},
                    .cache = std::make_unique<paged_cache<host_place>>(of.config(), cache, place)});
    runs.back().found.bytes_per_token = runs.back().cache->bytes_per_token();
  }
  for (const kv_form form : further_forms) {
    if (of.config().head_dim % int8_group != 0) {
      out.left_out.push_back(form);
      continue;
    }
    cache.form = form;
    runs.push_back({.found = {.form = form},
                    .cache = std::make_unique<paged_cache<host_place>>(of.config(), cache, place)});
    runs.back().found.bytes_per_token = runs.back().cache->bytes_per_token();
  }
  for (const kv_form form : closing_forms) {
    cache.form = form;
    runs.push_back({.found = {.form = form}, .closing = std::make_unique<closing_cache>(of.config(), cache)});
    runs.back().found.bytes_per_token = runs.back().closing->bytes_per_token();
  }
  for (const llmmem::token_budget& budget : budgets) {
    for (const kv_form form : all_forms) {
      if (is_grouped(form) && of.config().head_dim % int8_group != 0) continue;
      cache.form = form;
      runs.push_back({.found = {.form = form, .budget = budget},
                      .keeping = std::make_unique<keeping_cache>(of.config(), cache, budget)});
      runs.back().found.bytes_per_token = runs.back().keeping->bytes_per_token();
    }
  }
  for (const cold_form& each : colds) {
    cache.form = kv_form::bf16;
    runs.push_back({.found = {.form = kv_form::bf16, .cold_name = each.name},
                    .cold = std::make_unique<cold_cache>(of.config(), cache, place, each)});
  }
  std::vector<std::vector<double>> right;  // [window x context + position] of floats
  for (std::size_t first = 0; first < windows.size(); first += at_once) {
    const auto some =
        std::span(windows).subspan(first, std::min<std::size_t>(at_once, windows.size() - first));
    right.assign(some.size() * context, {});
    for (detail::form_run& run : runs) {
      // Sums by window, and then over windows in order, so that they do not depend on the number of windows
      // decoded at once.
      std::vector<double> surprises(some.size());
      std::vector<double> divergences(some.size());
      const auto told = [&](std::size_t window, std::size_t position, std::span<const float> logits) {
        // A comparison with NaN would be NaN, and say nothing about the form.
        if (!std::ranges::all_of(logits, [](float each) { return std::isfinite(each); })) {
          throw llmmem::error(fmt::format(
              "{}: with keys and values in {}, the model's logits behind token {} are not all "
              "finite; {}",
              example::printable(name, 512), name_of(run.found.form), (first + window) * context + position,
              run.found.form == kv_form::f32
                  ? "its training diverged: take an earlier checkpoint for --weights"
                  : "the form's range is too small for it"));
        }
        std::vector<double> logs = log_probabilities(logits);
        surprises[window] -= logs[some[window][position + 1]];
        std::vector<double>& exact = right[window * context + position];
        if (run.found.form == kv_form::f32 && !run.keeping) {
          exact = std::move(logs);
          return;
        }
        double divergence = 0;
        for (std::size_t i = 0; i < logs.size(); ++i)
          divergence += train_gpt::exact_exp(exact[i]) * (exact[i] - logs[i]);
        run.divergences.push_back(divergence);
        divergences[window] += divergence;
        run.found.changed += detail::likeliest_of(exact) == detail::likeliest_of(logs) ? 0U : 1U;
      };
      if (run.keeping) {
        detail::decode_windows(of, *run.keeping, some, told);
      } else if (run.cold) {
        detail::decode_windows(of, *run.cold, some, told);
      } else if (run.closing) {
        detail::decode_windows(of, *run.closing, some, told);
      } else {
        detail::decode_windows(of, *run.cache, some, told);
      }
      for (std::size_t window = 0; window < some.size(); ++window) {
        run.surprise += surprises[window];
        run.found.divergence += divergences[window];
      }
    }
  }
  for (detail::form_run& run : runs) {
    const auto count = static_cast<double>(out.predicted);
    run.found.perplexity = train_gpt::exact_exp(run.surprise / count);
    run.found.divergence /= count;
    if (!run.divergences.empty()) {
      const std::size_t at = run.divergences.size() - 1 - run.divergences.size() / 1000;
      std::ranges::nth_element(run.divergences, run.divergences.begin() + static_cast<std::ptrdiff_t>(at));
      run.found.divergence_999 = run.divergences[at];
    }
    if (run.keeping) run.found.most_held = run.keeping->most_held();
    if (run.cold) {
      run.found.cold = run.cold->counts();
      run.found.bytes_per_token = run.cold->bytes_per_token();
    }
    (run.cold ? out.cold : run.keeping ? out.kept : out.forms).push_back(run.found);
  }
  return out;
}

/// A perplexity past all doubles is null, because JSON has no infinity.
[[nodiscard]] inline std::string to_json(const perplexity_finding& found) {
  std::string forms;
  for (const form_quality& each : found.forms) {
    forms += fmt::format(R"({}{{"form": "{}", "bytes_per_token": {}, "perplexity": {}, "kl_mean": {:.4g}, )"
                         R"("kl_999": {:.4g}, "changed": {}}})",
                         forms.empty() ? "" : ", ", name_of(each.form), each.bytes_per_token,
                         std::isfinite(each.perplexity) ? fmt::format("{:.6f}", each.perplexity) : "null",
                         each.divergence, each.divergence_999, each.changed);
  }
  std::string left_out;
  for (const kv_form each : found.left_out)
    left_out += fmt::format(R"({}"{}")", left_out.empty() ? "" : ", ", name_of(each));
  std::string kept;
  for (const form_quality& each : found.kept) {
    kept +=
        fmt::format(R"({}{{"budget": {}, "sinks": {}, "recent": {}, "form": "{}", "most_held": {}, )"
                    R"("bytes": {}, "perplexity": {}, "kl_mean": {:.4g}, "kl_999": {:.4g}, "changed": {}}})",
                    kept.empty() ? "" : ", ", each.budget.budget, each.budget.sinks, each.budget.recent,
                    name_of(each.form), each.most_held, each.most_held * each.bytes_per_token,
                    std::isfinite(each.perplexity) ? fmt::format("{:.6f}", each.perplexity) : "null",
                    each.divergence, each.divergence_999, each.changed);
  }
  std::string cold;
  for (const form_quality& each : found.cold) {
    cold +=
        fmt::format(R"({}{{"codec": "{}", "blocks": {}, "bytes_per_token": {}, "bits_per_value": {:.4f}, )"
                    R"("key_error": {:.4g}, "value_error": {:.4g}, "perplexity": {}, "kl_mean": {:.4g}, )"
                    R"("kl_999": {:.4g}, "changed": {}}})",
                    cold.empty() ? "" : ", ", each.cold_name, each.cold.blocks, each.bytes_per_token,
                    each.cold.bits_of_value(), each.cold.error_share(0), each.cold.error_share(1),
                    std::isfinite(each.perplexity) ? fmt::format("{:.6f}", each.perplexity) : "null",
                    each.divergence, each.divergence_999, each.changed);
  }
  return fmt::format(R"({{"forms": [{}], "left_out": [{}], "kept": [{}], "cold": [{}], "tokens": {}}})"
                     "\n",
                     forms, left_out, kept, cold, found.predicted);
}

[[nodiscard]] inline std::string to_report(const perplexity_plan& plan, const perplexity_finding& found) {
  const train_gpt::gpt_shape& shape = found.shape;
  std::string text = fmt::format(
      "{} blocks of width {} with {} heads of {}, context {}; {} tokens of {}, decoded one by one\n"
      "  form                bytes a token  perplexity  KL to f32, mean  of 99.9%  likeliest is another\n",
      shape.blocks, shape.width, shape.heads, shape.head_width(), shape.context,
      example::grouped(found.predicted), example::printable(plan.text, 512));
  for (const form_quality& each : found.forms) {
    text += fmt::format("  {:<18}  {:>13}  {:>10.4f}", name_of(each.form),
                        example::grouped(each.bytes_per_token), each.perplexity);
    if (each.form != kv_form::f32) {
      text += fmt::format("  {:>15.2e}  {:>8.1e}  {:>20}", each.divergence, each.divergence_999,
                          example::grouped(each.changed));
    }
    text += "\n";
  }
  for (const kv_form each : found.left_out) {
    text += fmt::format("  {:<18}  left out: heads have {} elements, and its groups a multiple of {}\n",
                        name_of(each), shape.head_width(), int8_group);
  }
  if (!found.cold.empty()) {
    text +=
        "  cold blocks      bits a value  rms error of K       of V  perplexity  KL to f32, mean  of 99.9%  "
        "likeliest is another\n";
  }
  for (const form_quality& each : found.cold) {
    text +=
        fmt::format("  {:<15}  {:>12.2f}  {:>13.3f}%  {:>8.3f}%  {:>10.4f}  {:>15.2e}  {:>8.1e}  {:>20}\n",
                    each.cold_name, each.cold.bits_of_value(), 100 * each.cold.error_share(0),
                    100 * each.cold.error_share(1), each.perplexity, each.divergence, each.divergence_999,
                    example::grouped(each.changed));
  }
  if (found.kept.empty()) return text;
  text +=
      "  keeping  sinks  recent  form             most bytes of a window  perplexity  KL to f32, mean  "
      "likeliest is "
      "another\n";
  for (const form_quality& each : found.kept) {
    text += fmt::format("  {:>7}  {:>5}  {:>6}  {:<15}  {:>22}  {:>10.4f}  {:>15.2e}  {:>20}\n",
                        each.budget.budget, each.budget.sinks, each.budget.recent, name_of(each.form),
                        example::grouped(each.most_held * each.bytes_per_token), each.perplexity,
                        each.divergence, example::grouped(each.changed));
  }
  return text;
}

}  // namespace paged_decode
