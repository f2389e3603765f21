/// @file
/// Which tokens of a cache to keep, by scores of the engine: the first ones, the last ones, and the best of
/// the rest.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// How the scores of the query heads of one KV head become one score.
enum class score_join : std::uint8_t {
  sum,      ///< added in the order of heads, as floats: a NaN of one head is the token's
  largest,  ///< the largest of all heads; NaNs do not take part, unless all are
};

/// A score for each token and query head, in memory that `run` can access: accumulated weights (H2O), weights
/// of the last queries (SnapKV), of a reconstruction (KVzip), or any other. Higher is better.
struct token_scores {
  const float* scores = nullptr;  ///< [sequences][query_heads][stride]
  std::uint64_t sequences = 0;
  std::uint32_t query_heads = 1;
  std::uint32_t kv_heads = 1;  ///< divides `query_heads`; 1: one choice for all heads of a sequence
  std::uint32_t tokens = 0;    ///< of the longest sequence, up to 2^20; at most `stride`
  std::uint64_t stride = 0;    ///< floats from one head to the next
  const std::int32_t* lengths = nullptr;  ///< [sequences], tokens of each; null: `tokens`
  score_join join = score_join::sum;
};

/// How many tokens remain of a sequence. `sinks + recent` is at most `budget`.
struct token_budget {
  std::uint32_t budget = 0;
  std::uint32_t sinks = 0;   ///< the first tokens, which models attend to at any distance (StreamingLLM)
  std::uint32_t recent = 0;  ///< the last ones
};

/// out[sequence][KV head][0 to budget] = the positions to keep, ascending: the first `sinks`, the last
/// `recent`, and of the rest those with the highest scores, the lowest position first among equals; -1 after
/// them. A sequence of `budget` tokens or fewer keeps all. So each list has min(budget, length) tokens, and
/// depends on the scores alone: hosts and devices, and ranks with the same scores, choose the same.
///
/// Every token of a sequence counts: -infinity is below all numbers, and a NaN below -infinity. 0 and -0 are
/// equal. A length below 0 is 0, and one above `tokens` is `tokens`. A budget of 0 keeps nothing, and writes
/// nothing.
///
/// The lists are the positions that the engine keeps for its rotary embedding: `copy_kept_tokens` copies the
/// tokens into fresh blocks, and attention over these takes no positions. With one list for all heads
/// `token_lists` attends to them where they are.
///
/// @param run  `host_executor` or `device_executor`; all pointers are of its memory.
/// @param out  [sequences][kv_heads][budget], `out_stride` entries from one list to the next.
/// @return `errc::out_of_range` for more than 2^20 tokens, and for `sinks + recent` of more than `budget`;
///      `errc::bad_granularity` for query heads that are no multiple of `kv_heads`; `errc::size_mismatch` for
///      more tokens than `stride`, and a budget of more than `out_stride`; `errc::too_short` for null
///      pointers. Then nothing has begun. Otherwise the result of `run`.
/// @par Complexity   scores are read 17 times at most. One launch, without a workspace.
/// @par Thread safety   any number of calls at once on different outputs.
/// @par Source   Zhang et al., "H2O", 2023; Li et al., "SnapKV", 2024; Kim et al., "KVzip", 2025: they differ
///      in their scores. Xiao et al., "Efficient streaming language models with attention sinks", 2023.
template <class Run>
result<void> select_tokens(const Run& run, const token_scores& of, const token_budget& budget,
                           std::int32_t* out, std::uint64_t out_stride);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/select_tokens_body.hpp>
