/// @file
/// `caching_split_arena`: keeps and splits segments, as the caching allocators of training frameworks do.
#pragma once

#include <llmmem/arena/arena.hpp>
#include <llmmem/arena/detail/arena_ledger.hpp>
#include <llmmem/arena/detail/split_blocks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/handle_table.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/virtual_range.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Best fit with splitting and coalescing inside segments, and empty segments are kept: the rules and sizes
/// of PyTorch's CUDA caching allocator with its defaults, on one stream.
///
/// A request is rounded up to 512 bytes. Up to 1 MiB, it comes from segments of 2 MiB, whose rest is always
/// split off. Below 10 MiB, it comes from segments of 20 MiB; from 10 MiB on, from a segment of its own size
/// rounded up to 2 MiB. The rest of these is split off if it is more than 1 MiB. If there is no memory for a
/// new segment, the arena frees segments without a live block and tries again.
///
/// Free memory in one segment never helps another, so a request can fail while more than enough is free. If
/// sizes vary from step to step, `stitched_arena` needs less memory. This arena maps no memory twice, and is
/// the baseline for comparisons.
///
/// @par Complexity      O(log n) in the free blocks; a new segment takes three calls of the memory.
/// @par Thread safety   one thread at a time.
/// @par Errors          see `arena_policy`; the constructor throws `out_of_memory` without metadata.
template <virtual_memory Memory>
class caching_split_arena {
 public:
  static constexpr std::uint64_t mib = std::uint64_t{1} << 20;
  static constexpr std::uint64_t max_small = mib;            ///< largest request from small segments
  static constexpr std::uint64_t small_segment = 2 * mib;    ///< bytes of a small segment
  static constexpr std::uint64_t medium_below = 10 * mib;    ///< requests from here on get their own size
  static constexpr std::uint64_t medium_segment = 20 * mib;  ///< bytes of the segment for smaller requests
  static constexpr std::uint64_t large_step = 2 * mib;       ///< larger segments are multiples of this
  [[deprecated("its name is max_small")]] static constexpr std::uint64_t small_most = max_small;

  /// @param memory  outlives the arena, which may share it.
  explicit caching_split_arena(Memory& memory, arena_options options = {})
      : memory_(&memory),
        ledger_(std::move(options.name)),
        segments_(options.max_segments, options.metadata, "caching_split_arena: segments"),
        blocks_(options.max_blocks, options.metadata, "caching_split_arena: blocks") {}

  caching_split_arena(const caching_split_arena&) = delete;
  caching_split_arena& operator=(const caching_split_arena&) = delete;

  /// Frees every segment, including live allocations.
  ~caching_split_arena() {
    for (std::uint32_t slot = 0; slot < segments_.touched(); ++slot) {
      if (segments_.is_live(slot)) static_cast<void>(detail::give_segment(*memory_, segments_[slot]));
    }
  }

  [[nodiscard]] result<arena_allocation> allocate(std::uint64_t bytes) noexcept {
    if (const failure wrong = ledger_.check_size(bytes); wrong.code != errc::ok) return ledger_.refuse(wrong);
    const std::uint64_t rounded = round_up_to(arena_alignment, bytes);
    const pool from = rounded <= max_small ? pool::small_requests : pool::large_requests;
    std::uint32_t slot = blocks_.best(to_index(from), rounded);
    if (slot == none) {
      const result<std::uint32_t> added = grow(segment_bytes(rounded), from);
      if (!added) return ledger_.refuse(added.error());
      slot = *added;
    }
    const std::uint64_t least_rest = from == pool::small_requests ? arena_alignment : max_small + 1;
    if (!blocks_.use(slot, rounded, bytes, least_rest)) {
      return ledger_.refuse({.code = errc::table_full, .wanted = 1, .found = 0});
    }
    const auto& used = blocks_[slot];
    ledger_.given(bytes, used.bytes);
    return arena_allocation{blocks_.handle(slot), used.data, bytes, used.bytes};
  }

  [[nodiscard]] result<void> free(const arena_handle& handle) noexcept {
    const failure wrong = blocks_.check(handle, ledger_.name());
    if (wrong.code != errc::ok) return wrong;
    ledger_.taken_back(blocks_[handle.slot].requested, blocks_[handle.slot].bytes);
    blocks_.give_back(handle.slot);
    return {};
  }

