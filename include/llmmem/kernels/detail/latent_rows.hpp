/// @file
/// Records of latents: reads and writes of eight elements of a token, for all kernels on them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/coded_planes.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/latent_record.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Lanes of a token. Each has elements of up to three packs of eight: numbers lane, lane + 32 and lane + 64.
inline constexpr std::uint32_t latent_lanes = 32;
inline constexpr std::uint32_t latent_key_slots = 3;
inline constexpr std::uint32_t latent_value_slots = 2;
static_assert(latent_lanes <= host_lanes::most);

/// A cache of records, for kernels. Made by `latent_plane_of`.
struct latent_plane {
  kv_plane rows{};
  kv_plane after{};              // what each token has after all rows
  const float* outer = nullptr;  // the caller's scale, or null
  paging::latent_record record{};
  std::uint32_t latent_packs = 0;
  std::uint32_t packs = 0;  // of a key
  std::uint32_t latent_pack_bytes = 0;
  std::uint32_t rotary_pack_bytes = 0;
  std::uint32_t group_bits = 0;  // 2^group_bits packs share a scale
};

/// Checks that a layout holds rows of a record, and that lanes can read them whole.
[[nodiscard]] inline result<void> check_latent_layout(const kv_memory& memory,
                                                      const paging::latent_record& record,
                                                      const char* who) noexcept {
  const kv_layout& layout = memory.layout;
  if (const paging::record_fault fault = record.fault(); fault != paging::record_fault::none)
    return failure{errc::unsupported_layout, 10, static_cast<std::uint64_t>(fault), 0, who};
  const kv_vector_run row = layout.vector_run_of(0);
  if (layout.heads != 1 || layout.has_values || row.bytes != record.row_bytes || row.before != 0)
    return failure{errc::unsupported_layout, 11, record.row_bytes,
                   layout.heads != 1 || layout.has_values ? 0 : row.bytes, who};
  std::uint32_t scales = 0;
  if (record.after_rows != 0) {
    const bool has_plane = layout.has(paging::plane_role::key_scale);
    if (has_plane) scales = scale_plane_of(layout, 0);
    const kv_vector_run after = has_plane ? layout.vector_run_of(scales) : kv_vector_run{};
    // Scales that follow each row are part of that row, not after all of them.
    const std::uint64_t bytes = after.before == 0 ? after.bytes : 0;
    if (bytes != record.after_rows || layout.tokens_of(scales) != layout.block_tokens)
      return failure{errc::unsupported_layout, 11, record.after_rows, bytes, who};
  }
  const std::uint64_t unit = std::min<std::uint64_t>(
      std::max(bits_of(record.latent_element), record.rotary == 0 ? 0 : bits_of(record.rotary_element)), 16);
  if (const std::uint32_t width = plane_width(kv_plane_of(memory, 0)); width < unit)
    return failure{errc::bad_granularity, 0, width, unit, who};
  if (scales == 0) return {};
  const std::uint32_t width = plane_width(kv_plane_of(memory, scales));
  if (width < record.scale_bytes())
    return failure{errc::bad_granularity, 0, width, record.scale_bytes(), who};
  return {};
}

/// @pre `check_latent_layout` accepts the memory
[[nodiscard]] inline latent_plane latent_plane_of(const kv_memory& memory,
                                                  const paging::latent_record& record,
                                                  const float* outer) noexcept {
  latent_plane out;
  out.rows = kv_plane_of(memory, 0);
  if (record.after_rows != 0) out.after = kv_plane_of(memory, scale_plane_of(memory.layout, 0));
  out.outer = record.has_outer_scale ? nullptr : outer;
  out.record = record;
  out.latent_packs = record.latents / attention_pack;
  out.packs = record.key_elements() / attention_pack;
  out.latent_pack_bytes = static_cast<std::uint32_t>(bits_of(record.latent_element));
  out.rotary_pack_bytes = static_cast<std::uint32_t>(bits_of(record.rotary_element));
  if (record.group != 0)
    out.group_bits = static_cast<std::uint32_t>(std::countr_zero(record.group / attention_pack));
  return out;
}

/// Where the rows of a layer begin.
struct latent_base {
  std::byte* rows = nullptr;
  std::byte* after = nullptr;
  float outer = 1;
};
[[nodiscard]] LLMMEM_HD inline latent_base base_of(const latent_plane& plane, std::uint64_t layer) noexcept {
  latent_base out;
  out.rows = plane_base(plane.rows, layer);
  if (plane.record.after_rows != 0) out.after = plane_base(plane.after, layer);
  if (plane.outer != nullptr) out.outer = *plane.outer;
  return out;
}

