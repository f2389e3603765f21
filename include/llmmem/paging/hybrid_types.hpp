/// @file
/// What goes into a `hybrid_allocator` and comes out of it: policies, options, results, statistics.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/eviction/lru.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/block_key.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/siphash.hpp>
#include <llmmem/paging/super_pages.hpp>
#include <llmmem/paging/verification.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace llmmem::inline v0 {

/// The policies of a `hybrid_allocator`. Inherit, and shadow what is to be different.
struct hybrid_traits {
  using eviction = lru_eviction;       ///< `eviction_policy`, one instance a group
  using hash = siphash_128;            ///< `block_hash`: keys of the prefix chain
  using verification = verify_tokens;  ///< `block_verification`: whether a hit is believed
};

/// How a `hybrid_allocator` is built.
struct hybrid_options {
  std::span<const layer_group> groups{};  ///< 1 to `max_layer_groups`
  std::uint64_t budget_bytes = 0;         ///< of all their blocks together, see `super_page_options`
  std::uint64_t page_bytes = std::uint64_t{2} << 20;
  std::uint32_t max_sequences = 256;            ///< alive at once, at least 1
  std::uint64_t max_sequence_tokens = 131'072;  ///< the longest a sequence may become
  /// Chunks of tokens that the prefix chain may know; 0: as many as the group with the most tokens a byte
  /// could cache if it had the budget alone.
  std::uint64_t max_chunks = 0;
  hash_seed seed{};
  std::string name = "hybrid_allocator";  ///< what error texts call it
  metadata_source metadata{};
};

/// A copy of part of a block of `group`, or for states of the whole block, see `block_copy`.
struct group_copy {
  std::size_t group = 0;
  block_copy copy{};

  friend constexpr bool operator==(const group_copy&, const group_copy&) noexcept = default;
};

/// Where the tokens of an `append` went.
struct hybrid_append {
  std::uint64_t first = 0;       ///< position of the first new token
  std::uint64_t new_blocks = 0;  ///< blocks allocated, of all groups
  /// To be carried out before the new tokens are written: copies on write, and states that go on in a new
  /// block. Valid until the next `append`.
  std::span<const group_copy> copies{};
};

/// A `hybrid_allocator` now, and since its construction.
struct hybrid_stats {
  std::uint64_t sequences = 0;
  std::uint64_t tokens = 0;          ///< of living sequences, shared ones counted for each
  std::uint64_t chunks = 0;          ///< known to the prefix chain
  std::uint64_t matches = 0;         ///< calls of `match`
  std::uint64_t hit_tokens = 0;      ///< that it found
  std::uint64_t registrations = 0;   ///< blocks made findable
  std::uint64_t duplicates = 0;      ///< blocks whose contents were cached already
  std::uint64_t released_early = 0;  ///< references given back because no token looks at the block any more
  std::uint64_t copies = 0;          ///< on write; states that go on in a new block not counted
  super_page_stats pages{};
  std::size_t metadata_bytes = 0;
  std::size_t verification_bytes = 0;
};

}  // namespace llmmem::inline v0
