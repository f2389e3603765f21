/// @file
/// Checks of summaries, bounds and lists of blocks.
#pragma once

#include <llmmem/errors.hpp>
#include <llmmem/kernels/block_summary.hpp>
#include <llmmem/kernels/detail/block_summary_work.hpp>
#include <llmmem/kernels/detail/coded_planes.hpp>
#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/detail/kv_form_checks.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/paging/errors.hpp>

#include <algorithm>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Checks that keys can be summarised.
[[nodiscard]] inline result<void> check_summarised(const kv_memory& cache, std::uint64_t summary_bytes,
                                                   const void* summaries, const char* who) noexcept {
  const kv_layout& layout = cache.layout;
  const bool is_coded = has_codes(layout);
  if (auto fits = is_coded ? check_codes(layout, who) : check_forms(layout, who); !fits) return fits;
  if (layout.key_scales.is_rotated) return failure{errc::unsupported_layout, 8, 0, 1, who};
  if (!is_coded && layout.element != dtype::f32 && layout.element != dtype::bf16 &&
      layout.element != dtype::f16 && layout.element != dtype::fp8_e4m3)
    return failure{errc::no_conversion, 0, static_cast<std::uint64_t>(dtype::bf16),
                   static_cast<std::uint64_t>(layout.element), who};
  if (layout.heads == 0 || layout.block_tokens == 0 || layout.head_dim == 0)
    return failure{errc::size_mismatch, 0, 0, 1, who};
  if (auto fits = whole(layout.vector_elements(0), attention_pack, who); !fits) return fits;
  const std::uint64_t needed = cache.blocks * layout.heads * layout.vector_elements(0) * 4;
  if (summary_bytes < needed || (summaries == nullptr && needed != 0))
    return failure{errc::too_short, 0, needed, summary_bytes, who};
  return whole(reinterpret_cast<std::uintptr_t>(summaries), 16, who);
}

}  // namespace detail

template <class Run>
result<void> summarize_keys(const Run& run, const changed_blocks& changed, const kv_memory& cache,
                            std::uint32_t layer, std::span<std::byte> summaries,
                            std::uint32_t* out_of_range) {
  const kv_layout& layout = cache.layout;
  if (auto fits =
          detail::check_summarised(cache, summaries.size(), summaries.data(), "summarize_keys: summaries");
      !fits)
    return fits;
  if (layer >= layout.layers)
    return failure{errc::out_of_range, 0, layer, layout.layers == 0 ? 0 : layout.layers - 1,
                   "summarize_keys: layer"};
  const std::uint64_t unit =
      std::min<std::uint64_t>(detail::attention_pack * bits_of(layout.element) / 8, 16);
  const bool is_coded = detail::has_codes(layout);
  if (auto fits = is_coded ? detail::check_code_places(cache, "summarize_keys: the cache's scales")
                  : cache.plane_table != nullptr
                      ? detail::whole(cache.plane_alignment, unit, "summarize_keys: cache.plane_alignment")
                      : detail::whole(reinterpret_cast<std::uintptr_t>(cache.data), unit,
                                      "summarize_keys: the cache's data");
      !fits)
    return fits;
  if (changed.count == 0) return {};
  if (changed.blocks == nullptr || changed.ends == nullptr)
    return failure{
        errc::too_short, 0, changed.count, 0,
        changed.blocks == nullptr ? "summarize_keys: changed.blocks" : "summarize_keys: changed.ends"};
  if (auto fits =
          detail::check_memory(cache, {"summarize_keys: cache", "summarize_keys: cache.plane_alignment"});
      !fits)
    return fits;
  if (is_coded) {
    const detail::summary_codes codes{detail::coded_plane_of(cache, 0, {})};
    return run.each(detail::summarize_work<dtype::f32, detail::summary_codes>(
        changed, cache, layer, summaries.data(), out_of_range, codes));
  }
  const auto summarise = [&]<dtype Element>() {
    return run.each(detail::summarize_work<Element>(changed, cache, layer, summaries.data(), out_of_range));
  };
  switch (layout.element) {
    case dtype::f32:
      return summarise.template operator()<dtype::f32>();
    case dtype::f16:
      return summarise.template operator()<dtype::f16>();
    case dtype::fp8_e4m3:
      return summarise.template operator()<dtype::fp8_e4m3>();
    default:
      return summarise.template operator()<dtype::bf16>();
  }
}

template <class Run, class Tables>
  requires bounded_table<Tables> && counted_tables<Tables>
