/// @file
/// The system calls of a socket endpoint: addresses and listening.
#pragma once

#include <llmmem/comm/detail/socket_descriptor.hpp>
#include <llmmem/comm/detail/socket_folder_lock.hpp>
#include <llmmem/comm/detail/socket_process.hpp>
#include <llmmem/comm/detail/socket_wire.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/monotonic.hpp>
#include <llmmem/error.hpp>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Whether a non-blocking call has nothing to do now. The two errors are the same number on Linux.
[[nodiscard]] constexpr bool would_block(int error) noexcept {
#if EAGAIN == EWOULDBLOCK
  return error == EAGAIN;
#else
  return error == EAGAIN || error == EWOULDBLOCK;
#endif
}

/// For poll and epoll_wait: never a busy loop at the end of a wait, and -1 for no limit.
[[nodiscard]] constexpr int milliseconds_until(std::uint64_t now, std::uint64_t until) noexcept {
  if (until == ~std::uint64_t{0}) return -1;
  if (until <= now) return 0;
  const std::uint64_t wait = (until - now + 999'999) / 1'000'000;
  return wait > 1'000'000 ? 1'000'000 : static_cast<int>(wait);
}

[[nodiscard]] inline bool fill_random(std::span<std::byte> into) noexcept {
  while (!into.empty()) {
    const ssize_t got = ::getrandom(into.data(), into.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    into = into.subspan(static_cast<std::size_t>(got));
  }
  return true;
}

/// Where an endpoint listens: a Unix socket's path, or a numeric host and port.
struct socket_address {
  sockaddr_storage bytes{};
  socklen_t size = 0;
  std::string text;

  [[nodiscard]] bool is_unix() const noexcept { return bytes.ss_family == AF_UNIX; }
  [[nodiscard]] const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&bytes); }
};

[[nodiscard]] inline socket_address unix_address(const std::string& path) {
  sockaddr_un where{};
  if (path.size() >= sizeof(where.sun_path)) {
    throw argument_error("socket_endpoint: the path '" + path + "' has " + std::to_string(path.size()) +
                         " bytes, but that of a Unix socket has at most " +
                         std::to_string(sizeof(where.sun_path) - 1) + "; use a folder with a shorter path");
  }
  if (path.find('\0') != std::string::npos) {
    throw argument_error("socket_endpoint: the path '" + std::string(path.c_str()) +
                         "' contains a zero byte");
  }
  where.sun_family = AF_UNIX;
  std::memcpy(where.sun_path, path.c_str(), path.size() + 1);
  socket_address made;
  std::memcpy(&made.bytes, &where, sizeof(where));
  made.size = sizeof(where);
  made.text = path;
  return made;
}

/// Parses "127.0.0.1:4000" or "[::1]:4000"; the family is AF_UNSPEC for anything else.
[[nodiscard]] inline socket_address numeric_address(const std::string& text) {
  socket_address made;
  made.text = text;
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon + 1 == text.size() || text.size() - colon > 6) return made;
  std::uint32_t port = 0;
  for (std::size_t i = colon + 1; i < text.size(); ++i) {
    if (text[i] < '0' || text[i] > '9') return made;
    port = port * 10 + static_cast<std::uint32_t>(text[i] - '0');
  }
  if (port == 0 || port > 65535) return made;
  const std::string host = text.substr(0, colon);
  sockaddr_in four{};
  if (::inet_pton(AF_INET, host.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    four.sin_port = htons(static_cast<std::uint16_t>(port));
    std::memcpy(&made.bytes, &four, sizeof(four));
    made.size = sizeof(four);
    return made;
  }
  sockaddr_in6 six{};
  if (host.size() > 2 && host.front() == '[' && host.back() == ']' &&
      ::inet_pton(AF_INET6, host.substr(1, host.size() - 2).c_str(), &six.sin6_addr) == 1) {
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(static_cast<std::uint16_t>(port));
    std::memcpy(&made.bytes, &six, sizeof(six));
    made.size = sizeof(six);
  }
  return made;
}

[[nodiscard]] inline bool is_loopback(const socket_address& address) noexcept {
  if (address.bytes.ss_family == AF_INET) {
    sockaddr_in four{};
    std::memcpy(&four, &address.bytes, sizeof(four));
    return (ntohl(four.sin_addr.s_addr) >> 24) == 127;
  }
  sockaddr_in6 six{};
  std::memcpy(&six, &address.bytes, sizeof(six));
  return address.bytes.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&six.sin6_addr) != 0;
}

