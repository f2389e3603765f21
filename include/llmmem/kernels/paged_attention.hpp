/// @file
/// Attention of single queries over a paged cache: the kernel of a decode step, and the measure of the cost
/// of reads through block tables.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/attention_parts.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/latent_record.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Which tokens each query attends to. A row is the queries of one token: one for each sequence of a decode
/// step; several of one sequence, each with its own length, for draft tokens or a prompt. Pointers are of the
/// executor's memory.
struct attention_rows {
  std::uint64_t rows = 0;
  /// [rows], each row's sequence; a negative one is padding, whose outputs are not touched. Null: row i is
  /// sequence i.
  const std::int32_t* sequences = nullptr;
  /// [rows], how many tokens each attends to: the first ones of its sequence, including itself. Null: all
  /// tokens of the sequence.
  const std::int32_t* lengths = nullptr;
  /// [rows], the first token of a row's range, and in `ends` the one after its last: of the tokens that a row
  /// attends to by its length and its window, the kernel reads only those in the range. Null: from the first,
  /// to the last.
  const std::int32_t* begins = nullptr;
  const std::int32_t* ends = nullptr;
  /// The number of consecutive rows that attend to the same tokens; divides `rows`. The kernel reads these
  /// tokens once for all of the rows, and takes the numbers above from the first of them. A batch that shares
  /// a prefix (cascade) calls it once for the prefix with `shared` rows and once for each row's own tokens,
  /// and merges the two parts.
  std::uint32_t shared = 1;
};

/// How the tokens of a row are split, so that few rows occupy a whole device: the first `tokens` of those
/// that it attends to are one share, the next the second; the last takes the rest.
struct attention_split {
  std::uint32_t tokens = 0;  ///< a multiple of 8; not read if `count` is 1
  std::uint32_t count = 1;

  friend constexpr bool operator==(const attention_split&, const attention_split&) noexcept = default;
};

/// The units that multiply.
enum class attention_arithmetic : std::uint8_t {
  /// Plain cores: sums of floats in one order, so hosts and devices produce the same bits. A query head costs
  /// a device instructions for each key: with more than four query heads for each of the cache's, or fp8 in
  /// the cache, these take longer than memory does.
  reproducible,
  /// Tensor cores, of devices of compute capability 8.0 and newer, in code compiled for these: up to eight
  /// query heads for the instructions of one. Weights are rounded to the cache's type, with fp8 to halves,
  /// and so are queries of another type (after scaling by a power of two). The bits are those
  /// of a kind of device; a host has its own. The scale is applied after the products, so keys of 2^120 and
  /// more make them infinite or NaN. For caches of bf16, half, fp8 or codes whose keys and values have 64
  /// elements, or 128; and for records of latents.
  ///
  /// Of codes, by their scales:
  ///
  /// - One scale for each vector, or `fp4_e2m1` with scales of `fp8_e4m3` by run, of keys and of values:
  ///   halves hold every code, and its product with such a scale; other scales multiply products and weights
  ///   as floats. So only queries and weights are rounded, to halves. A product differs
  ///   by at most 2^-11 x scale x the sum of its terms' sizes; an output, at equal products, by at most 2^-11
  ///   x the weighted mean of its values' sizes. Both hold for numbers that halves have with all digits: a
  ///   query's elements from 2^-27 of its largest on, and weights times value scales from 2^-27 of the
  ///   share's largest so far on. Smaller ones are rounded to multiples of 2^-37 of these. Keys of 2^104 and
  ///   more make products infinite or NaN. So does an infinite scale of a key. Zeros
  ///   next to scales (int8, int4 by vector) multiply floats: the sum of the rounded query, and the weights
  ///   as they are; so an output's bound is of values without their zeros.
  /// - Other scales, by channel or by run: code x scale is rounded to bf16, and so are queries and weights;
  ///   both bounds are 2^-7 instead. Scales that differ within a vector are no factor of its product, so each
  ///   code is multiplied where it is read.
  ///
  /// Of records of latents: `bf16_mla` and `fp8_ds_mla` (512 latents and 64 rotary elements of bf16; the
  /// latents in bf16, or in `fp8_e4m3` with a float for each 128, without an outer scale in the record). Code
  /// x scale, queries and weights are rounded to bf16: both bounds are 2^-7. Two warps make the products of a
  /// share, and each sums half of the latents.
  tensor_cores,
  /// Float dots by vector instructions of a host (`host_vector_executor`; other executors refuse it): each
  /// key and value is
  /// read once for up to sixteen query heads of the cache's head. Sums of floats in the lanes of vectors: the
  /// bits are those of a `vector_path`, a compiler and its flags, on any number of threads.
  host_vectors,
  /// Integer dots of a host (`host_vector_executor`), for keys and values in int8 or int4 with one scale for
  /// each vector; others are refused. A query head becomes int8, and weights times the values' scales become
  /// eight bits for each 64 tokens; products are sums of integers, by AMX or AVX512-VNNI where the machine
  /// has it (`vector_path`), with equal integers elsewhere. It differs from `host_vectors` by these
  /// roundings:
  ///
  /// - a product by at most scale x (largest size of the query's elements / 254) x sum of the sizes of the
  ///   key's elements (all sizes here: without the zeros next to scales, which multiply floats);
  /// - an output by at most the sum over its tokens of (m / 510) x the size of the value's code, divided by
  ///   the sum of the weights; m is the largest weight x value scale of the token's tile of 64. (Weights are
  ///   those of the products above. Values whose m is below 2^-100 count as 0.)
  ///
  /// A query whose elements are all below 2^-100 counts as 0. A scale, times what scales it, makes its rows
  /// NaN if it is negative, infinite or NaN, as does a query with an infinite element or a NaN.
  host_integers,
  same_everywhere [[deprecated("its name is reproducible")]] = reproducible
};

