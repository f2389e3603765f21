/// @file
/// What an arena is: `arena_policy`, pieces of any size out of one budget, and what is known of its waste.
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

/// An allocation of an arena; a default-constructed one names none.
struct arena_handle {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;
  std::uint32_t owner = 0;

  friend constexpr bool operator==(const arena_handle&, const arena_handle&) noexcept = default;
};

/// What an arena gives out.
struct arena_allocation {
  arena_handle handle{};
  std::byte* data = nullptr;  ///< contiguous, a multiple of `arena_alignment`; valid until it is freed
  std::uint64_t bytes = 0;    ///< as asked
  std::uint64_t granted = 0;  ///< as rounded, what it takes of the arena
};

/// Every allocation begins at a multiple of this, what CUDA's own allocations keep to for small ones.
inline constexpr std::uint64_t arena_alignment = 512;

/// The most bytes of one allocation: 2^48.
inline constexpr std::uint64_t max_arena_bytes = std::uint64_t{1} << 48;

/// Counters of an arena.
struct arena_stats {
  std::uint64_t requested = 0;       ///< bytes of live allocations, as asked
  std::uint64_t granted = 0;         ///< bytes of live allocations, as rounded
  std::uint64_t reserved = 0;        ///< physical bytes it holds
  std::uint64_t peak_requested = 0;  ///< most of each at once
  std::uint64_t peak_granted = 0;
  std::uint64_t peak_reserved = 0;
  std::uint64_t live = 0;            ///< allocations
  std::uint64_t allocations = 0;     ///< given out since construction
  std::uint64_t refusals = 0;        ///< allocations refused
  std::uint64_t largest_free = 0;    ///< largest contiguous piece it could give without more physical memory
  std::uint64_t metadata_bytes = 0;  ///< bytes of bookkeeping, outside the budget

  /// Bytes lost inside allocations, by rounding.
  [[nodiscard]] constexpr std::uint64_t internal_fragmentation() const noexcept {
    return granted - requested;
  }

  /// Bytes held and not given out.
  [[nodiscard]] constexpr std::uint64_t free() const noexcept { return reserved - granted; }

  /// The part of the free bytes that no single allocation can have: 0 (none, or nothing is free) to 1.
  [[nodiscard]] constexpr double external_fragmentation() const noexcept {
    return free() == 0 ? 0.0 : 1.0 - static_cast<double>(largest_free) / static_cast<double>(free());
  }
};

/// How an arena is set up.
struct arena_options {
  std::uint32_t max_blocks = 65536;    ///< pieces, live and free, that it can keep account of
  std::uint32_t max_segments = 16384;  ///< pieces of physical memory at once
  std::string name = "arena";          ///< for error texts
  metadata_source metadata{};          ///< where the tables come from
};

/// Carves allocations of any size out of a virtual memory, whose budget is the arena's: the bytes are touched
/// by nobody but who asked for them.
///
/// - `allocate(bytes)`: `errc::out_of_bytes` when the budget has not got them in the form this arena needs,
///   `errc::table_full` when its tables are full, `errc::zero_bytes`, `errc::past_the_bytes` past
///   `max_arena_bytes`, or what the memory beneath refuses.
/// - `free(handle)`: refused for a handle that is stale, null or foreign.
/// - `trim()`: gives physical memory that nobody uses back, as far as the form allows; the bytes.
/// - `audit()`: one sentence for each broken invariant.
///
/// A refused call leaves every allocation as it was; an allocation that fails may have given cached memory
/// back on the way. Nothing allocates from the heap after construction. One thread at a time.
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
