/// @file
/// `size_class_arena`: requests rounded to few sizes, with a free list for each.
#pragma once

#include <llmmem/arena/arena.hpp>
#include <llmmem/arena/detail/arena_ledger.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/handle_table.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/virtual_range.hpp>

#include <bit>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Rounded classes with free lists: eight sizes per doubling, so rounding adds less than an eighth above 4
/// KiB. Each class has its own slabs of at least 2 MiB for its blocks; a block of 2 MiB or more is a slab by
/// itself.
///
/// All requests are equally fast, and every block of a class fits every request of the class, so nothing
/// fragments while the mix of sizes stays the same. When the mix shifts, free blocks are in the wrong
/// classes: the arena then frees slabs without a live block, and tries again.
///
/// @par Complexity      O(1); a new slab takes three calls of the memory and O(its blocks).
/// @par Thread safety   one thread at a time.
/// @par Errors          see `arena_policy`; the constructor throws `out_of_memory` without metadata.
template <virtual_memory Memory>
class size_class_arena {
 public:
  static constexpr std::uint64_t slab_bytes = std::uint64_t{2} << 20;  ///< least bytes of a slab
  static constexpr std::uint32_t per_doubling = 8;                     ///< classes from one power of two to
                                                                       ///< the next

  /// @param memory  outlives the arena, which may share it.
  explicit size_class_arena(Memory& memory, arena_options options = {})
      : memory_(&memory),
        ledger_(std::move(options.name)),
        slabs_(options.max_segments, options.metadata, "size_class_arena: slabs"),
        blocks_(options.max_blocks, options.metadata, "size_class_arena: blocks"),
        first_free_(classes, detail::no_index, options.metadata, "size_class_arena: classes") {}

  size_class_arena(const size_class_arena&) = delete;
  size_class_arena& operator=(const size_class_arena&) = delete;

  /// Frees every slab, including live allocations.
  ~size_class_arena() {
    for (std::uint32_t slot = 0; slot < slabs_.touched(); ++slot) {
      if (slabs_.is_live(slot)) static_cast<void>(detail::give_segment(*memory_, slabs_[slot].segment));
    }
  }

  /// Returns the class for `bytes`, and the bytes of a class's block. @pre 1 to `max_arena_bytes`.
  [[nodiscard]] static constexpr std::uint32_t class_of(std::uint64_t bytes) noexcept {
    const std::uint64_t units = (bytes + arena_alignment - 1) / arena_alignment;
    if (units <= per_doubling) return static_cast<std::uint32_t>(units - 1);
    // units - 1 is in [2^n, 2^(n+1)); the three bits below its highest select one of the eight.
    const auto n = static_cast<std::uint32_t>(std::bit_width(units - 1)) - 1;
    const auto eighth = static_cast<std::uint32_t>((units - 1) >> (n - 3)) & 7U;
    return (n - 2) * per_doubling + eighth;
  }
  [[nodiscard]] static constexpr std::uint64_t class_bytes(std::uint32_t index) noexcept {
    if (index < per_doubling) return (index + std::uint64_t{1}) * arena_alignment;
    const std::uint32_t n = index / per_doubling + 2;
    return ((index % per_doubling + std::uint64_t{9}) << (n - 3)) * arena_alignment;
  }

  [[nodiscard]] result<arena_allocation> allocate(std::uint64_t bytes) noexcept {
    if (const failure wrong = ledger_.check_size(bytes); wrong.code != errc::ok) return ledger_.refuse(wrong);
    const std::uint32_t index = class_of(bytes);
    if (first_free_[index] == none) {
      if (const failure wrong = grow(index); wrong.code != errc::ok) return ledger_.refuse(wrong);
    }
    const std::uint32_t slot = first_free_[index];
    unlink(slot);
    block& b = blocks_[slot];
    b.requested = bytes;
    ++slabs_[b.slab].live;
    blocks_.renew(slot);
    const std::uint64_t granted = class_bytes(index);
    ledger_.given(bytes, granted);
    return arena_allocation{blocks_.handle(slot), b.data, bytes, granted};
  }

  [[nodiscard]] result<void> free(const arena_handle& handle) noexcept {
    failure wrong = blocks_.check(handle, ledger_.name());
    if (wrong.code == errc::ok && blocks_[handle.slot].requested == 0) wrong.code = errc::stale_handle;
    if (wrong.code != errc::ok) return wrong;
    block& b = blocks_[handle.slot];
    slab& from = slabs_[b.slab];
    ledger_.taken_back(b.requested, class_bytes(from.index));
    b.requested = 0;
    --from.live;
    blocks_.renew(handle.slot);
    link(handle.slot);
    return {};
  }

  /// Frees every slab without a live block; returns the bytes. O(slabs and their blocks).
  std::uint64_t trim() noexcept {
    std::uint64_t bytes = 0;
    for (std::uint32_t slot = 0; slot < slabs_.touched(); ++slot) {
      if (!slabs_.is_live(slot) || slabs_[slot].live != 0) continue;
      if (!detail::give_segment(*memory_, slabs_[slot].segment)) continue;
      bytes += slabs_[slot].segment.bytes;
      ledger_.reserved_less(slabs_[slot].segment.bytes);
      for (std::uint32_t at = slabs_[slot].first_block; at != none;) {
        const std::uint32_t following = blocks_[at].sibling;
        unlink(at);
        blocks_.release(at);
        at = following;
      }
      slabs_.release(slot);
    }
    return bytes;
  }

