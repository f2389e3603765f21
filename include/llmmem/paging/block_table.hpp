/// @file
/// Block tables in the formats of attention kernels: CSR (FlashInfer), padded (vLLM), and the slot mapping of
/// new tokens.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// The block tables of a batch, concatenated: FlashInfer's `indptr`, `indices`, `last_page_len`.
///
/// Plain pointers to host or device memory, so that the view can be passed to a kernel by value.
struct csr_table_view {
  const std::int32_t* indptr = nullptr;   ///< [num_sequences + 1], where each table begins in `indices`
  const std::int32_t* indices = nullptr;  ///< [indptr[num_sequences]], block ids
  const std::int32_t* last_page_len =
      nullptr;  ///< [num_sequences], tokens in the last block; 0 without tokens
  std::int32_t num_sequences = 0;
  std::int32_t block_tokens = 0;
  std::int64_t entry_bytes = 0;  ///< of a group: bytes per unit of an entry; 0: entries are block ids
  std::int64_t token_bytes = 0;  ///< of a group: bytes per token

  /// Returns the number of tokens of sequence `i`.
  [[nodiscard]] LLMMEM_HD constexpr std::int64_t tokens(std::int32_t i) const noexcept {
    const std::int64_t blocks = std::int64_t{indptr[i + 1]} - indptr[i];
    return blocks == 0 ? 0 : (blocks - 1) * block_tokens + last_page_len[i];
  }

  /// Returns the slot of token `position` of sequence `i`: its index in an array of
  /// `physical_blocks x block_tokens`; for a group, its index in the whole memory counted in the group's
  /// tokens.
  [[nodiscard]] LLMMEM_HD constexpr std::int64_t slot(std::int32_t i, std::int64_t position) const noexcept {
    const std::int64_t entry = indices[indptr[i] + position / block_tokens];
    const std::int64_t first = entry_bytes == 0 ? entry * block_tokens : entry * entry_bytes / token_bytes;
    return first + position % block_tokens;
  }
};

/// The block tables of a batch in rows of equal length: vLLM's `block_table[num_seqs, max_blocks]` and
/// `seq_lens`.
///
/// Rows are padded with the null block, which kernels may read.
struct padded_table_view {
  const std::int32_t* block_table = nullptr;  ///< [num_sequences, max_blocks], row-major
  const std::int32_t* seq_lens = nullptr;     ///< [num_sequences], tokens
  std::int32_t num_sequences = 0;
  std::int32_t max_blocks = 0;
  std::int32_t block_tokens = 0;
  std::int64_t entry_bytes = 0;  ///< as in `csr_table_view`
  std::int64_t token_bytes = 0;

  [[nodiscard]] LLMMEM_HD constexpr std::int64_t tokens(std::int32_t i) const noexcept { return seq_lens[i]; }

  /// As `csr_table_view::slot`.
  [[nodiscard]] LLMMEM_HD constexpr std::int64_t slot(std::int32_t i, std::int64_t position) const noexcept {
    const std::int64_t entry = block_table[std::int64_t{i} * max_blocks + position / block_tokens];
    const std::int64_t first = entry_bytes == 0 ? entry * block_tokens : entry * entry_bytes / token_bytes;
    return first + position % block_tokens;
  }
};

static_assert(std::is_trivially_copyable_v<csr_table_view> &&
              std::is_trivially_copyable_v<padded_table_view>);

/// The source of tables: a `paged_allocator`, or `paging::group_tables` of a `hybrid_allocator`.
template <class C>
concept block_table_source = requires(const C& cache, sequence_id sequence) {
  { cache.check(sequence) } noexcept -> std::same_as<result<void>>;
  { cache.blocks(sequence) } noexcept -> std::same_as<std::span<const block_id>>;
  { cache.tokens(sequence) } noexcept -> std::same_as<std::uint64_t>;
  { cache.block_tokens() } noexcept -> std::same_as<std::uint32_t>;
};

