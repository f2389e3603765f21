/// @file
/// `endpoint`: ordered frames between the processes of a job, and reports of deaths. The basis of a
/// `communicator`.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// A time on an endpoint's clock, in nanoseconds: the limit of a wait.
struct deadline {
  std::uint64_t ns = 0;

  friend constexpr bool operator==(const deadline&, const deadline&) noexcept = default;
};

/// The time that is never reached. For tests, and for waits that another event is certain to end.
inline constexpr deadline no_deadline{~std::uint64_t{0}};

/// The header of a frame. An endpoint carries it, and sets and reads only `bytes`.
struct frame_header {
  std::uint64_t epoch = 0;    ///< the sender's epoch
  std::uint64_t message = 0;  ///< bytes of the whole message
  std::uint64_t offset = 0;   ///< where the frame's bytes begin in the message
  std::uint32_t bytes = 0;    ///< bytes in this frame
  std::uint32_t tag = 0;
  std::uint32_t crc = 0;  ///< CRC-32C of the frame's bytes, if `is_checked`
  std::uint16_t kind = 0;
  std::uint16_t is_checked = 0;

  friend constexpr bool operator==(const frame_header&, const frame_header&) noexcept = default;
};

/// The maximum number of bytes in one `post`. A frame of data may have `frame_bytes()`.
inline constexpr std::uint32_t max_post_bytes = 4096;
[[deprecated("its name is max_post_bytes")]] inline constexpr std::uint32_t max_told_bytes = max_post_bytes;

namespace comm {

/// How certain a death is.
enum class death : std::uint8_t {
  certain,    ///< its process has ended: nothing more will arrive from it
  suspected,  ///< silent beyond the limit, or its connection broke while it lives: it may return, but is
              ///< ignored
};

}  // namespace comm

using death [[deprecated("its name is comm::death")]] = comm::death;

/// Where the bytes of a frame go.
struct frame_buffer {
  /// What happens to the frame.
  enum class answer : std::uint8_t {
    take,       ///< into `bytes`, which has exactly the frame's length
    drop,       ///< nowhere: they are read and discarded
    ask_again,  ///< not yet: nothing more is read from that seat, and the next `poll` or `send` asks again
    later [[deprecated("its name is ask_again")]] = ask_again
  };

  answer what = answer::drop;
  std::span<std::byte> bytes{};
};

using frame_room [[deprecated("its name is frame_buffer")]] = frame_buffer;

/// The receiver of incoming frames. An endpoint calls it within `send` and `poll`, in the thread that called
/// these.
///
/// - `buffer_for(from, header)`  returns where a frame of data goes. Asked again for the same frame after
///   `ask_again`. When the sender dies, the endpoint asks one last time, before `on_death` in the same call;
///   frames that still get `ask_again` are then dropped.
/// - `on_frame(from, header)`    all of its bytes are in the buffer.
/// - `on_message(from, header, bytes)`  a frame of `post`. The bytes are valid until this returns.
/// - `on_death(seat, how)`       nothing more is received from there, and unfinished frames stay unfinished:
///   their buffers are free again. Called once per seat, and once again when a suspected process died for
///   certain. The endpoint informs a suspected process, or can still deliver a message to it.
/// - `on_joined(seat)`           a process that was not connected before is connected there.
/// - `keeps_waiting()`           whether `send` continues to wait. Asked after each report.
///
/// These functions may call `post`, and no other function of the endpoint.
template <class H>
concept frame_handler = requires(H& handler, const H& seen, seat_id from, const frame_header& header,
                                 std::span<const std::byte> bytes, comm::death how) {
  { handler.buffer_for(from, header) } noexcept -> std::same_as<frame_buffer>;
  { handler.on_frame(from, header) } noexcept;
  { handler.on_message(from, header, bytes) } noexcept;
  { handler.on_death(from, how) } noexcept;
  { handler.on_joined(from) } noexcept;
  { seen.keeps_waiting() } noexcept -> std::same_as<bool>;
};

namespace detail {

/// For concepts.
struct any_frame_handler {
  frame_buffer buffer_for(seat_id, const frame_header&) noexcept { return {}; }
  void on_frame(seat_id, const frame_header&) noexcept {}
  void on_message(seat_id, const frame_header&, std::span<const std::byte>) noexcept {}
  void on_death(seat_id, comm::death) noexcept {}
  void on_joined(seat_id) noexcept {}
  [[nodiscard]] bool keeps_waiting() const noexcept { return true; }
};
static_assert(frame_handler<any_frame_handler>);

/// An endpoint that can say why a seat is missing.
template <class E>
concept reports_absence = requires(const E& seen, seat_id seat) {
  { seen.why_missing(seat) } noexcept -> std::same_as<seat_absence>;
};

/// An endpoint that can say whether a seat takes messages faster than they are sent.
template <class E>
concept reports_post_capacity = requires(const E& seen, seat_id seat) {
  { seen.has_post_capacity(seat) } noexcept -> std::same_as<bool>;
};

/// An endpoint that can say why a seat's process failed.
template <class E>
concept reports_failure = requires(const E& seen, seat_id seat) {
  { seen.why_failed(seat) } noexcept -> std::same_as<error_code>;
};

/// Returns the header with the number of bytes set.
[[nodiscard]] constexpr frame_header with_bytes(frame_header header,
                                                std::span<const std::byte> bytes) noexcept {
  header.bytes = static_cast<std::uint32_t>(bytes.size());
  return header;
}

}  // namespace detail

