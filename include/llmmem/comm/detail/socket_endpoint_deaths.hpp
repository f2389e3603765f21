/// @file
/// `socket_endpoint`: what says that a process is dead, and what follows.
#pragma once

#include <llmmem/comm/socket_endpoint.hpp>

namespace llmmem {
inline namespace v0 {

/// Says so; what came before is taken first, so that nothing is concluded here.
inline void socket_endpoint::evidence_of_death(peer& of, peer::evidence why) noexcept {
  if (of.now == peer::state::up) {
    of.now = peer::state::ending;
    of.why = why;
    of.ends_by = now_ + (why == peer::evidence::exited ? detail::drain_ns : options_.confirm_ns);
  } else if (of.now == peer::state::ending && why > of.why) {
    of.why = why;
    if (why == peer::evidence::exited) of.ends_by = now_ + detail::drain_ns;
  }
  if (of.now == peer::state::ending) due(of.ends_by);
}

inline void socket_endpoint::lane_ended(peer& of, detail::socket_lane lane, const handler_ref& handler) {
  if (lane == detail::socket_lane::data) {
    of.is_data_over = true;
    of.rest.clear();
    watch_data(of);
  } else {
    of.is_told_over = true;
    unwatch(of.told.get());
    const std::lock_guard lock(told_mutex_);
    of.out.socket = -1;
  }
  evidence_of_death(of, peer::evidence::reset);
  if (of.now != peer::state::given_up) return try_conclude(of, handler);
  if (!of.is_data_over || !of.is_told_over || of.process.is_open()) return;
  if (options_.reset == on_reset::dead) return conclude_certain(of, handler);
  close_lanes(of);
  of.now = peer::state::nobody;
}

inline void socket_endpoint::process_exited(peer& of, const handler_ref& handler) {
  unwatch(of.process.get());
  if (of.now == peer::state::given_up) return conclude_certain(of, handler);
  evidence_of_death(of, peer::evidence::exited);
  take_what_came(of, handler);
  try_conclude(of, handler);
}

/// All that is there. Nobody writes any more, but perhaps a child that holds the socket: not without end.
inline void socket_endpoint::take_what_came(peer& of, const handler_ref& handler) {
  for (int i = 0; i < 4096 && take_told(of, handler); ++i) {
  }
  if (held_.contains(seat_of(of))) ask_held(handler);
  for (int i = 0; i < 4096 && take_data(of, handler); ++i) {
  }
}

inline void socket_endpoint::try_conclude(peer& of, const handler_ref& handler) {
  if (of.now != peer::state::ending) return;
  const bool is_drained = of.is_data_over && of.is_told_over;
  const bool is_late = now_ >= of.ends_by;
  // Of a Unix socket everything has been taken: what was written is in the reader's buffer.
  const bool is_here = of.why == peer::evidence::exited && !options_.folder.empty();
  if (!is_drained && !is_late && !is_here) return;
  if (of.why == peer::evidence::reset && of.process.is_open()) {
    if (is_late) suspect(of, handler);
    return;
  }
  if (!is_here && !is_drained) take_what_came(of, handler);
  if (of.now != peer::state::ending) return;
  if (of.why == peer::evidence::reset && options_.reset == on_reset::suspected) return suspect(of, handler);
  conclude_certain(of, handler);
}

inline void socket_endpoint::conclude_certain(peer& of, const handler_ref& handler) noexcept {
  close_lanes(of);
  of.now = peer::state::nobody;
  of.dead = of.incarnation;
  of.has_dead = true;
  of.back_off = options_.first_call_ns;
  of.call_at = now_ + of.back_off;
  due(of.call_at);
  if (of.told_of == peer::told_death::certain) return;
  of.told_of = peer::told_death::certain;
  ++counted_.died;
  has_come_ = true;
  handler.on_died(handler.object, seat_of(of), death::certain);
}

/// Neither hears nor sends there any more, and leaves the connection open.
inline void socket_endpoint::stop_hearing(peer& of) noexcept {
  of.now = peer::state::given_up;
  of.dead = of.incarnation;
  of.has_dead = true;
  of.data_in.drain();
  of.told_in.mute();
  of.rest.clear();
  held_.erase(seat_of(of));
  watch_data(of);
}

inline void socket_endpoint::suspect(peer& of, const handler_ref& handler) {
  if (of.why != peer::evidence::exited && detail::has_exited(of.process)) return process_exited(of, handler);
  if (of.why == peer::evidence::exited && of.now == peer::state::ending) return conclude_certain(of, handler);
  stop_hearing(of);
  {
    const std::lock_guard lock(told_mutex_);
    of.out.is_overflowed = false;
    put_told(of.out, detail::frame_sort::given_up, {}, {});
  }
  if (of.told_of != peer::told_death::none) return;
  of.told_of = peer::told_death::suspected;
  ++counted_.suspected;
  has_come_ = true;
  handler.on_died(handler.object, seat_of(of), death::suspected);
}

/// What its endpoint says of itself.
inline void socket_endpoint::notices(peer& of, const handler_ref& handler) {
  if (of.told_in.is_leaving()) {
    if (of.now == peer::state::given_up) return conclude_certain(of, handler);
    evidence_of_death(of, peer::evidence::leaving);
    return try_conclude(of, handler);
  }
  if (!of.told_in.is_given_up() || of.now != peer::state::up) return;
  stop_hearing(of);
  of.told_of = peer::told_death::suspected;
  ++counted_.suspected;
  has_come_ = true;
  handler.on_died(handler.object, seat_of(of), death::suspected);
}

/// Nothing that follows has a meaning.
inline void socket_endpoint::malformed(peer& of, const handler_ref& handler) {
  ++counted_.malformed;
  of.data_in.drain();
  of.told_in.drain();
  if (of.now == peer::state::up || of.now == peer::state::ending) suspect(of, handler);
}

inline void socket_endpoint::judge_silence(peer& of, const handler_ref& handler) {
  std::uint64_t silent = listened_ - of.heard;
  of.is_soft_silent = silent >= options_.soft_silence_ns;
  if (options_.hard_silence_ns == 0 || silent < options_.hard_silence_ns) return;
  // It may have said something that is still to be read.
  take_what_came(of, handler);
  if (of.now != peer::state::up || listened_ - of.heard < options_.hard_silence_ns) return;
  if (options_.silence == on_silence::suspect || !of.process.is_open() || of.is_own)
    return suspect(of, handler);
  detail::kill_process(of.process);
  ++counted_.killed;
  evidence_of_death(of, peer::evidence::reset);
}

inline void socket_endpoint::close_lanes(peer& of) noexcept {
  {
    const std::lock_guard lock(told_mutex_);
    of.out.socket = -1;
    of.out.waiting.clear();
  }
  held_.erase(seat_of(of));
  if (seat_of(of) == hot_) hot_ = no_seat;
  if (of.watched != 0) unwatch(of.data.get());
  of.watched = 0;
  unwatch(of.told.get());
  unwatch(of.process.get());
  of.data.close();
  of.told.close();
  of.process.close();
  of.rest.clear();
  of.is_soft_silent = false;
  ++of.generation;
}

inline void socket_endpoint::run_timers(const handler_ref& handler) {
  next_timer_ = now_ + detail::timer_ns;
  if (accept_at_ != 0 && now_ >= accept_at_) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = detail::event_key(detail::socket_event::listener, 0, 0);
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event);
    accept_at_ = 0;
  }
  for (std::uint32_t slot = 0; slot < halves_.size() && open_halves_ != 0; ++slot) {
    if (halves_[slot].as == detail::half_open::role::none) continue;
    if (now_ < halves_[slot].until) {
      due(halves_[slot].until);
      continue;
    }
    ++counted_.too_slow;
    learn_absence(halves_[slot]);
    half_failed(slot);
  }
  for (peer& each : peers_) {
    if (each.now == peer::state::ending) {
      try_conclude(each, handler);
      if (each.now == peer::state::ending) due(each.ends_by);
    }
    // Given up before that was told, and its end is not looked at any more.
    if (each.now == peer::state::given_up && each.is_known_dead()) conclude_certain(each, handler);
    if (each.now != peer::state::up) continue;
    bool is_overflowed = false;
    {
      const std::lock_guard lock(told_mutex_);
      is_overflowed = each.out.is_overflowed;
    }
    if (is_overflowed) {
      ++counted_.overflowed;
      suspect(each, handler);
    } else {
      judge_silence(each, handler);
    }
  }
  run_calls();
  for (peer& each : peers_) {
    if (each.next.is_whole() && !each.next.is_watched) promote(each, handler);
  }
}

}  // namespace v0
}  // namespace llmmem
