/// @file
/// `stitched_source`: pages for a host space that never fragments.
#pragma once

#include <llmmem/arena/stitched.hpp>
#include <llmmem/config.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/space/host_virtual.hpp>
#include <llmmem/space/live_ranges.hpp>
#include <llmmem/space/pages.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Options of a stitched source.
struct stitched_source_options {
  std::uint64_t budget = 0;  ///< physical bytes; 0 is refused
  std::uint64_t chunk_bytes = std::uint64_t{64}
                              << 10;       ///< of one physical piece; requests are rounded up to it
  std::uint32_t max_ranges = 4096;         ///< live at once
  std::uint32_t max_mappings = 48 * 1024;  ///< the system's limit is usually 65,530 (vm.max_map_count)
  std::string name = "stitched_source";
};

/// Provides ranges of any size while their sum fits: it maps scattered free pieces next to each other
/// (`stitched_arena`). For a tier of large chunks of unequal size, for which best fit in one range would
/// refuse a chunk although enough is free in parts.
///
///     stitched_host_space top(stitched_source({.budget = bytes}), {.budget = bytes});
///
/// New orders of sizes cost mapping calls; freed ranges keep their mappings, so a loop over the same sizes
/// maps nothing after its first round.
///
/// @par Complexity      O(chunks of the range) if the range must be mapped, otherwise O(log n).
/// @par Thread safety   one thread at a time; `basic_host_space` ensures it.
/// @par Errors          the constructor throws what those of `host_virtual_memory` and `stitched_arena`
///                      throw.
class stitched_source {
 public:
  /// Ranges whose footprints fit the budget are always available.
  static constexpr bool never_fragments = true;

  explicit stitched_source(const stitched_source_options& options)
      : state_(new state(options)), chunk_(options.chunk_bytes) {}
  stitched_source(stitched_source&& other) noexcept
      : state_(std::exchange(other.state_, nullptr)), chunk_(other.chunk_) {}
  stitched_source& operator=(stitched_source&& other) noexcept {
    std::swap(state_, other.state_);
    std::swap(chunk_, other.chunk_);
    return *this;
  }
  ~stitched_source() { delete state_; }

  [[nodiscard]] std::uint64_t footprint(std::uint64_t bytes, std::uint64_t) const noexcept {
    return bytes > max_bytes - chunk_ ? max_bytes : (bytes + chunk_ - 1) / chunk_ * chunk_;
  }

  /// @return null also for an alignment above `chunk_bytes`.
  [[nodiscard]] std::byte* take(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    if (alignment > chunk_ || !state_->live.reserve_one()) return nullptr;
    const result<arena_allocation> had = state_->arena.allocate(footprint(bytes, alignment));
    if (!had) return nullptr;
    state_->live.insert(had->data, had->granted, had->handle);
    return had->data;
  }

  void give_back(std::byte* data, std::uint64_t, std::uint64_t) noexcept {
    static_cast<void>(state_->arena.free(state_->live.remove(data).payload));
  }

  /// Returns the counts of the ways in which it made its ranges.
  [[nodiscard]] stitched_counts counts() const noexcept { return state_->arena.counts(); }
  [[nodiscard]] arena_stats stats() const noexcept { return state_->arena.stats(); }

 private:
  struct state {
    explicit state(const stitched_source_options& options)
        : memory({.budget =
                      (options.budget + options.chunk_bytes - 1) / options.chunk_bytes * options.chunk_bytes,
                  .max_mappings = 2 * options.max_mappings,
                  .name = options.name}),
          arena(memory, {.arena = {.max_blocks = options.max_ranges, .name = options.name},
                         .chunk_bytes = options.chunk_bytes,
                         .max_stitched = options.max_ranges,
                         .max_stitched_chunks = options.max_mappings}) {}

    host_virtual_memory memory;
    stitched_arena<host_virtual_memory> arena;
    live_ranges<arena_handle> live;
  };

  state* state_;  // owned; not a unique_ptr, because its header is the largest of the standard library
  std::uint64_t chunk_;
};

static_assert(byte_source<stitched_source>);

/// Host memory that never fragments.
using stitched_host_space = basic_host_space<stitched_source>;

}  // namespace v0
}  // namespace llmmem
