/// @file
/// Slots of a fixed capacity, ordered by their keys.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/metadata.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// No slot: the end of an order or of a list.
inline constexpr std::uint32_t no_index = 0xFFFF'FFFF;

/// A search tree over slots, each at most once, by a `Key` with `<`. Keys must be unique: make the slot or an
/// address part of the key.
///
/// A treap (Seidel and Aragon, 1996) whose priorities are a bijective mix of the slot numbers, so that its
/// shape depends only on its contents.
///
/// @par Complexity   `insert`, `erase`, `at_least`: O(log n) expected; `next`: O(1) amortised over a walk.
/// @par Errors   those of the constructor; nothing else fails or allocates.
template <class Key>
class ordered_slots {
 public:
  ordered_slots(std::uint64_t capacity, const metadata_source& source, const char* what)
      : nodes_(capacity, node{}, source, what) {}

  /// @pre `slot` is below the capacity and not held, `key` not held.
  void insert(std::uint32_t slot, const Key& key) noexcept {
    std::uint32_t parent = no_index;
    std::uint32_t* place = &root_;
    while (*place != no_index) {
      parent = *place;
      place = key < nodes_[parent].key ? &nodes_[parent].left : &nodes_[parent].right;
    }
    *place = slot;
    nodes_[slot] = {key, no_index, no_index, parent, true};
    ++size_;
    while (nodes_[slot].parent != no_index && priority(nodes_[slot].parent) < priority(slot))
      rotate_up(slot);
  }

  /// @pre `slot` is held.
  void erase(std::uint32_t slot) noexcept {
    node& gone = nodes_[slot];
    while (gone.left != no_index && gone.right != no_index) {
      rotate_up(priority(gone.left) > priority(gone.right) ? gone.left : gone.right);
    }
    const std::uint32_t child = gone.left != no_index ? gone.left : gone.right;
    if (child != no_index) nodes_[child].parent = gone.parent;
    link_from(gone.parent, slot) = child;
    gone.held = false;
    --size_;
  }

  [[nodiscard]] bool contains(std::uint32_t slot) const noexcept { return nodes_[slot].held; }
  [[nodiscard]] const Key& key(std::uint32_t slot) const noexcept { return nodes_[slot].key; }
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return nodes_.bytes(); }

  /// Returns the slot with the least key that is not below `key`, or `no_index`.
  [[nodiscard]] std::uint32_t at_least(const Key& key) const noexcept {
    std::uint32_t found = no_index;
    for (std::uint32_t at = root_; at != no_index;) {
      if (nodes_[at].key < key) {
        at = nodes_[at].right;
      } else {
        found = at;
        at = nodes_[at].left;
      }
    }
    return found;
  }

  /// Returns the slot with the greatest key below `key`, or `no_index`.
  [[nodiscard]] std::uint32_t below(const Key& key) const noexcept {
    std::uint32_t found = no_index;
    for (std::uint32_t at = root_; at != no_index;) {
      if (nodes_[at].key < key) {
        found = at;
        at = nodes_[at].right;
      } else {
        at = nodes_[at].left;
      }
    }
    return found;
  }

  [[nodiscard]] std::uint32_t first() const noexcept { return end_of(root_, &node::left); }
  [[nodiscard]] std::uint32_t last() const noexcept { return end_of(root_, &node::right); }

  /// Returns the slot after `slot` in the order, or before it; `no_index` at the end.
  [[nodiscard]] std::uint32_t next(std::uint32_t slot) const noexcept {
    return neighbour(slot, &node::right, &node::left);
  }
  [[nodiscard]] std::uint32_t previous(std::uint32_t slot) const noexcept {
    return neighbour(slot, &node::left, &node::right);
  }

 private:
  struct node {
    Key key{};
    std::uint32_t left = no_index;
    std::uint32_t right = no_index;
    std::uint32_t parent = no_index;
    bool held = false;
  };
  using link = std::uint32_t node::*;

  /// Different for different slots, because each step can be undone.
  [[nodiscard]] static constexpr std::uint32_t priority(std::uint32_t slot) noexcept {
    std::uint32_t bits = slot + 0x9E37'79B9U;
    bits = (bits ^ (bits >> 16)) * 0x85EB'CA6BU;
    bits = (bits ^ (bits >> 13)) * 0xC2B2'AE35U;
    return bits ^ (bits >> 16);
  }

  [[nodiscard]] std::uint32_t& link_from(std::uint32_t parent, std::uint32_t child) noexcept {
    if (parent == no_index) return root_;
    return nodes_[parent].left == child ? nodes_[parent].left : nodes_[parent].right;
  }

  void rotate_up(std::uint32_t slot) noexcept {
    const std::uint32_t parent = nodes_[slot].parent;
    const std::uint32_t above = nodes_[parent].parent;
    const bool was_left = nodes_[parent].left == slot;
    const link inner = was_left ? &node::right : &node::left;
    const link outer = was_left ? &node::left : &node::right;
    link_from(above, parent) = slot;
    const std::uint32_t moved = nodes_[slot].*inner;
    nodes_[parent].*outer = moved;
    if (moved != no_index) nodes_[moved].parent = parent;
    nodes_[slot].*inner = parent;
    nodes_[parent].parent = slot;
    nodes_[slot].parent = above;
  }

  [[nodiscard]] std::uint32_t end_of(std::uint32_t at, link side) const noexcept {
    if (at == no_index) return no_index;
    while (nodes_[at].*side != no_index)
      at = nodes_[at].*side;
    return at;
  }

  [[nodiscard]] std::uint32_t neighbour(std::uint32_t slot, link side, link other) const noexcept {
    if (nodes_[slot].*side != no_index) return end_of(nodes_[slot].*side, other);
    std::uint32_t from = slot;
    std::uint32_t at = nodes_[slot].parent;
    while (at != no_index && nodes_[at].*side == from) {
      from = at;
      at = nodes_[at].parent;
    }
    return at;
  }

  fixed_array<node> nodes_;
  std::uint32_t root_ = no_index;
  std::uint64_t size_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
