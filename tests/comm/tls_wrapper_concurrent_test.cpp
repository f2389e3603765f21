/// Endpoints whose connections go through TLS, and a relay in the network that records and changes bytes.
#if !defined(LLMMEM_TESTS_OPENSSL)
#include <doctest/doctest.h>

// Skipped because a build without OpenSSL 3 cannot compile tls_wrapper: ctest then says so in place of
// passing silently. scripts/test installs libssl-dev, so that there the tests below run.
TEST_CASE("OpenSSL 3 is not here: tls_wrapper was not tested" * doctest::skip()) {}
#else
#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/comm/tls_wrapper.hpp>

#include <doctest/doctest.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "support/error_text.hpp"
#include "support/socket_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr const char* secret = "a secret of the tests";

/// Listens on a port of the loopback that the system chooses, and returns where.
sockaddr_in listen_on_loopback(const detail::descriptor& listener) {
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(where);
  REQUIRE(::bind(listener.get(), reinterpret_cast<sockaddr*>(&where), size) == 0);
  REQUIRE(::listen(listener.get(), 16) == 0);
  REQUIRE(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&where), &size) == 0);
  return where;
}

/// Passes bytes on between callers and a listener, and keeps them. It may change one.
class byte_relay {
 public:
  explicit byte_relay(const std::string& listener)
      : there_(detail::numeric_address(listener)),
        listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    address_ = "127.0.0.1:" + std::to_string(ntohs(listen_on_loopback(listener_).sin_port));
    thread_ = std::thread([this] {
      while (!is_over_) {
        turn();
        ::usleep(100);
      }
    });
  }
  byte_relay(const byte_relay&) = delete;
  byte_relay& operator=(const byte_relay&) = delete;
  ~byte_relay() {
    is_over_ = true;
    thread_.join();
  }

  [[nodiscard]] const std::string& address() const { return address_; }
  [[nodiscard]] bool has_seen(std::span<const std::byte> bytes) {
    const std::lock_guard lock(mutex_);
    return std::ranges::any_of(seen_,
                               [&](const auto& one) { return !std::ranges::search(one, bytes).empty(); });
  }

  [[nodiscard]] std::size_t bytes_seen() {
    const std::lock_guard lock(mutex_);
    return seen_[0].size() + seen_[1].size();
  }

  std::atomic<int> tampers{-1};  ///< the way whose next bytes it changes: 1 to the listener
  std::atomic<int> cuts{-1};     ///< the way whose next bytes it takes half of, and ends

 private:
  struct link {
    detail::descriptor from;
    detail::descriptor to;
  };

  void turn() {
    const std::lock_guard lock(mutex_);
    for (;;) {
      detail::descriptor made(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!made.is_open()) break;
      detail::descriptor out(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (::connect(out.get(), there_.get(), there_.size) != 0) continue;
      ::fcntl(out.get(), F_SETFL, O_NONBLOCK);
      links_.push_back({std::move(made), std::move(out)});
    }
    for (link& each : links_) {
      pass(each.from, each.to, true);
      pass(each.to, each.from, false);
    }
  }
  void pass(detail::descriptor& from, detail::descriptor& to, bool is_to_listener) {
    std::array<std::byte, 65536> part;
    const ssize_t got = from.is_open() ? ::recv(from.get(), part.data(), part.size(), MSG_DONTWAIT) : -1;
    if (got == 0 || (got < 0 && errno == ECONNRESET)) {
      from.close();
      to.close();
    }
    if (got <= 0) return;
    auto bytes = std::span(part).first(static_cast<std::size_t>(got));
    const int way = is_to_listener ? 1 : 0;
    auto& seen = seen_[static_cast<std::size_t>(way)];
    seen.insert(seen.end(), bytes.begin(), bytes.end());
    if (tampers == way) {
      bytes.back() ^= std::byte{1};
      tampers = -1;
    }
    const bool is_cut = cuts == way;
    if (is_cut) bytes = bytes.first(bytes.size() / 2);
    for (std::size_t done = 0; done < bytes.size();) {
      const ssize_t went = ::send(to.get(), bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
      if (went > 0) done += static_cast<std::size_t>(went);
      if (went < 0 && errno != EAGAIN) break;
    }
    if (!is_cut) return;
    cuts = -1;
    from.close();
    to.close();
  }

  detail::socket_address there_;
  detail::descriptor listener_;
  std::string address_;
  std::list<link> links_;
  std::mutex mutex_;                            // of `links_` and `seen_`
  std::array<std::vector<std::byte>, 2> seen_;  // by way
  std::atomic<bool> is_over_ = false;
  std::thread thread_;
};

/// Two endpoints; the upper one calls by way of the relay.
struct pair_over_relay {
  explicit pair_over_relay(socket_wrapper* lower, socket_wrapper* upper)
      : addresses(free_addresses(2)), relay(addresses[0]) {
    socket_options of{
        .seat = seat_id{0}, .seats = 2, .addresses = addresses, .secret = secret, .wrapper = lower};
    ends[0] = std::make_unique<socket_endpoint>(of);
    of.seat = seat_id{1};
    of.addresses[0] = relay.address();
    of.wrapper = upper;
    ends[1] = std::make_unique<socket_endpoint>(of);
  }
  template <class Is>
  [[nodiscard]] bool until(Is is, std::uint64_t ns = 5'000 * ms) {
    const std::uint64_t limit = detail::monotonic_ns() + ns;
    while (!is()) {
      if (detail::monotonic_ns() >= limit) return false;
      turn();
    }
    return true;
  }
  void turn() {
    for (std::size_t i = 0; i < 2; ++i)
      if (ends[i]) static_cast<void>(ends[i]->poll(socket_world::in(ms / 4), heard[i]));
  }
  [[nodiscard]] bool join() {
    return until([&] { return ends[0]->stats().connected == 1 && ends[1]->stats().connected == 1; });
  }
  /// The network and its buffers have room for it.
  void send(std::uint32_t from, std::span<const std::byte> bytes) {
    static_cast<void>(ends[from]->send(seat_id{1 - from},
                                       {.bytes = static_cast<std::uint32_t>(bytes.size()), .tag = 7}, bytes,
                                       socket_world::in(10'000 * ms), heard[from]));
  }

  std::vector<std::string> addresses;
  byte_relay relay;
  std::array<recorder, 2> heard;
  std::array<std::unique_ptr<socket_endpoint>, 2> ends;
};

/// A caller that has the secret, but is no endpoint.
class hostile_peer {
 public:
  explicit hostile_peer(int socket) : context_(::SSL_CTX_new(::TLS_client_method())) {
    SSL_CTX_set_min_proto_version(context_, TLS1_3_VERSION);
    ::SSL_CTX_set_ciphersuites(context_, "TLS_AES_128_GCM_SHA256");
    ::SSL_CTX_set_psk_use_session_callback(context_, &use_secret);
    session_ = ::SSL_new(context_);
    ::SSL_set_fd(session_, socket);
    ::SSL_set_connect_state(session_);
  }
  hostile_peer(const hostile_peer&) = delete;
  hostile_peer& operator=(const hostile_peer&) = delete;
  ~hostile_peer() {
    ::SSL_free(session_);
    ::SSL_CTX_free(context_);
  }

  [[nodiscard]] bool is_shaken() { return ::SSL_do_handshake(session_) == 1; }
  /// Returns how many it could send.
  int update_keys(int count) {
    ::signal(SIGPIPE, SIG_IGN);
    for (int i = 0; i < count; ++i) {
      if (::SSL_key_update(session_, SSL_KEY_UPDATE_NOT_REQUESTED) != 1 || ::SSL_do_handshake(session_) != 1)
        return i;
    }
    return count;
  }
  bool write(std::size_t bytes) {
    const std::vector<std::byte> all(bytes);
    std::size_t sent = 0;
    return ::SSL_write_ex(session_, all.data(), all.size(), &sent) == 1 && sent == bytes;
  }

 private:
  static int use_secret(SSL* session, const EVP_MD*, const unsigned char** identity, std::size_t* bytes,
                        SSL_SESSION** used) {
    static constexpr std::string_view name = "llmmem";
    constexpr std::string_view use = "llmmem tls 1.3 psk 1";
    constexpr unsigned char cipher[] = {0x13, 0x01};
    const detail::hmac_sha256 made(std::as_bytes(std::span(secret, std::string_view(secret).size())));
    const detail::sha256_words words = made.of(std::as_bytes(std::span(use.data(), use.size())));
    std::array<unsigned char, 32> key{};
    for (std::size_t i = 0; i < key.size(); ++i)
      key[i] = static_cast<unsigned char>(words[i / 4] >> (24 - 8 * (i % 4)));
    *used = ::SSL_SESSION_new();
    ::SSL_SESSION_set1_master_key(*used, key.data(), key.size());
    ::SSL_SESSION_set_cipher(*used, ::SSL_CIPHER_find(session, cipher));
    ::SSL_SESSION_set_protocol_version(*used, TLS1_3_VERSION);
    *identity = reinterpret_cast<const unsigned char*>(name.data());
    *bytes = name.size();
    return 1;
  }

  SSL_CTX* context_;
  SSL* session_ = nullptr;
};

std::vector<std::byte> pattern(std::size_t bytes) {
  std::vector<std::byte> all(bytes);
  std::uint32_t state = 5;
  for (std::byte& each : all) {
    state = state * 1664525 + 1013904223;
    each = static_cast<std::byte>(state >> 24);
  }
  return all;
}

}  // namespace

TEST_SUITE("connections over TLS") {
  TEST_CASE("frames and messages arrive as they were sent, and none is visible in the network") {
    const auto payload = pattern(700'000);
    const auto told = bytes_of("what is told from seat to seat");
    for (const bool is_hidden : {true, false}) {
      CAPTURE(is_hidden);
      tls_wrapper lower(secret);
      tls_wrapper upper(secret);
      pair_over_relay pair(is_hidden ? &lower : nullptr, is_hidden ? &upper : nullptr);
      REQUIRE(pair.join());
      for (const std::uint32_t from : {0U, 1U}) {
        pair.send(from, payload);
        pair.ends[from]->post(seat_id{1 - from}, {.tag = 9}, told);
        const recorder& there = pair.heard[1 - from];
        REQUIRE(pair.until([&] { return there.frames.size() == 1 && there.tellings.size() == 1; }));
        CHECK(there.frames[0].bytes == payload);
        CHECK(there.tellings[0].bytes == told);
      }
      // A relay that sees plain bytes finds them: so it would find them here.
      CHECK(pair.relay.has_seen(std::span(payload).first(64)) == !is_hidden);
      CHECK(pair.relay.has_seen(told) == !is_hidden);
      CHECK(pair.relay.bytes_seen() > 2 * payload.size());
      pair.ends[1].reset();
      CHECK(pair.until([&] { return !pair.heard[0].deaths.empty(); }));
      CHECK(pair.heard[0].deaths[0].second == comm::death::certain);
      if (!is_hidden) continue;
      CHECK(lower.stats().shaken >= 2);
      CHECK(lower.stats().tampered == 0);
    }
  }

  TEST_CASE("a process with another secret, or without TLS, is refused, and both ends report why") {
    const auto missing = [](socket_wrapper* lower, socket_wrapper* upper, seat_absence why) {
      pair_over_relay pair(lower, upper);
      CHECK(pair.until([&] { return pair.ends[0]->why_missing(seat_id{1}) == why; }));
      CHECK(pair.until([&] { return pair.ends[1]->why_missing(seat_id{0}) == why; }));
      CHECK(pair.ends[0]->stats().connected == 0);
    };
    tls_wrapper right(secret);
    tls_wrapper wrong("another secret of the tests");
    missing(&right, &wrong, seat_absence::other_secret);
    missing(&right, nullptr, seat_absence::other_wrapper);
    missing(nullptr, &right, seat_absence::other_wrapper);
    CHECK(right.stats().shaken == 0);
    CHECK(right.stats().refused > 0);
    const failure why{.code = errc::seat_missing,
                      .index = 1,
                      .wanted = static_cast<std::uint64_t>(seat_absence::other_wrapper),
                      .found = 1,
                      .where = "training"};
    CHECK(why.message() ==
          "training: seat 1 is missing at the deadline: either its process or this one wraps its connections "
          "in TLS, and the other does not; give all processes a wrapper, or none");
  }

  TEST_CASE("a connection that is changed or cut ends, and none of its bytes are accepted") {
    const auto payload = pattern(40'000);
    for (const int way : {0, 1}) {
      for (const bool is_cut : {false, true}) {
        CAPTURE(way);
        CAPTURE(is_cut);
        tls_wrapper lower(secret);
        tls_wrapper upper(secret);
        pair_over_relay pair(&lower, &upper);
        REQUIRE(pair.join());
        (is_cut ? pair.relay.cuts : pair.relay.tampers).store(way);
        const auto from = static_cast<std::uint32_t>(way);  // the listener is seat 0
        pair.send(from, payload);
        CHECK(pair.until([&] { return !pair.heard[0].deaths.empty() && !pair.heard[1].deaths.empty(); }));
        for (const recorder& each : pair.heard) {
          for (const heard_frame& frame : each.frames)
            CHECK(frame.bytes == payload);
        }
        const tls_stats there = (way == 1 ? lower : upper).stats();
        CHECK((is_cut ? there.cut : there.tampered) >= 1);
      }
    }
  }

  TEST_CASE("what a process sent before it was killed still comes, and its death is certain") {
    const auto addresses = free_addresses(2);
    const auto payload = pattern(300'000);
    const ::pid_t child = ::fork();  // before this process has threads
    REQUIRE(child >= 0);
    const auto run = [&](std::uint32_t seat, auto work) {
      tls_wrapper tls(secret);
      socket_endpoint end(
          {.seat = seat_id{seat}, .seats = 2, .addresses = addresses, .secret = secret, .wrapper = &tls});
      recorder heard;
      for (int i = 0; i < 2'000 && end.stats().connected == 0; ++i)
        static_cast<void>(end.poll(socket_world::in(10 * ms), heard));
      work(end, heard);
    };
    if (child == 0) {
      run(1, [&](socket_endpoint& end, recorder& heard) {
        static_cast<void>(end.send(seat_id{0},
                                   {.bytes = static_cast<std::uint32_t>(payload.size()), .tag = 1}, payload,
                                   socket_world::in(10'000 * ms), heard));
        static_cast<void>(end.poll(socket_world::in(300 * ms), heard));
        ::kill(::getpid(), SIGKILL);
      });
      ::_exit(1);
    }
    run(0, [&](socket_endpoint& end, recorder& heard) {
      for (int i = 0; i < 2'000 && heard.deaths.empty(); ++i)
        static_cast<void>(end.poll(socket_world::in(10 * ms), heard));
      REQUIRE(heard.frames.size() == 1);
      CHECK(heard.frames[0].bytes == payload);
      REQUIRE(heard.deaths.size() == 1);
      CHECK(heard.deaths[0].second == comm::death::certain);
    });
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
  }

  TEST_CASE("ranks sum over TLS, and have the bits of the ranks' order") {
    constexpr std::uint32_t ranks = 3;
    const auto addresses = free_addresses(ranks);
    std::array<std::vector<float>, ranks> sums;
    std::vector<std::thread> all;
    for (std::uint32_t i = 0; i < ranks; ++i) {
      all.emplace_back([&, i] {
        tls_wrapper tls(secret);
        socket_endpoint end(
            {.seat = seat_id{i}, .seats = ranks, .addresses = addresses, .secret = secret, .wrapper = &tls});
        communicator over(end);
        over.join(over.after(30'000'000'000)).value();
        std::vector<float> mine(100'000);
        for (std::size_t at = 0; at < mine.size(); ++at)
          mine[at] = static_cast<float>(at * (i + 1)) * 0.1F;
        collective_call call{.by = over.after(30'000'000'000)};
        all_reduce(over, std::as_writable_bytes(std::span(mine)), sum_f32, call).value();
        barrier(over, call).value();
        sums[i] = std::move(mine);
      });
    }
    for (std::thread& each : all)
      each.join();
    for (std::size_t at = 0; at < sums[0].size(); ++at) {
      float right = static_cast<float>(at) * 0.1F;
      right += static_cast<float>(at * 2) * 0.1F;
      right += static_cast<float>(at * 3) * 0.1F;
      REQUIRE(sums[0][at] == right);
    }
    CHECK(sums[1] == sums[0]);
    CHECK(sums[2] == sums[0]);
  }

  TEST_CASE("a wrapper without a secret or a linger time, and one for Unix sockets, are refused") {
    CHECK(text_of([] { const tls_wrapper none(""); }) ==
          "tls_wrapper: the secret is empty, so anyone has it; give all processes the same secret, 16 random "
          "bytes or more");
    CHECK(text_of([] { const tls_wrapper hasty(secret, std::chrono::milliseconds(0)); }) ==
          "tls_wrapper: a linger time of 0 ms; give the other end 1 ms to 24 hours to take what an endpoint "
          "wrote last");
    tls_wrapper tls(secret);
    CHECK(text_of([&] {
            const socket_endpoint end({.seats = 2, .folder = "/tmp", .secret = secret, .wrapper = &tls});
          }) ==
          "socket_endpoint: a wrapper is given, and a folder for Unix sockets, whose bytes never leave this "
          "machine; give addresses for TCP, or no wrapper");
  }

  TEST_CASE("a peer with the secret that only updates its key is refused, and holds up no other connection") {
    tls_wrapper tls(secret);
    detail::descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in where = listen_on_loopback(listener);
    const auto connected = [&] {
      std::pair<detail::descriptor, detail::descriptor> both;
      both.first = detail::descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      REQUIRE(::connect(both.first.get(), reinterpret_cast<sockaddr*>(&where), sizeof(where)) == 0);
      both.second = detail::descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      return both;
    };
    auto good = connected();
    for (const int each : {good.first.get(), good.second.get()})
      ::fcntl(each, F_SETFL, O_NONBLOCK);
    tls_wrapper other(secret);
    const detail::descriptor writer(other.wrap(good.first.get(), true));
    const detail::descriptor reader(tls.wrap(good.second.get(), false));
    auto bad = connected();
    ::fcntl(bad.second.get(), F_SETFL, O_NONBLOCK);
    const detail::descriptor victim(tls.wrap(bad.second.get(), false));
    bad.second.close();
    hostile_peer peer(bad.first.get());
    REQUIRE(peer.is_shaken());
    // Some are allowed, and more with data.
    CHECK(peer.update_keys(64) == 64);
    CHECK(peer.write(1 << 20));
    CHECK(peer.update_keys(1) == 1);
    std::vector<std::byte> into(65536);
    std::uint64_t seen = 0;
    for (int i = 0; i < 100'000 && seen < 1 << 20; ++i) {
      const ssize_t got = ::recv(victim.get(), into.data(), into.size(), MSG_DONTWAIT);
      if (got > 0) {
        seen += static_cast<std::uint64_t>(got);
      } else {
        ::usleep(500);
      }
    }
    CHECK(seen == 1 << 20);
    CHECK(tls.stats().tampered == 0);
    CHECK(peer.update_keys(100'000) < 100'000);
    ssize_t end = -1;
    for (int i = 0; i < 100'000 && (end = ::recv(victim.get(), into.data(), 1, MSG_DONTWAIT)) != 0; ++i)
      ::usleep(500);
    CHECK(end == 0);
    CHECK(tls.stats().tampered == 1);
    CHECK(::send(writer.get(), into.data(), 5, MSG_NOSIGNAL) == 5);
    ssize_t got = -1;
    for (int i = 0; i < 100'000 && (got = ::recv(reader.get(), into.data(), 5, MSG_DONTWAIT)) < 0; ++i)
      ::usleep(500);
    CHECK(got == 5);
  }

  TEST_CASE("the last bytes of an endpoint arrive, even if the other end sends meanwhile") {
    // However slow this machine is.
    tls_wrapper one(secret, std::chrono::minutes(5));
    tls_wrapper other(secret, std::chrono::minutes(5));
    detail::descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in where = listen_on_loopback(listener);
    detail::descriptor caller(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::connect(caller.get(), reinterpret_cast<sockaddr*>(&where), sizeof(where)) == 0);
    detail::descriptor called(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    ::fcntl(caller.get(), F_SETFL, O_NONBLOCK);
    ::fcntl(called.get(), F_SETFL, O_NONBLOCK);
    detail::descriptor writer(one.wrap(caller.get(), true));
    detail::descriptor reader(other.wrap(called.get(), false));
    caller.close();
    called.close();
    const auto until = [](auto is) {
      for (int i = 0; i < 100'000 && !is(); ++i)
        ::usleep(500);
    };
    until([&] { return one.stats().shaken == 1 && other.stats().shaken == 1; });
    // As much as the sockets in between take, so that some of it is on its way at the end.
    const std::vector<std::byte> part(65536);
    std::uint64_t written = 0;
    for (int idle = 0; idle < 40; ++idle) {
      const ssize_t went = ::send(writer.get(), part.data(), part.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (went > 0) {
        written += static_cast<std::uint64_t>(went);
        idle = 0;
      } else {
        ::usleep(500);
      }
    }
    writer.close();
    CHECK(::send(reader.get(), part.data(), 5, MSG_NOSIGNAL) == 5);
    // A wrapper that has sent all by now takes and drops them, and counts none.
    for (int i = 0; i < 200 && one.stats().bytes_in != 5; ++i)
      ::usleep(500);
    std::uint64_t seen = 0;
    std::vector<std::byte> into(65536);
    until([&] {
      ssize_t got = 0;
      while ((got = ::recv(reader.get(), into.data(), into.size(), MSG_DONTWAIT)) > 0)
        seen += static_cast<std::uint64_t>(got);
      return got == 0;
    });
    CHECK(written > 0);
    CHECK(seen == written);
    CHECK(other.stats().cut == 0);
  }

  TEST_CASE(
      "what an endpoint wrote last arrives, also if the other one sends much after that and reads late") {
    // However slow this machine is.
    tls_wrapper one(secret, std::chrono::minutes(5));
    tls_wrapper other(secret, std::chrono::minutes(5));
    detail::descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in where = listen_on_loopback(listener);
    detail::descriptor caller(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::connect(caller.get(), reinterpret_cast<sockaddr*>(&where), sizeof(where)) == 0);
    detail::descriptor called(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    ::fcntl(caller.get(), F_SETFL, O_NONBLOCK);
    ::fcntl(called.get(), F_SETFL, O_NONBLOCK);
    detail::descriptor writer(one.wrap(caller.get(), true));
    detail::descriptor reader(other.wrap(called.get(), false));
    caller.close();
    called.close();
    const auto until = [](auto is) {
      for (int i = 0; i < 100'000 && !is(); ++i)
        ::usleep(500);
    };
    until([&] { return one.stats().shaken == 1 && other.stats().shaken == 1; });
    // As much as the sockets in between take, so that some of it is on its way at the end.
    const std::vector<std::byte> part(65536);
    std::uint64_t written = 0;
    for (int idle = 0; idle < 40; ++idle) {
      const ssize_t went = ::send(writer.get(), part.data(), part.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (went > 0) {
        written += static_cast<std::uint64_t>(went);
        idle = 0;
      } else {
        ::usleep(500);
      }
    }
    writer.close();
    // The reader takes what is in its socket, so that its wrapper sends all, and then it sends more than the
    // sockets hold: the writer's wrapper must take that.
    std::uint64_t seen = 0;
    std::vector<std::byte> into(65536);
    std::uint64_t sent = 0;
    const auto read_some = [&] {
      const ssize_t got = ::recv(reader.get(), into.data(), into.size(), MSG_DONTWAIT);
      if (got > 0) seen += static_cast<std::uint64_t>(got);
      return got;
    };
    for (int idle = 0; idle < 200 && sent < 16 << 20; ++idle) {
      const ssize_t went = ::send(reader.get(), part.data(), part.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (went > 0) {
        sent += static_cast<std::uint64_t>(went);
        idle = 0;
      } else {
        ::usleep(500);
        if (seen < written / 4) static_cast<void>(read_some());
      }
    }
    until([&] {
      ssize_t got = 0;
      while ((got = read_some()) > 0) {
      }
      return got == 0;
    });
    CHECK(written > 0);
    CHECK(seen == written);
    CHECK(other.stats().cut == 0);
  }
}
#endif
