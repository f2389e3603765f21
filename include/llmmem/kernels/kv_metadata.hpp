/// @file
/// The input of kernels on paged caches, computed where they run: sequences and positions of a batch's
/// tokens, slots, and pages of planes. Nothing waits for the host.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The tokens of a batch, one sequence after the other. Pointers are of the executor's memory.
struct batch_tokens {
  const std::int32_t* indptr = nullptr;  ///< [sequences + 1]: each sequence's first token (`cu_seq_lens`)
  /// [sequences], tokens of each sequence including these, which are its last; null: these are all.
  const std::int32_t* seq_lens = nullptr;
  std::int32_t sequences = 0;
};

/// How the blocks of a table become pages of the planes of one pool, as attention kernels of TensorRT-LLM
/// read them: page = block x pages_per_block + plane x plane_offset.
struct page_expansion {
  const std::int32_t* block_table = nullptr;  ///< [rows][row_stride], in the executor's memory
  std::uint64_t rows = 0;
  std::uint32_t columns = 0;
  std::uint64_t row_stride = 0;       ///< entries, at least `columns`
  std::uint64_t blocks = 0;           ///< blocks of the cache
  std::uint32_t pages_per_block = 1;  ///< from a block's first to the next block's: planes x layers, if a
                                      ///< block contains these
  std::uint32_t plane_offset = 1;     ///< pages from keys to values
  std::uint32_t planes = 2;
};

namespace detail {

/// Writes a number by an instruction for global memory, not a generic store.
LLMMEM_HD inline void store_number(std::int32_t* to, std::int32_t value) noexcept {
  store_packet<4>(reinterpret_cast<std::byte*>(to), {{static_cast<std::uint32_t>(value)}});
}
LLMMEM_HD inline void store_number(std::int64_t* to, std::int64_t value) noexcept {
  const auto bits = static_cast<std::uint64_t>(value);
  store_packet<8>(reinterpret_cast<std::byte*>(to),
                  {{static_cast<std::uint32_t>(bits), static_cast<std::uint32_t>(bits >> 32U)}});
}

/// One item for each token: its sequence and, if requested, its position.
class batch_token_work {
 public:
  batch_token_work(const batch_tokens& of, std::span<std::int32_t> batch_indices, std::int32_t* positions,
                   std::uint32_t* out_of_range) noexcept
      : of_(of),
        batch_indices_(batch_indices.data()),
        positions_(positions),
        tokens_(batch_indices.size()),
        out_of_range_(out_of_range) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return tokens_; }
  LLMMEM_HD void run(std::uint64_t token) const noexcept {
    std::int32_t sequence = -1;
    std::int64_t position = -1;
    if (of_.sequences > 0) {
      const std::int32_t found = sequence_at(of_.indptr, of_.sequences, token);
      const std::int64_t first = of_.indptr[found];
      const std::int64_t end = of_.indptr[found + 1];
      const auto here = static_cast<std::int64_t>(token);
      if (first <= here && here < end) {
        sequence = found;
        if (positions_ != nullptr) position = position_of(here, first, end, found);
      }
    }
    store_number(batch_indices_ + token, sequence);
    if (positions_ != nullptr) store_number(positions_ + token, static_cast<std::int32_t>(position));
  }

 private:
  [[nodiscard]] LLMMEM_HD std::int64_t position_of(std::int64_t token, std::int64_t first, std::int64_t end,
                                                   std::int32_t sequence) const noexcept {
    const std::int64_t before = of_.seq_lens != nullptr ? of_.seq_lens[sequence] - (end - first) : 0;
    const std::int64_t position = before + (token - first);
    if (before >= 0) return position;
    if (out_of_range_ != nullptr) raise_flag(*out_of_range_);
    return -1;
  }

  batch_tokens of_;
  std::int32_t* batch_indices_;
  std::int32_t* positions_;
  std::uint64_t tokens_;
  std::uint32_t* out_of_range_;
};
static_assert(item_work<batch_token_work>);

