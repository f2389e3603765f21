/// @file
/// `socket_endpoint`: setting up, and the end.
#pragma once

#include <llmmem/comm/socket_endpoint.hpp>

#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace llmmem {
inline namespace v0 {

inline socket_endpoint::socket_endpoint(socket_options options)
    : options_(std::move(options)),
      secret_(std::as_bytes(std::span(options_.secret.data(), options_.secret.size()))) {
  check_options();
  set_up();
}

inline void socket_endpoint::check_options() {
  const auto n = [](std::uint64_t value) { return std::to_string(value); };
  const std::string who = "socket_endpoint: ";
  const socket_options& o = options_;
  if (o.seats == 0 || o.seats > max_seats)
    throw argument_error(who + n(o.seats) + " seats; a job has 1 to " + n(max_seats));
  if (to_index(o.seat) >= o.seats) {
    throw argument_error(who + "seat " + n(to_index(o.seat)) + " of " + n(o.seats) +
                         "; seats are counted from 0");
  }
  if (o.frame_bytes < max_told_bytes || o.frame_bytes > (1U << 30)) {
    throw argument_error(who + "frame_bytes is " + n(o.frame_bytes) + "; allowed are " + n(max_told_bytes) +
                         " to " + n(1U << 30));
  }
  if (o.told_bytes < 2 * max_told_bytes || o.told_bytes > (1U << 30)) {
    throw argument_error(who + "told_bytes is " + n(o.told_bytes) + "; allowed are " +
                         n(std::uint64_t{2} * max_told_bytes) + " to " + n(1U << 30));
  }
  if (o.socket_bytes > (1U << 30))
    throw argument_error(who + "socket_bytes is " + n(o.socket_bytes) + "; allowed are 0 to " + n(1U << 30));
  if (o.beat_ns != 0 && o.hard_silence_ns != 0 && o.hard_silence_ns < 3 * o.beat_ns) {
    throw argument_error(who + "hard_silence_ns is " + n(o.hard_silence_ns) +
                         "; it must be three times beat_ns at least, " + n(3 * o.beat_ns));
  }
  if (o.handshake_ns == 0 || o.first_call_ns == 0 || o.last_call_ns < o.first_call_ns) {
    throw argument_error(who +
                         "handshake_ns and first_call_ns must be more than 0, last_call_ns not less than "
                         "first_call_ns");
  }
  if (o.seats == 1) return;
  if (o.folder.empty() == o.addresses.empty()) {
    throw argument_error(
        who +
        (o.folder.empty() ? "neither a folder nor addresses are given" : "a folder and addresses are given") +
        "; give a folder for Unix sockets, or an address for each seat for TCP");
  }
  addresses_.reserve(o.seats);
  if (!o.folder.empty()) {
    for (std::uint32_t i = 0; i < o.seats; ++i)
      addresses_.push_back(detail::unix_address(o.folder + "/seat-" + n(i) + ".sock"));
    return;
  }
  if (o.addresses.size() != o.seats) {
    throw argument_error(who + n(o.addresses.size()) + " addresses for " + n(o.seats) +
                         " seats; give each one");
  }
  if (o.secret.empty()) {
    throw argument_error(who +
                         "an empty secret over TCP, where any user may call; give all processes the same, "
                         "16 random bytes or more");
  }
  for (std::uint32_t i = 0; i < o.seats; ++i) {
    const std::string which = who + "the address of seat " + n(i) + ", '" + o.addresses[i] + "', ";
    addresses_.push_back(detail::numeric_address(o.addresses[i]));
    if (addresses_.back().size == 0) {
      throw argument_error(which +
                           "is no numeric host with a port from 1 to 65535, as 127.0.0.1:4000 or [::1]:4000");
    }
    if (o.reach == socket_reach::this_machine && !detail::is_loopback(addresses_.back())) {
      throw argument_error(which +
                           "can be reached from other machines, and frames are not encrypted; in a network "
                           "that is trusted, set reach to socket_reach::any_machine");
    }
  }
}

inline void socket_endpoint::set_up() {
  if (options_.most_half_open == 0) options_.most_half_open = 2 * options_.seats + 16;
  owner_ = ::getpid();
  mine_.from = options_.seat;
  mine_.seats = options_.seats;
  mine_.frame_bytes = options_.frame_bytes;
  mine_.boot = detail::boot_of_machine();
  mine_.pid_space = detail::pid_space_of_process();
  mine_.pid = static_cast<std::uint32_t>(owner_);
  if (!detail::fill_random(mine_.incarnation))
    throw system_error("socket_endpoint: getrandom" + detail::because(errno));
  nonce_ = detail::wire_reader(mine_.incarnation).take<std::uint64_t>() | 1U;
  epoll_ = detail::descriptor(::epoll_create1(EPOLL_CLOEXEC));
  wake_ = detail::descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  stop_ = detail::descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.is_open() || !wake_.is_open() || !stop_.is_open())
    throw system_error("socket_endpoint: epoll_create1 or eventfd" + detail::because(errno));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = detail::event_key(detail::socket_event::wake, 0, 0);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0)
    throw system_error("socket_endpoint: epoll_ctl" + detail::because(errno));
  if (options_.seats == 1) return;
  peers_ = std::vector<peer>(options_.seats);
  halves_ = std::vector<detail::half_open>(options_.most_half_open + 2 * options_.seats + 16);
  scratch_.resize(65536);
  for (peer& each : peers_) {
    each.back_off = options_.first_call_ns;
    each.must_knock = to_index(seat_of(each)) > to_index(self());
  }
  const detail::socket_address& here = addresses_[to_index(self())];
  listener_ = detail::listen_at(here, options_.socket_bytes, static_cast<int>(options_.most_half_open),
                                options_.handshake_ns);
  struct ::stat seen{};
  if (here.is_unix() && ::stat(here.text.c_str(), &seen) == 0) socket_file_ = seen.st_ino;
  event.data.u64 = detail::event_key(detail::socket_event::listener, 0, 0);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0)
    throw system_error("socket_endpoint: epoll_ctl" + detail::because(errno));
  if (options_.beat_ns == 0) return;
  // Signals are for the program's own threads.
  sigset_t all{};
  sigset_t before{};
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    beats_ = std::thread([this] { beat(); });
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw system_error(
        "socket_endpoint: the thread that beats could not be started; raise the limit of "
        "threads, or set beat_ns to 0");
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

