/// @file
/// The tree of cached prefixes, block by block: which cached blocks follow which. Private to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/outside_keys.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The cached blocks in the order of their prefixes: each is linked to the block before it, and stores a
/// digest of that block's key.
///
/// After a block is dropped, its followers remain. Those that no lookup can find without it are its orphans,
/// which the allocator drops as well. The others, which are found by their keys alone, have a list of their
/// own: they follow nothing known.
///
/// @par Complexity   O(1) per block linked or unlinked, and O(1) per follower; 24 bytes per block.
class block_followers {
 public:
  block_followers(std::uint64_t blocks, const metadata_source& metadata)
      : nodes_(blocks + 3, node{}, metadata, "paged_allocator: followers"),
        orphans_{static_cast<std::uint32_t>(blocks + 1)},
        apart_{static_cast<std::uint32_t>(blocks + 2)} {}

  /// Links `block`, cached after the contents of `parent`, whose key is `before`; the null block and the zero
  /// key mean: at the start. `block` has no followers yet.
  void link(block_id block, block_id parent, const block_key& before) noexcept {
    node& fresh = nodes_[to_index(block)];
    fresh.first = null_block;
    fresh.before = digest_of(before);
    insert(block, parent);
  }

  /// Makes `block`, with its followers, a follower of `parent`.
  void relink(block_id block, block_id parent) noexcept {
    remove(block);
    insert(block, parent);
  }

  /// Unlinks `block`, which is no longer cached. Its followers for which `needs_it(block_id)` is true become
  /// orphans.
  template <class NeedsIt>
  void unlink(block_id block, NeedsIt&& needs_it) noexcept {
    remove(block);
    for (block_id each = first(block); each != null_block; each = first(block))
      relink(each, needs_it(each) ? orphans_ : apart_);
  }

  /// Unlinks all blocks.
  void clear() noexcept {
    for (std::size_t i = 0; i < nodes_.size(); ++i)
      nodes_[i] = {};
  }

  /// Returns a block that was orphaned, or the null block.
  [[nodiscard]] block_id orphan() const noexcept { return first(orphans_); }

  /// Returns the newest block that follows `parent`, or the null block.
  [[nodiscard]] block_id first(block_id parent) const noexcept { return nodes_[to_index(parent)].first; }

  /// Returns the next older follower of the same parent.
  [[nodiscard]] block_id next(block_id block) const noexcept { return nodes_[to_index(block)].next; }

  /// Returns `paging::key_digest` of the contents before `block` when it was cached; 0: none.
  [[nodiscard]] std::uint64_t before(block_id block) const noexcept { return nodes_[to_index(block)].before; }

  /// Whether `block` was cached after the contents that `before` names.
  [[nodiscard]] bool comes_after(block_id block, const block_key& before) const noexcept {
    return nodes_[to_index(block)].before == digest_of(before);
  }

  /// Replaces `from`, which is linked, by `to`. O(followers).
  void move(block_id from, block_id to) noexcept {
    const node moved = nodes_[to_index(from)];
    if (moved.previous != null_block) {
      nodes_[to_index(moved.previous)].next = to;
    } else if (nodes_[to_index(moved.parent)].first == from) {
      nodes_[to_index(moved.parent)].first = to;
    }
    if (moved.next != null_block) nodes_[to_index(moved.next)].previous = to;
    for (block_id each = moved.first; each != null_block; each = next(each))
      nodes_[to_index(each)].parent = to;
    nodes_[to_index(to)] = moved;
    nodes_[to_index(from)] = {};
  }

  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return nodes_.bytes(); }

  /// Proves that each block for which `is_cached(block_id)` follows a cached block, or nothing, and is listed
  /// there. Returns one sentence for each violation. O(blocks); allocates.
  template <class IsCached>
  [[nodiscard]] std::vector<std::string> audit(IsCached&& is_cached) const {
    std::vector<std::string> found;
    const auto blocks = static_cast<std::uint32_t>(nodes_.size() - 3);
    std::uint64_t cached = 0;
    std::uint64_t linked = 0;
    for (std::uint32_t i = 0; i < nodes_.size(); ++i) {
      const block_id parent{i};
      const bool is_block = i != 0 && i <= blocks;
      if (is_block && is_cached(parent)) ++cached;
      if (first(parent) == null_block) continue;
      if (parent == orphans_) found.emplace_back("followers: orphans remain");
      if (is_block && !is_cached(parent))
        found.push_back("followers: block " + std::to_string(i) + " has followers and is not cached");
      for (block_id each = first(parent); each != null_block && linked <= blocks; each = next(each)) {
        ++linked;
        if (nodes_[to_index(each)].parent != parent || !is_cached(each)) {
          found.push_back("followers: block " + std::to_string(to_index(each)) +
                          " is listed behind a block other than its parent, or is not cached");
        }
      }
    }
    if (cached != linked) {
      found.push_back("followers: " + std::to_string(linked) + " blocks are linked, " +
                      std::to_string(cached) + " are cached");
    }
    return found;
  }

 private:
  struct node {
    block_id first = null_block;  // newest follower of this block
    block_id next = null_block;   // older follower of the same parent
    block_id previous = null_block;
    block_id parent = null_block;
    std::uint64_t before = 0;  // digest of the parent's key
  };

  /// Enough bits to distinguish parents: a collision matters only if the 128 bits of the child's own key are
  /// equal too.
  [[nodiscard]] static std::uint64_t digest_of(const block_key& key) noexcept {
    return paging::key_digest(key);
  }

  void insert(block_id block, block_id parent) noexcept {
    node& fresh = nodes_[to_index(block)];
    const block_id newest = first(parent);
    fresh.next = newest;
    fresh.previous = null_block;
    fresh.parent = parent;
    if (newest != null_block) nodes_[to_index(newest)].previous = block;
    nodes_[to_index(parent)].first = block;
  }

  void remove(block_id block) noexcept {
    const node& gone = nodes_[to_index(block)];
    if (gone.previous != null_block) {
      nodes_[to_index(gone.previous)].next = gone.next;
    } else {
      nodes_[to_index(gone.parent)].first = gone.next;
    }
    if (gone.next != null_block) nodes_[to_index(gone.next)].previous = gone.previous;
  }

  detail::fixed_array<node> nodes_;  // by block; the null block's followers have no block before them
  block_id orphans_;                 // the node whose followers are the orphans
  block_id apart_;                   // the node of the followers that follow nothing known
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
