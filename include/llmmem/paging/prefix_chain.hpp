/// @file
/// Prefixes of tokens, chunk by chunk, stored separately from the blocks that hold their KV, so that several
/// groups of layers can attach cached blocks to them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/hash/chained_keys.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/outside_keys.hpp>
#include <llmmem/paging/prefix_index.hpp>
#include <llmmem/paging/verification.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A trie of token chunks of equal length. A node represents its chunk and everything before it. For each
/// group it names the block that caches the group's contents at this node, if there is one.
///
/// In `paged_allocator` the blocks themselves form the chain: the parent of a block is a block. That does not
/// work for groups: a sliding window loses earlier blocks while later ones are still good, and states have
/// few blocks. Here the chain is separate metadata of about 4 bytes per token, and a node lives while it has
/// a child, a cached block, or a holder. A parent is therefore never evicted before its child, and
/// `verify_tokens` proves every node by its own tokens and the identity of its parent, even if blocks were
/// evicted and cached again.
///
/// Nodes are named by `block_id`, 1 to `nodes`; the null block is the root of every chain.
///
/// @par Complexity   O(1) per node, and the hash of its tokens; `release` O(1) per node removed. Metadata 51
///   bytes per node, 4 per group and node, and the verification's. Nothing is allocated after construction.
/// @par Thread safety   one writer at a time; const calls may run concurrently.
template <block_hash Hash, block_verification Verification>
class prefix_chain {
 public:
  /// A position in a chain: after the chunks that `node` represents.
  struct place {
    block_id node = null_block;
    block_key key{};
  };

  prefix_chain(std::uint64_t nodes, std::uint32_t chunk_tokens, std::size_t groups, hash_seed seed,
               const metadata_source& source)
      : hash_(seed),
        index_(nodes, source),
        verification_(nodes, chunk_tokens, source),
        nodes_(nodes + 1, entry{}, source, "prefix_chain: nodes"),
        held_(checked_multiply(nodes + 1, groups, "prefix_chain: nodes x groups"), null_block, source,
              "prefix_chain: cached blocks"),
        groups_(groups),
        chunk_tokens_(chunk_tokens) {}

  /// Returns the start of a context's chains in an epoch of the weights (see `paging::root_key`).
  [[nodiscard]] place root(const prefix_context& context, std::uint64_t epoch = 0) const noexcept {
    return {null_block, paging::root_key(hash_, context, epoch)};
  }

  /// Returns the keys of the chunks of `tokens` that follow `at`.
  [[nodiscard]] chained_keys<Hash> keys_after(
      const place& at, std::span<const token_id> tokens) const noexcept LLMMEM_LIFETIMEBOUND {
    return {hash_, at.key, tokens, chunk_tokens_};
  }

  /// Returns the position one chunk further, if it is known. @pre `key` is that of the chunk after `at`.
  [[nodiscard]] std::optional<place> find(const place& at, const block_key& key,
                                          std::span<const token_id> chunk,
                                          const prefix_context& context) const noexcept {
    const block_id found = index_.block_of(key);
    if (found == null_block || !verification_.holds(found, chunk, link(at.node), context))
      return std::nullopt;
    return place{found, key};
  }

  /// Returns the position one chunk further, and adds a node if it was not known; nothing if no node is free,
  /// or another chunk has the same key. Call `share` for a new node, or the next `release` removes it.
  /// @pre `key` is that of the chunk after `at`.
  [[nodiscard]] std::optional<place> extend(const place& at, const block_key& key,
                                            std::span<const token_id> chunk,
                                            const prefix_context& context) noexcept {
    if (const block_id found = index_.block_of(key); found != null_block) {
      if (!verification_.holds(found, chunk, link(at.node), context)) return std::nullopt;
      return place{found, key};
    }
    if (free() == 0) return std::nullopt;
    block_id fresh = free_;
    if (fresh != null_block) {
      free_ = nodes_[to_index(fresh)].parent;
    } else {
      fresh = block_id{static_cast<std::uint32_t>(++touched_)};
    }
    nodes_[to_index(fresh)] = {.parent = at.node};
    share(at.node);
    index_.stage(key, fresh);
    index_.insert(fresh, chunk_tokens_);
    verification_.store(fresh, chunk);
    verification_.enrol(fresh, link(at.node), context);
    return place{fresh, key};
  }

  /// Whether `extend` would refuse because another chunk has the same key.
  [[nodiscard]] bool collides(const place& at, const block_key& key, std::span<const token_id> chunk,
                              const prefix_context& context) const noexcept {
    return index_.block_of(key) != null_block && !find(at, key, chunk, context);
  }

  /// Adds a holder to `node`, which also keeps all nodes before it. Has no effect on the root.
  void share(block_id node) noexcept {
    if (node != null_block) ++nodes_[to_index(node)].references;
  }

