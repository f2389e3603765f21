/// @file
/// `socket_endpoint`: the processes of a job joined by Unix or TCP sockets, on Linux.
#pragma once

#include <llmmem/comm/detail/socket_lanes.hpp>
#include <llmmem/comm/detail/socket_peer.hpp>
#include <llmmem/comm/detail/spinner.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>

#include <sys/epoll.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// From where a TCP endpoint may be reached. Frames go as they are: whoever sees the network reads them.
enum class socket_reach : std::uint8_t {
  this_machine,  ///< addresses must be of the loopback
  any_machine,   ///< in a network that is trusted
};

/// What is done about a process that is silent beyond the limit.
enum class on_silence : std::uint8_t {
  suspect,     ///< it may come back, unheard
  kill_local,  ///< one on this machine is killed, and then dead for certain; others are suspected
};

/// What it says when the connection to a process of another machine ends without notice.
enum class on_reset : std::uint8_t {
  dead,       ///< that its process is dead: its kernel closed it
  suspected,  ///< nothing certain: something between may have
};

/// How an endpoint finds the others, and when it takes them for dead. `seats`, the secret, `frame_bytes` and
/// where they are must be the same for all.
struct socket_options {
  seat_id seat{};
  std::uint32_t seats = 1;
  std::string folder{};                  ///< that is there, for Unix sockets, at `seat-<n>.sock` in it; or
  std::vector<std::string> addresses{};  ///< for TCP: "127.0.0.1:4000" or "[::1]:4000" for each seat
  /// What all must prove to know. Over Unix sockets it may be empty: there, all must be of one user anyway.
  std::string secret{};
  socket_reach reach = socket_reach::this_machine;
  on_silence silence = on_silence::suspect;
  on_reset reset = on_reset::dead;
  std::uint32_t frame_bytes = 1U << 20;   ///< the most a frame of data has
  std::uint32_t told_bytes = 256U << 10;  ///< of what is told and cannot go yet, to each seat
  std::uint32_t socket_bytes = 0;         ///< of a socket's buffers (SO_SNDBUF, SO_RCVBUF); 0: the system's
  std::uint32_t most_half_open = 0;       ///< connections not yet known; 0: twice the seats, and 16
  /// A `poll` or `send` that must wait looks that long before it sleeps, and offers the core in between; at
  /// worst 1 of 1024 does, where that finds nothing or others take the core. 0: none does.
  std::uint64_t spin_ns = 20'000;
  std::uint64_t beat_ns = 100'000'000;            ///< between two signs of life; 0: none
  std::uint64_t soft_silence_ns = 1'000'000'000;  ///< from then on `stats` tells of it
  /// From then on it is suspected, or killed; 0: never. The longest that a process may stand still (swap, a
  /// debugger, a machine that is moved) without being left out, and less than the deadlines of `agree`: one
  /// that passes before it ends with `errc::peer_timed_out`, and silence goes on to count in the next call.
  std::uint64_t hard_silence_ns = 5'000'000'000;
  /// That a connection may take to become known, and another that begins to listen in the folder.
  std::uint64_t handshake_ns = 2'000'000'000;
  /// That the end of a local process may come after that of its connections, and data after a notice.
  std::uint64_t confirm_ns = 200'000'000;
  std::uint64_t first_call_ns = 5'000'000;   ///< before an unanswered call is repeated, doubled each time
  std::uint64_t last_call_ns = 200'000'000;  ///< and no more than that
  std::string name = "socket_endpoint";
};

