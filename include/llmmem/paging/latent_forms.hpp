/// @file
/// The vocabulary of records of latents: scales, their rounding and order, and what may be wrong with a
/// record.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace paging {

/// How the scales of groups of latents are stored.
enum class latent_scale : std::uint8_t {
  none,   ///< no scales: elements are the values, times the caller's scale if they are codes
  f32,    ///< four bytes
  e4m3,   ///< one byte
  ue8m0,  ///< one byte, a power of two: 2^(byte - 127); 255 is a NaN
};

/// How a writer rounds a scale to its type.
enum class scale_rounding : std::uint8_t {
  nearest,          ///< of two equally near the even one
  up,               ///< to the next number of the type, so that no code saturates
  power_of_two_up,  ///< to the next power of two
};

/// The order of a token's scales.
enum class scale_order : std::uint8_t {
  linear,
  by_fours,  ///< scale s is number (s mod 4) x (scales / 4) + s / 4: those of every fourth group are adjacent
};

/// What is wrong with a record. `sentence_of` says it in words.
enum class record_fault : std::uint8_t {
  none,
  no_latents,
  element,
  vectors,
  length,
  group,
  scale,
  row,
  overlap,
  alignment,
  block_multiple,
};

/// Returns how to repair a record.
[[nodiscard]] LLMMEM_COLD constexpr const char* sentence_of(record_fault fault) noexcept {
  switch (fault) {
    case record_fault::none:
      return "the record is valid";
    case record_fault::no_latents:
      return "latents is 0; a record holds at least 8";
    case record_fault::element:
      return "latent_element is f32, bf16, f16, fp8_e4m3 or fp4_e2m1, and rotary_element f32, bf16, f16 or "
             "fp8_e4m3; the record has another";
    case record_fault::vectors:
      return "latents and rotary must be multiples of 8: a lane reads eight elements";
    case record_fault::length:
      return "kernels take up to 512 latents, 256 rotary elements and 512 elements of a value; the record "
             "has more";
    case record_fault::group:
      return "group must be a power of two from 8 to 256 that divides latents, and 0 without scales";
    case record_fault::scale:
      return "scales, and a rotary or an outer scale, are of codes: latents of fp8_e4m3 or fp4_e2m1, a "
             "rotary "
             "part of fp8_e4m3; e4m3 scales are of fp4_e2m1; ue8m0 needs power_of_two_up, by_fours a "
             "multiple of 4 scales, an outer scale and after_rows a group; floor is from 0 to 2^100";
    case record_fault::row:
      return "a part of the record ends past row_bytes, or scales past after_rows";
    case record_fault::overlap:
      return "parts of the record share bytes";
    case record_fault::alignment:
      return "the offset of a part, or the distance of rows, is not a multiple of eight elements, or of a "
             "scale";
    case record_fault::block_multiple:
      return "block_multiple is 0; 1 is no padding";
  }
  return "an unknown fault; was it written by a newer version?";
}

}  // namespace paging
}  // namespace v0
}  // namespace llmmem
