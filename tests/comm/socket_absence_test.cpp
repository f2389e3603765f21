// What an endpoint knows of a seat where nobody is connected, and what joining says of it.
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/socket_endpoint.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "support/socket_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::array both_kinds{socket_kind::local, socket_kind::tcp};

/// Somebody who is no endpoint listens at a seat's address.
class raw_listener {
 public:
  explicit raw_listener(const socket_options& of) : where_(address_of(of)) {
    socket_ = detail::descriptor(::socket(where_.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::bind(socket_.get(), where_.get(), where_.size) == 0);
    REQUIRE(::listen(socket_.get(), 16) == 0);
  }
  /// Answers whoever has called: hears a hello, and says that.
  void answer(std::span<const std::byte> bytes) const {
    pollfd asked{socket_.get(), POLLIN, 0};
    if (::poll(&asked, 1, 1000) != 1) return;
    const detail::descriptor made(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    std::array<std::byte, detail::wire_hello_bytes> hello{};
    static_cast<void>(::recv(made.get(), hello.data(), hello.size(), MSG_WAITALL));
    static_cast<void>(::send(made.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
  }

 private:
  detail::socket_address where_;
  detail::descriptor socket_;
};

/// What is known in seat `at` of the other of two, once it is no longer `no_contact` or `no_listener`.
seat_absence learned(socket_world& world, std::uint32_t at) {
  seat_absence known{};
  const auto knows = [&] {
    known = world.ends[at]->why_missing(seat_id{1 - at});
    return known != seat_absence::no_contact && known != seat_absence::no_listener;
  };
  CHECK(world.until(knows));
  return known;
}

std::array<std::byte, detail::wire_hello_bytes> hello_bytes(seat_id from, seat_id to) {
  std::array<std::byte, detail::wire_hello_bytes> bytes{};
  detail::write_hello({.from = from, .to = to, .seats = 2, .frame_bytes = 1U << 20}, bytes);
  return bytes;
}

}  // namespace

TEST_CASE("two processes with different secrets both learn that") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2);
    world.start(0);
    socket_options options = world.options(1);
    options.secret = "another";
    world.ends[1] = std::make_unique<socket_endpoint>(options);
    CHECK(learned(world, 0) == seat_absence::other_secret);
    CHECK(learned(world, 1) == seat_absence::other_secret);
    // Once the right one has come it is forgotten.
    world.ends[1].reset();
    world.start(1);
    REQUIRE(world.until([&] { return world.is_complete(); }));
    CHECK(world.ends[0]->why_missing(seat_id{1}) == seat_absence::no_contact);
    CHECK(world.ends[1]->why_missing(seat_id{0}) == seat_absence::no_contact);
  }
}

TEST_CASE(
    "two processes with different setups both learn that, also if one names a seat that does not exist") {
  for (const bool is_of_frames : {false, true}) {
    socket_world world(socket_kind::local, 2);
    world.start(0);
    socket_options options = world.options(1);
    if (is_of_frames) options.frame_bytes *= 2;
    if (!is_of_frames) options.seats = 3;
    world.ends[1] = std::make_unique<socket_endpoint>(options);
    CHECK(learned(world, 0) == seat_absence::other_options);
    CHECK(learned(world, 1) == seat_absence::other_options);
    options.seat = seat_id{2};
    options.seats = 3;
    socket_endpoint beyond(options);
    recorder heard;
    CHECK(world.until([&] {
      static_cast<void>(beyond.poll(world.in(ms), heard));
      return beyond.why_missing(seat_id{0}) == seat_absence::other_options;
    }));
  }
}

TEST_CASE("a stranger that claims the seat of a connected process has no effect") {
  socket_world world(socket_kind::tcp, 2);
  REQUIRE(world.join());
  const raw_caller caller(address_of(world.options(0)));
  REQUIRE(caller.say(hello_bytes(seat_id{1}, seat_id{0})));
  REQUIRE(caller.say(std::vector<std::byte>(detail::wire_proof_bytes)));
  REQUIRE(world.until([&] { return world.ends[0]->stats().unauthenticated == 1; }));
  world.ends[1].reset();
  REQUIRE(world.until([&] { return !world.ends[0]->is_connected(seat_id{1}); }));
  CHECK(world.ends[0]->why_missing(seat_id{1}) == seat_absence::no_contact);
}

TEST_CASE("a join reports whether no process listens, a process is silent, or nothing has arrived") {
  for (const socket_kind kind : both_kinds) {
    const socket_world world(kind, 2, {.handshake_ns = 40 * ms});
    {
      socket_endpoint end(world.options(1));
      communicator ranks(end, {.name = "job"});
      CHECK(ranks.join(ranks.after(50 * ms)).error().message() ==
            "job: seat 0 is missing at the deadline: no process listens at its address; start its process, "
            "and give all processes the same folder or addresses");
      const raw_listener mute(world.options(0));
      CHECK(ranks.join(ranks.after(500 * ms)).error().message() ==
            "job: seat 0 is missing at the deadline: its process is connected but silent; let it call "
            "join(), or check why it is stopped");
    }
    if (kind == socket_kind::local) ::unlink((world.folder() + "/seat-0.sock").c_str());
    socket_endpoint end(world.options(0));
    communicator ranks(end, {.name = "job"});
    CHECK(ranks.join(ranks.after(50 * ms)).error().message() ==
          "job: seat 1 is missing at the deadline: nothing has arrived from it; start its process, and give "
          "all processes the same folder or addresses");
  }
}

