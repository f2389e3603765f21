/// @file
/// Element types of safetensors files.
#pragma once

#include <llmmem/config.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// Element types of the format, in its own order: a writer puts tensors of later ones first.
enum class safetensors_type : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64
};
inline constexpr std::size_t safetensors_types = 22;

namespace detail {

struct safetensors_type_row {
  std::string_view name;
  std::uint64_t bits;
};
inline constexpr std::array<safetensors_type_row, safetensors_types> safetensors_type_table{
    {{"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
     {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
     {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
     {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}}};

}  // namespace detail

/// Returns the name in files: `"BF16"`.
[[nodiscard]] inline std::string_view name_of(safetensors_type type) noexcept {
  return detail::safetensors_type_table[static_cast<std::size_t>(type)].name;
}

/// Returns the type with that name in files, if there is one.
[[nodiscard]] inline std::optional<safetensors_type> safetensors_type_of(std::string_view name) noexcept {
  for (std::size_t i = 0; i < safetensors_types; ++i) {
    if (detail::safetensors_type_table[i].name == name) return static_cast<safetensors_type>(i);
  }
  return std::nullopt;
}

/// Returns the bits of one element: 4 and 6 for the smallest.
[[nodiscard]] inline std::uint64_t bits_of(safetensors_type type) noexcept {
  return detail::safetensors_type_table[static_cast<std::size_t>(type)].bits;
}

}  // namespace v0
}  // namespace llmmem
