/// @file
/// `peer_lanes`: the connected sockets of the other seats, and the frames sent and received over them.
#pragma once

#include <llmmem/comm/detail/socket_descriptor.hpp>
#include <llmmem/comm/detail/socket_lanes.hpp>
#include <llmmem/comm/detail/socket_poller.hpp>
#include <llmmem/comm/detail/socket_system.hpp>
#include <llmmem/comm/detail/socket_wire.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/socket_options.hpp>
#include <llmmem/config.hpp>

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// An outgoing frame of data.
struct outgoing_frame {
  std::array<std::byte, wire_header_bytes> head{};
  std::span<const std::byte> bytes;
  std::size_t sent = 0;  ///< sent bytes, of `head` and then of `bytes`

  [[nodiscard]] bool is_begun() const noexcept { return sent != 0; }
  [[nodiscard]] bool is_complete() const noexcept { return sent == head.size() + bytes.size(); }
  /// Bytes of the payload that have been sent.
  [[nodiscard]] std::size_t payload_sent() const noexcept {
    return sent > head.size() ? sent - head.size() : 0;
  }
  [[nodiscard]] std::span<const std::byte> head_left() const noexcept {
    return sent < head.size() ? std::span<const std::byte>(head).subspan(sent) : std::span<const std::byte>();
  }
  [[nodiscard]] std::span<const std::byte> bytes_left() const noexcept {
    return bytes.subspan(payload_sent());
  }
};

/// The outcome of a read.
enum class lane_event : std::uint8_t {
  more,       ///< the lane may have more
  drained,    ///< it has no more now, or may not be read
  ended,      ///< it was closed or is broken
  malformed,  ///< it carried bytes that are not a frame
  forged,     ///< it carried a frame with a wrong seal
};

struct lane_read {
  lane_event event = lane_event::drained;
  std::size_t bytes = 0;  ///< number of bytes read
};

/// The outcome of writing waiting bytes.
enum class lane_flush : std::uint8_t { done, waits, broken };

/// The two lanes to each seat: their sockets, the readers of incoming frames, and the rest of a frame of data
/// that was begun. (`control_channel` writes control messages.) It reports events of the sockets and draws no
/// conclusions.
///
/// Epoll watches each open data lane that may be read, except the *hot* one, which was read many consecutive
/// times: the caller polls that lane itself, because otherwise the sender would pay for epoll's work at each
/// frame.
///
/// @invariant  A lane whose handler answered `ask_again` is held, and is not read before `ask` has found
/// space.
/// @par Complexity      a read or write: one system call. Only `reserve` allocates: about 24 KiB for each
///   seat, and address space of `frame_bytes`.
/// @par Thread safety   one thread at a time.
/// @par Errors          `reserve` throws `std::bad_alloc`.
class peer_lanes {
 public:
  peer_lanes(const socket_poller& poller, std::uint32_t seats, std::uint32_t frame_bytes)
      : poller_(poller), frame_bytes_(frame_bytes), pairs_(seats), scratch_(seats == 0 ? 0 : 65536) {}
  peer_lanes(const peer_lanes&) = delete;
  peer_lanes& operator=(const peer_lanes&) = delete;

  /// @name Sockets
  /// @{
  /// Allocates memory for the seat's lanes. Call it before the first `open`.
  void reserve(seat_id seat) {
    lane_pair& of = at(seat);
    if (of.has_buffers) return;
    of.data_in.reserve();
    of.told_in.reserve();
    of.rest.reserve(wire_header_bytes + frame_bytes_);
    of.has_buffers = true;
  }
  /// Takes the sockets of a process. @pre `reserve`; the seat's lanes are closed.
  /// @param seals  by lane
  void open(seat_id seat, descriptor data, descriptor told,
            const std::array<lane_seals, 2>& seals = {}) noexcept;
  /// Closes both sockets, and drops what arrived over them.
  void close(seat_id seat) noexcept;
  [[nodiscard]] bool is_open(seat_id seat) const noexcept { return at(seat).told.is_open(); }
  /// Grows with each `close`.
  [[nodiscard]] std::uint32_t generation(seat_id seat) const noexcept { return at(seat).generation; }
  [[nodiscard]] int data_socket(seat_id seat) const noexcept { return at(seat).data.get(); }
  [[nodiscard]] int told_socket(seat_id seat) const noexcept { return at(seat).told.get(); }
  [[nodiscard]] std::uint64_t told_key(seat_id seat) const noexcept {
    return event_key(socket_event::told, generation(seat), to_index(seat));
  }
  /// Ends writing on both sockets, and reads what has arrived: TCP resets a connection that is closed with
  /// unread bytes, and the peer would lose the sent bytes.
  void shut_down(seat_id seat) noexcept;
  /// @}

