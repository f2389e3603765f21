/// @file
/// Several priority queues over one set of slots: O(log n), allocated once.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace llmmem::inline v0::detail {

/// `queues` orders of slots by a key each slot has, the smallest first; a slot is in at most one queue,
/// and its owner knows in which. The key is kept for slots in no queue too.
///
/// Leftist trees (Crane 1972): every way down the right side has O(log n) slots, so joining two trees and
/// taking a slot out of the middle are O(log n), and a tree needs no array of its own. 13 bytes a slot and a
/// key.
template <std::size_t queues, class Key = std::uint64_t>
class slot_queues {
 public:
  slot_queues(slot_count capacity, const metadata_source& source, const char* who)
      : keys_(checked_capacity(capacity, who), Key{}, source, who),
        nodes_(to_number(capacity), node{}, source, who),
        heights_(to_number(capacity), outside, source, who) {
    roots_.fill(none);
  }

  [[nodiscard]] bool contains(slot_id slot) const noexcept { return heights_[to_index(slot)] != outside; }
  [[nodiscard]] const Key& key(slot_id slot) const noexcept { return keys_[to_index(slot)]; }

  /// @pre `slot` is in no queue.
  void set_key(slot_id slot, const Key& key) noexcept { keys_[to_index(slot)] = key; }

  /// @pre `slot` is in no queue.
  void push(std::size_t queue, slot_id slot) noexcept {
    const std::uint32_t i = to_index(slot);
    nodes_[i] = node{};
    heights_[i] = 1;
    roots_[queue] = join(roots_[queue], i);
  }

  /// @pre `slot` is in `queue`.
  void remove(std::size_t queue, slot_id slot) noexcept {
    const std::uint32_t i = to_index(slot);
    const node was = nodes_[i];
    heights_[i] = outside;
    const std::uint32_t rest = join(was.left, was.right);
    if (rest != none) nodes_[rest].parent = was.parent;
    if (was.parent == none) {
      roots_[queue] = rest;
      return;
    }
    node& above = nodes_[was.parent];
    (above.left == i ? above.left : above.right) = rest;
    lean_left(was.parent, none);
  }

  [[nodiscard]] std::optional<slot_id> front(std::size_t queue) const noexcept {
    if (roots_[queue] == none) return std::nullopt;
    return slot_id{roots_[queue]};
  }

  [[nodiscard]] slot_count capacity() const noexcept { return slot_count{keys_.size()}; }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return keys_.bytes() + nodes_.bytes() + heights_.bytes();
  }

 private:
  static constexpr std::uint32_t none = to_index(no_slot);
  static constexpr std::uint8_t outside = 0;

  struct node {
    std::uint32_t parent = none;
    std::uint32_t left = none;
    std::uint32_t right = none;
  };

  /// One more than the slots on the way down the right side.
  [[nodiscard]] std::uint8_t height(std::uint32_t i) const noexcept {
    return i == none ? std::uint8_t{0} : heights_[i];
  }

  [[nodiscard]] bool before(std::uint32_t a, std::uint32_t b) const noexcept { return keys_[a] < keys_[b]; }

  /// The root of both trees together, whose parent is none.
  std::uint32_t join(std::uint32_t a, std::uint32_t b) noexcept {
    if (a != none) nodes_[a].parent = none;
    if (b != none) nodes_[b].parent = none;
    if (a == none) return b;
    if (b == none) return a;
    if (before(b, a)) std::swap(a, b);
    const std::uint32_t root = a;
    // Down the right side, hanging in what comes first; `a` is in place, `b` waits.
    for (;;) {
      const std::uint32_t next = nodes_[a].right;
      if (next == none || before(b, next)) {
        nodes_[a].right = b;
        nodes_[b].parent = a;
        if (next == none) break;
        a = b;
        b = next;
      } else {
        a = next;
      }
    }
    lean_left(a, root);
    return root;
  }

  /// Restores heights from `i` up to `last`, or until one stays as it was.
  void lean_left(std::uint32_t i, std::uint32_t last) noexcept {
    for (; i != none; i = nodes_[i].parent) {
      node& at = nodes_[i];
      if (height(at.left) < height(at.right)) std::swap(at.left, at.right);
      const auto now = static_cast<std::uint8_t>(height(at.right) + 1);
      if (last == none && heights_[i] == now) return;
      heights_[i] = now;
      if (i == last) return;
    }
  }

  fixed_array<Key> keys_;
  fixed_array<node> nodes_;
  fixed_array<std::uint8_t> heights_;  // 1 for a slot without right side; outside
  std::array<std::uint32_t, queues> roots_;
};

}  // namespace llmmem::inline v0::detail
