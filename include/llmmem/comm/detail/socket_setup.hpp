/// @file
/// The checked setup of a socket endpoint: options, addresses, and its hello.
#pragma once

#include <llmmem/comm/detail/socket_system.hpp>
#include <llmmem/comm/detail/socket_wire.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/socket_options.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Checks every number. Throws `argument_error`.
inline void check_numbers(const socket_options& o) {
  const auto n = [](std::uint64_t value) { return std::to_string(value); };
  const std::string who = "socket_endpoint: ";
  if (o.seats == 0 || o.seats > max_seats)
    throw argument_error(who + n(o.seats) + " seats; use 1 to " + n(max_seats));
  if (to_index(o.seat) >= o.seats) {
    throw argument_error(who + "seat " + n(to_index(o.seat)) + " of " + n(o.seats) +
                         "; seats are numbered from 0");
  }
  if (o.frame_bytes < max_post_bytes || o.frame_bytes > (1U << 30)) {
    throw argument_error(who + "frame_bytes is " + n(o.frame_bytes) + "; use " + n(max_post_bytes) + " to " +
                         n(1U << 30));
  }
  if (o.post_queue_bytes < 2 * max_post_bytes || o.post_queue_bytes > (1U << 30)) {
    throw argument_error(who + "post_queue_bytes is " + n(o.post_queue_bytes) + "; use " +
                         n(std::uint64_t{2} * max_post_bytes) + " to " + n(1U << 30));
  }
  if (o.socket_bytes > (1U << 30))
    throw argument_error(who + "socket_bytes is " + n(o.socket_bytes) + "; use 0 to " + n(1U << 30));
  if (o.beat_ns != 0 && o.hard_silence_ns != 0 && o.hard_silence_ns < 3 * o.beat_ns) {
    throw argument_error(who + "hard_silence_ns is " + n(o.hard_silence_ns) +
                         "; it must be at least three times beat_ns, " + n(3 * o.beat_ns));
  }
  if (o.seal == socket_seal::always && o.secret.empty()) {
    throw argument_error(who +
                         "seal is socket_seal::always and the secret is empty, so anyone can make the seals; "
                         "give all processes the same secret, 16 random bytes or more");
  }
  if (o.handshake_ns == 0 || o.first_call_ns == 0 || o.last_call_ns < o.first_call_ns) {
    throw argument_error(who +
                         "handshake_ns and first_call_ns must be more than 0, last_call_ns not less than "
                         "first_call_ns");
  }
}

/// Without a secret the folder must keep other users out: they must not be able to put their sockets there.
/// Throws `argument_error`.
inline void check_folder(const socket_options& o) {
  struct ::stat seen{};
  // A missing folder is reported by the code that uses it.
  if (!o.secret.empty() || ::stat(o.folder.c_str(), &seen) != 0) return;
  const std::string begins = "socket_endpoint: the folder '" + o.folder + "' ";
  constexpr const char* ends = "or give all processes the same secret, 16 random bytes or more";
  if (seen.st_uid != ::geteuid()) {
    throw argument_error(begins + "belongs to user " + std::to_string(seen.st_uid) + ", not to user " +
                         std::to_string(::geteuid()) +
                         ", and the secret is empty; use a folder of this user, " + ends);
  }
  if ((seen.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    throw argument_error(begins + "can be written to by other users, and the secret is empty; chmod go-w '" +
                         o.folder + "', " + ends);
  }
}

/// Returns the address of each seat. Throws `argument_error`. @pre more than one seat
[[nodiscard]] inline std::vector<socket_address> addresses_of(const socket_options& o) {
  const auto n = [](std::uint64_t value) { return std::to_string(value); };
  const std::string who = "socket_endpoint: ";
  if (o.folder.empty() == o.addresses.empty()) {
    throw argument_error(
        who +
        (o.folder.empty() ? "neither a folder nor addresses are given" : "a folder and addresses are given") +
        "; give a folder for Unix sockets, or an address for each seat for TCP");
  }
  std::vector<socket_address> all;
  all.reserve(o.seats);
  if (!o.folder.empty()) {
    if (o.wrapper != nullptr) {
      throw argument_error(who +
                           "a wrapper is given, and a folder for Unix sockets, whose bytes never leave this "
                           "machine; give addresses for TCP, or no wrapper");
    }
    check_folder(o);
    for (std::uint32_t i = 0; i < o.seats; ++i)
      all.push_back(unix_address(o.folder + "/seat-" + n(i) + ".sock"));
    return all;
  }
  if (o.addresses.size() != o.seats) {
    throw argument_error(who + n(o.addresses.size()) + " addresses for " + n(o.seats) +
                         " seats; give one for each seat");
  }
  if (o.secret.empty()) {
    throw argument_error(
        who +
        "the secret is empty, but over TCP any user may call; give all processes the same secret, "
        "16 random bytes or more");
  }
  for (std::uint32_t i = 0; i < o.seats; ++i) {
    const std::string which = who + "the address of seat " + n(i) + ", '" + o.addresses[i] + "', ";
    all.push_back(numeric_address(o.addresses[i]));
    if (all.back().size == 0) {
      throw argument_error(
          which + "is not a numeric host with a port from 1 to 65535, such as 127.0.0.1:4000 or [::1]:4000");
    }
    if (o.reach == socket_reach::this_machine && !is_loopback(all.back())) {
      throw argument_error(which +
                           "can be reached from other machines, and frames are not encrypted; in a trusted "
                           "network, set reach to socket_reach::any_machine");
    }
  }
  return all;
}

/// Checked options, and the addresses of the seats: none for an endpoint that is alone.
struct socket_setup {
  explicit socket_setup(socket_options given) : options(std::move(given)) {
    check_numbers(options);
    if (options.seats > 1) addresses = addresses_of(options);
  }

  /// The number of seats for others: 0 for an endpoint that is alone.
  [[nodiscard]] std::uint32_t peers() const noexcept { return options.seats == 1 ? 0 : options.seats; }

  socket_options options;
  std::vector<socket_address> addresses{};
};

/// Whether this endpoint requests sealed frames.
[[nodiscard]] inline bool asks_for_seals(const socket_setup& setup) noexcept {
  if (setup.options.seal == socket_seal::off_machine && setup.options.wrapper != nullptr) return false;
  if (setup.options.seal != socket_seal::off_machine) return setup.options.seal == socket_seal::always;
  for (const socket_address& each : setup.addresses)
    if (!each.is_unix() && !is_loopback(each)) return true;
  return false;
}

/// Makes the hello of this process. Throws `system_error`.
[[nodiscard]] inline wire_hello hello_of(const socket_setup& setup) {
  const socket_options& options = setup.options;
  wire_hello mine;
  mine.asks_for_seals = asks_for_seals(setup);
  mine.from = options.seat;
  mine.seats = options.seats;
  mine.frame_bytes = options.frame_bytes;
  mine.boot = boot_of_machine();
  mine.pid_space = pid_space_of_process();
  mine.pid = static_cast<std::uint32_t>(::getpid());
  if (!fill_random(mine.incarnation)) throw system_error("socket_endpoint: getrandom" + because(errno));
  return mine;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
