/// @file
/// Socket endpoints against a plain loop of send and recv over the same kind of sockets, between two threads.
/// One iteration is a round of ours and a round of the plain loop, in turns, so that the machine is the same
/// for both: `speed_ratio` is the median over the rounds of plain time / our time, 1 being as fast as the
/// loop; `framed_ratio` likewise of a plain loop whose messages have a header, as ours have.
///
/// `sealed_*`: endpoints whose frames are sealed beside endpoints whose frames are not, in turns;
/// `sealed_ratio` is the median over the rounds of the time of these / the time of those.
///
/// `hidden_*`: endpoints whose connections go through TLS beside endpoints whose frames are not sealed, in
/// turns; `hidden_ratio` is the median over the rounds of the time of these / the time of those. With
/// OpenSSL.
///
/// LLMMEM_BENCH_FRAME_KIB   frame_bytes of our endpoints (the default of `socket_options`)
/// LLMMEM_BENCH_SOCKET_KIB  socket_bytes of ours, and of the plain sockets (0: the system's)
/// LLMMEM_BENCH_SPIN_US     spin_ns of ours, in microseconds (the default of `socket_options`)

#include <llmmem/comm/socket_endpoint.hpp>
#if defined(LLMMEM_BENCH_OPENSSL)
#include <llmmem/comm/tls_wrapper.hpp>
#endif

#include <benchmark/benchmark.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/local_job.hpp"

namespace {

using namespace llmmem;

using llmmem_bench::number;
using kind = llmmem_bench::socket_kind;

/// Moves every frame to its place in a message.
class message_taker {
 public:
  explicit message_taker(std::size_t bytes) : message_(bytes) {}

  frame_buffer buffer_for(seat_id, const frame_header& header) noexcept {
    return {frame_buffer::answer::take, std::span(message_).subspan(header.offset, header.bytes)};
  }
  void on_frame(seat_id, const frame_header& header) noexcept {
    bytes_ += header.bytes;
    ++frames_;
  }
  void on_message(seat_id, const frame_header&, std::span<const std::byte>) noexcept {}
  void on_death(seat_id, comm::death) noexcept {}
  void on_joined(seat_id) noexcept {}
  [[nodiscard]] bool keeps_waiting() const noexcept { return true; }

  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::uint64_t frames() const noexcept { return frames_; }

 private:
  std::vector<std::byte> message_;
  std::uint64_t bytes_ = 0;
  std::uint64_t frames_ = 0;
};

/// Two endpoints that know each other.
class our_link {
 public:
  explicit our_link(kind of, socket_seal seal = socket_seal::off_machine,
                    std::array<socket_wrapper*, 2> wrappers = {}) {
    socket_options options = llmmem_bench::job_options(of, 2, folder_);
    options.seal = seal;
    options.frame_bytes = number("LLMMEM_BENCH_FRAME_KIB", options.frame_bytes >> 10) << 10;
    options.socket_bytes = number("LLMMEM_BENCH_SOCKET_KIB", 0) << 10;
    const auto spin_us = number("LLMMEM_BENCH_SPIN_US", static_cast<std::uint32_t>(options.spin_ns / 1000));
    options.spin_ns = spin_us * std::uint64_t{1000};
    for (std::uint32_t i = 0; i < 2; ++i) {
      options.seat = seat_id{i};
      options.wrapper = wrappers[i];
      ends_[i] = std::make_unique<socket_endpoint>(options);
    }
    message_taker nothing(0);
    while (!ends_[0]->is_connected(seat_id{1}) || !ends_[1]->is_connected(seat_id{0})) {
      for (auto& each : ends_)
        static_cast<void>(each->poll({}, nothing));
    }
  }
  our_link(const our_link&) = delete;
  our_link& operator=(const our_link&) = delete;

  void send(std::uint32_t side, std::span<const std::byte> message, message_taker& taker) {
    const std::uint32_t most = ends_[side]->frame_bytes();
    std::uint64_t at = 0;
    do {
      const auto part = message.subspan(at, std::min<std::size_t>(most, message.size() - at));
      const frame_header header{
          .message = message.size(), .offset = at, .bytes = static_cast<std::uint32_t>(part.size())};
      ends_[side]->send(seat_id{1 - side}, header, part, no_deadline, taker).value();
      at += part.size();
    } while (at < message.size());
  }
  void receive(std::uint32_t side, std::uint64_t up_to, message_taker& taker) {
    while (taker.bytes() < up_to)
      static_cast<void>(ends_[side]->poll(no_deadline, taker));
  }

