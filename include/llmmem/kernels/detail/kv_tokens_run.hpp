/// @file
/// The common run of appending and gathering: planes as segments, and the choice of a conversion.
#pragma once

#include <llmmem/kernels/detail/code_tokens.hpp>
#include <llmmem/kernels/detail/coded_planes.hpp>
#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/detail/kv_form_checks.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/paging/errors.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// One end of a plane in a batch.
struct batch_plane {
  const std::byte* from = nullptr;  // of an append
  std::byte* to = nullptr;          // of a gather
  std::uint64_t token = 0;
  std::uint64_t head = 0;
};

[[nodiscard]] inline batch_plane plane_of(const batch_vectors& of) noexcept {
  return {.from = of.data, .token = of.token_stride, .head = of.head_stride};
}
[[nodiscard]] inline batch_plane plane_of(const batch_output& of) noexcept {
  return {.to = of.data, .token = of.token_stride, .head = of.head_stride};
}

/// A request in either direction.
struct token_request {
  kv_memory cache{};
  std::uint32_t layer = 0;
  token_options options{};
  const token_names* names = nullptr;
};

/// Checks that everything fits, before anything runs.
template <token_front Front>
result<void> check_request(const Front& front, const token_request& of) noexcept {
  const kv_layout& layout = of.cache.layout;
  if (auto fits = has_codes(layout) ? check_codes(layout, of.names->who) : check_forms(layout, of.names->who);
      !fits)
    return fits;
  if (layout.layers == 0 || of.layer >= layout.layers)
    return failure{errc::out_of_range, 0, of.layer, layout.layers == 0 ? 0 : layout.layers - 1,
                   of.names->layer};
  if (front.blocks() > of.cache.blocks)
    return failure{errc::no_such_block, 0, front.blocks() - 1, of.cache.blocks, of.names->who};
  if (front.block_tokens() == 0 || front.block_tokens() != layout.block_tokens)
    return failure{errc::block_tokens_differ, 0, front.block_tokens(), layout.block_tokens, of.names->who};
  constexpr std::uint64_t most = std::numeric_limits<std::int32_t>::max();
  const std::uint64_t element = std::max(bits_of(of.options.element), bits_of(layout.element));
  for (std::uint32_t p = 0; p < layout.kv_planes(); ++p) {
    const std::uint64_t vector = layout.vector_elements(p) * element / 8;
    if (vector != 0 && layout.heads > most / vector)
      return failure{errc::past_the_bytes, p, vector > most ? vector : vector * layout.heads, most,
                     of.names->who};
  }
  if constexpr (telling_front<Front>) {
    // The names of tables are the same for all callers.
    if (const char* const what = front.missing(); what != nullptr)
      return failure{errc::too_short, 0, front.tokens(), 0, what};
  }
  return {};
}

/// Checks whether memory is missing at either end, and whether vectors that are written have space.
/// @param segments  of the batch's planes, with lengths in elements.
template <kv_direction Direction, token_front Front>
result<void> check_ends(const Front& front, const token_request& of,
                        std::span<const token_segment> segments) noexcept {
  if (front.tokens() == 0) return {};
  if (auto there = check_memory(of.cache, of.names->cache); !there) return there;
  constexpr bool is_append = Direction == kv_direction::append;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const token_segment& each = segments[i];
    const std::byte* const data = is_append ? each.from : each.to;
    const vector_array vectors{.data = data,
                               .tokens = front.tokens(),
                               .token_stride = each.batch_token,
                               .heads = of.cache.layout.heads,
                               .head_stride = each.batch_head,
                               .vector_bytes = each.elements * bits_of(of.options.element) / 8};
    if (auto fits = check_vectors(vectors, !is_append, of.names->batch[i]); !fits) return fits;
  }
  return {};
}

