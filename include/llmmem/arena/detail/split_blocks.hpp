/// @file
/// Segments that are split into blocks: best fit, rests are split off, free neighbours are joined.
#pragma once

#include <llmmem/arena/arena.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/handle_table.hpp>
#include <llmmem/detail/ordered_slots.hpp>
#include <llmmem/metadata.hpp>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The blocks of all segments of an arena. Each segment is in one of several pools, which do not mix. Works
/// on addresses; independent of memory.
///
/// @par Complexity   O(log n) in the free blocks, expected.
class split_blocks {
 public:
  static constexpr std::uint32_t none = no_index;

  struct block {
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
    std::uint64_t requested = 0;  // of a live block
    std::uint32_t before = none;  // the neighbour in its segment, by address
    std::uint32_t behind = none;
    std::uint32_t segment = 0;  // the owner's number for the segment
    std::uint32_t pool = 0;
    bool is_free = false;
  };

  /// @param has_addresses  whether `free_at` finds free blocks by their addresses: 24 bytes a block.
  split_blocks(std::uint64_t capacity, const metadata_source& source, const char* what,
               bool has_addresses = false)
      : blocks_(capacity, source, what),
        free_(capacity, source, what),
        addresses_(has_addresses ? capacity : 0, source, what),
        has_addresses_(has_addresses) {}

  /// Returns the smallest free block of `pool` that holds `bytes`, the lowest address among equals, or
  /// `none`.
  [[nodiscard]] std::uint32_t best(std::uint32_t pool, std::uint64_t bytes) const noexcept {
    const std::uint32_t found = free_.at_least({pool, bytes, 0});
    return found != none && free_.key(found).pool == pool ? found : none;
  }

  /// Returns the bytes of the largest free block of any pool.
  [[nodiscard]] std::uint64_t largest_free(std::uint32_t pools) const noexcept {
    std::uint64_t most = 0;
    for (std::uint32_t pool = 0; pool < pools; ++pool) {
      const std::uint32_t last = free_.below({pool + 1, 0, 0});
      if (last != none && free_.key(last).pool == pool && free_.key(last).bytes > most) {
        most = free_.key(last).bytes;
      }
    }
    return most;
  }

  /// Adds a segment as one free block. Returns `none` if the table is full.
  [[nodiscard]] std::uint32_t add_segment(std::byte* data, std::uint64_t bytes, std::uint32_t segment,
                                          std::uint32_t pool) noexcept {
    const std::uint32_t slot =
        blocks_.acquire({.data = data, .bytes = bytes, .segment = segment, .pool = pool, .is_free = true});
    if (slot != none) file(slot);
    return slot;
  }

  /// Removes a free block that is a whole segment. @pre `is_complete(slot)`.
  void remove_segment(std::uint32_t slot) noexcept {
    unfile(slot);
    blocks_.release(slot);
  }

  /// Makes the free block `slot` live with its first `bytes`. The rest becomes a free block if it is more
  /// than `least_rest`, otherwise it stays part of the block. The block gets a new handle. Returns false, and
  /// changes nothing, if the table has no space for the rest.
  [[nodiscard]] bool use(std::uint32_t slot, std::uint64_t bytes, std::uint64_t requested,
                         std::uint64_t least_rest) noexcept {
    const std::uint64_t rest = blocks_[slot].bytes - bytes;
    std::uint32_t split = none;
    if (rest != 0 && rest >= least_rest) {
      split = blocks_.acquire({});
      if (split == none) return false;
    }
    unfile(slot);
    block& used = blocks_[slot];
    if (split != none) {
      blocks_[split] = {.data = used.data + bytes,
                        .bytes = rest,
                        .before = slot,
                        .behind = used.behind,
                        .segment = used.segment,
                        .pool = used.pool,
                        .is_free = true};
      if (used.behind != none) blocks_[used.behind].before = split;
      used.behind = split;
      used.bytes = bytes;
      file(split);
    }
    used.is_free = false;
    used.requested = requested;
    blocks_.renew(slot);
    return true;
  }

  /// Makes the live block `slot` free, joined with its free neighbours; returns the joined block.
  std::uint32_t give_back(std::uint32_t slot) noexcept {
    blocks_.renew(slot);  // its handle is stale from here on
    blocks_[slot].is_free = true;
    blocks_[slot].requested = 0;
    const std::uint32_t behind = blocks_[slot].behind;
    if (behind != none && blocks_[behind].is_free) {
      unfile(behind);
      absorb(slot, behind);
    }
    const std::uint32_t before = blocks_[slot].before;
    if (before != none && blocks_[before].is_free) {
      unfile(before);
      absorb(before, slot);
      slot = before;
    }
    file(slot);
    return slot;
  }

  [[nodiscard]] bool is_complete(std::uint32_t slot) const noexcept {
    const block& b = blocks_[slot];
    return b.is_free && b.before == none && b.behind == none;
  }

