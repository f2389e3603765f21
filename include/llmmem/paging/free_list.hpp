/// @file
/// The order in which free blocks are allocated: last freed first, or by ascending id.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/ids.hpp>

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The free blocks of a pool.
///
///     push(block)        adds a block that has become free
///     take(neighbour)    removes a block, if possible adjacent to `neighbour`; @pre size() is not 0
///     undo_push(block)   removes the block pushed last
///     keep_if(keep)      removes the blocks for which `keep(block_id)` is false. O(blocks)
///     for_each(visit)    visits every free block, for audits
///
/// All calls except the constructor are `noexcept` and do not allocate.
template <class F>
concept free_list = std::constructible_from<F, std::uint64_t, const metadata_source&> && std::movable<F> &&
                    requires(F list, const F& read, block_id block, void (*visit)(block_id),
                             bool (*keep)(block_id) noexcept) {
                      { list.push(block) } noexcept -> std::same_as<void>;
                      { list.take(block) } noexcept -> std::same_as<block_id>;
                      { list.undo_push(block) } noexcept -> std::same_as<void>;
                      { list.keep_if(keep) } noexcept -> std::same_as<void>;
                      { read.size() } noexcept -> std::same_as<std::uint64_t>;
                      { read.metadata_bytes() } noexcept -> std::same_as<std::size_t>;
                      read.for_each(visit);
                    };

/// Allocates the most recently freed block first, because its memory may still be in a CPU cache. The
/// default.
///
/// @par Complexity   O(1); 4 bytes per block.
class lifo_free_list {
 public:
  lifo_free_list(std::uint64_t blocks, const metadata_source& source)
      : stack_(blocks, source, "block_pool: free list") {}

  void push(block_id block) noexcept { stack_[size_++] = block; }
  block_id take(block_id) noexcept { return stack_[--size_]; }
  void undo_push(block_id) noexcept { --size_; }

  template <class Keep>
  void keep_if(Keep&& keep) noexcept {
    std::uint64_t kept = 0;
    for (std::uint64_t i = 0; i < size_; ++i) {
      if (keep(stack_[i])) stack_[kept++] = stack_[i];
    }
    size_ = kept;
  }

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return stack_.bytes(); }
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (std::uint64_t i = 0; i < size_; ++i)
      visit(stack_[i]);
  }

 private:
  friend struct testing_access;

  detail::fixed_array<block_id> stack_;
  std::uint64_t size_ = 0;
};

static_assert(free_list<lifo_free_list>);

/// Keeps the blocks of a sequence adjacent where possible: takes the block after the given one if it is
/// free, else the free block with the lowest id. Transfers of such runs merge, and a shrinking pool finds its
/// upper end empty.
///
/// It has one bit per block. Each level above has one bit for 64 bits of the level below, set if any of them
/// is; the top level is one word.
///
/// @par Complexity   O(log64 blocks), at most six words read; 0.13 bytes per block.
class ascending_free_list {
 public:
  ascending_free_list(std::uint64_t blocks, const metadata_source& source)
      : words_(lay_out(blocks + 1, levels_), std::uint64_t{0}, source, "block_pool: free list") {}

  void push(block_id block) noexcept {
    std::uint64_t i = to_index(block);
    for (std::size_t level = 0; level < levels_.count; ++level) {
      std::uint64_t& word = words_[levels_.first[level] + i / 64];
      const bool was_empty = word == 0;
      word |= std::uint64_t{1} << (i % 64);
      if (!was_empty) break;
      i /= 64;
    }
    ++size_;
  }

  block_id take(block_id neighbour) noexcept {
    const std::uint64_t next = std::uint64_t{to_index(neighbour)} + 1;
    const block_id block{static_cast<std::uint32_t>(is_free(next) ? next : lowest())};
    remove(block);
    return block;
  }

  void undo_push(block_id block) noexcept { remove(block); }

  template <class Keep>
  void keep_if(Keep&& keep) noexcept {
    for_each([&](block_id block) noexcept {
      if (!keep(block)) remove(block);
    });
  }

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return words_.bytes(); }
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (std::uint64_t i = 0; i < levels_.bits; ++i) {
      if (is_free(i)) visit(block_id{static_cast<std::uint32_t>(i)});
    }
  }

 private:
  friend struct testing_access;

  struct layout {
    std::array<std::uint64_t, 6> first{};  // first word of each level, blocks first
    std::size_t count = 0;
    std::uint64_t bits = 0;  // of the lowest level
  };

  /// Returns how many words all levels need.
  static std::uint64_t lay_out(std::uint64_t bits, layout& out) noexcept {
    out.bits = bits;
    std::uint64_t words = 0;
    for (std::uint64_t level = bits; out.count == 0 || level > 1;) {
      level = (level + 63) / 64;
      out.first[out.count++] = words;
      words += level;
    }
    return words;
  }

  [[nodiscard]] bool is_free(std::uint64_t i) const noexcept {
    return i < levels_.bits && (words_[i / 64] >> (i % 64) & 1U) != 0;
  }

  [[nodiscard]] std::uint64_t lowest() const noexcept {
    std::uint64_t i = 0;
    for (std::size_t level = levels_.count; level-- > 0;) {
      const std::uint64_t word = words_[levels_.first[level] + i];
      i = i * 64 + static_cast<std::uint64_t>(std::countr_zero(word));
    }
    return i;
  }

  void remove(block_id block) noexcept {
    std::uint64_t i = to_index(block);
    for (std::size_t level = 0; level < levels_.count; ++level) {
      std::uint64_t& word = words_[levels_.first[level] + i / 64];
      word &= ~(std::uint64_t{1} << (i % 64));
      if (word != 0) break;
      i /= 64;
    }
    --size_;
  }

  layout levels_;
  detail::fixed_array<std::uint64_t> words_;
  std::uint64_t size_ = 0;
};

static_assert(free_list<ascending_free_list>);

}  // namespace v0
}  // namespace llmmem
