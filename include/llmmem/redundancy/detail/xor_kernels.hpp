/// @file
/// Exclusive ors of up to five buffers at a time, by 16, 32 and 64 bytes.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/redundancy/simd_path.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

// Words at any address, over bytes of any type. Deduced types (`auto`) would lose these attributes.
using xor_16 [[gnu::vector_size(16), gnu::aligned(1), gnu::may_alias]] = std::uint64_t;
using xor_32 [[gnu::vector_size(32), gnu::aligned(1), gnu::may_alias]] = std::uint64_t;
using xor_64 [[gnu::vector_size(64), gnu::aligned(1), gnu::may_alias]] = std::uint64_t;

inline constexpr std::size_t xor_most = 5;  // buffers at a time

// NOLINTBEGIN(modernize-use-auto): auto would lose the vectors' alignment.

// The three below have the same text except for the width, because a target cannot be a template parameter.
// Each returns how many bytes it processed, whole steps only. A source may be the destination: a step reads
// before it writes.

template <std::size_t Count>
inline std::size_t xor_fold_16(std::byte* to, const std::byte* const* from, std::size_t bytes) noexcept {
  const std::byte* source[Count];
  for (std::size_t n = 0; n < Count; ++n)
    source[n] = from[n];
  std::size_t i = 0;
  for (; bytes - i >= 64; i += 64) {
    const xor_16* head = reinterpret_cast<const xor_16*>(source[0] + i);
    xor_16 a = head[0];
    xor_16 b = head[1];
    xor_16 c = head[2];
    xor_16 d = head[3];
    for (std::size_t n = 1; n < Count; ++n) {
      const xor_16* more = reinterpret_cast<const xor_16*>(source[n] + i);
      a ^= more[0];
      b ^= more[1];
      c ^= more[2];
      d ^= more[3];
    }
    xor_16* out = reinterpret_cast<xor_16*>(to + i);
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
  }
  return i;
}

#if defined(__x86_64__)
template <std::size_t Count>
[[gnu::target("avx2")]] inline std::size_t xor_fold_32(std::byte* to, const std::byte* const* from,
                                                       std::size_t bytes) noexcept {
  const std::byte* source[Count];
  for (std::size_t n = 0; n < Count; ++n)
    source[n] = from[n];
  std::size_t i = 0;
  for (; bytes - i >= 128; i += 128) {
    const xor_32* head = reinterpret_cast<const xor_32*>(source[0] + i);
    xor_32 a = head[0];
    xor_32 b = head[1];
    xor_32 c = head[2];
    xor_32 d = head[3];
    for (std::size_t n = 1; n < Count; ++n) {
      const xor_32* more = reinterpret_cast<const xor_32*>(source[n] + i);
      a ^= more[0];
      b ^= more[1];
      c ^= more[2];
      d ^= more[3];
    }
    xor_32* out = reinterpret_cast<xor_32*>(to + i);
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
  }
  return i;
}

template <std::size_t Count>
[[gnu::target("avx512f")]] inline std::size_t xor_fold_64(std::byte* to, const std::byte* const* from,
                                                          std::size_t bytes) noexcept {
  const std::byte* source[Count];
  for (std::size_t n = 0; n < Count; ++n)
    source[n] = from[n];
  std::size_t i = 0;
  for (; bytes - i >= 256; i += 256) {
    const xor_64* head = reinterpret_cast<const xor_64*>(source[0] + i);
    xor_64 a = head[0];
    xor_64 b = head[1];
    xor_64 c = head[2];
    xor_64 d = head[3];
    for (std::size_t n = 1; n < Count; ++n) {
      const xor_64* more = reinterpret_cast<const xor_64*>(source[n] + i);
      a ^= more[0];
      b ^= more[1];
      c ^= more[2];
      d ^= more[3];
    }
    xor_64* out = reinterpret_cast<xor_64*>(to + i);
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
  }
  return i;
}
#endif

// NOLINTEND(modernize-use-auto)

/// Sets `to` to the exclusive or of `Count` sources, any of which may be `to`.
template <std::size_t Count>
inline void xor_fold(simd_path path, std::byte* to, const std::byte* const* from,
                     std::size_t bytes) noexcept {
  static_assert(Count >= 1 && Count <= xor_most);
  std::size_t i = 0;
#if defined(__x86_64__)
  if (path == simd_path::gfni) {
    i = xor_fold_64<Count>(to, from, bytes);
  } else if (path == simd_path::avx2) {
    i = xor_fold_32<Count>(to, from, bytes);
  }
#else
  static_cast<void>(path);
#endif
  if (bytes - i >= 64) {
    const std::byte* rest[Count];
    for (std::size_t n = 0; n < Count; ++n)
      rest[n] = from[n] + i;
    i += xor_fold_16<Count>(to + i, rest, bytes - i);
  }
  for (; i < bytes; ++i) {
    std::byte sum = from[0][i];
    for (std::size_t n = 1; n < Count; ++n)
      sum ^= from[n][i];
    to[i] = sum;
  }
}

/// As above for 1 to `xor_most` sources.
inline void xor_fold(simd_path path, std::byte* to, const std::byte* const* from, std::size_t count,
                     std::size_t bytes) noexcept {
  switch (count) {
    case 1:
      return xor_fold<1>(path, to, from, bytes);
    case 2:
      return xor_fold<2>(path, to, from, bytes);
    case 3:
      return xor_fold<3>(path, to, from, bytes);
    case 4:
      return xor_fold<4>(path, to, from, bytes);
    default:
      return xor_fold<5>(path, to, from, bytes);
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