  /// @name Reading
  /// One system call each.
  /// @{
  [[nodiscard]] lane_read read_data(seat_id seat, handler_call& call) noexcept;
  [[nodiscard]] lane_read read_told(seat_id seat, handler_call& call) noexcept;
  /// The lanes whose frame of data waits for space.
  [[nodiscard]] const seat_set& held() const noexcept { return held_; }
  [[nodiscard]] bool has_held() const noexcept { return !held_.empty(); }
  /// Asks the handler again for space. @pre the lane is held
  [[nodiscard]] lane_event ask(seat_id seat, handler_call& call) noexcept;
  /// Takes back a buffer that the handler gave.
  void withdraw(seat_id seat) noexcept { at(seat).data_in.withdraw(); }
  /// Bytes of data read from the seat so far.
  [[nodiscard]] std::uint64_t taken(seat_id seat) const noexcept { return at(seat).data_in.taken(); }
  /// The last seat that data came from, or `no_seat`.
  [[nodiscard]] seat_id last_from() const noexcept { return last_from_; }
  /// The socket that the caller must poll itself, because epoll does not; or -1.
  [[nodiscard]] int hot_socket() const noexcept {
    return hot_ != no_seat && may_read(hot_) ? at(hot_).data.get() : -1;
  }
  [[nodiscard]] seat_id hot() const noexcept { return hot_; }
  /// @}

  /// @name Ends
  /// @{
  /// Ends the lane: it is no longer polled.
  void end(seat_id seat, socket_lane lane) noexcept;
  /// Whether both lanes have ended, with everything read.
  [[nodiscard]] bool have_ended(seat_id seat) const noexcept {
    return at(seat).is_data_over && at(seat).is_told_over;
  }
  /// From now on reads and drops everything that arrives.
  void drain(seat_id seat) noexcept {
    at(seat).data_in.drain();
    at(seat).told_in.drain();
  }
  /// From now on delivers nothing that arrives, and sends nothing. Notices are still read.
  void mute(seat_id seat) noexcept;
  /// Whether the process has announced that it leaves.
  [[nodiscard]] bool is_leaving(seat_id seat) const noexcept { return at(seat).told_in.is_leaving(); }
  /// Whether the process has announced that it gave this one up.
  [[nodiscard]] bool is_given_up(seat_id seat) const noexcept { return at(seat).told_in.is_given_up(); }
  /// @}

  /// @name Writing
  /// @{
  /// Begins the next frame to that seat. @pre the rest of the previous one is written.
  [[nodiscard]] outgoing_frame begin_frame(seat_id to, const frame_header& header,
                                           std::span<const std::byte> bytes) const noexcept;
  /// Writes more of it; returns the bytes written, 0 when the socket takes none now, or the negative error.
  [[nodiscard]] ssize_t write(seat_id to, outgoing_frame& frame) noexcept;
  /// Copies the rest of a frame that was begun, to be written by `flush`.
  void keep_rest(seat_id to, const outgoing_frame& frame) noexcept;
  /// Writes the rest of a frame.
  [[nodiscard]] lane_flush flush(seat_id to) noexcept;
  void forget_rest(seat_id to) noexcept { at(to).rest.clear(); }
  /// Makes epoll watch for the reads and writes that are possible on the data lane. Call it after `flush` and
  /// `keep_rest`.
  void watch(seat_id seat) noexcept;
  /// @}

  void add_to(socket_stats& all) const noexcept;

 private:
  struct lane_pair {
    descriptor data;
    descriptor told;
    data_reader data_in;
    told_reader told_in;
    waiting_bytes rest;  // the rest of begun frames of data
    frame_seal data_seal{};
    std::uint64_t data_number = 0;  // the number of the next frame out
    std::uint32_t generation = 0;
    std::uint32_t watched = 0;  // the events that epoll watches for on the data lane
    bool is_data_over = false;
    bool is_told_over = false;
    bool has_buffers = false;
    lane_count data_sent{};
    lane_count data_received{};
    lane_count posts_received{};
  };

  [[nodiscard]] lane_pair& at(seat_id seat) noexcept { return pairs_[to_index(seat)]; }
  [[nodiscard]] const lane_pair& at(seat_id seat) const noexcept { return pairs_[to_index(seat)]; }
  [[nodiscard]] bool may_read(seat_id seat) const noexcept {
    return at(seat).data.is_open() && !at(seat).is_data_over && !held_.contains(seat);
  }
  void count_sent(lane_pair& to, std::size_t bytes) noexcept {
    ++to.data_sent.frames;
    to.data_sent.bytes += bytes;
  }
  void heat(seat_id seat) noexcept;
  void cool() noexcept;

  const socket_poller& poller_;
  std::uint32_t frame_bytes_;
  std::vector<lane_pair> pairs_;
  std::vector<std::byte> scratch_;  // for bytes that are dropped
  seat_set held_;
  seat_id last_from_ = no_seat;
  seat_id hot_ = no_seat;
  std::uint32_t run_ = 0;  // consecutive reads of the lane read last
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/peer_lanes_body.hpp>
