/// @file
/// Accesses of 16 bytes at places of any alignment, for kernels that use packets of 16.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/packet.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Reads 16 bytes by accesses of N. @pre `from` is aligned to N
template <unsigned N, cache_hint How>
[[nodiscard]] LLMMEM_HD inline packet<16> read_wide(const std::byte* from) noexcept {
  static_assert(N == 16 || N == 4 || N == 1);
  if constexpr (N == 16) {
    return load_packet<16, How>(from);
  } else {
    packet<16> out{};
    LLMMEM_UNROLL
    for (unsigned i = 0; i < 16 / N; ++i)
      out.words[i * N / 4] |=
          static_cast<std::uint32_t>(load_packet<N, How>(from + std::size_t{i} * N).words[0])
          << (i * N % 4 * 8);
    return out;
  }
}

/// Writes 16 bytes by accesses of N. @pre as `read_wide`
template <unsigned N, cache_hint How>
LLMMEM_HD inline void write_wide(std::byte* to, const packet<16>& in) noexcept {
  static_assert(N == 16 || N == 4 || N == 1);
  if constexpr (N == 16) {
    store_packet<16, How>(to, in);
  } else {
    using word = typename packet<N>::word;
    LLMMEM_UNROLL
    for (unsigned i = 0; i < 16 / N; ++i)
      store_packet<N, How>(to + std::size_t{i} * N,
                           {{static_cast<word>(in.words[i * N / 4] >> (i * N % 4 * 8))}});
  }
}

/// Reads the first bytes of a packet; the others are zero. Not for inner loops.
/// @pre bytes < 16
[[nodiscard]] LLMMEM_HD inline packet<16> read_start(const std::byte* from, std::uint32_t bytes) noexcept {
  packet<16> out{};
  LLMMEM_UNROLL
  for (std::uint32_t i = 0; i < 16; ++i) {
    if (i < bytes)
      out.words[i / 4] |= static_cast<std::uint32_t>(load_packet<1>(from + i).words[0]) << (i % 4 * 8);
  }
  return out;
}

/// Writes the first bytes of a packet. @pre bytes < 16
LLMMEM_HD inline void write_start(std::byte* to, const packet<16>& in, std::uint32_t bytes) noexcept {
  LLMMEM_UNROLL
  for (std::uint32_t i = 0; i < 16; ++i) {
    if (i < bytes) store_packet<1>(to + i, {{static_cast<std::uint8_t>(in.words[i / 4] >> (i % 4 * 8))}});
  }
}

/// `a ^= b`.
LLMMEM_HD inline void add_packet(packet<16>& a, const packet<16>& b) noexcept {
  LLMMEM_UNROLL
  for (unsigned i = 0; i < 4; ++i)
    a.words[i] ^= b.words[i];
}

[[nodiscard]] LLMMEM_HD inline bool is_zero(const packet<16>& in) noexcept {
  return (in.words[0] | in.words[1] | in.words[2] | in.words[3]) == 0;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
