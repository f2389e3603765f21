/// @file
/// Optimizer steps by the host's vectors: the rules of optimizer_arithmetic.hpp on 8 or 16 elements at once,
/// with the same bits.
#pragma once

#if defined(__x86_64__) && !defined(__CUDACC__)

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/lane_types.hpp>
#include <llmmem/kernels/detail/optimizer_arithmetic.hpp>
#include <llmmem/kernels/optimizer_types.hpp>
#include <llmmem/kernels/vector_path.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/model/optimizer_form.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// N elements of an array, and back.
template <class V>
LLMMEM_ALWAYS_INLINE void load_vector(V& to, const std::byte* from) noexcept {
  std::memcpy(&to, from, sizeof(V));
}
template <class V>
LLMMEM_ALWAYS_INLINE void store_vector(const V& from, std::byte* to) noexcept {
  std::memcpy(to, &from, sizeof(V));
}

/// The random bits of N elements in order. @param first  the first one's index in the tensor
template <unsigned N>
LLMMEM_ALWAYS_INLINE void draw_lanes(typename lanes_of<N>::words& drawn, std::uint64_t first,
                                     const optimizer_constants& by) noexcept {
  using words = typename lanes_of<N>::words;
  const auto lower = static_cast<std::uint32_t>(first);
  words place;
  for (unsigned i = 0; i < N; ++i)
    place[i] = i;
  place += lower;
  const auto carry = reinterpret_cast<words>(place < lower);  // all ones where the lower half overflowed
  const words upper = static_cast<std::uint32_t>(first >> 32U) - carry;
  drawn = place ^ static_cast<std::uint32_t>(by.key);
  const words second = upper ^ static_cast<std::uint32_t>(by.key >> 32U);
  mix_random(drawn, second);
  drawn >>= 16U;
}

/// Weights of a form as floats, and back. @param at  the first element's index in the piece
template <optimizer_form Form, unsigned N>
LLMMEM_ALWAYS_INLINE void load_weight_lanes(typename lanes_of<N>::floats& w, const optimizer_piece& piece,
                                            std::uint64_t at) noexcept {
  using words = typename lanes_of<N>::words;
  using half_words = typename lanes_of<N>::half_words;
  if constexpr (widths_of(Form).weights == 4) {
    load_vector(w, piece.weights + at * 4);
  } else {
    half_words half;
    load_vector(half, piece.weights + at * 2);
    const words high = __builtin_convertvector(half, words);
    words bits = high << 16U;
    if constexpr (widths_of(Form).low != 0) {
      load_vector(half, piece.low + at * 2);
      join_halves(bits, high, __builtin_convertvector(half, words));
    }
    std::memcpy(&w, &bits, sizeof(w));
  }
}
template <optimizer_form Form, unsigned N>
LLMMEM_ALWAYS_INLINE void store_weight_lanes(const typename lanes_of<N>::floats& w,
                                             const optimizer_piece& piece, std::uint64_t at,
                                             const optimizer_constants& by) noexcept {
  using words = typename lanes_of<N>::words;
  using half_words = typename lanes_of<N>::half_words;
  if constexpr (widths_of(Form).weights == 4) {
    store_vector(w, piece.weights + at * 4);
  } else {
    words high;
    words low;
    std::memcpy(&low, &w, sizeof(w));
    if constexpr (Form == optimizer_form::adamw_stochastic) {
      words drawn;
      draw_lanes<N>(drawn, piece.first + at, by);
      round_by_drawn(high, low, drawn);
    } else {
      const words bits = low;
      split_halves(high, low, bits);
    }
    store_vector(__builtin_convertvector(high, half_words), piece.weights + at * 2);
    if constexpr (widths_of(Form).low != 0)
      store_vector(__builtin_convertvector(low, half_words), piece.low + at * 2);
  }
}

/// Steps the first elements of a piece, as many as fill vectors of N.
/// @return how many those are
template <unsigned N, optimizer_form Form, dtype Gradient>
LLMMEM_ALWAYS_INLINE std::uint64_t step_by_lanes(const optimizer_piece& of, const std::byte* gradients,
                                                 const optimizer_constants& constants) noexcept {
  // Copies, which no store to the arrays can change.
  const optimizer_piece piece = of;
  const optimizer_constants by = constants;
  using floats = typename lanes_of<N>::floats;
  using words = typename lanes_of<N>::words;
  const std::uint64_t whole = piece.count - piece.count % N;
  for (std::uint64_t at = 0; at < whole; at += N) {
    floats w;
    floats m;
    floats g;
    if constexpr (Gradient == dtype::f32) {
      load_vector(g, gradients + at * 4);
    } else {
      typename lanes_of<N>::half_words half;
      load_vector(half, gradients + at * 2);
      const words bits = __builtin_convertvector(half, words) << 16U;
      std::memcpy(&g, &bits, sizeof(g));
    }
    load_weight_lanes<Form, N>(w, piece, at);
    load_vector(m, piece.mean + at * 4);
    if constexpr (Form == optimizer_form::sgd) {
      sgd_rule(w, m, g, by);
    } else {
      floats v;
      floats root;
      load_vector(v, piece.variance + at * 4);
      adamw_moments(m, v, root, g, by);
      take_root(root);
      adamw_weight(w, m, root, by);
      store_vector(v, piece.variance + at * 4);
    }
    store_vector(m, piece.mean + at * 4);
    store_weight_lanes<Form, N>(w, piece, at, by);
  }
  return whole;
}

template <optimizer_form Form, dtype Gradient>
[[gnu::target("avx2,fma"), gnu::flatten]] std::uint64_t step_by_avx2(const optimizer_piece& piece,
                                                                     const std::byte* gradients,
                                                                     const optimizer_constants& by) noexcept {
  return step_by_lanes<8, Form, Gradient>(piece, gradients, by);
}
template <optimizer_form Form, dtype Gradient>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"), gnu::flatten]] std::uint64_t step_by_avx512(
    const optimizer_piece& piece, const std::byte* gradients, const optimizer_constants& by) noexcept {
  return step_by_lanes<16, Form, Gradient>(piece, gradients, by);
}

/// Steps the first elements of a piece by vectors of a path, none of them without wide ones.
/// @return how many
template <optimizer_form Form, dtype Gradient>
std::uint64_t step_first(vector_path path, const optimizer_piece& piece, const std::byte* gradients,
                         const optimizer_constants& by) noexcept {
  if (path == vector_path::avx512) return step_by_avx512<Form, Gradient>(piece, gradients, by);
  if (path == vector_path::avx2) return step_by_avx2<Form, Gradient>(piece, gradients, by);
  return 0;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

#endif
