/// @file
/// Sums of products over GF(2^8): up to four destinations from any number of sources in one pass.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/redundancy/simd_path.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A coefficient in two forms: its products with every value of a byte's nibbles, each table twice so that
/// one load fills 32 bytes, and the affine map of bits for `gf2p8affineqb`.
struct alignas(8) gf_product_table {
  std::array<std::uint8_t, 32> low{};
  std::array<std::uint8_t, 32> high{};
  std::uint64_t affine = 0;
};

inline constexpr std::size_t gf_most = 4;  // most destinations at a time

/// The input of a kernel. `tables` has a row of `stride` coefficients for each destination, one per source.
struct gf_job {
  const gf_product_table* tables;
  std::size_t stride;
  const std::byte* const* sources;
  std::size_t source_count;
  std::byte* const* destinations;
};

enum class gf_start : std::uint8_t {
  zero,         ///< destinations become the sums
  destination,  ///< the sums are added to them
};

// Each kernel returns how many bytes it processed, whole steps only.

template <std::size_t Rows, gf_start Start>
inline std::size_t gf_run_bytes(const gf_job& job, std::size_t at, std::size_t bytes) noexcept {
  for (std::size_t i = at; i < bytes; ++i) {
    std::array<std::uint8_t, Rows> sum{};
    if constexpr (Start == gf_start::destination) {
      for (std::size_t r = 0; r < Rows; ++r)
        sum[r] = static_cast<std::uint8_t>(job.destinations[r][i]);
    }
    for (std::size_t s = 0; s < job.source_count; ++s) {
      const auto byte = static_cast<std::uint8_t>(job.sources[s][i]);
      for (std::size_t r = 0; r < Rows; ++r) {
        const gf_product_table& table = job.tables[r * job.stride + s];
        sum[r] = static_cast<std::uint8_t>(sum[r] ^ table.low[byte & 15U] ^ table.high[byte >> 4U]);
      }
    }
    for (std::size_t r = 0; r < Rows; ++r)
      job.destinations[r][i] = std::byte{sum[r]};
  }
  return bytes;
}

#if defined(__x86_64__)

// NOLINTBEGIN(modernize-use-auto): auto would lose the vectors' alignment.

// Bytes for the instructions, and words to shift and to combine, at any address. Deduced types (`auto`) would
// lose the alignment.
using gf_16 [[gnu::vector_size(16)]] = char;
using gf_32 [[gnu::vector_size(32)]] = char;
using gf_64 [[gnu::vector_size(64)]] = char;
using gf_words_16 [[gnu::vector_size(16), gnu::aligned(1), gnu::may_alias]] = std::uint64_t;
using gf_words_32 [[gnu::vector_size(32), gnu::aligned(1), gnu::may_alias]] = std::uint64_t;
using gf_words_64 [[gnu::vector_size(64), gnu::aligned(1), gnu::may_alias]] = std::uint64_t;

inline constexpr std::uint64_t gf_nibbles = 0x0F0F'0F0F'0F0F'0F0FU;

template <std::size_t Rows, gf_start Start>
[[gnu::target("ssse3")]] inline std::size_t gf_run_ssse3(const gf_job& job, std::size_t bytes) noexcept {
  const gf_words_16 mask = {gf_nibbles, gf_nibbles};
  std::size_t i = 0;
  for (; bytes - i >= 32; i += 32) {
    gf_words_16 first[Rows];
    gf_words_16 second[Rows];
    for (std::size_t r = 0; r < Rows; ++r) {
      first[r] = second[r] = gf_words_16{};
      if constexpr (Start == gf_start::destination) {
        const gf_words_16* was = reinterpret_cast<const gf_words_16*>(job.destinations[r] + i);
        first[r] = was[0];
        second[r] = was[1];
      }
    }
    for (std::size_t s = 0; s < job.source_count; ++s) {
      const gf_words_16* from = reinterpret_cast<const gf_words_16*>(job.sources[s] + i);
      const gf_words_16 a = from[0];
      const gf_words_16 b = from[1];
      const gf_16 a_low = reinterpret_cast<gf_16>(a & mask);
      const gf_16 a_high = reinterpret_cast<gf_16>((a >> 4) & mask);
      const gf_16 b_low = reinterpret_cast<gf_16>(b & mask);
      const gf_16 b_high = reinterpret_cast<gf_16>((b >> 4) & mask);
      for (std::size_t r = 0; r < Rows; ++r) {
        const gf_product_table& table = job.tables[r * job.stride + s];
        const gf_16 low = reinterpret_cast<gf_16>(*reinterpret_cast<const gf_words_16*>(table.low.data()));
        const gf_16 high = reinterpret_cast<gf_16>(*reinterpret_cast<const gf_words_16*>(table.high.data()));
        first[r] ^= reinterpret_cast<gf_words_16>(__builtin_ia32_pshufb128(low, a_low) ^
                                                  __builtin_ia32_pshufb128(high, a_high));
        second[r] ^= reinterpret_cast<gf_words_16>(__builtin_ia32_pshufb128(low, b_low) ^
                                                   __builtin_ia32_pshufb128(high, b_high));
      }
    }
    for (std::size_t r = 0; r < Rows; ++r) {
      gf_words_16* out = reinterpret_cast<gf_words_16*>(job.destinations[r] + i);
      out[0] = first[r];
      out[1] = second[r];
    }
  }
  return i;
}

