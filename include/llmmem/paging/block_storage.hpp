/// @file
/// The bytes behind a pool's blocks, in any space.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/space/concepts.hpp>

#include <cstdint>
#include <new>
#include <span>

namespace llmmem {
inline namespace v0 {

/// One range of a space, divided into blocks: block `i` is bytes `i * block_bytes` to
/// `(i + 1) * block_bytes`.
///
/// Allocators work with ids and never touch this memory; engines with their own tensors do not need it. The
/// engine defines what is inside a block (layers, heads, keys and values): the storage copies complete
/// blocks. So it can hold a `kv_layout` only if a block is one piece, `fragments() == 1`: with `block_first`
/// and `block_first_planes`. With other orders, including the default, copy blocks with `copy_few_kv_blocks`.
///
///     host_space host({.budget = 1 << 30});
///     block_storage keys_and_values(host, cache.physical_blocks(), block_bytes);
///     auto grown = cache.append(sequence, tokens).value();
///     keys_and_values.copy_async(host, grown.copy).value().wait();
///
/// @par Thread safety   const calls may run concurrently; the queue orders copies, see `copy_queue`.
/// @par Errors   the constructor throws `length_error` for 0 or for a product past 2^63 - 1, and
///   `out_of_memory` with the shortage.
template <memory_space Space>
class block_storage {
 public:
  using range_type = typename Space::range_type;

  /// @param physical_blocks  including the null block: `paged_allocator::physical_blocks()`, or
  ///   `max_physical_blocks()` for an allocator that is resized.
  /// @param alignment  of the first block, a power of two; the others follow without gaps.
  block_storage(Space& space, std::uint64_t physical_blocks, std::uint64_t block_bytes,
                std::uint64_t alignment = 256)
      : buffer_(space, physical_blocks, block_bytes, std::align_val_t{alignment}),
        blocks_(physical_blocks),
        block_bytes_(block_bytes) {}

  /// Returns the bytes of one block. @pre `block` is less than `blocks()`.
  [[nodiscard]] range_type operator[](block_id block) const noexcept {
    return {buffer_.range().data + to_index(block) * block_bytes_, block_bytes_};
  }

  /// Returns the bytes of one block, or `errc::no_such_block`.
  [[nodiscard]] result<range_type> at(block_id block) const noexcept {
    if (to_index(block) >= blocks_) {
      return failure{errc::no_such_block, to_index(block), to_index(block), blocks_, "block_storage"};
    }
    return (*this)[block];
  }

  /// Carries out a copy on write once all of `after` have passed. Starts nothing if there is nothing to copy.
  /// @return the fence after which the copy is done; `errc::no_such_block` for a block that the storage does
  ///   not have.
  template <copy_queue<Space> Queue>
  [[nodiscard]] auto copy_async(Queue& queue, const block_copy& copy,
                                std::span<const typename Queue::fence_type> after = {}) const
      -> result<typename Queue::fence_type> {
    if (!copy) return typename Queue::fence_type{};
    const auto source = at(copy.source);
    if (!source) return source.error();
    const auto destination = at(copy.destination);
    if (!destination) return destination.error();
    return queue.copy_within_async(*destination, *source, after);
  }

  [[nodiscard]] std::uint64_t blocks() const noexcept { return blocks_; }
  [[nodiscard]] std::uint64_t block_bytes() const noexcept { return block_bytes_; }
  [[nodiscard]] range_type range() const noexcept { return buffer_.range(); }

 private:
  space_buffer<Space> buffer_;
  std::uint64_t blocks_;
  std::uint64_t block_bytes_;
};

}  // namespace v0
}  // namespace llmmem