namespace detail {

/// A source whose tables hold something other than block ids: for a group, byte offsets in units.
template <class C>
concept has_entries = requires(const C& cache, block_id block) {
  { cache.entry(block) } noexcept -> std::same_as<std::int32_t>;
  { cache.entry_bytes() } noexcept -> std::same_as<std::uint64_t>;
  { cache.token_bytes() } noexcept -> std::same_as<std::uint64_t>;
  { cache.slot_of(block) } noexcept -> std::same_as<std::uint64_t>;
  { cache.has_slots() } noexcept -> std::same_as<result<void>>;
};

template <block_table_source Cache>
[[nodiscard]] std::int32_t table_entry(const Cache& cache, block_id block) noexcept {
  if constexpr (has_entries<Cache>) {
    return cache.entry(block);
  } else {
    return static_cast<std::int32_t>(to_index(block));
  }
}

/// Sets the units of the entries in a view.
template <block_table_source Cache, class View>
[[nodiscard]] View in_units(const Cache& cache, View view) noexcept {
  if constexpr (has_entries<Cache>) {
    view.entry_bytes = static_cast<std::int64_t>(cache.entry_bytes());
    view.token_bytes = static_cast<std::int64_t>(cache.token_bytes());
  }
  return view;
}

}  // namespace detail

/// The lengths of the arrays of a batch's tables.
struct table_extent {
  std::uint64_t num_sequences = 0;
  std::uint64_t indices = 0;     ///< entries of all tables together: CSR
  std::uint64_t max_blocks = 0;  ///< entries of the longest table: padded
  std::uint64_t max_tokens = 0;  ///< of the longest sequence: padded tables hold up to 2^31 - 1
};

/// Returns what `write_csr` and `write_padded` need for `sequences`, or why one of them cannot be read.
/// O(sequences).
template <block_table_source Cache>
[[nodiscard]] result<table_extent> measure_tables(const Cache& cache,
                                                  std::span<const sequence_id> sequences) noexcept {
  table_extent extent{.num_sequences = sequences.size()};
  for (const sequence_id sequence : sequences) {
    if (const auto alive = cache.check(sequence); !alive) return alive.error();
    const std::uint64_t blocks = cache.blocks(sequence).size();
    const std::uint64_t tokens = cache.tokens(sequence);
    extent.indices += blocks;
    extent.max_blocks = blocks > extent.max_blocks ? blocks : extent.max_blocks;
    extent.max_tokens = tokens > extent.max_tokens ? tokens : extent.max_tokens;
  }
  constexpr std::uint64_t most = std::numeric_limits<std::int32_t>::max();
  if (extent.indices > most || extent.num_sequences >= most) {
    const std::uint64_t wanted = extent.indices > most ? extent.indices : extent.num_sequences;
    return failure{errc::out_of_range, 0, wanted, most, "measure_tables: int32 entries"};
  }
  return extent;
}

/// Host arrays for `write_csr` to fill; they may be longer than needed.
struct csr_buffers {
  std::span<std::int32_t> indptr;         ///< at least num_sequences + 1
  std::span<std::int32_t> indices;        ///< at least `table_extent::indices`
  std::span<std::int32_t> last_page_len;  ///< at least num_sequences
};

/// Writes the block tables of `sequences` in order and returns a view of them. Writes nothing if a sequence
/// is refused or a buffer is `too_short`. O(blocks).
template <block_table_source Cache>
[[nodiscard]] result<csr_table_view> write_csr(const Cache& cache, std::span<const sequence_id> sequences,
                                               const csr_buffers& out) noexcept {
  const auto extent = measure_tables(cache, sequences);
  if (!extent) return extent.error();
  const auto fits = [](std::span<std::int32_t> buffer, std::uint64_t needed) {
    return buffer.size() >= needed;
  };
  const auto too_short = [](std::span<std::int32_t> buffer, std::uint64_t needed, const char* which) {
    return failure{errc::too_short, 0, needed, buffer.size(), which};
  };
  const std::uint64_t rows = sequences.size();
  if (!fits(out.indptr, rows + 1)) return too_short(out.indptr, rows + 1, "write_csr: indptr");
  if (!fits(out.indices, extent->indices))
    return too_short(out.indices, extent->indices, "write_csr: indices");
  if (!fits(out.last_page_len, rows)) return too_short(out.last_page_len, rows, "write_csr: last_page_len");

  const std::uint32_t block_tokens = cache.block_tokens();
  std::size_t end = 0;
  out.indptr[0] = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    for (const block_id block : cache.blocks(sequences[i])) {
      out.indices[end++] = detail::table_entry(cache, block);
    }
    out.indptr[i + 1] = static_cast<std::int32_t>(end);
    const std::uint64_t tokens = cache.tokens(sequences[i]);
    out.last_page_len[i] = tokens == 0 ? 0 : static_cast<std::int32_t>((tokens - 1) % block_tokens + 1);
  }
  return detail::in_units(cache, csr_table_view{.indptr = out.indptr.data(),
                                                .indices = out.indices.data(),
                                                .last_page_len = out.last_page_len.data(),
                                                .num_sequences = static_cast<std::int32_t>(sequences.size()),
                                                .block_tokens = static_cast<std::int32_t>(block_tokens)});
}