inline socket_endpoint::~socket_endpoint() {
  if (::getpid() != owner_) {
    // In a forked child: the thread is not there, and the parent lives.
    if (beats_.joinable()) beats_.detach();
    return;
  }
  if (beats_.joinable()) {
    const std::uint64_t one = 1;
    static_cast<void>(!::write(stop_.get(), &one, sizeof(one)));
    beats_.join();
  }
  for (peer& each : peers_) {
    if (!each.told.is_open()) continue;
    if (each.now == peer::state::up) static_cast<void>(flush_rest(each));
    {
      const std::lock_guard lock(told_mutex_);
      flush_told(each.out);
      put_told(each.out, detail::frame_sort::leaving, {}, {});
    }
    for (const detail::descriptor* lane : {&each.data, &each.told}) {
      // What is not read would have TCP reset the connection, and what was sent might be lost by it.
      ::shutdown(lane->get(), SHUT_WR);
      for (int i = 0; i < 64 && ::recv(lane->get(), scratch_.data(), scratch_.size(), MSG_DONTWAIT) > 0;
           ++i) {
      }
    }
    close_lanes(each);
  }
  struct ::stat seen{};
  if (socket_file_ == 0) return;
  const char* const path = addresses_[to_index(self())].text.c_str();
  if (::lstat(path, &seen) == 0 && seen.st_ino == socket_file_) ::unlink(path);
}

/// The thread: a sign of life on each lane, and what waits there goes on its way.
inline void socket_endpoint::beat() noexcept {
  pollfd stop{stop_.get(), POLLIN, 0};
  const std::uint64_t wait = options_.beat_ns / 1'000'000;
  for (;;) {
    const int timeout = wait == 0 ? 1 : wait > 60'000 ? 60'000 : static_cast<int>(wait);
    if (::poll(&stop, 1, timeout) > 0) return;
    for (peer& each : peers_) {
      const std::lock_guard lock(told_mutex_);
      flush_told(each.out);
      if (each.out.waiting.empty()) put_told(each.out, detail::frame_sort::beat, {}, {});
    }
  }
}

}  // namespace v0
}  // namespace llmmem
