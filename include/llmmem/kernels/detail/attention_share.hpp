/// @file
/// Shares of rows, as all kernels of `paged_attention` use them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/attention_parts.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <cstddef>
#include <cstdint>
#include <numbers>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The tokens of a sequence that a cache holds: all of them, or those dealt to a context-parallel rank.
struct token_deal {
  divider round{};  // tokens after which it is this rank's turn again
  std::uint32_t before = 0;
  std::uint32_t run = 0;  // 0: all tokens

  /// Returns how many of a sequence's first `tokens` tokens this cache holds: `kv_part::local_tokens`,
  /// without its divisions.
  [[nodiscard]] LLMMEM_HD std::uint64_t held_of(std::uint64_t tokens) const noexcept {
    if (run == 0) return tokens;
    const std::uint64_t rounds = round.quotient(tokens);
    const std::uint64_t rest = tokens - rounds * round.by();
    const std::uint64_t mine = rest <= before ? 0 : rest - before;
    return rounds * run + (mine < run ? mine : run);
  }
};

/// The common data of both kernels. Distances in bytes.
///
/// Rows that share their tokens are one row here, with the query heads of all these rows: for a head of the
/// cache, those of the first row come before those of the second. `own_output` finds the row and head of an
/// output.
struct attention_shape {
  std::uint64_t rows = 0;
  const std::int32_t* sequences = nullptr;  // [rows], or null, as in attention_rows
  const std::int32_t* lengths = nullptr;    // [rows], or null, as in attention_rows
  const std::int32_t* begins = nullptr;
  const std::int32_t* ends = nullptr;
  token_deal deal{};
  batch_vectors queries{};
  batch_output out{};          // if a part is written: its sums
  batch_output part_states{};  // of a part; null if none is written
  kv_plane keys{};
  kv_plane values{};
  std::uint64_t blocks = 0;
  std::uint32_t layer = 0;
  divider by{};      // tokens per block
  divider shares{};  // of a row
  divider share_tokens{};
  std::uint32_t key_packs = 0;  // of a key
  std::uint32_t value_packs = 0;
  std::uint32_t heads = 0;  // of the cache
  std::uint32_t group = 0;  // query heads for each, of all rows that share their tokens
  std::uint32_t shared = 1;
  divider own_group{};  // query heads for each, of one row
  std::uint32_t window = 0;
  bool tiles_in_block = false;  // eight tokens from a multiple of eight on are in one block
  dtype element = dtype::bf16;  // of the queries
  dtype out_element = dtype::bf16;
  float scale = 1;  // times log2(e)
  kv_scales scales{};
  float* sums = nullptr;    // [rows][query heads][shares][value_packs x 8]
  float* states = nullptr;  // [rows][query heads][shares]: the largest product and the sum of exponentials
  float* log_sum_exp = nullptr;
  std::uint32_t* out_of_range = nullptr;

  [[nodiscard]] LLMMEM_HD std::uint32_t query_heads() const noexcept { return heads * group; }
  [[nodiscard]] LLMMEM_HD float scale_of(const float* of, std::uint32_t head) const noexcept {
    return of == nullptr ? 1.0F : of[scales.is_by_head ? head : 0];
  }
  [[nodiscard]] LLMMEM_HD std::uint64_t element_bytes() const noexcept {
    return element == dtype::f32 ? 4 : 2;
  }
  [[nodiscard]] LLMMEM_HD bool writes_part() const noexcept { return part_states.data != nullptr; }
  LLMMEM_HD void flag() const noexcept {
    if (out_of_range != nullptr) raise_flag(*out_of_range);
  }
};

/// A query head of a row, and the head of the cache that it reads.
struct attention_output {
  std::uint64_t row = 0;
  std::uint32_t query = 0;
  std::uint32_t head = 0;
};