/// Checks that a device can read elements of the batch whole.
template <kv_direction Direction>
result<void> check_batch(const token_request& of, std::span<const token_segment> segments) noexcept {
  constexpr bool is_append = Direction == kv_direction::append;
  const std::uint64_t in_batch = bits_of(of.options.element) / 8;
  const auto address = [](const std::byte* at) {
    return std::uint64_t{reinterpret_cast<std::uintptr_t>(at)};
  };
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const token_segment& each = segments[i];
    const vector_names& names = of.names->batch[i];
    if (auto fits = whole(address(is_append ? each.from : each.to), in_batch, names.data); !fits) return fits;
    if (auto fits = whole(each.batch_token, in_batch, names.token_stride); !fits) return fits;
    if (auto fits = whole(each.batch_head, in_batch, names.head_stride); !fits) return fits;
  }
  return {};
}

/// Checks that a device can read converted elements whole. Bytes need no alignment.
template <kv_direction Direction>
result<void> check_elements(const token_request& of, std::span<const token_segment> segments) noexcept {
  if (auto fits = check_batch<Direction>(of, segments); !fits) return fits;
  const std::uint64_t in_cache = bits_of(of.cache.layout.element) / 8;
  if (of.cache.plane_table != nullptr)
    return whole(of.cache.plane_alignment, in_cache, of.names->cache.plane_alignment);
  return whole(std::uint64_t{reinterpret_cast<std::uintptr_t>(of.cache.data)}, in_cache,
               of.names->cache.data);
}

/// Returns a plane of the cache from element `first` of each vector on, with its place in the batch.
template <kv_direction Direction>
token_segment segment_of(const token_request& of, std::uint32_t p, const batch_plane& batch,
                         std::uint64_t first, std::uint64_t elements) noexcept {
  const kv_plane cache = kv_plane_of(of.cache, p);
  const std::uint64_t in_vector = first * bits_of(of.cache.layout.element) / 8;
  token_segment out{.from = batch.from,
                    .to = batch.to,
                    .batch_token = batch.token,
                    .batch_head = batch.head,
                    .cache_block = cache.strides.block,
                    .cache_token = cache.strides.token,
                    .cache_head = cache.strides.head,
                    .elements = static_cast<std::uint32_t>(elements)};
  if (cache.layer_table != nullptr) {
    out.cache_alignment = cache.alignment;
    out.cache_entry = cache.layer_table + of.layer;
    out.cache_first = in_vector;
  } else if (cache.data != nullptr) {
    std::byte* const there = plane_base(cache, of.layer) + in_vector;
    if constexpr (Direction == kv_direction::append) {
      out.to = there;
    } else {
      out.from = there;
    }
  }
  return out;
}

template <dtype From, dtype To, kv_direction Direction, class Run, row_map Map>
result<void> move_as(const Run& run, const Map& map, const kv_scales& scales, std::uint32_t rows_a_token) {
  // Attention reads appended vectors next, and the caller reads gathered ones.
  return run.template move<cache_hint::streaming, cache_hint::kept>(
      map, kv_scale_op<From, To, Direction>(scales, rows_a_token));
}

/// Between elements in a batch and those in a cache.
template <kv_direction Direction, dtype Batch, dtype Cache, class Run, row_map Map>
result<void> move_between(const Run& run, const Map& map, const kv_scales& scales,
                          std::uint32_t rows_a_token) {
  if constexpr (Direction == kv_direction::append) {
    return move_as<Batch, Cache, Direction>(run, map, scales, rows_a_token);
  } else {
    return move_as<Cache, Batch, Direction>(run, map, scales, rows_a_token);
  }
}

