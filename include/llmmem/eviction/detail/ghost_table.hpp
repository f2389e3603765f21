/// @file
/// What was evicted lately, by contents: the ghost entries of ARC and S3-FIFO.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/mix.hpp>
#include <llmmem/eviction/detail/slot_lists.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem::inline v0::detail {

/// `lists` queues of contents over one hash table of fixed capacity; contents are in at most one queue.
///
/// The table is open addressing with linear probing and backward-shift deletion, at most half full, so it
/// holds no tombstones and its probes stay short however long it runs (expected O(1) for contents that are
/// hashes). 17 bytes a ghost and 8 to 16 for its buckets.
template <std::size_t lists>
class ghost_table {
 public:
  /// @param capacity  ghosts in all queues together.
  ghost_table(std::uint64_t capacity, const metadata_source& source, const char* who)
      : contents_(checked_capacity(slot_count{capacity}, who), source, who),
        queue_of_(capacity, source, who),
        order_(slot_count{capacity}, source, who),
        buckets_(std::bit_ceil(capacity * 2), empty, source, who) {
    for (std::uint64_t i = 0; i < capacity; ++i)
      order_.push_back(unused, slot_id{static_cast<std::uint32_t>(i)});
  }

  /// The queue that `content` is in.
  [[nodiscard]] std::optional<std::size_t> find(std::uint64_t content) const noexcept {
    if (content == 0) return std::nullopt;
    const std::uint32_t entry = buckets_[bucket_of(content)];
    if (entry == empty) return std::nullopt;
    return queue_of_[entry];
  }

  /// Appends `content` to `queue`; the oldest of that queue, or of another, makes room when all are full.
  /// Contents that were not told, 0, are not remembered. @pre `content` is in no queue.
  void push(std::size_t queue, std::uint64_t content) noexcept {
    if (content == 0) return;
    for (std::size_t i = 0; i < lists && order_.size(unused) == 0; ++i)
      pop((queue + i) % lists);
    const slot_id entry = *order_.front(unused);
    order_.remove(unused, entry);
    order_.push_back(queue, entry);
    contents_[to_index(entry)] = content;
    queue_of_[to_index(entry)] = static_cast<std::uint8_t>(queue);
    buckets_[bucket_of(content)] = to_index(entry);
  }

  /// Forgets the oldest of `queue`, if there is one.
  void pop(std::size_t queue) noexcept {
    if (const auto oldest = order_.front(queue)) forget(bucket_of(contents_[to_index(*oldest)]));
  }

  /// Forgets `content`, if it is remembered.
  void remove(std::uint64_t content) noexcept {
    if (find(content)) forget(bucket_of(content));
  }

  [[nodiscard]] std::uint64_t size(std::size_t queue) const noexcept { return order_.size(queue); }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return contents_.bytes() + queue_of_.bytes() + order_.bytes() + buckets_.bytes();
  }

 private:
  static constexpr std::uint32_t empty = 0xFFFF'FFFF;
  static constexpr std::size_t unused = lists;  // the list of entries that hold nothing

  [[nodiscard]] std::size_t home(std::uint64_t content) const noexcept {
    return mix(content) & (buckets_.size() - 1);
  }
  [[nodiscard]] std::size_t after(std::size_t bucket) const noexcept {
    return (bucket + 1) & (buckets_.size() - 1);
  }

  /// Where `content` is, or would be put.
  [[nodiscard]] std::size_t bucket_of(std::uint64_t content) const noexcept {
    std::size_t bucket = home(content);
    while (buckets_[bucket] != empty && contents_[buckets_[bucket]] != content)
      bucket = after(bucket);
    return bucket;
  }

  /// Empties a bucket and moves back what its entry had pushed further.
  void forget(std::size_t bucket) noexcept {
    const slot_id entry{buckets_[bucket]};
    order_.remove(queue_of_[to_index(entry)], entry);
    order_.push_back(unused, entry);
    std::size_t hole = bucket;
    for (std::size_t i = after(hole); buckets_[i] != empty; i = after(i)) {
      // An entry may not move before its home; distances go round the table's end.
      const std::size_t mask = buckets_.size() - 1;
      const std::size_t from_home = (i - home(contents_[buckets_[i]])) & mask;
      if (from_home >= ((i - hole) & mask)) {
        buckets_[hole] = buckets_[i];
        hole = i;
      }
    }
    buckets_[hole] = empty;
  }

  fixed_array<std::uint64_t> contents_;  // by entry
  fixed_array<std::uint8_t> queue_of_;   // by entry
  slot_lists<lists + 1> order_;          // entries, oldest first
  fixed_array<std::uint32_t> buckets_;   // entry, or empty
};

}  // namespace llmmem::inline v0::detail
