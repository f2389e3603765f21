/// @file
/// Checks of `paged_attention`, and the choice of a kernel.
#pragma once

#include <llmmem/kernels/detail/attention_merge.hpp>
#include <llmmem/kernels/detail/attention_part_checks.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tensor.hpp>
#include <llmmem/kernels/detail/attention_work.hpp>
#include <llmmem/kernels/detail/coded_planes.hpp>
#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/detail/kv_form_checks.hpp>
#include <llmmem/kernels/detail/latent_attention.hpp>
#include <llmmem/kernels/detail/latent_rows.hpp>
#include <llmmem/kernels/detail/tensor_codes.hpp>
#include <llmmem/kernels/detail/tensor_forms.hpp>
#include <llmmem/kernels/detail/tensor_latents.hpp>
#include <llmmem/kernels/detail/vector_heads.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/paging/errors.hpp>

#include <algorithm>
#include <bit>
#include <limits>
#include <numbers>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Returns the lanes for a vector: a power of two. Lanes without elements idle.
[[nodiscard]] constexpr std::uint32_t attention_lanes(const kv_layout& layout) noexcept {
  const std::uint64_t longest = std::max(layout.vector_elements(0), layout.vector_elements(1));
  return std::max(std::bit_ceil(static_cast<std::uint32_t>(longest / attention_pack)), 8U);
}

/// Returns the lanes that join the shares of a row: with few shares most of them would idle.
[[nodiscard]] constexpr std::uint32_t merge_lanes(std::uint32_t shares) noexcept {
  return std::bit_ceil(std::clamp(shares, 8U, host_lanes::most));
}

/// Returns the query heads of an item: one if each has its own head of the cache, else four, of which some
/// may idle.
[[nodiscard]] constexpr std::uint32_t attention_heads(std::uint32_t group) noexcept {
  return group == 1 ? 1 : 4;
}

[[nodiscard]] constexpr bool is_attention_element(dtype element) noexcept {
  return element == dtype::f32 || element == dtype::bf16 || element == dtype::f16;
}

/// Whether queries of a type fit a cache of another: its own, or floats; quantised caches accept any. Others
/// are a mistake, because the bytes would be read as the wrong type.
[[nodiscard]] constexpr bool may_attend(dtype batch, dtype cache) noexcept {
  if (!is_attention_element(batch)) return false;
  if (cache == dtype::fp8_e4m3) return true;
  return is_attention_element(cache) && (batch == cache || batch == dtype::f32);
}

/// A call's arguments.
struct attention_request {
  attention_rows rows{};
  batch_vectors queries{};
  batch_output out{};
  kv_memory cache{};
  std::uint32_t layer = 0;
  std::span<std::byte> workspace{};
  attention_options options{};
  attention_part_output part{};  // instead of `out`
  bool is_part = false;
};

/// Checks the further requirements of tensor cores.
[[nodiscard]] inline result<void> check_tensor_cores(const kv_layout& layout) noexcept {
  if (!has_codes(layout) && layout.element == dtype::f32)
    return failure{errc::no_conversion, 0, static_cast<std::uint64_t>(dtype::f16),
                   static_cast<std::uint64_t>(layout.element),
                   "paged_attention: tensor_cores, of caches of bf16, f16 or fp8"};
  const std::uint64_t keys = layout.vector_elements(0);
  const std::uint64_t values = layout.vector_elements(1);
  if (keys != 64 && keys != 128)
    return failure{errc::size_mismatch, 0, keys, 128, "paged_attention: head_dim, of tensor_cores 64 or 128"};
  if (values != keys)
    return failure{errc::size_mismatch, 0, values, keys,
                   "paged_attention: value_dim, of tensor_cores head_dim"};
  return {};
}

/// Whether a `host_vector_executor` alone has it.
[[nodiscard]] constexpr bool is_of_host(attention_arithmetic arithmetic) noexcept {
  return arithmetic == attention_arithmetic::host_vectors ||
         arithmetic == attention_arithmetic::host_integers;
}

