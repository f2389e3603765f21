/// @file
/// Several doubly linked lists over the same items; each item is in at most one of them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/ordered_slots.hpp>
#include <llmmem/metadata.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// `lists` lists over items 0 to `items` - 1. Every operation is O(1); 8 bytes per item and 8 per list.
class page_lists {
 public:
  page_lists(std::uint64_t items, std::uint64_t lists, const metadata_source& source, const char* what)
      : nodes_(items, node{}, source, what), ends_(lists, node{}, source, what) {}

  [[nodiscard]] std::uint32_t front(std::size_t list) const noexcept { return ends_[list].next; }
  [[nodiscard]] bool empty(std::size_t list) const noexcept { return front(list) == no_index; }

  /// Returns the item after `item` in its list, or `no_index`.
  [[nodiscard]] std::uint32_t next(std::uint32_t item) const noexcept { return nodes_[item].next; }

  /// @pre `item` is in no list.
  void push_back(std::size_t list, std::uint32_t item) noexcept {
    node& ends = ends_[list];
    nodes_[item] = {ends.previous, no_index};
    (ends.previous == no_index ? ends.next : nodes_[ends.previous].next) = item;
    ends.previous = item;
  }

  /// @pre `item` is in `list`.
  void remove(std::size_t list, std::uint32_t item) noexcept {
    node& ends = ends_[list];
    const node at = nodes_[item];
    (at.previous == no_index ? ends.next : nodes_[at.previous].next) = at.next;
    (at.next == no_index ? ends.previous : nodes_[at.next].previous) = at.previous;
  }

  [[nodiscard]] std::size_t bytes() const noexcept { return nodes_.bytes() + ends_.bytes(); }

 private:
  struct node {
    std::uint32_t previous = no_index;
    std::uint32_t next = no_index;
  };

  fixed_array<node> nodes_;
  fixed_array<node> ends_;  // next: the first, previous: the last
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
