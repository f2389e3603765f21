/// @file
/// `socket_peers`: the processes that are connected in the other seats, from their first frame to their
/// death.
#pragma once

#include <llmmem/comm/detail/call_schedule.hpp>
#include <llmmem/comm/detail/control_channel.hpp>
#include <llmmem/comm/detail/failure_detector.hpp>
#include <llmmem/comm/detail/peer_lanes.hpp>
#include <llmmem/comm/detail/socket_descriptor.hpp>
#include <llmmem/comm/detail/socket_lanes.hpp>
#include <llmmem/comm/detail/socket_poller.hpp>
#include <llmmem/comm/detail/socket_process.hpp>
#include <llmmem/comm/detail/socket_wire.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/socket_options.hpp>
#include <llmmem/config.hpp>

#include <sys/epoll.h>
#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Reads the lanes, reports what happens there to the failure detector, and acts on its verdicts: it delivers
/// what arrived before a death, closes the rest, and notifies the handler.
///
/// @invariant  A seat's lanes and its control lane are open exactly while its state is not `nobody`.
/// @par Complexity      as `peer_lanes`.
/// @par Thread safety   one thread at a time.
/// @par Errors          `reserve` throws `std::bad_alloc`.
class socket_peers {
 public:
  /// Whether a process's heartbeats wait for a core: answered by the kernel, or a test.
  using core_question = bool (*)(const descriptor& process) noexcept;

  /// @param seats  0 for an endpoint that is alone
  socket_peers(socket_poller& poller, control_channel& control, call_schedule& calls,
               const socket_options& options, std::uint32_t seats, core_question asks = &wants_core)
      : poller_(poller),
        wants_core_(asks),
        control_(control),
        calls_(calls),
        lanes_(poller, seats, options.frame_bytes),
        detector_(poller.clock(), options, seats),
        seats_(seats) {}
  socket_peers(const socket_peers&) = delete;
  socket_peers& operator=(const socket_peers&) = delete;

  [[nodiscard]] std::uint32_t seats() const noexcept { return seats_; }
  [[nodiscard]] bool has(seat_id seat) const noexcept { return to_index(seat) < seats_; }
  [[nodiscard]] bool is_up(seat_id seat) const noexcept { return has(seat) && detector_.is_up(seat); }
  /// Whether a process may take the seat: it is empty, or its process was given up.
  [[nodiscard]] bool is_free(seat_id seat) const noexcept {
    const seat_state now = detector_.state(seat);
    return now == seat_state::nobody || now == seat_state::given_up;
  }
  [[nodiscard]] bool is_rejected(seat_id seat, const incarnation_id& incarnation) const noexcept {
    return detector_.is_rejected(seat, incarnation);
  }
  [[nodiscard]] std::uint32_t generation(seat_id seat) const noexcept { return lanes_.generation(seat); }
  /// Why the process in that seat is ignored: it sent a forged frame, or it failed.
  [[nodiscard]] error_code why_failed(seat_id seat) const noexcept {
    return forged_seats_.contains(seat) ? errc::frame_forged : errc::peer_failed;
  }

  /// @name Coming and going
  /// @{
  /// Allocates memory for a seat. Call it before the first `connect`.
  void reserve(seat_id seat) {
    lanes_.reserve(seat);
    control_.reserve(seat);
  }
  /// Seats a process with its two lanes, and notifies the handler. @pre `reserve`, and `is_free`
  /// @param seals  of the lanes' frames
  void connect(seat_id seat, descriptor data, descriptor told, descriptor process,
               const incarnation_id& incarnation, bool is_own, handler_call& call,
               const std::array<lane_seals, 2>& seals = {}) noexcept;
  /// The caller stops receiving from and sending to that seat.
  void give_up(seat_id seat) noexcept;
  /// Informs all peers that this process leaves, and closes everything.
  void leave() noexcept;
  /// @}