 private:
  llmmem_bench::bench_folder folder_;
  std::array<std::unique_ptr<socket_endpoint>, 2> ends_;
};

/// Two connected blocking sockets.
class plain_link {
 public:
  explicit plain_link(kind of) {
    const int bytes = static_cast<int>(number("LLMMEM_BENCH_SOCKET_KIB", 0) << 10);
    const auto with_buffers = [&](int socket) {
      if (bytes == 0) return;
      ::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
      ::setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
    };
    if (of == kind::local) {
      std::array<int, 2> both{};
      if (::socketpair(AF_UNIX, SOCK_STREAM, 0, both.data()) != 0) throw std::runtime_error("no sockets");
      for (std::size_t i = 0; i < 2; ++i) {
        ends_[i] = detail::descriptor(both[i]);
        with_buffers(both[i]);
      }
      return;
    }
    const detail::socket_address where = detail::numeric_address(llmmem_tests::free_addresses(1)[0]);
    const detail::descriptor listener = detail::listen_at(where, static_cast<std::uint32_t>(bytes), 1, 0);
    ends_[0] = detail::descriptor(::socket(AF_INET, SOCK_STREAM, 0));
    with_buffers(ends_[0].get());
    if (::connect(ends_[0].get(), where.get(), where.size) != 0) throw std::runtime_error("no connection");
    pollfd ready{listener.get(), POLLIN, 0};
    ::poll(&ready, 1, -1);
    ends_[1] = detail::descriptor(::accept(listener.get(), nullptr, nullptr));
    const int one = 1;
    for (const detail::descriptor& each : ends_)
      ::setsockopt(each.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  }

  void send(std::uint32_t side, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(ends_[side].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) throw std::runtime_error("send");
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    }
  }
  void receive(std::uint32_t side, std::span<std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t got = ::recv(ends_[side].get(), bytes.data(), bytes.size(), 0);
      if (got <= 0) throw std::runtime_error("recv");
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    }
  }

  /// With a header before it, as our frames have, from two places in one call.
  void send_framed(std::uint32_t side, std::span<const std::byte> bytes) { send_some(side, head_, bytes); }
  /// The next header, if it has come, with the end of what is before it: so many bytes of it are in `ahead`.
  void receive_framed(std::uint32_t side, std::span<std::byte> bytes, std::size_t& ahead) {
    std::array<std::byte, detail::wire_header_bytes> head;
    receive(side, std::span(head).subspan(ahead));
    ahead = 0;
    while (!bytes.empty()) {
      std::array<iovec, 2> places{iovec{bytes.data(), bytes.size()}, iovec{head.data(), head.size()}};
      msghdr message{};
      message.msg_iov = places.data();
      message.msg_iovlen = places.size();
      const ssize_t got = ::recvmsg(ends_[side].get(), &message, 0);
      if (got <= 0) throw std::runtime_error("recvmsg");
      const std::size_t part = std::min(static_cast<std::size_t>(got), bytes.size());
      ahead = static_cast<std::size_t>(got) - part;
      bytes = bytes.subspan(part);
    }
  }

 private:
  void send_some(std::uint32_t side, std::span<const std::byte> first, std::span<const std::byte> second) {
    std::array<iovec, 2> places{iovec{const_cast<std::byte*>(first.data()), first.size()},
                                iovec{const_cast<std::byte*>(second.data()), second.size()}};
    msghdr message{};
    message.msg_iov = places.data();
    message.msg_iovlen = places.size();
    const ssize_t sent = ::sendmsg(ends_[side].get(), &message, MSG_NOSIGNAL);
    if (sent < static_cast<ssize_t>(first.size())) throw std::runtime_error("sendmsg");
    send(side, second.subspan(static_cast<std::size_t>(sent) - first.size()));
  }

  std::array<detail::descriptor, 2> ends_;
  std::array<std::byte, detail::wire_header_bytes> head_{};
};