/// Makes a stream socket that never blocks; `buffer_bytes` 0 leaves the system's buffers.
[[nodiscard]] inline descriptor make_socket(const socket_address& address,
                                            std::uint32_t buffer_bytes) noexcept {
  descriptor made(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int one = 1;
  if (made.is_open() && !address.is_unix())
    ::setsockopt(made.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  if (made.is_open() && buffer_bytes != 0) {
    const int bytes = static_cast<int>(buffer_bytes);
    ::setsockopt(made.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
    ::setsockopt(made.get(), SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
  }
  return made;
}

/// Returns the bytes written, 0 when none can be written now, or the negative error.
[[nodiscard]] inline ssize_t write_some(int socket, std::span<const std::byte> first,
                                        std::span<const std::byte> second) noexcept {
  static constexpr std::size_t short_bytes = 2048;
  // Not cleared, because only the bytes written to it are sent.
  std::array<std::byte, short_bytes> joined;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  if (!second.empty() && first.size() + second.size() <= joined.size()) {
    // A copy costs less than the kernel's work for a list of places.
    std::memcpy(joined.data(), first.data(), first.size());
    std::memcpy(joined.data() + first.size(), second.data(), second.size());
    first = std::span(joined).first(first.size() + second.size());
    second = {};
  }
  std::array<iovec, 2> parts{iovec{const_cast<std::byte*>(first.data()), first.size()},
                             iovec{const_cast<std::byte*>(second.data()), second.size()}};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  for (;;) {
    const ssize_t sent = second.empty()
                             ? ::send(socket, first.data(), first.size(), MSG_DONTWAIT | MSG_NOSIGNAL)
                             : ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (errno == EINTR) continue;
    return would_block(errno) ? 0 : -errno;
  }
}

/// Whether the other end is still there, as far as this one can see.
[[nodiscard]] inline bool is_open_there(const descriptor& socket) noexcept {
  std::byte first{};
  if (!socket.is_open()) return false;
  const ssize_t got = ::recv(socket.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
  return got > 0 || (got < 0 && (would_block(errno) || errno == EINTR));
}

/// Removes a socket's file that a dead process left; that of a living one is an error.
inline void remove_stale(const socket_address& address) {
  const descriptor caller(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!caller.is_open()) throw system_error("socket_endpoint: socket" + because(errno));
  struct ::stat seen{};
  if (::lstat(address.text.c_str(), &seen) != 0) return;
  if (!S_ISSOCK(seen.st_mode)) {
    throw system_error("socket_endpoint: '" + address.text +
                       "' exists and is not a socket; remove it, or use another folder");
  }
  const int called = ::connect(caller.get(), address.get(), address.size) == 0 ? 0 : errno;
  // A forked child may hold the socket open after its process has ended.
  const pid_t pid = called == 0 ? credentials_of(caller.get()).pid : 0;
  const bool is_dead = called == ECONNREFUSED || (pid > 0 && ::kill(pid, 0) != 0 && errno == ESRCH);
  if (!is_dead) {
    throw system_error("socket_endpoint: '" + address.text + "' is taken" +
                       (pid > 0 ? " by process " + std::to_string(pid) : because(called)) +
                       "; end that process first, or use another seat");
  }
  ::unlink(address.text.c_str());
}

/// Listens, with at most `backlog` callers waiting.
/// @param patience_ns  how long other processes may prevent it
[[nodiscard]] inline descriptor listen_at(const socket_address& address, std::uint32_t buffer_bytes,
                                          int backlog, std::uint64_t patience_ns) {
  descriptor made = make_socket(address, buffer_bytes);
  if (!made.is_open())
    throw system_error("socket_endpoint: socket for '" + address.text + "'" + because(errno));
  descriptor folder;
  if (address.is_unix()) {
    // Two processes that start together must not remove each other's socket.
    folder = lock_folder(address.text.substr(0, address.text.rfind('/') + 1), patience_ns);
    remove_stale(address);
  } else {
    const int one = 1;
    ::setsockopt(made.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  }
  if (::bind(made.get(), address.get(), address.size) != 0) {
    throw system_error("socket_endpoint: bind to '" + address.text + "'" + because(errno) +
                       "; end the process that listens there, or use another address");
  }
  if (::listen(made.get(), backlog) != 0)
    throw system_error("socket_endpoint: listen at '" + address.text + "'" + because(errno));
  return made;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