  /// @name Sending
  /// @{
  /// Sends a control message; drops one that is too long or for an empty seat.
  void post(seat_id to, const frame_header& header, std::span<const std::byte> bytes) noexcept {
    if (!is_up(to) || bytes.size() > max_post_bytes) {
      ++dropped_;
      return;
    }
    if (!control_.post(to, header, bytes)) poller_.clock().due_at_once();
  }
  /// See `peer_lanes`; a lane that breaks is evidence of death.
  /// @{
  [[nodiscard]] outgoing_frame begin_frame(seat_id to, const frame_header& header,
                                           std::span<const std::byte> bytes) const noexcept {
    return lanes_.begin_frame(to, header, bytes);
  }
  [[nodiscard]] ssize_t write(seat_id to, outgoing_frame& frame) noexcept {
    const ssize_t went = lanes_.write(to, frame);
    if (went < 0) detector_.note(to, death_evidence::reset);
    return went;
  }
  void keep_rest(seat_id to, const outgoing_frame& frame) noexcept { lanes_.keep_rest(to, frame); }
  void watch(seat_id seat) noexcept { lanes_.watch(seat); }
  /// @}
  /// Writes the rest of the previous frame; returns whether nothing of it is left.
  [[nodiscard]] bool flush(seat_id to) noexcept {
    const lane_flush how = lanes_.flush(to);
    if (how == lane_flush::broken) detector_.note(to, death_evidence::reset);
    return how == lane_flush::done;
  }
  [[nodiscard]] int data_socket(seat_id seat) const noexcept { return lanes_.data_socket(seat); }
  /// @}

  /// @name Receiving
  /// @{
  [[nodiscard]] bool has_held() const noexcept { return lanes_.has_held(); }
  /// Asks the handler again for space, for each lane that waits for it.
  void ask_held(handler_call& call) noexcept;
  void withdraw(seat_id from) noexcept {
    if (has(from)) lanes_.withdraw(from);
  }
  /// Whether data has come before, so that more may come soon.
  [[nodiscard]] bool has_last() const noexcept { return lanes_.last_from() != no_seat; }
  /// Reads from the last source of data; returns whether anything arrived.
  [[nodiscard]] bool read_last(handler_call& call) noexcept;
  [[nodiscard]] int hot_socket() const noexcept { return lanes_.hot_socket(); }
  /// Reads the hot lane, if there still is one.
  void read_hot(handler_call& call) noexcept {
    if (lanes_.hot() != no_seat) static_cast<void>(take_data(lanes_.hot(), call));
  }
  /// Handles an event of the seat's data lane, control lane or process. @pre it has the seat's generation
  void handle(const ready_event& event, handler_call& call) noexcept;
  /// @}

  /// Judges every seat.
  void run_timers(handler_call& call) noexcept;
  void add_to(socket_stats& all) const noexcept;

 private:
  [[nodiscard]] bool take_data(seat_id from, handler_call& call) noexcept;
  [[nodiscard]] bool take_told(seat_id from, handler_call& call) noexcept;
  void take_what_came(seat_id of, handler_call& call) noexcept;

  void lane_ended(seat_id of, socket_lane lane, handler_call& call) noexcept;
  void process_exited(seat_id of, handler_call& call) noexcept;
  void malformed(seat_id of, socket_lane lane, lane_event what, handler_call& call) noexcept;
  void read_notices(seat_id of, handler_call& call) noexcept;
  void judge_silence(seat_id of, handler_call& call) noexcept;

  void try_conclude(seat_id of, handler_call& call) noexcept;
  void conclude_certain(seat_id of, handler_call& call) noexcept;
  void suspect(seat_id of, handler_call& call) noexcept;
  void conclude_suspected(seat_id of, handler_call& call) noexcept;
  void stop_hearing(seat_id of) noexcept;
  void close(seat_id of) noexcept;

  socket_poller& poller_;
  core_question wants_core_;
  control_channel& control_;
  call_schedule& calls_;
  peer_lanes lanes_;
  failure_detector detector_;
  std::uint32_t seats_;
  seat_set forged_seats_{};  // of processes whose connection had a forged frame
  std::uint64_t malformed_ = 0;
  std::uint64_t forged_ = 0;
  std::uint64_t overflowed_ = 0;
  std::uint64_t dropped_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/socket_peers_body.hpp>
