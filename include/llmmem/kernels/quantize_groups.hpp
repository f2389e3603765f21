/// @file
/// Quantises groups of elements to int8, fp8 or int4, each group with its own scale, and converts them back.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// The number of groups: rows of equally many groups.
struct group_shape {
  std::uint64_t rows = 0;
  std::uint32_t groups = 1;      ///< groups of a row, contiguous
  std::uint32_t elements = 128;  ///< elements of a group: 32, 64 or 128
};

/// Rows of elements: values, or their codes.
template <class Byte>
  requires std::same_as<std::remove_const_t<Byte>, std::byte>
struct group_rows {
  Byte* data = nullptr;
  /// Values are `f32`, `bf16` or `f16`. Codes are `int8`, `fp8_e4m3` or `int4`: two's complement, two in a
  /// byte, the first in its lower half.
  dtype element = dtype::bf16;
  std::uint64_t row_stride = 0;  ///< bytes from one row to the next
};

/// The contiguous scales of a row's groups: in their own array (`row_stride` 4 x groups), or after the codes
/// of each row (`data` = the codes' + a row's bytes of them, `row_stride` the codes').
template <class Byte>
  requires std::same_as<std::remove_const_t<Byte>, std::byte>
struct group_scales {
  Byte* data = nullptr;          ///< floats
  std::uint64_t row_stride = 0;  ///< bytes from one row's to the next's
};

/// Quantises groups of elements symmetrically (vLLM's `per_token_group_quant`, DeepSpeed's
/// `ds_quantizer`): a group's largest element becomes the largest code.
///
/// With amax the largest size of a group's elements and qmax 127, 448 (e4m3) or 7:
///
///     scale = max(amax / qmax, 2^-126), or 0 where amax is 0
///     code  = nearest(x * (1 / scale)), of two equally near the even one
///
/// Each operation is rounded once to a float, the reciprocal too, so host and device have the same bits (a
/// device whose code is compiled with `-use_fast_math` treats the least floats as zeros). The restored value,
/// code x scale, differs from x by at most half a step, scale / 2, of int8 and int4, and by at most half of
/// the distance between neighbouring codes of e4m3; plus 2^-21 of amax for the roundings. A scale below
/// 2^-126, the least whose reciprocal is a float, becomes 2^-126: the bound holds.
///
/// A group of zeros has the scale 0 and codes of 0. A group with an infinite or NaN element has a NaN for its
/// scale, so all of it is restored as NaNs: a broken value does not become a plausible one, and the
/// neighbouring groups are unaffected. (Its codes are 0 in int8 and int4; in e4m3 they are zeros, and NaNs
/// where the elements were not finite.)
///
/// @param run  `host_executor` or `device_executor`; all pointers are of its memory.
/// @pre the outputs overlap no other memory of the call
/// @return `errc::no_conversion` for other types; `errc::out_of_range` for groups of another length;
///      `errc::too_short` for a null pointer, or for a stride shorter than a row; `errc::bad_granularity` for
///      values or scales at addresses or strides that are not multiples of an element. Then nothing has
///      begun. Otherwise the result of `run`.
/// @par Complexity   each value is read once, each code and scale written once. Accesses are of 16 bytes of
///      values and as many elements of codes. Where addresses or strides are not multiples of that, lanes
///      exchange the bytes between aligned accesses: about twice the instructions.
/// @par Thread safety   any number at once, on different bytes.
/// @par Source   Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021 (arXiv 2110.02861);
///      Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023
///      (arXiv 2306.10209); Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv 2209.05433).
template <class Run>
result<void> quantize_groups(const Run& run, const group_shape& shape,
                             const group_rows<const std::byte>& values, const group_rows<std::byte>& codes,
                             const group_scales<std::byte>& scales);

/// Converts codes to values: nearest(code x scale). Otherwise as `quantize_groups`; codes and scales from
/// elsewhere are accepted: a scale may be any float.
///
/// @par Complexity   each code is read once, each value written once, at most 16 bytes per access; a scale is
///      read for each 16 bytes of values.
template <class Run>
result<void> dequantize_groups(const Run& run, const group_shape& shape,
                               const group_rows<const std::byte>& codes,
                               const group_scales<const std::byte>& scales,
                               const group_rows<std::byte>& values);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/quantize_groups_body.hpp>
