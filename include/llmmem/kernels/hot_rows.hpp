/// @file
/// Rows of a pool elsewhere in a small buffer nearby: which of the wanted ones are there, where the others
/// go, and their copies.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Buffers of equally many rows, one for each sequence, over the rows of its tokens.
struct hot_rows_shape {
  std::uint32_t sequences = 0;
  std::uint32_t slots = 0;      ///< rows that are kept by their last use; one more is for the newest token
  std::uint32_t positions = 0;  ///< tokens that a sequence may have

  friend constexpr bool operator==(const hot_rows_shape&, const hot_rows_shape&) noexcept = default;
};

/// Words of the state of one sequence: each position's slot, each slot's position, the slots by last use, and
/// a mark for each slot.
[[nodiscard]] LLMMEM_HD constexpr std::uint64_t hot_rows_words(const hot_rows_shape& shape) noexcept {
  return std::uint64_t{shape.positions} + std::uint64_t{shape.slots} * 3;
}

/// A row to fetch: a position of a sequence, and the slot that has it from now on.
struct hot_miss {
  std::int32_t position = -1;
  std::int32_t slot = -1;

  friend constexpr bool operator==(const hot_miss&, const hot_miss&) noexcept = default;
};

/// Wanted rows of a step, and what comes of them. All in the executor's memory.
struct hot_rows_step {
  const std::int32_t* wanted =
      nullptr;  ///< [sequences][stride]: positions, as `select_top` gives them; -1: none
  const std::int32_t* newest =
      nullptr;                      ///< [sequences]: the token of the place of its own, or -1; null: none
  std::int32_t* slots = nullptr;    ///< [sequences][stride]: where each row is; -1 for none
  hot_miss* misses = nullptr;       ///< [sequences][stride]: those to fetch, in the order of `wanted`
  std::uint32_t* counts = nullptr;  ///< [sequences]: how many these are
  std::uint32_t wanted_count = 0;   ///< of each sequence: at most `slots`
  std::uint32_t stride = 0;
};

/// Empties the buffers of some sequences: at the beginning, and when a number gets another sequence.
/// @param state  [sequences][hot_rows_words(shape)], in the executor's memory.
/// @return `errc::out_of_range` for sequences that do not exist, and for states of more than 2^31 words;
///      `errc::too_short` for no slots, and for a shorter state. Otherwise the result of `run`.
template <class Run>
result<void> reset_hot_rows(const Run& run, const hot_rows_shape& shape, std::span<std::int32_t> state,
                            std::uint32_t first = 0, std::uint32_t count = ~std::uint32_t{0});

/// Finds the wanted rows in the buffers, and a slot for each that is not there: that of the row used longest
/// ago. Rows that are wanted in this step are never given up in it. The order of use is that of `wanted`:
/// first the rows that were there, then the others. A position that is named twice has one slot. A newest
/// token is in slot number `slots`, where the engine writes it, and is neither fetched nor counted.
///
/// **Truncation**: a position that is the newest again is forgotten, so that its later row is fetched. Rows
/// of the pool that change in another way, for example those of a chunk that replaces several positions at
/// once, need `reset_hot_rows`.
///
/// The state after each step is a function of the steps: the same on hosts and devices, in launches and
/// replayed graphs, and on all ranks with the same lists. Layers that share a list resolve once, and
/// `fetch_hot_rows` each.
///
/// @pre this version of the library reset the state, and no other call uses it
/// @return `errc::out_of_range` for more wanted rows than slots; `errc::too_short` for null pointers and for
///      a shorter state or stride; for other shapes as `reset_hot_rows`. Then nothing has begun. Otherwise
///      the result of `run`.
/// @par Complexity   O(wanted + slots) for each sequence, 32 at once: a warp has one.
/// @par Source   the idea of vllm#46326, a buffer of selected rows by last use over a pool on the host, whose
///      resolver has a block of threads for each sequence.
template <class Run>
result<void> resolve_hot_rows(const Run& run, const hot_rows_shape& shape, std::span<std::int32_t> state,
                              const hot_rows_step& step);

/// Rows of a pool of blocks, as tables name them: [blocks][block_tokens] rows.
struct row_pool {
  const std::byte* data = nullptr;
  std::uint64_t blocks = 0;
  std::uint64_t block_stride = 0;  ///< in bytes, as all distances
  std::uint64_t row_stride = 0;
};

/// Copies the missed rows of a step, all of a launch: from the pool to [sequences][slots + 1] rows, one after
/// the other. A position that the tables do not name in the pool makes a row of zeros.
///
/// @param tables     of the sequences, with `block_tokens` as the pool has them.
/// @param row_bytes  of a row: a multiple of 16, as are addresses and strides.
/// @return `errc::bad_granularity` for other lengths and addresses; `errc::too_short` for null pointers and
///      fewer bytes of `rows`. Otherwise the result of `run`.
/// @par Complexity   each missed row read and written once.
template <class Run, class Tables>
  requires bounded_table<Tables>
result<void> fetch_hot_rows(const Run& run, const hot_rows_shape& shape, const hot_rows_step& step,
                            const Tables& tables, const row_pool& pool, std::span<std::byte> rows,
                            std::uint64_t row_bytes);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/hot_rows_body.hpp>
