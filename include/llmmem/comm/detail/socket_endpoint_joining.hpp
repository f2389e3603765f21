/// @file
/// `socket_endpoint`: connections that are made, and become known.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/socket_endpoint.hpp>

#include <array>
#include <cerrno>
#include <utility>

namespace llmmem {
inline namespace v0 {

inline void socket_endpoint::accept_some() noexcept {
  for (int i = 0; i < 16; ++i) {
    detail::descriptor made(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!made.is_open()) {
      if (detail::would_block(errno)) return;
      if (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS) continue;
      // What cannot be accepted stays ready: not to be asked about all the time.
      unwatch(listener_.get());
      accept_at_ = now_ + detail::timer_ns;
      due(accept_at_);
      return;
    }
    ++counted_.called;
    if (called_ >= options_.most_half_open) {
      ++counted_.crowded_out;
      continue;
    }
    const bool is_unix = addresses_[to_index(self())].is_unix();
    if (is_unix && detail::credentials_of(made.get()).uid != ::geteuid()) {
      ++counted_.strangers;
      by_nobody_ = seat_absence::foreign;
      continue;
    }
    const int one = 1;
    if (!is_unix) ::setsockopt(made.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    const std::uint32_t slot = free_half();
    detail::half_open& half = halves_[slot];
    detail::wire_hello hello = mine_;
    if (!detail::fill_random(hello.nonce)) continue;
    half.socket = std::move(made);
    half.as = detail::half_open::role::called;
    half.until = now_ + options_.handshake_ns;
    half.is_connecting = false;
    half.shaking.listen(hello);
    ++open_halves_;
    ++called_;
    due(half.until);
    if (!watch_half(slot, EPOLLIN)) close_half(slot);
  }
}

/// There always is one: as many as others may have, and two for each seat, and for knocks.
inline std::uint32_t socket_endpoint::free_half() const noexcept {
  std::uint32_t slot = 0;
  while (halves_[slot].as != detail::half_open::role::none)
    ++slot;
  return slot;
}

inline bool socket_endpoint::watch_half(std::uint32_t slot, std::uint32_t events) noexcept {
  epoll_event event{};
  event.events = events;
  event.data.u64 = detail::event_key(detail::socket_event::half_open, halves_[slot].generation, slot);
  const int socket = halves_[slot].socket.get();
  return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event) == 0 ||
         ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, socket, &event) == 0;
}

inline void socket_endpoint::close_half(std::uint32_t slot) noexcept {
  detail::half_open& half = halves_[slot];
  if (half.as == detail::half_open::role::called) --called_;
  if (half.as == detail::half_open::role::calls && half.purpose == detail::hello_purpose::knock) --knocks_;
  --open_halves_;
  half.as = detail::half_open::role::none;
  ++half.generation;
  unwatch(half.socket.get());
  half.socket.close();
}

inline void socket_endpoint::run_calls() noexcept {
  for (peer& each : peers_) {
    const std::uint32_t seat = to_index(seat_of(each));
    if (seat > to_index(self())) {
      if (each.next.is_any() && !each.next.is_whole()) {
        const std::uint64_t until = each.next.since + options_.handshake_ns;
        if (now_ >= until) drop_candidate(each);
        due(until > now_ ? until : now_ + detail::timer_ns);
      }
      if (each.must_knock && knocks_ < 16) knock(each);
    } else if (seat < to_index(self())) {
      const bool is_free = each.now == peer::state::nobody || each.now == peer::state::given_up;
      if (!is_free || each.calls[0] != 0 || each.calls[1] != 0 || each.next.is_whole()) continue;
      if (now_ >= each.call_at) call(each);
      if (each.calls[0] == 0) due(each.call_at);
    }
  }
}

/// Begins to make a connection; its slot plus 1, or 0.
inline std::uint32_t socket_endpoint::begin_call(peer& whom, detail::hello_purpose purpose) noexcept {
  const seat_id seat = seat_of(whom);
  const detail::socket_address& address = addresses_[to_index(seat)];
  detail::descriptor made = detail::make_socket(address, options_.socket_bytes);
  detail::wire_hello hello = mine_;
  hello.purpose = purpose;
  hello.to = seat;
  if (!made.is_open() || !detail::fill_random(hello.nonce)) return 0;
  const bool is_there = ::connect(made.get(), address.get(), address.size) == 0;
  if (!is_there && errno != EINPROGRESS) {
    not_reached(whom, purpose, errno);
    return 0;
  }
  const std::uint32_t slot = free_half();
  detail::half_open& half = halves_[slot];
  half.socket = std::move(made);
  half.as = detail::half_open::role::calls;
  half.seat = seat;
  half.purpose = purpose;
  half.until = now_ + options_.handshake_ns;
  half.is_connecting = true;
  half.shaking.call(hello);
  ++open_halves_;
  if (purpose == detail::hello_purpose::knock) ++knocks_;
  due(half.until);
  if (watch_half(slot, EPOLLOUT)) return slot + 1;
  close_half(slot);
  return 0;
}

inline void socket_endpoint::call(peer& whom) noexcept {
  whom.calls[0] = begin_call(whom, detail::hello_purpose::data);
  whom.calls[1] = whom.calls[0] == 0 ? 0 : begin_call(whom, detail::hello_purpose::told);
  if (whom.calls[1] == 0) call_failed(whom);
}

inline void socket_endpoint::knock(peer& whom) noexcept {
  whom.must_knock = false;
  static_cast<void>(begin_call(whom, detail::hello_purpose::knock));
}

inline void socket_endpoint::call_failed(peer& whom) noexcept {
  for (std::uint32_t& slot : whom.calls) {
    if (slot != 0) close_half(slot - 1);
    slot = 0;
  }
  drop_candidate(whom);
  whom.call_at = now_ + whom.back_off;
  whom.back_off = whom.back_off * 2 < options_.last_call_ns ? whom.back_off * 2 : options_.last_call_ns;
  due(whom.call_at);
}

/// A knock is made once: it says nothing of what is there later.
inline void socket_endpoint::not_reached(peer& whom, detail::hello_purpose purpose, int why) noexcept {
  if (purpose == detail::hello_purpose::knock) return;
  const bool is_nobody = why == ECONNREFUSED || why == ENOENT;
  whom.absence = is_nobody ? seat_absence::nobody_listens : seat_absence::unreachable;
}

/// A connection has come to nothing, without a word or for one that was refused: what that says of a seat.
inline void socket_endpoint::learn_absence(const detail::half_open& half) noexcept {
  using refusal = detail::socket_handshake::refusal;
  const bool is_call = half.as == detail::half_open::role::calls;
  const seat_id seat = is_call ? half.seat : half.shaking.theirs().from;
  const refusal why = half.shaking.why();
  if (why == refusal::other_version) ++counted_.other_version;
  if (is_call && half.purpose == detail::hello_purpose::knock) return;
  // Who says nothing that can be read, and called, may be anybody.
  if (!is_call && why == refusal::no_hello) by_nobody_ = seat_absence::foreign;
  if (!is_call && why == refusal::other_version) by_nobody_ = seat_absence::other_version;
  if (!is_call && why != refusal::other_seat && why != refusal::wrong_proof) return;
  if (to_index(seat) >= peers_.size()) return;
  peer& whom = peers_[to_index(seat)];
  if (whom.now == peer::state::up) return;  // somebody else only said that name
  switch (why) {
    case refusal::none:
      whom.absence = half.is_connecting          ? seat_absence::unreachable
                     : half.shaking.has_proved() ? seat_absence::other_secret
                     : now_ >= half.until        ? seat_absence::no_answer
                                                 : seat_absence::foreign;
      return;
    case refusal::no_hello:
      whom.absence = seat_absence::foreign;
      return;
    case refusal::other_version:
      whom.absence = seat_absence::other_version;
      return;
    case refusal::other_seat:
      whom.absence = seat_absence::other_seat;
      return;
    case refusal::wrong_proof:
      whom.absence = seat_absence::other_secret;
      return;
  }
}

inline seat_absence socket_endpoint::why_missing(seat_id seat) const noexcept {
  if (to_index(seat) >= peers_.size()) return seat_absence::unheard;
  const seat_absence known = peers_[to_index(seat)].absence;
  // Seats above call, and one whose words cannot be read does not say where it sits.
  const bool may_have_called = to_index(seat) > to_index(self()) && !is_connected(seat);
  return known == seat_absence::unheard && may_have_called ? by_nobody_ : known;
}

inline void socket_endpoint::half_failed(std::uint32_t slot) noexcept {
  const detail::half_open& half = halves_[slot];
  if (half.as == detail::half_open::role::calls && half.purpose != detail::hello_purpose::knock)
    return call_failed(peers_[to_index(half.seat)]);
  close_half(slot);
}

/// A message is shorter than any socket's buffer, which is empty: all of it goes, or the connection is
/// broken.
inline bool socket_endpoint::say(std::uint32_t slot) noexcept {
  const std::span<const std::byte> said = halves_[slot].shaking.says();
  return detail::write_some(halves_[slot].socket.get(), said, {}) == static_cast<ssize_t>(said.size());
}

inline void socket_endpoint::advance(std::uint32_t slot, const handler_ref& handler) {
  detail::half_open& half = halves_[slot];
  if (half.is_connecting) {
    int failed = 0;
    socklen_t size = sizeof(failed);
    ::getsockopt(half.socket.get(), SOL_SOCKET, SO_ERROR, &failed, &size);
    half.is_connecting = false;
    const bool is_unix = addresses_[to_index(half.seat)].is_unix();
    const bool is_other_user = is_unix && detail::credentials_of(half.socket.get()).uid != ::geteuid();
    if (is_other_user) ++counted_.strangers;
    if (failed == 0 && !is_other_user && watch_half(slot, EPOLLIN) && say(slot)) return;
    if (failed != 0) not_reached(peers_[to_index(half.seat)], half.purpose, failed);
    if (failed == 0) learn_absence(half);
    half_failed(slot);
    return;
  }
  for (;;) {
    const std::span<std::byte> into = half.shaking.wanted();
    const ssize_t got = ::recv(half.socket.get(), into.data(), into.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && detail::would_block(errno)) return;
    if (got <= 0) {
      learn_absence(half);
      return half_failed(slot);
    }
    switch (half.shaking.took(static_cast<std::size_t>(got), secret_)) {
      case detail::socket_handshake::turn::wait:
        break;
      case detail::socket_handshake::turn::say:
        if (!say(slot)) return half_failed(slot);
        break;
      case detail::socket_handshake::turn::judge:
        return judge(slot);
      case detail::socket_handshake::turn::settled:
        return settled(slot, handler);
      case detail::socket_handshake::turn::refused:
        ++counted_.strangers;
        learn_absence(half);
        if (half.shaking.has_farewell()) static_cast<void>(say(slot));
        return half_failed(slot);
    }
  }
}

/// A caller knows the secret.
inline void socket_endpoint::judge(std::uint32_t slot) noexcept {
  detail::half_open& half = halves_[slot];
  const detail::wire_hello& caller = half.shaking.theirs();
  const detail::hello_answer answer = answer_to(caller);
  half.shaking.answer(answer, secret_);
  const bool is_lane = caller.purpose != detail::hello_purpose::knock;
  if (!say(slot) || answer != detail::hello_answer::welcome || !is_lane) return close_half(slot);
  peer& of = peers_[to_index(caller.from)];
  take_lane(of, slot);
  if (!of.next.is_whole()) return;
  // The caller may have gone meanwhile: it is heard first, and comes then.
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = detail::event_key(detail::socket_event::candidate, of.generation, to_index(seat_of(of)));
  of.next.is_watched = ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, of.next.lanes[1].get(), &event) == 0;
}