/// The same with the caller's row and query head.
[[nodiscard]] LLMMEM_HD inline attention_output own_output(const attention_shape& shape,
                                                           const attention_output& of) noexcept {
  if (shape.shared == 1) return of;
  const std::uint32_t in_head = of.query - of.head * shape.group;
  const auto sharer = static_cast<std::uint32_t>(shape.own_group.quotient(in_head));
  return {of.row * shape.shared + sharer, of.head * shape.own_group.by() + shape.own_group.remainder(in_head),
          of.head};
}

/// The sums of eight weighted elements, with the largest product and the sum of exponentials.
struct attention_total {
  attention_floats sum{};
  float most = 0;
  float total = 0;
};

/// Writes a lane's or a thread's eight elements of an output.
LLMMEM_HD inline void write_output(const attention_shape& shape, const attention_output& of_all,
                                   std::uint32_t pack, const attention_total& of) noexcept {
  const attention_output at = own_output(shape, of_all);
  if (pack == 0 && shape.log_sum_exp != nullptr) {
    constexpr float ln2 = std::numbers::ln2_v<float>;
    // Without tokens the largest product is -infinity, and so is this; a NaN stays one.
    const float told =
        of.total == of.total ? fused(of.most, ln2, logarithm_of(of.total)) : float_of_bits(0x7FFF'FFFFU);
    store_packet<4>(reinterpret_cast<std::byte*>(shape.log_sum_exp +
                                                 at.row * shape.heads * shape.own_group.by() + at.query),
                    {{bits_of_float(told)}});
  }
  if (pack == 0 && shape.writes_part())
    store_packet<8>(shape.part_states.data + at.row * shape.part_states.token_stride +
                        at.query * shape.part_states.head_stride,
                    {{bits_of_float(of.most), bits_of_float(of.total)}});
  if (pack >= shape.value_packs) return;
  // The sums of a part are not divided; but parts of several caches merge, so each includes its scale.
  const float divisor = shape.writes_part() ? 1.0F : of.total;
  const float factor =
      divisor == 0 ? 0.0F : quotient_of(shape.scale_of(shape.scales.values, at.head), divisor);
  attention_floats values{};
  LLMMEM_UNROLL
  for (unsigned i = 0; i < attention_pack; ++i)
    values.of[i] = product_of(of.sum.of[i], factor);
  const std::uint64_t bytes = shape.out_element == dtype::f32 ? 4 : 2;
  write_floats(shape.out.data + at.row * shape.out.token_stride + at.query * shape.out.head_stride +
                   std::uint64_t{pack} * attention_pack * bytes,
               shape.out_element, values);
}

/// The most tokens of a row: a multiple of a tile, below 2^31.
inline constexpr std::uint64_t most_attended_tokens = 0x7FFF'FFF0;

/// The tokens of a row: it attends to those from `first` to `end`. Tiles begin at multiples of eight, and
/// shares at `begin`.
struct attention_span {
  std::int32_t sequence = -1;  // negative: padding
  std::uint32_t first = 0;
  std::uint32_t end = 0;
  std::uint32_t begin = 0;
  std::uint32_t shares = 0;  // those that have tokens
};

template <class Tables>
[[nodiscard]] LLMMEM_HD inline attention_span span_of(const attention_shape& shape, const Tables& tables,
                                                      std::uint64_t of_all) noexcept {
  attention_span out;
  const std::uint64_t row = of_all * shape.shared;  // the first of the rows that share
  const std::int64_t sequence =
      shape.sequences != nullptr ? shape.sequences[row] : static_cast<std::int64_t>(row);
  // A row of padding leaves its output unchanged, but its part must say that it is empty: it is handled like
  // a sequence without tokens, for which no table is read.
  out.sequence = shape.writes_part() ? 0 : -1;
  if (sequence < 0) return out;
  if (sequence >= tables.num_sequences) {
    shape.flag();
    return out;
  }
  out.sequence = static_cast<std::int32_t>(sequence);
  const std::int64_t tokens = shape.lengths != nullptr ? shape.lengths[row] : tables.tokens(out.sequence);
  if (tokens <= 0) {
    if (tokens < 0) shape.flag();
    return out;
  }
  auto to = static_cast<std::uint64_t>(tokens);
  std::uint64_t from = shape.window != 0 && to > shape.window ? to - shape.window : 0;
  if (shape.begins != nullptr) {
    const std::int32_t begin = shape.begins[row];
    if (begin < 0) shape.flag();
    if (begin > 0 && static_cast<std::uint64_t>(begin) > from) from = static_cast<std::uint64_t>(begin);
  }
  if (shape.ends != nullptr) {
    const std::int32_t end = shape.ends[row];
    if (end < 0) shape.flag();
    const std::uint64_t wanted = end < 0 ? 0 : static_cast<std::uint64_t>(end);
    if (wanted < to) to = wanted;
  }
  from = shape.deal.held_of(from);
  to = shape.deal.held_of(to);
  if constexpr (ranged_tables<Tables>) {
    const std::uint64_t first = tables.first_token(out.sequence);
    const std::uint64_t end = tables.end_token(out.sequence);
    if (first > from) from = first;
    if (end < to) to = end;
  }
  if (from >= to) return out;
  // A length beyond the table's space would cost a practically endless loop over tokens.
  const std::uint64_t room = blocks_in(tables, out.sequence) * shape.by.by();
  const std::uint64_t most = room < most_attended_tokens ? room : most_attended_tokens;
  const bool is_beyond = to > most;
  if (is_beyond) shape.flag();
  if (from >= most) return out;
  out.first = static_cast<std::uint32_t>(from);
  out.end = static_cast<std::uint32_t>(is_beyond ? most : to);
  out.begin = out.first / attention_tile * attention_tile;
  const std::uint64_t needed = shape.share_tokens.quotient(out.end - out.begin - 1) + 1;
  out.shares = static_cast<std::uint32_t>(needed < shape.shares.by() ? needed : shape.shares.by());
  return out;
}

/// Stores the result of a share, for `attention_merge_work`, or the output of a row with one share.
LLMMEM_HD inline void finish_share(const attention_shape& shape, const attention_output& at,
                                   std::uint32_t share, std::uint32_t shares, std::uint32_t pack,
                                   const attention_total& of) noexcept {
  if (shares <= 1) return write_output(shape, at, pack, of);
  const std::uint64_t part = (at.row * shape.query_heads() + at.query) * shape.shares.by() + share;
  if (pack < shape.value_packs)
    raw_of<dtype::f32>(of.sum).store(
        reinterpret_cast<std::byte*>(shape.sums + (part * shape.value_packs + pack) * attention_pack));
  if (pack == 0)
    store_packet<8>(reinterpret_cast<std::byte*>(shape.states + 2 * part),
                    {{bits_of_float(of.most), bits_of_float(of.total)}});
}

/// A share of a row, for some of the query heads that share one of the cache's.
struct attention_place {
  std::uint64_t row = 0;
  std::uint32_t share = 0;
  std::uint32_t head = 0;           // of the cache
  std::uint32_t first_query = 0;    // head
  std::uint32_t queries = 0;        // heads: 0 if there is nothing to do
  const std::byte* keys = nullptr;  // of the head in the layer
  const std::byte* values = nullptr;
  attention_span span{};
  std::uint32_t from = 0;  // the tokens of the share
  std::uint32_t to = 0;
};

/// The shares of all rows as items, each for up to `Heads` query heads. Items that read the same keys and
/// values are neighbours, and so are neighbours in a cache whose tokens' heads are contiguous.
template <std::uint32_t Heads>
class attention_shares {
 public:
  explicit attention_shares(const attention_shape& shape) noexcept
      : chunks_((shape.group - 1) / Heads + 1), units_(shape.heads * chunks_.by()) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items(const attention_shape& shape) const noexcept {
    return shape.rows * shape.shares.by() * units_.by();
  }
  /// Returns the share of an item and its row's span, if both exist.
  template <class Tables>
  [[nodiscard]] LLMMEM_HD attention_place at(std::uint64_t item, const attention_shape& shape,
                                             const Tables& tables) const noexcept {
    const std::uint64_t of_row = units_.quotient(item);
    const std::uint32_t unit = units_.remainder(item);
    attention_place out;
    out.row = shape.shares.quotient(of_row);
    out.share = shape.shares.remainder(of_row);
    if (out.row < shape.rows) out.span = span_of(shape, tables, out.row);
    out.head = static_cast<std::uint32_t>(chunks_.quotient(unit));
    const std::uint32_t chunk = unit - out.head * chunks_.by();
    out.first_query = out.head * shape.group + chunk * Heads;
    if (out.span.sequence < 0 || (out.share != 0 && out.share >= out.span.shares)) return out;
    const std::uint32_t queries = shape.group - chunk * Heads;
    out.queries = queries < Heads ? queries : Heads;
    out.keys = plane_base(shape.keys, shape.layer) + out.head * shape.keys.strides.head;
    out.values = plane_base(shape.values, shape.layer) + out.head * shape.values.strides.head;
    // Both are at most the end, so 31 bits can count them.
    out.from = out.share == 0 ? out.span.begin : out.span.begin + out.share * shape.share_tokens.by();
    const bool is_last = out.share + 1 >= out.span.shares;
    out.to = is_last ? out.span.end : out.from + shape.share_tokens.by();
    return out;
  }

 private:
  divider chunks_;  // of a head's query heads
  divider units_;   // of a share: heads x chunks
};

/// Returns the place of the token at a position of a row.
template <class Tables>
[[nodiscard]] LLMMEM_HD inline token_place place_of(const attention_shape& shape, const Tables& tables,
                                                    std::int32_t sequence, std::uint32_t position) noexcept {
  if constexpr (token_tables<Tables>) {
    return tables.place(shape.by, shape.blocks, sequence, position);
  } else {
    return place_within(tables, shape.by, shape.blocks, sequence, position);
  }
}

/// Returns the place of a token of a row, or none if it does not count: before its window, past its share, or
/// in no block, which is flagged.
template <class Tables>
[[nodiscard]] LLMMEM_HD inline token_place counted_place(const attention_shape& shape, const Tables& tables,
                                                         const attention_place& at,
                                                         std::uint32_t position) noexcept {
  if (position < at.span.first || position >= at.to) return {};
  const token_place token = place_of(shape, tables, at.span.sequence, position);
  if (token.what == token_place::kind::out_of_range) shape.flag();
  return token;
}

/// Returns the place of the first of eight tokens that all count and are in one block, or none.
template <class Tables>
[[nodiscard]] LLMMEM_HD inline token_place whole_tile(const attention_shape& shape, const Tables& tables,
                                                      const attention_place& at,
                                                      std::uint32_t tile) noexcept {
  // Tokens of a list need not be consecutive.
  if (token_tables<Tables>) return {};
  if (!shape.tiles_in_block || tile < at.span.first || tile >= at.to || tile + attention_tile > at.span.end)
    return {};
  return place_of(shape, tables, at.span.sequence, tile);
}

/// Returns the address of a lane's eight elements of a token's key or value.
template <dtype Element>
[[nodiscard]] LLMMEM_HD inline const std::byte* pack_at(const std::byte* plane, const plane_strides& strides,
                                                        const token_place& token,
                                                        std::uint32_t pack) noexcept {
  return plane + token.block * strides.block + token.token * strides.token +
         std::uint64_t{pack} * attention_raw<Element>::bytes;
}

/// Returns the address of eight elements of a query.
[[nodiscard]] LLMMEM_HD inline const std::byte* query_at(const attention_shape& shape,
                                                         const attention_place& at, std::uint32_t query,
                                                         std::uint32_t pack) noexcept {
  const attention_output own = own_output(shape, {at.row, at.first_query + query, at.head});
  return shape.queries.data + own.row * shape.queries.token_stride +
         std::uint64_t{own.query} * shape.queries.head_stride +
         std::uint64_t{pack} * attention_pack * shape.element_bytes();
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