/// How a call attends to its tokens.
struct attention_options {
  std::uint32_t query_heads = 0;  ///< a required multiple of the cache's: MHA has as many, GQA more
  /// Of queries and outputs: the cache's or f32; with a cache of fp8 or codes f32, bf16 or f16.
  dtype element = dtype::bf16;
  float scale = 0;           ///< multiplies the products before their softmax; 0: 1 / sqrt(head_dim)
  std::uint32_t window = 0;  ///< attends to the last `window` tokens of each row; 0: to all
  kv_scales scales{};        ///< the scales of the cache's elements, or what scales the scales of its codes
  attention_split split{};
  attention_arithmetic arithmetic = attention_arithmetic::reproducible;
  /// [rows][query_heads], the natural logarithm of the sum of exponentials, -infinity for an empty row, NaN
  /// if a product is a NaN. Null: not written.
  float* log_sum_exp = nullptr;
  std::uint32_t* out_of_range = nullptr;  ///< set to 1 when a token has no place in the cache; not cleared
  /// The record of a cache of latents (MLA); null: the cache holds keys and values. Read before the call
  /// returns.
  const paging::latent_record* latents = nullptr;
};

/// Returns shares for rows of up to `most_tokens`, enough to occupy `limits.multiprocessors`. It depends on
/// nothing else, so a graph can keep it; the outputs' bits depend on it. So devices of different sizes, and a
/// host, produce the same bits if all use the same limits instead of their own.
[[nodiscard]] attention_split plan_attention(std::uint64_t rows, std::uint32_t query_heads,
                                             const kv_layout& layout, std::uint64_t most_tokens,
                                             const launch_limits& limits = {},
                                             attention_arithmetic arithmetic = {}) noexcept;

/// Returns the bytes that `paged_attention` needs as workspace: none for one share; 2^64 - 1 if they exceed
/// that.
[[nodiscard]] std::uint64_t attention_workspace_bytes(std::uint64_t rows, const kv_layout& layout,
                                                      const attention_options& options) noexcept;

/// Tables that contain each sequence's number of tokens.
template <class V>
concept counted_tables = requires(const V& view, std::int32_t sequence) {
  { view.tokens(sequence) } noexcept -> std::convertible_to<std::int64_t>;
};

