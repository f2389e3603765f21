/// @file
/// `socket_endpoint`: the processes of a job joined by Unix or TCP sockets, on Linux.
#pragma once

#include <llmmem/comm/detail/call_schedule.hpp>
#include <llmmem/comm/detail/control_channel.hpp>
#include <llmmem/comm/detail/socket_joining.hpp>
#include <llmmem/comm/detail/socket_lanes.hpp>
#include <llmmem/comm/detail/socket_peers.hpp>
#include <llmmem/comm/detail/socket_poller.hpp>
#include <llmmem/comm/detail/socket_setup.hpp>
#include <llmmem/comm/detail/spinner.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/socket_options.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace llmmem {
inline namespace v0 {

/// An `endpoint` over stream sockets: Unix on one machine, TCP on several.
///
///     socket_endpoint end({.seat = seat_id{rank}, .seats = 4, .folder = "/run/job-7"});
///
/// Each pair of seats has two connections, one for data and one for control messages (`post`), so that
/// control messages arrive while data is stuck. The higher seat makes them, and retries until they exist,
/// within `poll` and `send`. Nothing is delivered before both sides have proved that they know the secret.
///
/// **Deaths.** A process on this machine is certainly dead when the kernel reports that it has exited (a
/// pidfd: children that it forked may hold its sockets open). A process on another machine is certainly dead
/// when its connection ends. What it sent before is delivered first, except a frame whose handler still
/// answers `ask_again`. An endpoint that is destroyed announces that it leaves, which is a certain death. A
/// small thread sends heartbeats. A process that sends none is suspected after `hard_silence_ns` in which
/// this endpoint has listened, that is, was within `poll` or `send`: time in which its caller computes in
/// between does not count. A process is also suspected when it sends bytes that are not a frame, when it
/// reads none of its control messages, or when its connection breaks while it lives. A process that is
/// suspected or given up is informed, and then reports this seat as suspected itself. A certain death of a
/// seat that was given up is still reported.
///
/// **Fresh processes.** A process may take a seat when its predecessor is dead, suspected or given up. Until
/// then it is refused, and retries. The same process never returns to a seat.
///
/// @par Complexity      a frame: one system call to send, one or two to receive, and one to sleep. About 24
///   KiB for each seat that was ever connected, and address space of `frame_bytes` + `post_queue_bytes`.
/// @par Thread safety   one thread at a time, except `wake`. Not for use in a forked child.
/// @par Errors          the constructor: `argument_error`, `system_error`. `send`: as in `endpoint`, and
///   `errc::out_of_range` for a frame longer than `frame_bytes()`. `send` and `poll` throw `std::bad_alloc`
///   when there is no memory for a seat that connects: it is then retried.
/// @par Source          heartbeats combined with certain knowledge where available: Gupta, Chandra and
///   Goldszmidt, "On scalable and efficient distributed failure detectors", PODC 2001, for the terms;
///   `pidfd_open(2)`.
class socket_endpoint {
 public:
  explicit socket_endpoint(socket_options options);
  socket_endpoint(const socket_endpoint&) = delete;
  socket_endpoint& operator=(const socket_endpoint&) = delete;
  /// Informs the others that this process leaves, and closes everything; does not wait.
  ~socket_endpoint();

  [[nodiscard]] seat_id self() const noexcept { return setup_.options.seat; }
  [[nodiscard]] std::uint32_t seats() const noexcept { return setup_.options.seats; }
  /// A number of 64 random bits.
  [[nodiscard]] std::uint64_t nonce() const noexcept { return nonce_; }
  /// The machine's monotonic clock.
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return detail::monotonic_ns(); }
  [[nodiscard]] std::uint32_t frame_bytes() const noexcept { return setup_.options.frame_bytes; }
  [[nodiscard]] bool is_connected(seat_id seat) const noexcept { return peers_.is_up(seat); }

  /// See `endpoint`. The rest of an earlier frame goes first.
  template <frame_handler H>
  [[nodiscard]] result<void> send(seat_id to, const frame_header& header, std::span<const std::byte> bytes,
                                  deadline by, H& handler) {
    return send_frame(to, header, bytes, by, detail::refer_to(handler));
  }
  /// See `endpoint`. A handler may call it.
  void post(seat_id to, const frame_header& header, std::span<const std::byte> bytes) noexcept {
    peers_.post(to, header, bytes);
  }
  [[deprecated("call post()")]] void tell(seat_id to, const frame_header& header,
                                          std::span<const std::byte> bytes) noexcept {
    post(to, header, bytes);
  }
  /// See `endpoint`: less than half of `post_queue_bytes` waits for the seat. True for an empty seat.
  [[nodiscard]] bool has_post_capacity(seat_id to) const noexcept { return control_.has_capacity(to); }
  /// See `endpoint`. Returns false when `wake` ended it.
  template <frame_handler H>
  [[nodiscard]] bool poll(deadline by, H& handler) {
    return poll_until(by, detail::refer_to(handler));
  }
  void withdraw(seat_id from) noexcept { peers_.withdraw(from); }
  void give_up(seat_id seat) noexcept { peers_.give_up(seat); }
  void wake() noexcept { poller_.wake(); }

  [[nodiscard]] socket_stats stats() const noexcept {
    socket_stats all;
    control_.add_to(all);
    peers_.add_to(all);
    if (joining_) joining_->add_to(all);
    return all;
  }
  /// See `endpoint`. It may repeat the claims of a foreign process: show it to people, but base no decision
  /// on it.
  [[nodiscard]] seat_absence why_missing(seat_id seat) const noexcept {
    return joining_ ? joining_->why_missing(seat) : seat_absence::no_contact;
  }
  /// Returns why a process there failed: `errc::frame_forged`, or `errc::peer_failed`.
  [[nodiscard]] error_code why_failed(seat_id seat) const noexcept { return peers_.why_failed(seat); }

 private:
  using handler_call = detail::handler_call;

  result<void> send_frame(seat_id to, const frame_header& header, std::span<const std::byte> bytes,
                          deadline by, const detail::frame_handler_ref& handler);
  bool poll_until(deadline by, const detail::frame_handler_ref& handler);
  /// Whether only spinning is left until then.
  [[nodiscard]] bool may_spin(deadline by) const noexcept {
    return poller_.clock().may_spin(by.ns) && !peers_.has_held();
  }
  [[nodiscard]] bool look_once(handler_call& call);
  void wait_and_take(std::uint64_t until, int writable, handler_call& call);
  void handle(const detail::ready_event& event, handler_call& call);
  void run_timers(handler_call& call);

  detail::socket_setup setup_;
  detail::wire_hello mine_;
  std::uint64_t nonce_;
  pid_t owner_;

  detail::socket_poller poller_;
  detail::control_channel control_;
  detail::call_schedule calls_;
  detail::socket_peers peers_;
  std::optional<detail::socket_joining> joining_;  // none for an endpoint that is alone
  detail::spinner poll_spin_;
  detail::spinner send_spin_;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/socket_endpoint_body.hpp>

namespace llmmem {
inline namespace v0 {

static_assert(endpoint<socket_endpoint> && detail::reports_absence<socket_endpoint> &&
              detail::reports_failure<socket_endpoint> && detail::reports_post_capacity<socket_endpoint>);

}  // namespace v0
}  // namespace llmmem
