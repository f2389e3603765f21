// Sealed frames, and an attacker in the network that changes, forges, repeats, withholds or reflects them.
#include <llmmem/comm/detail/frame_seal.hpp>
#include <llmmem/comm/socket_endpoint.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "support/socket_world.hpp"
#include "support/tampering_link.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using detail::frame_seal;
using detail::frame_sort;
using detail::socket_lane;

namespace {

using bytes = tampering_link::bytes;

detail::wire_proof key_of(std::uint8_t first) {
  detail::wire_proof key{};
  for (std::size_t i = 0; i < key.size(); ++i)
    key[i] = std::byte(first + i);
  return key;
}

struct sealed_head {
  std::array<std::byte, detail::wire_header_bytes> head{};

  sealed_head(const frame_seal& seal, std::span<const std::byte> content, std::uint64_t number) {
    detail::write_header({{.epoch = 7, .bytes = static_cast<std::uint32_t>(content.size())},
                          socket_lane::data,
                          frame_sort::frame,
                          static_cast<std::uint32_t>(number)},
                         head);
    seal.close(head, content, number);
  }
};

/// Two endpoints over TCP and somebody between them. Seat 1 has called seat 0 by way of that one.
struct watched_pair {
  socket_world world;
  tampering_link link;

  explicit watched_pair(socket_seal first = socket_seal::always, socket_seal second = socket_seal::always)
      : world(socket_kind::tcp, 2, {.frame_bytes = 65536, .spin_ns = 0}),
        link(world.options(0).addresses[0]) {
    socket_options low = world.options(0);
    low.seal = first;
    socket_options high = world.options(1);
    high.addresses[0] = link.address();
    high.seal = second;
    world.ends[0] = std::make_unique<socket_endpoint>(low);
    world.ends[1] = std::make_unique<socket_endpoint>(high);
    REQUIRE(until([&] { return world.is_complete(); }));
  }
  template <class Is>
  bool until(Is is) {
    return world.until([&] {
      link.turn();
      return is();
    });
  }
  /// Seat 0 hears that byte in one frame.
  void say(socket_lane lane, std::byte byte) {
    const std::array content{byte, std::byte{42}, std::byte{43}};
    const frame_header header{.epoch = 1, .message = 3, .bytes = 3, .kind = 9};
    if (lane == socket_lane::told) return world.ends[1]->post(seat_id{0}, header, content);
    world.ends[1]->send(seat_id{0}, header, content, world.in(1000 * ms), world.heard[1]).value();
  }
  [[nodiscard]] std::vector<std::byte> heard(socket_lane lane) const {
    std::vector<std::byte> all;
    for (const heard_frame& each :
         lane == socket_lane::told ? world.heard[0].tellings : world.heard[0].frames)
      all.push_back(each.bytes.at(0));
    return all;
  }
};

/// What somebody in the network may do to the third of five frames, of 3 bytes.
enum class deed : std::uint8_t {
  flips_epoch,
  flips_length,
  flips_tag,
  flips_bytes,
  flips_bytes_tag,
  makes_up,
  repeats,
  turns_round,
  leaves_out,
  reflects,
  takes_from_other_lane
};

}  // namespace

TEST_CASE("a sealed header and its bytes open only with their key and number") {
  const frame_seal seal(key_of(1));
  const std::vector<std::byte> content =
      bytes_of("a frame's bytes, of which there are some more than a word has");
  for (std::size_t size = 0; size <= content.size(); ++size) {
    const std::span<const std::byte> some = std::span(content).first(size);
    const sealed_head made(seal, some, 5);
    CHECK(seal.opens(made.head, 5));
    CHECK_FALSE(seal.opens(made.head, 6));
    CHECK_FALSE(seal.opens(made.head, 5 + (std::uint64_t{1} << 32)));  // the number on the wire is the same
    CHECK_FALSE(frame_seal(key_of(2)).opens(made.head, 5));
    CHECK(seal.opens_bytes(some, frame_seal::bytes_tag(made.head), 5));
    if (size == 0) continue;
    CHECK_FALSE(seal.opens_bytes(some, frame_seal::bytes_tag(made.head), 6));
    CHECK_FALSE(seal.opens_bytes(some.first(size - 1), frame_seal::bytes_tag(made.head), 5));
  }
  const sealed_head made(seal, content, 5);
  for (std::size_t bit = 0; bit < 8 * made.head.size(); ++bit) {
    auto other = made.head;
    other[bit / 8] ^= std::byte(1U << (bit % 8));
    REQUIRE_FALSE(seal.opens(other, 5));
  }
  for (std::size_t bit = 0; bit < 8 * content.size(); ++bit) {
    auto other = content;
    other[bit / 8] ^= std::byte(1U << (bit % 8));
    REQUIRE_FALSE(seal.opens_bytes(other, frame_seal::bytes_tag(made.head), 5));
  }
}