template <class Here, class There>
double seconds_of(Here here, There there) {
  const auto began = std::chrono::steady_clock::now();
  std::thread other(there);
  here();
  other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

double stream_ours(our_link& link, std::size_t bytes, std::uint64_t count) {
  const std::vector<std::byte> message(bytes, std::byte{1});
  message_taker sender(0);
  message_taker taker(bytes);
  return seconds_of(
      [&] {
        for (std::uint64_t i = 0; i < count; ++i)
          link.send(0, message, sender);
      },
      [&] { link.receive(1, count * bytes, taker); });
}

double stream_plain(plain_link& link, std::size_t bytes, std::uint64_t count) {
  const std::vector<std::byte> message(bytes, std::byte{1});
  std::vector<std::byte> taken(bytes);
  return seconds_of(
      [&] {
        for (std::uint64_t i = 0; i < count; ++i)
          link.send(0, message);
      },
      [&] {
        for (std::uint64_t i = 0; i < count; ++i)
          link.receive(1, taken);
      });
}

/// As the plain loop, with a header before each message: the minimum that separates messages.
double stream_framed(plain_link& link, std::size_t bytes, std::uint64_t count) {
  const std::vector<std::byte> message(bytes, std::byte{1});
  std::vector<std::byte> taken(bytes);
  return seconds_of(
      [&] {
        for (std::uint64_t i = 0; i < count; ++i)
          link.send_framed(0, message);
      },
      [&] {
        std::size_t ahead = 0;
        for (std::uint64_t i = 0; i < count; ++i)
          link.receive_framed(1, taken, ahead);
      });
}

double ping_ours(our_link& link, std::uint64_t count) {
  const std::array<std::byte, 8> eight{};
  message_taker here(8);
  message_taker there(8);
  return seconds_of(
      [&] {
        for (std::uint64_t i = 1; i <= count; ++i) {
          link.send(0, eight, here);
          link.receive(0, 8 * i, here);
        }
      },
      [&] {
        for (std::uint64_t i = 1; i <= count; ++i) {
          link.receive(1, 8 * i, there);
          link.send(1, eight, there);
        }
      });
}

double ping_plain(plain_link& link, std::uint64_t count) {
  std::array<std::byte, 8> here{};
  std::array<std::byte, 8> there{};
  return seconds_of(
      [&] {
        for (std::uint64_t i = 0; i < count; ++i) {
          link.send(0, here);
          link.receive(0, here);
        }
      },
      [&] {
        for (std::uint64_t i = 0; i < count; ++i) {
          link.receive(1, there);
          link.send(1, there);
        }
      });
}

double median_of(std::vector<double>& values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Rounds of all in turns: ours, the plain loop, and the plain loop with headers, or nothing.
template <class Ours, class Plain, class Framed>
void side_by_side(benchmark::State& state, Ours ours, Plain plain, Framed framed) {
  std::vector<double> ratios;
  std::vector<double> framed_ratios;
  std::vector<double> plain_times;
  for (auto _ : state) {
    double mine = 0;
    double theirs = 0;
    double with_header = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      const std::size_t which = (i + ratios.size()) % 3;
      if (which == 0) mine = ours();
      if (which == 1) theirs = plain();
      if (which == 2) with_header = framed();
    }
    ratios.push_back(theirs / mine);
    framed_ratios.push_back(with_header / mine);
    plain_times.push_back(theirs);
    state.SetIterationTime(mine);
  }
  state.counters["speed_ratio"] = median_of(ratios);
  state.counters["ratio_p10"] = ratios[ratios.size() / 10];
  state.counters["ratio_p90"] = ratios[ratios.size() - 1 - ratios.size() / 10];
  if (framed_ratios[0] != 0) state.counters["framed_ratio"] = median_of(framed_ratios);
  state.counters["plain_ms"] = median_of(plain_times) * 1e3;
}

void stream(benchmark::State& state, kind of) {
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const std::uint64_t count =
      std::max<std::uint64_t>(1, std::min<std::uint64_t>(20'000, (64U << 20) / bytes));
  our_link link(of);
  plain_link beside(of);
  side_by_side(
      state, [&] { return stream_ours(link, bytes, count); },
      [&] { return stream_plain(beside, bytes, count); },
      [&] { return stream_framed(beside, bytes, count); });
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(count));
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(count * bytes));
}

/// Protected frames and others: a round of each in turns.
template <class Round>
void protected_beside(benchmark::State& state, our_link& sealed, kind of, const char* counter, Round round) {
  our_link open(of, socket_seal::never);
  std::vector<double> ratios;
  for (auto _ : state) {
    const bool is_first = ratios.size() % 2 == 0;
    const double before = is_first ? round(sealed) : 0;
    const double beside = round(open);
    const double mine = is_first ? before : round(sealed);
    ratios.push_back(beside / mine);
    state.SetIterationTime(mine);
  }
  state.counters[counter] = median_of(ratios);
  state.counters["ratio_p10"] = ratios[ratios.size() / 10];
  state.counters["ratio_p90"] = ratios[ratios.size() - 1 - ratios.size() / 10];
}

void sealed_stream(benchmark::State& state, kind of) {
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const std::uint64_t count =
      std::max<std::uint64_t>(1, std::min<std::uint64_t>(20'000, (64U << 20) / bytes));
  our_link sealed(of, socket_seal::always);
  protected_beside(state, sealed, of, "sealed_ratio",
                   [&](our_link& link) { return stream_ours(link, bytes, count); });
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(count));
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(count * bytes));
}

void sealed_ping(benchmark::State& state, kind of) {
  constexpr std::uint64_t count = 2000;
  our_link sealed(of, socket_seal::always);
  protected_beside(state, sealed, of, "sealed_ratio", [&](our_link& link) { return ping_ours(link, count); });
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(count));  // there and back
}

