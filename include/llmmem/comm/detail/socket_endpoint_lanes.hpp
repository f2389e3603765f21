/// @file
/// `socket_endpoint`: bytes between sockets and lanes.
#pragma once

#include <llmmem/comm/socket_endpoint.hpp>

#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Whether there may be more.
inline bool socket_endpoint::take_data(peer& from, const handler_ref& handler) {
  const seat_id seat = seat_of(from);
  for (int round = 0; round < 16; ++round) {
    if (!from.data.is_open() || from.is_data_over || from.data_in.is_held()) return false;
    std::array<iovec, 2> places{};
    msghdr message{};
    message.msg_iov = places.data();
    message.msg_iovlen = from.data_in.places(places, scratch_);
    const std::size_t asked = places[0].iov_len + places[1].iov_len;
    const ssize_t got = message.msg_iovlen == 1
                            ? ::recv(from.data.get(), places[0].iov_base, places[0].iov_len, MSG_DONTWAIT)
                            : ::recvmsg(from.data.get(), &message, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && detail::would_block(errno)) return false;
    if (got <= 0) {
      lane_ended(from, detail::socket_lane::data, handler);
      return false;
    }
    from.heard = listened_;
    heat(seat);
    switch (from.data_in.took(static_cast<std::size_t>(got), seat, handler, from.data_received, has_come_)) {
      case detail::read_state::more:
        break;
      case detail::read_state::later:
        held_.insert(seat);
        watch_data(from);
        return false;
      case detail::read_state::malformed:
        malformed(from, handler);
        return false;
    }
    if (static_cast<std::size_t>(got) < asked) return false;
  }
  return true;
}

/// Whether there may be more.
inline bool socket_endpoint::take_told(peer& from, const handler_ref& handler) {
  const seat_id seat = seat_of(from);
  for (int round = 0; round < 16; ++round) {
    if (!from.told.is_open() || from.is_told_over) return false;
    const iovec place = from.told_in.place();
    const ssize_t got = ::recv(from.told.get(), place.iov_base, place.iov_len, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && detail::would_block(errno)) return false;
    if (got <= 0) {
      lane_ended(from, detail::socket_lane::told, handler);
      return false;
    }
    from.heard = listened_;
    const auto state =
        from.told_in.took(static_cast<std::size_t>(got), seat, handler, from.told_received, has_come_);
    if (state == detail::read_state::malformed) {
      malformed(from, handler);
      return false;
    }
    notices(from, handler);
    if (static_cast<std::size_t>(got) < place.iov_len) return false;
  }
  return true;
}

/// Asks again for room.
inline void socket_endpoint::ask_held(const handler_ref& handler) {
  const seat_set asked = held_;
  for (const seat_id seat : asked) {
    peer& from = peers_[to_index(seat)];
    if (!held_.contains(seat)) continue;
    const auto state = from.data_in.ask_again(seat, handler, from.data_received, has_come_);
    if (state == detail::read_state::later) continue;
    held_.erase(seat);
    watch_data(from);
    if (state == detail::read_state::malformed) malformed(from, handler);
  }
}

inline ssize_t socket_endpoint::write_data(peer& to, std::span<const std::byte> first,
                                           std::span<const std::byte> second) noexcept {
  const ssize_t sent = detail::write_some(to.data.get(), first, second);
  if (sent < 0) evidence_of_death(to, peer::evidence::reset);
  return sent;
}

/// Whether nothing waits any more.
inline bool socket_endpoint::flush_rest(peer& to) noexcept {
  while (!to.rest.empty()) {
    const ssize_t sent = write_data(to, to.rest.waiting(), {});
    if (sent < 0) {
      to.rest.clear();
      return false;
    }
    if (sent == 0) return false;
    to.rest.went(static_cast<std::size_t>(sent));
  }
  return true;
}

/// Data have come from there. A lane from which they come again and again is looked at by hand: what epoll
/// does for each frame, its sender would pay for.
inline void socket_endpoint::heat(seat_id seat) noexcept {
  constexpr std::uint32_t hot_run = 64;
  if (std::exchange(last_from_, seat) != seat) run_ = 0;
  if (seat == hot_ || ++run_ < hot_run) return;
  cool();
  hot_ = seat;
  watch_data(peers_[to_index(seat)]);
}

