/// @file
/// Lists of blocks for kernels that work block by block: all blocks of a pool, or blocks by number.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/rows.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// Blocks by their place in a list: each one's address, its destination if it is copied, and its length.
/// Trivially copyable; the pointers in it belong to the executor's memory. `longest()` is the most bytes of
/// any block; a kernel reads at most that much of one. `alignment()` is what all addresses are multiples of,
/// except destinations that do not exist.
template <class L>
concept block_list = std::is_trivially_copyable_v<L> && requires(const L& list, std::uint64_t i) {
  { list.size() } noexcept -> std::same_as<std::uint64_t>;
  { list[i] } noexcept -> std::convertible_to<copy_task>;
  { list.longest() } noexcept -> std::same_as<std::uint64_t>;
  { list.alignment() } noexcept -> std::same_as<row_alignment>;
};
static_assert(block_list<few_copies> && block_list<listed_copies>);

/// A pool of blocks: block i begins at `data + i * stride`.
struct block_pool_view {
  const std::byte* data = nullptr;
  std::uint64_t stride = 0;  ///< bytes from one block to the next
  std::uint64_t blocks = 0;  ///< number of blocks
};

/// A pool that blocks are written to.
struct block_pool_output {
  std::byte* data = nullptr;
  std::uint64_t stride = 0;
  std::uint64_t blocks = 0;
};

using block_pool_room [[deprecated("its name is block_pool_output")]] = block_pool_output;

/// All blocks of a pool, in order. With a destination, block i goes to the destination's block i, while both
/// exist.
class strided_blocks {
 public:
  /// @param bytes  of each block, from its beginning: below 2^45, and at most the stride if several blocks
  ///               are copied.
  strided_blocks(const block_pool_view& from, std::uint64_t bytes, const block_pool_output& to = {}) noexcept
      : from_(from), to_(to), bytes_(bytes) {
    if (to.data != nullptr) from_.blocks = std::min(from.blocks, to.blocks);
  }

  [[nodiscard]] LLMMEM_HD std::uint64_t size() const noexcept { return from_.blocks; }
  [[nodiscard]] LLMMEM_HD copy_task operator[](std::uint64_t i) const noexcept {
    return {from_.data + i * from_.stride, to_.data == nullptr ? nullptr : to_.data + i * to_.stride, bytes_};
  }
  [[nodiscard]] std::uint64_t longest() const noexcept { return bytes_; }
  [[nodiscard]] row_alignment alignment() const noexcept {
    return {alignment_of(reinterpret_cast<std::uintptr_t>(from_.data), from_.stride),
            alignment_of(reinterpret_cast<std::uintptr_t>(to_.data), to_.stride)};
  }
  /// Whether there are bytes, but no memory to read them from or copy them to.
  [[nodiscard]] bool lacks_source() const noexcept { return bytes_ != 0 && from_.data == nullptr; }
  [[nodiscard]] bool lacks_target() const noexcept { return bytes_ != 0 && to_.data == nullptr; }

 private:
  block_pool_view from_;
  block_pool_output to_;
  std::uint64_t bytes_;
};
static_assert(block_list<strided_blocks>);

/// Blocks of a pool by number, as in an engine's block table. With a destination, each goes to a block of
/// another pool, or of the same: a gather for another tier, or a scatter from one.
///
/// A pair with a negative number is padding; without a destination, `to` is not read. A number beyond a
/// pool's blocks raises the flag. Both count as a block of no bytes.
class numbered_blocks {
 public:
  /// @param bytes         of each block, from its beginning: below 2^45.
  /// @param numbers       in the executor's memory; read when the kernel runs.
  /// @param out_of_range  set to 1 if a pair names a block that does not exist; not cleared. May be null.
  numbered_blocks(const block_pool_view& from, std::uint64_t bytes, std::span<const block_pair> numbers,
                  const block_pool_output& to = {}, std::uint32_t* out_of_range = nullptr) noexcept
      : of_({from.data, from.stride, from.blocks}, bytes),
        from_blocks_(from.blocks),
        to_blocks_(to.blocks),
        is_copied_(to.data != nullptr),
        pair_(numbers.data()),
        pairs_(numbers.size()),
        out_of_range_(out_of_range),
        to_(to) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t size() const noexcept { return pairs_; }
  [[nodiscard]] LLMMEM_HD copy_task operator[](std::uint64_t i) const noexcept {
    const block_pair pair = pair_[i];
    if (pair.from < 0 || (is_copied_ && pair.to < 0)) return {};
    const auto from = static_cast<std::uint64_t>(pair.from);
    const auto to = static_cast<std::uint64_t>(pair.to);
    if (from >= from_blocks_ || (is_copied_ && to >= to_blocks_)) {
      if (out_of_range_ != nullptr) raise_flag(*out_of_range_);
      return {};
    }
    copy_task out = of_[from];
    if (is_copied_) out.to = to_.data + to * to_.stride;
    return out;
  }
  [[nodiscard]] std::uint64_t longest() const noexcept { return of_.longest(); }
  [[nodiscard]] row_alignment alignment() const noexcept {
    return {of_.alignment().from, alignment_of(reinterpret_cast<std::uintptr_t>(to_.data), to_.stride)};
  }
  [[nodiscard]] bool lacks_source() const noexcept { return of_.lacks_source(); }
  [[nodiscard]] bool lacks_target() const noexcept { return of_.longest() != 0 && to_.data == nullptr; }

 private:
  strided_blocks of_;
  std::uint64_t from_blocks_;
  std::uint64_t to_blocks_;
  bool is_copied_;
  const block_pair* pair_;
  std::uint64_t pairs_;
  std::uint32_t* out_of_range_;
  block_pool_output to_;
};
static_assert(block_list<numbered_blocks>);

}  // namespace v0
}  // namespace llmmem
