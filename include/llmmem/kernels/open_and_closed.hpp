/// @file
/// Attention over closed blocks in codes and open blocks in floats, in one call.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/errors.hpp>
#include <llmmem/kernels/attention_parts.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/merge_attention.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The closed or the open blocks of sequences, as tables for attention, which reads no token of the others.
/// One type for both, so that kernels are compiled once where `Tables` and `Blocks` are the same. Trivially
/// copyable; pointers are of memory that `run` can access.
///
/// - Closed: the first `closed_blocks` blocks of each sequence, which `blocks` names from its entry 0 on.
/// - Open: those after them, which `blocks` names from its entry 0 on, too.
template <class Tables, class Blocks>
  requires bounded_table<Tables> && counted_tables<Tables> && bounded_table<Blocks>
struct open_or_closed_view {
  Tables tables{};                              ///< how many tokens a sequence has
  Blocks blocks{};                              ///< which blocks it has
  const std::int32_t* closed_blocks = nullptr;  ///< [num_sequences]
  std::int32_t num_sequences = 0;
  std::int32_t block_tokens = 0;
  bool is_open = false;

  [[nodiscard]] LLMMEM_HD std::int64_t tokens(std::int32_t sequence) const noexcept {
    return tables.tokens(sequence);
  }
  [[nodiscard]] LLMMEM_HD std::uint64_t closed_of(std::int32_t sequence) const noexcept {
    const std::int32_t closed = closed_blocks[sequence];
    return closed < 0 ? 0 : static_cast<std::uint64_t>(closed);
  }
  /// Blocks before the first entry of `blocks`.
  [[nodiscard]] LLMMEM_HD std::uint64_t before(std::int32_t sequence) const noexcept {
    return is_open ? closed_of(sequence) : 0;
  }
  [[nodiscard]] LLMMEM_HD std::uint64_t first_token(std::int32_t sequence) const noexcept {
    return before(sequence) * static_cast<std::uint64_t>(block_tokens);
  }
  [[nodiscard]] LLMMEM_HD std::uint64_t end_token(std::int32_t sequence) const noexcept {
    return is_open ? ~std::uint64_t{0} : closed_of(sequence) * static_cast<std::uint64_t>(block_tokens);
  }
  /// Returns the name of a required pointer that is null; null if none is.
  [[nodiscard]] const char* missing() const noexcept {
    if (num_sequences <= 0) return nullptr;
    return closed_blocks == nullptr ? "tables.closed_blocks" : detail::missing_table(blocks);
  }
};
template <class Tables, class Blocks>
[[nodiscard]] LLMMEM_HD inline std::uint64_t blocks_in(const open_or_closed_view<Tables, Blocks>& view,
                                                       std::int32_t i) noexcept {
  return view.before(i) + blocks_in(view.blocks, i);
}
template <class Tables, class Blocks>
[[nodiscard]] LLMMEM_HD inline std::int32_t block_in(const open_or_closed_view<Tables, Blocks>& view,
                                                     std::int32_t i, std::uint64_t index) noexcept {
  const std::uint64_t before = view.before(i);
  return index < before ? -1 : block_in(view.blocks, i, index - before);
}

/// Sequences whose first blocks are closed, in a cache in codes, and whose other blocks are open, in a pool.
///
/// - `tables` are those of the whole sequences, as an allocator writes them: a closed block's entry names a
///   block of the cache; the entries of open blocks are not read.
/// - `open` names the open blocks of each sequence, in the pool: usually one
///   (`padded_table_view{.block_table = open_of, .num_sequences = n, .max_blocks = 1, .block_tokens = b}`),
///   or more if several are written before they are closed.
/// - `closed_blocks` says how many of each sequence's first blocks are closed. A full block counts from the
///   `quantize_kv_blocks` that wrote it.
///
/// `closed()` and `opened()` are tables for any attention: `attend_near` takes a holder of each.
template <class Tables, class Open>
  requires bounded_table<Tables> && counted_tables<Tables> && bounded_table<Open>
struct open_and_closed_tables {
  Tables tables{};
  Open open{};
  const std::int32_t* closed_blocks = nullptr;  ///< [num_sequences], in the executor's memory

  [[nodiscard]] open_or_closed_view<Tables, Tables> closed() const noexcept {
    return {tables, tables, closed_blocks, tables.num_sequences, tables.block_tokens, false};
  }
  [[nodiscard]] open_or_closed_view<Tables, Open> opened() const noexcept {
    return {tables, open, closed_blocks, tables.num_sequences, tables.block_tokens, true};
  }
};
/// Deduces both kinds of tables.
template <class Tables, class Open>
open_and_closed_tables(Tables, Open, const std::int32_t*) -> open_and_closed_tables<Tables, Open>;

/// Returns the bytes that `attend_open_and_closed` needs as workspace: two parts, and the workspace of one
/// call of `paged_attention`; 2^64 - 1 if they exceed that.
[[nodiscard]] std::uint64_t open_and_closed_workspace_bytes(std::uint64_t rows, const kv_layout& layout,
                                                            const attention_options& options) noexcept;

