/// @file
/// The memory of a paged cache's blocks: elements that attention reads, or groups of int8 or int4.
#pragma once

#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/kernels/quantize_groups.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "paged_decode/decoder.hpp"
#include "paged_decode/stored_form.hpp"

namespace paged_decode {

/// The tables of a step's kernels, in the memory of the place.
struct step_tables {
  std::size_t rows = 0;
  std::span<const std::int64_t> slots{};  ///< [rows]
  llmmem::csr_table_view blocks{};        ///< of the step's sequences
  llmmem::csr_table_view tokens{};        ///< their tokens side by side, in blocks of one
  std::size_t all_tokens = 0;
};

/// The memory and the tables of attention.
struct attended_cache {
  llmmem::kv_memory memory{};
  llmmem::csr_table_view tables{};
  std::uint32_t layer = 0;
  llmmem::kv_scales scales{};
};

/// Keys or values of a batch in floats, a token's heads side by side.
[[nodiscard]] inline llmmem::batch_vectors side_by_side(const float* data, const llmmem::kv_layout& of) {
  const std::uint64_t vector = of.head_dim * sizeof(float);
  return {reinterpret_cast<const std::byte*>(data), vector * of.heads, vector};
}

/// Copies blocks of a memory. Pairs are few, and travel with the launch.
template <class Place>
void copy_blocks(const Place& place, const llmmem::kv_memory& memory,
                 std::span<const llmmem::block_pair> pairs) {
  for (std::size_t i = 0; i < pairs.size(); i += llmmem::few_pairs::most) {
    const auto some = pairs.subspan(i, std::min<std::size_t>(pairs.size() - i, llmmem::few_pairs::most));
    llmmem::copy_few_kv_blocks(place.run(), memory, memory, some).value();
  }
}

/// A cache's bytes at a place, which begin as NaNs, so that reads of unwritten bytes show.
template <class Place>
class cache_memory {
 public:
  cache_memory(Place& place, const llmmem::kv_layout& layout, std::uint64_t blocks)
      : layout_(layout.checked()), blocks_(blocks) {
    const std::vector<std::byte> none(layout_.total_bytes(blocks), std::byte{0xFF});
    place.template put<std::byte>(bytes_, none);
  }
  [[nodiscard]] llmmem::kv_memory view() const noexcept { return {bytes_.data(), blocks_, layout_}; }
  [[nodiscard]] const llmmem::kv_layout& layout() const noexcept { return layout_; }

 private:
  llmmem::kv_layout layout_;
  std::uint64_t blocks_;
  typename Place::memory bytes_{};
};

/// Keys and values in f32, bf16 or fp8, which attention reads directly.
template <class Place>
class element_store {
 public:
  element_store(Place& place, const llmmem::kv_layout& layout, std::uint64_t blocks)
      : place_(&place), cache_(place, layout, blocks) {
    const std::vector<float> scales(2, fp8_scale);
    const float* const there = place.template put<float>(scale_bytes_, scales);
    if (layout.element == llmmem::dtype::fp8_e4m3) scales_ = {.keys = there, .values = there + 1};
  }

  void append(const step_tables& step, const float* keys, const float* values, std::uint32_t layer) {
    const llmmem::kv_memory cache = cache_.view();
    const llmmem::slot_front slots(step.slots, cache.layout.block_tokens, cache.blocks);
    llmmem::append_kv(place_->run(), slots, side_by_side(keys, cache.layout),
                      side_by_side(values, cache.layout), cache, layer,
                      {.element = llmmem::dtype::f32, .scales = scales_})
        .value();
  }
  [[nodiscard]] attended_cache attended(const step_tables& step, std::uint32_t layer) {
    return {cache_.view(), step.blocks, layer, scales_};
  }
  void copy(std::span<const llmmem::block_pair> pairs) { copy_blocks(*place_, cache_.view(), pairs); }
  /// The memories that hold a block.
  [[nodiscard]] std::array<llmmem::kv_memory, 1> memories() const noexcept { return {cache_.view()}; }

 private:
  Place* place_;
  cache_memory<Place> cache_;
  typename Place::memory scale_bytes_{};
  llmmem::kv_scales scales_{};
};

/// Keys and values in int8 or int4 with a scale for each group of a vector, in two caches with one table:
/// codes and scales. Attention reads neither, so each step gathers its sequences' tokens and converts them to
/// floats. That is the price of half of bf16's memory, or a quarter, without a kernel that converts during
/// attention.
template <class Place>
class group_store {
 public:
  /// @param layout  of the codes.
  /// @param group   elements that share a scale.
  group_store(Place& place, const llmmem::kv_layout& layout, std::uint64_t blocks, std::uint32_t group)
      : place_(&place),
        group_(group),
        codes_(place, layout, blocks),
        scales_(place, scales_of(layout, group), blocks) {}

