/// @file
/// The checks and the fingerprint of `latent_record`, and its layout.
#pragma once

#include <llmmem/paging/latent_record.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <string>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A part of a row, in bytes.
struct record_bytes {
  std::uint64_t from = 0;
  std::uint64_t bytes = 0;
  std::uint64_t unit = 1;  // divides its address
};

/// Whether records hold codes of that type, which a scale multiplies.
[[nodiscard]] LLMMEM_HD constexpr bool is_record_code(dtype element) noexcept {
  return element == dtype::fp8_e4m3 || element == dtype::fp4_e2m1;
}

/// Checks that parts are inside `size` bytes, aligned, and share none.
[[nodiscard]] constexpr paging::record_fault check_places(const record_bytes* parts, std::size_t count,
                                                          std::uint64_t size) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    if (parts[i].bytes == 0) continue;
    if (parts[i].from + parts[i].bytes > size) return paging::record_fault::row;
    if (parts[i].from % parts[i].unit != 0 || size % parts[i].unit != 0)
      return paging::record_fault::alignment;
    for (std::size_t k = 0; k < i; ++k) {
      if (parts[k].bytes != 0 && parts[i].from < parts[k].from + parts[k].bytes &&
          parts[k].from < parts[i].from + parts[i].bytes)
        return paging::record_fault::overlap;
    }
  }
  return paging::record_fault::none;
}

}  // namespace detail

