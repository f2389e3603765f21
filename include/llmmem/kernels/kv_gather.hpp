/// @file
/// Gathers keys and values from a paged cache into contiguous rows, in the requested form.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The tokens to gather, one sequence after the other. Pointers are of the executor's memory.
struct gather_rows {
  const std::int32_t* cu_seq_lens = nullptr;   ///< [sequences + 1]: each sequence's first row, from 0 on
  const std::int32_t* token_to_seq = nullptr;  ///< [rows], each row's sequence; null: searched
  const std::int32_t* seq_starts = nullptr;    ///< [sequences], the first token to gather of each; null: 0
  /// At least the number of tokens, so that the caller need not determine it: rows past the last sequence's
  /// are not touched.
  std::uint64_t rows = 0;
};

/// The places of the tokens, by block tables. A token that the tables or starts put outside the tables or the
/// cache is out of range, and its row is not touched.
template <class Tables>
  requires bounded_table<Tables>
class table_front {
 public:
  /// @param blocks  of the cache.
  table_front(const Tables& tables, const gather_rows& which, std::uint64_t blocks) noexcept
      : tables_(tables), which_(which), blocks_(blocks), by_(tables.block_tokens) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t tokens() const noexcept { return which_.rows; }
  [[nodiscard]] std::uint64_t blocks() const noexcept { return blocks_; }
  [[nodiscard]] std::uint32_t block_tokens() const noexcept { return by_.tokens(); }

  /// Returns the name of a required table that is null; null if none is.
  [[nodiscard]] const char* missing() const noexcept {
    if (which_.rows == 0 || tables_.num_sequences <= 0) return nullptr;
    return which_.cu_seq_lens == nullptr ? "table_front: cu_seq_lens" : detail::missing_table(tables_);
  }

  [[nodiscard]] LLMMEM_HD token_place at(std::uint64_t row) const noexcept {
    const std::int32_t sequences = tables_.num_sequences;
    if (sequences <= 0 || static_cast<std::int64_t>(row) >= which_.cu_seq_lens[sequences]) return {};
    const std::int32_t sequence = which_.token_to_seq != nullptr
                                      ? which_.token_to_seq[row]
                                      : sequence_at(which_.cu_seq_lens, sequences, row);
    if (sequence < 0 || sequence >= sequences) return {.what = token_place::kind::out_of_range};
    const std::int64_t start = which_.seq_starts != nullptr ? which_.seq_starts[sequence] : 0;
    const std::int64_t position = start + static_cast<std::int64_t>(row) - which_.cu_seq_lens[sequence];
    return place_in(tables_, by_.by(), blocks_, sequence, position);
  }

 private:
  Tables tables_;
  gather_rows which_;
  std::uint64_t blocks_;
  block_divider by_;
};
static_assert(token_front<table_front<csr_table_view>> && token_front<table_front<padded_table_view>>);

/// Gathers keys and values of one layer of a cache into rows (vLLM's `gather_and_maybe_dequant_cache` and
/// `cp_gather_cache`). Codes with scales come as their values, rotated keys turned back. Takes a `slot_front`
/// or `position_front` as well as a `table_front`.
///
/// @param run     `host_executor` or `device_executor`; all pointers are of its memory.
/// @param values  `data` null if the layout has no values.
/// @pre the outputs share no byte with each other, the cache or the front's tables
/// @return as `append_kv`; and `errc::too_short` for outputs whose vectors share bytes: a stride below a
///      vector, or the wider stride below the span of the narrower one over `rows` or heads.
/// @par Complexity   rows x heads x dimension, read and written once; the tables once for each row, and in
///      addition log2(sequences) without `token_to_seq`.
template <class Run, token_front Front>
result<void> gather_kv(const Run& run, const Front& front, const batch_output& keys,
                       const batch_output& values, const kv_memory& cache, std::uint32_t layer,
                       const token_options& options = {});

/// Gathers the latent vectors and rotary keys of MLA into separate outputs. Otherwise as `gather_kv`, with
/// the errors of `append_mla`.
template <class Run, token_front Front>
result<void> gather_mla(const Run& run, const Front& front, const batch_output& latent,
                        const batch_output& rotary, std::uint32_t latent_elements, const kv_memory& cache,
                        std::uint32_t layer, const token_options& options = {});

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/kv_gather_body.hpp>
