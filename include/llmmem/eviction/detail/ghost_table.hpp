/// @file
/// Recently evicted contents: the ghost entries of ARC and S3-FIFO.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/mix.hpp>
#include <llmmem/eviction/detail/slot_lists.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// `lists` queues of contents over one hash table of fixed capacity. Contents are in at most one queue.
///
/// The table is open addressing with linear probing and backward-shift deletion, at most half full. So it
/// holds no tombstones, and its probes stay short over any run (expected O(1) for contents that are hashes).
/// A bucket keeps half of its contents' hash next to the ghost's number, so a probe reads the contents only
/// to confirm. 17 bytes a ghost and 16 to 32 for its buckets.
template <std::size_t lists>
class ghost_table {
 public:
  /// @param capacity  ghosts in all queues together.
  ghost_table(std::uint64_t capacity, const metadata_source& source, const char* who)
      : contents_(checked_capacity(slot_count{capacity}, who), source, who),
        queue_of_(capacity, source, who),
        order_(slot_count{capacity}, source, who),
        buckets_(std::bit_ceil(capacity * 2), bucket{}, source, who) {
    for (std::uint64_t i = 0; i < capacity; ++i)
      order_.push_back(unused, slot_id{static_cast<std::uint32_t>(i)});
  }

  /// Returns the queue that holds `content`.
  [[nodiscard]] std::optional<std::size_t> find(std::uint64_t content) const noexcept {
    if (content == 0) return std::nullopt;
    const std::uint32_t entry = buckets_[place_of(content)].entry;
    if (entry == empty) return std::nullopt;
    return queue_of_[entry];
  }

  /// Forgets `content`; returns the queue that held it.
  std::optional<std::size_t> take(std::uint64_t content) noexcept {
    if (content == 0) return std::nullopt;
    const std::size_t place = place_of(content);
    const std::uint32_t entry = buckets_[place].entry;
    if (entry == empty) return std::nullopt;
    const std::size_t queue = queue_of_[entry];
    forget(place);
    return queue;
  }

  /// Moves or appends `content` to the end of `queue`; if all ghosts are in use, first forgets the oldest of
  /// that queue, or of another. Ignores unnamed contents, 0.
  void push(std::size_t queue, std::uint64_t content) noexcept {
    if (content == 0) return;
    std::size_t place = place_of(content);
    if (const std::uint32_t known = buckets_[place].entry; known != empty) {
      order_.remove(queue_of_[known], slot_id{known});
      order_.push_back(queue, slot_id{known});
      queue_of_[known] = static_cast<std::uint8_t>(queue);
      return;
    }
    if (order_.size(unused) == 0) {
      for (std::size_t i = 0; i < lists && order_.size(unused) == 0; ++i)
        pop((queue + i) % lists);
      place = place_of(content);  // the pop may have moved other buckets
    }
    const slot_id entry = *order_.front(unused);
    order_.remove(unused, entry);
    order_.push_back(queue, entry);
    contents_[to_index(entry)] = content;
    queue_of_[to_index(entry)] = static_cast<std::uint8_t>(queue);
    buckets_[place] = {.entry = to_index(entry), .tag = tag_of(content)};
  }

  /// Forgets the oldest ghost of `queue`, if any.
  void pop(std::size_t queue) noexcept {
    if (const auto oldest = order_.front(queue)) forget(place_of(contents_[to_index(*oldest)]));
  }

  /// Forgets `content`, if it is remembered.
  void remove(std::uint64_t content) noexcept { static_cast<void>(take(content)); }

  [[nodiscard]] std::uint64_t size(std::size_t queue) const noexcept { return order_.size(queue); }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return contents_.bytes() + queue_of_.bytes() + order_.bytes() + buckets_.bytes();
  }

 private:
  static constexpr std::uint32_t empty = 0xFFFF'FFFF;
  static constexpr std::size_t unused = lists;  // the list of free entries

  struct bucket {
    std::uint32_t entry = empty;
    std::uint32_t tag = 0;  // of its contents; gives their home
  };

  [[nodiscard]] static std::uint32_t tag_of(std::uint64_t content) noexcept {
    return static_cast<std::uint32_t>(mix(content) >> 32);
  }
  [[nodiscard]] std::size_t home(std::uint32_t tag) const noexcept { return tag & (buckets_.size() - 1); }
  [[nodiscard]] std::size_t after(std::size_t place) const noexcept {
    return (place + 1) & (buckets_.size() - 1);
  }

  /// Returns the place of `content`, or the place where it would be put.
  [[nodiscard]] std::size_t place_of(std::uint64_t content) const noexcept {
    const std::uint32_t tag = tag_of(content);
    std::size_t place = home(tag);
    while (buckets_[place].entry != empty &&
           (buckets_[place].tag != tag || contents_[buckets_[place].entry] != content)) {
      place = after(place);
    }
    return place;
  }

  /// Empties a bucket and moves back entries that it had displaced.
  void forget(std::size_t place) noexcept {
    const slot_id entry{buckets_[place].entry};
    order_.remove(queue_of_[to_index(entry)], entry);
    order_.push_back(unused, entry);
    std::size_t hole = place;
    for (std::size_t i = after(hole); buckets_[i].entry != empty; i = after(i)) {
      // An entry may not move before its home; distances wrap at the table's end.
      const std::size_t mask = buckets_.size() - 1;
      const std::size_t from_home = (i - home(buckets_[i].tag)) & mask;
      if (from_home >= ((i - hole) & mask)) {
        buckets_[hole] = buckets_[i];
        hole = i;
      }
    }
    buckets_[hole] = {};
  }

  fixed_array<std::uint64_t> contents_;  // by entry
  fixed_array<std::uint8_t> queue_of_;   // by entry
  slot_lists<lists + 1> order_;          // entries, oldest first
  fixed_array<bucket> buckets_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
