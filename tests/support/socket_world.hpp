/// @file
/// Several socket endpoints in one process, what they heard, and a stranger that speaks to them byte by byte.
#pragma once

#include <llmmem/comm/detail/socket_handshake.hpp>
#include <llmmem/comm/detail/socket_system.hpp>
#include <llmmem/comm/socket_endpoint.hpp>

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/loopback.hpp"
#include "support/temporary_folder.hpp"

namespace llmmem_tests {

using llmmem::frame_buffer;
using llmmem::frame_header;
using llmmem::seat_id;
using llmmem::comm::death;

/// A frame as it came.
struct heard_frame {
  seat_id from{};
  frame_header header{};
  std::vector<std::byte> bytes;

  bool operator==(const heard_frame&) const = default;
};

/// Writes down what it is called with, and gives buffers.
class recorder {
 public:
  frame_buffer buffer_for(seat_id from, const frame_header& header) noexcept {
    ++asked;
    if (answer != frame_buffer::answer::take) return {answer, {}};
    std::vector<std::byte>& buffer = buffers_[llmmem::to_index(from)];
    buffer.assign(header.bytes, std::byte{0});
    return {frame_buffer::answer::take, buffer};
  }
  void on_frame(seat_id from, const frame_header& header) noexcept {
    frames.push_back({from, header, buffers_[llmmem::to_index(from)]});
  }
  void on_message(seat_id from, const frame_header& header, std::span<const std::byte> bytes) noexcept {
    tellings.push_back({from, header, {bytes.begin(), bytes.end()}});
    if (on_told) on_told(tellings.back());
  }
  void on_death(seat_id seat, death how) noexcept {
    deaths.emplace_back(llmmem::to_index(seat), how);
    if (on_died) on_died(seat);
  }
  void on_joined(seat_id seat) noexcept {
    arrivals.push_back(llmmem::to_index(seat));
    if (on_came) on_came(seat);
  }
  [[nodiscard]] bool keeps_waiting() const noexcept { return is_going_on; }

  /// The buffer of the frame under way.
  [[nodiscard]] std::vector<std::byte>& buffer_of(seat_id from) { return buffers_[llmmem::to_index(from)]; }

  frame_buffer::answer answer = frame_buffer::answer::take;
  bool is_going_on = true;
  std::size_t asked = 0;
  std::vector<heard_frame> frames;
  std::vector<heard_frame> tellings;
  std::vector<std::pair<std::uint32_t, death>> deaths;
  std::vector<std::uint32_t> arrivals;
  std::function<void(const heard_frame&)> on_told;
  std::function<void(seat_id)> on_died;
  std::function<void(seat_id)> on_came;

 private:
  std::array<std::vector<std::byte>, 16> buffers_;
};

static_assert(llmmem::frame_handler<recorder>);

enum class socket_kind : std::uint8_t { local, tcp };

inline constexpr std::uint64_t ms = 1'000'000;

/// Endpoints of one job, driven by one thread.
class socket_world {
 public:
  socket_world(socket_kind kind, std::uint32_t seats, llmmem::socket_options options = {})
      : options_(std::move(options)), heard(seats), ends(seats) {
    options_.seats = seats;
    if (kind == socket_kind::local) {
      options_.folder = folder_.path().string();
    } else {
      options_.addresses = free_addresses(seats);
      if (options_.secret.empty()) options_.secret = "a secret of the tests";
    }
  }

  [[nodiscard]] llmmem::socket_options options(std::uint32_t seat) const {
    llmmem::socket_options mine = options_;
    mine.seat = seat_id{seat};
    return mine;
  }
  /// Those of a process at another address, as on another machine: only the secret says who it is.
  [[nodiscard]] llmmem::socket_options options_elsewhere(std::uint32_t seat) const {
    llmmem::socket_options mine = options(seat);
    mine.addresses[seat] = free_addresses(1)[0];
    return mine;
  }
  [[nodiscard]] const std::string& folder() const { return options_.folder; }
  void start(std::uint32_t seat) { ends[seat] = std::make_unique<llmmem::socket_endpoint>(options(seat)); }
  void start() {
    for (std::uint32_t i = 0; i < ends.size(); ++i)
      start(i);
  }
  [[nodiscard]] static llmmem::deadline in(std::uint64_t ns) { return {llmmem::detail::monotonic_ns() + ns}; }

