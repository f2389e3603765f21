/// @file
/// The prefix index: which block holds the contents that a key names.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/paging/block_key.hpp>
#include <llmmem/paging/ids.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace llmmem::inline v0 {

/// A map from `block_key` to block, and back, of fixed capacity: each block has at most one key, each key one
/// block.
///
/// An open-addressing table with linear probing whose eight-byte entries carry 32 bits of the key, so that a
/// probe past a stranger costs no second cache line, and deletion by shifting back (Knuth, vol. 3, 6.4,
/// algorithm R), so that there are no tombstones and no rebuilds: the cost of an operation does not depend on
/// what went before.
///
/// @par Complexity   expected O(1) at a load of at most 4/7; 34 bytes a block, allocated once in the
/// constructor.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor throws `length_error` and `out_of_memory`; nothing else fails.
class prefix_index {
 public:
  /// @param blocks  ids 1 to `blocks` may be inserted; 1 to `max_blocks`.
  explicit prefix_index(std::uint64_t blocks, const metadata_source& source = {})
      : buckets_(bucket_count(blocks), bucket{0, null_block}, source, "prefix_index: buckets"),
        keys_(blocks + 1, source, "prefix_index: keys"),
        tokens_(blocks + 1, 0, source, "prefix_index: tokens") {}

  /// The block that `key` names, if any.
  [[nodiscard]] std::optional<block_id> find(const block_key& key) const noexcept {
    const std::uint32_t tag = tag_of(key);
    for (std::uint32_t i = home(tag); buckets_[i].block != null_block; i = next(i)) {
      if (buckets_[i].tag == tag && keys_[to_index(buckets_[i].block)] == key) return buckets_[i].block;
    }
    return std::nullopt;
  }

  /// Fetches what `find(key)` will read first. Worth calling some lookups ahead.
  void prefetch(const block_key& key) const noexcept { LLMMEM_PREFETCH(&buckets_[home(tag_of(key))]); }

  /// Remembers a key for a block that is not in the index: known before its contents may be shared.
  void stage(const block_key& key, block_id block) noexcept { keys_[to_index(block)] = key; }

  /// Lets the staged key name `block`, whose first `tokens` tokens are its contents.
  /// @pre neither the key nor the block is in the index; `tokens` is at least 1.
  void insert(block_id block, std::uint32_t tokens) noexcept {
    tokens_[to_index(block)] = tokens;
    const std::uint32_t tag = tag_of(keys_[to_index(block)]);
    std::uint32_t i = home(tag);
    while (buckets_[i].block != null_block)
      i = next(i);
    buckets_[i] = {tag, block};
    ++size_;
  }

  /// Forgets `block` and its key. @pre it is in the index.
  void erase(block_id block) noexcept {
    tokens_[to_index(block)] = 0;
    std::uint32_t hole = home(tag_of(keys_[to_index(block)]));
    while (buckets_[hole].block != block)
      hole = next(hole);
    // Whatever probed past the hole moves back into it, until a gap shows that nothing did.
    for (std::uint32_t i = next(hole); buckets_[i].block != null_block; i = next(i)) {
      if (distance(home(buckets_[i].tag), i) >= distance(hole, i)) {
        buckets_[hole] = buckets_[i];
        hole = i;
      }
    }
    buckets_[hole].block = null_block;
    --size_;
  }

  [[nodiscard]] bool contains(block_id block) const noexcept { return tokens_[to_index(block)] != 0; }

  /// The key of a block that is in the index, or was staged for it.
  [[nodiscard]] const block_key& key(block_id block) const noexcept { return keys_[to_index(block)]; }

  /// How many tokens the key of a block in the index stands for: fewer than a block holds where a trace names
  /// partial blocks. What lies behind them may be overwritten.
  [[nodiscard]] std::uint32_t tokens(block_id block) const noexcept { return tokens_[to_index(block)]; }

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return buckets_.bytes() + keys_.bytes() + tokens_.bytes();
  }

  /// Proves that each block in the index is found by its key, and nothing else is; one sentence for each
  /// violation.
  [[nodiscard]] std::vector<std::string> audit() const {
    std::vector<std::string> found;
    std::uint64_t present = 0;
    for (std::uint64_t i = 1; i < keys_.size(); ++i) {
      if (tokens_[i] == 0) continue;
      ++present;
      const block_id block{static_cast<std::uint32_t>(i)};
      if (find(keys_[i]) != block) {
        found.push_back("prefix_index: block " + std::to_string(i) + " is not found by its key");
      }
    }
    std::uint64_t filled = 0;
    for (std::size_t i = 0; i < buckets_.size(); ++i)
      filled += buckets_[i].block != null_block ? 1 : 0;
    if (present != size_ || filled != size_) {
      found.push_back("prefix_index: counts " + std::to_string(size_) + " blocks, " +
                      std::to_string(present) + " are marked present, " + std::to_string(filled) +
                      " buckets are filled");
    }
    return found;
  }

 private:
  friend struct testing_access;

  struct bucket {
    std::uint32_t tag;
    block_id block;  // null_block: empty
  };

  [[nodiscard]] static std::uint64_t bucket_count(std::uint64_t blocks) {
    if (blocks == 0 || blocks > max_blocks) {
      throw length_error("prefix_index: " + std::to_string(blocks) + " blocks, allowed are 1 to " +
                         std::to_string(max_blocks));
    }
    return blocks + blocks * 3 / 4 + 1;
  }

  [[nodiscard]] static std::uint32_t tag_of(const block_key& key) noexcept {
    return static_cast<std::uint32_t>(key.high >> 32);
  }

  // Maps 32 bits evenly onto any number of buckets without a division (Lemire 2019).
  [[nodiscard]] std::uint32_t home(std::uint32_t tag) const noexcept {
    return static_cast<std::uint32_t>((std::uint64_t{tag} * buckets_.size()) >> 32);
  }
  [[nodiscard]] std::uint32_t next(std::uint32_t i) const noexcept {
    return i + 1 == buckets_.size() ? 0 : i + 1;
  }
  [[nodiscard]] std::uint64_t distance(std::uint32_t from, std::uint32_t to) const noexcept {
    return to >= from ? to - from : to + buckets_.size() - from;
  }

  detail::fixed_array<bucket> buckets_;
  detail::fixed_array<block_key> keys_;        // by block
  detail::fixed_array<std::uint32_t> tokens_;  // by block; 0: not in the index
  std::uint64_t size_ = 0;
};

}  // namespace llmmem::inline v0