template <std::size_t Rows, gf_start Start>
[[gnu::target("avx2")]] inline std::size_t gf_run_avx2(const gf_job& job, std::size_t bytes) noexcept {
  const gf_words_32 mask = {gf_nibbles, gf_nibbles, gf_nibbles, gf_nibbles};
  std::size_t i = 0;
  for (; bytes - i >= 64; i += 64) {
    gf_words_32 first[Rows];
    gf_words_32 second[Rows];
    for (std::size_t r = 0; r < Rows; ++r) {
      first[r] = second[r] = gf_words_32{};
      if constexpr (Start == gf_start::destination) {
        const gf_words_32* was = reinterpret_cast<const gf_words_32*>(job.destinations[r] + i);
        first[r] = was[0];
        second[r] = was[1];
      }
    }
    for (std::size_t s = 0; s < job.source_count; ++s) {
      const gf_words_32* from = reinterpret_cast<const gf_words_32*>(job.sources[s] + i);
      const gf_words_32 a = from[0];
      const gf_words_32 b = from[1];
      const gf_32 a_low = reinterpret_cast<gf_32>(a & mask);
      const gf_32 a_high = reinterpret_cast<gf_32>((a >> 4) & mask);
      const gf_32 b_low = reinterpret_cast<gf_32>(b & mask);
      const gf_32 b_high = reinterpret_cast<gf_32>((b >> 4) & mask);
      for (std::size_t r = 0; r < Rows; ++r) {
        const gf_product_table& table = job.tables[r * job.stride + s];
        const gf_32 low = reinterpret_cast<gf_32>(*reinterpret_cast<const gf_words_32*>(table.low.data()));
        const gf_32 high = reinterpret_cast<gf_32>(*reinterpret_cast<const gf_words_32*>(table.high.data()));
        first[r] ^= reinterpret_cast<gf_words_32>(__builtin_ia32_pshufb256(low, a_low) ^
                                                  __builtin_ia32_pshufb256(high, a_high));
        second[r] ^= reinterpret_cast<gf_words_32>(__builtin_ia32_pshufb256(low, b_low) ^
                                                   __builtin_ia32_pshufb256(high, b_high));
      }
    }
    for (std::size_t r = 0; r < Rows; ++r) {
      gf_words_32* out = reinterpret_cast<gf_words_32*>(job.destinations[r] + i);
      out[0] = first[r];
      out[1] = second[r];
    }
  }
  return i;
}

