/// @file
/// `socket_joining`: which seats a socket endpoint calls, how it answers callers, and which process takes a
/// seat.
#pragma once

#include <llmmem/comm/detail/call_schedule.hpp>
#include <llmmem/comm/detail/half_open_set.hpp>
#include <llmmem/comm/detail/seat_candidate.hpp>
#include <llmmem/comm/detail/socket_lanes.hpp>
#include <llmmem/comm/detail/socket_peers.hpp>
#include <llmmem/comm/detail/socket_poller.hpp>
#include <llmmem/comm/detail/socket_wire.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/socket_options.hpp>
#include <llmmem/config.hpp>

#include <sys/epoll.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Brings a process into each seat without a connection. Of two seats the higher one calls, twice: once for
/// each lane. A starting process knocks at the higher seats, so that they call it soon. A caller takes its
/// seat with its first control message, because only then do both sides know that both lanes exist.
///
/// It remembers what it learned of a seat that stays empty.
///
/// @invariant  A seat has two calls in progress or none; a candidate for a seat stays at most `handshake_ns`
/// before it is complete.
/// @par Thread safety   one thread at a time.
/// @par Errors          the constructor throws `system_error`. `advance`, `look_at_candidate` and `run_calls`
///   throw `std::bad_alloc` when there is no memory for a process that takes a seat; it is retried.
class socket_joining {
 public:
  /// @param mine  this process's hello
  socket_joining(socket_poller& poller, call_schedule& calls, socket_peers& peers,
                 const socket_options& options, const wire_hello& mine, std::vector<socket_address> addresses)
      : poller_(poller),
        calls_(calls),
        peers_(peers),
        halves_(poller, options, mine, std::move(addresses)),
        mine_(mine),
        handshake_ns_(options.handshake_ns),
        seats_(options.seats) {
    for (std::uint32_t i = to_index(mine_.from) + 1; i < options.seats; ++i)
      seats_[i].must_knock = true;
  }
  socket_joining(const socket_joining&) = delete;
  socket_joining& operator=(const socket_joining&) = delete;

  /// @name Events
  /// @{
  void accept() noexcept { note(halves_.accept_some()); }
  /// Continues a half-open connection.
  void advance(const ready_event& event, handler_call& call);
  /// Handles a candidate that has sent something, or has ended.
  void look_at_candidate(seat_id seat, handler_call& call);
  /// @}

  /// @name Timers
  /// @{
  /// Resumes listening if it had stopped, and ends handshakes that take too long.
  void expire() noexcept;
  /// Makes the calls and knocks that are due, and seats waiting candidates.
  void run_calls(handler_call& call);
  /// @}

  /// Why no process is connected there, as far as known.
  [[nodiscard]] seat_absence why_missing(seat_id seat) const noexcept;
  /// Removes the file of this endpoint's Unix socket.
  void remove_file() const noexcept { halves_.remove_file(); }
  void add_to(socket_stats& all) const noexcept;

 private:
  static constexpr std::uint32_t no_slot = half_open_set::no_slot;

  struct seat_record {
    std::array<std::uint32_t, 2> calls{no_slot, no_slot};  // in progress, one for each lane
    seat_candidate next;
    bool must_knock = false;
    seat_absence absence = seat_absence::no_contact;
  };

  [[nodiscard]] seat_record& at(seat_id seat) noexcept { return seats_[to_index(seat)]; }
  void note(const std::optional<learned_absence>& learned) noexcept;
  [[nodiscard]] std::uint32_t begin_call(seat_id seat, hello_purpose purpose) noexcept;
  void call(seat_id seat) noexcept;
  void call_failed(seat_id seat) noexcept;
  void half_failed(std::uint32_t slot) noexcept;

  void judge(std::uint32_t slot) noexcept;
  [[nodiscard]] hello_answer answer_to(const wire_hello& caller) noexcept;
  void settled(std::uint32_t slot, handler_call& call);
  void take_lane(seat_id seat, std::uint32_t slot) noexcept;
  [[nodiscard]] descriptor process_of(const wire_hello& theirs, std::uint32_t slot) const noexcept;
  [[nodiscard]] bool is_on_this_machine(const wire_hello& theirs) const noexcept {
    return theirs.boot == mine_.boot && theirs.boot != incarnation_id{} &&
           theirs.pid_space == mine_.pid_space && theirs.pid_space != 0;
  }
  void drop_candidate(seat_id seat) noexcept;
  void promote(seat_id seat, handler_call& call);

  socket_poller& poller_;
  call_schedule& calls_;
  socket_peers& peers_;
  half_open_set halves_;
  wire_hello mine_;
  std::uint64_t handshake_ns_;
  std::vector<seat_record> seats_;
  seat_absence by_nobody_ = seat_absence::no_contact;  // from callers that did not announce their seat
  std::uint64_t busy_ = 0;
  std::uint64_t unwanted_ = 0;
  std::uint64_t mismatched_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/socket_joining_body.hpp>