/// Checks the further requirements of products of integers.
[[nodiscard]] inline result<void> check_integers(const kv_layout& layout) noexcept {
  const char* const what = "paged_attention: options.arithmetic";
  if (!has_codes(layout)) return failure{errc::unsupported_layout, 16, 0, 0, what};
  for (std::uint32_t p = 0; p < layout.kv_planes(); ++p) {
    const dtype code = layout.element_of(p);
    const paging::scale_form& scales = scales_of_plane(layout, p);
    const bool is_one = scales.group == paging::scale_group::vector ||
                        (scales.group == paging::scale_group::run && scales.run >= layout.vector_elements(p));
    if ((code != dtype::int8 && code != dtype::int4) || !is_one)
      return failure{errc::unsupported_layout, 16, p, static_cast<std::uint64_t>(scales.group), what};
  }
  return {};
}

/// Checks the part of a context-parallel rank.
[[nodiscard]] inline result<void> check_deal(const attention_request& of) noexcept {
  const paging::kv_part& part = of.cache.layout.part;
  constexpr std::uint64_t most = 0x7FFF'FFFF;
  const std::uint64_t round = std::uint64_t{part.cp_size} * part.cp_interleave;
  if (round == 0 || round > most)
    return failure{errc::out_of_range, 0, round, most, "paged_attention: part.cp_size x part.cp_interleave"};
  if (part.cp_rank >= part.cp_size)
    return failure{errc::out_of_range, 0, part.cp_rank, part.cp_size - 1, "paged_attention: part.cp_rank"};
  if (of.rows.rows != 0 && of.rows.lengths == nullptr)
    return failure{errc::too_short, 0, of.rows.rows, 0,
                   "paged_attention: rows.lengths, of a cache of one context-parallel rank"};
  return {};
}

/// The elements of a cache's keys (0) or values (1), as attention sees them.
[[nodiscard]] constexpr std::uint64_t attended_elements(const kv_layout& layout,
                                                        const attention_options& options,
                                                        std::uint32_t p) noexcept {
  if (options.latents == nullptr) return layout.vector_elements(p);
  return p == 0 ? options.latents->key_elements() : options.latents->value_elements();
}

/// Checks a cache of latents and the elements.
[[nodiscard]] inline result<void> check_latent_attention(const attention_request& of) noexcept {
  const kv_layout& layout = of.cache.layout;
  if (auto fits = check_latent_layout(of.cache, *of.options.latents, "paged_attention: cache.layout"); !fits)
    return fits;
  if (layout.part.cp_size != 1) {
    if (!of.is_part)
      return failure{errc::unsupported_layout, 3, 1, layout.part.cp_size, "paged_attention: cache.layout"};
    if (auto fits = check_deal(of); !fits) return fits;
  }
  if (!is_attention_element(of.options.element))
    return failure{errc::no_conversion, 0, static_cast<std::uint64_t>(of.options.element),
                   static_cast<std::uint64_t>(of.options.latents->latent_element),
                   "paged_attention: options.element"};
  if (layout.layers == 0 || of.layer >= layout.layers)
    return failure{errc::out_of_range, 0, of.layer, layout.layers == 0 ? 0 : layout.layers - 1,
                   "paged_attention: layer"};
  if (of.options.query_heads == 0)
    return failure{errc::size_mismatch, 0, 0, layout.heads, "paged_attention: query_heads is not given"};
  if (of.options.scale == 0)
    return failure{errc::unsupported_layout, 12, 0, 0, "paged_attention: options.scale"};
  if (of.options.arithmetic == attention_arithmetic::tensor_cores && !is_tensor_record(*of.options.latents))
    return failure{errc::unsupported_layout, 13, 0, static_cast<std::uint64_t>(of.options.arithmetic),
                   "paged_attention: options.arithmetic"};
  if (of.options.arithmetic == attention_arithmetic::host_integers)
    return failure{errc::unsupported_layout, 16, 0, 0, "paged_attention: options.arithmetic"};
  return {};
}

