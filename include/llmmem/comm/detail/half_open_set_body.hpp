/// @file
/// `half_open_set`: making connections and shaking hands.
#pragma once

#include <llmmem/comm/detail/half_open_set.hpp>

#include <netinet/in.h>
#include <netinet/tcp.h>

namespace llmmem {
inline namespace v0 {
namespace detail {

inline half_open_set::half_open_set(socket_poller& poller, const socket_options& options,
                                    const wire_hello& mine, std::vector<socket_address> addresses)
    : poller_(poller),
      secret_(std::as_bytes(std::span(options.secret.data(), options.secret.size()))),
      mine_(mine),
      addresses_(std::move(addresses)),
      wrapper_(options.wrapper),
      socket_bytes_(options.socket_bytes),
      most_called_(options.max_half_open == 0 ? 2 * options.seats + 16 : options.max_half_open),
      handshake_ns_(options.handshake_ns),
      halves_(most_called_ + 2 * options.seats + most_knocks) {
  const socket_address& here = addresses_[to_index(mine_.from)];
  listener_ = listen_at(here, socket_bytes_, static_cast<int>(most_called_), handshake_ns_);
  struct ::stat seen{};
  if (here.is_unix() && ::stat(here.text.c_str(), &seen) == 0) socket_file_ = seen.st_ino;
  if (!poller_.add(listener_.get(), EPOLLIN, event_key(socket_event::listener, 0, 0)))
    throw system_error("socket_endpoint: epoll_ctl" + because(errno));
}

inline void half_open_set::remove_file() const noexcept {
  struct ::stat seen{};
  if (socket_file_ == 0) return;
  const char* const path = addresses_[to_index(mine_.from)].text.c_str();
  if (::lstat(path, &seen) == 0 && seen.st_ino == socket_file_) ::unlink(path);
}

inline std::optional<learned_absence> half_open_set::accept_some() noexcept {
  std::optional<learned_absence> learned;
  for (int i = 0; i < 16; ++i) {
    descriptor made(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!made.is_open()) {
      if (would_block(errno)) break;
      if (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS) continue;
      // Callers that cannot be accepted keep the listener ready: epoll would report it continuously.
      poller_.remove(listener_.get());
      accept_at_ = poller_.clock().now() + timer_ns;
      poller_.clock().due(accept_at_);
      break;
    }
    ++times_called_;
    if (is_unix(mine_.from) && credentials_of(made.get()).uid != ::geteuid()) {
      ++strangers_;
      learned = learned_absence{no_seat, seat_absence::foreign};
      continue;
    }
    if (called_ >= most_called_) {
      ++crowded_out_;
      learned = learned_absence{no_seat, seat_absence::crowded};
      close(oldest_caller());
    }
    listen_to(std::move(made));
  }
  return learned;
}

/// Returns the earliest caller. A caller that knows the secret needs two messages, so it finishes before that
/// many others come; a hello alone proves nothing. @pre there is a caller
inline std::uint32_t half_open_set::oldest_caller() const noexcept {
  std::uint32_t oldest = no_slot;
  for (std::uint32_t slot = 0; slot < halves_.size(); ++slot) {
    if (halves_[slot].as == role::called &&
        (oldest == no_slot || halves_[slot].until < halves_[oldest].until))
      oldest = slot;
  }
  return oldest;
}

inline void half_open_set::resume_accepting() noexcept {
  if (accept_at_ == 0 || poller_.clock().now() < accept_at_) return;
  poller_.add(listener_.get(), EPOLLIN, event_key(socket_event::listener, 0, 0));
  accept_at_ = 0;
}

/// Waits for a caller's hello.
inline void half_open_set::listen_to(descriptor made) noexcept {
  const int one = 1;
  if (!is_unix(mine_.from)) ::setsockopt(made.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  made = wrapped(std::move(made), false);
  wire_hello hello = mine_;
  if (!made.is_open() || !fill_random(hello.nonce)) return;
  const std::uint32_t slot = open(role::called, std::move(made));
  halves_[slot].is_connecting = false;
  halves_[slot].shaking.listen(hello);
  ++called_;
  if (!watch(slot, EPOLLIN)) close(slot);
}

/// Returns the connection as this endpoint uses it.
inline descriptor half_open_set::wrapped(descriptor made, bool has_called) noexcept {
  if (wrapper_ == nullptr) return made;
  return descriptor(wrapper_->wrap(made.get(), has_called));
}

inline half_open_set::begun_call half_open_set::call(seat_id seat, hello_purpose purpose) noexcept {
  const socket_address& address = addresses_[to_index(seat)];
  descriptor made = make_socket(address, socket_bytes_);
  wire_hello hello = mine_;
  hello.purpose = purpose;
  hello.to = seat;
  if (!made.is_open() || !fill_random(hello.nonce)) return {};
  const bool is_there = ::connect(made.get(), address.get(), address.size) == 0;
  if (!is_there && errno != EINPROGRESS) return {no_slot, not_reached(seat, purpose, errno)};
  const std::uint32_t slot = open(role::calls, std::move(made));
  half_open& half = halves_[slot];
  half.seat = seat;
  half.purpose = purpose;
  half.is_connecting = true;
  half.shaking.call(hello);
  if (purpose == hello_purpose::knock) ++knocks_;
  if (watch(slot, EPOLLOUT)) return {slot, {}};
  close(slot);
  return {};
}

/// A free slot always exists: callers, two calls per seat, and knocks are bounded in number.
inline std::uint32_t half_open_set::open(role as, descriptor socket) noexcept {
  std::uint32_t slot = 0;
  while (halves_[slot].as != role::none)
    ++slot;
  half_open& half = halves_[slot];
  half.as = as;
  half.socket = std::move(socket);
  half.until = poller_.clock().now() + handshake_ns_;
  poller_.clock().due(half.until);
  ++open_;
  return slot;
}

inline descriptor half_open_set::take(std::uint32_t slot) noexcept {
  half_open& half = halves_[slot];
  if (half.as == role::called) --called_;
  if (half.as == role::calls && half.purpose == hello_purpose::knock) --knocks_;
  --open_;
  half.as = role::none;
  ++half.generation;
  poller_.remove(half.socket.get());
  return std::move(half.socket);
}

inline bool half_open_set::watch(std::uint32_t slot, std::uint32_t events) noexcept {
  const std::uint64_t key = event_key(socket_event::half_open, halves_[slot].generation, slot);
  const int socket = halves_[slot].socket.get();
  return poller_.add(socket, events, key) || poller_.change(socket, events, key);
}

/// A message is shorter than any socket's buffer, and the buffer is empty, so an incomplete send means that
/// the connection is broken.
inline bool half_open_set::say(std::uint32_t slot) noexcept {
  const std::span<const std::byte> said = halves_[slot].shaking.says();
  return write_some(halves_[slot].socket.get(), said, {}) == static_cast<ssize_t>(said.size());
}

inline half_open_set::progress half_open_set::advance(std::uint32_t slot) noexcept {
  half_open& half = halves_[slot];
  if (half.is_connecting) return connected(slot);
  for (;;) {
    const std::span<std::byte> into = half.shaking.wanted();
    const ssize_t got = ::recv(half.socket.get(), into.data(), into.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && would_block(errno)) return {};
    if (got <= 0) return {step::failed, learn(slot)};
    switch (half.shaking.took(static_cast<std::size_t>(got), secret_)) {
      case socket_handshake::turn::wait:
        break;
      case socket_handshake::turn::say:
        if (!say(slot)) return {step::failed, {}};
        break;
      case socket_handshake::turn::judge:
        return {step::judge, {}};
      case socket_handshake::turn::settled:
        return {step::settled, {}};
      case socket_handshake::turn::refused:
        return refused(slot);
    }
  }
}

/// A call has reached its address, or failed to.
inline half_open_set::progress half_open_set::connected(std::uint32_t slot) noexcept {
  half_open& half = halves_[slot];
  int failed = 0;
  socklen_t size = sizeof(failed);
  ::getsockopt(half.socket.get(), SOL_SOCKET, SO_ERROR, &failed, &size);
  half.is_connecting = false;
  const bool is_other_user = is_unix(half.seat) && credentials_of(half.socket.get()).uid != ::geteuid();
  if (is_other_user) ++strangers_;
  if (failed == 0 && wrapper_ != nullptr) {
    poller_.remove(half.socket.get());
    half.socket = wrapped(std::move(half.socket), true);
    if (!half.socket.is_open()) return {step::failed, {}};
  }
  if (failed == 0 && !is_other_user && watch(slot, EPOLLIN) && say(slot)) return {};
  return {step::failed, failed != 0 ? not_reached(half.seat, half.purpose, failed) : learn(slot)};
}

/// The other end is a foreign process.
inline half_open_set::progress half_open_set::refused(std::uint32_t slot) noexcept {
  ++strangers_;
  const std::optional<learned_absence> learned = learn(slot);
  if (halves_[slot].shaking.has_farewell()) static_cast<void>(say(slot));
  return {step::failed, learned};
}

inline std::uint32_t half_open_set::next_expired(std::uint32_t from) noexcept {
  for (std::uint32_t slot = from; slot < halves_.size() && open_ != 0; ++slot) {
    if (halves_[slot].as == role::none) continue;
    if (poller_.clock().now() >= halves_[slot].until) {
      ++too_slow_;
      return slot;
    }
    poller_.clock().due(halves_[slot].until);
  }
  return no_slot;
}

/// A knock is made once: it reveals nothing about later occupants.
inline std::optional<learned_absence> half_open_set::not_reached(seat_id seat, hello_purpose purpose,
                                                                 int why) noexcept {
  if (purpose == hello_purpose::knock) return std::nullopt;
  const bool is_nobody = why == ECONNREFUSED || why == ENOENT;
  return learned_absence{seat, is_nobody ? seat_absence::no_listener : seat_absence::unreachable};
}

inline std::optional<learned_absence> half_open_set::learn(std::uint32_t slot) noexcept {
  const half_open& half = halves_[slot];
  const bool is_call = half.as == role::calls;
  const socket_handshake::refusal why = half.shaking.why();
  if (why == socket_handshake::refusal::other_version) ++other_version_;
  if (is_call && half.purpose == hello_purpose::knock) return std::nullopt;
  // A caller whose hello cannot be read may be in any seat.
  const bool says_seat = is_call || why == socket_handshake::refusal::other_seat ||
                         why == socket_handshake::refusal::wrong_proof;
  const seat_id seat = is_call ? half.seat : says_seat ? half.shaking.theirs().from : no_seat;
  switch (why) {
    case socket_handshake::refusal::none:
      if (half.shaking.has_seen_tls()) return learned_absence{seat, seat_absence::other_wrapper};
      if (wrapper_ != nullptr && !half.is_connecting && !half.shaking.has_heard()) {
        const seat_absence ended = wrapper_->why_ended(half.socket.get());
        if (ended != seat_absence::no_contact) return learned_absence{seat, ended};
      }
      if (!is_call) return std::nullopt;
      return learned_absence{seat, half.is_connecting                    ? seat_absence::unreachable
                                   : half.shaking.has_proved()           ? seat_absence::other_secret
                                   : poller_.clock().now() >= half.until ? seat_absence::no_answer
                                                                         : seat_absence::foreign};
    case socket_handshake::refusal::no_hello:
      return learned_absence{
          seat, half.shaking.has_seen_tls() ? seat_absence::other_wrapper : seat_absence::foreign};
    case socket_handshake::refusal::other_version:
      return learned_absence{seat, seat_absence::other_version};
    case socket_handshake::refusal::other_seat:
      return learned_absence{seat, seat_absence::other_seat};
    case socket_handshake::refusal::wrong_proof:
      return learned_absence{seat, seat_absence::other_secret};
  }
  return std::nullopt;
}

inline void half_open_set::add_to(socket_stats& all) const noexcept {
  all.accepted += times_called_;
  all.unauthenticated += strangers_;
  all.other_version += other_version_;
  all.crowded_out += crowded_out_;
  all.too_slow += too_slow_;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