TEST_CASE("each direction of each connection has its own keys, which only its two ends know") {
  const detail::hmac_sha256 secret(bytes_of("the secret of a job"));
  std::array<std::byte, detail::wire_hello_bytes> caller{};
  std::array<std::byte, detail::wire_hello_bytes> listener{};
  const auto fits = [](const frame_seal& out, const frame_seal& in) {
    const sealed_head made(out, {}, 0);
    return in.opens(made.head, 0);
  };
  const detail::lane_seals calls = detail::seals_of(secret, caller, listener, true);
  const detail::lane_seals hears = detail::seals_of(secret, caller, listener, false);
  CHECK(fits(calls.out, hears.in));
  CHECK(fits(hears.out, calls.in));
  CHECK_FALSE(fits(calls.out, calls.in));
  CHECK_FALSE(fits(hears.out, hears.in));
  CHECK_FALSE(fits(calls.out,
                   detail::seals_of(detail::hmac_sha256(bytes_of("another")), caller, listener, false).in));
  for (auto* const hello : {&caller, &listener}) {
    (*hello)[50] ^= std::byte{1};  // another random number
    CHECK_FALSE(fits(calls.out, detail::seals_of(secret, caller, listener, false).in));
    (*hello)[50] ^= std::byte{1};
  }
}

TEST_CASE("any change to a frame in the network ends the connection with its own error") {
  for (const socket_lane lane : {socket_lane::data, socket_lane::told}) {
    for (std::uint8_t what = 0; what <= static_cast<std::uint8_t>(deed::takes_from_other_lane); ++what) {
      CAPTURE(static_cast<int>(lane));
      CAPTURE(static_cast<int>(what));
      watched_pair pair;
      const auto is_ours = [](const bytes& frame) {
        return detail::wire_reader(std::span<const std::byte>(frame).subspan(32)).take<std::uint32_t>() == 3;
      };
      int seen = 0;
      std::vector<bytes> kept;
      pair.link.tamper = [&](socket_lane of, link_way way, const bytes& frame) -> std::vector<bytes> {
        const bool is_end_of_other = deed(what) == deed::takes_from_other_lane && of != lane;
        if (way == link_way::to_listener && is_end_of_other && is_ours(frame)) kept.push_back(frame);
        if (of != lane || way != link_way::to_listener || !is_ours(frame)) return {frame};
        if (++seen != 3) {
          if (kept.empty() || deed(what) != deed::turns_round) return {frame};
          return {frame, std::exchange(kept, {}).front()};
        }
        bytes other = frame;
        switch (deed(what)) {
          case deed::flips_epoch:
            other[8] ^= std::byte{1};
            break;
          case deed::flips_length:
            other[32] ^= std::byte{1};
            break;
          case deed::flips_tag:
            other[0] ^= std::byte{1};
            break;
          case deed::flips_bytes:
            other[66] ^= std::byte{1};
            break;
          case deed::flips_bytes_tag:
            other[56] ^= std::byte{1};
            break;
          case deed::makes_up:
            detail::write_header(
                {{.epoch = 1, .message = 3, .bytes = 3, .kind = 9}, lane, frame_sort::frame, 2},
                std::span<std::byte, detail::wire_header_bytes>(other.data(), 64));
            break;
          case deed::repeats:
            return {frame, frame};
          case deed::turns_round:
            kept.push_back(frame);
            return {};
          case deed::leaves_out:
            return {};
          case deed::reflects:
            pair.link.inject(lane, link_way::to_caller, frame);
            return {frame};
          case deed::takes_from_other_lane:
            REQUIRE_FALSE(kept.empty());
            return {kept.front()};
        }
        return {other};
      };
      const socket_lane other_lane = lane == socket_lane::data ? socket_lane::told : socket_lane::data;
      pair.say(other_lane, std::byte{9});
      REQUIRE(pair.until([&] { return pair.heard(other_lane).size() == 1; }));
      // Whose frame it is hears it: seat 0, or by reflection its sender.
      const std::uint32_t victim = deed(what) == deed::reflects ? 1 : 0;
      const seat_id peer{1 - victim};
      for (std::uint8_t i = 1; i <= 5 && pair.world.ends[1]->is_connected(seat_id{0}); ++i)
        pair.say(lane, std::byte{i});
      REQUIRE(pair.until([&] { return !pair.world.heard[victim].deaths.empty(); }));
      CHECK(pair.world.heard[victim].deaths.front() == std::pair{to_index(peer), comm::death::suspected});
      CHECK(pair.world.ends[victim]->stats().forged == 1);
      CHECK(pair.world.ends[victim]->stats().malformed == 0);
      CHECK(pair.world.ends[victim]->why_failed(peer) == errc::frame_forged);
      const auto sent = pair.world.ends[victim]->send(peer, {}, {}, {0}, pair.world.heard[victim]);
      CHECK(sent.code() == errc::frame_forged);
      // What was sent before is heard, and nothing behind it.
      std::vector<std::byte> right{std::byte{1}, std::byte{2}};
      if (deed(what) == deed::repeats) right.push_back(std::byte{3});
      if (victim == 0) CHECK(pair.heard(lane) == right);
      if (victim == 1) CHECK(pair.world.heard[1].tellings.empty());
      if (victim == 1) CHECK(pair.world.heard[1].frames.empty());
    }
  }
}

