/// @file
/// Elements of any small type, one at a time, by the definition of their formats: what kernels are held to.
#pragma once

#include <llmmem/model/bf16.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/model/f16.hpp>
#include <llmmem/model/fp8.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace llmmem_tests {

[[nodiscard]] inline std::size_t element_bytes(llmmem::dtype element) {
  return std::min<std::size_t>(llmmem::bits_of(element) / 8, sizeof(std::uint32_t));
}

[[nodiscard]] inline float load_element(llmmem::dtype element, const std::byte* from) {
  using namespace llmmem;
  std::uint32_t bits = 0;
  std::memcpy(&bits, from, element_bytes(element));
  if (element == dtype::bf16) bits = f32_from_bf16_bits(static_cast<std::uint16_t>(bits));
  if (element == dtype::f16) bits = f32_from_f16_bits(static_cast<std::uint16_t>(bits));
  if (element == dtype::fp8_e4m3) bits = f32_from_e4m3_bits(static_cast<std::uint8_t>(bits));
  return std::bit_cast<float>(bits);
}

inline void store_element(llmmem::dtype element, std::byte* to, float value) {
  using namespace llmmem;
  auto bits = std::bit_cast<std::uint32_t>(value);
  if (element == dtype::bf16) bits = bf16_from_f32_bits(bits);
  if (element == dtype::f16) bits = f16_from_f32_bits(bits);
  if (element == dtype::fp8_e4m3) bits = e4m3_from_f32_bits(bits);
  std::memcpy(to, &bits, element_bytes(element));
}

}  // namespace llmmem_tests
