/// @file
/// Which nodes hold which blocks of which spans: a node's part of the directory, and its own announcements.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/pool/kv_pool_types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The blocks of a span that one node holds. If chains begin with the same span key and part within the span,
/// each has an entry.
struct span_entry {
  block_key span{};                                        ///< the key of its first chunk
  std::uint64_t nonce = 0;                                 ///< of the holder's process
  seat_id holder = no_seat;                                ///< `no_seat`: the entry is free
  std::uint32_t next = ~std::uint32_t{0};                  ///< next entry of the same bucket
  std::uint32_t chunks = 0;                                ///< chunks of the span that the chain has
  std::uint32_t place = 0;                                 ///< free for use by the owner of the table
  std::array<std::uint32_t, pool::span_chunks> digests{};  ///< `hint_digest` of each chunk's key
};

/// A table of `span_entry` of a fixed size, in which a new entry replaces the oldest.
///
/// @par Complexity   O(entries of the span) per call; 320 bytes per entry, and 8 for each group.
class span_table {
 public:
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  span_table(std::uint32_t entries, std::size_t groups, const metadata_source& source)
      : groups_(groups),
        entries_(entries, span_entry{}, source, "kv_pool: spans"),
        masks_(std::uint64_t{entries} * groups, std::uint64_t{0}, source, "kv_pool: blocks of spans"),
        buckets_(std::uint64_t{entries} * 2, none, source, "kv_pool: buckets of spans") {}

  [[nodiscard]] std::uint32_t size() const noexcept { return size_; }
  [[nodiscard]] std::uint32_t capacity() const noexcept {
    return static_cast<std::uint32_t>(entries_.size());
  }
  [[nodiscard]] span_entry& at(std::uint32_t entry) noexcept { return entries_[entry]; }
  [[nodiscard]] const span_entry& at(std::uint32_t entry) const noexcept { return entries_[entry]; }
  /// Returns, for each group, a mask of the chunks whose blocks the holder has.
  [[nodiscard]] std::span<std::uint64_t> masks(std::uint32_t entry) noexcept {
    return {&masks_[entry * groups_], groups_};
  }
  [[nodiscard]] std::span<const std::uint64_t> masks(std::uint32_t entry) const noexcept {
    return {&masks_[entry * groups_], groups_};
  }
  [[nodiscard]] std::uint32_t first_of(const block_key& span) const noexcept {
    return buckets_[bucket_of(span)];
  }
  /// Calls `f(entry)` for each entry of a span; `f` must not change the table.
  template <class F>
  void for_each_of(const block_key& span, F&& f) const {
    for (std::uint32_t i = first_of(span); i != none; i = entries_[i].next) {
      if (entries_[i].span == span) f(i);
    }
  }

  /// Records which blocks a node holds of a chain's chunks in a span, and replaces its earlier report of
  /// these. Chunks after the chain's keep their bits.
  /// @return the entry, or `none` if the node holds none of them.
  std::uint32_t put(const block_key& span, seat_id holder, std::uint64_t nonce,
                    std::span<const std::uint32_t> digests, std::span<const std::uint64_t> masks) noexcept {
    std::uint32_t same = none;
    for_each_of(span, [&](std::uint32_t i) {
      const span_entry& each = entries_[i];
      if (each.holder == holder && each.nonce == nonce && common(each, digests) == shorter(each, digests))
        same = i;
    });
    const std::uint64_t told =
        digests.size() < 64 ? (std::uint64_t{1} << digests.size()) - 1 : ~std::uint64_t{0};
    bool any = false;
    for (std::size_t g = 0; g < groups_; ++g)
      any = any || (masks[g] & told) != 0 || (same != none && (this->masks(same)[g] & ~told) != 0);
    if (!any) {
      if (same != none) erase(same);
      return none;
    }
    if (same == none) {
      same = take(span, holder, nonce);
      for (std::uint64_t& mask : this->masks(same))
        mask = 0;
    }
    span_entry& into = entries_[same];
    for (std::size_t c = into.chunks; c < digests.size(); ++c)
      into.digests[c] = digests[c];
    if (digests.size() > into.chunks) into.chunks = static_cast<std::uint32_t>(digests.size());
    for (std::size_t g = 0; g < groups_; ++g)
      this->masks(same)[g] = (this->masks(same)[g] & ~told) | (masks[g] & told);
    return same;
  }
  /// Records that a node no longer holds one block of a span.
  void take_back(const block_key& span, seat_id holder, std::size_t group, std::uint32_t place,
                 std::uint32_t digest) noexcept {
    for (std::uint32_t i = first_of(span), next = none; i != none; i = next) {
      const span_entry& each = entries_[i];
      next = each.next;
      if (each.span != span || each.holder != holder || each.chunks <= place || each.digests[place] != digest)
        continue;
      masks(i)[group] &= ~(std::uint64_t{1} << place);
      bool any = false;
      for (const std::uint64_t mask : masks(i))
        any = any || mask != 0;
      if (!any) erase(i);
    }
  }
  void erase(std::uint32_t entry) noexcept {
    std::uint32_t* link = &buckets_[bucket_of(entries_[entry].span)];
    while (*link != entry)
      link = &entries_[*link].next;
    *link = entries_[entry].next;
    entries_[entry] = {};
    --size_;
  }
  /// Removes the entries of a node.
  void forget(seat_id holder) noexcept {
    for (std::uint32_t i = 0; i < capacity(); ++i) {
      if (entries_[i].holder == holder) erase(i);
    }
  }
  void clear() noexcept {
    for (std::uint32_t i = 0; i < capacity(); ++i) {
      if (entries_[i].holder != no_seat) erase(i);
    }
  }
  /// Returns how many leading chunks a chain has in common with the chain of an entry.
  [[nodiscard]] static std::uint32_t common(const span_entry& entry,
                                            std::span<const std::uint32_t> digests) noexcept {
    const std::uint32_t most = shorter(entry, digests);
    std::uint32_t same = 0;
    while (same < most && entry.digests[same] == digests[same])
      ++same;
    return same;
  }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return entries_.bytes() + masks_.bytes() + buckets_.bytes();
  }

 private:
  [[nodiscard]] static std::uint32_t shorter(const span_entry& entry,
                                             std::span<const std::uint32_t> digests) noexcept {
    return entry.chunks < digests.size() ? entry.chunks : static_cast<std::uint32_t>(digests.size());
  }
  [[nodiscard]] std::uint64_t bucket_of(const block_key& span) const noexcept {
    return (span.low ^ span.high) % buckets_.size();
  }
  /// Takes the next entry in turn, and drops its contents.
  [[nodiscard]] std::uint32_t take(const block_key& span, seat_id holder, std::uint64_t nonce) noexcept {
    const std::uint32_t entry = hand_;
    hand_ = hand_ + 1 == capacity() ? 0 : hand_ + 1;
    if (entries_[entry].holder != no_seat) erase(entry);
    std::uint32_t& bucket = buckets_[bucket_of(span)];
    entries_[entry] = {.span = span, .nonce = nonce, .holder = holder, .next = bucket};
    bucket = entry;
    ++size_;
    return entry;
  }

  std::size_t groups_;
  fixed_array<span_entry> entries_;
  fixed_array<std::uint64_t> masks_;
  fixed_array<std::uint32_t> buckets_;
  std::uint32_t hand_ = 0;
  std::uint32_t size_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
