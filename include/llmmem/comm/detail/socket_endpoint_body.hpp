/// @file
/// `socket_endpoint`: sending, waiting.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/transfer/errors.hpp>

#include <sched.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <utility>

namespace llmmem {
inline namespace v0 {

inline seat_id socket_endpoint::seat_of(const peer& at) const noexcept {
  return seat_id{static_cast<std::uint32_t>(&at - peers_.data())};
}

inline void socket_endpoint::tell(seat_id to, const frame_header& header,
                                  std::span<const std::byte> bytes) noexcept {
  if (!is_connected(to) || bytes.size() > max_told_bytes) {
    ++counted_.dropped;
    return;
  }
  const std::lock_guard lock(told_mutex_);
  detail::told_writer& out = peers_[to_index(to)].out;
  put_told(out, detail::frame_sort::frame, header, bytes);
  if (out.is_overflowed) next_timer_ = 0;
}

inline void socket_endpoint::withdraw(seat_id from) noexcept {
  if (to_index(from) < peers_.size()) peers_[to_index(from)].data_in.withdraw();
}

inline void socket_endpoint::give_up(seat_id seat) noexcept {
  if (to_index(seat) >= peers_.size()) return;
  peer& of = peers_[to_index(seat)];
  if (of.now != peer::state::up && of.now != peer::state::ending) return;
  stop_hearing(of);
  if (of.is_known_dead()) due(now_);  // told of with the next look: nothing else will come of it
  const std::lock_guard lock(told_mutex_);
  of.out.is_overflowed = false;
  put_told(of.out, detail::frame_sort::given_up, {}, {});
}

inline void socket_endpoint::wake() noexcept {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_.get(), &one, sizeof(one)));
}

inline void socket_endpoint::begin_listening() noexcept {
  now_ = detail::monotonic_ns();
}

/// @param most  what may have gone by since the last look: a process that was stopped has not listened.
inline void socket_endpoint::look_at_clock(std::uint64_t most) noexcept {
  const std::uint64_t now = detail::monotonic_ns();
  listened_ += now - now_ < most ? now - now_ : most;
  now_ = now;
}

/// Looks for more from where data came last, without asking epoll; or offers the core to whoever is to send
/// it. Whether something has moved.
inline bool socket_endpoint::look_once(const handler_ref& handler) {
  bool has_moved = false;
  if (last_from_ != no_seat) {
    peer& from = peers_[to_index(last_from_)];
    const std::uint64_t taken = from.data_in.taken();
    if (from.now == peer::state::up) static_cast<void>(take_data(from, handler));
    has_moved = from.data_in.taken() != taken;
  }
  if (!has_moved) ::sched_yield();
  look_at_clock(detail::timer_ns);
  return has_moved;
}

/// Whether all else can do without a look of its own.
inline bool socket_endpoint::may_spin(std::uint64_t until) const noexcept {
  return now_ < until && now_ < next_timer_ && now_ - looked_ <= look_ns && held_.empty();
}

