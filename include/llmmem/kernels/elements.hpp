/// @file
/// Conversions of keys and values in kernels: the same bits on host and device.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/e4m3_steps.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/model/bf16.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/model/f16.hpp>
#include <llmmem/model/fp8.hpp>

#include <bit>
#include <cstdint>
#include <type_traits>

#if defined(__CUDA_ARCH__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace llmmem {
inline namespace v0 {

/// The types that kernels convert: a small set, so that binaries stay small.
template <dtype E>
concept kernel_element = E == dtype::f32 || E == dtype::bf16 || E == dtype::f16 || E == dtype::fp8_e4m3;

namespace detail {

template <dtype E>
struct element_word {
  using type = std::uint16_t;
};
template <>
struct element_word<dtype::f32> {
  using type = std::uint32_t;
};
template <>
struct element_word<dtype::fp8_e4m3> {
  using type = std::uint8_t;
};

/// As `std::bit_cast`, which nvcc accepts in device code only with an experimental flag.
[[nodiscard]] LLMMEM_HD inline float float_of_bits(std::uint32_t bits) noexcept {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}
[[nodiscard]] LLMMEM_HD inline std::uint32_t bits_of_float(float value) noexcept {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return std::bit_cast<std::uint32_t>(value);
#endif
}

/// Returns the product, rounded once; the compiler cannot fuse it into a sum. A NaN gets the bits that
/// devices produce, because a host would take them from an operand.
[[nodiscard]] LLMMEM_HD inline float product_of(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  const float product = a * b;
  return product == product ? product : float_of_bits(0x7FFF'FFFFU);
#endif
}

}  // namespace detail

/// An element's bits.
template <dtype E>
  requires kernel_element<E>
using element_bits = typename detail::element_word<E>::type;

/// Returns the float that equals the element.
template <dtype E>
  requires kernel_element<E>
[[nodiscard]] LLMMEM_HD inline float float_of(element_bits<E> bits) noexcept {
  if constexpr (E == dtype::f32) {
    return detail::float_of_bits(bits);
  } else if constexpr (E == dtype::bf16) {
    return detail::float_of_bits(f32_from_bf16_bits(bits));
  } else {
#if defined(__CUDA_ARCH__)
    if constexpr (E == dtype::f16) {
      return __half2float(__ushort_as_half(bits));
    } else {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(detail::halves_of_e4m3(bits))));
    }
#else
    if constexpr (E == dtype::f16) {
      return detail::float_of_bits(f32_from_f16_bits(bits));
    } else {
      return detail::float_of_bits(f32_from_e4m3_bits(bits));
    }
#endif
  }
}

/// Returns the element nearest to a float; if two are equally near, the even one. e4m3 saturates. A NaN
/// becomes the one that devices produce: 0x7FFF, and 0x7F of e4m3; a float is unchanged.
template <dtype E>
  requires kernel_element<E>
[[nodiscard]] LLMMEM_HD inline element_bits<E> nearest_of(float value) noexcept {
  if constexpr (E == dtype::f32) {
    return detail::bits_of_float(value);
  } else {
#if defined(__CUDA_ARCH__)
    if constexpr (E == dtype::bf16) {
      return __bfloat16_as_ushort(__float2bfloat16_rn(value));
    } else if constexpr (E == dtype::f16) {
      return __half_as_ushort(__float2half_rn(value));
    } else {
      return static_cast<std::uint8_t>(detail::e4m3_of_floats(value, 0.0F));
    }
#else
    const std::uint32_t bits = detail::bits_of_float(value);
    if constexpr (E == dtype::bf16) {
      return value == value ? bf16_from_f32_bits(bits) : std::uint16_t{0x7FFF};
    } else if constexpr (E == dtype::f16) {
      return f16_from_f32_bits(bits);
    } else {
      return e4m3_from_f32_bits(bits);
    }
#endif
  }
}

