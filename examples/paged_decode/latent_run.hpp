/// @file
/// The run of a model with latents: a paged cache of records against a contiguous one, bit by bit, and
/// against attention to the keys and values that the latents stand for.
#pragma once

#include <llmmem/paging/latent_record.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "paged_decode/comparison.hpp"
#include "paged_decode/expanded_cache.hpp"
#include "paged_decode/latent_model.hpp"

namespace paged_decode {

/// The records of a cache of latents.
enum class latent_form : std::uint8_t { f32, bf16, fp8_ds_mla, nvfp4_ds_mla };
inline constexpr std::array<latent_form, 4> latent_forms{latent_form::f32, latent_form::bf16,
                                                         latent_form::fp8_ds_mla, latent_form::nvfp4_ds_mla};

[[nodiscard]] constexpr std::string_view name_of(latent_form form) noexcept {
  constexpr std::array<std::string_view, 4> names{"f32", "bf16", "fp8_ds_mla", "nvfp4_ds_mla"};
  return names[static_cast<std::size_t>(form)];
}

/// Returns a published record for other lengths: its parts in the same order, each aligned to 16.
/// @pre `latents` is a multiple of 16, `rotary` of 8
[[nodiscard]] constexpr llmmem::paging::latent_record record_of(latent_form form, std::uint32_t latents,
                                                                std::uint32_t rotary) {
  const auto aligned = [](std::uint32_t bytes) { return (bytes + 15) / 16 * 16; };
  llmmem::paging::latent_record out =
      form == latent_form::f32 ? llmmem::paging::f32_mla : llmmem::paging::bf16_mla;
  if (form == latent_form::f32 || form == latent_form::bf16) {
    const std::uint32_t bytes = form == latent_form::f32 ? 4 : 2;
    out.rotary_at = bytes * latents;
    out.row_bytes = out.rotary_at + bytes * rotary;
  } else if (form == latent_form::fp8_ds_mla) {
    out = llmmem::paging::fp8_ds_mla;
    while (latents % out.group != 0)
      out.group /= 2;
    out.scales_at = latents;
    out.rotary_at = aligned(latents + 4 * (latents / out.group));
    out.row_bytes = out.rotary_at + 2 * rotary;
  } else {
    out = llmmem::paging::nvfp4_ds_mla;
    out.rotary_at = latents / 2;
    out.scales_at = aligned(out.rotary_at + rotary);
    out.row_bytes = aligned(out.scales_at + latents / out.group);
    if (latents / out.group % 4 != 0) out.order = llmmem::paging::scale_order::linear;
  }
  out.latents = latents;
  out.rotary = rotary;
  return out.checked();
}
static_assert(record_of(latent_form::f32, 512, 64) == llmmem::paging::f32_mla);
static_assert(record_of(latent_form::bf16, 512, 64) == llmmem::paging::bf16_mla);
static_assert(record_of(latent_form::fp8_ds_mla, 512, 64) == llmmem::paging::fp8_ds_mla);
static_assert(record_of(latent_form::nvfp4_ds_mla, 512, 64) == llmmem::paging::nvfp4_ds_mla);

struct latent_error {
  latent_form form = latent_form::bf16;
  form_error of{};
};

struct latent_finding {
  service_result contiguous{};
  service_result one_by_one{};  ///< prompts of one token a step
  service_result paged{};
  service_result permuted{};
  paged_counts counts{};
  std::uint64_t bytes_per_token = 0;
  form_error expanded{};               ///< of latents in floats, from attention to keys and values
  std::vector<latent_error> errors{};  ///< of the other records, from the same
  double logits_size = 0;              ///< the root of the mean square of the logits

  /// Absorbed logits may differ from expanded ones by so much of `logits_size`: roundings of floats.
  static constexpr double expanded_bound = 1e-4;

  [[nodiscard]] bool is_identical() const {
    const std::uint64_t right = contiguous.digest();
    return paged.digest() == right && permuted.digest() == right && one_by_one.digest() == right;
  }
  [[nodiscard]] bool is_expanded() const { return expanded.most <= expanded_bound * logits_size; }
};

/// Compares logits with exact ones, row by row.
[[nodiscard]] inline form_error difference(const std::vector<std::vector<float>>& exact,
                                           const std::vector<std::vector<float>>& found,
                                           std::size_t columns) {
  form_error out;
  std::size_t numbers = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    for (std::size_t at = 0; at < exact[i].size(); at += columns)
      add_error(out, std::span(exact[i]).subspan(at, columns), std::span(found[i]).subspan(at, columns));
    numbers += exact[i].size();
  }
  out.root_mean_square = std::sqrt(out.root_mean_square / static_cast<double>(numbers));
  return out;
}

[[nodiscard]] inline latent_finding compare_latents(const experiment& what, latent_form form) {
  latent_finding out;
  const model_config& shape = what.shape;
  const llmmem::paging::latent_record record = record_of(form, shape.latents, shape.rotary_dim);
  const latent_model absorbed(shape, what.most_tokens(), what.plan.seed);
  const latent_model expanded = absorbed.with(latent_matrices::expanded);
  {
    contiguous_cache cache(shape, record, what.most_tokens());
    out.contiguous = service(absorbed, cache, what.plan).run();
  }
  {
    contiguous_cache cache(shape, record, what.most_tokens());
    service_plan plan = what.plan;
    plan.chunk_tokens = 1;
    out.one_by_one = service(absorbed, cache, plan).run();
  }
  host_place place;
  paged_config how = what.large_enough();
  how.record = record;
  const std::uint64_t order = how.permutation;
  how.permutation = another_order(order, what.plan.seed);
  out.permuted = run_paged(absorbed, what, how, place).result;
  how.permutation = order;
  auto paged = run_paged(absorbed, what, how, place);
  out.paged = std::move(paged.result);
  out.counts = paged.counts;
  out.bytes_per_token = paged.bytes_per_token;
  // The same tokens for all others.
  const auto told = [&](const latent_model& of, auto&& cache) {
    std::vector<std::vector<float>> logits;
    for (const transcript& each : out.contiguous.transcripts)
      logits.push_back(told_logits(of, cache, what.plan, each));
    return logits;
  };
  const auto right = told(expanded, expanded_cache(expanded));
  const auto told_in = [&](latent_form each) {
    return difference(right,
                      told(absorbed, contiguous_cache(shape, record_of(each, shape.latents, shape.rotary_dim),
                                                      what.most_tokens())),
                      shape.vocabulary);
  };
  out.expanded = told_in(latent_form::f32);
  double squares = 0;
  std::size_t numbers = 0;
  for (const std::vector<float>& each : right) {
    for (const float logit : each)
      squares += static_cast<double>(logit) * static_cast<double>(logit);
    numbers += each.size();
  }
  out.logits_size = std::sqrt(squares / static_cast<double>(numbers));
  if (!what.with_errors) return out;
  for (const latent_form each : latent_forms) {
    if (each != latent_form::f32) out.errors.push_back({each, told_in(each)});
  }
  return out;
}

}  // namespace paged_decode
