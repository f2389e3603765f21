/// @file
/// Copies whole blocks between paged memories with equal or different layouts: forks, compaction, and moves
/// to and from other tiers.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/paging/compaction.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// A block's number in one memory and its number in the other: two adjacent int64, as in vLLM's block
/// mappings. A negative one is padding.
struct block_pair {
  std::int64_t from = -1;
  std::int64_t to = -1;
};

/// Returns the pair of a copy on write, as `paged_allocator` asks for it: padding if there is nothing to
/// copy.
[[nodiscard]] constexpr block_pair pair_of(const block_copy& copy) noexcept {
  if (!copy) return {};
  return {to_index(copy.source), to_index(copy.destination)};
}
/// Returns the pair of a compaction's move.
[[nodiscard]] constexpr block_pair pair_of(const block_move& move) noexcept {
  return {to_index(move.source), to_index(move.destination)};
}

/// Pairs by their place in a list. Trivially copyable.
template <class P>
concept block_pairs = std::is_trivially_copyable_v<P> && requires(const P& pairs, std::uint64_t i) {
  { pairs.size() } noexcept -> std::same_as<std::uint64_t>;
  { pairs[i] } noexcept -> std::convertible_to<block_pair>;
};

/// Pairs in the executor's memory.
class listed_pairs {
 public:
  listed_pairs(std::span<const block_pair> pairs) noexcept : pair_(pairs.data()), pairs_(pairs.size()) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t size() const noexcept { return pairs_; }
  [[nodiscard]] LLMMEM_HD block_pair operator[](std::uint64_t i) const noexcept { return pair_[i]; }

 private:
  const block_pair* pair_;
  std::uint64_t pairs_;
};
static_assert(block_pairs<listed_pairs>);

/// A few pairs that the launch carries, so no upload is needed.
class few_pairs {
 public:
  /// As many as an argument of 4 KiB easily holds in addition to what a launch itself needs.
  static constexpr std::uint32_t most = 128;

  /// @pre at most `most` pairs
  explicit few_pairs(std::span<const block_pair> pairs) noexcept
      : pairs_(static_cast<std::uint32_t>(pairs.size())) {
    for (std::uint32_t i = 0; i < pairs_; ++i)
      pair_[i] = pairs[i];
  }

  [[nodiscard]] LLMMEM_HD std::uint64_t size() const noexcept { return pairs_; }
  [[nodiscard]] LLMMEM_HD const block_pair& operator[](std::uint64_t i) const noexcept { return pair_[i]; }

 private:
  block_pair pair_[most]{};
  std::uint32_t pairs_;
};
static_assert(block_pairs<few_pairs>);

/// Layers from `first` on.
struct layer_range {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

/// The rows of blocks to copy: tiles of a run common to both ends, if that is at least a layer's plane; else
/// the longest runs of a plane's vectors that both ends have in common.
template <block_pairs Pairs>
class block_pair_map {
 public:
  /// Bytes of a tile: enough for a block of threads, and few enough that some blocks of KV make many.
  static constexpr std::uint32_t tile_bytes = 16 * 1024;

  /// @param out_of_range  set to 1 if a pair names a block that does not exist; not cleared. May be null.
  /// @pre layouts of equal content fingerprints, of keys and values alone, and layers that they have
  block_pair_map(const kv_memory& to, const kv_memory& from, const Pairs& pairs, const layer_range& layers,
                 std::uint32_t* out_of_range) noexcept;

  /// For some planes.
  /// @param parts  one or two, of `detail::copy_parts_of`; two of the same tokens and heads.
  block_pair_map(const kv_memory& to, const kv_memory& from, const Pairs& pairs, const layer_range& layers,
                 std::uint32_t* out_of_range, std::span<const detail::kv_copy_part> parts) noexcept;

