/// @file
/// `half_open_set`: the connections of a socket endpoint whose two ends have not yet identified each other.
#pragma once

#include <llmmem/comm/detail/socket_descriptor.hpp>
#include <llmmem/comm/detail/socket_handshake.hpp>
#include <llmmem/comm/detail/socket_poller.hpp>
#include <llmmem/comm/detail/socket_system.hpp>
#include <llmmem/comm/detail/socket_wire.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/socket_options.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/hmac_sha256.hpp>

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// What the end of a handshake reveals about a seat without a connection.
struct learned_absence {
  seat_id seat = no_seat;  ///< or `no_seat`, if the caller did not announce its seat
  seat_absence why = seat_absence::no_contact;

  friend constexpr bool operator==(const learned_absence&, const learned_absence&) noexcept = default;
};

/// Listens, calls, and shakes hands: until both ends of a connection have proved that they know the secret,
/// it is kept here, and its data reaches nothing else. The caller decides which seats to call and what to
/// answer.
///
/// A connection is named by its slot, from `call` or an event of the poller, until `close` or `take`.
///
/// @invariant  At most `max_half_open` incoming connections are open at once; no connection stays longer
/// than `handshake_ns`, if the caller closes those that `next_expired` names.
/// @par Complexity      O(slots) to find a free slot; a handshake costs four messages and two HMACs.
/// @par Thread safety   one thread at a time.
/// @par Errors          the constructor throws `system_error`.
class half_open_set {
 public:
  static constexpr std::uint32_t no_slot = ~std::uint32_t{0};
  /// The most knocks in progress at once.
  static constexpr std::uint32_t most_knocks = 16;

  /// Listens at the address of `mine.from`.
  /// @param addresses  one for each seat
  half_open_set(socket_poller& poller, const socket_options& options, const wire_hello& mine,
                std::vector<socket_address> addresses);
  half_open_set(const half_open_set&) = delete;
  half_open_set& operator=(const half_open_set&) = delete;

  /// Whether the address of that seat is a Unix socket's.
  [[nodiscard]] bool is_unix(seat_id seat) const noexcept { return addresses_[to_index(seat)].is_unix(); }
  /// Removes the file of this endpoint's Unix socket, if it still belongs to it.
  void remove_file() const noexcept;

  /// @name Making connections
  /// @{
  /// Accepts callers. Closes those of another user, and callers beyond `max_half_open`.
  /// @return  what a foreign process among them reveals about seats without a connection
  std::optional<learned_absence> accept_some() noexcept;
  /// Listens again, some time after descriptors ran out.
  void resume_accepting() noexcept;

  struct begun_call {
    std::uint32_t slot = no_slot;  ///< `no_slot`: it failed at once
    std::optional<learned_absence> learned{};
  };
  /// Begins to call a seat.
  [[nodiscard]] begun_call call(seat_id seat, hello_purpose purpose) noexcept;
  [[nodiscard]] std::uint32_t knocks() const noexcept { return knocks_; }
  /// @}

  /// @name Handshakes
  /// @{
  enum class step : std::uint8_t {
    waits,
    failed,   ///< `close` it
    judge,    ///< a caller knows the secret: `answer` it
    settled,  ///< the listener knows the secret, and has answered: `answered`
  };
  struct progress {
    step to = step::waits;
    std::optional<learned_absence> learned{};  ///< when it failed
  };
  /// Whether the slot has the connection of the event.
  [[nodiscard]] bool is_of(const ready_event& event) const noexcept {
    const half_open& half = halves_[event.index];
    return half.as != role::none && event.is_of(half.generation);
  }
  /// Continues a handshake as far as possible without waiting.
  [[nodiscard]] progress advance(std::uint32_t slot) noexcept;
  /// Answers a caller that has proved itself; returns whether the answer was sent.
  [[nodiscard]] bool answer(std::uint32_t slot, hello_answer what) noexcept {
    halves_[slot].shaking.answer(what, secret_);
    return say(slot);
  }
  /// Returns the first slot from `from` on whose time has expired, or `no_slot`. The clock's timer is set for
  /// the others.
  [[nodiscard]] std::uint32_t next_expired(std::uint32_t from) noexcept;
  /// Returns what a failed handshake reveals about a seat, now.
  [[nodiscard]] std::optional<learned_absence> learn(std::uint32_t slot) noexcept;
  /// @}

