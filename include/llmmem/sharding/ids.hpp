/// @file
/// The names of who takes part: ranks, and the holders of stored pieces.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/chunk_mapping.hpp>

#include <cstdint>

namespace llmmem::inline v0 {

/// One of the processes that share a model, from 0: its place in a communicator.
enum class rank_id : std::uint32_t {};

/// How many ranks there are: the world.
enum class rank_count : std::uint32_t {};

/// Who holds a stored piece: a file of a checkpoint by its index, or a live rank by its number.
enum class holder_id : std::uint32_t {};

/// A holder that is none.
inline constexpr holder_id no_holder{0xFFFF'FFFF};

/// The number in a strong type, to index or compute with.
[[nodiscard]] constexpr std::uint32_t to_index(rank_id rank) noexcept {
  return static_cast<std::uint32_t>(rank);
}
[[nodiscard]] constexpr std::uint32_t to_index(holder_id holder) noexcept {
  return static_cast<std::uint32_t>(holder);
}
[[nodiscard]] constexpr std::uint32_t to_number(rank_count count) noexcept {
  return static_cast<std::uint32_t>(count);
}

}  // namespace llmmem::inline v0
