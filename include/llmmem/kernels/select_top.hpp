/// @file
/// The highest scores of each row, exactly: the same choice everywhere.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/top_scores.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Returns the bytes that `select_top` needs: none for `top_order::by_number` if numbers are places; else 4
/// for each entry that is written. 2^64 - 1 if they exceed that.
[[nodiscard]] constexpr std::uint64_t select_top_workspace_bytes(const top_scores& of, std::uint32_t k,
                                                                 top_order order) noexcept {
  if ((order == top_order::by_number && of.numbers == nullptr) || k == 0) return 0;
  constexpr std::uint64_t all = ~std::uint64_t{0};
  const std::uint64_t a_row = std::uint64_t{k} * 4;
  return of.rows > all / a_row ? all : of.rows * a_row;
}

/// out[row][0 to k] = the numbers of the first `k` candidates in the order of scores, the highest first, and
/// among equals the lowest number first; if fewer count, -1 after them. So the choice depends on the scores
/// alone: hosts and devices, launches of any size and ranks with the same scores choose the same set in the
/// same order.
///
/// A score of -infinity, as masks have, and a NaN do not count; 0 and -0 are equal.
///
/// If candidates are distributed over ranks, each rank chooses its own `k`, passes on scores and numbers, and
/// chooses among all of these by `numbers`: that is the choice among all candidates.
///
/// @param run        `host_executor` or `device_executor`; all pointers are of its memory.
/// @param out        [rows][k], `out_stride` entries from one row to the next.
/// @param workspace  `select_top_workspace_bytes`, aligned to 4.
/// @return `errc::out_of_range` for more than 2^20 candidates; `errc::size_mismatch` for more candidates than
///      a stride, and for `k` of more than `out_stride`; `errc::too_short` for null pointers and the
///      workspace; `errc::bad_granularity` for a workspace that is not aligned. Then nothing has begun.
///      Otherwise the result of `run`.
/// @par Complexity   a row's scores are read 9 times, and another 8 times if only some of several equal
///      candidates are chosen. One launch, and with a workspace another one, of k^2 steps for a row.
/// @par Source   Alabi et al., "Fast k-selection algorithms for graphics processing units", 2012, for the
///      choice digit by digit.
template <class Run>
result<void> select_top(const Run& run, const top_scores& of, std::uint32_t k, std::int32_t* out,
                        std::uint64_t out_stride, top_order order = top_order::by_number,
                        std::span<std::byte> workspace = {});

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/select_top_body.hpp>