/// Checks the layout and the elements.
[[nodiscard]] inline result<void> check_attention_layout(const attention_request& of) noexcept {
  if (of.options.latents != nullptr) return check_latent_attention(of);
  const kv_layout& layout = of.cache.layout;
  const bool is_coded = has_codes(layout);
  if (auto fits = is_coded ? check_codes(layout, "paged_attention: cache.layout")
                           : check_forms(layout, "paged_attention: cache.layout");
      !fits)
    return fits;
  if (layout.part.cp_size != 1) {
    if (!of.is_part)
      return failure{errc::unsupported_layout, 3, 1, layout.part.cp_size, "paged_attention: cache.layout"};
    if (auto fits = check_deal(of); !fits) return fits;
  }
  if (is_coded ? !is_attention_element(of.options.element) : !may_attend(of.options.element, layout.element))
    return failure{errc::no_conversion, 0, static_cast<std::uint64_t>(of.options.element),
                   static_cast<std::uint64_t>(layout.element), "paged_attention: options.element"};
  if (layout.layers == 0 || of.layer >= layout.layers)
    return failure{errc::out_of_range, 0, of.layer, layout.layers == 0 ? 0 : layout.layers - 1,
                   "paged_attention: layer"};
  if (!layout.has_values)
    return failure{errc::size_mismatch, 0, 2, layout.kv_planes(), "paged_attention: planes of the cache"};
  constexpr std::uint64_t most = 256;
  for (std::uint32_t p = 0; p < 2; ++p) {
    const char* const what = p == 0 ? "paged_attention: head_dim" : "paged_attention: value_dim";
    const std::uint64_t elements = layout.vector_elements(p);
    if (elements == 0 || elements > most) return failure{errc::out_of_range, p, elements, most, what};
    if (auto fits = whole(elements * bits_of(layout.element_of(p)) / 8,
                          std::uint64_t{attention_pack} * bits_of(layout.element_of(p)) / 8, what);
        !fits)
      return fits;
  }
  const std::uint32_t queries = of.options.query_heads;
  if (queries == 0)
    return failure{errc::size_mismatch, 0, 0, layout.heads, "paged_attention: query_heads is not given"};
  if (layout.heads == 0 || queries % layout.heads != 0)
    return failure{errc::size_mismatch, 0, queries, layout.heads,
                   "paged_attention: query_heads is not a multiple of the cache's heads"};
  if (of.options.arithmetic == attention_arithmetic::tensor_cores) {
    if (auto fits = check_tensor_cores(layout); !fits) return fits;
  } else if (of.options.arithmetic == attention_arithmetic::host_integers) {
    if (auto fits = check_integers(layout); !fits) return fits;
  }
  if (is_coded) return check_code_places(of.cache, "paged_attention: the cache's scales");
  const std::uint64_t unit = std::min<std::uint64_t>(attention_pack * bits_of(layout.element) / 8, 16);
  if (of.cache.plane_table != nullptr)
    return whole(of.cache.plane_alignment, unit, "paged_attention: cache.plane_alignment");
  return whole(reinterpret_cast<std::uintptr_t>(of.cache.data), unit, "paged_attention: the cache's data");
}

[[nodiscard]] inline attention_part_shape part_shape_of(const attention_request& of) noexcept {
  return {of.rows.rows, of.options.query_heads,
          static_cast<std::uint32_t>(attended_elements(of.cache.layout, of.options, 1))};
}

/// Checks the batch's distances, if it is not empty.
[[nodiscard]] inline result<void> check_attention_vectors(const attention_request& of) noexcept {
  const kv_layout& layout = of.cache.layout;
  const std::uint64_t element_bytes = bits_of(of.options.element) / 8;
  const std::uint64_t heads = of.options.query_heads;
  const auto array_of = [&](const auto& vectors, std::uint32_t plane) {
    return vector_array{vectors.data,         of.rows.rows,
                        vectors.token_stride, heads,
                        vectors.head_stride,  attended_elements(layout, of.options, plane) * element_bytes};
  };
  constexpr vector_names queries{"paged_attention: queries", "paged_attention: queries.token_stride",
                                 "paged_attention: queries.head_stride"};
  constexpr vector_names out{"paged_attention: out", "paged_attention: out.token_stride",
                             "paged_attention: out.head_stride"};
  if (auto fits = check_vectors(array_of(of.queries, 0), false, queries); !fits) return fits;
  if (of.is_part) return check_part(of.part, part_shape_of(of), true, paged_attention_part_names);
  return check_vectors(array_of(of.out, 1), true, out);
}