  /// Each in turn, until it is so; false when it is not within 20 s.
  template <class Is>
  bool until(Is is) {
    const llmmem::deadline limit = in(20'000 * ms);
    while (!is()) {
      if (llmmem::detail::monotonic_ns() >= limit.ns) return false;
      turn();
    }
    return true;
  }
  void turn() {
    for (std::size_t i = 0; i < ends.size(); ++i)
      if (ends[i]) static_cast<void>(ends[i]->poll(in(ms / 2), heard[i]));
  }
  /// Each in turn, for that long.
  void run_for(std::uint64_t ns) {
    const llmmem::deadline limit = in(ns);
    static_cast<void>(until([&] { return llmmem::detail::monotonic_ns() >= limit.ns; }));
  }
  /// Starts them, until all are connected.
  bool join() {
    start();
    return until([&] { return is_complete(); });
  }
  [[nodiscard]] bool is_complete() const {
    for (const auto& end : ends)
      if (!end || end->stats().connected + 1 != ends.size()) return false;
    return true;
  }

 private:
  temporary_folder folder_;
  llmmem::socket_options options_;

 public:
  std::vector<recorder> heard;
  std::vector<std::unique_ptr<llmmem::socket_endpoint>> ends;
};

inline std::vector<std::byte> bytes_of(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

/// A plain socket that calls an endpoint. It blocks, for 5 s at most.
class raw_caller {
 public:
  explicit raw_caller(const llmmem::detail::socket_address& where)
      : socket_(::socket(where.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval limit{5, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    is_connected_ = ::connect(socket_.get(), where.get(), where.size) == 0;
  }

  [[nodiscard]] bool is_connected() const { return is_connected_; }
  [[nodiscard]] int get() const { return socket_.get(); }
  bool say(std::span<const std::byte> bytes) const {
    return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  /// Whether all of it came.
  bool hear(std::span<std::byte> into) const {
    return ::recv(socket_.get(), into.data(), into.size(), MSG_WAITALL) == static_cast<ssize_t>(into.size());
  }
  /// Whether the other side has closed it, after at most 5 s; what comes before is thrown away.
  [[nodiscard]] bool is_closed() const {
    std::array<std::byte, 512> some{};
    for (;;) {
      const ssize_t got = ::recv(socket_.get(), some.data(), some.size(), 0);
      if (got == 0 || (got < 0 && errno == ECONNRESET)) return true;
      if (got < 0) return false;
    }
  }
  void close() { socket_.close(); }

 private:
  llmmem::detail::descriptor socket_;
  bool is_connected_ = false;
};

[[nodiscard]] inline llmmem::detail::socket_address address_of(const llmmem::socket_options& of) {
  return of.folder.empty() ? llmmem::detail::numeric_address(of.addresses[llmmem::to_index(of.seat)])
                           : llmmem::detail::unix_address(
                                 of.folder + "/seat-" + std::to_string(llmmem::to_index(of.seat)) + ".sock");
}

/// Says who it is as an endpoint would, over a connection that it then owns.
struct raw_hello {
  llmmem::detail::wire_hello hello;
  std::string secret;

  /// The answer, or nothing when the connection was ended.
  std::optional<llmmem::detail::hello_answer> greet(const raw_caller& caller) const {
    using namespace llmmem::detail;
    const hmac_sha256 key(std::as_bytes(std::span(secret.data(), secret.size())));
    socket_handshake shaking;
    shaking.call(hello);
    if (!caller.say(shaking.says()) || !caller.hear(shaking.wanted())) return std::nullopt;
    if (shaking.took(wire_hello_bytes, key) != socket_handshake::turn::say) return std::nullopt;
    if (!caller.say(shaking.says()) || !caller.hear(shaking.wanted())) return std::nullopt;
    if (shaking.took(wire_answer_bytes, key) != socket_handshake::turn::settled) return std::nullopt;
    return shaking.answered();
  }
};

}  // namespace llmmem_tests
