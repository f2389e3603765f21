/// @file
/// `socket_endpoint`: construction, destruction, sending, waiting.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/transfer/errors.hpp>

#include <sched.h>
#include <unistd.h>

#include <utility>

namespace llmmem {
inline namespace v0 {

inline socket_endpoint::socket_endpoint(socket_options options)
    : setup_(std::move(options)),
      mine_(detail::hello_of(setup_)),
      nonce_(detail::wire_reader(mine_.incarnation).take<std::uint64_t>() | 1U),
      owner_(::getpid()),
      poller_(setup_.peers() != 0),
      control_(poller_, setup_.peers(), setup_.options.post_queue_bytes),
      calls_(poller_.clock(), setup_.peers(), setup_.options.first_call_ns, setup_.options.last_call_ns),
      peers_(poller_, control_, calls_, setup_.options, setup_.peers()) {
  if (setup_.peers() == 0) return;
  joining_.emplace(poller_, calls_, peers_, setup_.options, mine_, std::move(setup_.addresses));
  if (setup_.options.beat_ns != 0) control_.start(setup_.options.beat_ns);
}

inline socket_endpoint::~socket_endpoint() {
  // In a forked child the thread does not exist, and the parent lives.
  if (::getpid() != owner_) {
    control_.forget_thread();
    return;
  }
  control_.stop();
  peers_.leave();
  if (joining_) joining_->remove_file();
}

/// Checks for more from the last source of data, without asking epoll; or yields the core, which its sender
/// may need. Returns whether something has arrived.
inline bool socket_endpoint::look_once(handler_call& call) {
  const bool has_moved = peers_.has_last() && peers_.read_last(call);
  if (!has_moved) ::sched_yield();
  poller_.look();
  return has_moved;
}

inline result<void> socket_endpoint::send_frame(seat_id to, const frame_header& header,
                                                std::span<const std::byte> bytes, deadline by,
                                                const detail::frame_handler_ref& handler) {
  const char* const name = setup_.options.name.c_str();
  if (bytes.size() > frame_bytes())
    return failure{errc::out_of_range, to_index(to), bytes.size(), frame_bytes(), name};
  const auto ended = [&](error_code why, std::size_t sent) {
    return failure{why, to_index(to), bytes.size(), sent, name};
  };
  if (!is_connected(to)) return ended(peers_.why_failed(to), 0);
  const detail::listening_clock& clock = poller_.clock();
  const std::uint32_t generation = peers_.generation(to);
  handler_call call{handler};
  poller_.begin();
  if (peers_.has_held()) peers_.ask_held(call);
  // A sender that never waits must still read control messages.
  if (clock.is_look_due()) wait_and_take(clock.now(), -1, call);
  std::optional<detail::outgoing_frame> frame;
  const auto sent = [&] { return frame ? frame->payload_sent() : 0; };
  bool is_waiting = false;
  bool has_moved = false;
  for (;;) {
    if (call.has_come && !call.keeps_waiting()) break;
    call.has_come = false;
    if (!peers_.is_up(to) || peers_.generation(to) != generation) return ended(peers_.why_failed(to), sent());
    if (peers_.flush(to)) {
      if (!frame) frame = peers_.begin_frame(to, header, bytes);
      const ssize_t written = peers_.write(to, *frame);
      if (written < 0) return ended(peers_.why_failed(to), sent());
      has_moved = has_moved || written != 0;
      if (frame->is_complete()) {
        if (is_waiting) send_spin_.end(clock.now());
        return {};
      }
    } else if (!peers_.is_up(to)) {
      return ended(peers_.why_failed(to), sent());
    }
    if (clock.now() >= by.ns) break;
    if (!std::exchange(is_waiting, true)) send_spin_.begin(clock.now(), setup_.options.spin_ns);
    if (has_moved) send_spin_.found_some(clock.now());
    if (may_spin(by) && send_spin_.goes_on(clock.now())) {
      has_moved = look_once(call);
      continue;
    }
    wait_and_take(by.ns, peers_.data_socket(to), call);
    if (peers_.has_held()) peers_.ask_held(call);
  }
  // The receiver must not see half a frame: the rest of a begun frame goes with later calls.
  const bool is_late = clock.now() >= by.ns && !call.has_come;
  if (frame && frame->is_begun() && peers_.is_up(to)) peers_.keep_rest(to, *frame);
  peers_.watch(to);
  return ended(is_late ? errc::peer_timed_out : errc::cancelled, sent());
}

inline bool socket_endpoint::poll_until(deadline by, const detail::frame_handler_ref& handler) {
  const detail::listening_clock& clock = poller_.clock();
  handler_call call{handler};
  poller_.begin();
  if (peers_.has_held()) peers_.ask_held(call);
  bool has_looked = false;
  if (call.has_come || poller_.is_woken() || clock.is_look_due()) wait_and_take(clock.now(), -1, call);
  const std::uint64_t spin_ns = peers_.has_last() ? setup_.options.spin_ns : 0;
  for (poll_spin_.begin(clock.now(), spin_ns); !call.has_come && !poller_.is_woken();) {
    if (may_spin(by) && poll_spin_.goes_on(clock.now())) {
      if (look_once(call)) poll_spin_.found_some(clock.now());
      continue;
    }
    if (has_looked && clock.now() >= by.ns) break;
    wait_and_take(by.ns, -1, call);
    has_looked = true;
  }
  poll_spin_.end(clock.now());
  poller_.forget_wake();
  return call.has_come;
}

/// Waits until that time, until something arrives, or until `writable` can be written to, and takes what has
/// arrived.
inline void socket_endpoint::wait_and_take(std::uint64_t until, int writable, handler_call& call) {
  detail::socket_poller::event_array events{};
  const auto found = poller_.wait(until, writable, peers_.hot_socket(), events);
  for (std::size_t i = 0; i < found.events; ++i)
    handle(detail::ready_event(events[i]), call);
  if (found.is_hot_ready) peers_.read_hot(call);
  if (poller_.clock().is_due()) run_timers(call);
}

inline void socket_endpoint::handle(const detail::ready_event& event, handler_call& call) {
  switch (event.of) {
    case detail::socket_event::wake:
      return poller_.note_wake();
    case detail::socket_event::listener:
      return joining_->accept();
    case detail::socket_event::half_open:
      return joining_->advance(event, call);
    case detail::socket_event::candidate:
      return joining_->look_at_candidate(seat_id{event.index}, call);
    default:
      if (event.is_of(peers_.generation(seat_id{event.index}))) peers_.handle(event, call);
  }
}

inline void socket_endpoint::run_timers(handler_call& call) {
  poller_.clock().restart_timers();
  joining_->expire();
  peers_.run_timers(call);
  joining_->run_calls(call);
}

}  // namespace v0
}  // namespace llmmem
