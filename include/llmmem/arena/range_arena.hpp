/// @file
/// `range_arena`: pieces of any size from one range of bytes.
#pragma once

#include <llmmem/arena/arena.hpp>
#include <llmmem/arena/detail/arena_ledger.hpp>
#include <llmmem/arena/detail/split_blocks.hpp>
#include <llmmem/arena/errors.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// How the arena finds the free pieces of a range.
enum class piece_lookup : std::uint8_t {
  by_size,
  by_address_too,  ///< for many calls of `allocate_at`, in O(log n); costs 24 bytes a piece
};

/// Best fit with splitting and joining in a range that belongs to another owner: a slab of a space, a file, a
/// device's memory. The arena touches no byte of the range, so the addresses need not be valid on the host.
///
/// Requests are rounded up to `granularity`; nothing else is lost. Pieces of one size do not fragment. With
/// several sizes, a request can fail while enough is free in parts; then the caller must free or move the
/// pieces in between.
///
/// @par Complexity      O(log n) in the free pieces; `allocate_at` as `piece_lookup` says.
/// @par Thread safety   one thread at a time.
/// @par Errors          see `arena_policy`; the constructor throws `argument_error` for a granularity that is
///      not a power of two or does not divide the range's start, `length_error` for a range shorter than the
///      granularity, `out_of_memory` without metadata.
class range_arena {
 public:
  /// @param data   start of the range.
  /// @param bytes  of the range; bytes after the last whole `granularity` are unused.
  range_arena(std::byte* data, std::uint64_t bytes, std::uint64_t granularity, arena_options options = {},
              piece_lookup lookup = piece_lookup::by_size)
      : ledger_(std::move(options.name)),
        granularity_(granularity),
        bytes_(checked(data, bytes, granularity, ledger_.name())),
        begin_(static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(data))),
        blocks_(options.max_blocks, options.metadata, "range_arena: blocks",
                lookup == piece_lookup::by_address_too) {
    static_cast<void>(blocks_.add_segment(data, bytes_, 0, 0));
    ledger_.reserved_more(bytes_);
  }
  range_arena(const range_arena&) = delete;
  range_arena& operator=(const range_arena&) = delete;

  /// For error texts.
  [[nodiscard]] const char* name() const noexcept { return ledger_.name(); }
  /// `errc::out_of_bytes`: found = the largest free piece.
  [[nodiscard]] result<arena_allocation> allocate(std::uint64_t bytes) noexcept {
    if (const failure wrong = ledger_.check_size(bytes); wrong.code != errc::ok) return ledger_.refuse(wrong);
    const std::uint64_t rounded = granted_for(bytes);
    const std::uint32_t slot = blocks_.best(0, rounded);
    if (slot == detail::split_blocks::none) {
      return ledger_.refuse(
          {.code = errc::out_of_bytes, .wanted = rounded, .found = blocks_.largest_free(1)});
    }
    if (!blocks_.use(slot, rounded, bytes, granularity_)) {
      return ledger_.refuse({.code = errc::table_full, .wanted = 1, .found = 0});
    }
    const auto& used = blocks_[slot];
    ledger_.given(bytes, used.bytes);
    return arena_allocation{blocks_.handle(slot), used.data, bytes, used.bytes};
  }

  /// Allocates the piece that begins at `data`, to restore an earlier layout of the range, or that of another
  /// allocator. O(log n) with `piece_lookup::by_address_too`, otherwise O(free pieces).
  /// `errc::bad_granularity` for an address at which no piece begins, `errc::past_the_bytes` if the range is
  /// too short, `errc::place_taken` if part of it is taken: wanted and found = begin and end of the first
  /// taken bytes in it, counted from the range's start.
  [[nodiscard]] result<arena_allocation> allocate_at(std::byte* data, std::uint64_t bytes) noexcept {
    if (const failure wrong = ledger_.check_size(bytes); wrong.code != errc::ok) return ledger_.refuse(wrong);
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    if (address % granularity_ != 0) {
      return ledger_.refuse({.code = errc::bad_granularity, .wanted = address, .found = granularity_});
    }
    const std::uint64_t rounded = granted_for(bytes);
    if (address < begin_ || address - begin_ > bytes_ || rounded > bytes_ - (address - begin_)) {
      const std::uint64_t end = address < begin_ ? max_arena_bytes : address - begin_ + rounded;
      return ledger_.refuse({.code = errc::past_the_bytes, .wanted = end, .found = bytes_});
    }
    std::uint32_t slot = blocks_.free_at(address);
    const std::uint64_t free_end =
        slot == detail::split_blocks::none ? begin_ : blocks_.address_of(slot) + blocks_[slot].bytes;
    if (free_end < address + rounded) return ledger_.refuse(taken(address, address + rounded, free_end));
    const std::uint64_t before = address - blocks_.address_of(slot);
    const failure full{.code = errc::table_full, .wanted = 1, .found = 0};
    if (before != 0) {
      if (!blocks_.use(slot, before, before, granularity_)) return ledger_.refuse(full);
      const std::uint32_t rest = blocks_[slot].behind;
      const bool fits = blocks_.use(rest, rounded, bytes, granularity_);
      blocks_.give_back(slot);
      if (!fits) return ledger_.refuse(full);
      slot = rest;
    } else if (!blocks_.use(slot, rounded, bytes, granularity_)) {
      return ledger_.refuse(full);
    }
    ledger_.given(bytes, blocks_[slot].bytes);
    return arena_allocation{blocks_.handle(slot), blocks_[slot].data, bytes, blocks_[slot].bytes};
  }

  [[nodiscard]] result<void> free(const arena_handle& handle) noexcept {
    const failure wrong = blocks_.check(handle, ledger_.name());
    if (wrong.code != errc::ok) return wrong;
    ledger_.taken_back(blocks_[handle.slot].requested, blocks_[handle.slot].bytes);
    blocks_.give_back(handle.slot);
    return {};
  }

  /// Frees nothing, because the range belongs to another owner. Returns 0.
  std::uint64_t trim() noexcept { return 0; }

  /// Returns the bytes that an allocation of `bytes` takes. @pre at most `max_arena_bytes`.
  [[nodiscard]] std::uint64_t granted_for(std::uint64_t bytes) const noexcept {
    return (bytes + granularity_ - 1) / granularity_ * granularity_;
  }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return bytes_; }

  [[nodiscard]] arena_stats stats() const noexcept {
    arena_stats now = ledger_.stats();
    now.largest_free = blocks_.largest_free(1);
    now.metadata_bytes = blocks_.bytes();
    return now;
  }

  [[nodiscard]] std::vector<std::string> audit() const {
    std::vector<std::string> found;
    std::uint64_t live = 0, requested = 0, granted = 0, all = 0;
    blocks_.audit(ledger_.name(), found, [&](const detail::split_blocks::block& b) {
      all += b.bytes;
      if (b.is_free) return;
      ++live;
      requested += b.requested;
      granted += b.bytes;
    });
    if (all != bytes_) {
      found.push_back(std::string(ledger_.name()) + ": its blocks have " + std::to_string(all) +
                      " bytes, the range " + std::to_string(bytes_));
    }
    ledger_.audit_sums(found, live, requested, granted, bytes_);
    return found;
  }

 private:
  /// Returns the first taken part of `[address, end)`, in which free bytes end at `free_end`.
  [[nodiscard]] failure taken(std::uint64_t address, std::uint64_t end,
                              std::uint64_t free_end) const noexcept {
    const std::uint64_t first = free_end > address ? free_end : address;
    const std::uint32_t above = blocks_.free_above(first);
    const std::uint64_t next = above == detail::split_blocks::none ? end : blocks_.address_of(above);
    return {.code = errc::place_taken, .wanted = first - begin_, .found = (next < end ? next : end) - begin_};
  }
  [[nodiscard]] static std::uint64_t checked(const std::byte* data, std::uint64_t bytes,
                                             std::uint64_t granularity, const char* name) {
    if (granularity == 0 || (granularity & (granularity - 1)) != 0 ||
        reinterpret_cast<std::uintptr_t>(data) % granularity != 0) {
      throw argument_error(std::string(name) + ": granularity " + std::to_string(granularity) +
                           "; it must be a power of two that divides the range's start");
    }
    if (bytes < granularity || bytes > max_arena_bytes) {
      throw length_error(std::string(name) + ": the range has " + std::to_string(bytes) +
                         " bytes; it must be " + std::to_string(granularity) + " to 2^48");
    }
    return bytes / granularity * granularity;
  }

  detail::arena_ledger ledger_;
  std::uint64_t granularity_;
  std::uint64_t bytes_;
  std::uint64_t begin_;  // the range's address
  detail::split_blocks blocks_;
};

static_assert(arena_policy<range_arena>);

}  // namespace v0
}  // namespace llmmem
