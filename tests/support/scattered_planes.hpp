/// @file
/// A paged cache in several allocations, for tests of what reads a table of planes.
#pragma once

#include <llmmem/paging/kv_layout.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace llmmem_tests {

/// The bytes of a cache of one allocation, cut into as many as its order allows, each no longer than it must
/// be: a sanitizer sees what goes past one.
class scattered_planes {
 public:
  /// @param shift  bytes that every allocation is off the alignment of its kind.
  scattered_planes(const llmmem::kv_layout& layout, std::uint64_t blocks, const std::vector<std::byte>& image,
                   std::size_t shift = 0)
      : layout_(layout), blocks_(blocks), table_(layout.layers * std::size_t{layout.planes()}) {
    for (std::uint32_t p = 0; p < layout.planes(); ++p) {
      for (std::uint32_t layer = 0; layer < layout.layers; ++layer) {
        const auto [room, behind, bytes] = place_of(p, layer);
        if (rooms_.size() <= room) rooms_.resize(room + 1);
        rooms_[room].resize(shift + bytes);
      }
    }
    for (std::uint32_t p = 0; p < layout.planes(); ++p) {
      for (std::uint32_t layer = 0; layer < layout.layers; ++layer) {
        const auto [room, behind, bytes] = place_of(p, layer);
        table_[p * std::size_t{layout.layers} + layer] = rooms_[room].data() + shift + behind;
      }
    }
    each_vector([&](std::byte* here, std::uint64_t there, std::uint64_t bytes) {
      std::memcpy(here, image.data() + there, bytes);
    });
  }
  scattered_planes(const scattered_planes&) = delete;
  scattered_planes& operator=(const scattered_planes&) = delete;

  /// What it promises of its table is just so.
  [[nodiscard]] llmmem::kv_memory memory() const {
    std::uintptr_t all = 16;
    for (std::byte* const entry : table_)
      all |= reinterpret_cast<std::uintptr_t>(entry);
    return {.blocks = blocks_,
            .layout = layout_,
            .plane_table = table_.data(),
            .plane_alignment = std::uint32_t{1} << std::countr_zero(all)};
  }
  /// As it would be in one allocation.
  [[nodiscard]] std::vector<std::byte> image() const {
    std::vector<std::byte> out(layout_.total_bytes(blocks_));
    each_vector([&](const std::byte* here, std::uint64_t there, std::uint64_t bytes) {
      std::memcpy(out.data() + there, here, bytes);
    });
    return out;
  }

 private:
  /// The allocation that a layer's plane is in, where it begins there, and how long that is.
  struct place {
    std::size_t room = 0;
    std::uint64_t behind = 0;
    std::uint64_t bytes = 0;
  };
  [[nodiscard]] place place_of(std::uint32_t p, std::uint32_t layer) const {
    using llmmem::block_order;
    const llmmem::plane_strides strides = layout_.strides(p, blocks_);
    const std::uint64_t in_plane = layer * strides.layer;
    const std::uint64_t unit = layout_.unit_bytes(p);
    switch (layout_.order) {
      case block_order::layer_first:
        return {p * std::size_t{layout_.layers} + layer, 0, unit * blocks_};
      case block_order::layer_first_paired:
      case block_order::layer_first_joined:
        return {layer, strides.base, layout_.layer_bytes() * blocks_};
      case block_order::block_first:
      case block_order::block_first_joined:
      case block_order::block_first_planes:
        return {0, strides.base + in_plane, layout_.total_bytes(blocks_)};
      case block_order::block_first_separate:
      case block_order::layer_between:
      case block_order::layer_last:
        return {p, in_plane, unit * layout_.layers * blocks_};
    }
    return {};
  }

  template <class One>
  void each_vector(One one) const {
    for (std::uint32_t p = 0; p < layout_.planes(); ++p) {
      const llmmem::plane_strides strides = layout_.strides(p, blocks_);
      for (std::uint32_t layer = 0; layer < layout_.layers; ++layer)
        for (std::uint64_t block = 0; block < blocks_; ++block)
          for (std::uint64_t token = 0; token < layout_.block_tokens; ++token)
            for (std::uint64_t head = 0; head < layout_.heads; ++head) {
              const std::uint64_t there = strides.offset(layer, block, token, head);
              one(table_[p * std::size_t{layout_.layers} + layer] + (there - strides.offset(layer, 0, 0, 0)),
                  there, strides.vector_bytes);
            }
    }
  }

  llmmem::kv_layout layout_;
  std::uint64_t blocks_;
  std::vector<std::vector<std::byte>> rooms_{};
  std::vector<std::byte*> table_;
};

}  // namespace llmmem_tests