  void append(const step_tables& step, const float* keys, const float* values, std::uint32_t layer) {
    const llmmem::kv_layout& layout = codes_.layout();
    quantized in[2];
    for (std::uint32_t p = 0; p < 2; ++p)
      in[p] = quantize(p == 0 ? keys : values, step.rows, staged_[p]);
    const llmmem::slot_front slots(step.slots, layout.block_tokens, codes_.view().blocks);
    const std::uint64_t code = layout.vector_bytes(0);
    const std::uint64_t scale = scales_.layout().vector_bytes(0);
    const std::uint64_t heads = layout.heads;
    llmmem::append_kv(place_->run(), slots, {in[0].codes, code * heads, code},
                      {in[1].codes, code * heads, code}, codes_.view(), layer, {.element = layout.element})
        .value();
    llmmem::append_kv(place_->run(), slots, {in[0].scales, scale * heads, scale},
                      {in[1].scales, scale * heads, scale}, scales_.view(), layer,
                      {.element = llmmem::dtype::f32})
        .value();
  }

  /// All tokens of the step's sequences as floats, side by side: a cache of one layer whose blocks have one
  /// token each.
  [[nodiscard]] attended_cache attended(const step_tables& step, std::uint32_t layer) {
    const llmmem::kv_layout& layout = codes_.layout();
    const std::uint64_t heads = layout.heads;
    const std::uint64_t code = layout.vector_bytes(0);
    const std::uint64_t scale = scales_.layout().vector_bytes(0);
    quantized of[2];
    for (std::uint32_t p = 0; p < 2; ++p)
      of[p] = room(step.all_tokens, staged_[p]);
    const llmmem::gather_rows rows{.cu_seq_lens = step.tokens.indptr, .rows = step.all_tokens};
    const llmmem::table_front front(step.blocks, rows, codes_.view().blocks);
    llmmem::gather_kv(place_->run(), front, {of[0].codes, code * heads, code},
                      {of[1].codes, code * heads, code}, codes_.view(), layer, {.element = layout.element})
        .value();
    llmmem::gather_kv(place_->run(), front, {of[0].scales, scale * heads, scale},
                      {of[1].scales, scale * heads, scale}, scales_.view(), layer,
                      {.element = llmmem::dtype::f32})
        .value();
    llmmem::kv_layout floats = layout;
    floats.layers = 1;
    floats.block_tokens = 1;
    floats.element = llmmem::dtype::f32;
    floats.order = llmmem::block_order::layer_first;  // all keys, and then all values
    std::byte* const values = place_->make_room(floats_, floats.total_bytes(step.all_tokens));
    for (std::uint32_t p = 0; p < 2; ++p)
      dequantize(of[p], step.all_tokens, values + floats.strides(p, step.all_tokens).base);
    return {{values, step.all_tokens, floats}, step.tokens, 0, {}};
  }

  void copy(std::span<const llmmem::block_pair> pairs) {
    copy_blocks(*place_, codes_.view(), pairs);
    copy_blocks(*place_, scales_.view(), pairs);
  }
  /// The memories that hold a block.
  [[nodiscard]] std::array<llmmem::kv_memory, 2> memories() const noexcept {
    return {codes_.view(), scales_.view()};
  }

 private:
  struct quantized {
    std::byte* codes = nullptr;
    std::byte* scales = nullptr;
  };
  struct staged {
    typename Place::memory codes{};
    typename Place::memory scales{};
  };

  [[nodiscard]] static llmmem::kv_layout scales_of(llmmem::kv_layout layout, std::uint32_t group) {
    layout.head_dim /= group;
    layout.element = llmmem::dtype::f32;
    return layout;
  }
  [[nodiscard]] llmmem::group_shape groups_of(std::size_t tokens) const {
    return {.rows = std::uint64_t{tokens} * codes_.layout().heads * (codes_.layout().head_dim / group_),
            .elements = group_};
  }
  /// Bytes of a group.
  [[nodiscard]] std::uint64_t code_bytes() const noexcept {
    return group_ * llmmem::bits_of(codes_.layout().element) / 8;
  }
  [[nodiscard]] quantized room(std::size_t tokens, staged& in) {
    const std::uint64_t groups = groups_of(tokens).rows;
    return {place_->make_room(in.codes, groups * code_bytes()),
            place_->make_room(in.scales, groups * sizeof(float))};
  }
  [[nodiscard]] quantized quantize(const float* values, std::size_t tokens, staged& in) {
    const quantized out = room(tokens, in);
    const auto* const bytes = reinterpret_cast<const std::byte*>(values);
    llmmem::quantize_groups(place_->run(), groups_of(tokens),
                            {bytes, llmmem::dtype::f32, group_ * sizeof(float)},
                            {out.codes, codes_.layout().element, code_bytes()}, {out.scales, sizeof(float)})
        .value();
    return out;
  }
  void dequantize(const quantized& of, std::size_t tokens, std::byte* to) {
    llmmem::dequantize_groups(place_->run(), groups_of(tokens),
                              {of.codes, codes_.layout().element, code_bytes()}, {of.scales, sizeof(float)},
                              {to, llmmem::dtype::f32, group_ * sizeof(float)})
        .value();
  }

  Place* place_;
  std::uint32_t group_;
  cache_memory<Place> codes_;
  cache_memory<Place> scales_;
  staged staged_[2]{};
  typename Place::memory floats_{};
};

}  // namespace paged_decode
