/// @file
/// Inputs and outputs of a `hybrid_allocator`: policies, options, results, statistics.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/eviction/lru.hpp>
#include <llmmem/hash/aes_pmac.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/group_observer.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/paging/super_pages.hpp>
#include <llmmem/paging/verification.hpp>
#include <llmmem/space/fence.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The policies of a `hybrid_allocator`. Inherit from it and shadow the policies to change.
struct hybrid_traits {
  using eviction = lru_eviction;               ///< `eviction_policy`, one instance per group
  using hash = aes_pmac_128;                   ///< `block_hash`: keys of the prefix chain
  using verification = verify_tokens;          ///< `block_verification`: how a hit is verified
  using observer = ignore_group_cache_events;  ///< `group_cache_observer`: notified of what is cached and
                                               ///< evicted
  using fence = host_fence;  ///< `fence`, trivially copyable: what `read_until` and `..._after` wait for
};

/// The construction parameters of a `hybrid_allocator`.
struct hybrid_options {
  std::span<const layer_group> groups{};  ///< 1 to `max_layer_groups`
  std::uint64_t budget_bytes = 0;         ///< of all blocks of all groups together, see `super_page_options`
  std::uint64_t budget_capacity_bytes = 0;  ///< the most that `resize` may set; 0: `budget_bytes`
  std::uint64_t page_bytes = std::uint64_t{2} << 20;
  std::uint32_t max_sequences = 256;            ///< alive at once, at least 1
  std::uint64_t max_sequence_tokens = 131'072;  ///< the most tokens a sequence may have
  /// Chunks of tokens that the prefix chain may hold, at least those of the longest sequence; 0: as many as
  /// the group with the most tokens per byte could cache if it had all of the largest budget. If no group
  /// reads all tokens, sequences have more tokens than their blocks, so 0 adds the chunks of `max_sequences`
  /// sequences of the maximum length.
  std::uint64_t max_chunks = 0;
  /// References that may wait for fences, from at most 4 x `max_sequences` calls; unlimited: one per block
  /// id.
  std::uint64_t max_deferred = unlimited;
  hash_seed seed{};
  std::uint64_t epoch = 0;                ///< epoch of the initial weights, see `hybrid_allocator::reset`
  std::string name = "hybrid_allocator";  ///< the name in error texts
  metadata_source metadata{};
};

/// A copy of part of a block of `group` (for states, of the whole block), see `block_copy`.
struct group_copy {
  std::size_t group = 0;
  block_copy copy{};

  friend constexpr bool operator==(const group_copy&, const group_copy&) noexcept = default;
};

/// The growth of one sequence of a batch.
using hybrid_growth = paging::growth;

/// The result of `append`.
struct hybrid_append {
  std::uint64_t first = 0;       ///< position of the first new token
  std::uint64_t new_blocks = 0;  ///< blocks allocated in all groups
  /// Carry them out before the new tokens are written: copies on write, and states that continue in a new
  /// block. Valid until the next `append` or `append_batch`.
  std::span<const group_copy> copies{};
};

/// What a prompt would need of one group if it arrived now.
struct group_cost {
  std::uint64_t cached_blocks = 0;   ///< blocks that `match` would share
  std::uint64_t revived_blocks = 0;  ///< of those, blocks without users: they stop being evictable
  std::uint64_t new_blocks = 0;      ///< for the tokens after the hit, appended in one piece

  /// Blocks that must be available for it.
  [[nodiscard]] constexpr std::uint64_t needed() const noexcept { return revived_blocks + new_blocks; }
  friend constexpr bool operator==(const group_cost&, const group_cost&) noexcept = default;
};

/// What a prompt would need if it arrived now.
struct hybrid_cost {
  std::uint64_t cached_tokens = 0;                    ///< tokens that `match` would find
  std::array<group_cost, max_layer_groups> groups{};  ///< in the order of the groups

  friend constexpr bool operator==(const hybrid_cost&, const hybrid_cost&) noexcept = default;
};

namespace paging {

/// The lengths nearest to a requested one to which a sequence can be cut.
struct cut_points {
  std::uint64_t below = 0;  ///< the longest possible one up to it, at worst 0
  std::uint64_t above = 0;  ///< the shortest possible one from it on, at worst the present

  friend constexpr bool operator==(const cut_points&, const cut_points&) noexcept = default;
};

}  // namespace paging

using cut_points [[deprecated("its name is paging::cut_points")]] = paging::cut_points;

/// The state of a `hybrid_allocator` now, and its counts since construction.
struct hybrid_stats {
  std::uint64_t sequences = 0;
  std::uint64_t tokens = 0;          ///< of living sequences; a shared token counts once per sequence
  std::uint64_t chunks = 0;          ///< known to the prefix chain
  std::uint64_t matches = 0;         ///< calls of `match`
  std::uint64_t hit_tokens = 0;      ///< tokens that those calls found
  std::uint64_t registrations = 0;   ///< blocks that became cached
  std::uint64_t duplicates = 0;      ///< blocks whose contents were already cached
  std::uint64_t released_early = 0;  ///< references dropped because no later token reads the block
  std::uint64_t invalidated = 0;     ///< blocks that `invalidate` removed from the cache
  std::uint64_t deferred = 0;        ///< references waiting for a fence
  std::uint64_t copies = 0;          ///< copies on write; states that continue in a new block are not counted
  std::uint64_t deduplicated = 0;    ///< blocks released in favour of equal cached ones
  super_page_stats pages{};
  std::size_t metadata_bytes = 0;
  std::size_t verification_bytes = 0;
};

}  // namespace v0
}  // namespace llmmem
