/// @file
/// Conversions of e4m3 on a device: by its instructions from compute capability 8.9 on, else by a few integer
/// instructions, because CUDA's own conversions take some forty instructions and branch.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

#if defined(__CUDA_ARCH__)
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

namespace llmmem {
inline namespace v0 {
namespace detail {

#if defined(__CUDA_ARCH__)

/// The code nearest to a float without its sign; of two equally near, the even one. Saturates at 448; a NaN
/// becomes 0x7F.
///
/// Rounds without a branch. A float of 2^-6 or more is rounded at its twentieth bit, in integers. A smaller
/// one, whose code is subnormal, is rounded by adding 2^14, whose last bit is worth 2^-9 like that of the
/// codes.
///
/// @param size  the float's bits, the sign's 0.
[[nodiscard]] __device__ inline std::uint32_t e4m3_of_size(std::uint32_t size) noexcept {
  constexpr std::uint32_t largest = 0x43E0'0000U;       // 448
  constexpr std::uint32_t least_normal = 0x3C80'0000U;  // 2^-6
  constexpr std::uint32_t infinity = 0x7F80'0000U;
  constexpr std::uint32_t bias = (127 - 7) << 3U;
  const std::uint32_t held = size < largest ? size : largest;
  const std::uint32_t normal = ((held + 0x0007'FFFFU + (held >> 20U & 1U)) >> 20U) - bias;
  const std::uint32_t subnormal = __float_as_uint(__fadd_rn(__uint_as_float(held), 0x1p14F)) - 0x4680'0000U;
  const std::uint32_t code = held < least_normal ? subnormal : normal;
  return size > infinity ? 0x7FU : code;
}

/// The halves that equal two codes, the first in the lower bits of both. A NaN becomes 0x7FFF, as by the
/// instruction.
[[nodiscard]] __device__ inline std::uint32_t halves_of_e4m3(std::uint16_t codes) noexcept {
#if __CUDA_ARCH__ >= 890
  const __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
  return std::uint32_t{both.x} | std::uint32_t{both.y} << 16;
#else
  // A code's exponent and mantissa in the place of a half's are a half 2^-8 as large, subnormal ones too.
  const std::uint32_t spread = __byte_perm(codes, 0, 0x1404);
  const std::uint32_t size = spread >> 1U & 0x3F80'3F80U;
  const std::uint32_t lowered = size | (spread & 0x8000'8000U);
  std::uint32_t numbers = 0;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(numbers) : "r"(lowered), "r"(0x5C00'5C00U));  // 256
  // The largest code is a NaN: an addition of 1 carries into the bit above.
  const std::uint32_t nan = (size + 0x0080'0080U) << 1U & 0x8000'8000U;
  return (numbers & ~nan) | (nan - (nan >> 15U));
#endif
}

/// The codes nearest to two floats, the first in the lower bits: each as `e4m3_of_size` returns it.
[[nodiscard]] __device__ inline std::uint16_t e4m3_of_floats(float first, float second) noexcept {
#if __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
#else
  const auto code = [](float value) -> std::uint32_t {
    const std::uint32_t bits = __float_as_uint(value);
    const std::uint32_t size = bits & 0x7FFF'FFFFU;
    const std::uint32_t sign = size > 0x7F80'0000U ? 0 : bits >> 24U & 0x80U;
    return sign | e4m3_of_size(size);
  };
  return static_cast<std::uint16_t>(code(first) | code(second) << 8U);
#endif
}

#endif

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
