/// @file
/// Merges parts of attention: the results of ranges, ranks, devices or other kernels become the attention to
/// all tokens.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/attention_parts.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The output of a merge, the same as of `paged_attention` over all tokens.
template <log_base Base = log_base::e>
struct merged_attention {
  batch_output out{};          ///< [rows][query_heads][value_dim]
  dtype element = dtype::f32;  ///< the type of `out`: f32, bf16 or f16
  /// -infinity for a row whose parts are all empty, NaN if a product was a NaN.
  log_sums<Base> log_sum_exp{};
  /// [rows], each row's sequence; a negative one is padding, whose outputs are not touched. Null: no padding.
  const std::int32_t* sequences = nullptr;
  /// [query_heads], a natural logit that takes weight and has no value (attention sinks as gpt-oss learns
  /// them). It counts once, after all parts, and in the logarithm too. Null: none.
  const float* sinks = nullptr;
};

/// out[row][head] = the sums of all parts, each times 2^(its largest product - the largest of all), divided
/// by the sum of their totals, weighted in the same way. One launch; may be captured in a graph.
///
/// - Parts are added in the order of `parts`, regardless of the order of arrival: hosts and devices, and
///   launches of any size, produce the same bits.
/// - An empty part (`attention_state`) is not read, nor is one whose weight rounds to 0 (2^-126 of the
///   largest, or less): its sums may be anything. A row in which no part counts is zeros, and its logarithm
///   -infinity.
/// - A single part's sums are divided, and nothing else.
/// - The merge adds at most 4e-7 of the largest value, for products of any size and any number of parts.
///
/// @param run    `host_executor` or `device_executor`; all pointers are of its memory, except `parts` itself,
///      which is read before the call returns.
/// @param parts  all of the same rows, heads and elements: `shape`.
/// @pre the outputs share no byte with anything else
/// @return `errc::out_of_range` for more than `max_merged_parts`; `errc::no_conversion` for an element that
///      is not f32, bf16 or f16; `errc::size_mismatch` for a shape without heads or elements;
///      `errc::bad_granularity` for vectors whose number of elements is not a multiple of 8, and for
///      addresses and distances that are not multiples of their unit (16 bytes for vectors, 8 for states, 4
///      for logarithms); `errc::too_short` for null pointers, and for distances shorter than a vector, or
///      with which written vectors share bytes. Then nothing has begun. Otherwise the result of `run`.
/// @par Complexity   each part read once.
/// @par Source   Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
template <class Run, log_base Base>
result<void> merge_attention(const Run& run, const attention_part_shape& shape,
                             std::span<const attention_part> parts, const merged_attention<Base>& out);

/// The same, but the result is a part again: for more parts than one call takes, and for a rank that holds
/// several and sends one. Its errors are those above; for `out` the names are `out.sums` and `out.states`.
template <class Run>
result<void> merge_attention(const Run& run, const attention_part_shape& shape,
                             std::span<const attention_part> parts, const attention_part_output& out);

/// The results of another library's kernel for some tokens: normalised outputs, and the logarithms of their
/// sums of exponentials, to the base in the type.
template <log_base Base>
struct foreign_attention {
  batch_vectors out{};  ///< [rows][query_heads][value_dim]
  dtype element = dtype::f32;
  log_sums<Base, const float> log_sum_exp{};
  /// [rows], how many tokens a row attended to: without any the part is empty, regardless of the logarithm.
  /// Null: unknown.
  const std::int32_t* tokens = nullptr;
};

/// Makes a part of these results, which merges as any other. One launch.
///
/// Kernels write an infinity of either sign or a NaN for a row without tokens, and these make an empty part.
/// So the function does not detect a NaN that comes from bad data. The logarithm's own digits bound the
/// part's accuracy: at 512 half a unit in the last place is 3e-5.
///
/// @param out  null `out.sums` if `of.out` are floats to use directly: then only the states are written, and
///      the part to merge is `{of.out, out.states}`.
/// @return as `merge_attention`; `errc::no_conversion` for null `out.sums` with other elements than f32.
template <class Run, log_base Base>
result<void> import_attention(const Run& run, const attention_part_shape& shape,
                              const foreign_attention<Base>& of, const attention_part_output& out);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/merge_attention_body.hpp>