template <kv_direction Direction, class Run, row_map Map>
result<void> move_converted(const Run& run, const Map& map, const token_request& of,
                            std::uint32_t rows_a_token) {
  const dtype cache = of.cache.layout.element;
  const auto is = [&](dtype in_batch, dtype in_cache) {
    return of.options.element == in_batch && cache == in_cache;
  };
  constexpr dtype f32 = dtype::f32;
  constexpr dtype bf16 = dtype::bf16;
  constexpr dtype f16 = dtype::f16;
  constexpr dtype fp8 = dtype::fp8_e4m3;
  const kv_scales& scales = of.options.scales;
  if (is(bf16, fp8)) return move_between<Direction, bf16, fp8>(run, map, scales, rows_a_token);
  if (is(f16, fp8)) return move_between<Direction, f16, fp8>(run, map, scales, rows_a_token);
  if (is(f32, fp8)) return move_between<Direction, f32, fp8>(run, map, scales, rows_a_token);
  if (is(f32, bf16)) return move_between<Direction, f32, bf16>(run, map, scales, rows_a_token);
  if (is(f32, f16)) return move_between<Direction, f32, f16>(run, map, scales, rows_a_token);
  const bool is_append = Direction == kv_direction::append;
  return failure{errc::no_conversion, 0, static_cast<std::uint64_t>(is_append ? cache : of.options.element),
                 static_cast<std::uint64_t>(is_append ? of.options.element : cache), of.names->who};
}

/// @param are_side_by_side  a token's heads are one run of bytes at both ends.
template <kv_direction Direction, class Run, token_front Front>
result<void> move_segments(const Run& run, const Front& front, std::span<token_segment> segments,
                           const token_request& of, bool are_side_by_side) {
  if (auto fits = check_ends<Direction>(front, of, segments); !fits) return fits;
  const std::uint32_t heads = of.cache.layout.heads;
  for (token_segment& each : segments) {
    // Distances between a single token's vectors are unused, so they restrict no access.
    if (front.tokens() <= 1) each.batch_token = 0;
    if (heads <= 1) each.batch_head = 0;
  }
  const bool is_copy = of.options.element == of.cache.layout.element;
  const bool is_by_head = !are_side_by_side || (!is_copy && of.options.scales.is_by_head);
  if (is_copy) {  // of bytes
    for (token_segment& each : segments)
      each.elements = static_cast<std::uint32_t>(each.elements * bits_of(of.options.element) / 8);
  }
  if (!is_copy && front.tokens() != 0) {
    if (auto fits = check_elements<Direction>(of, segments); !fits) return fits;
  }
  const kv_token_map<Front, Direction> map(front, segments, heads, is_by_head, of.options.out_of_range);
  if (is_copy) return run.template move<cache_hint::streaming, cache_hint::kept>(map, copy_op{});
  return move_converted<Direction>(run, map, of, is_by_head ? heads : 1);
}

/// Between vectors of a batch and codes with scales in a cache.
template <kv_direction Direction, class Run, token_front Front>
result<void> move_codes(const Run& run, const Front& front, const std::array<batch_plane, 2>& batch,
                        const token_request& of) {
  const kv_layout& layout = of.cache.layout;
  constexpr bool is_append = Direction == kv_direction::append;
  if constexpr (is_append) {
    if (auto fits = check_written_codes(layout, of.names->who); !fits) return fits;
  }
  if (auto fits = check_code_vectors(layout, of.names->who); !fits) return fits;
  const dtype element = of.options.element;
  if (element != dtype::f32 && element != dtype::bf16 && element != dtype::f16)
    return failure{errc::no_conversion, 0, static_cast<std::uint64_t>(is_append ? layout.element : element),
                   static_cast<std::uint64_t>(is_append ? element : layout.element), of.names->who};
  const std::uint64_t tokens = front.tokens();
  std::array<token_segment, 2> segments{};
  for (std::uint32_t p = 0; p < layout.kv_planes(); ++p) {
    segments[p].from = batch[p].from;
    segments[p].to = batch[p].to;
    segments[p].batch_token = tokens <= 1 ? 0 : batch[p].token;
    segments[p].batch_head = layout.heads <= 1 ? 0 : batch[p].head;
    segments[p].elements = static_cast<std::uint32_t>(layout.vector_elements(p));
  }
  const std::span<const token_segment> all = std::span(segments).first(layout.kv_planes());
  if (auto fits = check_ends<Direction>(front, of, all); !fits) return fits;
  if (tokens == 0) return {};
  if (auto fits = check_batch<Direction>(of, all); !fits) return fits;
  if (auto fits = check_code_places(of.cache, of.names->cache.data); !fits) return fits;
  using work = code_tokens_work<Direction, batch_values<Front>>;
  typename work::request to;
  token_vectors<std::byte> vectors[2]{};
  std::uint64_t longest = attention_pack;
  for (std::uint32_t p = 0; p < layout.kv_planes(); ++p) {
    const token_segment& each = segments[p];
    // A gather writes these, an append only reads them.
    std::byte* const data = is_append ? const_cast<std::byte*>(each.from) : each.to;
    vectors[p] = {data, each.batch_token, each.batch_head};
    to.planes[p] = coded_plane_of(of.cache, p, of.options.scales);
    to.packs[p] = each.elements / attention_pack;
    to.value_width[p] = std::min<std::uint32_t>(
        alignment_of(reinterpret_cast<std::uintptr_t>(data), each.batch_token, each.batch_head), 16);
    longest = std::max<std::uint64_t>(longest, each.elements);
  }
  to.plane_count = layout.kv_planes();
  to.heads = layout.heads;
  to.lanes = std::max(std::bit_ceil(static_cast<std::uint32_t>(longest / attention_pack)), 8U);
  to.element = element;
  to.out_of_range = of.options.out_of_range;
  return run.each(work(batch_values<Front>(front, vectors, of.layer), to));
}