  /// Frees every segment without a live block; returns the bytes.
  std::uint64_t trim() noexcept {
    std::uint64_t bytes = 0;
    for (std::uint32_t slot = blocks_.first_free(); slot != none;) {
      const std::uint32_t following = blocks_.next_free(slot);
      const std::uint32_t number = blocks_[slot].segment;
      if (blocks_.is_complete(slot) && detail::give_segment(*memory_, segments_[number])) {
        bytes += segments_[number].bytes;
        ledger_.reserved_less(segments_[number].bytes);
        segments_.release(number);
        blocks_.remove_segment(slot);
      }
      slot = following;
    }
    return bytes;
  }

  [[nodiscard]] arena_stats stats() const noexcept {
    arena_stats now = ledger_.stats();
    now.largest_free = blocks_.largest_free(pools);
    now.metadata_bytes = segments_.bytes() + blocks_.bytes();
    return now;
  }

  /// Returns the segments held now, and the blocks in them.
  [[nodiscard]] std::uint64_t segments() const noexcept { return segments_.live(); }
  [[nodiscard]] std::uint64_t blocks() const noexcept { return blocks_.live(); }

  [[nodiscard]] std::vector<std::string> audit() const {
    std::vector<std::string> found;
    std::uint64_t live = 0, requested = 0, granted = 0, reserved = 0;
    std::vector<std::uint64_t> of_segment(segments_.touched());
    blocks_.audit(ledger_.name(), found, [&](const detail::split_blocks::block& b) {
      of_segment[b.segment] += b.bytes;
      if (b.is_free) return;
      ++live;
      requested += b.requested;
      granted += b.bytes;
    });
    for (std::uint32_t slot = 0; slot < segments_.touched(); ++slot) {
      const std::uint64_t bytes = segments_.is_live(slot) ? segments_[slot].bytes : 0;
      reserved += bytes;
      if (bytes != of_segment[slot]) {
        found.push_back(std::string(ledger_.name()) + ": segment " + std::to_string(slot) + " has " +
                        std::to_string(bytes) + " bytes, its blocks " + std::to_string(of_segment[slot]));
      }
    }
    ledger_.audit_sums(found, live, requested, granted, reserved);
    return found;
  }

 private:
  static constexpr std::uint32_t none = detail::no_index;
  enum class pool : std::uint8_t { small_requests, large_requests };
  static constexpr std::uint32_t pools = 2;
  [[nodiscard]] static constexpr std::uint32_t to_index(pool which) noexcept {
    return static_cast<std::uint32_t>(which);
  }

  struct segment_handle {
    std::uint32_t slot = 0;
    std::uint32_t generation = 0;
    std::uint32_t owner = 0;
  };

  [[nodiscard]] std::uint64_t segment_bytes(std::uint64_t rounded) const noexcept {
    const std::uint64_t bytes = rounded <= max_small     ? small_segment
                                : rounded < medium_below ? medium_segment
                                                         : round_up_to(large_step, rounded);
    return round_up_to(memory_->granularity(), bytes);
  }

  /// Adds a segment as a free block; if the memory refuses, frees the empty segments and tries again.
  [[nodiscard]] result<std::uint32_t> grow(std::uint64_t bytes, pool to) noexcept {
    if (segments_.left() == 0 || blocks_.left() < 2) {  // one for the block, one for the rest that may be
                                                        // split off
      static_cast<void>(trim());
      if (segments_.left() == 0 || blocks_.left() < 2) {
        return failure{.code = errc::table_full, .wanted = 1, .found = 0};
      }
    }
    result<detail::arena_segment> segment = detail::take_segment(*memory_, bytes);
    if (!segment && trim() != 0) segment = detail::take_segment(*memory_, bytes);
    if (!segment) return segment.error();
    const std::uint32_t number = segments_.acquire(*segment);
    ledger_.reserved_more(bytes);
    return blocks_.add_segment(segment->range.data, bytes, number, to_index(to));
  }

  Memory* memory_;
  detail::arena_ledger ledger_;
  detail::handle_table<segment_handle, detail::arena_segment> segments_;
  detail::split_blocks blocks_;
};

}  // namespace v0
}  // namespace llmmem
