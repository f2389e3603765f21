/// @file
/// How many heads the host's vectors and tiles attend with at a time.
#pragma once

#include <llmmem/config.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Query heads of an item at most. With their sums and a tile, 16 of 256 floats take 48 KiB: the first level
/// of a processor's cache, and a small part of a thread's stack.
inline constexpr std::uint32_t vector_heads = 16;

/// Returns the lanes that the products of query heads take: a vector of 16 has those of 16 / pitch tokens.
[[nodiscard]] constexpr std::size_t lane_pitch(std::size_t queries) noexcept {
  return queries == 1 ? 1 : queries <= 4 ? 4 : queries <= 8 ? 8 : 16;
}
/// Lanes of an item of AMX at most, and their elements: their sums take 32 KiB, and an item 105 KiB of a
/// thread's stack, because musl gives a thread 128 KiB; they stay in the second level of a processor's cache.
inline constexpr std::size_t walked_lanes = 64;
inline constexpr std::size_t walked_elements = walked_lanes * 128;
inline constexpr std::size_t most_walked = 16;

/// Returns the heads of the cache that an item of AMX reads together, if those of a token are neighbours.
/// @param group  query heads for each
/// @param elements  of a key or a value, the longer of both: at most 256
[[nodiscard]] constexpr std::uint32_t walked_heads(std::uint32_t heads, std::uint32_t group,
                                                   std::size_t elements) noexcept {
  const std::size_t all = elements <= 128 ? walked_lanes : walked_elements / 256;
  const std::size_t lanes = lane_pitch(std::min(group, vector_heads));
  return std::min(heads, static_cast<std::uint32_t>(std::min(most_walked, all / lanes)));
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