namespace detail {

/// Returns two elements, the first in the lower bits: a device converts them in one instruction.
template <dtype E>
  requires(E == dtype::bf16 || E == dtype::f16 || E == dtype::fp8_e4m3)
using pair_bits = std::conditional_t<E == dtype::fp8_e4m3, std::uint16_t, std::uint32_t>;

struct float_pair {
  float first = 0;
  float second = 0;
};

template <dtype E>
[[nodiscard]] LLMMEM_HD inline float_pair floats_of_pair(pair_bits<E> bits) noexcept {
  if constexpr (E == dtype::bf16) {
    return {float_of_bits(bits << 16), float_of_bits(bits & 0xFFFF'0000U)};
  } else {
#if defined(__CUDA_ARCH__)
    std::uint32_t halves = bits;
    if constexpr (E == dtype::fp8_e4m3) halves = halves_of_e4m3(bits);
    return {__half2float(__ushort_as_half(static_cast<unsigned short>(halves))),
            __half2float(__ushort_as_half(static_cast<unsigned short>(halves >> 16)))};
#else
    constexpr unsigned shift = 8 * sizeof(element_bits<E>);
    return {float_of<E>(static_cast<element_bits<E>>(bits)),
            float_of<E>(static_cast<element_bits<E>>(bits >> shift))};
#endif
  }
}

/// Returns the halves that equal two elements of e4m3; halves can hold all of its values.
[[nodiscard]] LLMMEM_HD inline std::uint32_t halves_of_pair(std::uint16_t codes) noexcept {
#if defined(__CUDA_ARCH__)
  return halves_of_e4m3(codes);
#else
  const auto half = [](std::uint8_t code) -> std::uint32_t {
    return nearest_of<dtype::f16>(float_of<dtype::fp8_e4m3>(code));
  };
  return half(static_cast<std::uint8_t>(codes)) | half(static_cast<std::uint8_t>(codes >> 8U)) << 16;
#endif
}

template <dtype E>
[[nodiscard]] LLMMEM_HD inline pair_bits<E> nearest_pair(float first, float second) noexcept {
#if defined(__CUDA_ARCH__)
  if constexpr (E == dtype::fp8_e4m3) {
    return e4m3_of_floats(first, second);
  } else if constexpr (E == dtype::bf16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    return std::uint32_t{__bfloat16_as_ushort(both.x)} | std::uint32_t{__bfloat16_as_ushort(both.y)} << 16;
  } else {
    const __half2 both = __floats2half2_rn(first, second);
    return std::uint32_t{__half_as_ushort(both.x)} | std::uint32_t{__half_as_ushort(both.y)} << 16;
  }
#else
  const std::uint32_t low = nearest_of<E>(first);
  const std::uint32_t high = nearest_of<E>(second);
  return static_cast<pair_bits<E>>(low | high << (8 * sizeof(element_bits<E>)));
#endif
}

}  // namespace detail

namespace detail {

/// Returns elements 2 i and 2 i + 1 of a packet.
template <dtype E, unsigned Bytes>
[[nodiscard]] LLMMEM_HD inline float_pair pair_of(const packet<Bytes>& in, unsigned i) noexcept {
  if constexpr (E == dtype::f32) {
    return {float_of_bits(in.words[2 * i]), float_of_bits(in.words[2 * i + 1])};
  } else {
    return floats_of_pair<E>(element_of<pair_bits<E>>(in, i));
  }
}

}  // namespace detail

/// Converts elements, each times a factor: `nearest(float(x) * factor)`, the product rounded once to a float.
template <dtype From, dtype To>
  requires kernel_element<From> && kernel_element<To>
struct scaling_step {
  float factor = 1.0F;

  template <unsigned N>
  [[nodiscard]] LLMMEM_HD packet<N * sizeof(element_bits<To>)> apply(
      const packet<N * sizeof(element_bits<From>)>& in) const noexcept {
    packet<N * sizeof(element_bits<To>)> out{};
    if constexpr (N == 1) {
      const float value = float_of<From>(element_of<element_bits<From>>(in, 0));
      set_element(out, 0, nearest_of<To>(detail::product_of(value, factor)));
    } else {
      LLMMEM_UNROLL
      for (unsigned i = 0; i < N / 2; ++i) {
        detail::float_pair both = detail::pair_of<From>(in, i);
        both.first = detail::product_of(both.first, factor);
        both.second = detail::product_of(both.second, factor);
        if constexpr (To == dtype::f32) {
          set_element(out, 2 * i, nearest_of<To>(both.first));
          set_element(out, 2 * i + 1, nearest_of<To>(both.second));
        } else {
          set_element(out, i, detail::nearest_pair<To>(both.first, both.second));
        }
      }
    }
    return out;
  }
};

}  // namespace v0
}  // namespace llmmem
