/// @file
/// Vectors of floats of any width, as compilers offer them: elements of caches, sums, and powers of two.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numbers>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

// NOLINTBEGIN(modernize-use-using, modernize-use-auto): `using` and `auto` would lose the vectors' size.

/// The types of `N` lanes. Functions on them have no `target` of their own: they are inlined into one that
/// has, and take vectors by reference, because the compilers pass wide ones differently for each target.
template <unsigned N>
struct lanes_of {
  typedef float floats __attribute__((vector_size(N * 4)));
  typedef std::uint32_t words __attribute__((vector_size(N * 4)));
};
template <unsigned N>
using float_lanes = typename lanes_of<N>::floats;

#define LLMMEM_LANES_INLINE [[gnu::always_inline]] inline
/// Unrolls the loop after it, so that arrays indexed by the loop stay in registers.
#if defined(__clang__)
#define LLMMEM_LANES_UNROLL _Pragma("unroll")
#else
#define LLMMEM_LANES_UNROLL _Pragma("GCC unroll 16")
#endif

template <unsigned N>
LLMMEM_LANES_INLINE void load_lanes(const float* from, float_lanes<N>& to) noexcept {
  std::memcpy(&to, from, sizeof(to));
}
template <unsigned N>
LLMMEM_LANES_INLINE void store_lanes(const float_lanes<N>& from, float* to) noexcept {
  std::memcpy(to, &from, sizeof(from));
}

/// Elements of a cache in a word of 32 bits.
template <dtype Element>
inline constexpr unsigned elements_in_word = 4 / sizeof(element_bits<Element>);

/// Returns where an element of a vector comes to, if N words are loaded at once: each word's first elements,
/// then its second ones. To spread a word's elements over the lanes takes a shift each; to put them into their
/// own order would take more, and sums over all elements do not need it.
template <dtype Element>
[[nodiscard]] constexpr std::uint32_t lane_place(std::uint32_t element, std::uint32_t n) noexcept {
  constexpr unsigned words = elements_in_word<Element>;
  const std::uint32_t in_group = element % (words * n);
  return element - in_group + in_group % words * n + in_group / words;
}

/// Converts N words of a cache's elements, in the order of `lane_place`.
template <dtype Element, unsigned N>
LLMMEM_LANES_INLINE void load_elements(const std::byte* from,
                                       float_lanes<N> (&to)[elements_in_word<Element>]) noexcept {
  using words = typename lanes_of<N>::words;
  using floats = float_lanes<N>;
  words raw;
  std::memcpy(&raw, from, sizeof(raw));
  if constexpr (Element == dtype::f32) {
    to[0] = reinterpret_cast<floats>(raw);
  } else if constexpr (Element == dtype::bf16) {
    to[0] = reinterpret_cast<floats>(raw << 16);
    to[1] = reinterpret_cast<floats>(raw & 0xFFFF'0000U);
  } else if constexpr (Element == dtype::f16) {
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < 2; ++i) {
      const words bits = i == 0 ? raw : raw >> 16;
      const words size = (bits & 0x7FFFU) << 13;
      // The exponents' biases differ by 112. Infinities and NaNs keep their fraction.
      const floats value = reinterpret_cast<floats>(size) * 0x1p112F;
      const words endless = reinterpret_cast<words>(size >= 0x7C00U << 13) & 0x7F80'0000U;
      to[i] = reinterpret_cast<floats>(reinterpret_cast<words>(value) | endless | (bits & 0x8000U) << 16);
    }
  } else {
    static_assert(Element == dtype::fp8_e4m3, "attention reads caches of f32, bf16, f16 and fp8_e4m3");
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < 4; ++i) {
      const words bits = raw >> (8 * i);
      const words size = (bits & 0x7FU) << 20;
      // The exponents' biases differ by 120. The largest code is the NaN.
      const floats value = reinterpret_cast<floats>(size) * 0x1p120F;
      const words nan = reinterpret_cast<words>(size == 0x7FU << 20) & 0x7FC0'0000U;
      to[i] = reinterpret_cast<floats>(reinterpret_cast<words>(value) | nan | (bits & 0x80U) << 24);
    }
  }
}

/// Sums neighbours: the even lanes of `a` then `b`, plus the odd ones.
template <unsigned N, int... I>
LLMMEM_LANES_INLINE void add_neighbours(float_lanes<N>& a, const float_lanes<N>& b,
                                        std::integer_sequence<int, I...> /*lanes*/) noexcept {
  a = __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}

/// Lane i becomes the sum of the lanes of `of[i]`, in `of[0]`.
template <unsigned N>
LLMMEM_LANES_INLINE void sum_each(float_lanes<N> (&of)[N]) noexcept {
  LLMMEM_LANES_UNROLL
  for (unsigned left = N; left > 1; left /= 2) {
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < left / 2; ++i) {
      of[i] = of[2 * i];
      add_neighbours<N>(of[i], of[2 * i + 1], std::make_integer_sequence<int, int{N}>());
    }
  }
}

template <unsigned N>
LLMMEM_LANES_INLINE float sum_of(const float_lanes<N>& x) noexcept {
  float lanes[N];
  store_lanes<N>(x, lanes);
  LLMMEM_LANES_UNROLL
  for (unsigned step = N / 2; step != 0; step /= 2) {
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < step; ++i)
      lanes[i] += lanes[i + step];
  }
  return lanes[0];
}

/// The larger lanes; those of `a` where those of `b` are NaNs.
template <unsigned N>
LLMMEM_LANES_INLINE void take_larger(float_lanes<N>& a, const float_lanes<N>& b) noexcept {
  a = b > a ? b : a;
}
template <unsigned N>
LLMMEM_LANES_INLINE float largest_of(const float_lanes<N>& x) noexcept {
  float lanes[N];
  store_lanes<N>(x, lanes);
  LLMMEM_LANES_UNROLL
  for (unsigned step = N / 2; step != 0; step /= 2) {
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < step; ++i)
      lanes[i] = lanes[i + step] > lanes[i] ? lanes[i + step] : lanes[i];
  }
  return lanes[0];
}

/// `power_of_two` (float_steps.hpp) of each lane: 2^x for x up to 0, a NaN for a NaN.
template <unsigned N>
LLMMEM_LANES_INLINE void raise_two(float_lanes<N>& x) noexcept {
  using words = typename lanes_of<N>::words;
  using floats = float_lanes<N>;
  constexpr float to_integer = 0x1.8p23F;
  const floats shifted = x + to_integer;
  const floats rest = x - (shifted - to_integer);
  floats power = rest * 0x1.41d334p-13F + 0x1.5f456ap-10F;
  power = power * rest + 0x1.3b2dbcp-7F;
  power = power * rest + 0x1.c6aed4p-5F;
  power = power * rest + 0x1.ebfbdap-3F;
  power = power * rest + std::numbers::ln2_v<float>;
  power = power * rest + 1.0F;
  const words bits = reinterpret_cast<words>(power) + (reinterpret_cast<words>(shifted) << 23);
  const words counts = reinterpret_cast<words>(x >= -126.0F);
  const words nan = reinterpret_cast<words>(x != x) & 0x7FFF'FFFFU;
  x = reinterpret_cast<floats>((bits & counts) | nan);
}

// NOLINTEND(modernize-use-using, modernize-use-auto)

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