inline detail::hello_answer socket_endpoint::answer_to(const detail::wire_hello& caller) noexcept {
  if (caller.seats != mine_.seats || caller.frame_bytes != mine_.frame_bytes) {
    ++counted_.mismatched;
    // With more seats than here, it may be one that there is not.
    if (to_index(caller.from) < peers_.size())
      peers_[to_index(caller.from)].absence = seat_absence::other_options;
    return detail::hello_answer::mismatched;
  }
  peer& of = peers_[to_index(caller.from)];
  if (of.has_dead && caller.incarnation == of.dead) {
    of.absence = seat_absence::ended;
    ++counted_.unwanted;
    return detail::hello_answer::unwanted;
  }
  if (caller.purpose == detail::hello_purpose::knock) {
    of.back_off = options_.first_call_ns;
    of.call_at = now_;
    due(now_);
    return detail::hello_answer::welcome;
  }
  const bool is_same = of.next.incarnation == caller.incarnation;
  const bool is_waited_for = of.next.is_any() && !is_same && !detail::has_exited(of.next.process) &&
                             (!of.next.lanes[0].is_open() || detail::is_open_there(of.next.lanes[0])) &&
                             (!of.next.lanes[1].is_open() || detail::is_open_there(of.next.lanes[1]));
  if (of.now == peer::state::up || of.now == peer::state::ending || is_waited_for) {
    ++counted_.busy;
    return detail::hello_answer::busy;
  }
  if (of.next.is_any() && (!is_same || of.next.is_whole())) drop_candidate(of);
  return detail::hello_answer::welcome;
}