/// Checks the batch and the rest.
[[nodiscard]] inline result<void> check_attention(const attention_request& of) noexcept {
  if (auto fits = check_attention_layout(of); !fits) return fits;
  const std::uint64_t unit = of.options.element == dtype::f32 ? 16 : attention_pack * 2;
  if (auto fits = whole(of.queries, unit, "paged_attention: queries"); !fits) return fits;
  if (of.is_part) {
    if (auto fits = check_part_units(of.part, paged_attention_part_names); !fits) return fits;
  } else if (auto fits = whole(of.out, unit, "paged_attention: out"); !fits) {
    return fits;
  }
  if (of.rows.shared == 0 || of.rows.rows % of.rows.shared != 0)
    return failure{errc::size_mismatch, 0, of.rows.rows, of.rows.shared,
                   "paged_attention: rows.shared does not divide the rows"};
  constexpr std::uint64_t most_heads = 0x7FFF'FFFF;
  if (std::uint64_t{of.rows.shared} * of.options.query_heads > most_heads)
    return failure{errc::out_of_range, 0, std::uint64_t{of.rows.shared} * of.options.query_heads, most_heads,
                   "paged_attention: rows.shared x query_heads"};
  const attention_split& split = of.options.split;
  if (split.count == 0) return failure{errc::too_short, 0, 1, 0, "paged_attention: split.count"};
  if (split.count > 1) {
    if (split.tokens == 0 || split.tokens % attention_tile != 0)
      return failure{errc::size_mismatch, 0, split.tokens, attention_tile,
                     "paged_attention: split.tokens is not a multiple of 8"};
  }
  const std::uint64_t needed = attention_workspace_bytes(of.rows.rows, of.cache.layout, of.options);
  if (of.workspace.size() < needed)
    return failure{errc::too_short, 0, needed, of.workspace.size(), "paged_attention: workspace (bytes)"};
  if (needed != 0) {
    if (auto fits =
            whole(reinterpret_cast<std::uintptr_t>(of.workspace.data()), 16, "paged_attention: workspace");
        !fits)
      return fits;
  }
  if (of.rows.rows == 0) return {};
  if (auto fits = check_attention_vectors(of); !fits) return fits;
  return check_memory(of.cache, {"paged_attention: cache", "paged_attention: cache.plane_alignment"});
}

/// Floats of the workspace for sums, and for states.
struct attention_floats_needed {
  std::uint64_t sums = 0;
  std::uint64_t states = 0;

  static constexpr attention_floats_needed of(std::uint64_t rows, const kv_layout& layout,
                                              const attention_options& options) noexcept {
    if (options.split.count <= 1) return {};
    const std::uint64_t parts = rows * options.query_heads * options.split.count;
    return {parts * attended_elements(layout, options, 1), parts * 2};
  }
};

[[nodiscard]] inline attention_shape attention_shape_of(const attention_request& of) noexcept {
  const kv_layout& layout = of.cache.layout;
  constexpr float log2_e = std::numbers::log2e_v<float>;
  attention_shape out;
  out.rows = of.rows.rows / of.rows.shared;
  out.shared = of.rows.shared;
  out.sequences = of.rows.sequences;
  out.lengths = of.rows.lengths;
  out.begins = of.rows.begins;
  out.ends = of.rows.ends;
  const paging::kv_part& part = layout.part;
  if (part.cp_size != 1)
    out.deal = {divider(part.cp_size * part.cp_interleave), part.cp_rank * part.cp_interleave,
                part.cp_interleave};
  out.queries = of.queries;
  out.out = of.is_part ? of.part.sums : of.out;
  if (of.is_part) out.part_states = of.part.states;
  out.keys = kv_plane_of(of.cache, 0);
  out.values = layout.has_values ? kv_plane_of(of.cache, 1) : out.keys;
  out.layer = of.layer;
  out.blocks = of.cache.blocks;
  out.by = divider(layout.block_tokens);
  out.shares = divider(of.options.split.count);
  out.share_tokens = divider(std::max(of.options.split.tokens, attention_tile));
  out.key_packs = static_cast<std::uint32_t>(attended_elements(layout, of.options, 0) / attention_pack);
  out.value_packs = static_cast<std::uint32_t>(attended_elements(layout, of.options, 1) / attention_pack);
  out.heads = layout.heads;
  out.own_group = divider(of.options.query_heads / layout.heads);
  out.group = out.own_group.by() * of.rows.shared;
  out.window = of.options.window;
  out.tiles_in_block = layout.block_tokens % attention_tile == 0;
  out.element = of.options.element;
  out.out_element = of.is_part ? dtype::f32 : of.options.element;
  const float scale = of.options.scale != 0
                          ? of.options.scale
                          : 1.0F / __builtin_sqrtf(static_cast<float>(layout.vector_elements(0)));
  out.scale = product_of(scale, log2_e);
  // Elements of the batch's own type are stored as they are; codes have the caller's scale in their own.
  if (layout.element != of.options.element && !has_codes(layout) && of.options.latents == nullptr)
    out.scales = of.options.scales;
  out.sums = reinterpret_cast<float*>(of.workspace.data());
  out.states = out.sums + attention_floats_needed::of(of.rows.rows, layout, of.options).sums;
  out.log_sum_exp = of.options.log_sum_exp;
  out.out_of_range = of.options.out_of_range;
  return out;
}