/// What an endpoint has seen. A plain value.
struct socket_stats {
  detail::lane_count data_sent{};  ///< frames and their bytes, without headers
  detail::lane_count data_received{};
  detail::lane_count told_sent{};
  detail::lane_count told_received{};
  std::uint64_t beats_sent = 0;
  std::uint64_t connected = 0;  ///< seats now
  std::uint64_t silent = 0;     ///< seats now that are silent beyond the soft limit
  std::uint64_t came = 0;       ///< processes heard for the first time
  std::uint64_t died = 0;       ///< for certain
  std::uint64_t suspected = 0;  ///< likewise once for each process
  std::uint64_t killed = 0;     ///< for their silence
  std::uint64_t called = 0;     ///< connections made to this endpoint, by whomever
  std::uint64_t strangers = 0;  ///< of these, and of those called: another user, no hello, or a wrong proof
  std::uint64_t other_version = 0;  ///< of strangers: endpoints of another version of the protocol
  std::uint64_t crowded_out = 0;    ///< of these: closed at once, `most_half_open` were there
  std::uint64_t too_slow = 0;       ///< handshakes that were not done in time
  std::uint64_t busy = 0;           ///< newcomers to a seat whose process is not known to be dead
  std::uint64_t unwanted = 0;       ///< processes that were given up, and called again
  std::uint64_t mismatched = 0;     ///< processes with the secret and other seats or frames
  std::uint64_t malformed = 0;      ///< connections broken by what came over them
  std::uint64_t overflowed = 0;     ///< seats that took too little of what was told
  std::uint64_t dropped = 0;        ///< frames told to nobody
};

/// An `endpoint` over stream sockets: Unix on one machine, TCP on several.
///
///     socket_endpoint end({.seat = seat_id{rank}, .seats = 4, .folder = "/run/job-7"});
///
/// Two connections for each pair of seats, one of which carries data and one what is told, so that this is
/// heard while data are stuck; made by the higher seat, again and again until they are there, within `poll`
/// and `send`. Nothing is heard before both sides have proved that they know the secret.
///
/// **Deaths.** One on this machine is certain when the kernel says that the process has exited (a pidfd:
/// children that it forked may hold its sockets open); elsewhere, when its connection ends. What came before
/// is delivered first, but for a frame whose handler still says `later`. An endpoint that is destroyed says
/// that it leaves, which is a certain death. A small thread sends signs of life. Who sends none is suspected,
/// after `hard_silence_ns` in which this endpoint has listened, that is, was within `poll` or `send`; time
/// computed in between does not count. So is who sends what is no frame, or takes nothing of what is told, or
/// whose connection breaks while its process lives. Whoever is suspected or given up is told so, and then
/// reports this seat as suspected itself. Of a seat given up, a certain death is still told.
///
/// **Fresh processes.** One may take a seat when the one before is dead, suspected or given up: until then it
/// is refused, and tries again. That is never the same process again.
///
/// @par Complexity      a frame: one system call to send, one or two to receive, and one to sleep.
///      About 24 KiB for each seat that was ever connected, and address space of `frame_bytes` +
///      `told_bytes`.
/// @par Thread safety   one thread at a time, but `wake`. Not to be used in a forked child.
/// @par Errors          the constructor: `argument_error`, `system_error`. `send`: as `endpoint` says, and
///      `errc::out_of_range` for a frame longer than `frame_bytes()`. `send` and `poll` throw
///      `std::bad_alloc` when there is no memory for a seat that connects: it is then tried again.
/// @par Source          heartbeats with certain knowledge where there is some: Gupta, Chandra and Goldszmidt,
///      "On scalable and efficient distributed failure detectors", PODC 2001, for the terms;
///      `pidfd_open(2)`.
class socket_endpoint {
 public:
  explicit socket_endpoint(socket_options options);
  socket_endpoint(const socket_endpoint&) = delete;
  socket_endpoint& operator=(const socket_endpoint&) = delete;
  /// Says that it leaves, and closes everything; waits for nobody.
  ~socket_endpoint();

