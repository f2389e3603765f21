/// @file
/// A paged_allocator's record of one sequence, in addition to its block table.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/paging/verification.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

namespace detail {

struct sequence_record {
  std::uint64_t tokens = 0;
  std::uint32_t blocks = 0;      // entries of its block table
  std::uint32_t generation = 0;  // of the slot; odd while a sequence lives in it
  std::uint32_t keyed = 0;       // leading full blocks whose tokens, and therefore keys, are known
  std::uint32_t committed = 0;   // leading blocks that are cached, here or as an equal block elsewhere
  bool tokens_known = true;      // whether all tokens after `keyed` blocks are in the tail
  /// The first token without a value, if `name_tokens` may give it.
  std::uint64_t unnamed = ~std::uint64_t{0};
  block_key chain{};            // key of block keyed - 1, or the root's
  std::uint32_t borrowed = 0;   // number of leading blocks up to the last one that is cached only elsewhere
  chain_link parent{};          // identity of the cached contents of block committed - 1, or the root's
  std::uint64_t cuts = 0;       // the allocator's count of contents dropped while in use, and
  std::uint64_t evictions = 0;  // its count of evictions, when `committed` was last right
  bool copies = false;          // the batch being counted makes it copy on write
  std::uint32_t refused_from = ~0U;  // the first block that the admission policy refused
  std::uint32_t asked = 0;           // number of leading blocks that the policy has seen
  std::uint64_t batch = 0;           // the last batch that named the sequence
  std::uint64_t epoch = 0;           // the allocator's epoch when the sequence began to hold tokens
  /// The first block that does not hold the contents of its prefix: invalid, or after removed tokens. No
  /// block from here on is cached.
  std::uint32_t sound = ~0U;
  std::uint64_t limit = ~std::uint64_t{0};  ///< tokens from here on are not written yet, so they are not
                                            ///< cached
  prefix_context context{};
  request_hints hints{};

  [[nodiscard]] bool alive() const noexcept { return (generation & 1U) != 0; }

  /// Records that the tokens from position `first` on have no values yet.
  void lose_tokens(std::uint64_t first) noexcept {
    if (tokens_known) unnamed = first;
    tokens_known = false;
  }

  /// Makes only the first `block` blocks count as cached; after 0, the next commit examines all blocks again.
  void recommit_from(std::uint32_t block) noexcept {
    committed = block;
    borrowed = borrowed < block ? borrowed : block;
    parent = {};
  }
};

/// The arguments of `retain` for a sequence, the latest last.
struct retained_ranges {
  struct entry {
    token_range range{};
    retention keep{};
  };

  void add(token_range range, retention keep) noexcept {
    if (count == entries.size()) {
      for (std::size_t i = 1; i < entries.size(); ++i)
        entries[i - 1] = entries[i];
      --count;
    }
    entries[count++] = {range, keep};
  }

  /// Records that tokens `gone` were removed from the middle: later tokens move to lower positions.
  void close_up(token_range gone) noexcept {
    const auto moved = [&](std::uint64_t position) noexcept {
      if (position <= gone.first || position == token_range{}.end) return position;
      return position < gone.end ? gone.first : position - (gone.end - gone.first);
    };
    for (std::uint32_t i = 0; i < count; ++i)
      entries[i].range = {moved(entries[i].range.first), moved(entries[i].range.end)};
  }

  std::array<entry, max_retained_ranges> entries{};
  std::uint32_t count = 0;
};

}  // namespace detail

/// Counts since construction, see `paged_stats`.
struct paged_counters {
  std::uint64_t tokens = 0;
  std::uint64_t table_blocks = 0;
  std::uint64_t matches = 0;
  std::uint64_t requested_blocks = 0;
  std::uint64_t hit_blocks = 0;
  std::uint64_t hit_tokens = 0;
  std::uint64_t partial_hits = 0;
  std::uint64_t stolen_blocks = 0;
  std::uint64_t registrations = 0;
  std::uint64_t duplicates = 0;
  std::uint64_t orphans = 0;
  std::uint64_t invalidated = 0;
  std::uint64_t unchained = 0;
  std::uint64_t replaced = 0;
  std::uint64_t deduplicated = 0;
  std::uint64_t refused = 0;
  std::uint64_t copies = 0;
};

}  // namespace v0
}  // namespace llmmem