  /// @name A connection
  /// @{
  /// The other end's hello. @pre `judge` or `settled`
  [[nodiscard]] const wire_hello& theirs(std::uint32_t slot) const noexcept {
    return halves_[slot].shaking.theirs();
  }
  /// Returns how the connection's frames are sealed. @pre `judge` or `settled`
  [[nodiscard]] lane_seals seals(std::uint32_t slot) const noexcept {
    return halves_[slot].shaking.seals(secret_);
  }
  [[nodiscard]] hello_answer answered(std::uint32_t slot) const noexcept {
    return halves_[slot].shaking.answered();
  }
  /// Whether this endpoint made it as a lane.
  [[nodiscard]] bool is_lane_call(std::uint32_t slot) const noexcept {
    return halves_[slot].as == role::calls && halves_[slot].purpose != hello_purpose::knock;
  }
  /// Returns the seat that this endpoint called. @pre this endpoint made the connection
  [[nodiscard]] seat_id called_seat(std::uint32_t slot) const noexcept { return halves_[slot].seat; }
  [[nodiscard]] hello_purpose purpose(std::uint32_t slot) const noexcept { return halves_[slot].purpose; }
  void close(std::uint32_t slot) noexcept { take(slot).close(); }
  /// Removes the socket from this set and returns it.
  [[nodiscard]] descriptor take(std::uint32_t slot) noexcept;
  [[nodiscard]] int socket(std::uint32_t slot) const noexcept { return halves_[slot].socket.get(); }
  /// @}

  void add_to(socket_stats& all) const noexcept;

 private:
  enum class role : std::uint8_t { none, called, calls };

  struct half_open {
    role as = role::none;
    bool is_connecting = false;
    std::uint32_t generation = 0;
    seat_id seat{};  // the called seat
    hello_purpose purpose = hello_purpose::data;
    std::uint64_t until = 0;
    descriptor socket;
    socket_handshake shaking;
  };

  void listen_to(descriptor made) noexcept;
  [[nodiscard]] descriptor wrapped(descriptor made, bool has_called) noexcept;
  [[nodiscard]] std::uint32_t oldest_caller() const noexcept;
  [[nodiscard]] std::uint32_t open(role as, descriptor socket) noexcept;
  [[nodiscard]] bool watch(std::uint32_t slot, std::uint32_t events) noexcept;
  [[nodiscard]] bool say(std::uint32_t slot) noexcept;
  [[nodiscard]] progress connected(std::uint32_t slot) noexcept;
  [[nodiscard]] progress refused(std::uint32_t slot) noexcept;
  [[nodiscard]] static std::optional<learned_absence> not_reached(seat_id seat, hello_purpose purpose,
                                                                  int why) noexcept;

  socket_poller& poller_;
  hmac_sha256 secret_;
  wire_hello mine_;
  std::vector<socket_address> addresses_;
  socket_wrapper* wrapper_;
  std::uint32_t socket_bytes_;
  std::uint32_t most_called_;
  std::uint64_t handshake_ns_;
  descriptor listener_;
  ino_t socket_file_ = 0;
  std::uint64_t accept_at_ = 0;  // after descriptors ran out
  std::vector<half_open> halves_;
  std::uint32_t open_ = 0;
  std::uint32_t called_ = 0;  // number of open connections that others made
  std::uint32_t knocks_ = 0;  // number of open ones
  std::uint64_t times_called_ = 0;
  std::uint64_t strangers_ = 0;
  std::uint64_t other_version_ = 0;
  std::uint64_t crowded_out_ = 0;
  std::uint64_t too_slow_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/half_open_set_body.hpp>
