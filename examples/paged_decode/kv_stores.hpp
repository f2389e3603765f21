/// @file
/// The memory of a paged cache's blocks: elements, or codes with scales.
#pragma once

#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/latent_tokens.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/latent_record.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
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

/// A token's record of a batch in floats: latents, then the rotary part.
template <class Run>
void append_records(const Run& run, const llmmem::slot_front& slots, const float* records,
                    const llmmem::paging::latent_record& record, const llmmem::kv_memory& cache,
                    std::uint32_t layer) {
  const std::uint64_t row = record.key_elements() * sizeof(float);
  const auto* const from = reinterpret_cast<const std::byte*>(records);
  llmmem::append_mla(run, slots, {from, row, 0}, {from + record.latents * sizeof(float), row, 0}, record,
                     cache, layer, {.element = llmmem::dtype::f32})
      .value();
}

/// Keys and values in any form that attention reads: f32, bf16, fp8, codes with their scales in the block, or
/// records of latents.
template <class Place>
class element_store {
 public:
  element_store(Place& place, const llmmem::kv_layout& layout, std::uint64_t blocks,
                const std::optional<llmmem::paging::latent_record>& record = {})
      : place_(&place), cache_(place, layout, blocks), record_(record) {
    const std::vector<float> scales(2, fp8_scale);
    const float* const there = place.template put<float>(scale_bytes_, scales);
    const bool has_own = layout.has(llmmem::paging::plane_role::key_scale);
    if (layout.element == llmmem::dtype::fp8_e4m3 && !has_own) scales_ = {.keys = there, .values = there + 1};
  }

  void append(const step_tables& step, const float* keys, const float* values, std::uint32_t layer) {
    const llmmem::kv_memory cache = cache_.view();
    const llmmem::slot_front slots(step.slots, cache.layout.block_tokens, cache.blocks);
    if (record_) return append_records(place_->run(), slots, keys, *record_, cache, layer);
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
  std::optional<llmmem::paging::latent_record> record_;
  typename Place::memory scale_bytes_{};
  llmmem::kv_scales scales_{};
};

}  // namespace paged_decode