/// `paged_attention` over sequences whose first blocks are closed and whose other blocks are open: a part of
/// each, and their merge. No closed block becomes floats in memory.
///
/// The result is within 1e-6 of the largest value from attention over the dequantised floats and the open
/// blocks in one cache (the bound of `paged_attention_part`); hosts and devices have the same bits, as there.
/// Rows with tokens in one of both alone have no other error than its own. A row of a sequence that does not
/// exist gives zeros.
///
/// @param tables  see `open_and_closed_tables`; all lengths, ranges and windows are those of the sequences.
/// @param closed  the cache in codes, or in any other form that attention takes.
/// @param open    the pool in bf16 or f32: the same shape, layers and `block_tokens`; it may have another
///      order.
/// @param workspace  `open_and_closed_workspace_bytes`, aligned to 16.
/// @param options    `scales` are of the closed blocks.
/// @return the errors of `paged_attention_part` and `merge_attention`; `errc::size_mismatch` for two shapes,
///      `errc::block_tokens_differ` for blocks of two sizes, and `errc::too_short` for the workspace. Then
///      nothing has begun, unless the error is of the open blocks: then `workspace` has been written.
/// @par Complexity   that of both attentions, and a merge: three launches, or five with more than one share.
template <class Run, class Tables, class Open>
result<void> attend_open_and_closed(const Run& run, const open_and_closed_tables<Tables, Open>& tables,
                                    const attention_rows& rows, const batch_vectors& queries,
                                    const batch_output& out, const kv_memory& closed, const kv_memory& open,
                                    std::uint32_t layer, std::span<std::byte> workspace,
                                    const attention_options& options);

namespace detail {

/// Bytes from one part to the next.
[[nodiscard]] inline std::uint64_t part_step(const attention_part_shape& shape) noexcept {
  const std::uint64_t bytes = attention_part_bytes(shape);
  return bytes > ~std::uint64_t{15} ? bytes : (bytes + 15) / 16 * 16;
}

/// Checks that a pool holds what a cache does.
[[nodiscard]] inline result<void> check_pool(const kv_layout& closed, const kv_layout& open) noexcept {
  const char* const who = "attend_open_and_closed: open.layout";
  if (open.block_tokens != closed.block_tokens)
    return failure{errc::block_tokens_differ, 0, open.block_tokens, closed.block_tokens, who};
  if (open.heads != closed.heads) return failure{errc::size_mismatch, 0, open.heads, closed.heads, who};
  if (open.layers != closed.layers) return failure{errc::size_mismatch, 0, open.layers, closed.layers, who};
  for (std::uint32_t p = 0; p < 2; ++p) {
    if (open.vector_elements(p) != closed.vector_elements(p))
      return failure{errc::size_mismatch, p, open.vector_elements(p), closed.vector_elements(p), who};
  }
  return {};
}

}  // namespace detail

inline std::uint64_t open_and_closed_workspace_bytes(std::uint64_t rows, const kv_layout& layout,
                                                     const attention_options& options) noexcept {
  constexpr std::uint64_t all = std::numeric_limits<std::uint64_t>::max();
  const std::uint64_t part =
      detail::part_step({rows, options.query_heads, static_cast<std::uint32_t>(layout.vector_elements(1))});
  const std::uint64_t own = attention_workspace_bytes(rows, layout, options);
  if (part > all / 4 || own > all / 4) return all;
  return 2 * part + own;
}

template <class Run, class Tables, class Open>
result<void> attend_open_and_closed(const Run& run, const open_and_closed_tables<Tables, Open>& tables,
                                    const attention_rows& rows, const batch_vectors& queries,
                                    const batch_output& out, const kv_memory& closed, const kv_memory& open,
                                    std::uint32_t layer, std::span<std::byte> workspace,
                                    const attention_options& options) {
  if (auto fits = detail::check_pool(closed.layout, open.layout); !fits) return fits;
  const std::uint64_t needed = open_and_closed_workspace_bytes(rows.rows, closed.layout, options);
  if (workspace.size() < needed)
    return failure{errc::too_short, 0, needed, workspace.size(), "attend_open_and_closed: workspace (bytes)"};
  if (rows.rows == 0) return {};
  if (rows.lengths == nullptr) {
    if (const char* const what = detail::missing_counted_table(tables.tables); what != nullptr)
      return failure{errc::too_short, 0, static_cast<std::uint64_t>(tables.tables.num_sequences), 0, what};
  }
  const attention_part_shape shape{rows.rows, options.query_heads,
                                   static_cast<std::uint32_t>(closed.layout.vector_elements(1))};
  const auto step = static_cast<std::size_t>(detail::part_step(shape));
  const auto first = attention_part_in(workspace.first(step), shape);
  if (!first) return first.error();
  const auto second = attention_part_in(workspace.subspan(step, step), shape);
  if (!second) return second.error();
  const std::span<std::byte> rest = workspace.subspan(2 * step);
  attention_options each = options;
  each.log_sum_exp = nullptr;  // of the merge
  if (auto done =
          paged_attention_part(run, tables.closed(), rows, queries, first.value(), closed, layer, rest, each);
      !done)
    return done;
  each.scales = {};
  if (auto done =
          paged_attention_part(run, tables.opened(), rows, queries, second.value(), open, layer, rest, each);
      !done)
    return done;
  merged_attention<> to;
  to.out = out;
  to.element = options.element;
  to.sequences = rows.sequences;
  if (options.log_sum_exp != nullptr)
    to.log_sum_exp = {options.log_sum_exp, options.query_heads * sizeof(float)};
  const std::array<attention_part, 2> parts{first.value(), second.value()};
  return merge_attention(run, shape, parts, to);
}

}  // namespace v0
}  // namespace llmmem
