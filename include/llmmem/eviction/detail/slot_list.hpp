/// @file
/// A doubly linked list over slots: every operation O(1), 8 bytes a slot, allocated once.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Slots in an order of the owner's choice; a slot is in the list at most once.
///
/// The nodes form a ring with node `capacity` as the list's end, so no operation has a special case. A node
/// outside the list links to itself.
class slot_list {
 public:
  slot_list(slot_count capacity, const metadata_source& source, const char* who)
      : end_(static_cast<std::uint32_t>(checked_capacity(capacity, who))),
        nodes_(to_number(capacity) + 1, source, who) {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const auto self = static_cast<std::uint32_t>(i);
      nodes_[i] = {self, self};
    }
  }

  [[nodiscard]] bool contains(slot_id slot) const noexcept {
    return nodes_[to_index(slot)].next != to_index(slot);
  }

  /// @pre `slot` is not in the list.
  void push_back(slot_id slot) noexcept {
    const std::uint32_t i = to_index(slot);
    const std::uint32_t last = nodes_[end_].previous;
    nodes_[i] = {last, end_};
    nodes_[last].next = i;
    nodes_[end_].previous = i;
  }

  /// Does nothing for a slot that is not in the list.
  void remove(slot_id slot) noexcept {
    const std::uint32_t i = to_index(slot);
    // Reads the two separately: the removal of a neighbour has often just written one of them, and a load of
    // both would wait until that store has left the processor's buffer.
    const std::uint32_t previous = nodes_[i].previous;
    const std::uint32_t next = nodes_[i].next;
    nodes_[previous].next = next;
    nodes_[next].previous = previous;
    nodes_[i] = {i, i};
  }

  [[nodiscard]] std::optional<slot_id> front() const noexcept {
    const std::uint32_t first = nodes_[end_].next;
    if (first == end_) return std::nullopt;
    return slot_id{first};
  }

  [[nodiscard]] slot_count capacity() const noexcept { return slot_count{end_}; }
  [[nodiscard]] std::size_t bytes() const noexcept { return nodes_.bytes(); }

 private:
  struct node {
    std::uint32_t previous;
    std::uint32_t next;
  };

  std::uint32_t end_;
  fixed_array<node> nodes_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