/// A listener knows the secret, and has answered.
inline void socket_endpoint::settled(std::uint32_t slot, const handler_ref& handler) {
  detail::half_open& half = halves_[slot];
  const detail::hello_answer answer = half.shaking.answered();
  if (half.purpose == detail::hello_purpose::knock) return close_half(slot);
  const detail::wire_hello& theirs = half.shaking.theirs();
  peer& of = peers_[to_index(half.seat)];
  if (answer == detail::hello_answer::mismatched) ++counted_.mismatched;
  const bool is_old = of.has_dead && theirs.incarnation == of.dead;
  of.absence = answer == detail::hello_answer::unwanted     ? seat_absence::given_up
               : answer == detail::hello_answer::mismatched ? seat_absence::other_options
               : answer == detail::hello_answer::busy       ? seat_absence::seat_taken
               : is_old                                     ? seat_absence::ended
                                                            : seat_absence::unheard;
  const bool is_another = of.next.is_any() && of.next.incarnation != theirs.incarnation;
  if (answer != detail::hello_answer::welcome || is_old || is_another) return call_failed(of);
  of.calls[static_cast<std::size_t>(half.purpose)] = 0;
  take_lane(of, slot);
  if (of.next.is_whole()) promote(of, handler);
}

/// The connection becomes a lane of who is to sit there next.
inline void socket_endpoint::take_lane(peer& of, std::uint32_t slot) noexcept {
  detail::half_open& half = halves_[slot];
  const detail::wire_hello& theirs = half.shaking.theirs();
  const bool is_local = theirs.boot == mine_.boot && theirs.boot != detail::incarnation_id{} &&
                        theirs.pid_space == mine_.pid_space && theirs.pid_space != 0;
  unwatch(half.socket.get());
  if (!of.next.is_any()) {
    of.next.since = now_;
    due(now_ + options_.handshake_ns);
    of.next.incarnation = theirs.incarnation;
    of.next.is_own = is_local && theirs.pid == mine_.pid;
    if (!options_.folder.empty()) {
      of.next.process = detail::open_peer_process(half.socket.get());
    } else if (is_local) {
      of.next.process = detail::open_process(theirs.pid);
    }
  }
  of.next.lanes[theirs.purpose == detail::hello_purpose::told ? 1 : 0] = std::move(half.socket);
  close_half(slot);
}