/// An executor that has vector instructions of the host.
template <class Run, class Tables>
concept vector_run = requires(const Run& run, const attention_shape& shape, const Tables& tables) {
  { run.template attend_by_vectors<dtype::bf16>(shape, tables) } -> std::same_as<result<void>>;
};

template <dtype Element, class Run, class Tables>
result<void> attend_with(const Run& run, const attention_shape& shape, const Tables& tables,
                         attention_arithmetic arithmetic, std::uint32_t lanes) {
  if constexpr (vector_run<Run, Tables>) {
    if (arithmetic == attention_arithmetic::host_vectors)
      return run.template attend_by_vectors<Element>(shape, tables);
  }
  if constexpr (Element != dtype::f32) {
    if (arithmetic == attention_arithmetic::tensor_cores) {
      if (shape.key_packs * attention_pack == 64)
        return run.each(attention_tensor_work<tensor_elements<Element, 64>, Tables>(shape, tables));
      return run.each(attention_tensor_work<tensor_elements<Element, 128>, Tables>(shape, tables));
    }
  }
  if (shape.group == 1) return run.each(attention_work<Element, 1, Tables>(shape, tables, lanes));
  return run.each(attention_work<Element, 4, Tables>(shape, tables, lanes));
}

/// Over codes, which become floats where they are read.
template <class Run, class Tables>
result<void> attend_codes(const Run& run, const attention_shape& shape, const Tables& tables,
                          const attention_request& of, std::uint32_t lanes) {
  const attention_codes codes{coded_plane_of(of.cache, 0, of.options.scales),
                              coded_plane_of(of.cache, 1, of.options.scales), of.layer};
  if constexpr (vector_run<Run, Tables>) {
    if (of.options.arithmetic == attention_arithmetic::host_vectors)
      return run.attend_by_vectors(shape, codes, tables);
    if (of.options.arithmetic == attention_arithmetic::host_integers)
      return run.attend_by_integers(shape, codes, tables);
  }
  if (of.options.arithmetic == attention_arithmetic::tensor_cores) {
    const auto attend_by = [&]<class Form>(const Form& form) {
      return run.each(attention_tensor_work<Form, Tables>(shape, tables, form));
    };
    const auto attend_to = [&]<std::uint32_t Dim>(std::integral_constant<std::uint32_t, Dim>) {
      switch (tensor_exactness_of(of.cache.layout)) {
        case tensor_exactness::by_token:
          return attend_by(tensor_codes<Dim, false>(codes));
        case tensor_exactness::by_token_and_zero:
          return attend_by(tensor_codes<Dim, false, true>(codes));
        case tensor_exactness::by_run:
          return attend_by(tensor_codes<Dim, true>(codes));
        default:
          return attend_by(tensor_rounded_codes<Dim>(codes));
      }
    };
    if (shape.key_packs * attention_pack == 64) return attend_to(std::integral_constant<std::uint32_t, 64>{});
    return attend_to(std::integral_constant<std::uint32_t, 128>{});
  }
  if (shape.group == 1)
    return run.each(attention_work<dtype::f32, 1, Tables, attention_codes>(shape, tables, lanes, codes));
  // Two query heads at once: with four, the floats of a tile and the sums exceed a thread's registers on
  // sm_80.
  return run.each(attention_work<dtype::f32, 2, Tables, attention_codes>(shape, tables, lanes, codes));
}

/// Returns so many shares of about equal length, of whole steps.
[[nodiscard]] constexpr attention_split split_into(std::uint64_t shares, std::uint64_t most_tokens,
                                                   std::uint64_t step) noexcept {
  if (shares <= 1) return {};
  const std::uint64_t tokens = ((most_tokens - 1) / shares / step + 1) * step;
  return {static_cast<std::uint32_t>(tokens), static_cast<std::uint32_t>((most_tokens - 1) / tokens + 1)};
}

}  // namespace detail

