/// @file
/// A sum of several parts, element by element, as items.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/packet_frame.hpp>
#include <llmmem/kernels/detail/xor_works.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The most parts of one launch of `sum_in_order`: the launch carries their addresses.
inline constexpr std::uint32_t most_summed_parts = 16;

namespace detail {

/// Returns the sum, rounded once; the compiler cannot fuse a product into it. A NaN gets the bits that
/// devices produce.
[[nodiscard]] LLMMEM_HD inline float sum_of_two(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  const float sum = a + b;
  return sum == sum ? sum : float_of_bits(0x7FFF'FFFFU);
#endif
}

/// `sum += more`, each element rounded to its type.
template <dtype E>
LLMMEM_HD inline void add_elements(packet<16>& sum, const packet<16>& more) noexcept {
  LLMMEM_UNROLL
  for (unsigned i = 0; i < 4; ++i) {
    if constexpr (E == dtype::f32) {
      sum.words[i] = bits_of_float(sum_of_two(float_of_bits(sum.words[i]), float_of_bits(more.words[i])));
    } else {
      const float_pair a = floats_of_pair<E>(sum.words[i]);
      const float_pair b = floats_of_pair<E>(more.words[i]);
      sum.words[i] = nearest_pair<E>(sum_of_two(a.first, b.first), sum_of_two(a.second, b.second));
    }
  }
}

/// The sum of parts in their order. An item is a thread's four packets of a unit, as of a parity.
template <unsigned N, dtype E>
struct ordered_sum_work {
  const std::byte* part[most_summed_parts];
  std::byte* into;
  packet_frame<N> frame;
  std::uint32_t parts;

  /// Returns a frame whose packets hold whole elements. If the sum's address is none of an element, its
  /// packets are not aligned.
  [[nodiscard]] static packet_frame<N> frame_of(const std::byte* into, std::uint64_t bytes) noexcept {
    return skew_of(into) % sizeof(element_bits<E>) == 0 ? packet_frame<N>(into, bytes)
                                                        : packet_frame<N>(bytes);
  }
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return xor_unit::count(frame.extent()) * xor_unit::threads;
  }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t unit = item / xor_unit::threads * xor_unit::bytes;
    const std::uint64_t thread = item % xor_unit::threads;
    if (is_aligned() && frame.holds(unit, xor_unit::bytes)) {
      whole(unit - frame.skew() + thread * 16);
    } else {
      for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
        piece(unit + thread * 16 + xor_unit::stretch(i));
    }
  }

 private:
  [[nodiscard]] LLMMEM_HD bool is_aligned() const noexcept {
    return N == 16 || skew_of(into) == frame.skew();
  }
  LLMMEM_HD void read(packet<16> (&in)[xor_unit::packets], std::uint32_t s, std::uint64_t at) const noexcept {
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
      in[i] = read_across<N, cache_hint::streaming>(part[s], at + xor_unit::stretch(i), frame.bytes());
  }
  LLMMEM_HD void whole(std::uint64_t at) const noexcept {
    packet<16> sum[xor_unit::packets];
    read(sum, 0, at);
    // More than two parts at once cost registers, and therefore threads.
#if defined(__CUDA_ARCH__)
#pragma unroll 2
#endif
    for (std::uint32_t s = 1; s < parts; ++s) {
      packet<16> in[xor_unit::packets];
      read(in, s, at);
      LLMMEM_UNROLL
      for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
        add_elements<E>(sum[i], in[i]);
    }
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
      store_packet<16, cache_hint::streaming>(into + at + xor_unit::stretch(i), sum[i]);
  }
  LLMMEM_HD void piece(std::uint64_t place) const noexcept {
    const auto here = frame.at(place);
    if (here.is_empty()) return;
    // Where the sum's packets are not aligned no byte beyond one is read, because `into` may be a part.
    const bool is_wide = is_aligned() && here.is_whole();
    packet<16> sum = read(part[0], here, is_wide);
    for (std::uint32_t s = 1; s < parts; ++s)
      add_elements<E>(sum, read(part[s], here, is_wide));
    if (is_wide) {
      store_packet<16, cache_hint::streaming>(into + here.at, sum);
    } else {
      write_part(into, here.at, sum, here.first, here.end);
    }
  }
  [[nodiscard]] LLMMEM_HD packet<16> read(const std::byte* from, const typename packet_frame<N>::piece& of,
                                          bool is_wide) const noexcept {
    return is_wide
               ? read_across<N, cache_hint::streaming>(from, static_cast<std::uint64_t>(of.at), frame.bytes())
               : read_part(from, of.at, of.first, of.end);
  }
};
static_assert(item_work<ordered_sum_work<16, dtype::f32>>);

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
