/// @file
/// Several doubly linked lists over the same slots: every operation O(1), 8 bytes a slot, allocated once.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace llmmem::inline v0::detail {

/// Lists in an order of the owner's choosing; a slot is in one of them at most.
///
/// Node `capacity + i` is the end of list `i`, linked in a ring. A node that links to itself is in no list,
/// or an empty list's end.
class slot_lists {
 public:
  /// @throws length_error when slots and ends together cannot be indexed.
  slot_lists(slot_count capacity, std::uint32_t lists, const metadata_source& source, const char* who)
      : ends_(static_cast<std::uint32_t>(checked_slots(capacity, lists, who))),
        nodes_(to_number(capacity) + lists, source, who) {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const auto self = static_cast<std::uint32_t>(i);
      nodes_[i] = {self, self};
    }
  }

  [[nodiscard]] bool contains(slot_id slot) const noexcept {
    return nodes_[to_index(slot)].next != to_index(slot);
  }

  /// @pre `slot` is in no list.
  void push_back(std::uint32_t list, slot_id slot) noexcept {
    const std::uint32_t i = to_index(slot);
    const std::uint32_t end = ends_ + list;
    const std::uint32_t last = nodes_[end].previous;
    nodes_[i] = {last, end};
    nodes_[last].next = i;
    nodes_[end].previous = i;
  }

  /// Nothing happens to a slot that is in no list.
  void remove(slot_id slot) noexcept {
    const std::uint32_t i = to_index(slot);
    const auto [previous, next] = nodes_[i];
    nodes_[previous].next = next;
    nodes_[next].previous = previous;
    nodes_[i] = {i, i};
  }

  [[nodiscard]] std::optional<slot_id> front(std::uint32_t list) const noexcept {
    const std::uint32_t first = nodes_[ends_ + list].next;
    if (first == ends_ + list) return std::nullopt;
    return slot_id{first};
  }

  [[nodiscard]] std::size_t bytes() const noexcept { return nodes_.bytes(); }

 private:
  struct node {
    std::uint32_t previous;
    std::uint32_t next;
  };

  [[nodiscard]] static std::uint64_t checked_slots(slot_count capacity, std::uint32_t lists,
                                                   const char* who) {
    const std::uint64_t slots = checked_capacity(capacity, who);
    if (slots > max_slots - lists) {
      throw length_error(std::string(who) + ": capacity " + std::to_string(slots) + " exceeds the " +
                         std::to_string(max_slots - lists) + " that " + std::to_string(lists) +
                         " lists leave");
    }
    return slots;
  }

  std::uint32_t ends_;
  fixed_array<node> nodes_;
};

}  // namespace llmmem::inline v0::detail
