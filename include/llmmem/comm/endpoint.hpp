/// @file
/// `endpoint`: ordered frames between the processes of a job, and word of those that have died. What a
/// `communicator` stands on.
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

/// A time on an endpoint's clock, in nanoseconds: nothing waits beyond it.
struct deadline {
  std::uint64_t ns = 0;

  friend constexpr bool operator==(const deadline&, const deadline&) noexcept = default;
};

/// The time that is never reached. For tests, and for what something else ends for certain.
inline constexpr deadline no_deadline{~std::uint64_t{0}};

/// What goes before a frame's bytes. An endpoint carries it, and sets and looks at `bytes` alone.
struct frame_header {
  std::uint64_t epoch = 0;    ///< in which it was sent
  std::uint64_t message = 0;  ///< bytes of the message that the frame is a part of
  std::uint64_t offset = 0;   ///< of the frame's bytes in the message
  std::uint32_t bytes = 0;    ///< of this frame
  std::uint32_t tag = 0;
  std::uint32_t crc = 0;  ///< CRC-32C of the frame's bytes, where `is_checked`
  std::uint16_t kind = 0;
  std::uint16_t is_checked = 0;

  friend constexpr bool operator==(const frame_header&, const frame_header&) noexcept = default;
};

/// The most bytes `tell` takes at once. A frame of data may have `frame_bytes()`.
inline constexpr std::uint32_t max_told_bytes = 4096;

namespace comm {

/// How sure a death is.
enum class death : std::uint8_t {
  certain,    ///< its process is gone: nothing of it will come any more
  suspected,  ///< silent beyond the limit, or its connection broke while it lives: it may come back, unheard
};

}  // namespace comm

using death [[deprecated("its name is comm::death")]] = comm::death;

/// Where the bytes of a frame are to go.
struct frame_buffer {
  /// What becomes of it.
  enum class answer : std::uint8_t {
    take,   ///< into `bytes`, of which there are as many as the frame has
    drop,   ///< nowhere: they are read and forgotten
    later,  ///< nowhere as yet: nothing more is read from that seat, and the next `poll` or `send` asks again
  };

  answer what = answer::drop;
  std::span<std::byte> bytes{};
};

using frame_room [[deprecated("its name is frame_buffer")]] = frame_buffer;

/// Who is told what comes. An endpoint calls it within `send` and `poll`, in the thread that called these.
///
/// - `buffer_for(from, header)`  where a frame of data is to go. Asked again, for the same frame, after
///                             `later`; when its sender dies, once more within the call that tells of it,
///                             before that: what is then still for `later` is dropped.
/// - `arrived(from, header)`   all of its bytes are in the buffer.
/// - `told(from, header, bytes)`  a frame of `tell`. The bytes live until this returns.
/// - `died(seat, how)`         nothing is heard from there any more, and what was under way is not finished:
///                             buffers given are free again. Told of a seat once, and once more when one that
///                             was suspected died for certain. One that is suspected is told so by the
///                             endpoint, or can still be told.
/// - `came(seat)`              a process that has not been heard before is connected there.
/// - `goes_on()`               whether `send` is to go on waiting. Asked after anything was told.
///
/// They may call `tell`, and nothing else of the endpoint.
template <class H>
concept frame_handler = requires(H& handler, const H& seen, seat_id from, const frame_header& header,
                                 std::span<const std::byte> bytes, comm::death how) {
  { handler.buffer_for(from, header) } noexcept -> std::same_as<frame_buffer>;
  { handler.arrived(from, header) } noexcept;
  { handler.told(from, header, bytes) } noexcept;
  { handler.died(from, how) } noexcept;
  { handler.came(from) } noexcept;
  { seen.goes_on() } noexcept -> std::same_as<bool>;
};

