/// @file
/// `rank_id`, `rank_count` and `seat_id`: who takes part.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// One of the processes that share a model, from 0: its place in a communicator.
enum class rank_id : std::uint32_t {};

/// How many ranks there are: the world.
enum class rank_count : std::uint32_t {};

/// A place in a job, from 0. Whoever sits there may die, and a fresh process take it; a rank is a place among
/// those who live, and changes when one of them dies: a seat stays what it is.
enum class seat_id : std::uint32_t {};

/// The most seats a job may have: all are connected with all.
inline constexpr std::uint32_t max_seats = 256;

/// A seat that is none.
inline constexpr seat_id no_seat{0xFFFF'FFFF};

/// The number in a strong type, to index or compute with.
[[nodiscard]] constexpr std::uint32_t to_index(rank_id rank) noexcept {
  return static_cast<std::uint32_t>(rank);
}
/// The number in it, to index with.
[[nodiscard]] constexpr std::uint32_t to_index(seat_id seat) noexcept {
  return static_cast<std::uint32_t>(seat);
}
/// The number in it.
[[nodiscard]] constexpr std::uint32_t to_number(rank_count count) noexcept {
  return static_cast<std::uint32_t>(count);
}

}  // namespace v0
}  // namespace llmmem