/// Runs all planes of a cache, from or to a batch's.
template <kv_direction Direction, class Run, token_front Front>
result<void> move_planes(const Run& run, const Front& front, const std::array<batch_plane, 2>& batch,
                         const token_request& of) {
  if (auto fits = check_request(front, of); !fits) return fits;
  const kv_layout& layout = of.cache.layout;
  if (has_codes(layout)) return move_codes<Direction>(run, front, batch, of);
  std::array<token_segment, 2> segments;
  bool are_side_by_side = true;
  for (std::uint32_t p = 0; p < layout.kv_planes(); ++p) {
    const std::uint64_t elements = layout.vector_elements(p);
    segments[p] = segment_of<Direction>(of, p, batch[p], 0, elements);
    const bool is_one_run = batch[p].head == elements * bits_of(of.options.element) / 8 &&
                            segments[p].cache_head == layout.vector_bytes(p);
    are_side_by_side = are_side_by_side && (layout.heads == 1 || is_one_run);
  }
  return move_segments<Direction>(run, front, std::span(segments).first(layout.kv_planes()), of,
                                  are_side_by_side);
}

/// Runs the two parts of each vector of a cache of one plane and one head.
template <kv_direction Direction, class Run, token_front Front>
result<void> move_halves(const Run& run, const Front& front, const std::array<batch_plane, 2>& batch,
                         std::uint32_t first_elements, token_request of) {
  if (auto fits = check_forms(of.cache.layout, of.names->who); !fits) return fits;
  if (auto fits = check_request(front, of); !fits) return fits;
  const kv_layout& layout = of.cache.layout;
  const std::uint64_t all = layout.vector_elements(0);
  if (layout.heads != 1 || layout.has_values || first_elements >= all)
    return failure{errc::size_mismatch, 0, first_elements, all, of.names->who};
  // Elements of four bits must be cut at a byte's end.
  for (const dtype element : {layout.element, of.options.element}) {
    const std::uint64_t bits = first_elements * bits_of(element);
    if (bits % 8 != 0) return failure{errc::size_mismatch, 0, bits, bits / 8 * 8, of.names->cut};
  }
  std::array segments{segment_of<Direction>(of, 0, batch[0], 0, first_elements),
                      segment_of<Direction>(of, 0, batch[1], first_elements, all - first_elements)};
  of.options.scales.values = of.options.scales.keys;
  return move_segments<Direction>(run, front, segments, of, true);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
