/// @file
/// Two connected sockets that never block, one for the object under test and one for the test.
#pragma once

#include <llmmem/comm/detail/socket_descriptor.hpp>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <array>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace llmmem_tests {

struct socket_pair {
  llmmem::detail::descriptor here;
  llmmem::detail::descriptor there;

  /// @param buffer_bytes  of the object's socket on its way out; 0: the system's
  explicit socket_pair(int buffer_bytes = 0) {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()) != 0)
      throw std::runtime_error("no socket pair");
    here = llmmem::detail::descriptor(ends[0]);
    there = llmmem::detail::descriptor(ends[1]);
    if (buffer_bytes != 0)
      ::setsockopt(here.get(), SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof(buffer_bytes));
  }

  /// Writes to the test's end; whether all of it went.
  bool say_there(std::span<const std::byte> bytes) const {
    return ::send(there.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  bool say_there(std::string_view text) const { return say_there(std::as_bytes(std::span(text))); }
  /// Everything that has come to the test's end, at most `most` bytes.
  [[nodiscard]] std::vector<std::byte> hear_there(std::size_t most = std::size_t{1} << 24) const {
    std::vector<std::byte> all;
    std::array<std::byte, 4096> some{};
    while (all.size() < most) {
      const std::size_t wanted = most - all.size() < some.size() ? most - all.size() : some.size();
      const ssize_t got = ::recv(there.get(), some.data(), wanted, 0);
      if (got <= 0) break;
      all.insert(all.end(), some.begin(), some.begin() + got);
    }
    return all;
  }
  void drain_there() const { static_cast<void>(hear_there()); }
  /// Whether the other end has been closed, and nothing is left to read.
  [[nodiscard]] bool is_closed_there() const {
    std::byte one{};
    return ::recv(there.get(), &one, 1, MSG_PEEK) == 0;
  }
  /// Writes to the object's end until nothing more fits.
  void fill_here() const {
    const std::array<std::byte, 4096> some{};
    while (::send(here.get(), some.data(), some.size(), MSG_NOSIGNAL) > 0) {
    }
    while (::send(here.get(), some.data(), 1, MSG_NOSIGNAL) > 0) {
    }
  }
  [[nodiscard]] bool is_full_here() const {
    pollfd asked{here.get(), POLLOUT, 0};
    return ::poll(&asked, 1, 0) != 1;
  }
};

}  // namespace llmmem_tests