TEST_CASE("an unreachable address is distinguished from one where no process listens") {
  auto addresses = free_addresses(2);
  addresses[0] = "255.255.255.255:80";
  socket_endpoint end({.seat = seat_id{1},
                       .seats = 2,
                       .addresses = addresses,
                       .secret = "s",
                       .reach = socket_reach::any_machine});
  communicator ranks(end);
  CHECK(ranks.join(ranks.after(30 * ms)).error().wanted ==
        static_cast<std::uint64_t>(seat_absence::unreachable));
}

TEST_CASE("both sides learn of a different protocol version, and count it") {
  for (const socket_kind kind : both_kinds) {
    auto other = hello_bytes(seat_id{1}, seat_id{0});
    other[4] ^= std::byte{0x40};
    {
      socket_world world(kind, 2);
      world.start(0);
      const raw_caller caller(address_of(world.options(0)));
      REQUIRE(caller.say(other));
      CHECK(learned(world, 0) == seat_absence::other_version);
      CHECK(world.ends[0]->stats().other_version == 1);
      CHECK(world.ends[0]->stats().unauthenticated == 1);
      // It is told which version is here.
      std::array<std::byte, detail::wire_hello_bytes> said{};
      REQUIRE(caller.hear(said));
      CHECK(detail::wire_reader(said).take<std::uint32_t>() == detail::wire_magic);
      CHECK_FALSE(detail::is_other_version(said));
      CHECK(caller.is_closed());
    }
    socket_world world(kind, 2);
    const raw_listener listener(world.options(0));
    world.start(1);
    world.turn();
    listener.answer(other);
    CHECK(learned(world, 1) == seat_absence::other_version);
    CHECK(world.ends[1]->stats().other_version == 1);
  }
}

TEST_CASE("a caller that reaches another seat's process learns it, and so does that process") {
  const auto right = free_addresses(3);
  socket_options options{.seats = 3, .addresses = right, .secret = "s"};
  options.seat = seat_id{1};
  socket_endpoint one(options);
  options.seat = seat_id{2};
  options.addresses = {right[1], right[0], right[2]};
  socket_endpoint two(options);
  recorder heard;
  const deadline by = socket_world::in(20'000 * ms);
  while (two.why_missing(seat_id{0}) != seat_absence::other_seat && two.now_ns() < by.ns) {
    static_cast<void>(one.poll(socket_world::in(ms), heard));
    static_cast<void>(two.poll(socket_world::in(ms), heard));
  }
  CHECK(two.why_missing(seat_id{0}) == seat_absence::other_seat);
  CHECK(one.why_missing(seat_id{2}) == seat_absence::other_seat);
}

TEST_CASE("a join distinguishes strangers from an empty address") {
  for (const socket_kind kind : both_kinds) {
    const std::vector<std::byte> garbage(detail::wire_hello_bytes, std::byte{0x55});
    {
      socket_world world(kind, 2);
      world.start(0);
      const raw_caller caller(address_of(world.options(0)));
      REQUIRE(caller.say(garbage));
      CHECK(learned(world, 0) == seat_absence::foreign);
    }
    for (const bool hangs_up : {false, true}) {
      socket_world world(kind, 2);
      const raw_listener listener(world.options(0));
      world.start(1);
      world.turn();
      listener.answer(std::span(garbage).first(hangs_up ? 0 : garbage.size()));
      CHECK(learned(world, 1) == seat_absence::foreign);
    }
  }
}

TEST_CASE("a process that is given up learns it, and the process that gave it up waits for a fresh one") {
  for (const socket_kind kind : both_kinds) {
    for (const std::uint32_t giver : {0U, 1U}) {
      socket_world world(kind, 2);
      REQUIRE(world.join());
      world.ends[giver]->give_up(seat_id{1 - giver});
      CHECK(learned(world, 1) == seat_absence::given_up);
      CHECK(learned(world, 0) == seat_absence::ended);
    }
  }
}

TEST_CASE("a newcomer learns that the others consider its seat taken") {
  socket_world world(socket_kind::tcp, 2);
  REQUIRE(world.join());
  socket_endpoint newcomer(world.options_elsewhere(1));
  recorder heard;
  CHECK(world.until([&] {
    static_cast<void>(newcomer.poll(world.in(ms), heard));
    return newcomer.why_missing(seat_id{0}) == seat_absence::seat_taken;
  }));
  CHECK(newcomer.why_missing(no_seat) == seat_absence::no_contact);
}
