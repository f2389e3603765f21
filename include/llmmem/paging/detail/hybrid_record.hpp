/// @file
/// The records of a `hybrid_allocator`: one per sequence, and its own counts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <array>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// @tparam Place  a position in the prefix chain.
template <class Place, class Fence>
struct hybrid_record {
  // A step of decode reads this line and the next, and no other.
  std::uint64_t tokens = 0;
  std::uint64_t full_at = 0;   // growth to at most this length begins no block of any group; 0: not known
  std::uint64_t frees_at = 0;  // at any smaller length no group has more dead blocks than `dead`
  std::uint64_t hold = ~std::uint64_t{0};   // blocks that tokens from here on read are kept
  std::uint64_t batch = 0;                  // the last `append_batch` that named this sequence
  std::uint32_t copies = 0;                 // groups whose last block `count_batch` released
  bool has_gap = false;                     // tokens were removed before position `sound`
  bool borrows = false;                     // equal blocks of other sequences are cached in place of its own
  std::uint64_t committed = 0;              // leading chunks in the chain
  std::uint64_t epoch = 0;                  // the allocator's epoch when the sequence began to hold tokens
  std::uint64_t sound = ~std::uint64_t{0};  // tokens from here on do not match their prefix, so they are not
                                            // cached
  std::uint64_t limit = ~std::uint64_t{0};  // tokens from here on are not written yet, so they are not cached
  std::uint64_t unnamed =
      ~std::uint64_t{0};     // tokens from here on have no values yet, so they are not cached
  std::uint64_t losses = 0;  // dropped contents at the last check for lost blocks
  Place at{};                // the position after the committed chunks
  prefix_context context{};
  request_hints hints{};
  /// Leading null entries of each table, except sinks.
  std::array<std::uint32_t, max_layer_groups> dead{};
  /// For states: one more than the number of the first block, and of the last, that steps left with a state
  /// from inside the block; 0: none.
  std::array<std::uint32_t, max_layer_groups> left{};
  std::array<std::uint32_t, max_layer_groups> left_last{};
  Fence after{};  // released blocks wait for this fence
};

/// Returns the smallest length at which `group` has at least `blocks` dead blocks, or the largest number if
/// it never has. @pre blocks is not 0
[[nodiscard]] constexpr std::uint64_t length_with_dead_blocks(const layer_group& group,
                                                              std::uint64_t blocks) noexcept {
  constexpr std::uint64_t never = ~std::uint64_t{0};
  const std::uint64_t skipped = blocks * group.block_tokens;
  switch (group.kind) {
    case layer_kind::sliding_window:
      return group.reach - 1 > never - skipped ? never : skipped + group.reach - 1;
    case layer_kind::chunked_local: {
      const std::uint64_t chunks = (skipped - 1) / group.reach + 1;
      return chunks > never / group.reach ? never : chunks * group.reach;
    }
    case layer_kind::state_snapshots:
      return skipped + 1;
    case layer_kind::full_attention:
      break;
  }
  return never;
}

/// The blocks that a growth takes from one group.
struct hybrid_need {
  std::uint64_t more = 0;  // new entries of the table
  bool copies = false;     // copies on write, into one more block
  bool carries = false;    // copies a state into the first new block
  bool skips = false;      // skips all new entries except the last, which receives the state
  bool leaves = false;     // leaves the present block with a state from inside the block

  [[nodiscard]] std::uint64_t blocks() const noexcept {
    return (skips && more > 1 ? 1 : more) + (copies ? 1 : 0);
  }
};

/// One count per group.
using group_counts = std::array<std::uint64_t, max_layer_groups>;

/// The blocks that a whole batch takes.
struct hybrid_batch_need {
  group_counts blocks{};
  std::uint64_t sources = 0;  // sources of copies that kernels still read
  std::uint64_t readers = 0;  // sequences to which these belong
};

struct hybrid_counters {
  std::uint64_t tokens = 0;
  std::uint64_t matches = 0;
  std::uint64_t hit_tokens = 0;
  std::uint64_t registrations = 0;
  std::uint64_t duplicates = 0;
  std::uint64_t released_early = 0;
  std::uint64_t copies = 0;
  std::uint64_t deduplicated = 0;
  std::uint64_t invalidated = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