inline void socket_endpoint::look_at_candidate(peer& of, const handler_ref& handler) {
  if (!of.next.is_watched) return;
  std::byte first{};
  const ssize_t got = ::recv(of.next.lanes[1].get(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
  if (got > 0) return promote(of, handler);
  if (got < 0 && (detail::would_block(errno) || errno == EINTR)) return;
  drop_candidate(of);
}

inline void socket_endpoint::drop_candidate(peer& of) noexcept {
  if (of.next.is_watched) unwatch(of.next.lanes[1].get());
  of.next = {};
}

/// Whoever was to sit there next does.
inline void socket_endpoint::promote(peer& of, const handler_ref& handler) {
  if (!of.has_buffers) {
    of.data_in.reserve();
    of.told_in.reserve();
    of.rest.reserve(detail::wire_header_bytes + options_.frame_bytes);
    const std::lock_guard lock(told_mutex_);
    of.out.waiting.reserve(2 * detail::wire_header_bytes + options_.told_bytes);
    of.has_buffers = true;
  }
  const std::uint32_t index = to_index(seat_of(of));
  if (of.next.is_watched) unwatch(of.next.lanes[1].get());
  close_lanes(of);
  of.data = std::move(of.next.lanes[0]);
  of.told = std::move(of.next.lanes[1]);
  of.process = std::move(of.next.process);
  of.incarnation = of.next.incarnation;
  of.is_own = of.next.is_own;
  of.next = {};
  of.data_in.restart(options_.frame_bytes);
  of.told_in.restart();
  of.data_sequence = 0;
  of.is_data_over = of.is_told_over = false;
  of.why = peer::evidence::reset;
  of.absence = seat_absence::unheard;
  of.told_of = peer::told_death::none;
  of.heard = listened_;
  of.back_off = options_.first_call_ns;
  of.now = peer::state::up;
  watch_data(of);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = detail::event_key(detail::socket_event::told, of.generation, index);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, of.told.get(), &event);
  {
    const std::lock_guard lock(told_mutex_);
    of.out.epoll = epoll_.get();
    of.out.key = event.data.u64;
    of.out.sequence = 0;
    of.out.is_armed = of.out.is_overflowed = false;
    of.out.socket = of.told.get();
    // A listener waits for it: now both know that both do.
    put_told(of.out, detail::frame_sort::beat, {}, {});
  }
  event.data.u64 = detail::event_key(detail::socket_event::process, of.generation, index);
  if (of.process.is_open()) ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, of.process.get(), &event);
  ++counted_.came;
  has_come_ = true;
  handler.on_came(handler.object, seat_of(of));
}

}  // namespace v0
}  // namespace llmmem