inline attention_split plan_attention(std::uint64_t rows, std::uint32_t query_heads, const kv_layout& layout,
                                      std::uint64_t most_tokens, const launch_limits& limits,
                                      attention_arithmetic arithmetic) noexcept {
  if (layout.heads == 0) return {};  // `paged_attention` refuses that
  // A row attends to at most this many tokens.
  most_tokens = std::min<std::uint64_t>(most_tokens, detail::most_attended_tokens);
  const std::uint32_t group = std::max(query_heads / layout.heads, 1U);
  if (detail::is_of_host(arithmetic)) {
    const plane_strides strides = layout.strides(0, 1);
    const std::uint32_t walked =
        strides.head < strides.token ? detail::walked_heads(layout.heads, group, layout.head_dim) : 1;
    const std::uint64_t items = std::clamp<std::uint64_t>(rows, 1, std::uint64_t{1} << 31) *
                                ((layout.heads - 1) / walked + 1) * ((group - 1) / detail::vector_heads + 1);
    // Four items for each thread end within a fourth of each other; a shorter share is begun and joined for
    // little.
    constexpr std::uint64_t least_tokens = 512;
    const std::uint64_t shares =
        std::clamp<std::uint64_t>(std::uint64_t{limits.multiprocessors} * 4 / items, 1,
                                  std::max<std::uint64_t>(most_tokens / least_tokens, 1));
    return detail::split_into(shares, most_tokens, detail::attention_tile);
  }
  const bool is_tensor = arithmetic == attention_arithmetic::tensor_cores;
  const bool is_latent = !layout.has_values;
  const std::uint32_t heads = is_tensor   ? detail::tensor_heads
                              : is_latent ? detail::latent_heads
                                          : detail::attention_heads(group);
  const std::uint32_t lanes = is_tensor   ? 32
                              : is_latent ? detail::latent_lanes
                                          : detail::attention_lanes(layout);
  const std::uint64_t columns = is_tensor && is_latent ? detail::tensor_latents<dtype::bf16>::columns : 1;
  const std::uint64_t units = std::uint64_t{layout.heads} * ((group - 1) / heads + 1) * columns;
  // More rows than possible gain nothing from shares either.
  const std::uint64_t items = std::clamp<std::uint64_t>(rows, 1, std::uint64_t{1} << 31) * units;
  // Twelve warps fit into a multiprocessor at once, and twice as many leave no long tail.
  const std::uint64_t wanted = std::uint64_t{limits.multiprocessors} * 12 * 2 * (32 / lanes);
  // A shorter share costs more to join than it gains, unless half of the device had no work.
  constexpr std::uint64_t least = 128;
  constexpr std::uint64_t least_idle = 32;
  const std::uint64_t usual = std::min(wanted / items, most_tokens / least);
  const std::uint64_t idle = std::min(wanted / 2 / items, most_tokens / least_idle);
  const std::uint64_t shares = std::max({std::uint64_t{1}, usual, idle});
  return detail::split_into(shares, most_tokens, is_tensor ? detail::tensor_tokens : detail::attention_tile);
}

inline std::uint64_t attention_workspace_bytes(std::uint64_t rows, const kv_layout& layout,
                                               const attention_options& options) noexcept {
  if (options.split.count <= 1) return 0;
  constexpr std::uint64_t all = std::numeric_limits<std::uint64_t>::max();
  const std::uint64_t floats =
      detail::attended_elements(layout, options, 1) + 2;  // of a part: its sums and its state
  const std::uint64_t parts = std::uint64_t{options.query_heads} * options.split.count;
  if (parts != 0 && rows > all / sizeof(float) / floats / parts) return all;
  const auto needed = detail::attention_floats_needed::of(rows, layout, options);
  return (needed.sums + needed.states) * sizeof(float);
}