namespace paging {

constexpr record_fault latent_record::fault() const noexcept {
  if (latents == 0) return record_fault::no_latents;
  const auto is_wide = [](dtype element) {
    return element == dtype::bf16 || element == dtype::f16 || element == dtype::f32;
  };
  if (!is_wide(latent_element) && !detail::is_record_code(latent_element)) return record_fault::element;
  if (!is_wide(rotary_element) && rotary_element != dtype::fp8_e4m3) return record_fault::element;
  if (latents % 8 != 0 || rotary % 8 != 0) return record_fault::vectors;
  if (latents > 512 || rotary > 256 || value_elements() > 512) return record_fault::length;
  const bool has_groups = group != 0;
  if (has_groups != (scale != latent_scale::none) || scale > latent_scale::ue8m0) return record_fault::group;
  if (has_groups && (!std::has_single_bit(group) || group < 8 || group > 256 || latents % group != 0))
    return record_fault::group;
  const bool is_coded = detail::is_record_code(latent_element);
  if ((has_groups || has_outer_scale) && !is_coded) return record_fault::scale;
  if (has_outer_scale && !has_groups) return record_fault::scale;
  if (scale == latent_scale::e4m3 && latent_element != dtype::fp4_e2m1) return record_fault::scale;
  if (scale == latent_scale::ue8m0 && rounding != scale_rounding::power_of_two_up) return record_fault::scale;
  if (has_rotary_scale && (rotary == 0 || rotary_element != dtype::fp8_e4m3)) return record_fault::scale;
  if (order > scale_order::by_fours || rounding > scale_rounding::power_of_two_up) return record_fault::scale;
  if (order == scale_order::by_fours && scales() % 4 != 0) return record_fault::scale;
  if (!(floor >= 0) || floor > 0x1p100F) return record_fault::scale;
  if (after_rows != 0 && !has_groups) return record_fault::scale;
  if (block_multiple == 0) return record_fault::block_multiple;
  const bool is_after = after_rows != 0;
  const auto bytes_of_elements = [](std::uint64_t count, dtype element) {
    return count * bits_of(element) / 8;
  };
  // A lane reads eight elements at once: as many bytes as an element has bits, 16 with each access.
  const auto unit_of = [](dtype element) { return bits_of(element) < 16 ? bits_of(element) : 16; };
  const detail::record_bytes scale_part{scales_at, std::uint64_t{scales()} * scale_bytes(),
                                        scale_bytes() == 0 ? 1 : scale_bytes()};
  const detail::record_bytes pad_part{pad_at, pad_bytes, 1};
  const detail::record_bytes row[] = {
      {latents_at, bytes_of_elements(latents, latent_element), unit_of(latent_element)},
      {rotary_at, bytes_of_elements(rotary, rotary_element), unit_of(rotary_element)},
      is_after ? detail::record_bytes{} : scale_part,
      is_after ? detail::record_bytes{} : pad_part,
      {rotary_scale_at, has_rotary_scale ? 4U : 0U, 4},
      {outer_scale_at, has_outer_scale ? 4U : 0U, 4}};
  if (const record_fault found = detail::check_places(row, std::size(row), row_bytes);
      found != record_fault::none)
    return found;
  if (!is_after) return record_fault::none;
  const detail::record_bytes after[] = {scale_part, pad_part};
  return detail::check_places(after, std::size(after), after_rows);
}

constexpr const latent_record& latent_record::checked() const {
  const record_fault found = fault();
  if (found == record_fault::none) return *this;
  throw argument_error(std::string("latent_record: ") + sentence_of(found));
}

constexpr std::uint64_t latent_record::fingerprint() const noexcept {
  // Stored with caches: the list never changes, a later field joins only where it is set. A field without
  // meaning here counts as 0.
  const bool has_rotary = rotary != 0;
  const bool has_groups = group != 0;
  const bool has_codes =
      detail::is_record_code(latent_element) || (has_rotary && detail::is_record_code(rotary_element));
  // Up to four scales have one order, and a float needs no rounding up.
  const bool has_order = scales() > 4;
  const bool is_rounded = has_groups && (scale != latent_scale::f32 || rounding != scale_rounding::up);
  const std::uint64_t words[] = {1,
                                 latents,
                                 rotary,
                                 static_cast<std::uint64_t>(latent_element),
                                 has_rotary ? static_cast<std::uint64_t>(rotary_element) : 0U,
                                 row_bytes,
                                 latents_at,
                                 has_rotary ? rotary_at : 0U,
                                 group,
                                 static_cast<std::uint64_t>(scale),
                                 has_order ? static_cast<std::uint64_t>(order) : 0U,
                                 has_groups ? scales_at : 0U,
                                 after_rows,
                                 is_rounded ? static_cast<std::uint64_t>(rounding) : 0U,
                                 has_groups && floor != 0 ? std::bit_cast<std::uint32_t>(floor) : 0U,
                                 has_codes && is_divided ? 1U : 0U,
                                 has_rotary_scale ? 1U + rotary_scale_at : 0U,
                                 has_outer_scale ? 1U + outer_scale_at : 0U,
                                 pad_bytes != 0 ? pad_at : 0U,
                                 pad_bytes,
                                 block_multiple,
                                 rotary_in_values ? 1U : 0U};
  detail::siphash_state<2, 4> state({.low = 0x6C61'7465'6E74'2072ULL, .high = 0x6563'6F72'6431ULL});
  for (const std::uint64_t word : words)
    state.absorb(word);
  return state.finish(0, sizeof(words)).low | 1U;
}

constexpr kv_layout latent_layout(kv_layout shape, const latent_record& record) {
  static_cast<void>(record.checked());
  detail::siphash_state<2, 4> state({.low = 0x6C61'7465'6E74'206DULL, .high = 0x6F64'656CULL});
  state.absorb(record.fingerprint());
  state.absorb(shape.model);
  shape.model = state.finish(0, 2 * sizeof(std::uint64_t)).low | 1U;
  shape.heads = 1;
  shape.head_dim = record.row_bytes;
  shape.value_dim = 0;
  shape.has_values = false;
  shape.element = dtype::int8;
  shape.key_scales = {};
  if (record.after_rows != 0)
    shape.key_scales = {.group = scale_group::vector,
                        .element = dtype::int8,
                        .numbers = record.after_rows,
                        .place = scale_place::in_block};
  shape.rotary_dim = 0;
  const std::uint64_t padding =
      record.block_bytes(shape.block_tokens) - record.token_bytes() * shape.block_tokens;
  if (padding != 0) {
    if (shape.index_dim != 0)
      throw argument_error(
          "latent_layout: index keys together with a padded block; keep index keys in a cache of their own");
    if (padding % shape.block_tokens != 0)
      throw argument_error("latent_layout: the padding of a block, " + std::to_string(padding) +
                           " bytes, is not the same for each of its " + std::to_string(shape.block_tokens) +
                           " tokens; take another block_tokens, or block_multiple 1");
    shape.index_dim = static_cast<std::uint32_t>(padding / shape.block_tokens);
    shape.index_element = dtype::int8;
    shape.index_scales = {};
  }
  return shape.checked();
}

}  // namespace paging
}  // namespace v0
}  // namespace llmmem
