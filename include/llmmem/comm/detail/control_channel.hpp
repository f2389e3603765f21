/// @file
/// `control_channel`: the outgoing control messages of a socket endpoint, and its heartbeats.
#pragma once

#include <llmmem/comm/detail/frame_seal.hpp>
#include <llmmem/comm/detail/socket_descriptor.hpp>
#include <llmmem/comm/detail/socket_lanes.hpp>
#include <llmmem/comm/detail/socket_poller.hpp>
#include <llmmem/comm/detail/socket_process.hpp>
#include <llmmem/comm/detail/socket_system.hpp>
#include <llmmem/comm/detail/socket_wire.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/socket_options.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/types.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Writes frames to the control lane of each seat without ever waiting: bytes that the socket does not take
/// wait in a buffer of fixed size. A background thread sends heartbeats, and writes waiting bytes.
///
/// The caller owns the sockets. It closes one only after `close` of that seat, when no thread writes to it.
///
/// @invariant  A lane's frames are sent whole and in order; after an overflow only a notice is sent.
/// @par Complexity      a frame: one system call, and a copy where the socket is full.
/// @par Thread safety   one thread at a time; a mutex protects against the heartbeat thread.
/// @par Errors          the constructor and `start` throw `system_error`, `reserve` throws `std::bad_alloc`.
class control_channel {
 public:
  /// @param most_waiting  the most bytes that wait for one seat
  control_channel(const socket_poller& poller, std::uint32_t seats, std::uint32_t most_waiting)
      : poller_(poller), most_waiting_(most_waiting), writers_(seats) {
    stop_ = descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!stop_.is_open()) throw system_error("socket_endpoint: epoll_create1 or eventfd" + because(errno));
  }
  control_channel(const control_channel&) = delete;
  control_channel& operator=(const control_channel&) = delete;
  ~control_channel() { stop(); }

  /// @name Heartbeats
  /// @{
  /// Starts the thread.
  void start(std::uint64_t beat_ns);
  /// Ends the thread. No effect if there is none.
  void stop() noexcept {
    if (!beats_.joinable()) return;
    const std::uint64_t one = 1;
    static_cast<void>(!::write(stop_.get(), &one, sizeof(one)));
    beats_.join();
  }
  /// For a forked child, where the thread does not exist.
  void forget_thread() noexcept {
    if (beats_.joinable()) beats_.detach();
  }
  /// @}

  /// @name Lanes
  /// @{
  /// Allocates memory for the seat's lane. Call it before the first `open`.
  void reserve(seat_id seat) {
    const std::lock_guard lock(mutex_);
    writers_[to_index(seat)].waiting.reserve(2 * wire_header_bytes + most_waiting_);
  }
  /// Begins a lane with a heartbeat, because a process that has called waits for it. @pre the poller knows
  /// `socket` by `key`.
  void open(seat_id seat, int socket, std::uint64_t key, const frame_seal& seal = {}) noexcept {
    const std::lock_guard lock(mutex_);
    writer& out = writers_[to_index(seat)];
    out.waiting.clear();
    out.seal = seal;
    out.number = 0;
    out.is_armed = out.is_overflowed = false;
    out.key = key;
    out.socket = socket;
    put(out, frame_sort::beat, {}, {});
  }
  /// Ends a lane. Nothing more is written to its socket.
  void close(seat_id seat) noexcept {
    const std::lock_guard lock(mutex_);
    writer& out = writers_[to_index(seat)];
    out.socket = -1;
    out.waiting.clear();
  }
  /// @}

  /// @name Frames
  /// A seat without a lane receives none.
  /// @{
  /// Whether the lane can take more: false after a message did not fit. @pre at most `max_post_bytes`
  bool post(seat_id to, const frame_header& header, std::span<const std::byte> bytes) noexcept {
    const std::lock_guard lock(mutex_);
    writer& out = writers_[to_index(to)];
    put(out, frame_sort::frame, header, bytes);
    return !out.is_overflowed;
  }
  /// Whether less than half of the bytes that may wait for the seat are waiting.
  [[nodiscard]] bool has_capacity(seat_id seat) const noexcept {
    if (to_index(seat) >= writers_.size()) return true;
    const std::lock_guard lock(mutex_);
    return writers_[to_index(seat)].waiting.waiting().size() < most_waiting_ / 2;
  }
  /// Informs the process that it is ignored from now on. There is space for this even after an overflow.
  void give_up(seat_id seat) noexcept {
    const std::lock_guard lock(mutex_);
    writer& out = writers_[to_index(seat)];
    out.is_overflowed = false;
    put(out, frame_sort::given_up, {}, {});
  }
  /// Announces, after the waiting bytes, that this process leaves.
  void leave(seat_id seat) noexcept {
    const std::lock_guard lock(mutex_);
    writer& out = writers_[to_index(seat)];
    flush(out);
    put(out, frame_sort::leaving, {}, {});
  }
  /// Writes waiting bytes as far as the socket takes them.
  void flush(seat_id seat) noexcept {
    const std::lock_guard lock(mutex_);
    flush(writers_[to_index(seat)]);
  }
  [[nodiscard]] bool has_overflowed(seat_id seat) const noexcept {
    const std::lock_guard lock(mutex_);
    return writers_[to_index(seat)].is_overflowed;
  }
  /// @}

  void add_to(socket_stats& all) const noexcept {
    const std::lock_guard lock(mutex_);
    for (const writer& each : writers_) {
      all.posts_sent.frames += each.sent.frames;
      all.posts_sent.bytes += each.sent.bytes;
      all.beats_sent += each.beats;
    }
  }

 private:
  /// The lane to one seat.
  struct writer {
    int socket = -1;
    std::uint64_t key = 0;
    waiting_bytes waiting;
    frame_seal seal{};
    std::uint64_t number = 0;  // the number of the next frame
    bool is_armed = false;     // epoll reports when the socket can be written to
    bool is_overflowed = false;
    lane_count sent{};
    std::uint64_t beats = 0;
  };

  // @pre of each: the mutex is held
  void put(writer& out, frame_sort sort, const frame_header& header,
           std::span<const std::byte> bytes) noexcept;
  void flush(writer& out) noexcept;
  void arm(writer& out) noexcept;

  void beat(std::uint64_t beat_ns) noexcept;

  const socket_poller& poller_;
  std::uint32_t most_waiting_;
  descriptor stop_;
  mutable std::mutex mutex_;  // protects the writers
  std::vector<writer> writers_;
  std::thread beats_;
};

