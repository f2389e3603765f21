/// @file
/// Blocks between guards, for debug builds: detects writes past a block, and reads of a block that was never
/// written.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/space/concepts.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A `block_storage` of host-accessible memory with guard bytes before the first block and after each block.
///
/// Poison is all ones: NaN as float, bfloat16 and half, the highest value as an unsigned integer. An engine
/// under test poisons the blocks that `append` allocates, and those that it releases, so that a kernel that
/// reads unwritten memory computes NaN instead of using stale numbers. `damaged` names the blocks whose
/// guards were overwritten.
///
///     guarded_storage<host_space> memory(host, cache.max_physical_blocks(), block_bytes);
///     auto grown = cache.append(sequence, tokens).value();
///     memory.poison(cache.blocks(sequence).last(grown.new_blocks));
///     ...
///     for (const std::string& each : memory.damaged()) report(each);
///
/// @par Complexity   a `block_storage` and `guard_bytes` per block; `poison` O(bytes), `damaged`
///   O(blocks).
/// @par Thread safety   that of the memory.
/// @par Errors   the constructor throws what `block_storage` throws.
template <memory_space Space>
class guarded_storage {
 public:
  static_assert(Space::is_host_accessible, "guards are written and read by the host");

  using range_type = typename Space::range_type;
  static constexpr std::uint64_t guard_bytes = 64;
  static constexpr std::byte guard{0xA5};
  static constexpr std::byte poisoned{0xFF};

  /// @param alignment  of every block, a power of two of at least `guard_bytes`.
  guarded_storage(Space& space, std::uint64_t physical_blocks, std::uint64_t block_bytes,
                  std::uint64_t alignment = 256)
      : blocks_(physical_blocks),
        block_bytes_(block_bytes),
        lead_(checked_lead(space, alignment)),
        stride_(stride(block_bytes, alignment)),
        buffer_(
            space,
            checked_add(checked_multiply(stride_, physical_blocks, "guarded_storage: bytes of all blocks"),
                        lead_, "guarded_storage: bytes of all blocks"),
            std::align_val_t{alignment}) {
    const auto all = buffer_.range().span();
    std::fill(all.begin(), all.end(), guard);
    for (std::uint64_t i = 0; i < blocks_; ++i) {
      const block_id block{static_cast<std::uint32_t>(i)};
      poison(std::span<const block_id>(&block, 1));
    }
  }

  /// Returns the bytes of one block. @pre `block` is less than `blocks()`.
  [[nodiscard]] range_type operator[](block_id block) const noexcept {
    return {buffer_.range().data + lead_ + to_index(block) * stride_, block_bytes_};
  }

  /// Returns the bytes of one block, or `errc::no_such_block`.
  [[nodiscard]] result<range_type> at(block_id block) const noexcept {
    if (to_index(block) >= blocks_)
      return failure{errc::no_such_block, to_index(block), to_index(block), blocks_, "guarded_storage"};
    return (*this)[block];
  }

  /// Makes the contents of `blocks` NaN.
  void poison(std::span<const block_id> blocks) const noexcept {
    for (const block_id block : blocks) {
      const range_type range = (*this)[block];
      std::memset(range.data, std::to_integer<int>(poisoned), static_cast<std::size_t>(range.bytes));
    }
  }

  /// Whether the block has not been written since it was poisoned.
  [[nodiscard]] bool is_poisoned(block_id block) const noexcept {
    return is_filled((*this)[block], poisoned);
  }

  /// Returns one sentence for each overwritten guard. Allocates.
  [[nodiscard]] std::vector<std::string> damaged() const {
    std::vector<std::string> found;
    if (!is_filled({buffer_.range().data, lead_}, guard))
      found.emplace_back("guarded_storage: the guard before block 0 was overwritten");
    for (std::uint64_t i = 0; i < blocks_; ++i) {
      const range_type block = (*this)[block_id{static_cast<std::uint32_t>(i)}];
      if (!is_filled({block.data + block_bytes_, stride_ - block_bytes_}, guard))
        found.push_back("guarded_storage: the guard was overwritten behind block " + std::to_string(i));
    }
    return found;
  }

  [[nodiscard]] std::uint64_t blocks() const noexcept { return blocks_; }
  [[nodiscard]] std::uint64_t block_bytes() const noexcept { return block_bytes_; }

 private:
  [[nodiscard]] static bool is_filled(const range_type& range, std::byte with) noexcept {
    const auto bytes = range.span();
    return std::all_of(bytes.begin(), bytes.end(), [&](std::byte each) { return each == with; });
  }
  [[nodiscard]] static std::uint64_t checked_lead(const Space& space, std::uint64_t alignment) {
    if (alignment < guard_bytes || (alignment & (alignment - 1)) != 0) {
      throw argument_error(std::string(space.name()) + ": an alignment of " + std::to_string(alignment) +
                           " for guarded blocks; it must be a power of two of at least " +
                           std::to_string(guard_bytes));
    }
    return alignment;
  }
  [[nodiscard]] static std::uint64_t stride(std::uint64_t block_bytes, std::uint64_t alignment) {
    if (block_bytes == 0) throw length_error("guarded_storage: blocks of 0 bytes; at least 1 is needed");
    const std::uint64_t padded =
        checked_add(block_bytes, guard_bytes + alignment - 1, "guarded_storage: bytes of a block");
    return padded / alignment * alignment;
  }

  std::uint64_t blocks_;
  std::uint64_t block_bytes_;
  std::uint64_t lead_;
  std::uint64_t stride_;
  space_buffer<Space> buffer_;
};

}  // namespace v0
}  // namespace llmmem