/// The record of a token.
struct latent_row {
  std::byte* row = nullptr;
  std::byte* scales = nullptr;
};
[[nodiscard]] LLMMEM_HD inline latent_row row_at(const latent_plane& plane, const latent_base& base,
                                                 const token_place& token) noexcept {
  latent_row out;
  out.row = base.rows + token.block * plane.rows.strides.block + token.token * plane.rows.strides.token;
  out.scales = plane.record.after_rows == 0 ? out.row
                                            : base.after + token.block * plane.after.strides.block +
                                                  token.token * plane.after.strides.token;
  out.scales += plane.record.scales_at;
  return out;
}

/// The number of a scale's byte, or of its four.
[[nodiscard]] LLMMEM_HD inline float float_of_scale(paging::latent_scale type,
                                                    std::uint32_t stored) noexcept {
  if (type == paging::latent_scale::f32) return float_of_bits(stored);
  if (type == paging::latent_scale::e4m3) return float_of<dtype::fp8_e4m3>(static_cast<std::uint8_t>(stored));
  if (stored == 255) return float_of_bits(0x7FFF'FFFFU);
  return float_of_bits(stored == 0 ? 0x0040'0000U : stored << 23U);  // 2^-127 is subnormal
}

/// Returns what multiplies the codes of a pack.
[[nodiscard]] LLMMEM_HD inline float factor_at(const latent_plane& plane, const latent_row& at, float outer,
                                               std::uint32_t pack) noexcept {
  const paging::latent_record& of = plane.record;
  if (pack >= plane.latent_packs) {
    if (of.has_rotary_scale) return float_of_bits(load_packet<4>(at.row + of.rotary_scale_at).words[0]);
    return of.group == 0 ? outer : 1.0F;
  }
  if (of.group == 0) return outer;
  const std::uint32_t place = of.place_of_scale(pack >> plane.group_bits);
  const std::uint32_t stored = of.scale == paging::latent_scale::f32
                                   ? load_packet<4>(at.scales + std::size_t{4} * place).words[0]
                                   : load_packet<1>(at.scales + place).words[0];
  const float scale = float_of_scale(of.scale, stored);
  const float whole =
      of.has_outer_scale ? float_of_bits(load_packet<4>(at.row + of.outer_scale_at).words[0]) : outer;
  return whole != 1.0F ? product_of(scale, whole) : scale;
}

[[nodiscard]] LLMMEM_HD inline std::byte* pack_at(const latent_plane& plane, const latent_row& at,
                                                  std::uint32_t pack) noexcept {
  if (pack < plane.latent_packs)
    return at.row + plane.record.latents_at + std::uint64_t{pack} * plane.latent_pack_bytes;
  return at.row + plane.record.rotary_at + std::uint64_t{pack - plane.latent_packs} * plane.rotary_pack_bytes;
}

/// Reads the values of a pack of a token's key.
[[nodiscard]] LLMMEM_HD inline attention_floats read_pack(const latent_plane& plane, const latent_row& at,
                                                          float outer, std::uint32_t pack) noexcept {
  const dtype element = pack < plane.latent_packs ? plane.record.latent_element : plane.record.rotary_element;
  const std::byte* const from = pack_at(plane, at, pack);
  attention_floats out{};
  if (element == dtype::f32) {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; i += 4) {
      const packet<16> in = load_packet<16>(from + std::size_t{4} * i);
      LLMMEM_UNROLL
      for (unsigned k = 0; k < 4; ++k)
        out.of[i + k] = float_of_bits(in.words[k]);
    }
    return out;
  }
  if (!is_record_code(element)) {
    const packet<16> in = load_packet<16>(from);
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; ++i)
      out.of[i] = element == dtype::f16 ? float_of<dtype::f16>(element_of<std::uint16_t>(in, i))
                                        : float_of<dtype::bf16>(element_of<std::uint16_t>(in, i));
    return out;
  }
  if (element == dtype::fp8_e4m3) {
    const packet<8> in = load_packet<8>(from);
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; i += 2) {
      const float_pair both = pair_of<dtype::fp8_e4m3>(in, i / 2);
      out.of[i] = both.first;
      out.of[i + 1] = both.second;
    }
  } else {
    const std::uint32_t in = load_packet<4>(from).words[0];
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; ++i)
      out.of[i] = float_of_e2m1(in >> (4 * i));
  }
  const float factor = factor_at(plane, at, outer, pack);
  LLMMEM_UNROLL
  for (float& value : out.of)
    value = product_of(value, factor);
  return out;
}

