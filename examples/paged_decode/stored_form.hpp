/// @file
/// The forms in which a cache keeps keys and values: their names, and their effect on a vector.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/quantize_groups.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/named_forms.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "paged_decode/decoder.hpp"

namespace paged_decode {

/// Of `paged_cache`.
inline constexpr std::array<kv_form, 5> all_forms{kv_form::f32, kv_form::bf16, kv_form::fp8, kv_form::int8,
                                                  kv_form::int4_by_token};

/// Keys by channel over a block's tokens, values by token and head: of `closing_cache`.
inline constexpr std::array<kv_form, 2> closing_forms{kv_form::int8_by_channel, kv_form::int4_by_channel};

/// Of `paged_cache` too, whose quality `--weights` compares.
inline constexpr std::array<kv_form, 4> further_forms{kv_form::k8v4, kv_form::nvfp4, kv_form::int4_rotated,
                                                      kv_form::int4_by_token_zero};

[[nodiscard]] constexpr std::string_view name_of(kv_form form) noexcept {
  constexpr std::array<std::string_view, all_forms.size() + closing_forms.size() + further_forms.size()>
      names{"f32",
            "bf16",
            "fp8",
            "int8",
            "int4_by_token",
            "int8_by_channel",
            "int4_by_channel",
            "k8v4",
            "nvfp4",
            "int4_rotated",
            "int4_by_token_zero"};
  return names[static_cast<std::size_t>(form)];
}

[[nodiscard]] constexpr llmmem::dtype element_of_form(kv_form form) noexcept {
  using llmmem::dtype;
  constexpr std::array elements{dtype::f32,      dtype::bf16, dtype::fp8_e4m3, dtype::int8,
                                dtype::int4,     dtype::int8, dtype::int4,     dtype::int8,
                                dtype::fp4_e2m1, dtype::int4, dtype::int4};
  static_assert(elements.size() == all_forms.size() + closing_forms.size() + further_forms.size());
  return elements[static_cast<std::size_t>(form)];
}

/// The scale of keys and values in fp8. A power of two moves the range (to 28 here), and rounds nothing.
inline constexpr float fp8_scale = 0.0625F;
/// Elements that share a scale in int8; also the unit of all grouped forms.
inline constexpr std::uint32_t int8_group = 32;

/// Returns whether a form has codes and a scale for each group of a vector.
[[nodiscard]] constexpr bool is_grouped(kv_form form) noexcept {
  return form == kv_form::int8 || form == kv_form::int4_by_token;
}
/// Returns the elements that share a scale: in int4 by token all of a head's, if the kernels have groups of
/// that length.
/// @pre the form is grouped, and `head_dim` a multiple of `int8_group`
[[nodiscard]] constexpr std::uint32_t group_elements(kv_form form, std::uint32_t head_dim) noexcept {
  const bool is_complete = form == kv_form::int4_by_token && (head_dim == 64 || head_dim == 128);
  return is_complete ? head_dim : int8_group;
}

/// Returns the layout of a cache in a form of `all_forms` or `further_forms`.
[[nodiscard]] inline llmmem::kv_layout layout_of_form(llmmem::kv_layout shape, kv_form form) {
  using llmmem::paging::named_form;
  using llmmem::paging::scale_group;
  if (form == kv_form::k8v4) return llmmem::paging::in_form(shape, named_form::k8v4);
  if (form == kv_form::nvfp4) return llmmem::paging::in_form(shape, named_form::nvfp4);
  if (form == kv_form::int4_by_token_zero)
    return llmmem::paging::in_form(shape, named_form::int4_by_token_zero);
  if (form == kv_form::int4_rotated) {
    shape = llmmem::paging::in_form(shape, named_form::int4_by_token);
    shape.key_scales.is_rotated = true;
    return shape;
  }
  shape.element = element_of_form(form);
  if (is_grouped(form)) {
    shape.key_scales = {.group = scale_group::run,
                        .element = llmmem::dtype::f32,
                        .run = group_elements(form, shape.head_dim)};
    shape.value_scales = shape.key_scales;
  }
  return shape;
}

/// Returns the vectors' values after a round trip through a cache of this form.
/// @param head_dim  elements of each vector.
inline void round_to(kv_form form, std::span<float> numbers, std::uint32_t head_dim) {
  using llmmem::dtype;
  if (form == kv_form::bf16) {
    for (float& each : numbers)
      each = llmmem::float_of<dtype::bf16>(llmmem::nearest_of<dtype::bf16>(each));
  } else if (form == kv_form::fp8) {
    for (float& each : numbers) {
      const auto code = llmmem::nearest_of<dtype::fp8_e4m3>(each / fp8_scale);
      each = llmmem::float_of<dtype::fp8_e4m3>(code) * fp8_scale;
    }
  } else if (is_grouped(form)) {
    const dtype code = element_of_form(form);
    const std::uint32_t elements = group_elements(form, head_dim);
    const std::size_t groups = numbers.size() / elements;
    const llmmem::group_shape shape{.rows = groups, .elements = elements};
    const std::uint64_t code_stride = elements * llmmem::bits_of(code) / 8;
    std::vector<std::byte> codes(groups * code_stride);
    std::vector<float> scales(groups);
    const auto values = std::as_writable_bytes(numbers);
    const std::uint64_t value_stride = elements * sizeof(float);
    std::byte* const scale_bytes = std::as_writable_bytes(std::span(scales)).data();
    llmmem::quantize_groups(llmmem::host_executor{}, shape, {values.data(), dtype::f32, value_stride},
                            {codes.data(), code, code_stride}, {scale_bytes, sizeof(float)})
        .value();
    llmmem::dequantize_groups(llmmem::host_executor{}, shape, {codes.data(), code, code_stride},
                              {scale_bytes, sizeof(float)}, {values.data(), dtype::f32, value_stride})
        .value();
  }
}

}  // namespace paged_decode