/// One item for each token: its slot.
template <token_front Front>
class slot_work {
 public:
  slot_work(const Front& front, std::span<std::int64_t> slots, std::uint32_t* out_of_range) noexcept
      : front_(front),
        slots_(slots.data()),
        count_(slots.size()),
        block_tokens_(front.block_tokens()),
        out_of_range_(out_of_range) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return count_; }
  LLMMEM_HD void run(std::uint64_t token) const noexcept {
    std::int64_t slot = -1;
    if (token < front_.tokens()) {
      const token_place place = front_.at(token);
      if (place.what == token_place::kind::in_cache)
        slot = static_cast<std::int64_t>(place.block * block_tokens_ + place.token);
      if (place.what == token_place::kind::out_of_range && out_of_range_ != nullptr)
        raise_flag(*out_of_range_);
    }
    store_number(slots_ + token, slot);
  }

 private:
  Front front_;
  std::int64_t* slots_;
  std::uint64_t count_;
  std::uint32_t block_tokens_;
  std::uint32_t* out_of_range_;
};

/// One item for each entry of the table.
class page_work {
 public:
  page_work(const page_expansion& of, std::int32_t* pages, std::uint32_t* out_of_range) noexcept
      : of_(of), by_(of.columns), pages_(pages), out_of_range_(out_of_range) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return of_.rows * of_.columns; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t row = by_.quotient(item);
    const std::uint64_t column = item - row * of_.columns;
    const std::int32_t block = of_.block_table[row * of_.row_stride + column];
    std::int32_t* const to = pages_ + row * of_.planes * of_.columns + column;
    for (std::uint32_t plane = 0; plane < of_.planes; ++plane)
      store_number(to + std::uint64_t{plane} * of_.columns, block < 0 ? block : page_of(block, plane));
  }

 private:
  /// @pre block is not negative
  [[nodiscard]] LLMMEM_HD std::int32_t page_of(std::int32_t block, std::uint32_t plane) const noexcept {
    constexpr std::uint64_t most = 0x7FFF'FFFF;
    const auto number = static_cast<std::uint64_t>(block);
    // Below 2^63 and 2^64: no sum of these wraps.
    const std::uint64_t first = number * of_.pages_per_block;
    const std::uint64_t behind = std::uint64_t{plane} * of_.plane_offset;
    if (number < of_.blocks && first <= most && behind <= most - first)
      return static_cast<std::int32_t>(first + behind);
    if (out_of_range_ != nullptr) raise_flag(*out_of_range_);
    return -1;
  }

  page_expansion of_;
  divider by_;
  std::int32_t* pages_;
  std::uint32_t* out_of_range_;
};
static_assert(item_work<page_work>);

}  // namespace detail

/// Writes each token's sequence: the input of `gather_rows::token_to_seq` and of a `position_front`. Tokens
/// past the last sequence's are padding: -1. So a batch may be filled up to the size of a graph.
///
/// @param run            `host_executor` or `device_executor`; all pointers are of its memory.
/// @param batch_indices  [tokens], all written.
/// @return `errc::too_short` if there are sequences and no `indptr`. Then nothing has begun. Otherwise the
///         result of `run`.
/// @par Complexity   O(tokens x log(sequences)).
/// @par Thread safety   any number at once, on different results.
template <class Run>
result<void> token_sequences(const Run& run, const batch_tokens& of, std::span<std::int32_t> batch_indices) {
  if (of.sequences > 0 && of.indptr == nullptr)
    return failure{errc::too_short, 0, static_cast<std::uint64_t>(of.sequences) + 1, 0,
                   "batch_tokens: indptr"};
  return run.each(detail::batch_token_work(of, batch_indices, nullptr, nullptr));
}

