/// @file
/// Vectors of bytes of any width: products of four, transposition of words, and their order.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/vector_lanes.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Whether functions without a target, inlined into one that has it, may contain instructions of that target:
/// g++ permits it. clang++ refuses it, and nvcc does not know them; with both, products are made by halves.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define LLMMEM_LANES_ASM 1
#else
#define LLMMEM_LANES_ASM 0
#endif

// NOLINTBEGIN(modernize-use-using, modernize-use-auto): `using` and `auto` would lose the vectors' size.

/// The same `N` lanes of 32 bits as parts of words.
template <unsigned N>
struct small_lanes_of {
  typedef std::int16_t halves __attribute__((vector_size(N * 4)));
  typedef std::uint8_t bytes __attribute__((vector_size(N * 4)));
};
template <unsigned N>
using word_lanes = typename lanes_of<N>::words;
template <unsigned N>
using integer_lanes = typename lanes_of<N>::integers;
template <unsigned N>
using byte_lanes = typename small_lanes_of<N>::bytes;

/// How products of bytes are made. Both have the same bits.
enum class byte_dots : std::uint8_t {
  by_halves,  ///< each byte in 16 bits, in which its product fits: any processor
  by_fours,   ///< AVX512-VNNI, where the compiler has it (`LLMMEM_LANES_ASM`)
};

/// Adds to each lane of `to` the products of its four bytes: those of `a` without a sign, those of `b` with
/// one.
template <unsigned N, byte_dots Dots>
LLMMEM_ALWAYS_INLINE void add_byte_products(const word_lanes<N>& a, const word_lanes<N>& b,
                                            integer_lanes<N>& to) noexcept {
#if LLMMEM_LANES_ASM
  if constexpr (Dots == byte_dots::by_fours) {
    integer_lanes<N> sum = to;  // an element of an array as an operand would be kept in memory
    const word_lanes<N> first = a;
    const word_lanes<N> second = b;
    // NOLINTNEXTLINE(hicpp-no-assembler): a built-in function needs its target in each caller
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(first), "v"(second));
    to = sum;
    return;
  }