inline void control_channel::start(std::uint64_t beat_ns) {
  // The program's own threads handle signals.
  sigset_t all{};
  sigset_t before{};
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    beats_ = std::thread([this, beat_ns] {
      ::pthread_setname_np(::pthread_self(), beat_thread_name);
      beat(beat_ns);
    });
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw system_error(
        "socket_endpoint: the heartbeat thread could not be started; raise the limit of "
        "threads, or set beat_ns to 0");
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

/// The heartbeat thread. A lane with waiting bytes needs no heartbeat.
inline void control_channel::beat(std::uint64_t beat_ns) noexcept {
  pollfd stop{stop_.get(), POLLIN, 0};
  const std::uint64_t wait = beat_ns / 1'000'000;
  for (;;) {
    const int timeout = wait == 0 ? 1 : wait > 60'000 ? 60'000 : static_cast<int>(wait);
    if (::poll(&stop, 1, timeout) > 0) return;
    for (writer& each : writers_) {
      const std::lock_guard lock(mutex_);
      flush(each);
      if (each.waiting.empty()) put(each, frame_sort::beat, {}, {});
    }
  }
}

/// Makes epoll report when the socket can be written to, exactly while bytes wait.
inline void control_channel::arm(writer& out) noexcept {
  if (out.is_armed != out.waiting.empty()) return;
  out.is_armed = !out.is_armed;
  const std::uint32_t events =
      out.is_armed ? std::uint32_t{EPOLLIN} | std::uint32_t{EPOLLOUT} : std::uint32_t{EPOLLIN};
  poller_.change(out.socket, events, out.key);
}

inline void control_channel::flush(writer& out) noexcept {
  while (out.socket >= 0 && !out.waiting.empty()) {
    const ssize_t sent = write_some(out.socket, out.waiting.waiting(), {});
    if (sent == 0) break;
    // The reader of this lane will find that it is broken.
    if (sent < 0) out.waiting.clear();
    if (sent > 0) out.waiting.went(static_cast<std::size_t>(sent));
  }
  if (out.socket >= 0) arm(out);
}

inline void control_channel::put(writer& out, frame_sort sort, const frame_header& header,
                                 std::span<const std::byte> bytes) noexcept {
  if (out.socket < 0 || out.is_overflowed) return;
  const std::size_t whole = wire_header_bytes + bytes.size();
  // Messages leave space for a notice.
  const std::size_t kept = sort == frame_sort::frame ? 2 * wire_header_bytes : 0;
  if (!out.waiting.empty() && out.waiting.free_bytes() < whole + kept) {
    out.is_overflowed = true;
    return;
  }
  wire_header wire{header, socket_lane::told, sort, static_cast<std::uint32_t>(out.number)};
  wire.frame.bytes = static_cast<std::uint32_t>(bytes.size());
  std::array<std::byte, wire_header_bytes> head{};
  write_header(wire, head);
  out.seal.close(head, bytes, out.number++);
  ssize_t sent = 0;
  if (out.waiting.empty()) sent = write_some(out.socket, head, bytes);
  if (sent < 0) return;  // the reader of this lane will find that it is broken
  const auto gone = static_cast<std::size_t>(sent);
  if (gone < head.size()) out.waiting.add(std::span<const std::byte>(head).subspan(gone));
  if (gone < whole) out.waiting.add(bytes.subspan(gone < head.size() ? 0 : gone - head.size()));
  arm(out);
  if (sort == frame_sort::beat) ++out.beats;
  if (sort != frame_sort::frame) return;
  ++out.sent.frames;
  out.sent.bytes += bytes.size();
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