result<void> bound_scores(const Run& run, const Tables& tables, const attention_rows& rows,
                          const batch_vectors& queries, const kv_memory& cache,
                          std::span<const std::byte> summaries, std::uint32_t columns, float* scores,
                          const attention_options& options) {
  const kv_layout& layout = cache.layout;
  if (auto fits =
          detail::check_summarised(cache, summaries.size(), summaries.data(), "bound_scores: summaries");
      !fits)
    return fits;
  if (layout.part.cp_size != 1)
    return failure{errc::unsupported_layout, 3, 1, layout.part.cp_size, "bound_scores: cache.layout"};
  const bool is_coded = detail::has_codes(layout);
  if (is_coded ? !detail::is_attention_element(options.element)
               : !detail::may_attend(options.element, layout.element))
    return failure{errc::no_conversion, 0, static_cast<std::uint64_t>(options.element),
                   static_cast<std::uint64_t>(layout.element), "bound_scores: options.element"};
  if (options.query_heads == 0 || options.query_heads % layout.heads != 0)
    return failure{errc::size_mismatch, 0, options.query_heads, layout.heads,
                   "bound_scores: query_heads is not a multiple of the cache's heads"};
  if (auto fits = detail::whole(queries, 16, "bound_scores: queries"); !fits) return fits;
  if (tables.block_tokens <= 0 || static_cast<std::uint32_t>(tables.block_tokens) != layout.block_tokens)
    return failure{errc::block_tokens_differ, 0,
                   tables.block_tokens <= 0 ? 0 : static_cast<std::uint64_t>(tables.block_tokens),
                   layout.block_tokens, "bound_scores"};
  if (rows.rows == 0 || columns == 0) return {};
  if (scores == nullptr) return failure{errc::too_short, 0, columns, 0, "bound_scores: scores"};
  const std::uint64_t bytes = layout.vector_elements(0) * bits_of(options.element) / 8;
  if (auto fits = detail::check_vectors(
          {queries.data, rows.rows, queries.token_stride, options.query_heads, queries.head_stride, bytes},
          false,
          {"bound_scores: queries", "bound_scores: queries.token_stride",
           "bound_scores: queries.head_stride"});
      !fits)
    return fits;
  const char* const what =
      rows.lengths == nullptr ? detail::missing_counted_table(tables) : detail::missing_table(tables);
  if (what != nullptr)
    return failure{errc::too_short, 0, static_cast<std::uint64_t>(tables.num_sequences), 0, what};
  detail::bound_request of;
  of.rows = rows;
  of.queries = queries;
  of.summaries = summaries.data();
  of.blocks = cache.blocks;
  of.columns = columns;
  of.block_tokens = layout.block_tokens;
  of.query_heads = options.query_heads;
  of.group = options.query_heads / layout.heads;
  of.window = options.window;
  of.element = options.element;
  of.scale = options.scale != 0 ? options.scale
                                : 1.0F / __builtin_sqrtf(static_cast<float>(layout.vector_elements(0)));
  // A scale of the block is in its summary.
  if (is_coded ? !layout.key_scales.has_global : layout.element != options.element)
    of.scales = options.scales;
  of.scores = scores;
  of.out_of_range = options.out_of_range;
  const detail::summary_place place{
      layout.heads, static_cast<std::uint32_t>(layout.vector_elements(0) / detail::attention_pack)};
  return run.each(detail::bound_work<Tables>(of, place, tables));
}

template <class Run>
result<void> list_block_tokens(const Run& run, const chosen_blocks& chosen, std::int32_t* listed) {
  if (chosen.block_tokens == 0)
    return failure{errc::size_mismatch, 0, 0, 1, "list_block_tokens: block_tokens"};
  constexpr std::uint64_t most = 0x7FFF'FFFF;
  const std::uint64_t entries = std::uint64_t{chosen.k} * chosen.block_tokens;
  if (entries > most)
    return failure{errc::out_of_range, 0, entries, most, "list_block_tokens: k x block_tokens"};
  if (chosen.rows == 0 || chosen.k == 0) return {};
  if (chosen.blocks == nullptr || chosen.lengths == nullptr || listed == nullptr)
    return failure{errc::too_short, 0, entries, 0,
                   chosen.blocks == nullptr    ? "list_block_tokens: blocks"
                   : chosen.lengths == nullptr ? "list_block_tokens: lengths"
                                               : "list_block_tokens: listed"};
  return run.each(detail::list_tokens_work(chosen, listed));
}

}  // namespace v0
}  // namespace llmmem