  /// Removes a holder. Nodes without holders are removed.
  void release(block_id node) noexcept {
    while (node != null_block && --nodes_[to_index(node)].references == 0) {
      const block_id parent = nodes_[to_index(node)].parent;
      index_.erase(node);
      nodes_[to_index(node)].parent = free_;
      free_ = node;
      node = parent;
    }
  }

  /// Returns the block that caches the contents of `group` at `node`, or the null block.
  [[nodiscard]] block_id cached(block_id node, std::size_t group) const noexcept {
    return held_[to_index(node) * groups_ + group];
  }

  /// Records that `block` caches the contents of `group` at `node`. @pre no block does.
  void hold(block_id node, std::size_t group, block_id block) noexcept {
    held_[to_index(node) * groups_ + group] = block;
    share(node);
  }

  /// Records that no block caches them. @pre a block does.
  void drop(block_id node, std::size_t group) noexcept {
    held_[to_index(node) * groups_ + group] = null_block;
    release(node);
  }

  /// Calls `visit(node)` for each node below `node`; it may drop what is cached there. O(nodes).
  template <class Visit>
  void each_below(block_id node, Visit&& visit) noexcept {
    // Marks are even for nodes that are not below, odd for those that are; older marks are from earlier
    // calls.
    marks_ += 2;
    const std::uint32_t outside = marks_;
    const std::uint32_t below = marks_ + 1;
    nodes_[0].mark = outside;
    nodes_[to_index(node)].mark = below;
    for (std::uint32_t i = 1; i <= touched_; ++i) {
      if (!index_.contains(block_id{i}) || block_id{i} == node) continue;
      std::uint32_t top = i;
      while (nodes_[top].mark < outside)
        top = to_index(nodes_[top].parent);
      const std::uint32_t mark = nodes_[top].mark;
      for (std::uint32_t each = i; nodes_[each].mark < outside; each = to_index(nodes_[each].parent))
        nodes_[each].mark = mark;
      if (mark == below) visit(block_id{i});
    }
  }

  [[nodiscard]] const Hash& hash() const noexcept { return hash_; }
  [[nodiscard]] block_id parent(block_id node) const noexcept { return nodes_[to_index(node)].parent; }
  [[nodiscard]] const block_key& key(block_id node) const noexcept { return index_.key(node); }
  /// Nodes in use, free nodes, and all nodes.
  [[nodiscard]] std::uint64_t size() const noexcept { return index_.size(); }
  [[nodiscard]] std::uint64_t free() const noexcept { return capacity() - size(); }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return nodes_.size() - 1; }
  [[nodiscard]] bool contains(block_id node) const noexcept { return index_.contains(node); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return index_.metadata_bytes() + nodes_.bytes() + held_.bytes();
  }
  [[nodiscard]] std::size_t verification_bytes() const noexcept { return verification_.metadata_bytes(); }

  /// Proves that each node is found, and that its count is the number of its children, cached blocks and
  /// holders.
  /// @param holders  how often each node is held from outside, by id.
  [[nodiscard]] std::vector<std::string> audit(std::span<const std::uint64_t> holders) const {
    std::vector<std::string> found = index_.audit();
    std::vector<std::uint64_t> references(holders.begin(), holders.end());
    for (std::uint32_t i = 1; i < nodes_.size(); ++i) {
      if (!index_.contains(block_id{i})) continue;
      ++references[to_index(nodes_[i].parent)];
      for (std::size_t g = 0; g < groups_; ++g)
        references[i] += cached(block_id{i}, g) != null_block ? 1U : 0U;
    }
    for (std::uint32_t i = 1; i < nodes_.size(); ++i) {
      const std::uint64_t counted = index_.contains(block_id{i}) ? nodes_[i].references : 0;
      if (counted == references[i] && (counted != 0) == index_.contains(block_id{i})) continue;
      found.push_back("prefix_chain: node " + std::to_string(i) + " counts " + std::to_string(counted) +
                      " references, " + std::to_string(references[i]) + " exist");
    }
    return found;
  }

 private:
  struct entry {
    block_id parent = null_block;  // of a free node: the next free one
    std::uint32_t references = 0;
    std::uint32_t mark = 0;  // of the last `each_below` that passed it
  };

  [[nodiscard]] chain_link link(block_id node) const noexcept {
    return node == null_block ? chain_link{} : verification_.link(node);
  }

  Hash hash_;
  prefix_index index_;
  Verification verification_;
  detail::fixed_array<entry> nodes_;
  detail::fixed_array<block_id> held_;  // `groups_` per node
  block_id free_ = null_block;
  std::uint64_t touched_ = 0;  // nodes after this one were never used
  std::uint32_t marks_ = 0;
  std::size_t groups_;
  std::uint32_t chunk_tokens_;
};

}  // namespace v0
}  // namespace llmmem
