/// @file
/// Packets that may be aligned to less than their size.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/packet.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Whether every packet is aligned to its size, or may be accessed in pieces.
enum class group_access : std::uint8_t { packets, pieces };

template <unsigned Piece, cache_hint How, unsigned Bytes>
[[nodiscard]] LLMMEM_HD inline packet<Bytes> load_by(const std::byte* from) noexcept {
  packet<Bytes> out{};
  for (unsigned i = 0; i < Bytes / Piece; ++i)
    set_element(out, i, load_packet<Piece, How>(from + std::size_t{i} * Piece).words[0]);
  return out;
}

/// A packet aligned to `width` bytes, a power of two.
template <unsigned Bytes, cache_hint How, group_access Access>
[[nodiscard]] LLMMEM_HD inline packet<Bytes> load_aligned(const std::byte* from,
                                                          std::uint32_t width) noexcept {
  if constexpr (Access == group_access::pieces) {
    if constexpr (Bytes > 4) {
      if (width < Bytes && width >= 4) return load_by<4, How, Bytes>(from);
    }
    if constexpr (Bytes > 2) {
      if (width < Bytes && width >= 2) return load_by<2, How, Bytes>(from);
    }
    if (width == 1) return load_by<1, How, Bytes>(from);
  }
  return load_packet<Bytes, How>(from);
}

template <unsigned Piece, unsigned Bytes>
LLMMEM_HD inline void store_by(std::byte* to, const packet<Bytes>& in) noexcept {
  for (unsigned i = 0; i < Bytes / Piece; ++i)
    store_packet<Piece>(to + std::size_t{i} * Piece, {{element_of<typename packet<Piece>::word>(in, i)}});
}

/// Writes a packet aligned to `width` bytes, a power of two.
template <group_access Access, unsigned Bytes>
LLMMEM_HD inline void store_aligned(std::byte* to, const packet<Bytes>& in, std::uint32_t width) noexcept {
  if constexpr (Access == group_access::pieces) {
    if constexpr (Bytes > 4) {
      if (width < Bytes && width >= 4) return store_by<4>(to, in);
    }
    if constexpr (Bytes > 2) {
      if (width < Bytes && width >= 2) return store_by<2>(to, in);
    }
    if (width == 1) return store_by<1>(to, in);
  }
  store_packet<Bytes>(to, in);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
