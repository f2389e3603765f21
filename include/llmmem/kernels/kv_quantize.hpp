/// @file
/// Quantises full blocks of a paged cache, by channel over a block's tokens or by token, and converts them
/// back.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <span>

namespace llmmem {
inline namespace v0 {

/// Quantises full blocks: from a memory in floats, where the open blocks of sequences are, to a cache in
/// codes, whose blocks hold their scales (`kv_layout::key_scales`, `value_scales`).
///
/// Keys have outliers in a few channels of all tokens; a scale for each channel of a block (KIVI, Liu et al.
/// 2024, arXiv 2402.02750) keeps these apart, and a scale for each token and head does not. Such a scale is
/// known only when the block is full. So a block has two lives:
///
/// - **open**: its tokens are in a small pool in floats, one block for each sequence that grows. `append_kv`
///   writes them there, attention reads them there.
/// - **closed**: when its last token is there, this function writes its codes and scales to the block of the
///   cache. From then on its bytes do not change, so that it can be shared, hashed, moved and saved; scales
///   travel with it in every copy (`copy_kv_blocks`), file and stream.
///
/// A closed block is a function of its tokens' floats alone. Its bits are the same whether the tokens came
/// one by one, in chunks or all at once, in any order of blocks and layers.
///
/// **Truncation** into a closed block reopens it: `dequantize_kv_blocks` writes it to an open block, the
/// tokens that stay have the values that readers saw until then, and later tokens follow. The block is
/// quantised again when it is full. A reopened block need not have the bits of one that was never closed;
/// the codes of int4 by channel stay where the tokens stay.
///
/// **Copy on write**: the last block of a fork is open, and copied with `copy_few_kv_blocks` in the pool. A
/// closed block is never written, so it is shared as long as sequences use it: to write into it after a
/// truncation, reopen it into the writer's own open block. The other owners' bits stay.
///
/// With amax the largest size of a group's values and qmax 7 (int4) or 127 (int8):
///
///     scale = amax / qmax, rounded to the scales' type; at least 2^-126, and 0 where amax is 0
///     code  = nearest(x * (1 / scale)), of two equally near the even one
///
/// Each operation is rounded once, so host and device have the same bits. The restored value code x scale
/// differs from x by at most scale / 2 + 2^-21 * amax, plus the rounding to `bf16` where the target is
/// `bf16`. Rounding a `bf16` scale moves no code past qmax. A group with an infinity or a NaN gets a NaN
/// scale: all of it is restored as NaNs. Two codes of int4 are in a byte, the first in its lower half.
///
/// Forms by token are those of `append_kv`, with the same bits: fp8, NVFP4, runs, zeros, rotated keys, a
/// scale of the block or of the caller.
///
/// A block of B tokens takes 4 + s / B bits per value in int4 by channel, where s are the bits of a scale: 5
/// with `bf16` at 16 tokens, 4.5 at 32.
///
/// @param run    `host_executor` or `device_executor`; all pointers are of its memory.
/// @param to     the cache: keys and values each in codes (`element`, `value_element`). By channel (one
///      element of a head over the block's tokens): `int4` or `int8`, with one scale in `f32` or `bf16`. By
///      vector or run: every form that `append_kv` writes. At any `scale_place`.
/// @param from   the same shape in `bf16` or `f32`, without scales; its order may differ.
/// @param pairs  [n], in the executor's memory: a block of `from`, and the block of `to`. Negative ones are
///      padding.
/// @param scales  the caller's, as `token_options::scales`; of forms by token.
/// @pre blocks of `from` are full; no block of `to` occurs twice; the memories share no byte
/// @return `errc::layout_mismatch` for two shapes: the field, and both numbers; `errc::unsupported_layout`
///      for other forms of scales, a rotary part or index keys; `errc::no_conversion` for other elements;
///      `errc::bad_granularity` for vectors that are not a multiple of 8 elements, and for values or scales
///      that are not aligned to their type (scales of `f32` after an odd number of `bf16` ones);
///      `errc::out_of_range` for layers that do not exist; if there are pairs, `errc::too_short` for null
///      `data` or `pairs`, and `errc::bad_alignment` for a `plane_alignment` that is not a power of two. Then
///      nothing has begun. Otherwise the result of `run`.
/// @par Complexity   values are read twice, the second time from cache; codes and scales are written once. A
///                   launch for each of K and V.
/// @par Thread safety   any number at once, on different blocks.
template <class Run>
result<void> quantize_kv_blocks(const Run& run, const kv_memory& to, const kv_memory& from,
                                std::span<const block_pair> pairs, const block_copy_options& options = {},
                                const kv_scales& scales = {});

/// Converts blocks back: nearest(code x scale), or the largest bf16 for a number beyond that. It reopens a
/// block, or makes floats of a sequence's blocks for attention. Otherwise as `quantize_kv_blocks`; codes and
/// scales from elsewhere are accepted.
///
/// @param to    in `bf16` or `f32`.
/// @param from  the cache in codes.
/// @par Complexity   each code is read once, each value written once; a scale is read once for every 8
///      values (by token) or 8 channels.
template <class Run>
result<void> dequantize_kv_blocks(const Run& run, const kv_memory& to, const kv_memory& from,
                                  std::span<const block_pair> pairs, const block_copy_options& options = {},
                                  const kv_scales& scales = {});

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/kv_quantize_body.hpp>