/// One process of a job, which exchanges frames with the others.
///
/// There are two lanes between any two seats. *Sent* frames are data: they may wait for a receiver that does
/// not take them. *Posted* frames are small control messages: they never wait, and arrive even while data is
/// stuck. Within a lane, frames from one seat to another arrive in the order in which they were sent, each
/// once and complete or, if either process dies, not at all. A frame may overtake frames of the other lane.
///
/// - `self()`, `seats()`   its own seat, and the number of seats: 2 to `max_seats`, or 1.
/// - `nonce()`             a number, not 0, that no other process of this job has or had.
/// - `now_ns()`            the clock of deadlines. Never goes back.
/// - `frame_bytes()`       the most bytes in a frame of data; at least `max_post_bytes`.
/// - `is_connected(seat)`  whether the seat has a process that frames can be sent to, as far as is known:
///   between `on_joined` and `on_death`.
/// - `send(to, header, bytes, by, handler)`  sends a frame of data. Returns once the bytes may be
///   overwritten, which does not mean that they have arrived. It receives during the wait, so that two
///   processes that send to each other do not deadlock. Other outcomes: `errc::peer_failed` if no process is
///   connected there, `errc::peer_timed_out`, and `errc::cancelled` if the handler cancels it. A frame that
///   was begun is then completed from a copy, during later calls: the receiver never sees half of one. It
///   sets `header.bytes` to `bytes.size()`; a frame of more than `frame_bytes()` is refused with
///   `errc::out_of_range`. A seat that does not exist counts as empty, and so does the process's own.
/// - `post(to, header, bytes)`  sends a frame of at most `max_post_bytes`: a longer one is dropped. Never
///   waits. It sets `header.bytes`. Frames that cannot go at once go with later calls; a receiver that takes
///   none of them for long is suspected. A frame to an empty seat is dropped.
/// - `poll(by, handler)`   receives until something has arrived, or until that time. Returns whether
///   something has; false also when it was only woken before its time.
/// - `withdraw(from)`      takes back a buffer that was given and not yet reported as arrived: the rest of
///   that frame is dropped.
/// - `give_up(seat)`       stops receiving from and sending to that seat until a fresh process comes. Earlier
///   posted frames still go, as far as possible without waiting. The process there must not take this for a
///   death, so the endpoint informs it, or keeps the connection.
/// - `wake()`              ends a `poll` of this endpoint, this or the next, from any thread.
/// - `has_post_capacity(seat)`  optional: whether less than half of the bytes that `post` keeps for that seat
///   are in use. A sender of many messages keeps the next ones until it is true, because a process for which
///   too many bytes wait is suspected. Without it, a user of the endpoint sends at once.
/// - `why_missing(seat)`   optional: the `seat_absence` of a seat without a connection, as far as known;
///   reported by `communicator::join`.
/// - `why_failed(seat)`    optional: the error for operations with a dead or suspected process, if
///   `errc::peer_failed` does not say enough.
///
/// @par Thread safety   one thread at a time, except `wake`.
/// @par Errors          without memory, `send` and `poll` throw `std::bad_alloc`.
template <class E>
concept endpoint =
    requires(E& end, const E& seen, seat_id seat, const frame_header& header,
             std::span<const std::byte> bytes, deadline by, detail::any_frame_handler& handler) {
      { seen.self() } noexcept -> std::same_as<seat_id>;
      { seen.seats() } noexcept -> std::same_as<std::uint32_t>;
      { seen.nonce() } noexcept -> std::same_as<std::uint64_t>;
      { seen.now_ns() } noexcept -> std::same_as<std::uint64_t>;
      { seen.frame_bytes() } noexcept -> std::same_as<std::uint32_t>;
      { seen.is_connected(seat) } noexcept -> std::same_as<bool>;
      { end.send(seat, header, bytes, by, handler) } -> std::same_as<result<void>>;
      { end.post(seat, header, bytes) } noexcept;
      { end.poll(by, handler) } -> std::same_as<bool>;
      { end.withdraw(seat) } noexcept;
      { end.give_up(seat) } noexcept;
      { end.wake() } noexcept;
    };

}  // namespace v0
}  // namespace llmmem