#if defined(LLMMEM_BENCH_OPENSSL)
void hidden_stream(benchmark::State& state) {
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const std::uint64_t count =
      std::max<std::uint64_t>(1, std::min<std::uint64_t>(20'000, (64U << 20) / bytes));
  tls_wrapper here("of the benchmarks");
  tls_wrapper there("of the benchmarks");
  our_link hidden(kind::tcp, socket_seal::never, {&here, &there});
  protected_beside(state, hidden, kind::tcp, "hidden_ratio",
                   [&](our_link& link) { return stream_ours(link, bytes, count); });
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(count));
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(count * bytes));
}

void hidden_ping(benchmark::State& state) {
  constexpr std::uint64_t count = 2000;
  tls_wrapper here("of the benchmarks");
  tls_wrapper there("of the benchmarks");
  our_link hidden(kind::tcp, socket_seal::never, {&here, &there});
  protected_beside(state, hidden, kind::tcp, "hidden_ratio",
                   [&](our_link& link) { return ping_ours(link, count); });
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(count));  // there and back
}
#endif

void ping(benchmark::State& state, kind of) {
  constexpr std::uint64_t count = 2000;
  our_link link(of);
  plain_link beside(of);
  side_by_side(
      state, [&] { return ping_ours(link, count); }, [&] { return ping_plain(beside, count); },
      [] { return 0.0; });
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(count));  // there and back
}

[[maybe_unused]] const bool is_registered = [] {
  for (const kind of : {kind::local, kind::tcp}) {
    const std::string name = of == kind::local ? "llmmem/unix" : "llmmem/tcp";
    benchmark::RegisterBenchmark(("ping/" + name).c_str(), [of](benchmark::State& state) { ping(state, of); })
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
    auto* const rows = benchmark::RegisterBenchmark(("stream/" + name).c_str(),
                                                    [of](benchmark::State& state) { stream(state, of); });
    for (const std::int64_t bytes : {1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26})
      rows->Arg(bytes);
    rows->UseManualTime()->Unit(benchmark::kMillisecond);
    benchmark::RegisterBenchmark(("sealed_ping/" + name).c_str(),
                                 [of](benchmark::State& state) { sealed_ping(state, of); })
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
    auto* const sealed = benchmark::RegisterBenchmark(
        ("sealed_stream/" + name).c_str(), [of](benchmark::State& state) { sealed_stream(state, of); });
    for (const std::int64_t bytes : {1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23})
      sealed->Arg(bytes);
    sealed->UseManualTime()->Unit(benchmark::kMillisecond);
  }
#if defined(LLMMEM_BENCH_OPENSSL)
  benchmark::RegisterBenchmark("hidden_ping/llmmem/tcp", hidden_ping)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
  auto* const hidden = benchmark::RegisterBenchmark("hidden_stream/llmmem/tcp", hidden_stream);
  for (const std::int64_t bytes : {1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23})
    hidden->Arg(bytes);
  hidden->UseManualTime()->Unit(benchmark::kMillisecond);
#endif
  return true;
}();

}  // namespace
