/// @file
/// The prefix index: maps a key to the block that holds its contents.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/tag_chunk.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/ids.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A two-way map between `block_key` and block, of fixed capacity: each block has at most one key, each key
/// one block.
///
/// It is a hash table of cache lines. Each line holds twelve blocks with one byte of each key, compared all
/// at once, and the number of blocks that overflowed to a later line because this one was full. A lookup
/// therefore nearly always reads one line of the table, and stops at a line without overflow. An erased block
/// leaves an empty place. There are no tombstones and no rebuilds: the cost of an operation does not depend
/// on earlier operations. (The overflow count comes from Facebook's F14 tables, 2019.)
///
/// @par Complexity   expected O(1), lines at most half full; 35 bytes per block, allocated once in the
///   constructor.
/// @par Thread safety   one writer at a time; const calls may run concurrently.
/// @par Errors   the constructor throws `length_error` and `out_of_memory`; nothing else fails.
class prefix_index {
 public:
  /// @param blocks  ids 1 to `blocks` may be inserted; 1 to `max_blocks`.
  explicit prefix_index(std::uint64_t blocks, const metadata_source& source = {})
      : chunks_(chunk_count(blocks), chunk_type{}, source, "prefix_index: table"),
        entries_(blocks + 1, entry{}, source, "prefix_index: entries") {}

  /// Returns the block that `key` names, if any.
  [[nodiscard]] std::optional<block_id> find(const block_key& key) const noexcept {
    const block_id block = block_of(key);
    return block == null_block ? std::nullopt : std::optional(block);
  }

  /// Returns the block that `key` names, or `null_block`: for every lookup of a prompt's blocks. A block
  /// passes through a register. An optional one that a compiler does not insert into the caller is stored in
  /// parts and then loaded whole, which stalls for longer than the lookup takes.
  [[nodiscard]] block_id block_of(const block_key& key) const noexcept {
    const std::uint8_t tag = tag_of(key);
    std::uint64_t i = home(key);
    // Blocks may have overflowed from every line of a small table: then the search ends where it began.
    for (std::uint64_t lines = chunks_.size(); lines > 0; --lines, i = next(i)) {
      const chunk_type& chunk = chunks_[i];
      for (auto places = chunk.places_of(tag); places.any(); places.pop()) {
        const block_id block = chunk.number(places.first());
        if (entries_[to_index(block)].key == key) return block;
      }
      if (chunk.passed_by() == 0) break;
    }
    return null_block;
  }

  /// Prefetches the line that `find(key)` reads first. Worth calling some lookups ahead.
  void prefetch(const block_key& key) const noexcept { LLMMEM_PREFETCH(&chunks_[home(key)]); }

  /// Stores the key of a block that is not in the index yet, because the key is known before its contents may
  /// be shared.
  void stage(const block_key& key, block_id block) noexcept { entries_[to_index(block)].key = key; }

  /// Makes the staged key name `block`, whose first `tokens` tokens are its contents.
  /// @pre neither the key nor the block is in the index; `tokens` is at least 1.
  void insert(block_id block, std::uint32_t tokens) noexcept {
    entry& named = entries_[to_index(block)];
    named.tokens = tokens;
    std::uint64_t i = home(named.key);
    for (; chunks_[i].is_full(); i = next(i))
      chunks_[i].pass_by();
    chunks_[i].add(tag_of(named.key), block);
    ++size_;
  }

  /// Removes `block` and its key. @pre it is in the index.
  void erase(block_id block) noexcept {
    entry& named = entries_[to_index(block)];
    named.tokens = 0;
    const std::uint8_t tag = tag_of(named.key);
    for (std::uint64_t i = home(named.key); !chunks_[i].remove(tag, block); i = next(i))
      chunks_[i].undo_pass_by();
    --size_;
  }

  /// Calls `erase` for each of `blocks`, prefetching the cache lines of later ones.
  void erase(std::span<const block_id> blocks) noexcept {
    constexpr std::size_t ahead = 4;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (i + ahead < blocks.size()) prefetch(entries_[to_index(blocks[i + ahead])].key);
      erase(blocks[i]);
    }
  }

  [[nodiscard]] bool contains(block_id block) const noexcept { return entries_[to_index(block)].tokens != 0; }

  /// Returns the key of a block that is in the index or has a staged key.
  [[nodiscard]] const block_key& key(block_id block) const noexcept { return entries_[to_index(block)].key; }

  /// Returns how many tokens the key of a block in the index covers: fewer than a block holds if a trace
  /// names partial blocks. Tokens after them may be overwritten.
  [[nodiscard]] std::uint32_t tokens(block_id block) const noexcept {
    return entries_[to_index(block)].tokens;
  }

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return chunks_.bytes() + entries_.bytes(); }

  /// Proves that each block in the index is found by its key, that nothing else is in the table, and that
  /// each line counts its overflow correctly. Returns one sentence for each violation. O(blocks); allocates.
  [[nodiscard]] std::vector<std::string> audit() const {
    std::vector<std::string> found;
    std::uint64_t present = 0;
    std::vector<std::uint32_t> passed(chunks_.size());
    for (std::uint64_t i = 1; i < entries_.size(); ++i) {
      if (entries_[i].tokens == 0) continue;
      ++present;
      const block_id block{static_cast<std::uint32_t>(i)};
      if (find(entries_[i].key) != block) {
        found.push_back("prefix_index: block " + std::to_string(i) + " is not found by its key");
        continue;
      }
      for (std::uint64_t c = home(entries_[i].key); !chunks_[c].holds(block); c = next(c))
        ++passed[c];
    }
    std::uint64_t filled = 0;
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      filled += chunks_[i].size();
      if (chunks_[i].passed_by() != passed[i]) {
        found.push_back("prefix_index: line " + std::to_string(i) + " counts " +
                        std::to_string(chunks_[i].passed_by()) + " overflowed blocks, there are " +
                        std::to_string(passed[i]));
      }
    }
    if (present != size_ || filled != size_) {
      found.push_back("prefix_index: counts " + std::to_string(size_) + " blocks, " +
                      std::to_string(present) + " are marked present, " + std::to_string(filled) +
                      " places are filled");
    }
    return found;
  }

 private:
  using chunk_type = detail::tag_chunk<block_id>;

  struct entry {
    block_key key{};
    std::uint32_t tokens = 0;  // 0: not in the index
  };

  [[nodiscard]] static std::uint64_t chunk_count(std::uint64_t blocks) {
    if (blocks == 0 || blocks > max_blocks) {
      throw length_error("prefix_index: " + std::to_string(blocks) + " blocks; use 1 to " +
                         std::to_string(max_blocks));
    }
    return blocks / (chunk_type::places / 2) + 1;
  }

  /// Returns a byte of the key, never 0: 0 marks an empty place.
  [[nodiscard]] static std::uint8_t tag_of(const block_key& key) noexcept {
    const auto byte = static_cast<std::uint8_t>(key.low);
    return byte == 0 ? std::uint8_t{1} : byte;
  }

  // Maps 32 bits evenly to any number of lines without a division (Lemire 2019).
  [[nodiscard]] std::uint64_t home(const block_key& key) const noexcept {
    return ((key.high >> 32) * chunks_.size()) >> 32;
  }
  [[nodiscard]] std::uint64_t next(std::uint64_t i) const noexcept {
    return i + 1 == chunks_.size() ? 0 : i + 1;
  }

  detail::fixed_array<chunk_type> chunks_;
  detail::fixed_array<entry> entries_;  // by block
  std::uint64_t size_ = 0;
};

}  // namespace v0
}  // namespace llmmem
