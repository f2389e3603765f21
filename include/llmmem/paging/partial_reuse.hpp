/// @file
/// Reuse of the beginning of a cached block: which cached blocks follow a given one.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/ids.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// What a match does with a cached block of which only the first tokens are wanted.
enum class partial_source : std::uint8_t {
  none,   ///< nothing: full blocks only
  copy,   ///< its first tokens are copied into a block of the sequence's own
  steal,  ///< the sequence takes the block over if nobody uses it, else it copies
};

/// Keeps track of which cached blocks follow which.
///
///     link(block, parent)    `block` is cached, behind the contents of `parent`; null_block: behind nothing
///     unlink(block)          it is not any more
///     move(from, to)         `to`, of which nothing is known, takes the place of `from`
///     visit(parent, look)    `look(block_id)` for cached blocks that follow, newest first, until it
///                            says false
template <class P>
concept partial_reuse_policy =
    std::constructible_from<P, std::uint64_t, const metadata_source&> && std::movable<P> &&
    requires(P policy, const P& read, block_id block, bool (*look)(block_id) noexcept) {
      { P::source } -> std::convertible_to<partial_source>;
      { policy.link(block, block) } noexcept;
      { policy.unlink(block) } noexcept;
      { policy.move(block, block) } noexcept;
      { read.visit(block, look) } noexcept;
      { read.metadata_bytes() } noexcept -> std::same_as<std::size_t>;
    };

/// The default: full blocks only. Costs nothing.
class full_blocks_only {
 public:
  static constexpr partial_source source = partial_source::none;

  full_blocks_only(std::uint64_t, const metadata_source&) noexcept {}
  void link(block_id, block_id) noexcept {}
  void unlink(block_id) noexcept {}
  void move(block_id, block_id) noexcept {}
  template <class Look>
  void visit(block_id, Look&&) const noexcept {}
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }
};

static_assert(partial_reuse_policy<full_blocks_only>);

/// Shares the beginning of a block too: of the cached blocks that follow the last one matched, the one whose
/// tokens agree longest lends them.
///
/// A block with new contents begins with nobody behind it; those that followed its old contents stay linked
/// to each other and are found by nobody, as the prefix index has it. At most 64 followers are compared, the
/// newest first, so a prompt that thousands continue costs no more than one that few do.
///
/// @par Complexity   `link` and `unlink` O(1); 16 bytes a block.
/// @par Source   TensorRT-LLM's `enable_partial_reuse` and `copy_on_partial_reuse`.
template <partial_source Source>
class partial_blocks {
 public:
  static constexpr partial_source source = Source;
  static constexpr std::uint32_t most_compared = 64;

  partial_blocks(std::uint64_t blocks, const metadata_source& metadata)
      : nodes_(blocks + 1, node{}, metadata, "partial_blocks: followers") {}

  void link(block_id block, block_id parent) noexcept {
    node& fresh = nodes_[to_index(block)];
    const block_id first = nodes_[to_index(parent)].first;
    fresh = {.first = null_block, .next = first, .previous = null_block, .parent = parent};
    if (first != null_block) nodes_[to_index(first)].previous = block;
    nodes_[to_index(parent)].first = block;
  }

  void unlink(block_id block) noexcept {
    const node gone = nodes_[to_index(block)];
    if (gone.previous != null_block) {
      nodes_[to_index(gone.previous)].next = gone.next;
    } else if (nodes_[to_index(gone.parent)].first == block) {
      nodes_[to_index(gone.parent)].first = gone.next;
    }
    if (gone.next != null_block) nodes_[to_index(gone.next)].previous = gone.previous;
    nodes_[to_index(block)] = {};
  }

  /// O(followers).
  void move(block_id from, block_id to) noexcept {
    const node moved = nodes_[to_index(from)];
    if (moved.previous != null_block) {
      nodes_[to_index(moved.previous)].next = to;
    } else if (nodes_[to_index(moved.parent)].first == from) {
      nodes_[to_index(moved.parent)].first = to;
    }
    if (moved.next != null_block) nodes_[to_index(moved.next)].previous = to;
    for (block_id each = moved.first; each != null_block; each = nodes_[to_index(each)].next)
      nodes_[to_index(each)].parent = to;
    nodes_[to_index(to)] = moved;
    nodes_[to_index(from)] = {};
  }

  template <class Look>
  void visit(block_id parent, Look&& look) const noexcept {
    block_id block = nodes_[to_index(parent)].first;
    for (std::uint32_t i = 0; i < most_compared && block != null_block; ++i) {
      if (!look(block)) return;
      block = nodes_[to_index(block)].next;
    }
  }

  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return nodes_.bytes(); }

 private:
  struct node {
    block_id first = null_block;  // newest follower of this one
    block_id next = null_block;   // older follower of the same parent
    block_id previous = null_block;
    block_id parent = null_block;
  };

  detail::fixed_array<node> nodes_;  // by block; the null block's followers are those behind nothing
};

/// Copies what it lends.
using copy_partial_blocks = partial_blocks<partial_source::copy>;
/// Hands over blocks that nobody uses.
using steal_partial_blocks = partial_blocks<partial_source::steal>;

static_assert(partial_reuse_policy<copy_partial_blocks>);
static_assert(partial_reuse_policy<steal_partial_blocks>);

}  // namespace v0
}  // namespace llmmem
