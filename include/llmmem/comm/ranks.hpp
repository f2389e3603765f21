/// @file
/// `rank_id`, `rank_count` and `seat_id`: the participants of a job.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// One of the processes that share a model, from 0: its number in a communicator.
enum class rank_id : std::uint32_t {};

/// The number of ranks: the world.
enum class rank_count : std::uint32_t {};

/// A place in a job, from 0. The process in it may die, and a fresh one take it. A rank numbers the living
/// processes and changes when one of them dies; a seat stays the same.
enum class seat_id : std::uint32_t {};

/// The maximum number of seats in a job. Each is connected with every other.
inline constexpr std::uint32_t max_seats = 256;

/// No seat.
inline constexpr seat_id no_seat{0xFFFF'FFFF};

/// Returns the number of a strong type, to index or compute with.
[[nodiscard]] constexpr std::uint32_t to_index(rank_id rank) noexcept {
  return static_cast<std::uint32_t>(rank);
}
/// Returns its number, as an index.
[[nodiscard]] constexpr std::uint32_t to_index(seat_id seat) noexcept {
  return static_cast<std::uint32_t>(seat);
}
/// Returns its number.
[[nodiscard]] constexpr std::uint32_t to_number(rank_count count) noexcept {
  return static_cast<std::uint32_t>(count);
}

}  // namespace v0
}  // namespace llmmem
