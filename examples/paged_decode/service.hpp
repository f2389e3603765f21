/// @file
/// Requests served by a model over a cache: prompts with a common beginning, samples that fork, drafts that
/// are truncated.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/kernels/block_digest.hpp>
#include <llmmem/paging/ids.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "paged_decode/decoder.hpp"
#include "paged_decode/model.hpp"
#include "train_gpt/exact_math.hpp"

namespace paged_decode {

struct service_plan {
  std::uint32_t requests = 4;
  std::uint32_t prefix_tokens = 52;  ///< all prompts begin with these
  std::uint32_t own_tokens = 21;     ///< and continue with this many own tokens
  std::uint32_t answer_tokens = 64;
  std::uint32_t chunk_tokens = 24;  ///< tokens of a prompt per step
  std::uint32_t samples = 3;        ///< samples of every second request; the first takes the likeliest token
  std::uint32_t drafts = 4;         ///< tokens guessed ahead for the other requests; 0: none
  std::uint64_t seed = 1;

  [[nodiscard]] constexpr std::uint64_t prompt_tokens() const noexcept {
    return std::uint64_t{prefix_tokens} + own_tokens;
  }
  [[nodiscard]] constexpr std::uint64_t most_tokens() const noexcept {
    return prompt_tokens() + answer_tokens + drafts;
  }
  [[nodiscard]] constexpr std::uint32_t samples_of(std::uint32_t request) const noexcept {
    return request % 2 == 0 ? samples : 1;
  }
  [[nodiscard]] constexpr std::uint32_t drafts_of(std::uint32_t request) const noexcept {
    return request % 2 == 0 ? 0 : drafts;
  }
};

/// The result of one sample of a request.
struct transcript {
  std::uint32_t request = 0;
  std::uint32_t sample = 0;
  std::vector<llmmem::token_id> tokens{};  ///< tokens of the prompt and the answer
  std::vector<float> logits{};             ///< [answer_tokens][vocabulary]
};

struct service_result {
  std::vector<transcript> transcripts{};  ///< by request, then by sample
  std::uint64_t steps = 0;
  std::uint64_t drafted = 0;
  std::uint64_t accepted = 0;

  [[nodiscard]] std::uint64_t answer_tokens(const service_plan& of) const noexcept {
    return transcripts.size() * of.answer_tokens;
  }
  /// A digest of all tokens and all bits of all logits.
  [[nodiscard]] std::uint64_t digest() const {
    std::vector<std::uint64_t> parts;
    for (const transcript& each : transcripts) {
      parts.push_back(llmmem::block_digest(std::as_bytes(std::span(each.tokens))));
      parts.push_back(llmmem::block_digest(std::as_bytes(std::span(each.logits))));
    }
    return llmmem::block_digest(std::as_bytes(std::span(parts)));
  }
};

[[nodiscard]] inline std::vector<llmmem::token_id> prompt_of(const service_plan& plan, std::uint32_t request,
                                                             std::uint32_t vocabulary) {
  std::vector<llmmem::token_id> out;
  for (std::uint64_t i = 0; i < plan.prompt_tokens(); ++i) {
    const std::uint64_t whose = i < plan.prefix_tokens ? 0 : request + std::uint64_t{1};
    out.push_back(static_cast<llmmem::token_id>(made_up(plan.seed + whose * 7919, i) % vocabulary));
  }
  return out;
}

/// Chooses the next token: for sample 0 the likeliest; for others at random by likelihood, with a random
/// number that follows from the position (Gumbel's method), so that a repeated computation chooses the same.
[[nodiscard]] inline llmmem::token_id choose(std::span<const float> logits, const service_plan& plan,
                                             const transcript& of) {
  std::size_t best = 0;
  double most = 0;
  for (std::size_t token = 0; token < logits.size(); ++token) {
    double score = static_cast<double>(logits[token]);
    if (of.sample != 0) {
      const std::uint64_t place = (of.request * std::uint64_t{64} + of.sample) << 32U | of.tokens.size();
      const double share = made_up_share(made_up(plan.seed, place), token);
      score -= train_gpt::exact_log(-train_gpt::exact_log(share));
    }
    if (token == 0 || score > most) {
      best = token;
      most = score;
    }
  }
  return static_cast<llmmem::token_id>(best);
}

/// Guesses the next token: the one that followed the previous occurrence of the last token.
[[nodiscard]] inline std::vector<llmmem::token_id> draft(std::span<const llmmem::token_id> tokens,
                                                         std::size_t most) {
  for (std::size_t at = tokens.size() - 1; at-- > 0;) {
    if (tokens[at] != tokens.back()) continue;
    const auto found = tokens.subspan(at + 1, std::min(most, tokens.size() - 1 - at));
    return {found.begin(), found.end()};
  }
  return {};
}

/// Serves a plan's requests over one cache; another request begins at every second step.
template <decoder_model Model, kv_cache Cache>
class service {
 public:
  service(const Model& of, Cache& cache, const service_plan& plan)
      : model_(&of), cache_(&cache), plan_(plan) {}

  [[nodiscard]] service_result run() {
    while (begun_ < plan_.requests || !streams_.empty()) {
      if (out_.steps % 2 == 0 && begun_ < plan_.requests) begin(begun_++);
      step();
    }
    std::ranges::sort(out_.transcripts, {},
                      [](const transcript& of) { return std::pair(of.request, of.sample); });
    return std::move(out_);
  }

