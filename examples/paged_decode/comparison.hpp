/// @file
/// Compares a paged cache with a contiguous one, bit by bit, and measures the errors of the forms of keys and
/// values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "paged_decode/contiguous_cache.hpp"
#include "paged_decode/host_place.hpp"
#include "paged_decode/paged_cache.hpp"
#include "paged_decode/service.hpp"

namespace paged_decode {

/// The runs to make.
struct experiment {
  model_config shape{};
  service_plan plan{};
  paged_config cache{};
  bool with_errors = true;  ///< of the forms

  /// Tokens of the longest sequence, rounded up to a whole share of attention.
  [[nodiscard]] constexpr std::uint64_t most_tokens() const noexcept {
    return (plan.most_tokens() + share_tokens - 1) / share_tokens * share_tokens;
  }
  /// The same cache, with blocks for all sequences even if they shared none.
  [[nodiscard]] constexpr paged_config large_enough() const noexcept {
    paged_config out = cache;
    const std::uint64_t each = (plan.most_tokens() + cache.block_tokens - 1) / cache.block_tokens;
    std::uint64_t sequences = 0;
    for (std::uint32_t request = 0; request < plan.requests; ++request)
      sequences += plan.samples_of(request);
    out.blocks = each * sequences;
    out.most_tokens = most_tokens();
    return out;
  }
};

/// The changes of logits by a form of keys and values, compared with floats, for the same tokens.
struct form_error {
  kv_form form = kv_form::f32;
  double most = 0;  ///< largest change of all logits
  double root_mean_square = 0;
  std::uint64_t changed = 0;  ///< rows with another likeliest token
  std::uint64_t rows = 0;
};

struct finding {
  service_result contiguous{};
  service_result paged{};
  service_result permuted{};
  paged_counts counts{};
  std::vector<form_error> errors{};
  double logits_size = 0;  ///< the root of the mean square of the logits of floats

  [[nodiscard]] bool is_identical() const {
    return paged.digest() == contiguous.digest() && permuted.digest() == contiguous.digest();
  }
};

template <class Place>
struct paged_run {
  service_result result{};
  paged_counts counts{};
  std::uint64_t bytes_per_token = 0;  ///< in all layers
};

/// @throws llmmem::logic_error if the allocator's audit fails afterwards.
template <class Place, decoder_model Model>
[[nodiscard]] paged_run<Place> run_paged(const Model& of, const experiment& what, const paged_config& how,
                                         Place& place) {
  paged_cache<Place> cache(what.shape, how, place);
  paged_run<Place> out{service(of, cache, what.plan).run(), cache.counts(), cache.bytes_per_token()};
  if (const auto wrong = cache.allocator().audit(); !wrong.empty())
    throw llmmem::error("paged_decode: the allocator's audit says: " + wrong.front());
  return out;
}

/// Adds the difference of two rows of logits.
inline void add_error(form_error& to, std::span<const float> exact, std::span<const float> found) {
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double apart = std::abs(static_cast<double>(found[i]) - static_cast<double>(exact[i]));
    to.most = std::max(to.most, apart);
    to.root_mean_square += apart * apart;
  }
  const auto likeliest = [](std::span<const float> of) { return std::ranges::max_element(of) - of.begin(); };
  to.changed += likeliest(exact) == likeliest(found) ? 0U : 1U;
  ++to.rows;
}

/// Returns an order of blocks by a seed, which differs from the previous one.
[[nodiscard]] constexpr std::uint64_t another_order(std::uint64_t before, std::uint64_t seed) noexcept {
  const std::uint64_t after = before + 1 + seed % 0xFFFF'FFFF;
  return after != 0 ? after : 1;
}

/// Measures the errors of all forms except floats, with the tokens that floats chose.
inline void measure_forms(const model& of, const experiment& what, finding& out) {
  host_place place;
  const auto run = [&](kv_form form, const auto& each_row) {
    paged_config how = what.large_enough();
    how.form = form;
    paged_cache<host_place> cache(what.shape, how, place);
    for (const transcript& each : out.contiguous.transcripts)
      each_row(told_logits(of, cache, what.plan, each));
  };
  std::vector<std::vector<float>> exact;
  run(kv_form::f32, [&](std::vector<float> logits) { exact.push_back(std::move(logits)); });
  double squares = 0;
  std::size_t numbers = 0;
  for (const std::vector<float>& each : exact) {
    numbers += each.size();
    for (const float logit : each)
      squares += static_cast<double>(logit) * static_cast<double>(logit);
  }
  out.logits_size = std::sqrt(squares / static_cast<double>(numbers));
  for (const kv_form form : {kv_form::bf16, kv_form::fp8, kv_form::int8}) {
    form_error error{.form = form};
    std::size_t which = 0;
    run(form, [&](const std::vector<float>& logits) {
      const std::size_t columns = what.shape.vocabulary;
      const std::span<const float> right = exact[which++];
      for (std::size_t at = 0; at < logits.size(); at += columns)
        add_error(error, right.subspan(at, columns), std::span(logits).subspan(at, columns));
    });
    error.root_mean_square = std::sqrt(error.root_mean_square / static_cast<double>(numbers));
    out.errors.push_back(error);
  }
}

[[nodiscard]] inline finding compare(const experiment& what) {
  finding out;
  const model made(what.shape, what.most_tokens(), what.plan.seed);
  contiguous_cache contiguous(what.shape, what.cache.form, what.most_tokens());
  out.contiguous = service(made, contiguous, what.plan).run();
  host_place place;
  paged_config how = what.large_enough();
  auto paged = run_paged(made, what, how, place);
  out.paged = std::move(paged.result);
  out.counts = paged.counts;
  how.permutation = another_order(how.permutation, what.plan.seed);
  out.permuted = run_paged(made, what, how, place).result;
  if (what.with_errors) measure_forms(made, what, out);
  return out;
}

}  // namespace paged_decode
