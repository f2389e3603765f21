/// @file
/// Parity by exclusive or: computed from pieces, updated when one changes, and used to restore a lost piece.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/redundancy/detail/xor_kernels.hpp>
#include <llmmem/redundancy/simd_path.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmmem {
inline namespace v0 {

// Pieces of any alignment and length: a shorter one counts as if zeros followed it, up to the destination's
// length. A piece may be the destination itself, or share no byte with it. No function here allocates, and
// any number of threads may call them on different destinations.

/// Computes `destination ^= source`.
///
/// @par Complexity   one pass, bound by memory from a few KiB on.
/// @pre has_simd_path(path).
/// @return `errc::past_the_bytes` if the source is longer than the destination, which then is unchanged.
inline result<void> xor_into(std::span<std::byte> destination, std::span<const std::byte> source,
                             simd_path path = best_simd_path()) noexcept {
  if (source.size() > destination.size()) {
    return failure{.code = errc::past_the_bytes,
                   .wanted = source.size(),
                   .found = destination.size(),
                   .where = "xor_into"};
  }
  if (source.empty()) return {};
  const std::byte* const both[] = {destination.data(), source.data()};
  detail::xor_fold<2>(path, destination.data(), both, source.size());
  return {};
}

namespace detail {

/// The size of the blocks of the destination that stay in the cache while further sources are added.
inline constexpr std::size_t xor_block = 8192;

/// Computes bytes `at` to `end` from all sources that are at least as long as `end`; no source ends between
/// the two.
inline void xor_range(std::span<std::byte> destination, std::span<const std::span<const std::byte>> sources,
                      std::size_t at, std::size_t end, simd_path path) noexcept {
  while (at < end) {
    const std::size_t bytes = std::min(end - at, xor_block);
    const std::byte* taken[xor_most];
    std::size_t count = 0;
    bool written = false;
    for (const std::span<const std::byte> source : sources) {
      if (source.size() <= at) continue;
      if (count == xor_most) {
        xor_fold(path, destination.data() + at, taken, count, bytes);
        written = true;
        taken[0] = destination.data() + at;
        count = 1;
      }
      taken[count++] = source.data() + at;
    }
    if (count != 0) xor_fold(path, destination.data() + at, taken, count, bytes);
    if (count == 0 && !written) std::memset(destination.data() + at, 0, bytes);
    at += bytes;
  }
}

}  // namespace detail

/// Sets `destination` to the exclusive or of all `sources`: the parity of data pieces, or a lost piece from
/// the parity and the remaining pieces. Only the first source may be the destination.
///
/// @par Complexity   each source is read once and the destination written once; blocks of 8 KiB stay in the
///   cache if there are more than five sources. O(sources^2) if all lengths differ.
/// @pre has_simd_path(path).
/// @return `errc::past_the_bytes` if the source with number `index` is longer than the destination, which
///         then is unchanged.
inline result<void> xor_all(std::span<std::byte> destination,
                            std::span<const std::span<const std::byte>> sources,
                            simd_path path = best_simd_path()) noexcept {
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (sources[i].size() > destination.size()) {
      return failure{.code = errc::past_the_bytes,
                     .index = static_cast<std::uint32_t>(i),
                     .wanted = sources[i].size(),
                     .found = destination.size(),
                     .where = "xor_all"};
    }
  }
  std::size_t at = 0;
  while (at < destination.size()) {
    // The next segment ends where the shortest remaining source does.
    std::size_t end = destination.size();
    for (const std::span<const std::byte> source : sources) {
      if (source.size() > at) end = std::min(end, source.size());
    }
    detail::xor_range(destination, sources, at, end, path);
    at = end;
  }
  return {};
}

/// Updates a parity when one of its pieces changes from `before` to `after`: `parity ^= before ^ after`. The
/// other pieces are not needed.
///
/// @par Complexity   one pass over the three.
/// @pre has_simd_path(path).
/// @return `errc::past_the_bytes` if a piece is longer than the parity, which then is unchanged.
/// @par Source   the read-modify-write of RAID-4 and RAID-5: Patterson, Gibson and Katz, SIGMOD 1988.
inline result<void> update_parity(std::span<std::byte> parity, std::span<const std::byte> before,
                                  std::span<const std::byte> after,
                                  simd_path path = best_simd_path()) noexcept {
  const std::size_t longest = std::max(before.size(), after.size());
  if (longest > parity.size()) {
    return failure{
        .code = errc::past_the_bytes, .wanted = longest, .found = parity.size(), .where = "update_parity"};
  }
  const std::size_t common = std::min(before.size(), after.size());
  if (common != 0) {
    const std::byte* const all[] = {parity.data(), before.data(), after.data()};
    detail::xor_fold<3>(path, parity.data(), all, common);
  }
  const std::span<const std::byte> longer = before.size() < after.size() ? after : before;
  return xor_into(parity.subspan(common), longer.subspan(common), path);
}

/// Computes the lost piece's first `lost.size()` bytes, from the parity and all other pieces.
///
/// @par Complexity   as `xor_all`.
/// @pre has_simd_path(path). `lost` shares no byte with its sources.
/// @return `errc::past_the_bytes` if `lost` is longer than the parity, and therefore than any piece.
inline result<void> rebuild_lost(std::span<std::byte> lost, std::span<const std::byte> parity,
                                 std::span<const std::span<const std::byte>> others,
                                 simd_path path = best_simd_path()) noexcept {
  if (lost.size() > parity.size()) {
    return failure{
        .code = errc::past_the_bytes, .wanted = lost.size(), .found = parity.size(), .where = "rebuild_lost"};
  }
  // Takes only as many bytes of the other pieces as were lost, because the rest does not matter.
  for (std::size_t at = 0; at < lost.size(); at += detail::xor_block) {
    const std::span<std::byte> block = lost.subspan(at, std::min(lost.size() - at, detail::xor_block));
    std::span<const std::byte> pieces[detail::xor_most] = {parity.subspan(at, block.size())};
    std::size_t count = 1;
    for (const std::span<const std::byte> other : others) {
      if (other.size() <= at) continue;
      if (count == detail::xor_most) {
        static_cast<void>(xor_all(block, pieces, path));  // cannot fail: no source is longer
        pieces[0] = block;
        count = 1;
      }
      pieces[count++] = other.subspan(at, std::min(other.size() - at, block.size()));
    }
    static_cast<void>(xor_all(block, std::span(pieces).first(count), path));
  }
  return {};
}

}  // namespace v0
}  // namespace llmmem