/// Host arrays for `write_padded` to fill; they may be longer than needed.
struct padded_buffers {
  std::span<std::int32_t> block_table;  ///< at least num_sequences x max_blocks
  std::span<std::int32_t> seq_lens;     ///< at least num_sequences
  std::uint32_t max_blocks = 0;         ///< length of a row, at least that of the longest table
};

/// As `write_csr`, in rows of `out.max_blocks` padded with the null block. A sequence of more than 2^31 - 1
/// tokens is refused, `out_of_range`. O(num_sequences x max_blocks).
template <block_table_source Cache>
[[nodiscard]] result<padded_table_view> write_padded(const Cache& cache,
                                                     std::span<const sequence_id> sequences,
                                                     const padded_buffers& out) noexcept {
  const auto extent = measure_tables(cache, sequences);
  if (!extent) return extent.error();
  const auto too_short = [](std::uint64_t needed, std::uint64_t given, const char* which) {
    return failure{errc::too_short, 0, needed, given, which};
  };
  constexpr std::uint64_t most = std::numeric_limits<std::int32_t>::max();
  if (extent->max_tokens > most) {
    return failure{errc::out_of_range, 0, extent->max_tokens, most, "write_padded: seq_lens"};
  }
  if (out.max_blocks < extent->max_blocks)
    return too_short(extent->max_blocks, out.max_blocks, "write_padded: max_blocks");
  const std::uint64_t entries = sequences.size() * std::uint64_t{out.max_blocks};
  if (out.block_table.size() < entries)
    return too_short(entries, out.block_table.size(), "write_padded: block_table");
  if (out.seq_lens.size() < sequences.size())
    return too_short(sequences.size(), out.seq_lens.size(), "write_padded: seq_lens");

  std::size_t at = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const std::span<const block_id> blocks = cache.blocks(sequences[i]);
    for (std::size_t b = 0; b < out.max_blocks; ++b) {
      out.block_table[at++] = b < blocks.size() ? detail::table_entry(cache, blocks[b]) : 0;
    }
    out.seq_lens[i] = static_cast<std::int32_t>(cache.tokens(sequences[i]));
  }
  return detail::in_units(cache,
                          padded_table_view{.block_table = out.block_table.data(),
                                            .seq_lens = out.seq_lens.data(),
                                            .num_sequences = static_cast<std::int32_t>(sequences.size()),
                                            .max_blocks = static_cast<std::int32_t>(out.max_blocks),
                                            .block_tokens = static_cast<std::int32_t>(cache.block_tokens())});
}

/// The slot that kernels skip in a slot mapping: vLLM's PAD_SLOT_ID.
inline constexpr std::int64_t padding_slot = -1;

/// Writes the slots of tokens `first` to `first + out.size() - 1` of a sequence, where an append kernel
/// stores their keys and values; `padding_slot` for a token whose block the sequence (of a group) no longer
/// holds. Writes nothing if the sequence does not hold them all (`past_the_end`) or a group's tokens are not
/// at multiples of their size (`no_slots`). O(out.size()).
template <block_table_source Cache>
[[nodiscard]] result<void> write_slot_mapping(const Cache& cache, sequence_id sequence, std::uint64_t first,
                                              std::span<std::int64_t> out) noexcept {
  if (const auto alive = cache.check(sequence); !alive) return alive.error();
  if constexpr (detail::has_entries<Cache>) {
    if (const auto fits = cache.has_slots(); !fits) return fits;
  }
  const std::uint64_t tokens = cache.tokens(sequence);
  if (first > tokens || out.size() > tokens - first) {
    const std::uint64_t named = first > tokens ? first : first + out.size();
    return failure{errc::past_the_end, sequence.slot, named, tokens, "write_slot_mapping"};
  }
  const std::span<const block_id> blocks = cache.blocks(sequence);
  const std::uint64_t block_tokens = cache.block_tokens();
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint64_t position = first + i;
    const block_id block = blocks[static_cast<std::size_t>(position / block_tokens)];
    if constexpr (detail::has_entries<Cache>) {
      out[i] = block == null_block
                   ? padding_slot
                   : static_cast<std::int64_t>(cache.slot_of(block) + position % block_tokens);
    } else {
      out[i] =
          static_cast<std::int64_t>(std::uint64_t{to_index(block)} * block_tokens + position % block_tokens);
    }
  }
  return {};
}

}  // namespace v0
}  // namespace llmmem
