/// @file
/// What a `hybrid_allocator` knows of one sequence, and of itself.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/layer_group.hpp>

#include <array>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// @tparam Place  of the prefix chain.
template <class Place, class Fence>
struct hybrid_record {
  std::uint64_t tokens = 0;
  std::uint64_t committed = 0;  // leading chunks that the chain knows
  Place at{};                   // behind them
  prefix_context context{};
  /// Leading entries of each table that are null, sinks apart.
  std::array<std::uint32_t, max_layer_groups> dead{};
  /// For states: one more than the number of the first block that a step left, whose state is none that a
  /// block ends with; 0: there is none.
  std::array<std::uint32_t, max_layer_groups> left{};
  std::uint64_t epoch = 0;  // the allocator's when the sequence began to hold tokens
  std::uint64_t sound =
      ~std::uint64_t{0};  // tokens from here on are not what their prefix has: none is cached
  std::uint64_t limit = ~std::uint64_t{0};  // tokens from here on are not written yet: none is cached
  std::uint64_t losses = 0;                 // contents given up so far, when it was last looked whether
  bool has_gap = false;                     // tokens were removed before those
  bool borrows = false;                     // equal contents of others stand for blocks of its own
  std::uint32_t copies = 0;                 // groups whose last block `count_batch` let go
  std::uint64_t batch = 0;                  // the last `append_batch` that named it
  Fence after{};                            // what is given back waits for it
};

/// What a growth takes of one group.
struct hybrid_need {
  std::uint64_t more = 0;  // new entries of the table
  bool copies = false;     // on write, into one block more
  bool carries = false;    // a state into the first new block
  bool skips = false;      // all new entries but the last: a state goes into that
  bool leaves = false;     // its present block with it, which holds a state inside that block

  [[nodiscard]] std::uint64_t blocks() const noexcept {
    return (skips && more > 1 ? 1 : more) + (copies ? 1 : 0);
  }
};

/// A count for each group.
using group_counts = std::array<std::uint64_t, max_layer_groups>;

/// What all of a batch takes together.
struct hybrid_batch_need {
  group_counts blocks{};
  std::uint64_t sources = 0;  // of copies, still read
  std::uint64_t readers = 0;  // sequences that they belong to
};

struct hybrid_counters {
  std::uint64_t tokens = 0;
  std::uint64_t matches = 0;
  std::uint64_t hit_tokens = 0;
  std::uint64_t registrations = 0;
  std::uint64_t duplicates = 0;
  std::uint64_t released_early = 0;
  std::uint64_t copies = 0;
  std::uint64_t invalidated = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