template <std::size_t Rows, gf_start Start>
[[gnu::target("gfni,avx512f,avx512bw")]] inline std::size_t gf_run_gfni(const gf_job& job,
                                                                        std::size_t bytes) noexcept {
  std::size_t i = 0;
  for (; bytes - i >= 256; i += 256) {
    gf_words_64 sum[Rows][4];
    for (std::size_t r = 0; r < Rows; ++r) {
      for (std::size_t v = 0; v < 4; ++v) {
        sum[r][v] = gf_words_64{};
        if constexpr (Start == gf_start::destination)
          sum[r][v] = reinterpret_cast<const gf_words_64*>(job.destinations[r] + i)[v];
      }
    }
    for (std::size_t s = 0; s < job.source_count; ++s) {
      const gf_words_64* from = reinterpret_cast<const gf_words_64*>(job.sources[s] + i);
      const gf_64 a = reinterpret_cast<gf_64>(from[0]);
      const gf_64 b = reinterpret_cast<gf_64>(from[1]);
      const gf_64 c = reinterpret_cast<gf_64>(from[2]);
      const gf_64 d = reinterpret_cast<gf_64>(from[3]);
      for (std::size_t r = 0; r < Rows; ++r) {
        const std::uint64_t m = job.tables[r * job.stride + s].affine;
        const gf_64 map = reinterpret_cast<gf_64>(gf_words_64{m, m, m, m, m, m, m, m});
        sum[r][0] ^= reinterpret_cast<gf_words_64>(__builtin_ia32_vgf2p8affineqb_v64qi(a, map, 0));
        sum[r][1] ^= reinterpret_cast<gf_words_64>(__builtin_ia32_vgf2p8affineqb_v64qi(b, map, 0));
        sum[r][2] ^= reinterpret_cast<gf_words_64>(__builtin_ia32_vgf2p8affineqb_v64qi(c, map, 0));
        sum[r][3] ^= reinterpret_cast<gf_words_64>(__builtin_ia32_vgf2p8affineqb_v64qi(d, map, 0));
      }
    }
    for (std::size_t r = 0; r < Rows; ++r) {
      for (std::size_t v = 0; v < 4; ++v)
        reinterpret_cast<gf_words_64*>(job.destinations[r] + i)[v] = sum[r][v];
    }
  }
  return i;
}

// NOLINTEND(modernize-use-auto)

#elif defined(__aarch64__)

template <std::size_t Rows, gf_start Start>
inline std::size_t gf_run_neon(const gf_job& job, std::size_t bytes) noexcept {
  const uint8x16_t mask = vdupq_n_u8(15);
  std::size_t i = 0;
  for (; bytes - i >= 16; i += 16) {
    uint8x16_t sum[Rows];
    for (std::size_t r = 0; r < Rows; ++r) {
      sum[r] = vdupq_n_u8(0);
      if constexpr (Start == gf_start::destination)
        sum[r] = vld1q_u8(reinterpret_cast<const std::uint8_t*>(job.destinations[r] + i));
    }
    for (std::size_t s = 0; s < job.source_count; ++s) {
      const uint8x16_t from = vld1q_u8(reinterpret_cast<const std::uint8_t*>(job.sources[s] + i));
      const uint8x16_t from_low = vandq_u8(from, mask);
      const uint8x16_t from_high = vshrq_n_u8(from, 4);
      for (std::size_t r = 0; r < Rows; ++r) {
        const gf_product_table& table = job.tables[r * job.stride + s];
        sum[r] = veorq_u8(sum[r], veorq_u8(vqtbl1q_u8(vld1q_u8(table.low.data()), from_low),
                                           vqtbl1q_u8(vld1q_u8(table.high.data()), from_high)));
      }
    }
    for (std::size_t r = 0; r < Rows; ++r)
      vst1q_u8(reinterpret_cast<std::uint8_t*>(job.destinations[r] + i), sum[r]);
  }
  return i;
}

#endif

/// Computes `Rows` destinations: whole steps by the path, the rest byte by byte.
template <std::size_t Rows, gf_start Start>
inline void gf_run(simd_path path, const gf_job& job, std::size_t bytes) noexcept {
  std::size_t done = 0;
#if defined(__x86_64__)
  if (path == simd_path::gfni) {
    done = gf_run_gfni<Rows, Start>(job, bytes);
  } else if (path == simd_path::avx2) {
    done = gf_run_avx2<Rows, Start>(job, bytes);
  } else if (path == simd_path::ssse3) {
    done = gf_run_ssse3<Rows, Start>(job, bytes);
  }
#elif defined(__aarch64__)
  if (path == simd_path::neon) done = gf_run_neon<Rows, Start>(job, bytes);
#else
  static_cast<void>(path);
#endif
  gf_run_bytes<Rows, Start>(job, done, bytes);
}

/// Computes any number of destinations.
template <gf_start Start>
inline void gf_run_all(simd_path path, gf_job job, std::size_t destinations, std::size_t bytes) noexcept {
  while (destinations != 0) {
    const std::size_t rows = destinations < gf_most ? destinations : gf_most;
    switch (rows) {
      case 1:
        gf_run<1, Start>(path, job, bytes);
        break;
      case 2:
        gf_run<2, Start>(path, job, bytes);
        break;
      case 3:
        gf_run<3, Start>(path, job, bytes);
        break;
      default:
        gf_run<4, Start>(path, job, bytes);
        break;
    }
    job.tables += rows * job.stride;
    job.destinations += rows;
    destinations -= rows;
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
