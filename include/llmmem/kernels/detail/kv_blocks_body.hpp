/// @file
/// The bodies of `block_pair_map`, `copy_kv_blocks` and `copy_few_kv_blocks`.
#pragma once

#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/paging/errors.hpp>

#include <array>

namespace llmmem {
inline namespace v0 {

template <block_pairs Pairs>
block_pair_map<Pairs>::block_pair_map(const kv_memory& to, const kv_memory& from, const Pairs& pairs,
                                      const layer_range& layers, std::uint32_t* out_of_range) noexcept
    : block_pair_map(to, from, pairs, layers, out_of_range,
                     detail::copy_parts_of(to.layout, from.layout).all()) {}

template <block_pairs Pairs>
block_pair_map<Pairs>::block_pair_map(const kv_memory& to, const kv_memory& from, const Pairs& pairs,
                                      const layer_range& layers, std::uint32_t* out_of_range,
                                      std::span<const detail::kv_copy_part> parts) noexcept
    : pairs_(pairs),
      from_blocks_(from.blocks),
      to_blocks_(to.blocks),
      layers_(layers),
      planes_(static_cast<std::uint32_t>(parts.size())),
      out_of_range_(out_of_range) {
  detail::vector_runs runs{};  // of both planes: they differ by the length of a vector
  for (std::uint32_t p = 0; p < planes_; ++p) {
    plane& of = plane_[p];
    of.from = detail::copied_plane(from, parts[p]);
    of.to = detail::copied_plane(to, parts[p]);
    runs = detail::common_runs(of.from.strides, of.to.strides, parts[p].tokens, parts[p].heads);
    of.bytes = runs.bytes;
  }
  is_alike_ = runs.tokens * runs.heads == 1 || join_layers_of_vectors(to.layout, from.layout, parts);
  if (is_alike_) {
    join_planes();
    join_layers();
    join_planes();
    rows_a_pair_ = divider(static_cast<std::uint32_t>(
        (std::max(plane_[0].bytes, planes_ == 2 ? plane_[1].bytes : 0) + tile_bytes - 1) / tile_bytes));
  } else {
    heads_ = divider(static_cast<std::uint32_t>(runs.heads));
    rows_a_pair_ = divider(static_cast<std::uint32_t>(runs.heads * runs.tokens));
  }
}

/// Joins all layers of each plane into one run if both ends have the layers between the vectors, in the same
/// order; returns whether it did. A plane whose runs are single vectors has such an order, and equal
/// distances of tokens and heads then mean the same order. The host cannot read tables of addresses, so
/// planes with a table are joined neither here nor below.
template <block_pairs Pairs>
bool block_pair_map<Pairs>::join_layers_of_vectors(const kv_layout& to, const kv_layout& from,
                                                   std::span<const detail::kv_copy_part> parts) noexcept {
  if (layers_.count != from.layers) return false;
  for (const detail::kv_copy_part& each : parts) {
    if (to.vector_run_of(each.plane).bytes != each.vector_bytes ||
        from.vector_run_of(each.plane).bytes != each.vector_bytes)
      return false;
  }
  const auto is_alike = [](const kv_plane& a, const kv_plane& b) {
    return a.data != nullptr && b.data != nullptr && a.strides.token == b.strides.token &&
           a.strides.head == b.strides.head;
  };
  for (std::uint32_t p = 0; p < planes_; ++p) {
    if (!is_alike(plane_[p].from, plane_[p].to)) return false;
  }
  for (std::uint32_t p = 0; p < planes_; ++p)
    plane_[p].bytes = parts[p].vector_bytes * parts[p].tokens * parts[p].heads * from.layers;
  layers_ = {.first = 0, .count = 1};
  return true;
}

/// Joins K and V into one run if they are adjacent at both ends: fewer and longer rows.
template <block_pairs Pairs>
void block_pair_map<Pairs>::join_planes() noexcept {
  if (planes_ != 2) return;
  plane& first = plane_[0];
  const plane& second = plane_[1];
  const std::uint64_t bytes = first.bytes + second.bytes;
  const auto follows = [&](const kv_plane& k, const kv_plane& v) {
    return k.data != nullptr && v.data == k.data + first.bytes && k.strides.block >= bytes;
  };
  if (!follows(first.from, second.from) || !follows(first.to, second.to)) return;
  first.bytes = bytes;
  planes_ = 1;
}

/// The same for the requested layers.
template <block_pairs Pairs>
void block_pair_map<Pairs>::join_layers() noexcept {
  const auto are_one_run = [](const kv_plane& of, std::uint64_t bytes) {
    return of.data != nullptr && of.strides.layer == bytes;
  };
  for (std::uint32_t p = 0; p < planes_; ++p) {
    if (!are_one_run(plane_[p].from, plane_[p].bytes) || !are_one_run(plane_[p].to, plane_[p].bytes)) return;
  }
  for (std::uint32_t p = 0; p < planes_; ++p) {
    plane& of = plane_[p];
    of.from.data += layers_.first * of.bytes;
    of.to.data += layers_.first * of.bytes;
    of.bytes *= layers_.count;
  }
  layers_ = {.first = 0, .count = 1};
}

template <block_pairs Pairs>
row_alignment block_pair_map<Pairs>::alignment() const noexcept {
  row_alignment all{16, 16};
  for (std::uint32_t p = 0; p < planes_; ++p) {
    const auto of = [&](const kv_plane& each) {
      const std::uint32_t base = each.layer_table != nullptr
                                     ? each.alignment
                                     : alignment_of(reinterpret_cast<std::uintptr_t>(each.data));
      const plane_strides& strides = each.strides;
      if (is_alike_) return alignment_of(base, strides.block, strides.layer);
      return alignment_of(base, strides.block, strides.layer, strides.token, strides.head);
    };
    all.from = std::min(all.from, of(plane_[p].from));
    all.to = std::min(all.to, of(plane_[p].to));
  }
  return all;
}

namespace detail {

/// The names of the arguments of a call that copies blocks.
struct block_copy_names {
  const char* layers = "";
  const char* pairs = "";
  memory_names to{};
  memory_names from{};
};
inline constexpr block_copy_names copy_kv_blocks_names{
    "copy_kv_blocks: layers",
    "copy_kv_blocks: pairs",
    {"copy_kv_blocks: to", "copy_kv_blocks: to.plane_alignment"},
    {"copy_kv_blocks: from", "copy_kv_blocks: from.plane_alignment"}};
inline constexpr block_copy_names copy_few_kv_blocks_names{
    "copy_few_kv_blocks: layers",
    "copy_few_kv_blocks: pairs",
    {"copy_few_kv_blocks: to", "copy_few_kv_blocks: to.plane_alignment"},
    {"copy_few_kv_blocks: from", "copy_few_kv_blocks: from.plane_alignment"}};

/// @return the requested layers.
[[nodiscard]] inline result<layer_range> check_copy(const kv_memory& to, const kv_memory& from,
                                                    std::span<const block_pair> pairs, layer_range layers,
                                                    const block_copy_names& names) noexcept {
  const kv_layout& layout = from.layout;
  if (to.layout != layout) {
    const std::uint64_t theirs = to.layout.content_fingerprint();
    const std::uint64_t ours = layout.content_fingerprint();
    if (theirs != ours)
      return failure{errc::layout_mismatch, 0, theirs, ours, differing_field(to.layout, layout)};
  }
  if (layers.first >= layout.layers)
    return failure{errc::out_of_range, 0, layers.first, layout.layers == 0 ? 0 : layout.layers - 1,
                   names.layers};
  if (layers.count == 0) layers.count = layout.layers - layers.first;
  if (layers.count > layout.layers - layers.first)
    return failure{errc::out_of_range, 0, std::uint64_t{layers.first} + layers.count - 1, layout.layers - 1,
                   names.layers};
  constexpr std::uint32_t most = 0x7FFF'FFFF;
  if (layers.count > most / layout.kv_planes())
    return failure{errc::out_of_range, 0, layers.count, most / layout.kv_planes(), names.layers};
  if (pairs.empty()) return layers;
  if (pairs.data() == nullptr) return failure{errc::too_short, 0, pairs.size(), 0, names.pairs};
  if (auto there = check_memory(to, names.to); !there) return there.error();
  if (auto there = check_memory(from, names.from); !there) return there.error();
  return layers;
}

template <class Pairs, class Run>
result<void> copy_pairs(const Run& run, const kv_memory& to, const kv_memory& from, const Pairs& pairs,
                        const layer_range& layers, std::uint32_t* out_of_range) {
  const kv_copy_parts all = copy_parts_of(to.layout, from.layout);
  // K and V in one launch; with further planes, each plane in its own.
  const std::size_t step = from.layout.planes() == from.layout.kv_planes() ? all.count : 1;
  for (std::size_t i = 0; i < all.count; i += step) {
    const block_pair_map<Pairs> map(to, from, pairs, layers, out_of_range, all.all().subspan(i, step));
    if (auto moved = run.template move<cache_hint::streaming, cache_hint::streaming>(map, copy_op{}); !moved)
      return moved;
  }
  return {};
}

/// Copies an allocator's requests, as pairs.
template <class Run, class Asked>
result<void> copy_asked(const Run& run, const kv_memory& memory, std::span<const Asked> asked,
                        const block_copy_options& options) {
  std::array<block_pair, few_pairs::most> pairs{};
  if (asked.size() > pairs.size())
    return failure{errc::out_of_range, 0, asked.size(), pairs.size(), copy_few_kv_blocks_names.pairs};
  for (std::size_t i = 0; i < asked.size(); ++i)
    pairs[i] = pair_of(asked[i]);
  return copy_few_kv_blocks(run, memory, memory, std::span<const block_pair>(pairs.data(), asked.size()),
                            options);
}

}  // namespace detail

template <class Run>
result<void> copy_kv_blocks(const Run& run, const kv_memory& to, const kv_memory& from,
                            std::span<const block_pair> pairs, const block_copy_options& options) {
  const auto layers = detail::check_copy(to, from, pairs, options.layers, detail::copy_kv_blocks_names);
  if (!layers) return layers.error();
  return detail::copy_pairs<listed_pairs>(run, to, from, pairs, *layers, options.out_of_range);
}

template <class Run>
result<void> copy_few_kv_blocks(const Run& run, const kv_memory& to, const kv_memory& from,
                                std::span<const block_pair> pairs, const block_copy_options& options) {
  const detail::block_copy_names& names = detail::copy_few_kv_blocks_names;
  const auto layers = detail::check_copy(to, from, pairs, options.layers, names);
  if (!layers) return layers.error();
  if (pairs.size() > few_pairs::most)
    return failure{errc::out_of_range, 0, pairs.size(), few_pairs::most, names.pairs};
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const block_pair& pair = pairs[i];
    if (pair.from < 0 || pair.to < 0) continue;
    const auto place = static_cast<std::uint32_t>(i);
    const auto source = static_cast<std::uint64_t>(pair.from);
    const auto target = static_cast<std::uint64_t>(pair.to);
    if (source >= from.blocks) return failure{errc::no_such_block, place, source, from.blocks, names.pairs};
    if (target >= to.blocks) return failure{errc::no_such_block, place, target, to.blocks, names.pairs};
  }
  return detail::copy_pairs<few_pairs>(run, to, from, few_pairs(pairs), *layers, options.out_of_range);
}

template <class Run>
result<void> copy_few_kv_blocks(const Run& run, const kv_memory& memory, std::span<const block_copy> copies,
                                const block_copy_options& options) {
  return detail::copy_asked(run, memory, copies, options);
}

template <class Run>
result<void> copy_few_kv_blocks(const Run& run, const kv_memory& memory, std::span<const block_move> moves,
                                const block_copy_options& options) {
  return detail::copy_asked(run, memory, moves, options);
}

}  // namespace v0
}  // namespace llmmem