/// out[row][head] = the values of a row's tokens in one layer, weighted by the softmax of its query's
/// products with their keys. Query heads share the cache's heads in contiguous groups (GQA, MQA). Two
/// launches, one for one share; may be captured in a graph.
///
/// All sums are of floats, in one order that depends on the split alone: hosts and devices, launches of any
/// size and any permutation of the cache's blocks produce the same bits (with tensor cores all devices of a
/// kind). A row without tokens gives zeros. Blocks outside the cache are left out and flagged, and so are
/// tokens past the end of a table.
///
/// The cache holds elements, or codes with scales in its blocks: keys and values each in `int8`, `int4`,
/// `fp8_e4m3` or `fp4_e2m1`, with one scale of `f32` or `bf16` (of `fp4_e2m1` also `fp8_e4m3`) for a vector,
/// a run of a multiple of 8 values or a channel; int8 and int4 by vector or run may have a zero next to each
/// scale. A value is code x scale, or code x scale + zero, rounded once; with a scale of the
/// block (`has_global`), or else of the caller (`options.scales`), scale is the product of both, rounded
/// once, and so is zero. The outputs have the bits of attention over a cache of `f32` with these values.
/// Where `is_rotated` is set, queries are turned by Hadamard's matrix before.
///
/// With `options.latents` the cache holds records of latents (MLA; `append_mla` writes them), and attention
/// is the absorbed one: a query is [latents | rotary], its head's `W_UK` already applied, its product is with
/// all of a token's record, and the value is the latents of the same record, or all of it
/// (`rotary_in_values`). `out` is [rows][query_heads][value_elements], to which the caller applies `W_UV`.
/// `options.scale` must be set: it is that of the head before absorption (1 / sqrt(192) in DeepSeek-V3),
/// which no record says. `options.scales.keys` points to the outer scale of a record without its own.
/// Everything else composes as above: tables and lists of tokens, windows, shares, parts, holders, ranks.
///
/// @param run        `host_executor` or `device_executor`; all pointers are of its memory.
/// @param tables     of the sequences; their lengths are those after the append.
/// @param queries    [rows][query_heads][head_dim]
/// @param out        [rows][query_heads][value_dim]
/// @param workspace  `attention_workspace_bytes`, aligned to 16.
/// @pre the outputs (`out`, `workspace`, `log_sum_exp`, `out_of_range`) share no byte with anything else
/// @return `errc::no_conversion` for an element that does not match the cache's, or a cache's that tensor
///      cores do not multiply; `errc::out_of_range` for a layer outside the cache, and for vectors of 0 or
///      more than 256 elements; `errc::bad_granularity` for vectors whose number of elements is not a
///      multiple of 8, and for addresses and strides that are not a multiple of 16 bytes, or of 8 elements if
///      these are fewer, and for scales that are not aligned to their type; `errc::unsupported_layout` for
///      codes or scales in other forms than those above, for a rotary part, for a `value_element` of its own
///      without scales, and for a layout of a part of the tokens (`part.cp_size`), of which
///      `paged_attention_part` makes a part, and of latents for a record that is invalid or that the layout
///      does not hold, a scale of 0, and tensor cores;
///      `errc::size_mismatch` for query heads
///      that are 0 or not a multiple of the cache's, `shared` rows that do not divide the rows, shares whose
///      number of tokens is not a multiple of 8, vector lengths that `tensor_cores` does not take, and a
///      cache without values; `errc::block_tokens_differ`; `errc::too_short` for the workspace, for null
///      pointers and tables, and for distances shorter than a vector, or with which vectors of `out` share
///      bytes. Then nothing has begun. Otherwise the result of `run`.
/// @par Complexity   each row's keys and values, read once for each group of four query heads that share
///      them, those of `shared` rows among them, or of eight with tensor cores (from a cache of the device
///      except for the first); 2 x tokens x query_heads x (head_dim + value_dim) multiplications and
///      additions.
/// @par Source   Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, for sums with an
///      unknown maximum; Dao et al., "Flash-Decoding for long-context inference", 2023, for the shares.
template <class Run, class Tables>
  requires bounded_table<Tables> && counted_tables<Tables>
result<void> paged_attention(const Run& run, const Tables& tables, const attention_rows& rows,
                             const batch_vectors& queries, const batch_output& out, const kv_memory& cache,
                             std::uint32_t layer, std::span<std::byte> workspace,
                             const attention_options& options);

/// `paged_attention` of some of each row's tokens, to be merged with the results for the others: those of a
/// range (`attention_rows::begins`, `ends`), or those that a rank holds. `merge_attention` turns all parts
/// into the result of one call over all tokens.
///
/// For any cut of the rows, the merged result is within 1e-6 of the largest value from exact sums with the
/// same weights, if no share (`options.split`) is longer than 1,024 tokens. A longer share adds up its
/// roundings, in one part as in many: 2e-6 after 10,000 tokens, 7e-5 after 100,000. With tensor cores the
/// rounding of the weights is the bound.
///
/// With context parallelism (`cache.layout.part.cp_size`) the tables are this rank's, and `lengths`, `begins`
/// and `ends` are positions of the whole sequence: the kernel determines which of them the rank holds.
/// `window` counts positions of the whole sequence too.
///
/// A row of padding, or of a sequence that does not exist, gives an empty part, like a row without tokens.
///
/// @param part  the output; `options.element` is that of the queries alone.
/// @return as above, with `part.sums` and `part.states` as the names of the outputs; a layout of a part of
///      the tokens is accepted, and `errc::too_short` for missing `rows.lengths`, which such a layout needs.
template <class Run, class Tables>
  requires bounded_table<Tables> && counted_tables<Tables>
result<void> paged_attention_part(const Run& run, const Tables& tables, const attention_rows& rows,
                                  const batch_vectors& queries, const attention_part_output& part,
                                  const kv_memory& cache, std::uint32_t layer, std::span<std::byte> workspace,
                                  const attention_options& options);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/paged_attention_body.hpp>
