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
    const bool is_one = layout.order == llmmem::block_order::block_first;
    const bool is_paired = layout.order == llmmem::block_order::layer_first_paired;
    rooms_.resize(is_one ? 1 : is_paired ? layout.layers : table_.size());
    for (std::uint32_t p = 0; p < layout.planes(); ++p) {
      const std::uint64_t behind = p == 0 ? 0 : layout.unit_bytes(0);
      for (std::uint32_t layer = 0; layer < layout.layers; ++layer) {
        const std::size_t entry = p * std::size_t{layout.layers} + layer;
        std::vector<std::byte>& room = rooms_[is_one ? 0 : is_paired ? layer : entry];
        const std::uint64_t bytes = is_one      ? layout.block_bytes()
                                    : is_paired ? layout.layer_bytes()
                                                : layout.unit_bytes(p);
        room.resize(shift + bytes * blocks);
        table_[entry] = room.data() + shift + (is_one || is_paired ? behind : 0) +
                        (is_one ? layer * layout.layer_bytes() : 0);
      }
    }
    each_unit([&](std::byte* here, std::uint64_t there, std::uint64_t bytes) {
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
    each_unit([&](const std::byte* here, std::uint64_t there, std::uint64_t bytes) {
      std::memcpy(out.data() + there, here, bytes);
    });
    return out;
  }

 private:
  template <class One>
  void each_unit(One one) const {
    for (std::uint32_t p = 0; p < layout_.planes(); ++p) {
      const llmmem::plane_strides strides = layout_.strides(p, blocks_);
      for (std::uint32_t layer = 0; layer < layout_.layers; ++layer) {
        for (std::uint64_t block = 0; block < blocks_; ++block)
          one(table_[p * std::size_t{layout_.layers} + layer] + block * strides.block,
              strides.offset(layer, block, 0, 0), layout_.unit_bytes(p));
      }
    }
  }

  llmmem::kv_layout layout_;
  std::uint64_t blocks_;
  std::vector<std::vector<std::byte>> rooms_{};
  std::vector<std::byte*> table_;
};

}  // namespace llmmem_tests
