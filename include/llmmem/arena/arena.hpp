/// @file
/// The concept of an arena, `arena_policy`: allocations of any size from one budget, and statistics of the
/// waste.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// An allocation of an arena; a default-constructed handle is null.
struct arena_handle {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;
  std::uint32_t owner = 0;

  friend constexpr bool operator==(const arena_handle&, const arena_handle&) noexcept = default;
};

/// The result of an allocation.
struct arena_allocation {
  arena_handle handle{};
  std::byte* data = nullptr;  ///< contiguous, at a multiple of `arena_alignment`; valid until freed
  std::uint64_t bytes = 0;    ///< as requested
  std::uint64_t granted = 0;  ///< as rounded by the arena
};

/// Every allocation begins at a multiple of this, which CUDA's own allocator also uses for small allocations.
inline constexpr std::uint64_t arena_alignment = 512;

/// The most bytes of one allocation: 2^48.
inline constexpr std::uint64_t max_arena_bytes = std::uint64_t{1} << 48;

/// Counters of an arena.
struct arena_stats {
  std::uint64_t requested = 0;       ///< bytes of live allocations, as requested
  std::uint64_t granted = 0;         ///< bytes of live allocations, as rounded
  std::uint64_t reserved = 0;        ///< physical bytes that the arena holds
  std::uint64_t peak_requested = 0;  ///< the highest value of each so far
  std::uint64_t peak_granted = 0;
  std::uint64_t peak_reserved = 0;
  std::uint64_t live = 0;            ///< allocations
  std::uint64_t allocations = 0;     ///< successful since construction
  std::uint64_t refusals = 0;        ///< allocations refused
  std::uint64_t largest_free = 0;    ///< largest contiguous piece available without more physical memory
  std::uint64_t metadata_bytes = 0;  ///< bytes of bookkeeping, outside the budget

  /// Returns the bytes lost inside allocations, by rounding.
  [[nodiscard]] constexpr std::uint64_t internal_fragmentation() const noexcept {
    return granted - requested;
  }

  /// Returns the bytes that are held but not allocated.
  [[nodiscard]] constexpr std::uint64_t free() const noexcept { return reserved - granted; }

  /// Returns the share of the free bytes that no single allocation can get: 0 (none, or nothing is free) to
  /// 1.
  [[nodiscard]] constexpr double external_fragmentation() const noexcept {
    return free() == 0 ? 0.0 : 1.0 - static_cast<double>(largest_free) / static_cast<double>(free());
  }
};

/// Options of an arena.
struct arena_options {
  std::uint32_t max_blocks = 65536;    ///< pieces, live and free, for which its tables have space
  std::uint32_t max_segments = 16384;  ///< pieces of physical memory at once
  std::string name = "arena";          ///< for error texts
  metadata_source metadata{};          ///< the source of the tables' memory
};

/// Carves allocations of any size out of a virtual memory, whose budget is the arena's. Only the caller of an
/// allocation touches its bytes.
///
/// - `allocate(bytes)`: `errc::out_of_bytes` if the budget lacks the bytes in the form that this arena needs,
///   `errc::table_full` if its tables are full, `errc::zero_bytes`, `errc::past_the_bytes` past
///   `max_arena_bytes`, or the refusal of the memory below.
/// - `free(handle)`: refused for a handle that is stale, null or foreign.
/// - `trim()`: frees unused physical memory, as far as the form allows; returns the bytes.
/// - `audit()`: one sentence for each broken invariant.
///
/// A refused call leaves every allocation unchanged; a failed allocation may have freed cached memory.
/// Nothing allocates from the heap after construction. One thread at a time.
template <class A>
concept arena_policy = requires(A& arena, const A& read, std::uint64_t bytes, const arena_handle& handle) {
  { arena.allocate(bytes) } noexcept -> std::same_as<result<arena_allocation>>;
  { arena.free(handle) } noexcept -> std::same_as<result<void>>;
  { arena.trim() } noexcept -> std::same_as<std::uint64_t>;
  { read.stats() } noexcept -> std::same_as<arena_stats>;
  { read.audit() } -> std::same_as<std::vector<std::string>>;
};

}  // namespace v0
}  // namespace llmmem