inline result<void> socket_endpoint::send_frame(seat_id to, const frame_header& header,
                                                std::span<const std::byte> bytes, deadline by,
                                                const handler_ref& handler) {
  const std::uint32_t index = to_index(to);
  const char* const name = options_.name.c_str();
  const auto ended = [&](error_code why, std::size_t sent) {
    constexpr std::size_t head = detail::wire_header_bytes;
    return failure{why, index, bytes.size(), sent > head ? sent - head : 0, name};
  };
  if (bytes.size() > options_.frame_bytes)
    return failure{errc::out_of_range, index, bytes.size(), options_.frame_bytes, name};
  if (!is_connected(to)) return ended(errc::peer_failed, 0);
  peer& whom = peers_[index];
  const std::uint32_t generation = whom.generation;
  begin_listening();
  has_come_ = false;
  if (!held_.empty()) ask_held(handler);
  // Who sends and sends, and never has to wait, hears what is told all the same.
  if (now_ - looked_ > look_ns || now_ >= next_timer_) wait_and_take(now_, -1, handler);
  std::array<std::byte, detail::wire_header_bytes> head{};
  std::size_t sent = 0;
  bool is_waiting = false;
  bool has_moved = false;
  for (;;) {
    if (has_come_ && !handler.on_goes_on(handler.object)) break;
    has_come_ = false;
    if (whom.now != peer::state::up || whom.generation != generation) return ended(errc::peer_failed, sent);
    if (flush_rest(whom)) {
      if (sent == 0) {
        detail::wire_header wire{header, detail::socket_lane::data, detail::frame_sort::frame,
                                 whom.data_sequence};
        wire.frame.bytes = static_cast<std::uint32_t>(bytes.size());
        detail::write_header(wire, head);
      }
      const bool is_head = sent < head.size();
      const ssize_t went = is_head ? write_data(whom, std::span<const std::byte>(head).subspan(sent), bytes)
                                   : write_data(whom, bytes.subspan(sent - head.size()), {});
      if (went < 0) return ended(errc::peer_failed, sent);
      if (sent == 0 && went > 0) ++whom.data_sequence;
      sent += static_cast<std::size_t>(went);
      has_moved = has_moved || went != 0;
      if (sent == head.size() + bytes.size()) {
        ++whom.data_sent.frames;
        whom.data_sent.bytes += bytes.size();
        if (is_waiting) send_spin_.end(now_);
        return {};
      }
    } else if (whom.now != peer::state::up) {
      return ended(errc::peer_failed, sent);
    }
    if (now_ >= by.ns) break;
    if (!std::exchange(is_waiting, true)) send_spin_.begin(now_, options_.spin_ns);
    if (has_moved) send_spin_.found_some(now_);
    if (may_spin(by.ns) && send_spin_.goes_on(now_)) {
      has_moved = look_once(handler);
      continue;
    }
    wait_and_take(by.ns, whom.data.get(), handler);
    if (!held_.empty()) ask_held(handler);
  }
  // Who reads shall not see half of it.
  const bool is_late = now_ >= by.ns && !has_come_;
  if (sent != 0 && whom.now == peer::state::up) {
    if (sent < head.size()) whom.rest.add(std::span<const std::byte>(head).subspan(sent));
    whom.rest.add(bytes.subspan(sent < head.size() ? 0 : sent - head.size()));
    ++whom.data_sent.frames;
    whom.data_sent.bytes += bytes.size();
  }
  watch_data(whom);
  return ended(is_late ? errc::peer_timed_out : errc::cancelled, sent);
}

inline bool socket_endpoint::poll_until(deadline by, const handler_ref& handler) {
  begin_listening();
  has_come_ = false;
  if (!held_.empty()) ask_held(handler);
  bool has_looked = false;
  if (has_come_ || is_woken_ || now_ - looked_ > look_ns || now_ >= next_timer_)
    wait_and_take(now_, -1, handler);
  for (poll_spin_.begin(now_, last_from_ == no_seat ? 0 : options_.spin_ns); !has_come_ && !is_woken_;) {
    if (may_spin(by.ns) && poll_spin_.goes_on(now_)) {
      if (look_once(handler)) poll_spin_.found_some(now_);
      continue;
    }
    if (has_looked && now_ >= by.ns) break;
    wait_and_take(by.ns, -1, handler);
    has_looked = true;
  }
  poll_spin_.end(now_);
  is_woken_ = false;
  return has_come_;
}

