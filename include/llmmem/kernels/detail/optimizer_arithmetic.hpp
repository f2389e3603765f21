/// @file
/// The arithmetic of optimizers: constants of a step, and their effect on some elements.
#pragma once

#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/optimizer_types.hpp>
#include <llmmem/model/optimizer_form.hpp>
#include <llmmem/model/random_bits.hpp>

#include <cstdint>
#include <limits>

#if defined(__AVX__) && !defined(__CUDACC__)
#include <immintrin.h>
#elif defined(__SSE2__) && !defined(__CUDACC__)
#include <xmmintrin.h>  // a tenth of the lines
#endif

namespace llmmem {
inline namespace v0 {
namespace detail {

/// a * b, rounded once: the choice keeps a compiler from fusing the product into a difference.
[[nodiscard]] LLMMEM_HD constexpr double unfused(double a, double b) noexcept {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  const double product = a * b;
  return product == product ? product : std::numeric_limits<double>::quiet_NaN();
#endif
}

/// A number's power by multiplication, so that it has no library's rounding.
[[nodiscard]] constexpr double whole_power(double base, std::uint64_t exponent) noexcept {
  double product = 1;
  for (; exponent != 0; exponent /= 2, base *= base) {
    if (exponent % 2 != 0) product = unfused(product, base);
  }
  return product;
}

/// The constants of a step's rule, rounded once.
struct optimizer_constants {
  float mean_decay, mean_share, variance_decay, variance_share, correction, size, epsilon, keep, scale;
  std::uint64_t key;  // of the step's random bits

  [[nodiscard]] static constexpr optimizer_constants of(const optimizer_hyper& by, bool is_sgd) noexcept {
    // Neighbouring seeds and steps get unrelated keys.
    const std::uint64_t mixed = mixed_bits(by.seed + by.step * 0x9E37'79B9'7F4A'7C15U);
    return {
        .mean_decay = static_cast<float>(by.mean_decay),
        .mean_share = static_cast<float>(1 - by.mean_decay),
        .variance_decay = static_cast<float>(by.variance_decay),
        .variance_share = static_cast<float>(1 - by.variance_decay),
        .correction = static_cast<float>(1 / (1 - whole_power(by.variance_decay, by.step))),
        .size = static_cast<float>(is_sgd ? by.rate : by.rate / (1 - whole_power(by.mean_decay, by.step))),
        .epsilon = static_cast<float>(by.epsilon),
        .keep = static_cast<float>(1 - unfused(by.rate, by.weight_decay)),
        .scale = by.gradient_scale,
        .key = mixed};
  }
};

/// a * b, rounded once. Where the processor could fuse the product into a sum, a choice that depends on it
/// prevents that; elsewhere it costs nothing.
[[nodiscard]] LLMMEM_HD inline float unfused(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#elif defined(__x86_64__) && !defined(__FMA__)
  return a * b;
#else
  const float product = a * b;
  return product == product ? product : float_of_bits(0x7FC0'0000U);
#endif
}

/// A NaN becomes the same NaN on all processors.
[[nodiscard]] LLMMEM_HD inline float settled(float x) noexcept {
  return x == x ? x : float_of_bits(0x7FC0'0000U);
}

[[nodiscard]] LLMMEM_HD inline float root_of(float x) noexcept {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

[[nodiscard]] LLMMEM_HD inline double root_of(double x) noexcept {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);
#endif
}

/// Replaces numbers by their square roots. A compiler that keeps `errno` does not vectorise `sqrt`.
template <unsigned N>
LLMMEM_HD inline void take_roots(float (&x)[N]) noexcept {
#if defined(__SSE2__) && !defined(__CUDACC__)
  if constexpr (N % 16 == 0) {
    for (unsigned i = 0; i < N; i += 16) {
#if defined(__AVX512F__)
      _mm512_storeu_ps(x + i, _mm512_maskz_sqrt_ps(0xFFFF, _mm512_loadu_ps(x + i)));
#elif defined(__AVX__)
      for (unsigned j = 0; j < 16; j += 8)
        _mm256_storeu_ps(x + i + j, _mm256_sqrt_ps(_mm256_loadu_ps(x + i + j)));
#else
      for (unsigned j = 0; j < 16; j += 4)
        _mm_storeu_ps(x + i + j, _mm_sqrt_ps(_mm_loadu_ps(x + i + j)));
#endif
    }
    return;
  }
#endif
  LLMMEM_UNROLL
  for (unsigned i = 0; i < N; ++i)
    x[i] = root_of(x[i]);
}

/// @name Operations of the rules
/// On a float, or on all lanes of a vector: by reference, because compilers pass vectors differently for each
/// target. Each rounds once.
/// @{
LLMMEM_HD inline void set_product(float& to, float a, float b) noexcept {
  to = unfused(a, b);
}
LLMMEM_HD inline void set_quotient(float& to, float a, float b) noexcept {
  to = quotient_of(a, b);
}
LLMMEM_HD inline void set_settled(float& x) noexcept {
  x = settled(x);
}

#if defined(__x86_64__) && !defined(__CUDACC__)
/// A vector of floats that AVX2 or AVX-512 has.
template <class V>
concept float_vector = requires(V x) { x[0] = 1.0F; } && (sizeof(V) >= 32);

// Where a target has fused products, a compiler would fuse a product into a sum, and one that keeps `errno`
// would call a function for each root.
template <float_vector V>
LLMMEM_ALWAYS_INLINE void set_product(V& to, const V& a, const V& b) noexcept {
#if defined(__clang__)
#pragma clang fp contract(off)
  to = a * b;
#else
  asm("vmulps %2, %1, %0" : "=v"(to) : "v"(a), "v"(b));
#endif
}
template <float_vector V>
LLMMEM_ALWAYS_INLINE void set_product(V& to, const V& a, float b) noexcept {
  const V all = b - V{};  // b in each lane, also a negative zero
  set_product(to, a, all);
}
template <float_vector V>
LLMMEM_ALWAYS_INLINE void set_quotient(V& to, const V& a, const V& b) noexcept {
  to = a / b;
}
template <float_vector V>
LLMMEM_ALWAYS_INLINE void set_settled(V& x) noexcept {
  const V nan = float_of_bits(0x7FC0'0000U) - V{};
  x = x == x ? x : nan;  // NOLINT(misc-redundant-expression)
}
template <float_vector V>
LLMMEM_ALWAYS_INLINE void take_root(V& x) noexcept {
#if defined(__clang__)
#if __has_builtin(__builtin_elementwise_sqrt)
  x = __builtin_elementwise_sqrt(x);
#else  // clang++ 16
  for (unsigned lane = 0; lane < sizeof(V) / sizeof(float); ++lane)
    x[lane] = __builtin_sqrtf(x[lane]);
#endif
#else
  asm("vsqrtps %1, %0" : "=v"(x) : "v"(x));
#endif
}
#endif
/// @}

/// The moments of AdamW, and the number under the root. @tparam V  float, or a vector of them
template <class V>
LLMMEM_HD LLMMEM_ALWAYS_INLINE void adamw_moments(V& m, V& v, V& under_root, const V& g,
                                                  const optimizer_constants& by) noexcept {
  V scaled;
  V kept;
  V added;
  set_product(scaled, g, by.scale);
  set_product(kept, m, by.mean_decay);
  set_product(added, scaled, by.mean_share);
  m = kept + added;
  set_settled(m);
  set_product(kept, v, by.variance_decay);
  set_product(added, scaled, by.variance_share);
  set_product(added, added, scaled);
  v = kept + added;
  set_settled(v);
  set_product(under_root, v, by.correction);
}

/// The weight of AdamW. @param root  of what `adamw_moments` put under it
template <class V>
LLMMEM_HD LLMMEM_ALWAYS_INLINE void adamw_weight(V& w, const V& m, const V& root,
                                                 const optimizer_constants& by) noexcept {
  V kept;
  V taken;
  set_product(kept, w, by.keep);
  set_product(taken, m, by.size);
  set_quotient(taken, taken, root + by.epsilon);
  w = kept - taken;
  set_settled(w);
}

/// SGD with momentum.
template <class V>
LLMMEM_HD LLMMEM_ALWAYS_INLINE void sgd_rule(V& w, V& m, const V& g, const optimizer_constants& by) noexcept {
  V kept;
  V added;
  set_product(kept, m, by.mean_decay);
  set_product(added, g, by.scale);
  m = kept + added;
  set_settled(m);
  set_product(kept, w, by.keep);
  set_product(added, m, by.size);
  w = kept - added;
  set_settled(w);
}

/// AdamW on N elements.
template <unsigned N>
LLMMEM_HD inline void adamw_elements(float (&w)[N], float (&m)[N], float (&v)[N], const float (&g)[N],
                                     const optimizer_constants& by) noexcept {
  float root[N];
  LLMMEM_UNROLL
  for (unsigned i = 0; i < N; ++i)
    adamw_moments(m[i], v[i], root[i], g[i], by);
  take_roots(root);
  LLMMEM_UNROLL
  for (unsigned i = 0; i < N; ++i)
    adamw_weight(w[i], m[i], root[i], by);
}

/// SGD with momentum on N elements.
template <unsigned N>
LLMMEM_HD inline void sgd_elements(float (&w)[N], float (&m)[N], const float (&g)[N],
                                   const optimizer_constants& by) noexcept {
  LLMMEM_UNROLL
  for (unsigned i = 0; i < N; ++i)
    sgd_rule(w[i], m[i], g[i], by);
}

/// A float as a rounded bf16 and 16 low bits.
struct split_float {
  std::uint16_t high;
  std::uint16_t low;
};
/// Splits bits, and joins them. @tparam Word  32 bits, or a vector of them
template <class Word>
LLMMEM_HD LLMMEM_ALWAYS_INLINE constexpr void split_halves(Word& high, Word& low, const Word& bits) noexcept {
  const Word upper = bits >> 16U;
  const Word lower = bits & 0xFFFFU;
  // A NaN is not rounded, because a carry could make it a zero. Its lowest bits do not matter.
  const auto is_nan = (bits & 0x7FFF'FFFFU) > 0x7F80'0000U;
  high = is_nan ? upper | 0x40U : upper + (lower >> 15U);
  low = is_nan ? lower & 0x7FFFU : lower;
}
template <class Word>
LLMMEM_HD LLMMEM_ALWAYS_INLINE constexpr void join_halves(Word& bits, const Word& high,
                                                          const Word& low) noexcept {
  bits = ((high - (low >> 15U)) << 16U) | low;
}
[[nodiscard]] LLMMEM_HD constexpr split_float split_of(std::uint32_t bits) noexcept {
  std::uint32_t high = 0;
  std::uint32_t low = 0;
  split_halves(high, low, bits);
  return {static_cast<std::uint16_t>(high), static_cast<std::uint16_t>(low)};
}
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t joined_bits(std::uint16_t high, std::uint16_t low) noexcept {
  std::uint32_t bits = 0;
  join_halves(bits, std::uint32_t{high}, std::uint32_t{low});
  return bits;
}

/// 16 random bits for an element, under the step's key.
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t drawn_bits(std::uint64_t index,
                                                           const optimizer_constants& by) noexcept {
  return random_bits(index, by.key) >> 16U;
}

/// The upper half of bits, rounded away from zero if 16 drawn bits and the lower half carry. @tparam Word  32
/// bits, or a vector of them
template <class Word>
LLMMEM_HD LLMMEM_ALWAYS_INLINE constexpr void round_by_drawn(Word& high, const Word& bits,
                                                             const Word& drawn) noexcept {
  const auto is_finite = (bits & 0x7F80'0000U) != 0x7F80'0000U;
  high = (is_finite ? bits + drawn : bits) >> 16U;
}

/// The bf16 below or above in size, by 16 drawn bits.
[[nodiscard]] LLMMEM_HD constexpr std::uint16_t stochastic_bf16(std::uint32_t bits,
                                                                std::uint32_t drawn) noexcept {
  std::uint32_t high = 0;
  round_by_drawn(high, bits, drawn);
  return static_cast<std::uint16_t>(high);
}

/// The values of dynamic quantisation's codes, ascending: 0, 1, and for i = 0 to 6 those of the decade
/// 10^(i-6). The range of a decade from 0.1 to 1 is cut into 2^i equal parts, or twice as many without signs;
/// their middles are the values, with both signs if there are signs.
struct code_book {
  float value[256];

  /// Restores -1 to 1, or 0 to 1.
  [[nodiscard]] static constexpr code_book of(bool has_signs) noexcept {
    code_book book{};
    unsigned at = has_signs ? 127 : 0;
    book.value[at++] = 0;
    double decade = 1e-6;
    for (unsigned i = 0; i < 7; ++i, decade *= 10) {
      const unsigned parts = has_signs ? 1U << i : 2U << i;
      for (unsigned j = 0; j < parts; ++j) {
        const double middle = 0.1 + 0.9 * (j + 0.5) / parts;
        book.value[at++] = static_cast<float>(decade * middle);
      }
    }
    book.value[at] = 1;
    for (unsigned i = 0; has_signs && i < 127; ++i)
      book.value[i] = -book.value[254 - i];
    return book;
  }

  /// Of two equally near codes, the lower one; of a NaN, the first.
  [[nodiscard]] LLMMEM_HD std::uint8_t nearest(float x) const noexcept {
    unsigned below = 0;
    for (unsigned step = 128; step != 0; step /= 2) {
      const unsigned next = below + step;
      if (x > unfused(0.5F, value[next - 1] + value[next])) below = next;
    }
    return static_cast<std::uint8_t>(below);
  }
};

inline constexpr code_book signed_codes = code_book::of(true);
inline constexpr code_book unsigned_codes = code_book::of(false);

/// A group's scale and its inverse, from the bits of its largest moment's size.
struct moment_scale {
  float scale;
  float inverse;

  [[nodiscard]] static LLMMEM_HD moment_scale of(std::uint32_t largest) noexcept {
    if (largest == 0) return {0, 0};
    if (largest >= 0x7F80'0000U) return {float_of_bits(0x7FC0'0000U), 0};
    const float scale = float_of_bits(largest < 0x0080'0000U ? 0x0080'0000U : largest);
    return {scale, quotient_of(1.0F, scale)};
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
