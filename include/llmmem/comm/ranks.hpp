/// @file
/// `rank_id` and `rank_count`: who takes part.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem::inline v0 {

/// One of the processes that share a model, from 0: its place in a communicator.
enum class rank_id : std::uint32_t {};

/// How many ranks there are: the world.
enum class rank_count : std::uint32_t {};

/// The number in a strong type, to index or compute with.
[[nodiscard]] constexpr std::uint32_t to_index(rank_id rank) noexcept {
  return static_cast<std::uint32_t>(rank);
}
/// The number in it.
[[nodiscard]] constexpr std::uint32_t to_number(rank_count count) noexcept {
  return static_cast<std::uint32_t>(count);
}

}  // namespace llmmem::inline v0
