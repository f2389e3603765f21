/// @file
/// `stitched_arena`: maps scattered free pieces next to each other, so that all free memory is usable.
#pragma once

#include <llmmem/arena/arena.hpp>
#include <llmmem/arena/detail/arena_ledger.hpp>
#include <llmmem/arena/detail/chunk_runs.hpp>
#include <llmmem/arena/detail/split_blocks.hpp>
#include <llmmem/arena/detail/stitched_ranges.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/handle_table.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/virtual_range.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Options of a stitched arena.
struct stitched_options {
  arena_options arena{};          ///< `max_segments` is unused
  std::uint64_t chunk_bytes = 0;  ///< of one physical piece, a multiple of the granularity; 0: 2 MiB, or the
                                  ///< granularity
  std::uint32_t max_stitched = 1024;          ///< stitched ranges, live and idle
  std::uint32_t max_parts = 16384;            ///< runs in all stitched ranges together
  std::uint32_t max_stitched_chunks = 65536;  ///< mappings in all stitched ranges together
};

/// Counts the ways in which a stitched arena made its allocations. The states are those of GMLake.
struct stitched_counts {
  std::uint64_t exact = 0;          ///< S1: a free run of exactly that length
  std::uint64_t reused = 0;         ///< S1: an idle stitched range of exactly that length
  std::uint64_t split = 0;          ///< S2: the first part of a longer free run
  std::uint64_t stitched = 0;       ///< S3: several free runs, mapped next to each other
  std::uint64_t grown = 0;          ///< S4: new physical chunks first, then one of the above, which is also
                                    ///< counted
  std::uint64_t refused = 0;        ///< S5: out of memory
  std::uint64_t little = 0;         ///< small requests, from a shared chunk
  std::uint64_t evicted = 0;        ///< idle stitched ranges taken apart to make space
  std::uint64_t ranges = 0;         ///< stitched ranges now, live and idle
  std::uint64_t idle = 0;           ///< of these, idle
  std::uint64_t mapped_chunks = 0;  ///< mappings in them now
};

/// Virtual memory stitching, after GMLake (Guo et al., ASPLOS 2024, arXiv 2401.08156).
///
/// Physical memory comes in chunks of one size. Each has a home: its place in one large reservation, at which
/// it is mapped while it exists. A request of more than half a chunk takes whole chunks, from the first of
/// these that is possible: a free run of exactly that length at home, or an idle stitched range of that
/// length (S1); the first part of the shortest longer run (S2); several runs, the longest first and a fitting
/// one last, mapped next to each other at new addresses (S3); the same after the creation of the missing
/// chunks (S4). The arena refuses only if chunks are missing and the budget has none (S5). A freed stitched
/// range stays mapped, idle, until its table entries are needed, so a loop over the same sizes maps nothing.
/// Smaller requests share chunks, split as in the small segments of `caching_split_arena`; a chunk that
/// becomes empty is free again.
///
/// Two things differ from the paper: splitting maps nothing (a part of a run is already at home), and free
/// neighbours at home become one run again.
///
/// **Resident size.** A chunk may be mapped at several addresses and is used at one of them at a time. If the
/// system counts memory at each address where it was touched (`set_aside` of the memory), the arena removes a
/// chunk from the tables of its former address when it allocates the chunk at another one. So tools show at
/// most the physical memory for the process.
///
/// The waste is the rounding to chunks, and the free parts of shared chunks. The cost is a mapping call per
/// chunk in S3 and S4; with CUDA these wait for nothing, but take microseconds each.
///
/// @par Complexity      S1, S2 and `free` O(log n + chunks); S3 and S4 in addition a mapping call per chunk.
/// @par Thread safety   one thread at a time. The last use of an allocation must end before `free`.
/// @par Errors          see `arena_policy`; the constructor throws `length_error`, `out_of_memory`, and the
///      memory's error if it cannot reserve addresses for the whole budget.
template <virtual_memory Memory>
class stitched_arena {
 public:
  /// @param memory  outlives the arena, which may share it. Its tables must hold a handle and a mapping for
  ///                each chunk of its budget, and `max_stitched_chunks` more mappings.
  explicit stitched_arena(Memory& memory, stitched_options options = {})
      : memory_(&memory),
        options_(std::move(options)),
        ledger_(options_.arena.name),
        chunk_(checked_chunk()),
        handles_(checked_chunks(), physical_handle{}, options_.arena.metadata, "stitched_arena: chunks"),
        next_fresh_(checked_chunks(), options_.arena.metadata, "stitched_arena: fresh chunks"),
        used_at_(counts_addresses ? checked_chunks() : 0, options_.arena.metadata,
                 "stitched_arena: addresses of chunks"),
        runs_(checked_chunks(), options_.arena.metadata, "stitched_arena: runs"),
        stitched_(options_.max_stitched, options_.max_parts, options_.arena.metadata,
                  "stitched_arena: stitched ranges"),
        small_(options_.arena.max_blocks, options_.arena.metadata, "stitched_arena: small blocks"),
        allocations_(options_.arena.max_blocks, options_.arena.metadata, "stitched_arena: allocations") {
    home_ = memory.try_reserve(checked_chunks() * chunk_).value();
  }

