/// @file
/// A prefix index that threads search without locks while other threads add and remove blocks.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/atomic_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/ids.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A hash table of cache lines: seven words, each with 32 bits of a key and a block, and the number of blocks
/// that overflowed to a later line because this one was full. A word never moves: it is set once and cleared
/// once, so a concurrent search finds every block that is present throughout, and there are no tombstones.
///
/// A word is a hint. Its block may have been evicted, and even reused, before the searcher reaches it: the
/// searcher takes a reference and then checks the block itself. Equal keys of different blocks may coexist.
///
/// @par Complexity   expected O(1), lines less than half full; 21 bytes per block.
/// @par Thread safety   `find` may run concurrently with everything, without waiting. So may `erase`, if each
///   block is erased by one thread. `insert` may run concurrently with everything except another `insert`.
///   All accesses are relaxed, because the state of the block that they lead to orders them.
class shared_index {
 public:
  shared_index(std::uint64_t blocks, const metadata_source& source)
      : lines_(blocks / (slots / 2) + 1), words_(lines_ * words_a_line, 0, source, "shared_index: table") {}

  /// Calls `take(block)` for blocks whose key may be `key` until it returns true; returns that block, or
  /// `null_block`.
  template <class Take>
  [[nodiscard]] block_id find(const block_key& key, Take&& take) const noexcept {
    std::uint64_t line = home(key);
    // Blocks may have overflowed from every line of a small table: then the search ends where it began.
    for (std::uint64_t left = lines_; left > 0; --left, line = next(line)) {
      for (std::size_t slot = 0; slot < slots; ++slot) {
        const std::uint64_t word = words_[at(line, slot)].load(std::memory_order_relaxed);
        if (word >> 32 != tag_of(key) || word == empty) continue;
        const block_id block{static_cast<std::uint32_t>(word)};
        if (take(block)) return block;
      }
      if (words_[passed_by(line)].load(std::memory_order_relaxed) == 0) break;
    }
    return null_block;
  }

  /// @pre the block is not in the index, and no other thread inserts.
  void insert(const block_key& key, block_id block) noexcept {
    for (std::uint64_t line = home(key);; line = next(line)) {
      for (std::size_t slot = 0; slot < slots; ++slot) {
        const auto word = words_[at(line, slot)];
        if (word.load(std::memory_order_relaxed) != empty) continue;
        word.store(word_of(key, block), std::memory_order_relaxed);
        return;
      }
      words_[passed_by(line)].fetch_add(1, std::memory_order_relaxed);
    }
  }

  /// @pre the block is in the index under `key`, and no other thread erases it.
  void erase(const block_key& key, block_id block) noexcept {
    for (std::uint64_t line = home(key);; line = next(line)) {
      for (std::size_t slot = 0; slot < slots; ++slot) {
        const auto word = words_[at(line, slot)];
        if (word.load(std::memory_order_relaxed) != word_of(key, block)) continue;
        word.store(empty, std::memory_order_relaxed);
        return;
      }
      words_[passed_by(line)].fetch_sub(1, std::memory_order_relaxed);
    }
  }

  /// Blocks in the index, and overflows, counted once per line. Both are exact while nothing changes.
  struct census {
    std::uint64_t present = 0;
    std::uint64_t gone_on = 0;
  };
  [[nodiscard]] census count() const noexcept {
    census found;
    for (std::uint64_t line = 0; line < lines_; ++line) {
      for (std::size_t slot = 0; slot < slots; ++slot)
        found.present += words_[at(line, slot)].load(std::memory_order_relaxed) != empty ? 1U : 0U;
      found.gone_on += words_[passed_by(line)].load(std::memory_order_relaxed);
    }
    return found;
  }

  /// Returns how many lines a block is from its key's first line. @pre the block is in the index, which does
  /// not change meanwhile.
  [[nodiscard]] std::uint64_t distance(const block_key& key, block_id block) const noexcept {
    for (std::uint64_t line = home(key), gone = 0;; line = next(line), ++gone) {
      for (std::size_t slot = 0; slot < slots; ++slot) {
        if (words_[at(line, slot)].load(std::memory_order_relaxed) == word_of(key, block)) return gone;
      }
      if (gone == lines_) return gone;
    }
  }

  void prefetch(const block_key& key) const noexcept { words_.prefetch(at(home(key), 0)); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return words_.bytes(); }

 private:
  static constexpr std::size_t slots = 7;
  static constexpr std::size_t words_a_line = slots + 1;  // a cache line; the last word counts overflows
  static constexpr std::uint64_t empty = 0;               // no block: the null block is never inserted

  [[nodiscard]] static std::uint32_t tag_of(const block_key& key) noexcept {
    return static_cast<std::uint32_t>(key.low);
  }
  [[nodiscard]] static std::uint64_t word_of(const block_key& key, block_id block) noexcept {
    return std::uint64_t{tag_of(key)} << 32 | to_index(block);
  }

  // Maps 32 bits evenly to any number of lines without a division (Lemire 2019).
  [[nodiscard]] std::uint64_t home(const block_key& key) const noexcept {
    return ((key.high >> 32) * lines_) >> 32;
  }
  [[nodiscard]] std::uint64_t next(std::uint64_t line) const noexcept {
    return line + 1 == lines_ ? 0 : line + 1;
  }
  [[nodiscard]] static std::size_t at(std::uint64_t line, std::size_t slot) noexcept {
    return static_cast<std::size_t>(line) * words_a_line + slot;
  }
  [[nodiscard]] static std::size_t passed_by(std::uint64_t line) noexcept { return at(line, slots); }

  std::uint64_t lines_;
  atomic_array<std::uint64_t> words_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