/// No lane is looked at by hand any more.
inline void socket_endpoint::cool() noexcept {
  run_ = 0;
  const seat_id before = std::exchange(hot_, no_seat);
  if (before != no_seat) watch_data(peers_[to_index(before)]);
}

/// A lane that is held is not read.
inline bool socket_endpoint::is_read(const peer& at) const noexcept {
  return at.data.is_open() && !at.is_data_over && !held_.contains(seat_of(at));
}

/// Has epoll look for what may be done on the lane of data.
inline void socket_endpoint::watch_data(peer& at) noexcept {
  const bool is_read_here = is_read(at) && seat_of(at) != hot_;
  const bool is_written = at.data.is_open() && !at.is_data_over && !at.rest.empty();
  const std::uint32_t wanted =
      (is_read_here ? std::uint32_t{EPOLLIN} : 0) | (is_written ? std::uint32_t{EPOLLOUT} : 0);
  if (wanted == at.watched) return;
  epoll_event event{};
  event.events = wanted;
  event.data.u64 = detail::event_key(detail::socket_event::data, at.generation, to_index(seat_of(at)));
  const int what = at.watched == 0 ? EPOLL_CTL_ADD : wanted == 0 ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;
  ::epoll_ctl(epoll_.get(), what, at.data.get(), &event);
  at.watched = wanted;
}

/// Before it is closed: a forked child may hold it open, and then epoll would go on to look at it.
inline void socket_endpoint::unwatch(int socket) noexcept {
  if (socket >= 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket, nullptr);
}

/// @pre `told_mutex_` is held
inline void socket_endpoint::arm_told(detail::told_writer& out) noexcept {
  if (out.is_armed != out.waiting.empty()) return;
  out.is_armed = !out.is_armed;
  epoll_event event{};
  event.events = out.is_armed ? std::uint32_t{EPOLLIN} | std::uint32_t{EPOLLOUT} : std::uint32_t{EPOLLIN};
  event.data.u64 = out.key;
  ::epoll_ctl(out.epoll, EPOLL_CTL_MOD, out.socket, &event);
}

/// @pre `told_mutex_` is held
inline void socket_endpoint::flush_told(detail::told_writer& out) noexcept {
  while (out.socket >= 0 && !out.waiting.empty()) {
    const ssize_t sent = detail::write_some(out.socket, out.waiting.waiting(), {});
    if (sent == 0) break;
    // The reader of this lane finds its end.
    if (sent < 0) out.waiting.clear();
    if (sent > 0) out.waiting.went(static_cast<std::size_t>(sent));
  }
  if (out.socket >= 0) arm_told(out);
}

/// @pre `told_mutex_` is held
inline void socket_endpoint::put_told(detail::told_writer& out, detail::frame_sort sort,
                                      const frame_header& header, std::span<const std::byte> bytes) noexcept {
  if (out.socket < 0 || out.is_overflowed) return;
  const std::size_t whole = detail::wire_header_bytes + bytes.size();
  // Room is kept for a notice.
  const std::size_t kept = sort == detail::frame_sort::frame ? 2 * detail::wire_header_bytes : 0;
  if (!out.waiting.empty() && out.waiting.room() < whole + kept) {
    out.is_overflowed = true;
    return;
  }
  detail::wire_header wire{header, detail::socket_lane::told, sort, out.sequence++};
  wire.frame.bytes = static_cast<std::uint32_t>(bytes.size());
  std::array<std::byte, detail::wire_header_bytes> head{};
  detail::write_header(wire, head);
  ssize_t sent = 0;
  if (out.waiting.empty()) sent = detail::write_some(out.socket, head, bytes);
  if (sent < 0) return;  // the reader of this lane finds its end
  const auto gone = static_cast<std::size_t>(sent);
  if (gone < head.size()) out.waiting.add(std::span<const std::byte>(head).subspan(gone));
  if (gone < whole) out.waiting.add(bytes.subspan(gone < head.size() ? 0 : gone - head.size()));
  arm_told(out);
  if (sort == detail::frame_sort::beat) ++out.beats;
  if (sort != detail::frame_sort::frame) return;
  ++out.sent.frames;
  out.sent.bytes += bytes.size();
}

}  // namespace v0
}  // namespace llmmem