/// A group's scale as stored, and what its codes are multiplied by; a NaN if the group holds an infinity or a
/// NaN.
struct latent_factor {
  std::uint32_t stored = 0;
  float factor = 0;
};

/// Rounds a scale to the type and by the rule of a record.
[[nodiscard]] LLMMEM_HD inline std::uint32_t stored_scale(const paging::latent_record& of,
                                                          float wanted) noexcept {
  if (of.rounding == paging::scale_rounding::power_of_two_up)
    wanted = float_of_bits((bits_of_float(wanted) + 0x007F'FFFFU) & 0xFF80'0000U);
  if (of.scale == paging::latent_scale::f32) return bits_of_float(wanted);
  if (of.scale == paging::latent_scale::ue8m0) return bits_of_float(wanted) >> 23U;
  std::uint32_t code = nearest_of<dtype::fp8_e4m3>(wanted);
  if (of.rounding == paging::scale_rounding::up && code < 0x7E &&
      float_of<dtype::fp8_e4m3>(static_cast<std::uint8_t>(code)) < wanted)
    ++code;
  return code;
}

/// @param largest  the bits of the largest size of the group's values.
[[nodiscard]] LLMMEM_HD inline latent_factor factor_of_group(const paging::latent_record& of,
                                                             std::uint32_t largest, float outer) noexcept {
  const float nan = float_of_bits(0x7FFF'FFFFU);
  if (largest >= 0x7F80'0000U) {
    const std::uint32_t stored = of.scale == paging::latent_scale::f32    ? 0x7FFF'FFFFU
                                 : of.scale == paging::latent_scale::e4m3 ? 0x7FU
                                                                          : 0xFFU;
    return {stored, nan};
  }
  float wanted = quotient_of(float_of_bits(largest), largest_number(of.latent_element));
  if (outer != 1.0F) wanted = quotient_of(wanted, outer);
  if (!(wanted >= of.floor)) wanted = of.floor;
  latent_factor out;
  out.stored = stored_scale(of, wanted);
  const float scale = float_of_scale(of.scale, out.stored);
  out.factor = outer != 1.0F ? product_of(scale, outer) : scale;
  return out;
}

/// A value as the number that its code stands for.
[[nodiscard]] LLMMEM_HD inline float scaled_down(float value, float factor, bool is_divided) noexcept {
  if (!(factor > 0)) return 0.0F;  // a group of NaNs, or a scale that is no positive number
  if (is_divided) return quotient_of(value, factor);
  return factor < 0x1p-126F ? 0.0F : product_of(value, quotient_of(1.0F, factor));
}

/// Writes a pack of a token's key.
/// @param factor  of codes.
LLMMEM_HD inline void write_pack(const latent_plane& plane, const latent_row& at, std::uint32_t pack,
                                 const attention_floats& values, float factor) noexcept {
  const dtype element = pack < plane.latent_packs ? plane.record.latent_element : plane.record.rotary_element;
  std::byte* const to = pack_at(plane, at, pack);
  if (element == dtype::f32) {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; i += 4)
      store_packet<16>(to + std::size_t{4} * i,
                       packet<16>{{bits_of_float(values.of[i]), bits_of_float(values.of[i + 1]),
                                   bits_of_float(values.of[i + 2]), bits_of_float(values.of[i + 3])}});
    return;
  }
  if (!is_record_code(element)) {
    packet<16> out{};
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; ++i)
      set_element(out, i,
                  element == dtype::f16 ? nearest_of<dtype::f16>(values.of[i])
                                        : nearest_of<dtype::bf16>(values.of[i]));
    return store_packet<16>(to, out);
  }
  // A rotary part without a scale is no group: its NaNs stay its own.
  const bool is_plain = factor == 1.0F;
  std::uint32_t words[2] = {0, 0};
  LLMMEM_UNROLL
  for (unsigned i = 0; i < attention_pack; ++i) {
    const float x = is_plain ? values.of[i] : scaled_down(values.of[i], factor, plane.record.is_divided);
    if (element == dtype::fp8_e4m3) {
      words[i / 4] |= std::uint32_t{nearest_of<dtype::fp8_e4m3>(x)} << (i % 4 * 8);
    } else {
      words[0] |= e2m1_of_float(x) << (i * 4);
    }
  }
  if (element == dtype::fp8_e4m3) return store_packet<8>(to, packet<8>{{words[0], words[1]}});
  store_packet<4>(to, packet<4>{{words[0]}});
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
