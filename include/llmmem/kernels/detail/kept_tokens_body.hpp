/// @file
/// The bodies of `kept_token_map` and `copy_kept_tokens`.
#pragma once

#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/kept_tokens.hpp>
#include <llmmem/paging/errors.hpp>

#include <algorithm>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

template <class To, class From>
  requires bounded_table<To> && bounded_table<From>
kept_token_map<To, From>::kept_token_map(const kv_memory& to, const To& to_tables, const kv_memory& from,
                                         const From& from_tables, const kept_tokens& kept,
                                         std::uint32_t layer, std::uint32_t* out_of_range,
                                         std::span<const detail::kv_copy_part> parts) noexcept
    : kept_(kept),
      to_tables_(to_tables),
      from_tables_(from_tables),
      to_blocks_(to.blocks),
      from_blocks_(from.blocks),
      by_budget_(kept.budget),
      by_block_(from.layout.block_tokens),
      layer_(layer),
      out_of_range_(out_of_range) {
  for (const detail::kv_copy_part& part : parts) {
    plane& of = plane_[planes_++];
    of.from = detail::copied_plane(from, part);
    of.to = detail::copied_plane(to, part);
    of.heads = part.heads;
    of.bytes = static_cast<std::uint32_t>(part.vector_bytes);
    const bool are_one_run =
        of.from.strides.head == part.vector_bytes && of.to.strides.head == part.vector_bytes;
    if (kept.heads == 1 && are_one_run) {
      of.bytes *= of.heads;
      of.heads = 1;
    }
    parts_ += of.heads;
  }
}

template <class To, class From>
  requires bounded_table<To> && bounded_table<From>
row_alignment kept_token_map<To, From>::alignment() const noexcept {
  const auto of = [](const kv_plane& each) {
    const std::uint64_t base = each.layer_table != nullptr ? std::uint64_t{each.alignment}
                                                           : reinterpret_cast<std::uintptr_t>(each.data);
    const plane_strides& strides = each.strides;
    return alignment_of(base, strides.layer, strides.block, strides.token, strides.head);
  };
  row_alignment all{16, 16};
  for (std::uint32_t p = 0; p < planes_; ++p) {
    all.from = std::min(all.from, of(plane_[p].from));
    all.to = std::min(all.to, of(plane_[p].to));
  }
  return all;
}

namespace detail {

inline constexpr memory_names kept_to_names{"copy_kept_tokens: to", "copy_kept_tokens: to.plane_alignment"};
inline constexpr memory_names kept_from_names{"copy_kept_tokens: from",
                                              "copy_kept_tokens: from.plane_alignment"};

template <class Tables>
[[nodiscard]] result<void> check_kept_tables(const Tables& tables, const kept_tokens& kept,
                                             const kv_layout& layout, const char* which) noexcept {
  if (tables.block_tokens < 0 || static_cast<std::uint32_t>(tables.block_tokens) != layout.block_tokens)
    return failure{errc::block_tokens_differ, 0,
                   tables.block_tokens < 0 ? 0 : static_cast<std::uint64_t>(tables.block_tokens),
                   layout.block_tokens, which};
  const auto sequences = tables.num_sequences < 0 ? 0 : static_cast<std::uint64_t>(tables.num_sequences);
  if (sequences != kept.sequences) return failure{errc::size_mismatch, 0, kept.sequences, sequences, which};
  if (const char* const what = missing_table(tables); what != nullptr)
    return failure{errc::too_short, 0, kept.sequences, 0, what};
  return {};
}

/// Checks that each part has vectors of single tokens, and that a list decides about each of them.
[[nodiscard]] inline result<void> check_kept_parts(const kv_layout& layout, const kept_tokens& kept,
                                                   std::span<const kv_copy_part> parts) noexcept {
  const char* const who = "copy_kept_tokens";
  constexpr std::uint64_t longest = 0x7FFF'FFFF;
  // Each rank would keep its own tokens, and the copies would no longer be interleaved.
  if (layout.part.cp_size != 1) return failure{errc::unsupported_layout, 17, 1, layout.part.cp_size, who};
  for (const kv_copy_part& part : parts) {
    if (part.tokens != layout.block_tokens)
      return failure{errc::unsupported_layout, 14, part.plane, part.tokens, who};
    if (kept.heads != 1 && part.heads != layout.heads)
      return failure{errc::unsupported_layout, 15, part.plane, layout.heads, who};
    if (part.vector_bytes > longest / part.heads)
      return failure{errc::past_the_bytes, part.plane, part.vector_bytes, longest, who};
  }
  return {};
}

}  // namespace detail

template <class Run, class To, class From>
  requires bounded_table<To> && bounded_table<From>
result<void> copy_kept_tokens(const Run& run, const kv_memory& to, const To& to_tables, const kv_memory& from,
                              const From& from_tables, const kept_tokens& kept, std::uint32_t layer,
                              std::uint32_t* out_of_range) {
  const kv_layout& layout = from.layout;
  if (to.layout != layout) {
    const std::uint64_t theirs = to.layout.content_fingerprint();
    const std::uint64_t ours = layout.content_fingerprint();
    if (theirs != ours)
      return failure{errc::layout_mismatch, 0, theirs, ours, detail::differing_field(to.layout, layout)};
  }
  if (layer >= layout.layers)
    return failure{errc::out_of_range, 0, layer, layout.layers == 0 ? 0 : layout.layers - 1,
                   "copy_kept_tokens: layer"};
  if (kept.heads != 1 && kept.heads != layout.heads)
    return failure{errc::size_mismatch, 0, kept.heads, layout.heads, "copy_kept_tokens: kept.heads"};
  const detail::kv_copy_parts parts = detail::copy_parts_of(to.layout, layout);
  if (auto fits = detail::check_kept_parts(layout, kept, parts.all()); !fits) return fits;
  if (kept.sequences == 0 || kept.budget == 0) return {};
  if (kept.budget > kept.stride && (kept.sequences > 1 || kept.heads > 1))
    return failure{errc::size_mismatch, 0, kept.budget, kept.stride,
                   "copy_kept_tokens: kept.budget and kept.stride"};
  if (auto fits = detail::check_kept_tables(to_tables, kept, layout, "copy_kept_tokens: to_tables"); !fits)
    return fits;
  if (auto fits = detail::check_kept_tables(from_tables, kept, layout, "copy_kept_tokens: from_tables");
      !fits)
    return fits;
  if (kept.listed == nullptr)
    return failure{errc::too_short, 0, kept.budget, 0, "copy_kept_tokens: kept.listed"};
  if (auto there = detail::check_memory(to, detail::kept_to_names); !there) return there;
  if (auto there = detail::check_memory(from, detail::kept_from_names); !there) return there;
  const kept_token_map<To, From> map(to, to_tables, from, from_tables, kept, layer, out_of_range,
                                     parts.all());
  return run.template move<cache_hint::streaming, cache_hint::kept>(map, copy_op{});
}

}  // namespace v0
}  // namespace llmmem
