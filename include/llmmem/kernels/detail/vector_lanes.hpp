/// @file
/// Vectors of floats of any width, as compilers offer them: elements of caches, sums, and powers of two.
#pragma once

#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error \
    "llmmem: attention by the host's vectors needs infinities and NaNs; compile this file without -ffast-math"
#endif

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/lane_types.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/model/dtype.hpp>

#include <bit>
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

template <unsigned N>
using float_lanes = typename lanes_of<N>::floats;

/// Unrolls the loop after it, so that arrays indexed by the loop stay in registers.
#if defined(__CUDACC__)
#define LLMMEM_LANES_UNROLL  // nvcc knows no such pragma for the host
#elif defined(__clang__)
#define LLMMEM_LANES_UNROLL _Pragma("unroll")
#else
#define LLMMEM_LANES_UNROLL _Pragma("GCC unroll 16")
#endif

template <unsigned N>
LLMMEM_ALWAYS_INLINE void load_lanes(const float* from, float_lanes<N>& to) noexcept {
  std::memcpy(&to, from, sizeof(to));
}
template <unsigned N>
LLMMEM_ALWAYS_INLINE void store_lanes(const float_lanes<N>& from, float* to) noexcept {
  std::memcpy(to, &from, sizeof(from));
}

static_assert(std::endian::native == std::endian::little,
              "the first element of a word is in its lowest bits");

/// Elements of a cache in a word of 32 bits.
template <dtype Element>
inline constexpr unsigned elements_in_word = 4 / sizeof(element_bits<Element>);

/// Whether one instruction converts N elements in their own order: half, by vectors of 16.
template <dtype Element>
[[nodiscard]] constexpr bool is_converted_in_order([[maybe_unused]] std::uint32_t n) noexcept {
#if defined(__x86_64__)
  return Element == dtype::f16 && n == 16;
#else
  return false;
#endif
}

/// Returns where an element of a vector comes to, if N words are loaded at once: each word's first elements,
/// then its second ones. To spread a word's elements over the lanes takes a shift each; to put them into
/// their own order would take more, and sums over all elements do not need it.
template <dtype Element>
[[nodiscard]] constexpr std::uint32_t lane_place(std::uint32_t element, std::uint32_t n) noexcept {
  if (is_converted_in_order<Element>(n)) return element;
  constexpr unsigned words = elements_in_word<Element>;
  const std::uint32_t in_group = element % (words * n);
  return element - in_group + in_group % words * n + in_group / words;
}