  [[nodiscard]] seat_id self() const noexcept { return options_.seat; }
  [[nodiscard]] std::uint32_t seats() const noexcept { return options_.seats; }
  /// Of 64 random bits.
  [[nodiscard]] std::uint64_t nonce() const noexcept { return nonce_; }
  /// The machine's monotonic clock.
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return detail::monotonic_ns(); }
  [[nodiscard]] std::uint32_t frame_bytes() const noexcept { return options_.frame_bytes; }
  [[nodiscard]] bool is_connected(seat_id seat) const noexcept {
    return to_index(seat) < peers_.size() && peers_[to_index(seat)].now == peer::state::up;
  }

  /// See `endpoint`. What waits of an earlier frame goes first.
  template <frame_handler H>
  [[nodiscard]] result<void> send(seat_id to, const frame_header& header, std::span<const std::byte> bytes,
                                  deadline by, H& handler) {
    return send_frame(to, header, bytes, by, detail::refer_to(handler));
  }
  /// See `endpoint`. May be called by a handler.
  void tell(seat_id to, const frame_header& header, std::span<const std::byte> bytes) noexcept;
  /// See `endpoint`. False when `wake` ended it.
  template <frame_handler H>
  [[nodiscard]] bool poll(deadline by, H& handler) {
    return poll_until(by, detail::refer_to(handler));
  }
  void withdraw(seat_id from) noexcept;
  void give_up(seat_id seat) noexcept;
  void wake() noexcept;

  [[nodiscard]] socket_stats stats() const noexcept;
  /// See `endpoint`. What a stranger says of itself may be in it: for people to read.
  [[nodiscard]] seat_absence why_missing(seat_id seat) const noexcept;

 private:
  using peer = detail::socket_peer;
  using handler_ref = detail::frame_handler_ref;

  // detail/socket_endpoint_setup.hpp: setting up, and the end
  void check_options();
  void set_up();
  void beat() noexcept;

  // detail/socket_endpoint_body.hpp: sending, waiting
  result<void> send_frame(seat_id to, const frame_header& header, std::span<const std::byte> bytes,
                          deadline by, const handler_ref& handler);
  bool poll_until(deadline by, const handler_ref& handler);
  /// Who never has to wait looks at everything that often all the same.
  static constexpr std::uint64_t look_ns = 1'000'000;

  void begin_listening() noexcept;
  void look_at_clock(std::uint64_t most) noexcept;
  [[nodiscard]] bool look_once(const handler_ref& handler);
  [[nodiscard]] bool may_spin(std::uint64_t until) const noexcept;
  void wait_and_take(std::uint64_t until, int writable, const handler_ref& handler);
  void handle(const epoll_event& event, const handler_ref& handler);
  [[nodiscard]] seat_id seat_of(const peer& at) const noexcept;
  void due(std::uint64_t at) noexcept { next_timer_ = at < next_timer_ ? at : next_timer_; }

  // detail/socket_endpoint_lanes.hpp: bytes between sockets and lanes
  bool take_data(peer& from, const handler_ref& handler);
  bool take_told(peer& from, const handler_ref& handler);
  void ask_held(const handler_ref& handler);
  [[nodiscard]] ssize_t write_data(peer& to, std::span<const std::byte> first,
                                   std::span<const std::byte> second) noexcept;
  [[nodiscard]] bool flush_rest(peer& to) noexcept;
  void watch_data(peer& at) noexcept;
  [[nodiscard]] bool is_read(const peer& at) const noexcept;
  void heat(seat_id seat) noexcept;
  void cool() noexcept;
  void unwatch(int socket) noexcept;
  void put_told(detail::told_writer& out, detail::frame_sort sort, const frame_header& header,
                std::span<const std::byte> bytes) noexcept;
  static void flush_told(detail::told_writer& out) noexcept;
  static void arm_told(detail::told_writer& out) noexcept;

  // detail/socket_endpoint_deaths.hpp: what says that a process is dead, and what follows
  void evidence_of_death(peer& of, peer::evidence why) noexcept;
  void lane_ended(peer& of, detail::socket_lane lane, const handler_ref& handler);
  void process_exited(peer& of, const handler_ref& handler);
  void take_what_came(peer& of, const handler_ref& handler);
  void try_conclude(peer& of, const handler_ref& handler);
  void conclude_certain(peer& of, const handler_ref& handler) noexcept;
  void suspect(peer& of, const handler_ref& handler);
  void stop_hearing(peer& of) noexcept;
  void notices(peer& of, const handler_ref& handler);
  void malformed(peer& of, const handler_ref& handler);
  void judge_silence(peer& of, const handler_ref& handler);
  void close_lanes(peer& of) noexcept;
  void run_timers(const handler_ref& handler);

  // detail/socket_endpoint_joining.hpp: connections that are made, and become known
  void accept_some() noexcept;
  [[nodiscard]] std::uint32_t free_half() const noexcept;
  [[nodiscard]] bool watch_half(std::uint32_t slot, std::uint32_t events) noexcept;
  void close_half(std::uint32_t slot) noexcept;
  void call(peer& whom) noexcept;
  void knock(peer& whom) noexcept;
  [[nodiscard]] std::uint32_t begin_call(peer& whom, detail::hello_purpose purpose) noexcept;
  void call_failed(peer& whom) noexcept;
  void not_reached(peer& whom, detail::hello_purpose purpose, int why) noexcept;
  void learn_absence(const detail::half_open& half) noexcept;
  void half_failed(std::uint32_t slot) noexcept;
  [[nodiscard]] bool say(std::uint32_t slot) noexcept;
  void advance(std::uint32_t slot, const handler_ref& handler);
  void judge(std::uint32_t slot) noexcept;
  [[nodiscard]] detail::hello_answer answer_to(const detail::wire_hello& caller) noexcept;
  void settled(std::uint32_t slot, const handler_ref& handler);
  void take_lane(peer& of, std::uint32_t slot) noexcept;
  void look_at_candidate(peer& of, const handler_ref& handler);
  void drop_candidate(peer& of) noexcept;
  void promote(peer& of, const handler_ref& handler);
  void run_calls() noexcept;

  socket_options options_;
  detail::hmac_sha256 secret_;
  detail::wire_hello mine_{};
  std::vector<detail::socket_address> addresses_;
  pid_t owner_ = 0;
  ino_t socket_file_ = 0;

  detail::descriptor epoll_;
  detail::descriptor listener_;
  detail::descriptor wake_;
  detail::descriptor stop_;
  std::vector<peer> peers_;
  std::vector<detail::half_open> halves_;
  std::uint32_t open_halves_ = 0;
  std::uint32_t called_ = 0;  // of these, by others
  std::uint32_t knocks_ = 0;  // of these, to say that this process has come
  std::vector<std::byte> scratch_;
  std::uint64_t nonce_ = 1;
  seat_set held_;  // whose lane of data waits for room

  std::uint64_t now_ = 0;  // as of the last look at the clock
  std::uint64_t looked_ = 0;
  std::uint64_t listened_ = 0;  // time within `poll` and `send`: silence counts in it
  std::uint64_t next_timer_ = 0;
  std::uint64_t accept_at_ = 0;                     // when descriptors had run out
  seat_absence by_nobody_ = seat_absence::unheard;  // what callers were that did not say who they are
  bool has_come_ = false;
  bool is_woken_ = false;
  seat_id last_from_ = no_seat;  // who sent the data that came last
  seat_id hot_ = no_seat;        // whose lane of data epoll does not look at
  std::uint32_t run_ = 0;        // reads in turn of the lane that was read last
  detail::spinner poll_spin_;
  detail::spinner send_spin_;
  socket_stats counted_{};

  mutable std::mutex told_mutex_;  // of each peer's `out`
  std::thread beats_;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/socket_endpoint_body.hpp>
#include <llmmem/comm/detail/socket_endpoint_deaths.hpp>
#include <llmmem/comm/detail/socket_endpoint_joining.hpp>
#include <llmmem/comm/detail/socket_endpoint_lanes.hpp>
#include <llmmem/comm/detail/socket_endpoint_setup.hpp>

namespace llmmem {
inline namespace v0 {

static_assert(endpoint<socket_endpoint> && detail::tells_absence<socket_endpoint>);

}  // namespace v0
}  // namespace llmmem
