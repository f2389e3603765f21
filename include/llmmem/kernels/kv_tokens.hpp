/// @file
/// Tokens of a batch and their places in a paged cache: the common part of appending and gathering.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// The place of a token.
struct token_place {
  enum class kind : std::uint8_t {
    in_cache,
    padding,       ///< no place, as intended: the batch was filled up
    out_of_range,  ///< no place, because the tables name none in the cache
    there [[deprecated("its name is in_cache")]] = in_cache
  };
  kind what = kind::padding;
  std::uint64_t block = 0;
  std::uint64_t token = 0;  ///< the token's place in the block
};

/// Returns the place of each token of a batch in a cache of `blocks()` blocks, never one beyond it. Reads
/// tables; trivially copyable.
template <class F>
concept token_front = std::is_trivially_copyable_v<F> && requires(const F& front, std::uint64_t token) {
  { front.tokens() } noexcept -> std::same_as<std::uint64_t>;
  { front.at(token) } noexcept -> std::same_as<token_place>;
  { front.blocks() } noexcept -> std::same_as<std::uint64_t>;
  { front.block_tokens() } noexcept -> std::same_as<std::uint32_t>;
};

/// A front that reports the name of a required table that is null, or null if none is.
template <class F>
concept telling_front = requires(const F& front) {
  { front.missing() } noexcept -> std::same_as<const char*>;
};

/// Divides by the tokens of a block. A front stores a number below 1 as 0, which cannot divide; the front's
/// user refuses it.
class block_divider {
 public:
  template <std::integral N>
  explicit constexpr block_divider(N block_tokens) noexcept
      : tokens_(block_tokens > 0 ? static_cast<std::uint32_t>(block_tokens) : 0),
        by_(tokens_ == 0 ? 1 : tokens_) {}

  [[nodiscard]] LLMMEM_HD constexpr std::uint32_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] LLMMEM_HD const divider& by() const noexcept { return by_; }

 private:
  std::uint32_t tokens_;
  divider by_;
};

/// Block tables with checked reads: `block_in` returns block `index` of a sequence's table, or a negative
/// number past its end, and `blocks_in` the number of blocks.
template <class V>
concept bounded_table = std::is_trivially_copyable_v<V> && requires(const V& view, std::int32_t n) {
  { view.num_sequences } -> std::convertible_to<std::int32_t>;
  { view.block_tokens } -> std::convertible_to<std::int32_t>;
  { block_in(view, n, std::uint64_t{}) } noexcept -> std::same_as<std::int32_t>;
  { blocks_in(view, n) } noexcept -> std::same_as<std::uint64_t>;
};

/// Tables that give each token's place by itself: consecutive positions need not be adjacent in memory.
template <class V>
concept token_tables = bounded_table<V> && requires(const V& view, const divider& by, std::uint64_t blocks,
                                                    std::int32_t sequence, std::uint32_t position) {
  { view.place(by, blocks, sequence, position) } noexcept -> std::same_as<token_place>;
};

/// Tables that hold some of a sequence's tokens: those from `first_token` up to `end_token`. Attention reads
/// no others; positions stay those of the whole sequence.
template <class V>
concept ranged_tables = bounded_table<V> && requires(const V& view, std::int32_t sequence) {
  { view.first_token(sequence) } noexcept -> std::same_as<std::uint64_t>;
  { view.end_token(sequence) } noexcept -> std::same_as<std::uint64_t>;
};

namespace detail {

/// Returns the name of the pointer that tables lack for a lookup of blocks; null if none, or if they do not
/// report it.
template <class Tables>
[[nodiscard]] const char* missing_table(const Tables& tables) noexcept {
  if (tables.num_sequences <= 0) return nullptr;
  if constexpr (std::same_as<Tables, csr_table_view>) {
    return tables.indptr == nullptr ? "tables.indptr" : nullptr;
  } else if constexpr (std::same_as<Tables, padded_table_view>) {
    return tables.block_table == nullptr && tables.max_blocks > 0 ? "tables.block_table" : nullptr;
  } else if constexpr (telling_front<Tables>) {
    return tables.missing();
  } else {
    return nullptr;
  }
}
/// The same, including the sequences' lengths.
template <class Tables>
[[nodiscard]] const char* missing_counted_table(const Tables& tables) noexcept {
  if (tables.num_sequences <= 0) return nullptr;
  if constexpr (std::same_as<Tables, csr_table_view>) {
    if (tables.last_page_len == nullptr) return "tables.last_page_len";
  } else if constexpr (std::same_as<Tables, padded_table_view>) {
    if (tables.seq_lens == nullptr) return "tables.seq_lens";
  }
  return missing_table(tables);
}

}  // namespace detail

