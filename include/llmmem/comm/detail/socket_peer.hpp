/// @file
/// What a socket endpoint knows of another seat, and of connections that are not yet anyone's.
#pragma once

#include <llmmem/comm/detail/socket_handshake.hpp>
#include <llmmem/comm/detail/socket_lanes.hpp>
#include <llmmem/comm/detail/socket_system.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// How long data of a dead process may be on their way through a machine's TCP.
inline constexpr std::uint64_t drain_ns = 20'000'000;

/// Timers are looked at that often, at least.
inline constexpr std::uint64_t timer_ns = 50'000'000;

/// What an event is of; the highest byte of its key.
enum class socket_event : std::uint8_t { listener, wake, half_open, candidate, data, told, process };

/// Generations tell an event of a socket that is gone from one of that which has its place.
[[nodiscard]] constexpr std::uint64_t event_key(socket_event of, std::uint32_t generation,
                                                std::uint32_t index) noexcept {
  return (std::uint64_t{static_cast<std::uint8_t>(of)} << 56) |
         (std::uint64_t{generation & 0xFF'FFFFU} << 32) | index;
}

/// The lane to a seat on which things are told. The owner writes to it and the thread that beats: all of it
/// is under the endpoint's mutex.
struct told_writer {
  int socket = -1;  ///< the owner closes it, when this is -1 again
  int epoll = -1;
  std::uint64_t key = 0;
  waiting_bytes waiting;
  std::uint32_t sequence = 0;
  bool is_armed = false;       ///< epoll says when more can go
  bool is_overflowed = false;  ///< something did not fit
  lane_count sent{};
  std::uint64_t beats = 0;
};

/// Connections of a process that is not yet heard: it takes the seat when both are there.
struct seat_candidate {
  std::array<descriptor, 2> lanes;
  descriptor process;
  incarnation_id incarnation{};
  std::uint64_t since = 0;
  bool is_watched = false;  ///< both are there: it comes with the first that is told
  bool is_own = false;      ///< it is this very process

  [[nodiscard]] bool is_any() const noexcept { return lanes[0].is_open() || lanes[1].is_open(); }
  [[nodiscard]] bool is_whole() const noexcept { return lanes[0].is_open() && lanes[1].is_open(); }
};

/// Another seat.
struct socket_peer {
  enum class state : std::uint8_t {
    nobody,
    up,
    ending,    ///< something says that it is dead: what came before is still taken
    given_up,  ///< by this side, by that side, or suspected
  };
  enum class evidence : std::uint8_t { reset, leaving, exited };
  enum class told_death : std::uint8_t { none, suspected, certain };

  state now = state::nobody;
  evidence why = evidence::reset;
  told_death told_of = told_death::none;
  bool is_data_over = false;  ///< its end has been read
  bool is_told_over = false;
  bool has_buffers = false;
  bool has_dead = false;
  bool is_own = false;  ///< it sits in this very process: not to be killed
  bool is_soft_silent = false;
  std::uint32_t generation = 0;
  std::uint32_t watched = 0;  ///< events that epoll is asked for on the lane of data
  std::uint64_t ends_by = 0;  ///< when `ending`
  std::uint64_t heard = 0;    ///< on the clock of listening
  incarnation_id incarnation{};
  incarnation_id dead{};  ///< is not heard again

  descriptor data;
  descriptor told;
  descriptor process;
  data_reader data_in;
  told_reader told_in;
  waiting_bytes rest;  ///< of frames of data that were begun
  std::uint32_t data_sequence = 0;
  told_writer out;

  lane_count data_sent{};
  lane_count data_received{};
  lane_count told_received{};

  // Of seats below: calls there.
  std::uint64_t call_at = 0;
  std::uint64_t back_off = 0;
  std::array<std::uint32_t, 2> calls{};  ///< half-open connections plus 1, 0 for none
  bool must_knock = false;               ///< of seats above

  seat_candidate next;
  seat_absence absence = seat_absence::unheard;  ///< what is known of why nobody is connected there

  /// Whether it has said that it leaves, or was seen to have exited.
  [[nodiscard]] bool is_known_dead() const noexcept { return why != evidence::reset; }
};

/// A connection whose ends do not know each other yet.
struct half_open {
  enum class role : std::uint8_t { none, called, calls };

  role as = role::none;
  bool is_connecting = false;
  std::uint32_t generation = 0;
  seat_id seat{};  ///< whom it calls
  hello_purpose purpose = hello_purpose::data;
  std::uint64_t until = 0;
  descriptor socket;
  socket_handshake shaking;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
