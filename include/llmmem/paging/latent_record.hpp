/// @file
/// The bytes of a token of multi-head latent attention (MLA): its latents, its rotary key and their scales in
/// one record, as engines publish it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/siphash.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/latent_forms.hpp>

#include <bit>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace paging {

/// The record of one token in one layer of an MLA cache: from it follow append, gather, attention and
/// fingerprint.
///
///     constexpr auto record = llmmem::paging::fp8_ds_mla;
///     static_assert(record.row_bytes == 656 && record.key_elements() == 576);
///
/// Offsets are bytes of a row. A token's latents and its rotary key are its key; its value is the latents, or
/// the whole key (`rotary_in_values`). A latent is code x scale, rounded once to a float; with an outer scale
/// of the token (`has_outer_scale`), or else of the caller, scale is the product of both, rounded once.
/// Without groups the caller's scale is for latents and for the rotary part, where these are codes.
/// Codes of four bits are two in a byte, the first in its lower half.
///
/// Two writers of one size may differ in floors and rounding: readers agree on their records, caches that
/// compare bits do not. So these rules are fields, and part of the fingerprint.
struct latent_record {
  std::uint32_t latents = 512;  ///< elements (kv_lora_rank)
  std::uint32_t rotary = 64;    ///< elements; 0: there is no rotary part
  dtype latent_element = dtype::bf16;
  dtype rotary_element = dtype::bf16;
  std::uint32_t row_bytes = 1152;  ///< from one token of a block to the next
  std::uint32_t latents_at = 0;
  std::uint32_t rotary_at = 1024;

  std::uint32_t group = 0;  ///< latents that share a scale; 0: there are no scales
  latent_scale scale = latent_scale::none;
  scale_order order = scale_order::linear;
  std::uint32_t scales_at = 0;  ///< in the row, or in the token's bytes after all rows
  std::uint32_t after_rows =
      0;  ///< bytes of each token after all rows of the block; 0: scales are in the row

  /// scale = max(largest size of the group / largest code, floor), rounded. As an e4m3 scale,
  /// 2^-10 or less is rounded to 0 unless upwards: then the codes of the group are 0.
  scale_rounding rounding = scale_rounding::nearest;
  float floor = 0;
  bool is_divided = false;  ///< code = nearest(x / scale); false: nearest(x x (1 / scale))

  bool has_rotary_scale = false;  ///< a float of each token: its largest rotary size / largest code
  std::uint32_t rotary_scale_at = 0;
  bool has_outer_scale = false;  ///< a float of each token: its largest latent size / (largest code x 448)
  std::uint32_t outer_scale_at = 0;

  std::uint32_t pad_at = 0;  ///< bytes that a writer sets to zero: of the row, or of those after all rows
  std::uint32_t pad_bytes = 0;
  std::uint32_t block_multiple = 1;  ///< a block of a layer is padded to a multiple of this many bytes
  bool rotary_in_values = false;     ///< values are whole keys (DeepSeek-V4)

  friend constexpr bool operator==(const latent_record&, const latent_record&) noexcept = default;

  /// Elements that a query multiplies.
  [[nodiscard]] LLMMEM_HD constexpr std::uint32_t key_elements() const noexcept { return latents + rotary; }
  /// Elements of an output.
  [[nodiscard]] LLMMEM_HD constexpr std::uint32_t value_elements() const noexcept {
    return rotary_in_values ? latents + rotary : latents;
  }
  /// Scales of a token.
  [[nodiscard]] LLMMEM_HD constexpr std::uint32_t scales() const noexcept {
    return group == 0 ? 0 : latents / group;
  }
  [[nodiscard]] LLMMEM_HD constexpr std::uint32_t scale_bytes() const noexcept {
    return scale == latent_scale::none ? 0 : scale == latent_scale::f32 ? 4 : 1;
  }
  /// Returns which of a token's places holds scale `s`.
  [[nodiscard]] LLMMEM_HD constexpr std::uint32_t place_of_scale(std::uint32_t s) const noexcept {
    return order == scale_order::linear ? s : (s & 3U) * (scales() / 4) + (s >> 2U);
  }
  /// Bytes of a token without the padding of its block.
  [[nodiscard]] constexpr std::uint64_t token_bytes() const noexcept {
    return std::uint64_t{row_bytes} + after_rows;
  }
  /// Bytes of a block of a layer, with its padding. @pre `block_multiple` is not 0
  [[nodiscard]] constexpr std::uint64_t block_bytes(std::uint32_t block_tokens) const noexcept {
    const std::uint64_t bytes = token_bytes() * block_tokens;
    return (bytes + block_multiple - 1) / block_multiple * block_multiple;
  }

  /// Returns the first fault; `none` if kernels take the record.
  [[nodiscard]] constexpr record_fault fault() const noexcept;
  /// Returns the record itself if it is valid.
  /// @throws argument_error  with `sentence_of` its fault.
  [[nodiscard]] constexpr const latent_record& checked() const;
  /// Equal for records whose bytes mean the same and are written by the same rules. Never 0.
  [[nodiscard]] constexpr std::uint64_t fingerprint() const noexcept;
};

/// Returns the layout of a cache of such records: a plane of bytes, which copies, tiers, files and transfers
/// take as any other. `shape` says layers, `block_tokens`, order, model, part and index keys.
///
/// The record's fingerprint is in `model`, so caches of other records or other writers have other contents.
/// Scales after all rows are a plane of bytes in the block; the padding of a block is a plane of as many
/// bytes of each token, in the place of index keys. With an order that keeps a layer's block together
/// (`layer_first_paired`, `block_first`), a block's bytes are as published.
///
/// @throws argument_error for an invalid record, for padding that is not the same number of bytes of each
///   token, and for padding together with index keys; and as `kv_layout::checked`.
[[nodiscard]] constexpr kv_layout latent_layout(kv_layout shape, const latent_record& record);

