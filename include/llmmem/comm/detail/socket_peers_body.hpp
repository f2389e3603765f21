/// @file
/// `socket_peers`: reading, and the conclusions from it.
#pragma once

#include <llmmem/comm/detail/socket_peers.hpp>

namespace llmmem {
inline namespace v0 {
namespace detail {

inline void socket_peers::connect(seat_id seat, descriptor data, descriptor told, descriptor process,
                                  const incarnation_id& incarnation, bool is_own, handler_call& call,
                                  const std::array<lane_seals, 2>& seals) noexcept {
  close(seat);
  forged_seats_.erase(seat);
  detector_.seat(seat, incarnation, std::move(process), is_own);
  lanes_.open(seat, std::move(data), std::move(told), seals);
  control_.open(seat, lanes_.told_socket(seat), lanes_.told_key(seat),
                seals[static_cast<std::size_t>(socket_lane::told)].out);
  const std::uint64_t key = event_key(socket_event::process, lanes_.generation(seat), to_index(seat));
  if (detector_.process(seat).is_open()) poller_.add(detector_.process(seat).get(), EPOLLIN, key);
  call.on_joined(seat);
}

inline void socket_peers::give_up(seat_id seat) noexcept {
  if (!has(seat) || is_free(seat)) return;
  stop_hearing(seat);
  // A known death is reported with the next timers, because no event will follow it.
  if (detector_.is_known_dead(seat)) poller_.clock().due(poller_.clock().now());
  control_.give_up(seat);
}

inline void socket_peers::leave() noexcept {
  for (std::uint32_t i = 0; i < seats_; ++i) {
    const seat_id seat{i};
    if (!lanes_.is_open(seat)) continue;
    if (detector_.is_up(seat)) static_cast<void>(flush(seat));
    control_.leave(seat);
    lanes_.shut_down(seat);
    close(seat);
  }
}

inline void socket_peers::ask_held(handler_call& call) noexcept {
  const seat_set asked = lanes_.held();
  for (const seat_id seat : asked) {
    if (!lanes_.held().contains(seat)) continue;
    malformed(seat, socket_lane::data, lanes_.ask(seat, call), call);
  }
}

inline bool socket_peers::read_last(handler_call& call) noexcept {
  const seat_id seat = lanes_.last_from();
  if (seat == no_seat || !detector_.is_up(seat)) return false;
  const std::uint64_t before = lanes_.taken(seat);
  static_cast<void>(take_data(seat, call));
  return lanes_.taken(seat) != before;
}

inline void socket_peers::handle(const ready_event& event, handler_call& call) noexcept {
  const seat_id seat{event.index};
  switch (event.of) {
    case socket_event::process:
      return process_exited(seat, call);
    case socket_event::told:
      if (event.is_writable) control_.flush(seat);
      if (event.is_readable) static_cast<void>(take_told(seat, call));
      return;
    default:
      if (event.is_writable) static_cast<void>(flush(seat));
      // For a held lane epoll reports only its end, and then nothing can be written to it.
      if (event.is_readable && lanes_.held().contains(seat)) lanes_.forget_rest(seat);
      lanes_.watch(seat);
      if (event.is_readable) static_cast<void>(take_data(seat, call));
  }
}

/// Returns whether there may be more.
inline bool socket_peers::take_data(seat_id from, handler_call& call) noexcept {
  for (int round = 0; round < 16; ++round) {
    const lane_read got = lanes_.read_data(from, call);
    if (got.bytes != 0) detector_.heard(from);
    if (got.event == lane_event::ended) lane_ended(from, socket_lane::data, call);
    malformed(from, socket_lane::data, got.event, call);
    if (got.event != lane_event::more) return false;
  }
  return true;
}

/// Returns whether there may be more.
inline bool socket_peers::take_told(seat_id from, handler_call& call) noexcept {
  for (int round = 0; round < 16; ++round) {
    const lane_read got = lanes_.read_told(from, call);
    if (got.bytes != 0) detector_.heard(from);
    if (got.event == lane_event::ended) lane_ended(from, socket_lane::told, call);
    if (got.bytes != 0) read_notices(from, call);  // also those before malformed bytes
    if (lanes_.is_open(from)) malformed(from, socket_lane::told, got.event, call);
    if (got.event != lane_event::more) return false;
  }
  return true;
}

/// Reads everything that arrived. The process writes no more, but a child of it may hold the socket and
/// write: so the rounds are bounded.
inline void socket_peers::take_what_came(seat_id of, handler_call& call) noexcept {
  for (int i = 0; i < 4096 && take_told(of, call); ++i) {
  }
  if (lanes_.held().contains(of)) ask_held(call);
  for (int i = 0; i < 4096 && take_data(of, call); ++i) {
  }
}

inline void socket_peers::lane_ended(seat_id of, socket_lane lane, handler_call& call) noexcept {
  lanes_.end(of, lane);
  if (lane == socket_lane::told) control_.close(of);
  detector_.note(of, death_evidence::reset);
  if (detector_.state(of) != seat_state::given_up) return try_conclude(of, call);
  if (!lanes_.have_ended(of)) return;
  switch (detector_.judge_given_up(of)) {
    case death_verdict::certain:
      return conclude_certain(of, call);
    case death_verdict::suspected:
      return close(of);
    default:
      return;
  }
}

inline void socket_peers::process_exited(seat_id of, handler_call& call) noexcept {
  poller_.remove(detector_.process(of).get());
  if (detector_.state(of) == seat_state::given_up) return conclude_certain(of, call);
  detector_.note(of, death_evidence::exited);
  take_what_came(of, call);
  try_conclude(of, call);
}

/// Everything that follows on this lane is meaningless. It may have contained the notice that the process
/// gave this one up, so the process is suspected even if it may be known to be dead: its end does not undo
/// that.
inline void socket_peers::malformed(seat_id of, socket_lane lane, lane_event what,
                                    handler_call& call) noexcept {
  if (what != lane_event::malformed && what != lane_event::forged) return;
  if (lane == socket_lane::told) lanes_.drain(of);
  if (is_free(of)) return;  // it is already ignored
  ++(what == lane_event::forged ? forged_ : malformed_);
  if (what == lane_event::forged) forged_seats_.insert(of);
  conclude_suspected(of, call);
  if (detector_.is_known_dead(of)) poller_.clock().due_at_once();
}

/// Acts on the notices of the other endpoint. One read may find both: the notice that it gave this process up
/// comes first, because its members may have continued without this process, and its end does not undo that.
inline void socket_peers::read_notices(seat_id of, handler_call& call) noexcept {
  if (lanes_.is_given_up(of) && !is_free(of)) {
    if (detector_.is_up(of)) stop_hearing(of);
    if (detector_.report_suspected(of)) call.on_death(of, comm::death::suspected);
  }
  if (!lanes_.is_leaving(of)) return;
  if (detector_.state(of) == seat_state::given_up) return conclude_certain(of, call);
  detector_.note(of, death_evidence::leaving);
  try_conclude(of, call);
}

inline void socket_peers::judge_silence(seat_id of, handler_call& call) noexcept {
  if (detector_.may_excuse(of) && wants_core_(detector_.process(of))) detector_.excuse(of);
  if (!detector_.look_at_silence(of)) return;
  // It may have sent data that is still unread.
  take_what_came(of, call);
  if (!detector_.is_up(of) || !detector_.is_silent(of)) return;
  if (!detector_.may_kill(of)) return suspect(of, call);
  detector_.kill(of);
}

inline void socket_peers::try_conclude(seat_id of, handler_call& call) noexcept {
  death_verdict verdict = detector_.judge(of, lanes_.have_ended(of));
  if (verdict == death_verdict::read_rest) {
    take_what_came(of, call);
    verdict = detector_.judge_rest(of);
  }
  if (verdict == death_verdict::suspected) return suspect(of, call);
  if (verdict == death_verdict::certain) conclude_certain(of, call);
}

inline void socket_peers::conclude_certain(seat_id of, handler_call& call) noexcept {
  close(of);
  calls_.seat_freed(of);
  if (detector_.report_certain(of)) call.on_death(of, comm::death::certain);
}

inline void socket_peers::suspect(seat_id of, handler_call& call) noexcept {
  switch (detector_.judge_suspect(of)) {
    case death_verdict::read_rest:
      return process_exited(of, call);
    case death_verdict::certain:
      return conclude_certain(of, call);
    default:
      return conclude_suspected(of, call);
  }
}

inline void socket_peers::conclude_suspected(seat_id of, handler_call& call) noexcept {
  stop_hearing(of);
  control_.give_up(of);
  if (detector_.report_suspected(of)) call.on_death(of, comm::death::suspected);
}

/// Stops receiving from and sending to that seat, and leaves the connection open.
inline void socket_peers::stop_hearing(seat_id of) noexcept {
  detector_.give_up(of);
  lanes_.mute(of);
}

inline void socket_peers::close(seat_id of) noexcept {
  control_.close(of);
  poller_.remove(detector_.process(of).get());
  lanes_.close(of);
  detector_.vacate(of);
}

inline void socket_peers::run_timers(handler_call& call) noexcept {
  for (std::uint32_t i = 0; i < seats_; ++i) {
    const seat_id seat{i};
    if (detector_.state(seat) == seat_state::ending) {
      try_conclude(seat, call);
      if (detector_.state(seat) == seat_state::ending) detector_.remind(seat);
    }
    // It was given up before its death was reported, and no event will follow.
    if (detector_.state(seat) == seat_state::given_up && detector_.is_known_dead(seat))
      conclude_certain(seat, call);
    if (!detector_.is_up(seat)) continue;
    if (control_.has_overflowed(seat)) {
      ++overflowed_;
      suspect(seat, call);
    } else {
      judge_silence(seat, call);
    }
  }
}

inline void socket_peers::add_to(socket_stats& all) const noexcept {
  lanes_.add_to(all);
  detector_.add_to(all);
  all.malformed += malformed_;
  all.forged += forged_;
  all.overflowed += overflowed_;
  all.dropped += dropped_;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