  stitched_arena(const stitched_arena&) = delete;
  stitched_arena& operator=(const stitched_arena&) = delete;

  /// Frees everything, including live allocations.
  ~stitched_arena();

  [[nodiscard]] result<arena_allocation> allocate(std::uint64_t bytes) noexcept;
  [[nodiscard]] result<void> free(const arena_handle& handle) noexcept;

  /// Takes idle stitched ranges apart and frees unused chunks; returns the bytes. O(chunks).
  std::uint64_t trim() noexcept;

  [[nodiscard]] arena_stats stats() const noexcept;
  [[nodiscard]] stitched_counts counts() const noexcept;
  [[nodiscard]] std::uint64_t chunk_bytes() const noexcept { return chunk_; }
  /// Returns the free runs at home; at most 1 if nothing is live.
  [[nodiscard]] std::uint64_t free_runs() const noexcept { return runs_.runs(); }
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  friend struct testing_access;  // tests damage an arena on purpose to check that audit() names the fault

  static constexpr std::uint32_t none = detail::no_index;
  class auditor;
  using run_of_chunks = detail::run_of_chunks;
  using condition = detail::stitched_ranges::condition;

  enum class kind : std::uint8_t { run, stitched, little };
  struct allocation {
    std::uint64_t requested = 0;
    std::uint64_t granted = 0;
    kind what = kind::run;
    std::uint32_t where = 0;  // first chunk, stitched range, or small block
  };
  struct place {
    kind what = kind::run;
    std::uint32_t where = 0;
  };

  [[nodiscard]] std::uint64_t checked_chunk() const;
  [[nodiscard]] std::uint64_t checked_chunks() const;

  [[nodiscard]] result<place> find(std::uint32_t chunks) noexcept;
  [[nodiscard]] result<place> find_free(std::uint32_t chunks) noexcept;
  [[nodiscard]] result<place> join(std::uint32_t chunks) noexcept;
  [[nodiscard]] result<place> find_small(std::uint64_t rounded, std::uint64_t bytes) noexcept;
  [[nodiscard]] result<void> create(std::uint32_t chunks) noexcept;
  void uncreate(const run_of_chunks& these) noexcept;
  void uncreate_fresh() noexcept;
  [[nodiscard]] bool gather(std::uint32_t slot, std::uint32_t chunks) noexcept;
  [[nodiscard]] result<void> map_parts(std::uint32_t slot) noexcept;
  [[nodiscard]] bool take_apart(std::uint32_t slot) noexcept;
  [[nodiscard]] bool evict() noexcept;
  void take_apart_broken() noexcept;

  static constexpr bool counts_addresses =
      requires(Memory& memory, std::byte* at, std::uint64_t bytes) { memory.set_aside(at, bytes); };
  void use(const run_of_chunks& run, std::byte* at) noexcept;
  void use_stitched(std::uint32_t slot) noexcept;

  [[nodiscard]] std::byte* address(std::uint32_t chunk) const noexcept { return home_.data + chunk * chunk_; }
  [[nodiscard]] std::span<const physical_handle> handles(const run_of_chunks& run) const noexcept {
    return {&handles_[run.first], run.count};
  }

  Memory* memory_;
  stitched_options options_;
  detail::arena_ledger ledger_;
  std::uint64_t chunk_;
  virtual_range home_{};
  detail::fixed_array<physical_handle> handles_;   // of each existing chunk
  detail::fixed_array<std::uint32_t> next_fresh_;  // of chunks of the last `create`: a list
  std::uint32_t first_fresh_ = none;
  detail::fixed_array<std::byte*> used_at_;  // of each chunk: the address of its last use; null: none
  detail::chunk_runs runs_;
  detail::stitched_ranges stitched_;
  detail::split_blocks small_;
  detail::handle_table<arena_handle, allocation> allocations_;
  std::uint64_t mapped_chunks_ = 0;  // in stitched ranges
  stitched_counts counts_;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/arena/detail/stitched_body.hpp>