namespace detail {

/// For concepts.
struct any_frame_handler {
  frame_buffer buffer_for(seat_id, const frame_header&) noexcept { return {}; }
  void arrived(seat_id, const frame_header&) noexcept {}
  void told(seat_id, const frame_header&, std::span<const std::byte>) noexcept {}
  void died(seat_id, comm::death) noexcept {}
  void came(seat_id) noexcept {}
  [[nodiscard]] bool goes_on() const noexcept { return true; }
};
static_assert(frame_handler<any_frame_handler>);

/// An endpoint that knows why a seat is missing.
template <class E>
concept tells_absence = requires(const E& seen, seat_id seat) {
  { seen.why_missing(seat) } noexcept -> std::same_as<seat_absence>;
};

/// An endpoint that knows why a seat's process failed.
template <class E>
concept tells_failure = requires(const E& seen, seat_id seat) {
  { seen.why_failed(seat) } noexcept -> std::same_as<error_code>;
};

/// The header of a frame with as many bytes as it has.
[[nodiscard]] constexpr frame_header with_bytes(frame_header header,
                                                std::span<const std::byte> bytes) noexcept {
  header.bytes = static_cast<std::uint32_t>(bytes.size());
  return header;
}

}  // namespace detail

/// One process of a job, which exchanges frames with the others.
///
/// There are two lanes between any two seats. What is *sent* is data: it may wait for whoever does not take
/// it. What is *told* is small, never waits, and is heard though data are stuck. Within a lane, frames from
/// one seat to another come in the order in which they were sent, each once, whole, or, when one of both
/// dies, not at all; the lanes overtake each other.
///
/// - `self()`, `seats()`   its own seat, and how many there are: 2 to `max_seats`, or 1.
/// - `nonce()`             a number that no other process of this job has or had, and not 0.
/// - `now_ns()`            the clock that deadlines are of. Never goes back.
/// - `frame_bytes()`       the most bytes that a frame of data may have; at least `max_told_bytes`.
/// - `is_connected(seat)`  whether somebody is there who can be sent to, for all that is known: between
///                         `came` and `died`.
/// - `send(to, header, bytes, by, handler)`
///                         a frame of data. Returns once the bytes may be written again, which does not mean
///                         that they have come. Meanwhile it takes what comes, so that two who send to each
///                         other do not wait for ever. What ends it otherwise: `errc::peer_failed`, nobody is
///                         connected there; `errc::peer_timed_out`; `errc::cancelled`, the handler does not
///                         go on.
///                         A frame that was begun is then finished by itself, from a copy, with later calls:
///                         who receives never sees half of one. It sets `header.bytes` to `bytes.size()`; a
///                         frame of more than `frame_bytes()` is refused with `errc::out_of_range`. Nobody
///                         sits in a seat that there is not, nor, to itself, in its own.
/// - `tell(to, header, bytes)`  a frame of at most `max_told_bytes`: a longer one is dropped. Never waits. It
///                         sets `header.bytes`. What cannot go at once goes with later calls; who takes none
///                         of it for long is suspected. To nobody: dropped.
/// - `poll(by, handler)`   takes what comes until something has, or until then. Whether something has: no is
///                         the answer also when it was only woken, before its time.
/// - `withdraw(from)`      takes back a buffer that was given and not yet told as arrived: the rest of that
///                         frame is dropped.
/// - `give_up(seat)`       hears and sends no more there, until a fresh process comes. What was told before
///                         still goes, as far as it does without waiting. Whoever sits there must not take it
///                         for a death: it is told, or the connection stays.
/// - `wake()`              ends a `poll` of this endpoint, this or the next, by any thread.
/// - `why_missing(seat)`   may be left out: the `seat_absence` of one where nobody is connected, as far as it
///                         knows. What `communicator::join` says of it.
/// - `why_failed(seat)`    may be left out: the error of what concerns a process that has died or is
/// suspected,
///                         where `errc::peer_failed` does not say enough.
///
/// @par Thread safety   one thread at a time, but `wake`.
/// @par Errors          without memory `send` and `poll` throw `std::bad_alloc`.
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
      { end.tell(seat, header, bytes) } noexcept;
      { end.poll(by, handler) } -> std::same_as<bool>;
      { end.withdraw(seat) } noexcept;
      { end.give_up(seat) } noexcept;
      { end.wake() } noexcept;
    };

}  // namespace v0
}  // namespace llmmem