TEST_CASE("frames are sealed if either side asks for it, and not sealed if neither does") {
  using enum socket_seal;
  struct {
    socket_seal first;
    socket_seal second;
    bool is_sealed;
  } const cases[] = {
      {always, never, true}, {never, always, true}, {never, never, false}, {off_machine, off_machine, false}};
  for (const auto& each : cases) {
    watched_pair pair(each.first, each.second);
    // A checksum that was made again for what was changed shows nothing.
    pair.link.tamper = [](socket_lane lane, link_way, const bytes& frame) -> std::vector<bytes> {
      bytes other = frame;
      if (lane == socket_lane::data) other.at(64) ^= std::byte{1};
      return {other};
    };
    pair.say(socket_lane::data, std::byte{6});
    REQUIRE(pair.until(
        [&] { return !pair.heard(socket_lane::data).empty() || !pair.world.heard[0].deaths.empty(); }));
    CHECK(pair.heard(socket_lane::data).empty() == each.is_sealed);
    CHECK(pair.world.ends[0]->stats().forged == (each.is_sealed ? 1 : 0));
  }
}

TEST_CASE("frames are sealed by default if an address is on another machine, and never without a secret") {
  const auto asks = [](socket_options options) {
    options.seats = 2;
    return detail::hello_of(detail::socket_setup(std::move(options))).asks_for_seals;
  };
  const auto tcp = [](const std::string& other, socket_seal seal = socket_seal::off_machine) {
    return socket_options{.addresses = {"127.0.0.1:4000", other},
                          .secret = "s",
                          .reach = socket_reach::any_machine,
                          .seal = seal};
  };
  CHECK_FALSE(asks(tcp("127.0.0.1:4001")));
  CHECK_FALSE(asks(tcp("[::1]:4001")));
  CHECK(asks(tcp("10.1.2.3:4001")));
  CHECK(asks(tcp("[2001:db8::1]:4001")));
  CHECK_FALSE(asks(tcp("10.1.2.3:4001", socket_seal::never)));
  CHECK(asks(tcp("127.0.0.1:4001", socket_seal::always)));
  const temporary_folder own;
  CHECK_FALSE(asks({.folder = own.path().string()}));
  CHECK(asks({.folder = own.path().string(), .secret = "s", .seal = socket_seal::always}));
  CHECK_THROWS_WITH_AS(asks({.folder = "/tmp", .seal = socket_seal::always}),
                       "socket_endpoint: seal is socket_seal::always and the secret is empty, so anyone can "
                       "make the seals; give all processes the same secret, 16 random bytes or more",
                       argument_error);
}
