/// @file
/// Several doubly linked lists over one set of slots: every operation O(1), 8 bytes a slot, allocated once.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// `lists` lists of slots, numbered from 0. A slot is in at most one of them, and the owner of this object
/// knows in which.
///
/// A node in no list links to itself.
template <std::size_t lists>
class slot_lists {
 public:
  slot_lists(slot_count capacity, const metadata_source& source, const char* who)
      : nodes_(checked_capacity(capacity, who), source, who) {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const auto self = static_cast<std::uint32_t>(i);
      nodes_[i] = node{self, self};
    }
  }

  /// Whether `slot` is in any of the lists.
  [[nodiscard]] bool contains(slot_id slot) const noexcept {
    return nodes_[to_index(slot)].next != to_index(slot);
  }

  /// @pre `slot` is in no list.
  void push_back(std::size_t list, slot_id slot) noexcept {
    const std::uint32_t i = to_index(slot);
    ends& to = ends_[list];
    nodes_[i] = {to.last, none};
    (to.last == none ? to.first : nodes_[to.last].next) = i;
    to.last = i;
    ++to.size;
  }

  /// @pre `slot` is in `list`.
  void remove(std::size_t list, slot_id slot) noexcept {
    const std::uint32_t i = to_index(slot);
    // Reads the two separately: the removal of a neighbour has often just written one of them, and a load of
    // both would wait until that store has left the processor's buffer.
    const std::uint32_t previous = nodes_[i].previous;
    const std::uint32_t next = nodes_[i].next;
    ends& from = ends_[list];
    (previous == none ? from.first : nodes_[previous].next) = next;
    (next == none ? from.last : nodes_[next].previous) = previous;
    nodes_[i] = {i, i};
    --from.size;
  }

  /// Returns the first slot of `list`, or `no_slot`: for callers that choose between lists. An optional slot
  /// is stored in parts and then loaded whole, which stalls.
  [[nodiscard]] slot_id first(std::size_t list) const noexcept { return slot_id{ends_[list].first}; }
  [[nodiscard]] std::optional<slot_id> front(std::size_t list) const noexcept {
    const slot_id slot = first(list);
    if (slot == no_slot) return std::nullopt;
    return slot;
  }

  [[nodiscard]] std::uint64_t size(std::size_t list) const noexcept { return ends_[list].size; }
  [[nodiscard]] slot_count capacity() const noexcept { return slot_count{nodes_.size()}; }
  [[nodiscard]] std::size_t bytes() const noexcept { return nodes_.bytes(); }

 private:
  static constexpr std::uint32_t none = to_index(no_slot);

  struct node {
    std::uint32_t previous;
    std::uint32_t next;
  };
  struct ends {
    std::uint32_t first = none;
    std::uint32_t last = none;
    std::uint64_t size = 0;
  };

  fixed_array<node> nodes_;
  std::array<ends, lists> ends_{};
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