/// vLLM's `concat_and_cache_mla` in bf16: 512 latents, 64 rotary elements, 1,152 bytes.
inline constexpr latent_record bf16_mla{};

/// Floats, to compare others with: 2,304 bytes.
inline constexpr latent_record f32_mla{
    .latent_element = dtype::f32, .rotary_element = dtype::f32, .row_bytes = 2304, .rotary_at = 2048};

/// One e4m3 element for each latent and rotary element, with one scale of the caller: 576 bytes. TensorRT-LLM
/// and dense FlashMLA. Its rotary part is rounded like the latents, so its error is the largest of all.
inline constexpr latent_record fp8_mla{
    .latent_element = dtype::fp8_e4m3, .rotary_element = dtype::fp8_e4m3, .row_bytes = 576, .rotary_at = 512};

/// `fp8_ds_mla` as vLLM writes it (`concat_and_cache_ds_mla`): 512 e4m3 codes, four floats, one for 128
/// codes, and the rotary part in bf16: 656 bytes. Scales are at least the least normal float.
inline constexpr latent_record fp8_ds_mla{.latent_element = dtype::fp8_e4m3,
                                          .row_bytes = 656,
                                          .rotary_at = 528,
                                          .group = 128,
                                          .scale = latent_scale::f32,
                                          .scales_at = 512,
                                          .floor = 0x1p-126F,
                                          .is_divided = true};

/// The same record as FlashMLA's own quantiser writes it (`tests/quant.py`): scales are powers of two, of at
/// least 1e-4 before they are rounded up.
inline constexpr latent_record fp8_ds_mla_flashmla{.latent_element = dtype::fp8_e4m3,
                                                   .row_bytes = 656,
                                                   .rotary_at = 528,
                                                   .group = 128,
                                                   .scale = latent_scale::f32,
                                                   .scales_at = 512,
                                                   .rounding = scale_rounding::power_of_two_up,
                                                   .floor = 1e-4F,
                                                   .is_divided = true};

/// DeepSeek-V4 as FlashMLA's quantiser writes it: rows of 448 e4m3 codes and 64 rotary elements in bf16, and
/// after all rows of a block seven powers of two and a byte of zero for each token; 584 bytes a token, blocks
/// padded to a multiple of 576. Values are whole keys, so the caller turns the rotary part of outputs back
/// (ROCm/ATOM #1795).
inline constexpr latent_record fp8_v4_mla{.latents = 448,
                                          .latent_element = dtype::fp8_e4m3,
                                          .row_bytes = 576,
                                          .rotary_at = 448,
                                          .group = 64,
                                          .scale = latent_scale::ue8m0,
                                          .after_rows = 8,
                                          .rounding = scale_rounding::power_of_two_up,
                                          .floor = 1e-4F,
                                          .is_divided = true,
                                          .pad_at = 7,
                                          .pad_bytes = 1,
                                          .block_multiple = 576,
                                          .rotary_in_values = true};

/// NVFP4 of local-inference-lab's vLLM (#82): 512 e2m1 codes, 32 e4m3 scales, 16 bytes of zero, the rotary
/// part in bf16: 432 bytes. The source gives its places; the rounding of scales is assumed to be the nearest.
inline constexpr latent_record nvfp4_ds_mla_432{.latent_element = dtype::fp4_e2m1,
                                                .row_bytes = 432,
                                                .rotary_at = 304,
                                                .group = 16,
                                                .scale = latent_scale::e4m3,
                                                .scales_at = 256,
                                                .floor = 0x1p-9F,
                                                .pad_at = 288,
                                                .pad_bytes = 16};

/// The same with an outer scale of each token and a rotary part in e4m3 with a scale (local-inference-lab
/// vLLM #95, #189): 368 bytes. Rounding as assumed above.
inline constexpr latent_record nvfp4_ds_mla_368{.latent_element = dtype::fp4_e2m1,
                                                .rotary_element = dtype::fp8_e4m3,
                                                .row_bytes = 368,
                                                .rotary_at = 304,
                                                .group = 16,
                                                .scale = latent_scale::e4m3,
                                                .scales_at = 256,
                                                .floor = 0x1p-9F,
                                                .is_divided = true,
                                                .has_rotary_scale = true,
                                                .rotary_scale_at = 288,
                                                .has_outer_scale = true,
                                                .outer_scale_at = 292,
                                                .pad_at = 296,
                                                .pad_bytes = 8};

/// `nvfp4_ds_mla` of vLLM (`nvfp4_ds_mla_cache_kernels.cu`): 512 e2m1 codes, 64 rotary elements in e4m3
/// without a scale, 32 e4m3 scales by fours, rounded up: 352 bytes.
inline constexpr latent_record nvfp4_ds_mla{.latent_element = dtype::fp4_e2m1,
                                            .rotary_element = dtype::fp8_e4m3,
                                            .row_bytes = 352,
                                            .rotary_at = 256,
                                            .group = 16,
                                            .scale = latent_scale::e4m3,
                                            .order = scale_order::by_fours,
                                            .scales_at = 320,
                                            .rounding = scale_rounding::up,
                                            .floor = 0x1p-9F};

}  // namespace paging
}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/latent_record_body.hpp>