/// Makes floats of codes of e4m3 whose digits are at their place, and whose exponent has the bias 7. A code
/// without an exponent becomes 1 + its fraction first, from which the 1 is subtracted (-0 becomes 0): as a
/// subnormal float it would cost a processor of Intel 150 cycles, and one in sixteen codes is such.
template <unsigned N>
LLMMEM_ALWAYS_INLINE void raise_exponent(typename lanes_of<N>::words& bits, float_lanes<N>& to) noexcept {
  using words = typename lanes_of<N>::words;
  using floats = float_lanes<N>;
  const words is_small = reinterpret_cast<words>((bits & 0x7F80'0000U) == 0U);
  bits = bits + (120U << 23) + (is_small & 0x0080'0000U);
  to = reinterpret_cast<floats>(bits) - reinterpret_cast<floats>(words(bits & is_small & 0xFF80'0000U));
}

/// Converts N words of a cache's elements, in the order of `lane_place`.
template <dtype Element, unsigned N>
LLMMEM_ALWAYS_INLINE void load_elements(const std::byte* from,
                                        float_lanes<N> (&to)[elements_in_word<Element>]) noexcept {
  using words = typename lanes_of<N>::words;
  using integers = typename lanes_of<N>::integers;
  using floats = float_lanes<N>;
  words raw;
  std::memcpy(&raw, from, sizeof(raw));
  if constexpr (Element == dtype::f32) {
    to[0] = reinterpret_cast<floats>(raw);
  } else if constexpr (Element == dtype::bf16) {
    to[0] = reinterpret_cast<floats>(raw << 16);
    to[1] = reinterpret_cast<floats>(raw & 0xFFFF'0000U);
#if defined(__x86_64__)
  } else if constexpr (is_converted_in_order<Element>(N)) {
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < 2; ++i) {
#if defined(__clang__)
      // clang++ wants an instruction's target in each function, and converts vectors of half by this one.
      typedef _Float16 halves __attribute__((vector_size(2 * N)));
      halves some;
      std::memcpy(&some, from + std::size_t{2} * N * i, sizeof(some));
      to[i] = __builtin_convertvector(some, floats);
#else
      using halves = std::byte[2 * N];
      const auto& some = *reinterpret_cast<const halves*>(from + std::size_t{2} * N * i);
      // NOLINTNEXTLINE(hicpp-no-assembler): g++ converts such vectors one by one
      asm("vcvtph2ps %1, %0" : "=v"(to[i]) : "m"(some));
#endif
    }
#endif
  } else if constexpr (Element == dtype::f16) {
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < 2; ++i) {
      // A signed shift moves the exponent to its place and leaves the sign. The biases differ by 112.
      const words bits =
          reinterpret_cast<words>(reinterpret_cast<integers>(raw << (16 - 16 * i)) >> 3) & 0x8FFF'E000U;
      // Infinities and NaNs keep their fraction.
      const words endless = reinterpret_cast<words>((bits & 0x0F80'0000U) == 0x0F80'0000U) & 0x7F80'0000U;
      to[i] = reinterpret_cast<floats>(reinterpret_cast<words>(reinterpret_cast<floats>(bits) * 0x1p112F) |
                                       endless);
    }
  } else {
    static_assert(Element == dtype::fp8_e4m3, "attention reads caches of f32, bf16, f16 and fp8_e4m3");
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < 4; ++i) {
      // The biases differ by 120. The largest code is the NaN.
      words bits =
          reinterpret_cast<words>(reinterpret_cast<integers>(raw << (24 - 8 * i)) >> 4) & 0x87F0'0000U;
      const words nan = reinterpret_cast<words>((bits & 0x07F0'0000U) == 0x07F0'0000U) & 0x7FC0'0000U;
      raise_exponent<N>(bits, to[i]);
      to[i] = reinterpret_cast<floats>(reinterpret_cast<words>(to[i]) | nan);
    }
  }
}

/// Which lane of `a`, then `b`, comes to lane `i` where two vectors are joined: those whose halves are added.
/// `width` of 1 and 2 exchange within four lanes, which takes one instruction; the rest moves fours.
template <unsigned N, unsigned Width, bool Upper>
[[nodiscard]] constexpr int joined_lane(unsigned i) noexcept {
  const unsigned four = i / 4 * 4;
  const unsigned in_four = i % 4;
  const unsigned upper = Upper ? 1 : 0;
  unsigned lane = 0;
  bool is_second = false;
  if constexpr (Width == 1) {  // a0 b0 a1 b1, and a2 b2 a3 b3
    lane = four + in_four / 2 + 2 * upper;
    is_second = in_four % 2 != 0;
  } else if constexpr (Width == 2) {  // a0 a1 b0 b1, and a2 a3 b2 b3
    lane = four + in_four % 2 + 2 * upper;
    is_second = in_four / 2 != 0;
  } else {  // half of the fours of each: the first and the second half at width 4 of 16, else every other one
    const unsigned fours = N / 4;
    const unsigned in_half = i / 4 % (fours / 2);
    const unsigned of = fours == 4 && Width == 4 ? in_half + 2 * upper : 2 * in_half + upper;
    lane = of * 4 + in_four;
    is_second = i / 4 >= fours / 2;
  }
  return static_cast<int>(is_second ? lane + N : lane);
}

/// Lane i becomes lane `From[i]` of `a`, then `b`.
template <unsigned N, int... From>
LLMMEM_ALWAYS_INLINE void pick_lanes(const float_lanes<N>& a, const float_lanes<N>& b, float_lanes<N>& to,
                                     std::integer_sequence<int, From...> /*lanes*/) noexcept {
#if defined(__CUDACC__)  // nvcc does not expand the pack in the built-in function
  constexpr int from[] = {From...};
  for (int i = 0; i < int{N}; ++i)
    to[i] = from[i] < int{N} ? a[from[i]] : b[from[i] - int{N}];
#else
  to = __builtin_shufflevector(a, b, From...);
#endif
}

template <unsigned N, unsigned Width, int... Lane>
LLMMEM_ALWAYS_INLINE void join_sums(float_lanes<N>& a, const float_lanes<N>& b,
                                    std::integer_sequence<int, Lane...> /*lanes*/) noexcept {
  float_lanes<N> lower;
  float_lanes<N> upper;
  pick_lanes<N>(a, b, lower, std::integer_sequence<int, joined_lane<N, Width, false>(Lane)...>());
  pick_lanes<N>(a, b, upper, std::integer_sequence<int, joined_lane<N, Width, true>(Lane)...>());
  a = lower + upper;
}

/// Lane i of `of[0]` becomes the sum of the lanes of `of[i]`.
template <unsigned N, unsigned Width = 1>
LLMMEM_ALWAYS_INLINE void sum_each(float_lanes<N> (&of)[N]) noexcept {
  if constexpr (Width < N) {
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < N / Width / 2; ++i) {
      of[i] = of[2 * i];
      join_sums<N, Width>(of[i], of[2 * i + 1], std::make_integer_sequence<int, int{N}>());
    }
    sum_each<N, 2 * Width>(of);
  }
}

/// The larger lanes; those of `a` where those of `b` are NaNs.
template <unsigned N>
LLMMEM_ALWAYS_INLINE void take_larger(float_lanes<N>& a, const float_lanes<N>& b) noexcept {
  a = b > a ? b : a;
}
template <unsigned N, unsigned Step, int... Lane>
LLMMEM_ALWAYS_INLINE void take_larger_half(float_lanes<N>& x,
                                           std::integer_sequence<int, Lane...> /*lanes*/) noexcept {
  float_lanes<N> other;
  pick_lanes<N>(x, x, other, std::integer_sequence<int, (Lane ^ static_cast<int>(Step))...>());
  take_larger<N>(x, other);
}
/// All lanes become the largest.
template <unsigned N, unsigned Step = N / 2>
LLMMEM_ALWAYS_INLINE void spread_largest(float_lanes<N>& x) noexcept {
  if constexpr (Step != 0) {
    take_larger_half<N, Step>(x, std::make_integer_sequence<int, int{N}>());
    spread_largest<N, Step / 2>(x);
  }
}

/// `power_of_two` (float_steps.hpp) of each lane: 2^x for x up to 0, a NaN for a NaN.
template <unsigned N>
LLMMEM_ALWAYS_INLINE void raise_two(float_lanes<N>& x) noexcept {
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
  const words nan = reinterpret_cast<words>(x != x) & 0x7FFF'FFFFU;  // NOLINT(misc-redundant-expression)
  x = reinterpret_cast<floats>((bits & counts) | nan);
}

// NOLINTEND(modernize-use-using, modernize-use-auto)

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