/// Takes what has come. Waits for it, until then at most or until `writable` is.
inline void socket_endpoint::wait_and_take(std::uint64_t until, int writable, const handler_ref& handler) {
  std::array<epoll_event, 32> events{};
  const std::uint64_t wait_until = until < next_timer_ ? until : next_timer_;
  int timeout = detail::milliseconds_until(now_, peers_.empty() ? until : wait_until);
  const std::uint64_t most =
      timeout < 0 ? ~std::uint64_t{0} : std::uint64_t(timeout) * 1'000'000 + detail::timer_ns;
  const bool is_hot = hot_ != no_seat && is_read(peers_[to_index(hot_)]);
  bool has_data = false;
  if (writable >= 0 || is_hot) {
    // Without telling epoll, and once more when it can be written to again.
    std::array<pollfd, 3> all{pollfd{epoll_.get(), POLLIN, 0}, pollfd{writable, POLLOUT, 0},
                              pollfd{-1, POLLIN, 0}};
    if (is_hot) all[2].fd = peers_[to_index(hot_)].data.get();
    const int ready = ::poll(all.data(), all.size(), timeout);
    has_data = ready > 0 && all[2].revents != 0;
    timeout = ready > 0 && all[0].revents != 0 ? 0 : -2;
  }
  int count = 0;
  if (timeout != -2)
    count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
  look_at_clock(most);
  looked_ = now_;
  for (int i = 0; i < count; ++i)
    handle(events[static_cast<std::size_t>(i)], handler);
  if (has_data && hot_ != no_seat) static_cast<void>(take_data(peers_[to_index(hot_)], handler));
  if (now_ >= next_timer_ && !peers_.empty()) run_timers(handler);
}

inline void socket_endpoint::handle(const epoll_event& event, const handler_ref& handler) {
  const auto of = static_cast<detail::socket_event>(event.data.u64 >> 56);
  const auto index = static_cast<std::uint32_t>(event.data.u64);
  const auto is_of = [&](std::uint32_t generation) {
    return (generation & 0xFF'FFFFU) == ((event.data.u64 >> 32) & 0xFF'FFFFU);
  };
  const bool is_readable = (event.events & ~std::uint32_t{EPOLLOUT}) != 0;
  const bool is_writable = (event.events & std::uint32_t{EPOLLOUT}) != 0;
  if (of == detail::socket_event::listener) return accept_some();
  if (of == detail::socket_event::wake) {
    std::uint64_t times = 0;
    is_woken_ = ::read(wake_.get(), &times, sizeof(times)) > 0 || is_woken_;
    return;
  }
  if (of == detail::socket_event::half_open) {
    if (halves_[index].as != detail::half_open::role::none && is_of(halves_[index].generation))
      advance(index, handler);
    return;
  }
  peer& whose = peers_[index];
  if (of == detail::socket_event::candidate) return look_at_candidate(whose, handler);
  if (!is_of(whose.generation)) return;
  switch (of) {
    case detail::socket_event::process:
      return process_exited(whose, handler);
    case detail::socket_event::told: {
      if (is_writable) {
        const std::lock_guard lock(told_mutex_);
        flush_told(whose.out);
      }
      if (is_readable) static_cast<void>(take_told(whose, handler));
      return;
    }
    default:
      if (is_writable) static_cast<void>(flush_rest(whose));
      // Of one that is held, only its end shows, and nothing can be written to it any more.
      if (is_readable && held_.contains(seat_id{index})) whose.rest.clear();
      watch_data(whose);
      if (is_readable) static_cast<void>(take_data(whose, handler));
  }
}

inline socket_stats socket_endpoint::stats() const noexcept {
  socket_stats all = counted_;
  const auto add = [](detail::lane_count& to, const detail::lane_count& more) {
    to.frames += more.frames;
    to.bytes += more.bytes;
  };
  const std::lock_guard lock(told_mutex_);
  for (const peer& each : peers_) {
    add(all.data_sent, each.data_sent);
    add(all.data_received, each.data_received);
    add(all.told_sent, each.out.sent);
    add(all.told_received, each.told_received);
    all.beats_sent += each.out.beats;
    all.connected += each.now == peer::state::up ? 1U : 0U;
    all.silent += each.is_soft_silent ? 1U : 0U;
  }
  return all;
}

}  // namespace v0
}  // namespace llmmem
