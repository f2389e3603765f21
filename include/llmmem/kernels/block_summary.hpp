/// @file
/// Summaries of blocks' keys, and bounds of scores from them: which blocks of a sequence a query may skip.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/block_choice.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The least and the largest value of each channel of a block's keys in one layer:
/// [blocks][heads][2][head_dim] of bf16, the least first, contiguous, aligned to 16. They are of the stored
/// values, rounded outward (the least down, the largest up): a quantised key's scale applies to the query, as
/// in attention. A NaN makes its channel unbounded, so that its block is not skipped.
///
/// They take 2 / block_tokens of the bytes of bf16 keys, and each layer has its own.
[[nodiscard]] constexpr std::uint64_t key_summary_bytes(const kv_layout& layout, std::uint64_t blocks) {
  return checked_multiply(std::uint64_t{layout.heads} * layout.vector_elements(0) * 4, blocks,
                          "key_summary_bytes: bytes of a block x blocks");
}

/// After an append: updates the summaries of the blocks. Token by token or all at once, the bits are the
/// same. A block without new tokens is unchanged. One launch.
///
/// @param summaries     `key_summary_bytes(cache.layout, cache.blocks)`, aligned to 16.
/// @param out_of_range  set to 1 for a block outside the cache, which is skipped; not cleared. May be null.
/// @return `errc::no_conversion` for keys that are not f32, bf16, f16 or fp8; `errc::out_of_range` for a
///      layer outside the cache; `errc::bad_granularity` for keys whose number of elements is not a multiple
///      of 8 and for addresses and strides that are not a multiple of 16 bytes, or of 8 elements;
///      `errc::unsupported_layout` as `paged_attention`, and for rotated keys; `errc::too_short` for null
///      pointers and for the summaries. Otherwise the result of `run`.
/// @par Complexity   the new keys read once.
/// @par Source   Tang et al., "Quest: Query-aware sparsity for efficient long-context LLM inference", ICML
///      2024.
template <class Run>
result<void> summarize_keys(const Run& run, const changed_blocks& changed, const kv_memory& cache,
                            std::uint32_t layer, std::span<std::byte> summaries,
                            std::uint32_t* out_of_range = nullptr);

/// scores[row][b] = a bound of the products, times the softmax's scale, of the row's query heads with the
/// keys of the b-th block of its sequence: no such product exceeds it, regardless of a kernel's rounding.
/// -infinity for blocks after its length, before its window, or outside the cache (flagged). `select_top`
/// then chooses blocks, and `list_block_tokens` makes token lists of them. One launch.
///
/// @param rows     as `paged_attention`; ranges and `shared` are not read. Rows of padding are not touched.
/// @param scores   [rows][columns]: `columns` blocks of each sequence; later ones are not bounded.
/// @param options  `query_heads`, `element`, `scale`, `window`, `scales` and `out_of_range` are read.
/// @return the errors of `paged_attention` for queries and layouts, and `errc::too_short` for summaries and
///      scores that are null or too few.
/// @par Complexity   rows x columns x query_heads x head_dim; summaries read once for each row.
template <class Run, class Tables>
  requires bounded_table<Tables> && counted_tables<Tables>
result<void> bound_scores(const Run& run, const Tables& tables, const attention_rows& rows,
                          const batch_vectors& queries, const kv_memory& cache,
                          std::span<const std::byte> summaries, std::uint32_t columns, float* scores,
                          const attention_options& options);

/// listed[row][0 to k x block_tokens] = the tokens of the chosen blocks below the row's length, ascending,
/// then -1: for `token_lists`, which make attention read exactly these tokens of the sequence.
///
/// @return `errc::size_mismatch` for `block_tokens` of 0; `errc::out_of_range` for lists of more than 2^31 -
///      1 entries; `errc::too_short` for null pointers.
template <class Run>
result<void> list_block_tokens(const Run& run, const chosen_blocks& chosen, std::int32_t* listed);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/block_summary_body.hpp>