/// Writes each token's sequence and its position there, as a `position_front` reads them (FlashInfer's
/// `get_batch_indices_positions`). Padding has -1 for both. A token before its sequence's beginning, because
/// `seq_lens` says less than `indptr`, has the position -1, which is out of range for a front, and raises the
/// flag. Otherwise as `token_sequences`.
///
/// @param out_of_range  set to 1 for such a sequence; not cleared. May be null.
/// @return in addition, `errc::size_mismatch` if `positions` and `batch_indices` differ in length.
template <class Run>
result<void> token_positions(const Run& run, const batch_tokens& of, std::span<std::int32_t> batch_indices,
                             std::span<std::int32_t> positions, std::uint32_t* out_of_range = nullptr) {
  if (of.sequences > 0 && of.indptr == nullptr)
    return failure{errc::too_short, 0, static_cast<std::uint64_t>(of.sequences) + 1, 0,
                   "batch_tokens: indptr"};
  if (batch_indices.size() != positions.size())
    return failure{errc::size_mismatch, 0, batch_indices.size(), positions.size(), "token_positions"};
  return run.each(detail::batch_token_work(of, batch_indices, positions.data(), out_of_range));
}

/// Writes a slot for each token that has a place by a front (vLLM's slot mapping): the input of a
/// `slot_front`, for all layers of a cache, so that tables are read once instead of in each layer. -1 for
/// padding, for tokens whose place is out of range, and for slots past the front's tokens.
///
/// @param run           `host_executor` or `device_executor`; all pointers are of its memory.
/// @param front         `position_front` or `table_front`, or another.
/// @param slots         at least the front's tokens; all written.
/// @param out_of_range  set to 1 if a token has no place; not cleared. May be null.
/// @return `errc::too_short` for fewer `slots` and for a null table; `errc::block_tokens_differ` for 0 or
///         fewer tokens per block. Then nothing has begun. Otherwise the result of `run`.
/// @par Complexity   O(slots), and the front's cost for each.
/// @par Thread safety   any number at once, on different results.
template <class Run, token_front Front>
result<void> slot_mapping(const Run& run, const Front& front, std::span<std::int64_t> slots,
                          std::uint32_t* out_of_range = nullptr) {
  if (slots.size() < front.tokens())
    return failure{errc::too_short, 0, front.tokens(), slots.size(), "slot_mapping: slots"};
  if (front.block_tokens() == 0)
    return failure{errc::block_tokens_differ, 0, 0, 1, "slot_mapping: block_tokens"};
  if constexpr (telling_front<Front>) {
    if (const char* const what = front.missing(); what != nullptr)
      return failure{errc::too_short, 0, front.tokens(), 0, what};
  }
  return run.each(detail::slot_work<Front>(front, slots, out_of_range));
}

/// Writes the pages of the planes of each block of a padded table: all keys' of a row, then all values'
/// (TensorRT-LLM's `copyBatchBlockOffsetsToDevice`). A negative block is none and stays negative; one outside
/// the cache, or whose page is above 2^31 - 1, becomes -1 and raises the flag.
///
/// @param run           `host_executor` or `device_executor`; all pointers are of its memory.
/// @param pages         [rows][planes][columns], at least; the rest is unchanged.
/// @param out_of_range  set to 1 for a block without pages; not cleared. May be null.
/// @return `errc::too_short` for fewer `pages`, a shorter `row_stride` than a row, or no table. Then nothing
///      has begun. Otherwise the result of `run`.
/// @par Complexity   O(rows x columns x planes).
/// @par Thread safety   any number at once, on different results.
template <class Run>
result<void> expand_pages(const Run& run, const page_expansion& of, std::span<std::int32_t> pages,
                          std::uint32_t* out_of_range = nullptr) {
  if (of.rows == 0 || of.columns == 0 || of.planes == 0) return {};
  const std::uint64_t entries = of.rows * of.columns;
  if (pages.size() / of.planes / of.columns < of.rows)
    return failure{errc::too_short, 0, entries * of.planes, pages.size(), "expand_pages: pages"};
  if (of.rows > 1 && of.row_stride < of.columns)
    return failure{errc::too_short, 0, of.columns, of.row_stride, "expand_pages: row_stride"};
  if (of.block_table == nullptr) return failure{errc::too_short, 0, entries, 0, "expand_pages: block_table"};
  return run.each(detail::page_work(of, pages.data(), out_of_range));
}

}  // namespace v0
}  // namespace llmmem