/// Returns the blocks of sequence `i`'s table, none if it has no beginning or no end. @pre 0 <= i <
/// num_sequences
[[nodiscard]] LLMMEM_HD inline std::uint64_t blocks_in(const csr_table_view& view, std::int32_t i) noexcept {
  const std::int32_t first = view.indptr[i];
  // A damaged table may name an end beyond the common end.
  const std::int32_t all = view.indptr[view.num_sequences];
  const std::int32_t end = view.indptr[i + 1] < all ? view.indptr[i + 1] : all;
  return first < 0 || end < first ? 0 : static_cast<std::uint64_t>(end - first);
}
/// The same for a padded table.
[[nodiscard]] LLMMEM_HD inline std::uint64_t blocks_in(const padded_table_view& view,
                                                       std::int32_t /*i*/) noexcept {
  return view.max_blocks < 0 ? 0 : static_cast<std::uint64_t>(view.max_blocks);
}

/// Returns block `index` of sequence `i`'s table, or -1 past its end. @pre 0 <= i < num_sequences
[[nodiscard]] LLMMEM_HD inline std::int32_t block_in(const csr_table_view& view, std::int32_t i,
                                                     std::uint64_t index) noexcept {
  if (index >= blocks_in(view, i)) return -1;
  return view.indices[static_cast<std::uint64_t>(view.indptr[i]) + index];
}
/// The same for a padded table.
[[nodiscard]] LLMMEM_HD inline std::int32_t block_in(const padded_table_view& view, std::int32_t i,
                                                     std::uint64_t index) noexcept {
  const std::uint64_t columns = blocks_in(view, i);
  if (index >= columns) return -1;
  return view.block_table[static_cast<std::uint64_t>(i) * columns + index];
}

