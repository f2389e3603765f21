/// @file
/// `socket_options`, `socket_stats`: the construction parameters and counters of a `socket_endpoint`.
#pragma once

#include <llmmem/comm/detail/socket_lanes.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/config.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Which connections carry sealed frames. Only the two processes at the ends of a connection can make these,
/// each in its turn. Frames are sealed if either process requests it.
enum class socket_seal : std::uint8_t {
  off_machine,  ///< requests it if an address of the job is not a loopback address, and there is no `wrapper`
  always,       ///< requests it
  never,        ///< does not request it: a machine that can write into the network can impersonate any
                ///< process
};

/// From where a TCP endpoint may be reached. Without a `wrapper`, every machine on the network can read the
/// frames.
enum class socket_reach : std::uint8_t {
  this_machine,  ///< addresses must be loopback addresses
  any_machine,   ///< only in a trusted network
};

/// How an endpoint responds to a process that is silent beyond the limit.
enum class on_silence : std::uint8_t {
  suspect,     ///< it reports the process as suspected; the process may live, but is ignored
  kill_local,  ///< it kills a process that the kernel reports as holding the connection, and suspects others
};

/// What an endpoint reports when the connection to a process of another machine ends without notice.
enum class on_reset : std::uint8_t {
  dead,       ///< a certain death: the kernel there closed the connection
  suspected,  ///< a suspected death: a router or firewall in between may have ended it
};

/// Takes over the TCP connections of endpoints, and carries their bytes between the two processes so that a
/// third party can neither read nor change them, nor add any. `tls_wrapper` is one.
///
/// @par Thread safety   any thread calls `wrap` and `why_ended`.
class socket_wrapper {
 public:
  socket_wrapper(const socket_wrapper&) = delete;
  socket_wrapper& operator=(const socket_wrapper&) = delete;

  /// Returns a stream socket for the plain bytes of a connection, nonblocking, which the caller closes; -1 if
  /// there is no descriptor for one. The wrapper duplicates `connected`. When the connection ends, or carries
  /// bytes that the other end did not write, the socket ends.
  /// @param has_called  whether this process made the connection.
  [[nodiscard]] virtual int wrap(int connected, bool has_called) noexcept = 0;
  /// Returns why a socket from `wrap` has ended before anything came from it; `seat_absence::no_contact` if
  /// the wrapper knows of no reason.
  [[nodiscard]] virtual seat_absence why_ended(int wrapped) const noexcept = 0;

 protected:
  socket_wrapper() = default;
  ~socket_wrapper() = default;
};

/// How an endpoint finds the others, and when it declares them dead. All endpoints of a job must have the
/// same `seats`, `secret`, `frame_bytes` and folder or addresses.
struct socket_options {
  seat_id seat{};
  std::uint32_t seats = 1;
  std::string folder{};                  ///< an existing folder for Unix sockets, `seat-<n>.sock` each; or
  std::vector<std::string> addresses{};  ///< for TCP: "127.0.0.1:4000" or "[::1]:4000" for each seat
  /// The secret. Every process must prove that it knows it. It may be empty over Unix sockets: there, all
  /// must belong to one user, and only that user may own and write the folder.
  std::string secret{};
  socket_reach reach = socket_reach::this_machine;
  socket_seal seal = socket_seal::off_machine;
  /// The wrapper that carries the bytes of TCP connections, such as `tls_wrapper`. It outlives the endpoint;
  /// all processes of the job need one. Null: frames go over the network unencrypted. A process over a
  /// wrapper is treated as on another machine.
  socket_wrapper* wrapper = nullptr;
  on_silence silence = on_silence::suspect;
  on_reset reset = on_reset::dead;
  std::uint32_t frame_bytes = 1U << 20;         ///< the most bytes of a frame of data
  std::uint32_t post_queue_bytes = 256U << 10;  ///< the most control bytes that wait for one seat
  std::uint32_t socket_bytes = 0;   ///< a socket's buffers (SO_SNDBUF, SO_RCVBUF); 0: the system's
                                    ///< default
  std::uint32_t max_half_open = 0;  ///< callers not yet identified; 0: twice the seats, and 16
  /// How long a waiting `poll` or `send` spins before it sleeps. It yields the core in between. If spinning
  /// finds nothing, or other threads take the core, in the worst case 1 of 1024 waits spins. 0: never.
  std::uint64_t spin_ns = 20'000;
  std::uint64_t beat_ns = 100'000'000;            ///< between two heartbeats; 0: no heartbeats
  std::uint64_t soft_silence_ns = 1'000'000'000;  ///< `stats` counts a seat as silent after this time
  /// A silent process is suspected, or killed, after this time; 0: never. This is the longest that a process
  /// may be stopped (swap, a debugger, a machine being moved) and stay in the job. It must be less than the
  /// deadlines of `agree`: a deadline that passes first ends with `errc::peer_timed_out`, and the silence
  /// continues to count in the next call. For a process that the kernel reports as holding the connection,
  /// time in which its heartbeats wait for a core does not count: a process that starves on a busy machine is
  /// healthy.
  std::uint64_t hard_silence_ns = 5'000'000'000;
  /// The time limit for a handshake, and for another process that starts to listen in the folder.
  std::uint64_t handshake_ns = 2'000'000'000;
  /// The time limit from the end of a local process's connections to its exit, and from a notice to the end
  /// of the data before it.
  std::uint64_t confirm_ns = 200'000'000;
  std::uint64_t first_call_ns = 5'000'000;   ///< before an unanswered call is repeated; doubled each time
  std::uint64_t last_call_ns = 200'000'000;  ///< up to this
  std::string name = "socket_endpoint";
};

/// The counters of an endpoint. A plain value.
struct socket_stats {
  detail::lane_count data_sent{};  ///< frames and their bytes, without headers
  detail::lane_count data_received{};
  detail::lane_count posts_sent{};
  detail::lane_count posts_received{};
  std::uint64_t beats_sent = 0;
  std::uint64_t connected = 0;  ///< seats that are connected now
  std::uint64_t silent = 0;     ///< seats silent beyond the soft limit now
  std::uint64_t joined = 0;     ///< processes that connected
  std::uint64_t died = 0;       ///< processes that certainly died
  std::uint64_t suspected = 0;  ///< processes that were suspected, each counted once
  std::uint64_t killed = 0;     ///< processes killed for their silence
  std::uint64_t accepted = 0;   ///< connections that any process made to this endpoint
  std::uint64_t unauthenticated =
      0;                            ///< connections with another user, without a hello, or with a wrong proof
  std::uint64_t other_version = 0;  ///< of these, endpoints with another version of the protocol
  std::uint64_t crowded_out = 0;    ///< callers closed for a later one, because there were `max_half_open`
  std::uint64_t too_slow = 0;       ///< handshakes that took too long
  std::uint64_t busy = 0;           ///< callers for a seat whose process is not known to be dead
  std::uint64_t unwanted = 0;       ///< processes that were given up, and called again
  std::uint64_t mismatched = 0;     ///< processes with the secret but other seats or frames
  std::uint64_t malformed = 0;      ///< connections with bytes that are not a frame
  std::uint64_t forged = 0;         ///< connections with a frame that has a wrong seal
  std::uint64_t overflowed = 0;     ///< seats that read too little of their control messages
  std::uint64_t dropped = 0;        ///< control messages to a seat without a connection
};

}  // namespace v0
}  // namespace llmmem
