/// @file
/// Lists of tokens as tables: attention to selected tokens of each row, at any positions.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/kv_tokens.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The tokens that each row attends to, as numbers of tokens in its sequence: the result of a selection
/// (Quest, DeepSeek sparse attention, H2O). `paged_attention` takes these in the place of tables; their
/// sequences are rows:
///
///     const token_lists<padded_table_view> lists{.tables = tables, .listed = selected, .stride = k,
///                                                .num_sequences = rows, .block_tokens =
///                                                tables.block_tokens};
///     paged_attention(run, lists, {.rows = rows}, queries, out, cache, layer, workspace, options);
///
/// The output has the bits of attention to a sequence of these tokens alone, in the order of the list. A
/// negative number is padding, which comes after all others. A number without a block in the table is left
/// out and flagged; one that is named twice counts twice. Windows and parts of context-parallel ranks are
/// refused, because a place in a list is not a position. Ranges (`attention_rows::begins`) are of places in
/// the list.
///
/// Trivially copyable; pointers are of memory that `run` can access. O(1) for each token, each of which is
/// looked up by itself.
template <class Tables>
  requires bounded_table<Tables>
struct token_lists {
  Tables tables{};                       ///< the tables of the sequences
  const std::int32_t* of_row = nullptr;  ///< [rows], each row's sequence in `tables`; null: row i has i
  const std::int32_t* listed = nullptr;  ///< [rows][stride]
  const std::int32_t* counts = nullptr;  ///< [rows], how many entries of a row are read; null: all
  std::int32_t stride = 0;               ///< entries from one row's list to the next
  std::int32_t num_sequences = 0;        ///< rows
  std::int32_t block_tokens = 0;         ///< those of `tables`

  /// Returns the name of a required pointer that is null; null if none is.
  [[nodiscard]] const char* missing() const noexcept {
    if (num_sequences <= 0 || stride <= 0) return nullptr;
    return listed == nullptr ? "tables.listed" : detail::missing_table(tables);
  }
  [[nodiscard]] LLMMEM_HD std::int64_t tokens(std::int32_t row) const noexcept {
    if (counts == nullptr) return stride;
    const std::int32_t count = counts[row];
    return count < stride ? count : stride;
  }
  /// Returns the place of the token at a place of a row's list. @pre position < tokens(row)
  [[nodiscard]] LLMMEM_HD token_place place(const divider& by, std::uint64_t blocks, std::int32_t row,
                                            std::uint32_t position) const noexcept {
    if (position >= static_cast<std::uint32_t>(stride)) return {.what = token_place::kind::out_of_range};
    const std::int32_t token =
        listed[static_cast<std::uint64_t>(row) * static_cast<std::uint64_t>(stride) + position];
    if (token < 0) return {};
    const std::int32_t sequence = of_row != nullptr ? of_row[row] : row;
    return place_in(tables, by, blocks, sequence, token);
  }
};

/// At least the blocks that a row's list fills, without a division: a length beyond the list costs only
/// lookups without result.
template <class Tables>
[[nodiscard]] LLMMEM_HD inline std::uint64_t blocks_in(const token_lists<Tables>& lists,
                                                       std::int32_t /*row*/) noexcept {
  return lists.stride < 0 ? 0 : static_cast<std::uint64_t>(lists.stride);
}
/// None: tokens of a list are looked up one by one.
template <class Tables>
[[nodiscard]] LLMMEM_HD inline std::int32_t block_in(const token_lists<Tables>& /*lists*/,
                                                     std::int32_t /*row*/, std::uint64_t /*index*/) noexcept {
  return -1;
}

}  // namespace v0
}  // namespace llmmem
