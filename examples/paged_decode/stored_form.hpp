/// @file
/// The forms that a cache keeps keys and values in: what each is called, and what becomes of a vector in it.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/quantize_groups.hpp>
#include <llmmem/model/dtype.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "paged_decode/decoder.hpp"

namespace paged_decode {

inline constexpr std::array<kv_form, 4> all_forms{kv_form::f32, kv_form::bf16, kv_form::fp8, kv_form::int8};

[[nodiscard]] constexpr std::string_view name_of(kv_form form) noexcept {
  constexpr std::array<std::string_view, 4> names{"f32", "bf16", "fp8", "int8"};
  return names[static_cast<std::size_t>(form)];
}

[[nodiscard]] constexpr llmmem::dtype element_of_form(kv_form form) noexcept {
  constexpr std::array elements{llmmem::dtype::f32, llmmem::dtype::bf16, llmmem::dtype::fp8_e4m3,
                                llmmem::dtype::int8};
  return elements[static_cast<std::size_t>(form)];
}

/// Of keys and values in fp8. A power of two: it moves the range (to 28 here), and rounds nothing.
inline constexpr float fp8_scale = 0.0625F;
/// Elements that share a scale in int8.
inline constexpr std::uint32_t int8_group = 32;

/// The vectors' numbers as a cache of this form gives them back.
inline void round_to(kv_form form, std::span<float> numbers) {
  using llmmem::dtype;
  if (form == kv_form::bf16) {
    for (float& each : numbers)
      each = llmmem::float_of<dtype::bf16>(llmmem::nearest_of<dtype::bf16>(each));
  } else if (form == kv_form::fp8) {
    for (float& each : numbers) {
      const auto code = llmmem::nearest_of<dtype::fp8_e4m3>(each / fp8_scale);
      each = llmmem::float_of<dtype::fp8_e4m3>(code) * fp8_scale;
    }
  } else if (form == kv_form::int8) {
    const std::size_t groups = numbers.size() / int8_group;
    const llmmem::group_shape shape{.rows = groups, .elements = int8_group};
    std::vector<std::byte> codes(numbers.size());
    std::vector<float> scales(groups);
    const auto values = std::as_writable_bytes(numbers);
    const std::uint64_t value_stride = int8_group * sizeof(float);
    std::byte* const scale_bytes = std::as_writable_bytes(std::span(scales)).data();
    llmmem::quantize_groups(llmmem::host_executor{}, shape, {values.data(), dtype::f32, value_stride},
                            {codes.data(), dtype::int8, int8_group}, {scale_bytes, sizeof(float)})
        .value();
    llmmem::dequantize_groups(llmmem::host_executor{}, shape, {codes.data(), dtype::int8, int8_group},
                              {scale_bytes, sizeof(float)}, {values.data(), dtype::f32, value_stride})
        .value();
  }
}

}  // namespace paged_decode
