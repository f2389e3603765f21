/// @file
/// Checks of layouts in codes, and their planes for kernels.
#pragma once

#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/detail/kv_form_checks.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns the alignment of all vectors of a plane.
[[nodiscard]] inline std::uint32_t plane_width(const kv_plane& of) noexcept {
  const std::uint64_t base =
      of.layer_table != nullptr ? of.alignment : reinterpret_cast<std::uintptr_t>(of.data);
  return alignment_of(base, of.strides.layer, of.strides.block, of.strides.token, of.strides.head);
}

/// Returns the number of the plane of a role. @pre the layout has one
[[nodiscard]] inline std::uint32_t plane_of_role(const kv_layout& codes, paging::plane_role wanted) noexcept {
  std::uint32_t at = 0;
  while (codes.role_of(at) != wanted)
    ++at;
  return at;
}
/// Returns the number of the plane that holds the scales of plane `p`.
[[nodiscard]] inline std::uint32_t scale_plane_of(const kv_layout& codes, std::uint32_t p) noexcept {
  return plane_of_role(codes, p == 0 ? paging::plane_role::key_scale : paging::plane_role::value_scale);
}
[[nodiscard]] constexpr const paging::scale_form& scales_of_plane(const kv_layout& codes,
                                                                  std::uint32_t p) noexcept {
  return p == 0 ? codes.key_scales : codes.value_scales;
}

/// Whether keys or values are codes with scales in the block.
[[nodiscard]] constexpr bool has_codes(const kv_layout& layout) noexcept {
  return layout.has(paging::plane_role::key_scale) || layout.has(paging::plane_role::value_scale);
}

/// Checks that a layout in codes is one that kernels on single tokens take: each plane with a scale for a
/// vector, a run or a channel.
[[nodiscard]] inline result<void> check_codes(const kv_layout& layout, const char* who) noexcept {
  using paging::scale_group;
  if (layout.has(paging::plane_role::rotary))
    return failure{errc::unsupported_layout, 2, 0, layout.rotary_dim, who};
  for (std::uint32_t p = 0; p < layout.kv_planes(); ++p) {
    const dtype code = layout.element_of(p);
    const paging::scale_form& scales = scales_of_plane(layout, p);
    const bool is_code =
        code == dtype::int8 || code == dtype::int4 || code == dtype::fp8_e4m3 || code == dtype::fp4_e2m1;
    // Integers have no code for what a scale that was rounded down leaves beyond the largest.
    const bool is_scale = scales.element == dtype::f32 || scales.element == dtype::bf16 ||
                          (scales.element == dtype::fp8_e4m3 && code == dtype::fp4_e2m1);
    const bool is_integer = code == dtype::int8 || code == dtype::int4;
    const bool has_numbers =
        scales.numbers == 1 || (scales.numbers == 2 && is_integer && scales.group != scale_group::channel);
    if (!is_code || scales.group == scale_group::none || !is_scale || !has_numbers)
      return failure{errc::unsupported_layout, 5, p, static_cast<std::uint64_t>(scales.group), who};
    if (scales.group == scale_group::run && (scales.run == 0 || scales.run % attention_pack != 0))
      return failure{errc::bad_granularity, p, scales.run, attention_pack, who};
  }
  return {};
}

/// Checks that kernels can read the scales whole. Codes may be at any address.
[[nodiscard]] inline result<void> check_code_places(const kv_memory& memory, const char* who) noexcept {
  for (std::uint32_t p = 0; p < memory.layout.kv_planes(); ++p) {
    const std::uint32_t scale = scale_bytes_of(scales_of_plane(memory.layout, p).element);
    const std::uint32_t width = plane_width(kv_plane_of(memory, scale_plane_of(memory.layout, p)));
    if (width < scale) return failure{errc::bad_granularity, p, width, scale, who};
    if (!scales_of_plane(memory.layout, p).has_global) continue;
    const auto role = p == 0 ? paging::plane_role::key_global : paging::plane_role::value_global;
    const std::uint32_t found = plane_width(kv_plane_of(memory, plane_of_role(memory.layout, role)));
    if (found < sizeof(float)) return failure{errc::bad_granularity, p, found, sizeof(float), who};
  }
  return {};
}

/// Checks that vectors of codes fit the lanes of a kernel.
[[nodiscard]] inline result<void> check_code_vectors(const kv_layout& layout, const char* who) noexcept {
  constexpr std::uint64_t most = 256;
  for (std::uint32_t p = 0; p < layout.kv_planes(); ++p) {
    const std::uint64_t elements = layout.vector_elements(p);
    if (elements == 0 || elements > most) return failure{errc::out_of_range, p, elements, most, who};
    if (auto fits = whole(elements, attention_pack, who); !fits) return fits;
  }
  return {};
}

/// Checks that a kernel can write single tokens of a layout in codes.
[[nodiscard]] inline result<void> check_written_codes(const kv_layout& layout, const char* who) noexcept {
  for (std::uint32_t p = 0; p < layout.kv_planes(); ++p) {
    const paging::scale_form& scales = scales_of_plane(layout, p);
    if (scales.group == paging::scale_group::channel)
      return failure{errc::unsupported_layout, 6, p, static_cast<std::uint64_t>(scales.group), who};
    if (scales.group == paging::scale_group::run && !std::has_single_bit(scales.run))
      return failure{errc::bad_granularity, p, scales.run, std::bit_floor(scales.run), who};
  }
  return {};
}

/// Returns a plane of codes. @pre `check_codes` accepts the layout
[[nodiscard]] inline coded_plane coded_plane_of(const kv_memory& memory, std::uint32_t p,
                                                const kv_scales& global) noexcept {
  const kv_layout& layout = memory.layout;
  const paging::scale_form& scales = scales_of_plane(layout, p);
  const auto packs = static_cast<std::uint32_t>(layout.vector_elements(p) / attention_pack);
  coded_plane out;
  out.codes = kv_plane_of(memory, p);
  out.scales = kv_plane_of(memory, scale_plane_of(layout, p));
  out.code = layout.element_of(p);
  out.scale = scales.element;
  out.is_by_channel = scales.group == paging::scale_group::channel;
  out.has_global = scales.has_global;
  out.has_zero = scales.numbers == 2;
  if (scales.has_global)
    out.globals = kv_plane_of(memory, plane_of_role(layout, p == 0 ? paging::plane_role::key_global
                                                                   : paging::plane_role::value_global));
  out.global = p == 0 ? global.keys : global.values;
  out.is_global_by_head = global.is_by_head;
  out.run =
      divider(scales.group == paging::scale_group::run ? scales.run / attention_pack : std::max(packs, 1U));
  out.code_width = std::min(plane_width(out.codes), out.pack_bytes());
  out.scale_width = std::min(plane_width(out.scales), 16U);
  if (scales.is_rotated) {
    out.rotated_packs = packs & (~packs + 1U);
    out.rotation = 1.0F / __builtin_sqrtf(static_cast<float>(out.rotated_packs * attention_pack));
  }
  return out;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
