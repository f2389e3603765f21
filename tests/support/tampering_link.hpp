/// @file
/// Somebody in the network between two endpoints over TCP: passes on what they say, frame by frame, as the
/// test wants it.
#pragma once

#include <llmmem/comm/detail/socket_descriptor.hpp>
#include <llmmem/comm/detail/socket_system.hpp>
#include <llmmem/comm/detail/socket_wire.hpp>

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace llmmem_tests {

/// Which way a frame goes, of the process that called and the one that listens.
enum class link_way : std::uint8_t { to_listener, to_caller };

class tampering_link {
 public:
  using bytes = std::vector<std::byte>;
  /// What is passed on in place of a frame; `link.inject` sends something the other way.
  using tamper_function =
      std::function<std::vector<bytes>(llmmem::detail::socket_lane lane, link_way way, const bytes& frame)>;

  /// @param listener  the address that is called by way of this one
  explicit tampering_link(const std::string& listener)
      : there_(llmmem::detail::numeric_address(listener)),
        listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(where);
    if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&where), size) != 0 ||
        ::listen(listener_.get(), 16) != 0 ||
        ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&where), &size) != 0) {
      throw std::runtime_error("no free port");
    }
    address_ = "127.0.0.1:" + std::to_string(ntohs(where.sin_port));
  }

  [[nodiscard]] const std::string& address() const { return address_; }
  tamper_function tamper = [](auto, auto, const bytes& frame) { return std::vector<bytes>{frame}; };

  /// Behind what has gone that way of that lane.
  void inject(llmmem::detail::socket_lane lane, link_way way, const bytes& frame) {
    for (connection& each : connections_)
      if (each.is_lane && each.lane == lane) send(way == link_way::to_listener ? each.to : each.from, frame);
  }

  /// Passes on what has come.
  void turn() {
    while (true) {
      llmmem::detail::descriptor made(
          ::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!made.is_open()) break;
      llmmem::detail::descriptor out(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (::connect(out.get(), there_.get(), there_.size) != 0) continue;
      ::fcntl(out.get(), F_SETFL, O_NONBLOCK);
      connections_.push_back({.from = std::move(made), .to = std::move(out)});
    }
    for (connection& each : connections_) {
      pass(each, link_way::to_listener);
      pass(each, link_way::to_caller);
    }
  }

 private:
  struct direction {
    bytes waits{};
    std::size_t handshake = 0;  // bytes of it that are to come
    bool has_ended = false;
  };
  struct connection {
    llmmem::detail::descriptor from;  // the caller
    llmmem::detail::descriptor to;
    direction there{.handshake = llmmem::detail::wire_hello_bytes + llmmem::detail::wire_proof_bytes};
    direction back{.handshake = llmmem::detail::wire_hello_bytes + llmmem::detail::wire_answer_bytes};
    bool is_known = false;
    bool is_lane = false;
    llmmem::detail::socket_lane lane{};
  };

  static void send(const llmmem::detail::descriptor& into, const bytes& all) {
    std::size_t sent = 0;
    for (int tries = 0; sent < all.size() && tries < 1000; ++tries) {
      const ssize_t went = ::send(into.get(), all.data() + sent, all.size() - sent, MSG_NOSIGNAL);
      if (went > 0) sent += static_cast<std::size_t>(went);
    }
  }

  void pass(connection& of, link_way way) {
    const bool is_there = way == link_way::to_listener;
    direction& one = is_there ? of.there : of.back;
    const llmmem::detail::descriptor& in = is_there ? of.from : of.to;
    const llmmem::detail::descriptor& out = is_there ? of.to : of.from;
    if (one.has_ended) return;
    std::array<std::byte, 65536> some{};
    for (;;) {
      const ssize_t got = ::recv(in.get(), some.data(), some.size(), 0);
      if (got <= 0) {
        one.has_ended = got == 0;
        break;
      }
      one.waits.insert(one.waits.end(), some.begin(), some.begin() + got);
    }
    if (is_there && !of.is_known && one.waits.size() >= 8) {
      of.is_known = true;
      llmmem::detail::wire_reader hello(std::span<const std::byte>(one.waits).subspan(6));
      const auto purpose = hello.take<std::uint16_t>();
      of.is_lane = purpose != static_cast<std::uint16_t>(llmmem::detail::hello_purpose::knock);
      of.lane = static_cast<llmmem::detail::socket_lane>(purpose);
    }
    if (one.handshake != 0) {
      const std::size_t now = one.waits.size() < one.handshake ? one.waits.size() : one.handshake;
      send(out, {one.waits.begin(), one.waits.begin() + static_cast<std::ptrdiff_t>(now)});
      one.waits.erase(one.waits.begin(), one.waits.begin() + static_cast<std::ptrdiff_t>(now));
      one.handshake -= now;
    }
    constexpr std::size_t head = llmmem::detail::wire_header_bytes;
    while (one.handshake == 0 && one.waits.size() >= head) {
      constexpr std::size_t length_at = 32;
      const auto length =
          llmmem::detail::wire_reader(std::span<const std::byte>(one.waits).subspan(length_at))
              .take<std::uint32_t>();
      if (one.waits.size() < head + length) break;
      const auto end = one.waits.begin() + static_cast<std::ptrdiff_t>(head + length);
      const bytes frame(one.waits.begin(), end);
      one.waits.erase(one.waits.begin(), end);
      for (const bytes& each : tamper(of.lane, way, frame))
        send(out, each);
    }
    if (one.has_ended) ::shutdown(out.get(), SHUT_WR);
  }

  llmmem::detail::socket_address there_;
  llmmem::detail::descriptor listener_;
  std::string address_;
  std::list<connection> connections_{};
};

}  // namespace llmmem_tests
