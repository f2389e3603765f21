/// @file
/// Copying whole blocks between paged memories, laid out alike or not: forks, compaction, and the way to and
/// from other tiers.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem::inline v0 {

/// A block's number in the one memory and in the other: two int64 side by side, as vLLM's block mappings are.
/// A negative one is padding.
struct block_pair {
  std::int64_t from = -1;
  std::int64_t to = -1;
};

/// Layers from `first` on.
struct layer_range {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

/// The rows of blocks on their way. Where both memories lay a layer's plane out alike, they are its tiles;
/// else its vectors.
class kv_block_map {
 public:
  /// Bytes of a tile: enough for a block of threads, and few enough that some blocks of KV make many.
  static constexpr std::uint32_t tile_bytes = 16 * 1024;

  /// @param out_of_range  set to 1 when a pair names a block that is none; not cleared. May be null.
  /// @pre layouts of equal content fingerprints, and layers that they have
  kv_block_map(const kv_memory& to, const kv_memory& from, std::span<const block_pair> pairs,
               const layer_range& layers, std::uint32_t* out_of_range) noexcept;

  [[nodiscard]] LLMMEM_HD std::uint64_t rows() const noexcept { return pairs_ * rows_a_pair_.by(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t parts() const noexcept { return layers_.count * planes_; }
  [[nodiscard]] LLMMEM_HD row_move at(std::uint64_t row, std::uint32_t part) const noexcept {
    const std::uint64_t number = rows_a_pair_.quotient(row);
    const block_pair pair = pair_[number];
    if (pair.from < 0 || pair.to < 0) return {};
    const auto from_block = static_cast<std::uint64_t>(pair.from);
    const auto to_block = static_cast<std::uint64_t>(pair.to);
    if (from_block >= from_blocks_ || to_block >= to_blocks_) {
      if (out_of_range_ != nullptr) raise_flag(*out_of_range_);
      return {};
    }
    const bool is_second = part >= layers_.count;
    const plane& of = plane_[is_second ? 1 : 0];
    const std::uint64_t layer = layers_.first + (is_second ? part - layers_.count : part);
    const std::uint64_t rest = row - number * rows_a_pair_.by();
    const std::byte* const from = plane_base(of.from, layer) + from_block * of.from.strides.block;
    std::byte* const to = plane_base(of.to, layer) + to_block * of.to.strides.block;
    if (is_alike_) {
      const std::uint64_t first = rest * tile_bytes;
      if (first >= of.bytes) return {};
      const std::uint64_t left = of.bytes - first;
      return {from + first, to + first, static_cast<std::uint32_t>(left < tile_bytes ? left : tile_bytes)};
    }
    const std::uint64_t token = heads_.quotient(rest);
    const std::uint64_t head = rest - token * heads_.by();
    return {from + of.from.strides.offset(0, 0, token, head), to + of.to.strides.offset(0, 0, token, head),
            static_cast<std::uint32_t>(of.bytes)};
  }
  [[nodiscard]] std::uint32_t longest_row() const noexcept {
    const std::uint64_t longest = std::max(plane_[0].bytes, planes_ == 2 ? plane_[1].bytes : 0);
    return static_cast<std::uint32_t>(is_alike_ ? std::min<std::uint64_t>(longest, tile_bytes) : longest);
  }
  [[nodiscard]] row_alignment alignment() const noexcept;

 private:
  /// What of a layer lies in one run at both ends, or is made of such.
  struct plane {
    kv_plane from{};
    kv_plane to{};
    std::uint64_t bytes = 0;  // of the run
  };

  void merge_planes(const kv_layout& layout) noexcept;

  plane plane_[2]{};
  const block_pair* pair_;
  std::uint64_t pairs_;
  std::uint64_t from_blocks_;
  std::uint64_t to_blocks_;
  divider rows_a_pair_{};
  divider heads_{};
  layer_range layers_;
  std::uint32_t planes_;
  bool is_alike_ = true;
  std::uint32_t* out_of_range_;
};

/// How blocks are copied.
struct block_copy_options {
  layer_range layers{};                   ///< count 0: all
  std::uint32_t* out_of_range = nullptr;  ///< set to 1 when a pair names a block that is none; not cleared
};

/// Copies blocks between two memories, or inside one, through the description of their layouts: as they are
/// where that is the same (vLLM's `copy_blocks`, `swap_blocks`), and else rearranged (page first to layer
/// first, heads or tokens outermost). Pairs with a negative number are skipped.
///
/// @param run    `host_executor` or `device_executor`; all pointers are of memory that it sees.
/// @param pairs  [n], in the memory of whoever runs it.
/// @pre no block is written twice, or both read and written
/// @return `errc::layout_mismatch` when the layouts hold other values, `errc::out_of_range` for layers that
///      there are none of; then nothing has begun. Else what `run` returns.
/// @par Complexity   the blocks' bytes of those layers, read and written once.
template <class Run>
result<void> copy_kv_blocks(const Run& run, const kv_memory& to, const kv_memory& from,
                            std::span<const block_pair> pairs, const block_copy_options& options = {});

}  // namespace llmmem::inline v0

#include <llmmem/kernels/detail/kv_blocks_body.hpp>
