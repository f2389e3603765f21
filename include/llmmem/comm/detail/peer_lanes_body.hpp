/// @file
/// `peer_lanes`: reading and writing.
#pragma once

#include <llmmem/comm/detail/peer_lanes.hpp>

namespace llmmem {
inline namespace v0 {
namespace detail {

inline void peer_lanes::open(seat_id seat, descriptor data, descriptor told,
                             const std::array<lane_seals, 2>& seals) noexcept {
  lane_pair& of = at(seat);
  of.data = std::move(data);
  of.told = std::move(told);
  const lane_seals& of_data = seals[static_cast<std::size_t>(socket_lane::data)];
  of.data_in.restart(frame_bytes_, of_data.in);
  of.told_in.restart(seals[static_cast<std::size_t>(socket_lane::told)].in);
  of.data_seal = of_data.out;
  of.data_number = 0;
  of.is_data_over = of.is_told_over = false;
  watch(seat);
  poller_.add(of.told.get(), EPOLLIN, told_key(seat));
}

inline void peer_lanes::close(seat_id seat) noexcept {
  lane_pair& of = at(seat);
  held_.erase(seat);
  if (seat == hot_) hot_ = no_seat;
  if (of.watched != 0) poller_.remove(of.data.get());
  of.watched = 0;
  poller_.remove(of.told.get());
  of.data.close();
  of.told.close();
  of.rest.clear();
  ++of.generation;
}

inline void peer_lanes::shut_down(seat_id seat) noexcept {
  for (const descriptor* lane : {&at(seat).data, &at(seat).told}) {
    ::shutdown(lane->get(), SHUT_WR);
    for (int i = 0; i < 64 && ::recv(lane->get(), scratch_.data(), scratch_.size(), MSG_DONTWAIT) > 0; ++i) {
    }
  }
}

inline lane_read peer_lanes::read_data(seat_id seat, handler_call& call) noexcept {
  lane_pair& from = at(seat);
  if (!from.data.is_open() || from.is_data_over || from.data_in.is_held()) return {};
  std::array<iovec, 2> places{};
  msghdr message{};
  message.msg_iov = places.data();
  message.msg_iovlen = from.data_in.places(places, scratch_);
  const std::size_t asked = places[0].iov_len + places[1].iov_len;
  ssize_t got = 0;
  do {
    got = message.msg_iovlen == 1
              ? ::recv(from.data.get(), places[0].iov_base, places[0].iov_len, MSG_DONTWAIT)
              : ::recvmsg(from.data.get(), &message, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && would_block(errno)) return {};
  if (got <= 0) return {lane_event::ended, 0};
  const auto bytes = static_cast<std::size_t>(got);
  heat(seat);
  switch (from.data_in.took(bytes, seat, call.handler, from.data_received, call.has_come)) {
    case read_state::malformed:
      return {lane_event::malformed, bytes};
    case read_state::forged:
      return {lane_event::forged, bytes};
    case read_state::later:
      held_.insert(seat);
      watch(seat);
      return {lane_event::drained, bytes};
    default:
      return {bytes < asked ? lane_event::drained : lane_event::more, bytes};
  }
}

inline lane_read peer_lanes::read_told(seat_id seat, handler_call& call) noexcept {
  lane_pair& from = at(seat);
  if (!from.told.is_open() || from.is_told_over) return {};
  const iovec place = from.told_in.place();
  ssize_t got = 0;
  do {
    got = ::recv(from.told.get(), place.iov_base, place.iov_len, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && would_block(errno)) return {};
  if (got <= 0) return {lane_event::ended, 0};
  const auto bytes = static_cast<std::size_t>(got);
  const read_state state = from.told_in.took(bytes, seat, call.handler, from.posts_received, call.has_come);
  if (state == read_state::malformed) return {lane_event::malformed, bytes};
  if (state == read_state::forged) return {lane_event::forged, bytes};
  return {bytes < place.iov_len ? lane_event::drained : lane_event::more, bytes};
}

inline lane_event peer_lanes::ask(seat_id seat, handler_call& call) noexcept {
  lane_pair& from = at(seat);
  const read_state state = from.data_in.ask_again(seat, call.handler, from.data_received, call.has_come);
  if (state == read_state::later) return lane_event::drained;
  held_.erase(seat);
  watch(seat);
  return state == read_state::malformed ? lane_event::malformed
         : state == read_state::forged  ? lane_event::forged
                                        : lane_event::more;
}

inline void peer_lanes::end(seat_id seat, socket_lane lane) noexcept {
  lane_pair& of = at(seat);
  if (lane == socket_lane::told) {
    of.is_told_over = true;
    return poller_.remove(of.told.get());
  }
  of.is_data_over = true;
  of.rest.clear();
  watch(seat);
}

inline void peer_lanes::mute(seat_id seat) noexcept {
  lane_pair& of = at(seat);
  of.data_in.drain();
  of.told_in.mute();
  of.rest.clear();
  held_.erase(seat);
  watch(seat);
}

inline outgoing_frame peer_lanes::begin_frame(seat_id to, const frame_header& header,
                                              std::span<const std::byte> bytes) const noexcept {
  const lane_pair& of = at(to);
  wire_header wire{header, socket_lane::data, frame_sort::frame, static_cast<std::uint32_t>(of.data_number)};
  wire.frame.bytes = static_cast<std::uint32_t>(bytes.size());
  outgoing_frame frame;
  frame.bytes = bytes;
  write_header(wire, frame.head);
  of.data_seal.close(frame.head, bytes, of.data_number);
  return frame;
}

inline ssize_t peer_lanes::write(seat_id to, outgoing_frame& frame) noexcept {
  lane_pair& of = at(to);
  const std::span<const std::byte> head = frame.head_left();
  const ssize_t went = head.empty() ? write_some(of.data.get(), frame.bytes_left(), {})
                                    : write_some(of.data.get(), head, frame.bytes);
  if (went <= 0) return went;
  if (!frame.is_begun()) ++of.data_number;
  frame.sent += static_cast<std::size_t>(went);
  if (frame.is_complete()) count_sent(of, frame.bytes.size());
  return went;
}

inline void peer_lanes::keep_rest(seat_id to, const outgoing_frame& frame) noexcept {
  lane_pair& of = at(to);
  of.rest.add(frame.head_left());
  of.rest.add(frame.bytes_left());
  count_sent(of, frame.bytes.size());
}

inline lane_flush peer_lanes::flush(seat_id to) noexcept {
  lane_pair& of = at(to);
  while (!of.rest.empty()) {
    const ssize_t sent = write_some(of.data.get(), of.rest.waiting(), {});
    if (sent < 0) {
      of.rest.clear();
      return lane_flush::broken;
    }
    if (sent == 0) return lane_flush::waits;
    of.rest.went(static_cast<std::size_t>(sent));
  }
  return lane_flush::done;
}

inline void peer_lanes::watch(seat_id seat) noexcept {
  lane_pair& of = at(seat);
  const bool is_read = may_read(seat) && seat != hot_;
  const bool is_written = of.data.is_open() && !of.is_data_over && !of.rest.empty();
  const std::uint32_t wanted =
      (is_read ? std::uint32_t{EPOLLIN} : 0) | (is_written ? std::uint32_t{EPOLLOUT} : 0);
  if (wanted == of.watched) return;
  const std::uint64_t key = event_key(socket_event::data, of.generation, to_index(seat));
  if (of.watched == 0) {
    poller_.add(of.data.get(), wanted, key);
  } else if (wanted == 0) {
    poller_.remove(of.data.get());
  } else {
    poller_.change(of.data.get(), wanted, key);
  }
  of.watched = wanted;
}

/// Records that data has come from that seat.
inline void peer_lanes::heat(seat_id seat) noexcept {
  constexpr std::uint32_t hot_run = 64;
  if (std::exchange(last_from_, seat) != seat) run_ = 0;
  if (seat == hot_ || ++run_ < hot_run) return;
  cool();
  hot_ = seat;
  watch(seat);
}

/// Makes epoll watch every lane again.
inline void peer_lanes::cool() noexcept {
  run_ = 0;
  const seat_id before = std::exchange(hot_, no_seat);
  if (before != no_seat) watch(before);
}

inline void peer_lanes::add_to(socket_stats& all) const noexcept {
  const auto add = [](lane_count& to, const lane_count& more) {
    to.frames += more.frames;
    to.bytes += more.bytes;
  };
  for (const lane_pair& each : pairs_) {
    add(all.data_sent, each.data_sent);
    add(all.data_received, each.data_received);
    add(all.posts_received, each.posts_received);
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