namespace detail {

template <class Run, class Tables>
result<void> attend(const Run& run, const Tables& tables, const attention_request& of) {
  if (auto fits = check_attention(of); !fits) return fits;
  const kv_layout& layout = of.cache.layout;
  if (tables.block_tokens <= 0 || static_cast<std::uint32_t>(tables.block_tokens) != layout.block_tokens)
    return failure{errc::block_tokens_differ, 0,
                   tables.block_tokens <= 0 ? 0 : static_cast<std::uint64_t>(tables.block_tokens),
                   layout.block_tokens, "paged_attention"};
  if constexpr (token_tables<Tables>) {
    // A place in a list is not a position: a window, or a rank's share of tokens, would be of arbitrary
    // tokens.
    if (of.options.window != 0)
      return failure{errc::out_of_range, 0, of.options.window, 0,
                     "paged_attention: options.window, over lists of tokens; list the window's tokens"};
    if (layout.part.cp_size != 1)
      return failure{errc::unsupported_layout, 3, 1, layout.part.cp_size, "paged_attention: cache.layout"};
  }
  if constexpr (!vector_run<Run, Tables>) {
    if (is_of_host(of.options.arithmetic))
      return failure{
          errc::out_of_range, 0, static_cast<std::uint64_t>(of.options.arithmetic),
          static_cast<std::uint64_t>(attention_arithmetic::tensor_cores),
          of.options.arithmetic == attention_arithmetic::host_vectors
              ? "paged_attention: options.arithmetic (host_vectors needs a host_vector_executor)"
              : "paged_attention: options.arithmetic (host_integers needs a host_vector_executor)"};
  }
  if (of.rows.rows == 0) return {};
  const char* const what = of.rows.lengths == nullptr ? missing_counted_table(tables) : missing_table(tables);
  if (what != nullptr)
    return failure{errc::too_short, 0, static_cast<std::uint64_t>(tables.num_sequences), 0, what};
  const attention_shape shape = attention_shape_of(of);
  const std::uint32_t lanes = attention_lanes(layout);
  const attention_arithmetic arithmetic = of.options.arithmetic;
  const auto attend_shares = [&]() -> result<void> {
    if (of.options.latents != nullptr) {
      const latent_plane plane = latent_plane_of(of.cache, *of.options.latents, of.options.scales.keys);
      if constexpr (vector_run<Run, Tables>) {
        if (arithmetic == attention_arithmetic::host_vectors)
          return run.attend_by_vectors(shape, plane, tables);
      }
      if (arithmetic == attention_arithmetic::tensor_cores) {
        const auto attend_by = [&]<class Form>(const Form& form) {
          return run.each(attention_tensor_work<Form, Tables>(shape, tables, form));
        };
        if (plane.record.latent_element == dtype::bf16) return attend_by(tensor_latents<dtype::bf16>(plane));
        return attend_by(tensor_latents<dtype::fp8_e4m3>(plane));
      }
      return run.each(latent_attention_work<Tables>(shape, tables, plane));
    }
    if (has_codes(layout)) return attend_codes(run, shape, tables, of, lanes);
    switch (layout.element) {
      case dtype::f32:
        return attend_with<dtype::f32>(run, shape, tables, arithmetic, lanes);
      case dtype::f16:
        return attend_with<dtype::f16>(run, shape, tables, arithmetic, lanes);
      case dtype::fp8_e4m3:
        return attend_with<dtype::fp8_e4m3>(run, shape, tables, arithmetic, lanes);
      default:
        return attend_with<dtype::bf16>(run, shape, tables, arithmetic, lanes);
    }
  };
  if (auto done = attend_shares(); !done || of.options.split.count == 1) return done;
  return run.each(attention_merge_work<Tables>(shape, tables, merge_lanes(of.options.split.count)));
}

}  // namespace detail

template <class Run, class Tables>
  requires bounded_table<Tables> && counted_tables<Tables>
result<void> paged_attention(const Run& run, const Tables& tables, const attention_rows& rows,
                             const batch_vectors& queries, const batch_output& out, const kv_memory& cache,
                             std::uint32_t layer, std::span<std::byte> workspace,
                             const attention_options& options) {
  return detail::attend(run, tables, {rows, queries, out, cache, layer, workspace, options});
}

template <class Run, class Tables>
  requires bounded_table<Tables> && counted_tables<Tables>
result<void> paged_attention_part(const Run& run, const Tables& tables, const attention_rows& rows,
                                  const batch_vectors& queries, const attention_part_output& part,
                                  const kv_memory& cache, std::uint32_t layer, std::span<std::byte> workspace,
                                  const attention_options& options) {
  return detail::attend(run, tables, {rows, queries, {}, cache, layer, workspace, options, part, true});
}

}  // namespace v0
}  // namespace llmmem
