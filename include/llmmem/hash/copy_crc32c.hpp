/// @file
/// `copy_crc32c`: a copy that computes its CRC-32C on the way.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Without folding. The checksum of a piece finds it in the first cache.
inline std::uint32_t copy_crc32c_in_pieces(std::uint32_t crc, std::span<const std::byte> from,
                                           std::span<std::byte> into) noexcept {
  constexpr std::size_t piece = 16384;
  for (std::size_t at = 0; at < from.size(); at += piece) {
    const std::size_t bytes = from.size() - at < piece ? from.size() - at : piece;
    std::memcpy(into.data() + at, from.data() + at, bytes);
    crc = crc32c(crc, into.subspan(at, bytes));
  }
  return crc;
}

}  // namespace detail

/// Copies `from` to `into`, and returns the CRC-32C of the bytes that arrived, after earlier bytes whose
/// checksum is `crc`; 0 at the beginning.
///
///     if (llmmem::copy_crc32c(0, stored, block) != sum) return errc::checksum_differs;
///
/// For bytes that another thread or process may change meanwhile: the checksum is that of `into`, also if
/// `from` has changed since.
///
/// @pre `into` has at least as many bytes as `from`, and the two do not overlap.
/// @par Complexity   with VPCLMULQDQ and AVX-512 (x86-64, tested at run time) one pass that takes as long as
///      `memcpy`, because both wait for memory; otherwise a copy and a checksum of 16 KiB in turns, so that
///      the checksum finds its bytes in the first cache.
/// @par Thread safety   as `memcpy`.
/// @par Source   see `crc32c`.
inline std::uint32_t copy_crc32c(std::uint32_t crc, std::span<const std::byte> from,
                                 std::span<std::byte> into) noexcept {
  if (detail::folds_crc32c(from.size())) {
    const std::size_t folded = from.size() - from.size() % detail::crc32c_round;
    detail::crc32c_rest rest;
    detail::crc32c_fold_copy(~crc, from.data(), into.data(), folded / detail::crc32c_round, rest);
    const std::size_t left = from.size() - folded;
    if (left != 0) std::memcpy(into.data() + folded, from.data() + folded, left);
    return ~detail::crc32c_after_fold(rest, into.subspan(folded, left));
  }
  return detail::copy_crc32c_in_pieces(crc, from, into);
}

}  // namespace v0
}  // namespace llmmem