#endif
  using halves = typename small_lanes_of<N>::halves;
  const halves first = reinterpret_cast<halves>(word_lanes<N>(a & 0x00FF'00FFU));
  const halves second = reinterpret_cast<halves>(word_lanes<N>((a >> 8) & 0x00FF'00FFU));
  const halves by_first = (reinterpret_cast<halves>(b) << 8) >> 8;
  const halves by_second = reinterpret_cast<halves>(b) >> 8;
#if LLMMEM_LANES_ASM
  if constexpr (N >= 8) {
    integer_lanes<N> pairs;
    integer_lanes<N> others;
    // NOLINTNEXTLINE(hicpp-no-assembler): products of pairs, added
    asm("vpmaddwd %2, %1, %0" : "=v"(pairs) : "v"(first), "v"(by_first));
    asm("vpmaddwd %2, %1, %0" : "=v"(others) : "v"(second), "v"(by_second));  // NOLINT(hicpp-no-assembler)
    to = to + pairs + others;
    return;
  }
#endif
  // The largest product, 255 x -128, fits into 16 bits.
  const integer_lanes<N> pairs = reinterpret_cast<integer_lanes<N>>(halves(first * by_first));
  const integer_lanes<N> others = reinterpret_cast<integer_lanes<N>>(halves(second * by_second));
  to = to + ((pairs << 16) >> 16) + (pairs >> 16) + ((others << 16) >> 16) + (others >> 16);
}

/// All lanes become a word.
template <unsigned N>
LLMMEM_ALWAYS_INLINE void spread_word(const void* from, word_lanes<N>& to) noexcept {
  std::uint32_t word;
  std::memcpy(&word, from, sizeof(word));
#if LLMMEM_LANES_ASM
  if constexpr (N >= 8) {
    word_lanes<N> all;
    // NOLINTNEXTLINE(hicpp-no-assembler): g++ 12 writes lane by lane
    asm("vpbroadcastd %1, %0" : "=v"(all) : "m"(word));
    to = all;
    return;
  }
#endif
  const word_lanes<N> zeros{};
  to = zeros + word;
}

/// Adds the products with one word of `b` for all lanes.
template <unsigned N, byte_dots Dots>
LLMMEM_ALWAYS_INLINE void add_byte_products(const word_lanes<N>& a, const std::uint32_t* b,
                                            integer_lanes<N>& to) noexcept {
#if LLMMEM_LANES_ASM
  if constexpr (Dots == byte_dots::by_fours) {
    integer_lanes<N> sum = to;
    const word_lanes<N> first = a;
    // NOLINTNEXTLINE(hicpp-no-assembler)
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(first), "m"(*b));
    to = sum;
    return;
  }
#endif
  word_lanes<N> all;
  spread_word<N>(b, all);
  add_byte_products<N, Dots>(a, all, to);
}

/// Half of the lanes of two vectors that `sum_each` would add: the vectors of the transposition's next step.
template <unsigned N, unsigned Width, bool Upper, int... Lane>
LLMMEM_ALWAYS_INLINE void join_lanes(const float_lanes<N>& a, const float_lanes<N>& b, float_lanes<N>& to,
                                     std::integer_sequence<int, Lane...> /*lanes*/) noexcept {
  pick_lanes<N>(a, b, to, std::integer_sequence<int, joined_lane<N, Width, Upper>(Lane)...>());
}

/// Transposes N vectors of N words from `First` on: vector `k` then has word `transposed_words<N>[k]` of
/// each, that of vector i in lane i.
template <unsigned N, unsigned Width = 1, unsigned First = 0>
LLMMEM_ALWAYS_INLINE void transpose_lanes(float_lanes<N> (&x)[N]) noexcept {
  if constexpr (Width < N) {
    constexpr unsigned half = N / Width / 2;
    float_lanes<N> upper[half];
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < half; ++i) {
      const float_lanes<N> a = x[First + 2 * i];
      const float_lanes<N> b = x[First + 2 * i + 1];
      join_lanes<N, Width, false>(a, b, x[First + i], std::make_integer_sequence<int, int{N}>());
      join_lanes<N, Width, true>(a, b, upper[i], std::make_integer_sequence<int, int{N}>());
    }
    LLMMEM_LANES_UNROLL
    for (unsigned i = 0; i < half; ++i)
      x[First + half + i] = upper[i];
    transpose_lanes<N, 2 * Width, First>(x);
    transpose_lanes<N, 2 * Width, First + half>(x);
  }
}

/// Follows the places of words through the same steps.
template <unsigned N, unsigned Width = 1, unsigned First = 0>
constexpr void follow_lanes(std::array<std::array<std::uint32_t, N>, N>& x) noexcept {
  if constexpr (Width < N) {
    constexpr unsigned half = N / Width / 2;
    const auto before = x;
    for (unsigned i = 0; i < half; ++i) {
      const auto from = [&](int lane) {
        const auto at = static_cast<unsigned>(lane);
        return at < N ? before[First + 2 * i][at] : before[First + 2 * i + 1][at - N];
      };
      for (unsigned lane = 0; lane < N; ++lane) {
        x[First + i][lane] = from(joined_lane<N, Width, false>(lane));
        x[First + half + i][lane] = from(joined_lane<N, Width, true>(lane));
      }
    }
    follow_lanes<N, 2 * Width, First>(x);
    follow_lanes<N, 2 * Width, First + half>(x);
  }
}
/// Which word of each vector comes to vector k.
template <unsigned N>
[[nodiscard]] constexpr std::array<std::uint32_t, N> make_transposed_words() noexcept {
  std::array<std::array<std::uint32_t, N>, N> x{};
  for (unsigned vector = 0; vector < N; ++vector) {
    for (unsigned lane = 0; lane < N; ++lane)
      x[vector][lane] = vector * N + lane;
  }
  follow_lanes<N>(x);
  std::array<std::uint32_t, N> out{};
  for (unsigned k = 0; k < N; ++k) {
    out[k] = x[k][0];
    for (unsigned lane = 0; lane < N; ++lane) {
      if (x[k][lane] != lane * N + out[k]) out[k] = ~0U;  // not transposed
    }
  }
  return out;
}
template <unsigned N>
inline constexpr std::array<std::uint32_t, N> transposed_words = make_transposed_words<N>();
/// To which vector a word comes.
template <unsigned N>
[[nodiscard]] constexpr std::array<std::uint32_t, N> make_transposed_places() noexcept {
  std::array<std::uint32_t, N> out{};
  for (std::uint32_t k = 0; k < N; ++k)
    out[transposed_words<N>[k]] = k;
  return out;
}
template <unsigned N>
inline constexpr std::array<std::uint32_t, N> transposed_places = make_transposed_places<N>();
static_assert(transposed_words<4>[3] == 3 && transposed_words<8>[7] == 7 && transposed_words<16>[15] == 15);

/// Lane i of bytes becomes that of `a`, then `b`, where units of `Unit` bytes of both alternate, within each
/// 16 bytes, from their first or second half on.
template <unsigned Unit, bool Upper>
[[nodiscard]] constexpr int alternate_byte(unsigned i, unsigned bytes) noexcept {
  const unsigned in_lane = i % 16;
  const unsigned unit = in_lane / Unit;
  const unsigned of = i / 16 * 16 + (Upper ? 8 : 0) + unit / 2 * Unit + in_lane % Unit;
  return static_cast<int>(unit % 2 != 0 ? of + bytes : of);
}
template <unsigned N, int... From>
LLMMEM_ALWAYS_INLINE void pick_bytes(const byte_lanes<N>& a, const byte_lanes<N>& b, byte_lanes<N>& to,
                                     std::integer_sequence<int, From...> /*bytes*/) noexcept {
#if defined(__CUDACC__)
  constexpr int from[] = {From...};
  for (int i = 0; i < int{4 * N}; ++i)
    to[i] = from[i] < int{4 * N} ? a[from[i]] : b[from[i] - int{4 * N}];
#else
  to = __builtin_shufflevector(a, b, From...);
#endif
}
template <unsigned N, unsigned Unit, bool Upper, int... Byte>
LLMMEM_ALWAYS_INLINE void alternate_bytes(const byte_lanes<N>& a, const byte_lanes<N>& b, byte_lanes<N>& to,
                                          std::integer_sequence<int, Byte...> /*bytes*/) noexcept {
  pick_bytes<N>(a, b, to, std::integer_sequence<int, alternate_byte<Unit, Upper>(Byte, 4 * N)...>());
}

/// Makes of the bytes of four tokens words with a byte of each. Word 4 j + r of `x[i]` is of byte 16 j + 4 i
/// + r.
template <unsigned N>
LLMMEM_ALWAYS_INLINE void alternate_tokens(byte_lanes<N> (&x)[4]) noexcept {
  constexpr auto all = std::make_integer_sequence<int, int{4 * N}>();
  byte_lanes<N> pairs[4];
  alternate_bytes<N, 1, false>(x[0], x[1], pairs[0], all);
  alternate_bytes<N, 1, true>(x[0], x[1], pairs[1], all);
  alternate_bytes<N, 1, false>(x[2], x[3], pairs[2], all);
  alternate_bytes<N, 1, true>(x[2], x[3], pairs[3], all);
  alternate_bytes<N, 2, false>(pairs[0], pairs[2], x[0], all);
  alternate_bytes<N, 2, true>(pairs[0], pairs[2], x[1], all);
  alternate_bytes<N, 2, false>(pairs[1], pairs[3], x[2], all);
  alternate_bytes<N, 2, true>(pairs[1], pairs[3], x[3], all);
}

/// Stores the lowest byte of each word.
template <unsigned N, byte_dots Dots>
LLMMEM_ALWAYS_INLINE void store_low_bytes(const word_lanes<N>& from, std::uint8_t* to) noexcept {
#if LLMMEM_LANES_ASM
  if constexpr (Dots == byte_dots::by_fours) {
    struct some_bytes {
      std::uint8_t of[N];
    };
    // NOLINTNEXTLINE(hicpp-no-assembler): compilers convert byte by byte
    asm("vpmovdb %1, %0" : "=m"(*reinterpret_cast<some_bytes*>(to)) : "v"(from));
    return;
  }
#endif
  for (unsigned lane = 0; lane < N; ++lane)
    to[lane] = static_cast<std::uint8_t>(from[lane] & 0xFFU);
}

/// Converts integers to floats.
template <unsigned N>
LLMMEM_ALWAYS_INLINE void convert_lanes(const integer_lanes<N>& from, float_lanes<N>& to) noexcept {
#if defined(__CUDACC__)
  for (unsigned lane = 0; lane < N; ++lane)
    to[lane] = static_cast<float>(from[lane]);
#else
  to = __builtin_convertvector(from, float_lanes<N>);
#endif
}

// NOLINTEND(modernize-use-using, modernize-use-auto)

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