  [[nodiscard]] LLMMEM_HD std::uint64_t rows() const noexcept { return pairs_.size() * rows_a_pair_.by(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t parts() const noexcept { return layers_.count * planes_; }
  [[nodiscard]] LLMMEM_HD row_move at(std::uint64_t row, std::uint32_t part) const noexcept {
    const std::uint64_t number = rows_a_pair_.quotient(row);
    const block_pair pair = pairs_[number];
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
  /// The part of a layer that is one run at both ends, or consists of such runs.
  struct plane {
    kv_plane from{};
    kv_plane to{};
    std::uint64_t bytes = 0;  // bytes of the run
  };

  [[nodiscard]] bool join_layers_of_vectors(const kv_layout& to, const kv_layout& from,
                                            std::span<const detail::kv_copy_part> parts) noexcept;
  void join_planes() noexcept;
  void join_layers() noexcept;

  plane plane_[2]{};
  Pairs pairs_;
  std::uint64_t from_blocks_;
  std::uint64_t to_blocks_;
  divider rows_a_pair_{};
  divider heads_{};
  layer_range layers_;
  std::uint32_t planes_;
  bool is_alike_ = true;
  std::uint32_t* out_of_range_;
};
/// The map of blocks for pairs from a list in memory.
using kv_block_map = block_pair_map<listed_pairs>;
static_assert(row_map<kv_block_map> && row_map<block_pair_map<few_pairs>>);
static_assert(sizeof(block_pair_map<few_pairs>) <= 4096 - 64, "an argument of a kernel");

/// Options of a copy of blocks.
struct block_copy_options {
  layer_range layers{};                   ///< count 0: all
  std::uint32_t* out_of_range = nullptr;  ///< set to 1 if a pair names an invalid block; not cleared
};

/// Copies blocks between two memories, or inside one, by the description of their layouts: unchanged if the
/// layouts are equal (vLLM's `copy_blocks`, `swap_blocks`), else rearranged (page first to layer first, heads
/// or tokens outermost). Also copies scales and everything else that a layout has in its blocks, with a
/// launch for each plane. Skips pairs with a negative number.
///
/// @param run    `host_executor` or `device_executor`; all pointers are of memory that it can access.
/// @param pairs  [n], in the executor's memory.
/// @pre no block is written twice, or both read and written
/// @return `errc::layout_mismatch` if the layouts hold other values, `errc::out_of_range` for layers that do
///      not exist; if there are pairs, `errc::too_short` for null `data` or `pairs`, and
///      `errc::bad_alignment` for a `plane_alignment` that is not a power of two; then nothing has begun.
///      Otherwise the result of `run`.
/// @par Complexity   the blocks' bytes of those layers, read and written once.
template <class Run>
result<void> copy_kv_blocks(const Run& run, const kv_memory& to, const kv_memory& from,
                            std::span<const block_pair> pairs, const block_copy_options& options = {});

/// Copies a few blocks whose list the caller holds. The list travels with the launch, so a copy on write
/// waits for no upload, and may change when this returns; in a graph it stays fixed. Otherwise as
/// `copy_kv_blocks`.
///
/// @param pairs  at most `few_pairs::most`, in host memory.
/// @return in addition, `errc::out_of_range` for more pairs, and `errc::no_such_block` for one that names a
///      block that does not exist: index = its place in the list.
template <class Run>
result<void> copy_few_kv_blocks(const Run& run, const kv_memory& to, const kv_memory& from,
                                std::span<const block_pair> pairs, const block_copy_options& options = {});

/// The same inside one memory, for the copies that `paged_allocator` requests before a write to a shared
/// block. Copies whole blocks regardless of their `tokens`; none without tokens.
template <class Run>
result<void> copy_few_kv_blocks(const Run& run, const kv_memory& memory, std::span<const block_copy> copies,
                                const block_copy_options& options = {});

/// The same for moves of a compaction.
template <class Run>
result<void> copy_few_kv_blocks(const Run& run, const kv_memory& memory, std::span<const block_move> moves,
                                const block_copy_options& options = {});

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/kv_blocks_body.hpp>
