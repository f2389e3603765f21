/// @file
/// A sum of several parts, element by element, as items.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/wide_access.hpp>
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
  std::uint64_t bytes;
  std::uint32_t parts;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return xor_unit::count(bytes) * xor_unit::threads;
  }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t unit = item / xor_unit::threads * xor_unit::bytes;
    const std::uint64_t thread = item % xor_unit::threads;
    if (bytes - unit >= xor_unit::bytes) {
      whole(unit + (is_spread ? xor_unit::place<N>(thread) : thread * 16));
    } else {
      for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
        piece(unit + thread * 16 + xor_unit::stretch(i));
    }
  }

 private:
  /// Whether an access holds whole elements, so that accesses of one packet may be apart. If not, a packet is
  /// 16 consecutive bytes.
  static constexpr bool is_spread = N >= sizeof(element_bits<E>);
  static constexpr std::uint32_t apart = is_spread ? xor_unit::apart<N>() : N;

  LLMMEM_HD void read(packet<16> (&in)[xor_unit::packets], std::uint32_t s, std::uint64_t at) const noexcept {
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < xor_unit::packets; ++i)
      in[i] = read_wide<N, cache_hint::streaming>(part[s] + at + xor_unit::stretch(i), apart);
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
      write_wide<N, cache_hint::streaming>(into + at + xor_unit::stretch(i), sum[i], apart);
  }
  LLMMEM_HD void piece(std::uint64_t at) const noexcept {
    const std::uint32_t here = bytes_at(at, bytes);
    if (here == 0) return;
    packet<16> sum = read_up_to<N>(part[0] + at, here);
    for (std::uint32_t s = 1; s < parts; ++s)
      add_elements<E>(sum, read_up_to<N>(part[s] + at, here));
    write_up_to<N>(into + at, sum, here);
  }
};
static_assert(item_work<ordered_sum_work<16, dtype::f32>>);

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