  [[nodiscard]] arena_stats stats() const noexcept {
    arena_stats now = ledger_.stats();
    for (std::uint32_t index = classes; index-- > 0;) {
      if (first_free_[index] == none) continue;
      now.largest_free = class_bytes(index);
      break;
    }
    now.metadata_bytes = slabs_.bytes() + blocks_.bytes() + first_free_.bytes();
    return now;
  }

  /// Returns the slabs held now.
  [[nodiscard]] std::uint64_t slabs() const noexcept { return slabs_.live(); }

  [[nodiscard]] std::vector<std::string> audit() const {
    std::vector<std::string> found;
    const auto say = [&](const std::string& what) {
      found.push_back(std::string(ledger_.name()) + ": " + what);
    };
    std::uint64_t live = 0, requested = 0, granted = 0, reserved = 0, free_blocks = 0, listed = 0;
    for (std::uint32_t slot = 0; slot < slabs_.touched(); ++slot) {
      if (!slabs_.is_live(slot)) continue;
      const slab& s = slabs_[slot];
      const std::string who = "slab " + std::to_string(slot);
      reserved += s.segment.bytes;
      std::uint32_t busy = 0;
      std::uint64_t offset = 0;
      for (std::uint32_t at = s.first_block; at != none; at = blocks_[at].sibling) {
        const block& b = blocks_[at];
        if (b.slab != slot || b.data != s.segment.range.data + offset) say(who + " has a block out of place");
        offset += class_bytes(s.index);
        free_blocks += b.requested == 0 ? 1U : 0U;
        if (b.requested == 0) continue;
        ++busy;
        requested += b.requested;
        granted += class_bytes(s.index);
        if (b.requested > class_bytes(s.index)) say(who + " has a request of more bytes than a block has");
      }
      if (offset > s.segment.bytes) say(who + " has blocks past its end");
      if (busy != s.live) say(who + " miscounts its live blocks");
      live += busy;
    }
    for (std::uint32_t index = 0; index < classes; ++index) {
      for (std::uint32_t at = first_free_[index]; at != none; at = blocks_[at].next) {
        ++listed;
        if (blocks_[at].requested != 0) say("block " + std::to_string(at) + " is live and on a free list");
        if (slabs_[blocks_[at].slab].index != index)
          say("block " + std::to_string(at) + " is on a wrong list");
      }
    }
    if (listed != free_blocks) {
      say(std::to_string(free_blocks) + " blocks are free, " + std::to_string(listed) + " on free lists");
    }
    ledger_.audit_sums(found, live, requested, granted, reserved);
    return found;
  }

 private:
  static constexpr std::uint32_t none = detail::no_index;
  static constexpr std::uint32_t classes = class_of(max_arena_bytes) + 1;

  struct block {
    std::byte* data = nullptr;
    std::uint64_t requested = 0;  // 0: free
    std::uint32_t slab = 0;
    std::uint32_t sibling = none;  // the next block of its slab
    std::uint32_t next = none;     // the next block of its free list
    std::uint32_t before = none;
  };
  struct slab {
    detail::arena_segment segment{};
    std::uint32_t index = 0;  // its class
    std::uint32_t live = 0;
    std::uint32_t first_block = none;
  };
  struct slab_handle {
    std::uint32_t slot = 0;
    std::uint32_t generation = 0;
    std::uint32_t owner = 0;
  };

  void link(std::uint32_t slot) noexcept {
    std::uint32_t& first = first_free_[slabs_[blocks_[slot].slab].index];
    blocks_[slot].before = none;
    blocks_[slot].next = first;
    if (first != none) blocks_[first].before = slot;
    first = slot;
  }

  void unlink(std::uint32_t slot) noexcept {
    const block& b = blocks_[slot];
    if (b.next != none) blocks_[b.next].before = b.before;
    if (b.before != none) {
      blocks_[b.before].next = b.next;
    } else {
      first_free_[slabs_[b.slab].index] = b.next;
    }
  }

  /// Adds a slab to a class, with its blocks on the free list, lowest address first.
  [[nodiscard]] failure grow(std::uint32_t index) noexcept {
    const std::uint64_t each = class_bytes(index);
    const std::uint64_t bytes = round_up_to(memory_->granularity(), each > slab_bytes ? each : slab_bytes);
    const std::uint64_t count = each >= slab_bytes ? 1 : bytes / each;
    const auto full = [&] { return slabs_.left() == 0 || blocks_.left() < count; };
    if (full()) {
      static_cast<void>(trim());
      if (full()) return {.code = errc::table_full, .wanted = count, .found = blocks_.left()};
    }
    result<detail::arena_segment> segment = detail::take_segment(*memory_, bytes);
    if (!segment && trim() != 0) segment = detail::take_segment(*memory_, bytes);
    if (!segment) return segment.error();
    ledger_.reserved_more(bytes);
    const std::uint32_t owner = slabs_.acquire({.segment = *segment, .index = index});
    for (std::uint64_t i = count; i-- > 0;) {
      const std::uint32_t slot = blocks_.acquire(
          {.data = segment->range.data + i * each, .slab = owner, .sibling = slabs_[owner].first_block});
      slabs_[owner].first_block = slot;
      link(slot);
    }
    return {};
  }

  Memory* memory_;
  detail::arena_ledger ledger_;
  detail::handle_table<slab_handle, slab> slabs_;
  detail::handle_table<arena_handle, block> blocks_;
  detail::fixed_array<std::uint32_t> first_free_;  // of each class
};

}  // namespace v0
}  // namespace llmmem
