/// @file
/// The bodies of `kv_block_map` and `copy_kv_blocks`.
#pragma once

#include <llmmem/kernels/kv_blocks.hpp>

namespace llmmem::inline v0 {

inline kv_block_map::kv_block_map(const kv_memory& to, const kv_memory& from,
                                  std::span<const block_pair> pairs, const layer_range& layers,
                                  std::uint32_t* out_of_range) noexcept
    : pair_(pairs.data()),
      pairs_(pairs.size()),
      from_blocks_(from.blocks),
      to_blocks_(to.blocks),
      heads_(from.layout.heads),
      layers_(layers),
      planes_(from.layout.planes()),
      out_of_range_(out_of_range) {
  const kv_layout& layout = from.layout;
  for (std::uint32_t p = 0; p < planes_; ++p) {
    plane& of = plane_[p];
    of.from = kv_plane_of(from, p);
    of.to = kv_plane_of(to, p);
    of.bytes = layout.unit_bytes(p);
    const plane_strides& read = of.from.strides;
    const plane_strides& written = of.to.strides;
    const bool are_heads_alike = layout.heads == 1 || read.head == written.head;
    const bool are_tokens_alike = layout.block_tokens == 1 || read.token == written.token;
    is_alike_ = is_alike_ && are_heads_alike && are_tokens_alike;
  }
  if (is_alike_) {
    merge_planes(layout);
    rows_a_pair_ = divider(static_cast<std::uint32_t>(
        (std::max(plane_[0].bytes, planes_ == 2 ? plane_[1].bytes : 0) + tile_bytes - 1) / tile_bytes));
  } else {
    for (std::uint32_t p = 0; p < planes_; ++p)
      plane_[p].bytes = layout.vector_bytes(p);
    rows_a_pair_ = divider(layout.heads * layout.block_tokens);
  }
}

/// K and V, and then all layers, in one run where they lie so at both ends: fewer and longer rows. What a
/// table says is not known here.
inline void kv_block_map::merge_planes(const kv_layout& layout) noexcept {
  plane& first = plane_[0];
  if (first.from.layer_table != nullptr || first.to.layer_table != nullptr) return;
  const auto follows = [&](const kv_plane& k, const kv_plane& v) {
    return v.data == k.data + first.bytes && k.strides.block >= layout.layer_bytes();
  };
  if (planes_ == 2 && follows(first.from, plane_[1].from) && follows(first.to, plane_[1].to)) {
    first.bytes = layout.layer_bytes();
    planes_ = 1;
  }
  const bool are_layers_one_run =
      first.from.strides.layer == first.bytes && first.to.strides.layer == first.bytes;
  if (planes_ == 1 && are_layers_one_run && layers_.count > 1) {
    first.from.data += layers_.first * first.bytes;
    first.to.data += layers_.first * first.bytes;
    first.bytes *= layers_.count;
    layers_ = {.first = 0, .count = 1};
  }
}

inline row_alignment kv_block_map::alignment() const noexcept {
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

template <class Run>
result<void> copy_kv_blocks(const Run& run, const kv_memory& to, const kv_memory& from,
                            std::span<const block_pair> pairs, const block_copy_options& options) {
  const kv_layout& layout = from.layout;
  if (to.layout.content_fingerprint() != layout.content_fingerprint())
    return failure{errc::layout_mismatch, 0, to.layout.content_fingerprint(), layout.content_fingerprint(),
                   "copy_kv_blocks"};
  layer_range layers = options.layers;
  if (layers.first >= layout.layers)
    return failure{errc::out_of_range, 0, layers.first, layout.layers - 1, "copy_kv_blocks: layers"};
  if (layers.count == 0) layers.count = layout.layers - layers.first;
  if (layers.count > layout.layers - layers.first)
    return failure{errc::out_of_range, 0, std::uint64_t{layers.first} + layers.count - 1, layout.layers - 1,
                   "copy_kv_blocks: layers"};
  return run.template move<access::passing, access::passing>(
      kv_block_map(to, from, pairs, layers, options.out_of_range), copy_op{});
}

}  // namespace llmmem::inline v0
