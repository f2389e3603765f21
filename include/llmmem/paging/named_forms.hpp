/// @file
/// Names of common forms of keys and values, and the layouts that they are.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_forms.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <cstdint>
#include <string_view>

namespace llmmem {
inline namespace v0 {
namespace paging {

/// The forms of `in_form`. The comments say the bits of a value in heads of 128 elements, and in blocks of 32
/// tokens where scales are by channel.
enum class named_form : std::uint8_t {
  int8_by_token,     ///< keys and values in int8, a scale of f32 for each vector: 8.25 bits
  int4_by_token,     ///< keys and values in int4, a scale of f32 for each vector: 4.25 bits
  k8v4,              ///< keys in int8 and values in int4, a scale of f32 for each vector: 6.25 bits
  nvfp4,             ///< e2m1, a scale of e4m3 for each 16 values, and the caller's scale for all: 4.5 bits
  nvfp4_with_scale,  ///< the same, and a scale of f32 for each block in the block
  int8_by_channel,   ///< int8, of keys a scale of bf16 for each channel, of values for each vector: 8.3 bits
  int4_by_channel,   ///< the same in int4: 4.3 bits
  /// Keys and values in int4, a scale and a zero of bf16 for each vector: 4.25 bits. The codes -8 to 7 take
  /// the whole distance from a vector's least value to its largest (KIVI, HQQ); those of `int4_by_token`, -7
  /// to 7, are symmetric about 0.
  int4_by_token_zero,
};

/// The number of names.
inline constexpr std::uint32_t named_form_count = 8;

/// Returns the name as tables write it.
[[nodiscard]] constexpr std::string_view name_of(named_form form) noexcept {
  constexpr std::string_view names[] = {"int8_by_token",   "int4_by_token",     "k8v4",
                                        "nvfp4",           "nvfp4_with_scale",  "int8_by_channel",
                                        "int4_by_channel", "int4_by_token_zero"};
  return names[static_cast<std::size_t>(form)];
}

/// Returns a layout of the same shape, order and part in a form. By token, `append_kv` writes single tokens;
/// by channel, `quantize_kv_blocks` writes full blocks.
///
/// Keys turned by Hadamard's matrix (`scale_form::is_rotated`) are an option of every form by token:
///
///     kv_layout cache = paging::in_form(shape, paging::named_form::int4_by_token);
///     cache.key_scales.is_rotated = true;
///
/// O(1).
[[nodiscard]] constexpr kv_layout in_form(kv_layout shape, named_form form) noexcept {
  constexpr scale_form by_vector{.group = scale_group::vector, .element = dtype::f32};
  constexpr scale_form by_sixteen{.group = scale_group::run, .element = dtype::fp8_e4m3, .run = 16};
  constexpr scale_form by_channel{.group = scale_group::channel, .element = dtype::bf16};
  constexpr scale_form by_short_vector{.group = scale_group::vector, .element = dtype::bf16};
  shape.value_element = {};
  shape.key_scales = by_vector;
  shape.value_scales = by_vector;
  switch (form) {
    case named_form::int8_by_token:
      shape.element = dtype::int8;
      break;
    case named_form::int4_by_token:
      shape.element = dtype::int4;
      break;
    case named_form::k8v4:
      shape.element = dtype::int8;
      if (shape.has_values) shape.value_element = dtype::int4;
      break;
    case named_form::nvfp4:
    case named_form::nvfp4_with_scale:
      shape.element = dtype::fp4_e2m1;
      shape.key_scales = by_sixteen;
      shape.key_scales.has_global = form == named_form::nvfp4_with_scale;
      shape.value_scales = shape.key_scales;
      break;
    case named_form::int8_by_channel:
    case named_form::int4_by_channel:
      shape.element = form == named_form::int8_by_channel ? dtype::int8 : dtype::int4;
      shape.key_scales = by_channel;
      shape.value_scales = by_short_vector;
      break;
    case named_form::int4_by_token_zero:
      shape.element = dtype::int4;
      shape.key_scales = {.group = scale_group::vector, .element = dtype::bf16, .numbers = 2};
      shape.value_scales = shape.key_scales;
      break;
  }
  if (!shape.has_values) shape.value_scales = {};
  return shape;
}

}  // namespace paging
}  // namespace v0
}  // namespace llmmem
