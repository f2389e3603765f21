/// @file
/// Appends tokens to a cache of latent records (MLA), and gathers them from it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/latent_record.hpp>
#include <llmmem/result.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Writes the record of each token of a batch: its latents and its rotary key, rounded and scaled by the
/// record's rules (vLLM's `concat_and_cache_ds_mla`, `concat_and_cache_nvfp4_ds_mla`).
///
/// With amax the largest size of a group's values and qmax the largest number of a code (448 of e4m3, 6 of
/// e2m1):
///
///     scale = max(amax / qmax / outer, floor), rounded as the record says
///     code  = nearest(x / (scale x outer)), or nearest(x x (1 / (scale x outer))): `is_divided`
///     outer = the caller's (`options.scales.keys`), or the token's: max(amax of its groups / (qmax x 448),
///             2^-126), of the groups without infinities and NaNs
///
/// A rotary part in codes has max(amax / 448, 2^-126) as its scale, or none: then it saturates at 448, and a
/// NaN stays one. So do latents in codes without groups, after the caller's scale; but e2m1 saturates at 6
/// and has no NaN: it becomes 0. A group with an infinity or a NaN gets a NaN scale and codes of 0: all of
/// it, and nothing else, comes back as NaNs. Padding is set to zeros. Host and device write the same bits.
///
/// Each record depends on its token alone: appended one by one, in chunks or at once, and after a truncation,
/// the bits are the same. Records are copied, tiered and sent as the bytes of `paging::latent_layout`.
///
/// @param run     `host_executor` or `device_executor`; all pointers are of its memory.
/// @param latent  [tokens][latents] of `options.element`: f32, bf16 or f16.
/// @param rotary  [tokens][rotary]; `data` null if the record has no rotary part.
/// @param cache   with a layout by `paging::latent_layout`, or one whose rows have the record's bytes.
/// @pre the batch, the cache and the front's tables share no byte
/// @return `errc::unsupported_layout` for a record that is invalid, or that the layout does not hold;
///      `errc::no_conversion` for another element; `errc::out_of_range`, `errc::no_such_block`,
///      `errc::block_tokens_differ` and `errc::too_short` as `append_kv`; `errc::bad_granularity` for
///      addresses and distances that are not multiples of an element of the batch, or of eight elements of
///      the record. Then nothing has begun. Otherwise the result of `run`.
/// @par Complexity   tokens x elements, read and written once.
template <class Run, token_front Front>
result<void> append_mla(const Run& run, const Front& front, const batch_vectors& latent,
                        const batch_vectors& rotary, const paging::latent_record& record,
                        const kv_memory& cache, std::uint32_t layer, const token_options& options = {});

/// Reads the values of records into rows of f32, bf16 or f16. The errors are those of `append_mla`.
///
/// @pre the outputs share no byte with each other, the cache or the front's tables
template <class Run, token_front Front>
result<void> gather_mla(const Run& run, const Front& front, const batch_output& latent,
                        const batch_output& rotary, const paging::latent_record& record,
                        const kv_memory& cache, std::uint32_t layer, const token_options& options = {});

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/latent_tokens_body.hpp>
