/// @file
/// A priority queue over slots that tracks each slot's place: O(log n), allocated once.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The candidate slots, with the smallest rank first. Slots outside keep their rank, so a pinned entry
/// returns with its rank.
///
/// Nodes have four children: half the levels of a binary heap, with the same cache lines (LaMarca and Ladner,
/// "The influence of caches on the performance of heaps", 1996).
///
/// @tparam Rank  trivially copyable, totally ordered by `<`. Among equal ranks, the slot higher in the heap
///         comes first: use distinct ranks if the order must be reproducible.
template <class Rank>
class slot_heap {
 public:
  slot_heap(slot_count capacity, const metadata_source& source, const char* who)
      : heap_(checked_capacity(capacity, who), source, who),
        places_(to_number(capacity), outside, source, who),
        ranks_(to_number(capacity), Rank{}, source, who) {}

  [[nodiscard]] bool contains(slot_id slot) const noexcept { return places_[to_index(slot)] != outside; }

  [[nodiscard]] const Rank& rank(slot_id slot) const noexcept { return ranks_[to_index(slot)]; }

  /// Sets the rank, and moves the slot if it is inside.
  void set_rank(slot_id slot, const Rank& rank) noexcept {
    const std::uint32_t i = to_index(slot);
    ranks_[i] = rank;
    if (places_[i] != outside) restore(places_[i]);
  }

  /// @pre `slot` is outside.
  void push(slot_id slot) noexcept {
    place(size_, to_index(slot));
    rise(size_++);
  }

  /// Does nothing for a slot that is outside.
  void remove(slot_id slot) noexcept {
    const std::uint32_t at = places_[to_index(slot)];
    if (at == outside) return;
    places_[to_index(slot)] = outside;
    const std::uint32_t last = heap_[--size_];
    if (at == size_) return;
    place(at, last);
    restore(at);
  }

  [[nodiscard]] std::optional<slot_id> front() const noexcept {
    if (size_ == 0) return std::nullopt;
    return slot_id{heap_[0]};
  }

  [[nodiscard]] slot_count capacity() const noexcept { return slot_count{heap_.size()}; }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return heap_.bytes() + places_.bytes() + ranks_.bytes();
  }

 private:
  static constexpr std::uint32_t outside = 0xFFFF'FFFF;
  static constexpr std::uint64_t children = 4;

  void place(std::uint32_t at, std::uint32_t slot) noexcept {
    heap_[at] = slot;
    places_[slot] = at;
  }

  void swap(std::uint32_t a, std::uint32_t b) noexcept {
    const std::uint32_t slot = heap_[a];
    place(a, heap_[b]);
    place(b, slot);
  }

  [[nodiscard]] bool before(std::uint32_t a, std::uint32_t b) const noexcept {
    return ranks_[heap_[a]] < ranks_[heap_[b]];
  }

  void restore(std::uint32_t at) noexcept { sink(rise(at)); }

  std::uint32_t rise(std::uint32_t at) noexcept {
    while (at != 0) {
      const auto parent = static_cast<std::uint32_t>((at - 1) / children);
      if (!before(at, parent)) break;
      swap(at, parent);
      at = parent;
    }
    return at;
  }

  void sink(std::uint32_t at) noexcept {
    for (;;) {
      const std::uint64_t first = std::uint64_t{at} * children + 1;
      std::uint32_t least = at;
      for (std::uint64_t child = first; child < first + children && child < size_; ++child) {
        if (before(static_cast<std::uint32_t>(child), least)) least = static_cast<std::uint32_t>(child);
      }
      if (least == at) return;
      swap(at, least);
      at = least;
    }
  }

  fixed_array<std::uint32_t> heap_;    // place -> slot
  fixed_array<std::uint32_t> places_;  // slot -> place, or outside
  fixed_array<Rank> ranks_;            // by slot
  std::uint32_t size_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