  /// Returns the error of freeing `handle`; `errc::ok` if there is none.
  [[nodiscard]] failure check(const arena_handle& handle, const char* where) const noexcept {
    if (const failure wrong = blocks_.check(handle, where); wrong.code != errc::ok) return wrong;
    if (blocks_[handle.slot].is_free) {
      return {.code = errc::stale_handle, .index = handle.slot, .wanted = handle.generation, .where = where};
    }
    return {};
  }
  [[nodiscard]] arena_handle handle(std::uint32_t slot) const noexcept { return blocks_.handle(slot); }
  [[nodiscard]] const block& operator[](std::uint32_t slot) const noexcept { return blocks_[slot]; }
  [[nodiscard]] std::uint64_t left() const noexcept { return blocks_.left(); }
  [[nodiscard]] std::uint64_t live() const noexcept { return blocks_.live(); }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return blocks_.bytes() + free_.bytes() + addresses_.bytes();
  }

  /// Returns the last free block of all pools that begins at `address` or below, and the first above; `none`
  /// if there is none. O(log n) with addresses, O(free blocks) without.
  [[nodiscard]] std::uint32_t free_at(std::uint64_t address) const noexcept {
    if (has_addresses_) return addresses_.below(address + 1);
    std::uint32_t found = none;
    for (std::uint32_t slot = first_free(); slot != none; slot = next_free(slot)) {
      if (address_of(slot) > address) continue;
      if (found == none || address_of(found) < address_of(slot)) found = slot;
    }
    return found;
  }
  [[nodiscard]] std::uint32_t free_above(std::uint64_t address) const noexcept {
    if (has_addresses_) return addresses_.at_least(address + 1);
    std::uint32_t found = none;
    for (std::uint32_t slot = first_free(); slot != none; slot = next_free(slot)) {
      if (address_of(slot) <= address) continue;
      if (found == none || address_of(slot) < address_of(found)) found = slot;
    }
    return found;
  }
  [[nodiscard]] std::uint64_t address_of(std::uint32_t slot) const noexcept {
    return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(blocks_[slot].data));
  }

  /// Walks the free blocks: `first_free`, then `next_free` until `none`.
  [[nodiscard]] std::uint32_t first_free() const noexcept { return free_.first(); }
  [[nodiscard]] std::uint32_t next_free(std::uint32_t slot) const noexcept { return free_.next(slot); }

  /// Calls `visit(block)` for each block; adds broken invariants to `found`.
  template <class Visit>
  void audit(const char* name, std::vector<std::string>& found, Visit visit) const {
    for (std::uint32_t slot = 0; slot < blocks_.touched(); ++slot) {
      if (!blocks_.is_live(slot)) continue;
      const block& b = blocks_[slot];
      const auto say = [&](const char* what) {
        found.push_back(std::string(name) + ": block " + std::to_string(slot) + " " + what);
      };
      if (b.bytes == 0) say("is empty");
      if (!b.is_free && (b.requested == 0 || b.requested > b.bytes))
        say("has no request, or one of more bytes than it has");
      if (b.is_free != free_.contains(slot)) say("is free in one place and live in another");
      if (b.is_free && free_.contains(slot) && !(free_.key(slot) == key(slot)))
        say("is listed under a wrong key");
      if (has_addresses_ && (b.is_free != addresses_.contains(slot) ||
                             (b.is_free && addresses_.key(slot) != address_of(slot)))) {
        say("is listed under a wrong address");
      }
      if (b.behind != none) {
        const block& behind = blocks_[b.behind];
        if (!blocks_.is_live(b.behind) || behind.before != slot) say("is not linked from the block after it");
        if (behind.data != b.data + b.bytes) say("does not end where the block after it begins");
        if (b.is_free && behind.is_free) say("was not merged with the free block after it");
      }
      visit(b);
    }
  }

 private:
  struct order {
    std::uint32_t pool = 0;
    std::uint64_t bytes = 0;
    std::uint64_t address = 0;

    friend constexpr auto operator<=>(const order&, const order&) noexcept = default;
    // Written out, because nvcc declares a defaulted one without defining it.
    friend constexpr bool operator==(const order&, const order&) noexcept = default;
  };

  [[nodiscard]] order key(std::uint32_t slot) const noexcept {
    return {blocks_[slot].pool, blocks_[slot].bytes, address_of(slot)};
  }

  /// Adds a block to the free blocks, and removes it.
  void file(std::uint32_t slot) noexcept {
    free_.insert(slot, key(slot));
    if (has_addresses_) addresses_.insert(slot, address_of(slot));
  }
  void unfile(std::uint32_t slot) noexcept {
    free_.erase(slot);
    if (has_addresses_) addresses_.erase(slot);
  }

  /// Makes `gone`, which directly follows `into`, part of it.
  void absorb(std::uint32_t into, std::uint32_t gone) noexcept {
    blocks_[into].bytes += blocks_[gone].bytes;
    blocks_[into].behind = blocks_[gone].behind;
    if (blocks_[into].behind != none) blocks_[blocks_[into].behind].before = into;
    blocks_.release(gone);
  }

  handle_table<arena_handle, block> blocks_;
  ordered_slots<order> free_;
  ordered_slots<std::uint64_t> addresses_;  // of free blocks
  bool has_addresses_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
