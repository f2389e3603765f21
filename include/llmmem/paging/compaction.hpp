/// @file
/// Plans a compaction: which blocks move where, at what cost and with what gain.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The role of a block in a compaction.
enum class block_use : std::uint8_t {
  free,    ///< a destination
  idle,    ///< cached but not in use: left in place
  owned,   ///< used once: may be moved wherever its sequence needs it
  shared,  ///< used more than once: may be moved, but several sequences constrain it
};

/// A move of all contents of `source` to `destination`.
struct block_move {
  block_id source = null_block;
  block_id destination = null_block;

  friend constexpr bool operator==(const block_move&, const block_move&) noexcept = default;
};

/// The purpose of a compaction.
struct compaction_goal {
  enum class kind : std::uint8_t {
    pack,        ///< empties the upper end, so that the pool can shrink or return its pages
    straighten,  ///< makes the blocks of each sequence adjacent, so that transfers of them merge
  };

  kind what = kind::pack;
  std::uint64_t end = 0;  ///< pack: the highest block to remain in use; 0: as low as possible
  std::uint64_t max_moves = ~std::uint64_t{0};  ///< the limit on the cost
};

/// The input of a plan: plain data, as returned by `paged_allocator::compaction_facts_now`.
struct compaction_facts {
  std::vector<block_use> blocks;              ///< by id, starting with the null block (which counts as idle)
  std::vector<std::vector<block_id>> tables;  ///< of all sequences
};

/// Moves, in any order: no block is both a source and a destination.
struct compaction_plan {
  std::vector<block_move> moves;
  std::uint64_t table_entries = 0;   ///< of block tables that change and must be uploaded again
  std::uint64_t highest_before = 0;  ///< highest block in use
  std::uint64_t highest_after = 0;
  std::uint64_t runs_before = 0;  ///< runs of ascending neighbours in all tables: the copies that a transfer
                                  ///< needs
  std::uint64_t runs_after = 0;

  /// The bytes that its copies read, and as many written.
  [[nodiscard]] std::uint64_t bytes(std::uint64_t block_bytes) const noexcept {
    return std::uint64_t{moves.size()} * block_bytes;
  }
};

/// A function that carries out moves: `bool copy(std::span<const block_move>) noexcept` returns true once the
/// contents are at their destinations, false to stop.
template <class Copy>
concept move_copier = std::is_nothrow_invocable_r_v<bool, Copy&, std::span<const block_move>>;

namespace detail {

[[nodiscard]] inline bool in_use(block_use use) noexcept {
  return use == block_use::owned || use == block_use::shared;
}

/// Fills in a plan's counts: what its moves change in these facts.
inline void weigh(const compaction_facts& facts, compaction_plan& plan) {
  std::vector<block_id> now(facts.blocks.size());
  for (std::size_t i = 0; i < now.size(); ++i)
    now[i] = block_id{static_cast<std::uint32_t>(i)};
  for (const block_move& move : plan.moves)
    now[to_index(move.source)] = move.destination;
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (!in_use(facts.blocks[i])) continue;
    plan.highest_before = i;
    if (to_index(now[i]) > plan.highest_after) plan.highest_after = to_index(now[i]);
  }
  for (const auto& table : facts.tables) {
    for (std::size_t i = 0; i < table.size(); ++i) {
      const block_id here = now[to_index(table[i])];
      plan.table_entries += here != table[i] ? 1U : 0U;
      plan.runs_before += i == 0 || to_index(table[i]) != to_index(table[i - 1]) + 1 ? 1U : 0U;
      plan.runs_after += i == 0 || to_index(here) != to_index(now[to_index(table[i - 1])]) + 1 ? 1U : 0U;
    }
  }
}

/// Moves the highest blocks in use into the lowest holes, until they meet.
inline void plan_packing(const compaction_facts& facts, const compaction_goal& goal, compaction_plan& plan) {
  std::size_t hole = 1;
  for (std::size_t block = facts.blocks.size() - 1; block > goal.end && block > 0; --block) {
    if (!in_use(facts.blocks[block])) continue;
    while (hole < block && facts.blocks[hole] != block_use::free)
      ++hole;
    // A hole above the line is no better than the block's present place.
    if (hole >= block || (goal.end != 0 && hole > goal.end) || plan.moves.size() >= goal.max_moves) return;
    plan.moves.push_back(
        {block_id{static_cast<std::uint32_t>(block)}, block_id{static_cast<std::uint32_t>(hole)}});
    ++hole;
  }
}

/// For each sequence, moves the blocks that it alone uses, from the end of its table, into the first run of
/// free blocks that holds them all; skips sequences for which that would join nothing.
inline void plan_straightening(const compaction_facts& facts, const compaction_goal& goal,
                               compaction_plan& plan) {
  std::vector<bool> taken(facts.blocks.size());
  for (std::size_t i = 0; i < taken.size(); ++i)
    taken[i] = facts.blocks[i] != block_use::free;
  for (const auto& table : facts.tables) {
    std::size_t first = table.size();
    std::size_t runs = 0;
    while (first > 0 && facts.blocks[to_index(table[first - 1])] == block_use::owned) {
      --first;
      runs += first + 1 == table.size() || to_index(table[first]) + 1 != to_index(table[first + 1]) ? 1U : 0U;
    }
    const std::size_t count = table.size() - first;
    if (runs < 2 || count > goal.max_moves - plan.moves.size()) continue;
    std::size_t length = 0;
    std::size_t end = 1;
    while (end < taken.size() && length < count)
      length = taken[end++] ? 0 : length + 1;
    if (length < count) continue;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t destination = end - count + i;
      taken[destination] = true;
      plan.moves.push_back({table[first + i], block_id{static_cast<std::uint32_t>(destination)}});
    }
  }
}

}  // namespace detail

/// Plans a compaction: a pure function that moves nothing.
///
/// Packing makes the fewest moves that bring blocks in use below a line: one for each block above it, as long
/// as there are free blocks below. Idle blocks do not count as free: if they fill the lower end, drop them
/// first (`drop_idle`). Straightening is greedy, in the order of the tables; it moves no block that two
/// sequences share.
///
/// @par Complexity   O(blocks + table entries) to pack, O(blocks x sequences) to straighten; allocates.
[[nodiscard]] inline compaction_plan plan_compaction(const compaction_facts& facts,
                                                     const compaction_goal& goal) {
  compaction_plan plan;
  if (goal.what == compaction_goal::kind::pack) {
    detail::plan_packing(facts, goal, plan);
  } else {
    detail::plan_straightening(facts, goal, plan);
  }
  detail::weigh(facts, plan);
  return plan;
}

}  // namespace v0
}  // namespace llmmem