/// Returns the last of `sequences` that begins at or before `token`, or the first; passes over those without
/// tokens. The result is in range for any contents of `indptr`. O(log sequences). @pre there is one
[[nodiscard]] LLMMEM_HD inline std::int32_t sequence_at(const std::int32_t* indptr, std::int32_t sequences,
                                                        std::uint64_t token) noexcept {
  std::int32_t low = 0;
  std::int32_t high = sequences - 1;
  while (low < high) {
    const std::int32_t middle = low + (high - low + 1) / 2;
    if (indptr[middle] <= static_cast<std::int64_t>(token)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// Returns the place of a position of a sequence.
template <class Tables>
  requires bounded_table<Tables>
[[nodiscard]] LLMMEM_HD inline token_place place_in(const Tables& tables, const divider& by,
                                                    std::uint64_t blocks, std::int32_t sequence,
                                                    std::int64_t position) noexcept {
  constexpr token_place beyond{.what = token_place::kind::out_of_range};
  if (sequence < 0 || sequence >= tables.num_sequences || position < 0) return beyond;
  const std::uint64_t in_table = by.quotient(static_cast<std::uint64_t>(position));
  const std::int32_t block = block_in(tables, sequence, in_table);
  if (block < 0 || static_cast<std::uint64_t>(block) >= blocks) return beyond;
  return {token_place::kind::in_cache, static_cast<std::uint64_t>(block),
          static_cast<std::uint64_t>(position) - in_table * by.by()};
}

namespace detail {

/// Returns block `index` of an existing sequence. @pre index < blocks_in(tables, i), for tables of this
/// library; others are read by `block_in`
template <class Tables>
[[nodiscard]] LLMMEM_HD inline std::int32_t block_within(const Tables& tables, std::int32_t i,
                                                         std::uint64_t index) noexcept {
  if constexpr (std::same_as<Tables, csr_table_view>) {
    return tables.indices[static_cast<std::uint64_t>(tables.indptr[i]) + index];
  } else if constexpr (std::same_as<Tables, padded_table_view>) {
    return tables
        .block_table[static_cast<std::uint64_t>(i) * static_cast<std::uint64_t>(tables.max_blocks) + index];
  } else {
    return block_in(tables, i, index);
  }
}

/// As `place_in`, for a position that the table has space for, in an existing sequence: so that checks are
/// not repeated for each tile.
template <class Tables>
  requires bounded_table<Tables>
[[nodiscard]] LLMMEM_HD inline token_place place_within(const Tables& tables, const divider& by,
                                                        std::uint64_t blocks, std::int32_t sequence,
                                                        std::uint32_t position) noexcept {
  const std::uint64_t in_table = by.quotient(position);
  const std::int32_t block = block_within(tables, sequence, in_table);
  if (block < 0 || static_cast<std::uint64_t>(block) >= blocks)
    return {.what = token_place::kind::out_of_range};
  return {token_place::kind::in_cache, static_cast<std::uint64_t>(block), position - in_table * by.by()};
}

}  // namespace detail

/// The direction in which tokens move.
enum class kv_direction : std::uint8_t { append, gather };

/// What each token has of one plane, or of a part of it: its place in the batch and in the cache. Distances
/// in bytes.
///
/// If there is a `cache_entry`, the cache's end begins `cache_first` bytes after the address that it holds
/// when the kernel runs; then `from` of a gather, or `to` of an append, is not read.
struct token_segment {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::uint64_t batch_token = 0;
  std::uint64_t batch_head = 0;
  std::uint64_t cache_block = 0;
  std::uint64_t cache_token = 0;
  std::uint64_t cache_head = 0;
  std::uint32_t elements = 0;               ///< elements of one head
  std::uint32_t cache_alignment = 16;       ///< the alignment of the entry
  std::byte* const* cache_entry = nullptr;  ///< the entry of a layer, in a table of planes
  std::uint64_t cache_first = 0;
};

/// The rows of tokens moved to or from a cache: for each segment a token's heads, in one row if they are
/// contiguous at both ends, or each in its own.
template <token_front Front, kv_direction Direction>
class kv_token_map {
 public:
  static constexpr std::uint32_t max_segments = 2;
  [[deprecated("its name is max_segments")]] static constexpr std::uint32_t most_segments = max_segments;

  /// @param by_head       each head in its own row.
  /// @param out_of_range  set to 1 if a token has no place; not cleared. May be null.
  /// @pre at most two segments; without `by_head` heads are contiguous
  kv_token_map(const Front& front, std::span<const token_segment> segments, std::uint32_t heads, bool by_head,
               std::uint32_t* out_of_range) noexcept
      : front_(front),
        segments_(static_cast<std::uint32_t>(segments.size())),
        rows_a_token_(by_head ? heads : 1),
        heads_a_row_(by_head ? 1 : heads),
        out_of_range_(out_of_range) {
    for (std::uint32_t i = 0; i < segments_; ++i)
      segment_[i] = segments[i];
  }

  [[nodiscard]] LLMMEM_HD std::uint64_t rows() const noexcept { return front_.tokens(); }
  [[nodiscard]] LLMMEM_HD std::uint32_t parts() const noexcept { return segments_ * rows_a_token_; }
  [[nodiscard]] LLMMEM_HD row_move at(std::uint64_t row, std::uint32_t part) const noexcept {
    const token_place place = front_.at(row);
    if (place.what != token_place::kind::in_cache) {
      if (place.what == token_place::kind::out_of_range && out_of_range_ != nullptr)
        raise_flag(*out_of_range_);
      return {};
    }
    const bool is_second = part >= rows_a_token_;
    const token_segment& segment = segment_[is_second ? 1 : 0];
    const std::uint64_t head = is_second ? part - rows_a_token_ : part;
    const std::uint64_t in_batch = row * segment.batch_token + head * segment.batch_head;
    const std::uint64_t in_cache =
        place.block * segment.cache_block + place.token * segment.cache_token + head * segment.cache_head;
    constexpr bool is_append = Direction == kv_direction::append;
    const std::byte* from = segment.from;
    std::byte* to = segment.to;
    if (segment.cache_entry != nullptr) {
      std::byte* const there = *segment.cache_entry + segment.cache_first;
      if constexpr (is_append) {
        to = there;
      } else {
        from = there;
      }
    }
    return {from + (is_append ? in_batch : in_cache), to + (is_append ? in_cache : in_batch),
            segment.elements * heads_a_row_};
  }
  [[nodiscard]] std::uint32_t longest_row() const noexcept {
    return std::max(segment_[0].elements, segment_[1].elements) * heads_a_row_;
  }
  [[nodiscard]] row_alignment alignment() const noexcept {
    row_alignment all{16, 16};
    for (std::uint32_t i = 0; i < segments_; ++i) {
      const token_segment& each = segment_[i];
      const std::uint32_t batch = alignment_of(each.batch_token, each.batch_head);
      const std::uint32_t cache = alignment_of(each.cache_block, each.cache_token, each.cache_head,
                                               each.cache_alignment, each.cache_first);
      constexpr bool is_append = Direction == kv_direction::append;
      all.from = std::min(
          {all.from, is_append ? batch : cache, alignment_of(reinterpret_cast<std::uintptr_t>(each.from))});
      all.to = std::min(
          {all.to, is_append ? cache : batch, alignment_of(reinterpret_cast<std::uintptr_t>(each.to))});
    }
    return all;
  }

 private:
  Front front_;
  token_segment segment_[max_segments]{};
  std::uint32_t segments_;
  std::uint32_t rows_a_token_;
  std::uint32_t heads_a_row_;
  std::uint32_t* out_of_range_;
};

/// The factors of stored values when they are read. Stored is `nearest(x * (1 / scale))`, the reciprocal
/// rounded once to a float (a division of each would differ by a code near ties). Read is `nearest(stored *
/// scale)`. In the executor's memory; null: 1. A scale of 0 makes saturated values and NaNs, which a reader
/// sees; no kernel tests for it.
struct kv_scales {
  const float* keys = nullptr;    ///< [1], or [heads]
  const float* values = nullptr;  ///< as many as `keys`
  bool is_by_head = false;
};

/// Options of moves of tokens between a batch and a cache.
struct token_options {
  dtype element = dtype::bf16;            ///< the type of the batch's elements
  kv_scales scales{};                     ///< read if the cache holds other elements
  std::uint32_t* out_of_range = nullptr;  ///< set to 1 when a token has no place in the cache; not cleared
};

/// Vectors of a batch: [token][head][element]. Distances are in bytes, not in elements: for `heads`
/// contiguous heads of `dim` floats they are `heads * dim * sizeof(float)` and `dim * sizeof(float)`.
template <class Byte>
  requires std::same_as<std::remove_const_t<Byte>, std::byte>
struct token_vectors {
  Byte* data = nullptr;
  std::uint64_t token_stride = 0;
  std::uint64_t head_stride = 0;
};
using batch_vectors = token_vectors<const std::byte>;  ///< new ones, as a projection writes them
using batch_output = token_vectors<std::byte>;         ///< rows for the gathered vectors
using batch_room [[deprecated("its name is batch_output")]] = batch_output;

/// Converts elements as they move, by scales read when it runs.
template <dtype From, dtype To, kv_direction Direction>
  requires kernel_element<From> && kernel_element<To>
class kv_scale_op {
 public:
  static constexpr unsigned from_bytes = sizeof(element_bits<From>);
  static constexpr unsigned to_bytes = sizeof(element_bits<To>);

  /// @param rows_a_token  of the map: the heads, if each has its own row.
  kv_scale_op(const kv_scales& scales, std::uint32_t rows_a_token) noexcept
      : scales_(scales), rows_a_token_(rows_a_token) {}

  [[nodiscard]] LLMMEM_HD scaling_step<From, To> at(std::uint32_t part) const noexcept {
    const bool is_second = part >= rows_a_token_;
    const float* const scales = is_second ? scales_.values : scales_.keys;
    if (scales == nullptr) return {1.0F};
    const std::uint32_t head = is_second ? part - rows_a_token_ : part;
    const float scale = scales[scales_.is_by_head ? head : 0];
    return {Direction == kv_direction::append ? 1.0F / scale : scale};
  }

 private:
  kv_scales scales_;
  std::uint32_t rows_a_token_;
};
static_assert(row_op<kv_scale_op<dtype::bf16, dtype::fp8_e4m3, kv_direction::append>>);

}  // namespace v0
}  // namespace llmmem
