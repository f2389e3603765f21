/// @file
/// Errors of kernels: the codes, the meaning of their three numbers, and their texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/latent_forms.hpp>

#include <array>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Returns the text for a name in braces other than the three numbers: formats.
[[nodiscard]] LLMMEM_COLD inline std::string kernels_term(const failure& why, std::string_view name) {
  return std::string(name_of(static_cast<dtype>(name == "wanted type" ? why.wanted : why.found)));
}

/// Returns which part of a layout a kernel does not support.
[[nodiscard]] LLMMEM_COLD constexpr const char* unsupported_layout_sentence(const failure& why) noexcept {
  switch (why.index) {
    case 0:
      return "the kernel takes {wanted} planes, keys and values alone; the layout has {found}, with scales "
             "or index keys (dequantize_kv_blocks makes floats of blocks with scales)";
    case 1:
      return "the kernel takes values of the keys' type, but the layout has another value_element";
    case 2:
      return "the kernel reads a rotary part of the keys' type only, but the layout has a rotary_dim of "
             "{found}";
    case 4:
      return "the kernel writes scales by channel (scale_group 3) for int8 and int4 alone, without a scale "
             "of "
             "the block or of the caller that scales them; the layout has others, of scale_group {found}";
    case 5:
      return "the kernel takes keys and values both in codes (int8, int4, fp8_e4m3 or fp4_e2m1), each with "
             "one "
             "scale of f32 or bf16, or of fp8_e4m3 for fp4_e2m1, for a vector, run or channel (scale_group 1 "
             "to "
             "3), and for int8 and int4 by vector or run a zero point (numbers = 2); plane {wanted} of the "
             "layout has other elements or scales (scale_group {found})";
    case 6:
      return "the kernel writes single tokens, but a scale by channel is known only when its block is full; "
             "append to an open block in bf16 or f32, and close it by quantize_kv_blocks";
    case 10:
      return paging::sentence_of(static_cast<paging::record_fault>(why.wanted));
    case 11:
      return "the record takes one head without values whose rows, and what is after all rows, have {wanted} "
             "bytes a token; the layout has {found}: make it by paging::latent_layout";
    case 12:
      return "attention over latents needs options.scale, the scale of a head before absorption "
             "(1 / sqrt(192) in DeepSeek-V3): the length of a latent does not say it";
    case 13:
      return "tensor cores take records of 512 latents and 64 rotary elements of bf16, the latents in bf16 "
             "or "
             "in e4m3 with a float for each 128 (bf16_mla, fp8_ds_mla); choose "
             "attention_arithmetic::reproducible, or host_vectors with a host_vector_executor";
    case 14:
      return "the kernel copies single tokens, but plane {wanted} of the layout has scales that all tokens "
             "of "
             "a block share (by channel, or of the block); gather_kv the tokens and append_kv them again, "
             "into an open block if scales are by channel";
    case 15:
      return "the lists are of single heads, but all {found} heads of the layout share plane {wanted} "
             "(indexer keys); select_tokens with kv_heads = 1, one list for all heads";
    case 16:
      return "integer dots take keys and values in int8 or int4 with one scale for each vector; plane "
             "{wanted} "
             "of the cache has other elements or scales (scale_group {found}); choose "
             "attention_arithmetic::host_vectors";
    case 17:
      return "the kernel copies tokens of whole sequences, but the layout holds the part of one of {found} "
             "context-parallel ranks (part.cp_size), and what each rank keeps is not interleaved; use "
             "token_lists over the old blocks";
    case 8:
      return "the kernel takes keys that are not rotated, but the layout has key_scales.is_rotated; bounds "
             "of "
             "rotated keys are not bounds of the model's channels";
    default:
      return "the kernel needs all tokens of a sequence; the layout holds the part of one of {found} "
             "context-parallel ranks (part.cp_size): have each rank make a part (paged_attention_part), and "
             "merge them";
  }
}

inline constexpr std::array kernels_errors{
    error_info{.number = 87,
               .name = "no_conversion",
               .wanted = "the `dtype` that was to come out",
               .found = "the `dtype` that comes",
               .sentence = "no kernel converts {found type} to {wanted type}; convert it before the call, or "
                           "store it as {found type}",
               .term = kernels_term},
    error_info{.number = 88,
               .name = "misaligned",
               .index = "part of a kernel's map",
               .wanted = "the alignment it promises",
               .found = "row without it",
               .sentence = "row {found} of part {index} is not aligned to {wanted} bytes, which its map "
                           "promises; let the map's alignment() return less"},
    error_info{.number = 89,
               .name = "lanes_differ",
               .index = "lane of a group",
               .found = "item",
               .sentence = "lanes {index} and 0 have different results for item {found}; make combine() give "
                           "the same result in any order"},
    error_info{.number = 91,
               .name = "no_device_code",
               .wanted = "the compute capability that the kernel needs, 80 for 8.0",
               .found = "the one that it was compiled for",
               .sentence = "the kernel needs compute capability {wanted} and was compiled for {found}; set "
                           "CMAKE_CUDA_ARCHITECTURES (nvcc -arch) to {wanted} or more"},
    error_info{.number = 92,
               .name = "unsupported_layout",
               .index =
                   "what of the layout: 0 planes, 1 value_element, 2 rotary_dim, 3 part.cp_size, 4 and 5 "
                   "scales, 6 scales by channel, 8 a rotation, 10 to 13 latents, "
                   "14 what tokens of a block share, 15 what heads share, 16 codes for integer dots, 17 "
                   "parts of ranks",
               .wanted = "what the kernel takes",
               .found = "what the layout says",
               .sentence_for = unsupported_layout_sentence},
};

}  // namespace detail

namespace errc {

/// No kernel makes that conversion: wanted = the `dtype` of the result, found = the `dtype` of the input.
inline constexpr error_code no_conversion = detail::code_of<87>(detail::kernels_errors);
/// A map promises more alignment than there is: index = part of a kernel's map, wanted = the alignment that
/// it promises, found = row without it.
inline constexpr error_code misaligned = detail::code_of<88>(detail::kernels_errors);
/// A lane's result differs from that of lane 0: index = lane of a group, found = item.
inline constexpr error_code lanes_differ = detail::code_of<89>(detail::kernels_errors);
/// A kernel was not compiled for this device: wanted = the compute capability that the kernel needs, 80 for
/// 8.0, found = the one that it was compiled for.
inline constexpr error_code no_device_code = detail::code_of<91>(detail::kernels_errors);
/// A kernel does not support caches of that layout: index = the part of it, 0 its planes, 1 `value_element`,
/// 2 `rotary_dim`, 3 `part.cp_size`, 4 and 5 its scales, 6 scales by channel, 8 `is_rotated`,
/// 10 a record of latents (wanted = its `record_fault`), 11 a layout without its rows, 12 a scale of 0, 13
/// tensor cores over latents, 14 scales that the tokens of a block share, 15 vectors that heads share, 16
/// codes for integer dots, 17 the part of one of several ranks;
/// wanted = what the kernel supports, found = what the layout says.
inline constexpr error_code unsupported_layout = detail::code_of<92>(detail::kernels_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
