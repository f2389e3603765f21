/// @file
/// Moves of blocks inside one memory where destinations may be sources of other moves: compaction,
/// permutation.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Copies in an order that makes them moves: consecutive waves; no wave both reads and writes a block.
struct block_move_plan {
  std::vector<block_pair> pairs{};
  std::vector<std::uint64_t> wave_ends{};  ///< the end of each wave, in `pairs`

  [[nodiscard]] std::uint64_t waves() const noexcept { return wave_ends.size(); }
  /// Returns wave `i` of `there`: the pairs, or their copy that kernels read.
  [[nodiscard]] std::span<const block_pair> wave(std::span<const block_pair> there,
                                                 std::uint64_t i) const noexcept {
    const std::uint64_t first = i == 0 ? 0 : wave_ends[i - 1];
    return there.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(wave_ends[i] - first));
  }
};

/// Plans moves as if all happened at once: the contents of block `from` are in block `to` afterwards, even if
/// another move overwrites `from`. One block may go to several destinations. Moves with a negative number are
/// padding, and a block that moves to itself stays.
///
/// The first wave contains the moves to blocks that no other move reads, and so on: as many waves as the
/// longest chain. A scratch block opens each cycle. If all moves left after the first wave fit into the
/// scratch blocks, they go there in one wave and to their destinations in the next: three in all.
///
/// @param blocks   of the memory.
/// @param scratch  empty blocks that no move names; their contents are lost. One is enough for any moves,
///      more make fewer waves. None is needed without cycles.
/// @throws argument_error  for a number that names no block, two moves to one block, a scratch block that is
/// named elsewhere, and cycles without scratch.
/// @par Complexity      O(blocks + moves) in time and memory.
/// @par Thread safety   any number at once.
/// @par Source   Kahn, "Topological sorting of large networks", CACM 1962, wave by wave.
[[nodiscard]] inline block_move_plan plan_block_moves(std::span<const block_pair> moves, std::uint64_t blocks,
                                                      std::span<const std::int64_t> scratch = {});

/// Executes a plan in one memory, for all layers or some.
///
/// @param run    `host_executor` or `device_executor`, whose launches run in order.
/// @param there  the plan's pairs in the executor's memory: uploaded once, for all waves.
/// @return `errc::size_mismatch` if the number of pairs differs; else as `copy_kv_blocks`.
/// @par Complexity   a launch for each wave; each moved block read and written once, or twice through
///      scratch.
template <class Run>
result<void> move_kv_blocks(const Run& run, const kv_memory& memory, const block_move_plan& plan,
                            std::span<const block_pair> there, const block_copy_options& options = {}) {
  if (there.size() != plan.pairs.size())
    return failure{errc::size_mismatch, 0, plan.pairs.size(), there.size(), "move_kv_blocks: pairs"};
  for (std::uint64_t i = 0; i < plan.waves(); ++i) {
    if (auto done = copy_kv_blocks(run, memory, memory, plan.wave(there, i), options); !done) return done;
  }
  return {};
}

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/block_moves_body.hpp>