 private:
  using sequence = typename Cache::sequence;
  struct stream {
    transcript of{};
    sequence where{};
    std::vector<llmmem::token_id> fed{};  // in this step
  };

  void begin(std::uint32_t request) {
    stream made{.of = {.request = request}};
    made.of.tokens = prompt_of(plan_, request, model_->config().vocabulary);
    made.where = cache_->create(made.of.tokens);
    streams_.push_back(std::move(made));
  }

  void step() {
    std::vector<grown<sequence>> batch;
    for (stream& each : streams_) {
      feed(each);
      batch.push_back({each.where, each.fed});
    }
    const rows_of_floats logits = decode(*model_, *cache_, std::span<const grown<sequence>>(batch));
    ++out_.steps;
    std::size_t row = 0;
    std::vector<stream> forks;
    for (stream& each : streams_) {
      take(each, logits, row, forks);
      row += each.fed.size();
    }
    std::ranges::move(forks, std::back_inserter(streams_));
    end_streams();
  }

  /// Returns the next chunk of a prompt, or the last token and drafts after it.
  void feed(stream& of) {
    const std::uint64_t known = cache_->tokens(of.where);
    const std::span<const llmmem::token_id> rest = std::span(of.of.tokens).subspan(known);
    const std::size_t chunk = std::min<std::size_t>(rest.size(), plan_.chunk_tokens);
    of.fed.assign(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(chunk));
    if (of.of.tokens.size() == plan_.prompt_tokens()) return;
    for (const llmmem::token_id guess : draft(of.of.tokens, plan_.drafts_of(of.of.request))) {
      of.fed.push_back(guess);
      ++out_.drafted;
    }
  }

  /// Takes the step's logits of a stream, whose rows begin at `row`: accepts the fed tokens as long as they
  /// equal the chosen ones, and truncates the rest.
  void take(stream& of, const rows_of_floats& logits, std::size_t row, std::vector<stream>& forks) {
    const std::uint64_t before = cache_->tokens(of.where) - of.fed.size();
    std::size_t right = of.of.tokens.size() - before;  // known tokens among those fed; the others are guesses
    if (right > of.fed.size()) return cache_->commit(of.where);  // a chunk of a prompt that is not the last
    if (of.of.tokens.size() == plan_.prompt_tokens()) fork(of, logits[row + right - 1], forks);
    while (!is_done(of.of)) {
      choose_next(of.of, logits[row + right - 1]);
      if (right == of.fed.size() || of.fed[right] != of.of.tokens.back()) break;
      ++right;
      ++out_.accepted;
    }
    if (right < of.fed.size()) cache_->truncate(of.where, before + right);
    cache_->commit(of.where);
  }

  /// Samples share all of the prompt until each writes its own token after it.
  void fork(stream& of, std::span<const float> logits, std::vector<stream>& forks) {
    for (std::uint32_t sample = 1; sample < plan_.samples_of(of.of.request); ++sample) {
      stream made = of;
      made.of.sample = sample;
      made.where = cache_->fork(of.where);
      choose_next(made.of, logits);
      forks.push_back(std::move(made));
    }
  }

  void choose_next(transcript& of, std::span<const float> logits) {
    of.logits.insert(of.logits.end(), logits.begin(), logits.end());
    of.tokens.push_back(choose(logits, plan_, of));
  }
  [[nodiscard]] bool is_done(const transcript& of) const noexcept {
    return of.tokens.size() == plan_.prompt_tokens() + plan_.answer_tokens;
  }
  void end_streams() {
    for (stream& each : streams_) {
      if (!is_done(each.of)) continue;
      cache_->release(each.where);
      out_.transcripts.push_back(std::move(each.of));
    }
    std::erase_if(streams_, [](const stream& each) { return each.of.tokens.empty(); });
  }

  const Model* model_;
  Cache* cache_;
  service_plan plan_;
  std::uint32_t begun_ = 0;
  std::vector<stream> streams_{};
  service_result out_{};
};

/// Returns the logits after every token of a given answer, to compare the forms of a cache.
template <decoder_model Model, kv_cache Cache>
[[nodiscard]] std::vector<float> told_logits(const Model& of, Cache& cache, const service_plan& plan,
                                             const transcript& what) {
  const std::span<const llmmem::token_id> tokens = what.tokens;
  const auto where = cache.create(tokens.first(plan.prompt_tokens()));
  std::vector<float> out;
  for (std::uint64_t at = cache.tokens(where); at < tokens.size() - 1;) {
    const std::size_t chunk = std::min<std::size_t>(plan.chunk_tokens, tokens.size() - 1 - at);
    const grown<typename Cache::sequence> batch{where, tokens.subspan(at, chunk)};
    const rows_of_floats logits = decode(of, cache, std::span(&batch, 1));
    cache.commit(where);
    for (std::size_t row = 0; row < chunk; ++row) {
      if (at + row + 1 < plan.prompt_tokens()) continue;
      out.insert(out.end(), logits[row].begin(), logits[row].end());
    }
    at += chunk;
  }
  cache.release(where);
  return out;
}

}  // namespace paged_decode
