// What every endpoint does, whatever carries its frames: what works in simulation works over sockets.
#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/socket_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint32_t frame_bytes = 5000;
constexpr std::uint32_t last_tag = 99;

/// Runs `body(end)` for each of two seats at once, over every kind of endpoint.
template <class Body>
void over_each_kind(Body body) {
  const auto in_two_threads = [](auto live) {
    std::thread other([&] { live(seat_id{1}); });
    live(seat_id{0});
    other.join();
  };
  SUBCASE("simulated") {
    testing::sim_network net({.seats = 2, .frame_bytes = frame_bytes});
    net.run([&](testing::sim_endpoint& end) { body(end); });
  }
  SUBCASE("threads") {
    thread_network net(2, {.frame_bytes = frame_bytes, .copied_bytes = 100});
    in_two_threads([&](seat_id seat) {
      thread_endpoint end(net, seat);
      body(end);
    });
  }
  SUBCASE("Unix sockets") {
    const socket_world world(socket_kind::local, 2, {.frame_bytes = frame_bytes});
    in_two_threads([&](seat_id seat) {
      socket_endpoint end(world.options(to_index(seat)));
      body(end);
    });
  }
  SUBCASE("TCP") {
    const socket_world world(socket_kind::tcp, 2, {.frame_bytes = frame_bytes});
    in_two_threads([&](seat_id seat) {
      socket_endpoint end(world.options(to_index(seat)));
      body(end);
    });
  }
}

[[nodiscard]] bool has_ended(const recorder& heard) {
  return !heard.tellings.empty() && heard.tellings.back().header.tag == last_tag;
}

/// Takes what comes until it is so, or for 20 s.
template <class End, class Is>
[[nodiscard]] bool until(End& end, recorder& heard, Is is) {
  const deadline by{end.now_ns() + 20'000 * ms};
  while (!is() && end.now_ns() < by.ns)
    static_cast<void>(end.poll(by, heard));
  return is();
}

/// Seat 0 does something to seat 1; both leave when seat 1 has heard all of it.
template <class Speak, class Hear>
void speak_and_hear(Speak speak, Hear hear) {
  over_each_kind([&](auto& end) {
    recorder heard;
    const seat_id other{1 - to_index(end.self())};
    CHECK(until(end, heard, [&] { return end.is_connected(other); }));
    if (end.self() == seat_id{0}) {
      speak(end, heard);
      end.post(other, {.tag = last_tag}, {});
      CHECK(until(end, heard, [&] { return has_ended(heard); }));
    } else {
      CHECK(until(end, heard, [&] { return has_ended(heard); }));
      hear(end, heard);
      end.post(other, {.tag = last_tag}, {});
      CHECK(until(end, heard, [&] { return !end.is_connected(other); }));
    }
  });
}

}  // namespace

TEST_CASE("a frame carries its true length, regardless of what its sender wrote there") {
  const std::vector<std::byte> bytes(frame_bytes, std::byte{7});
  const std::vector<std::pair<std::uint32_t, std::size_t>> said_and_sent{
      {0, 8}, {100, 8}, {0, 0}, {5, 0}, {1, frame_bytes}, {~0U, frame_bytes}};
  speak_and_hear(
      [&](auto& end, recorder& heard) {
        const deadline by{end.now_ns() + 20'000 * ms};
        for (const auto& [said, sent] : said_and_sent) {
          const frame_header header{.message = sent, .bytes = said, .tag = 1};
          const std::span<const std::byte> part(bytes.data(), sent);
          CHECK(end.send(seat_id{1}, header, part, by, heard).has_value());
          if (sent > max_post_bytes) continue;
          end.post(seat_id{1}, header, part);
        }
      },
      [&](auto& end, recorder& heard) {
        CHECK(until(end, heard, [&] { return heard.frames.size() == said_and_sent.size(); }));
        CHECK(heard.tellings.size() == 5);
        if (heard.frames.size() != said_and_sent.size() || heard.tellings.size() != 5) return;
        for (std::size_t i = 0; i < said_and_sent.size(); ++i) {
          const std::size_t sent = said_and_sent[i].second;
          CHECK(heard.frames[i].header.bytes == sent);
          CHECK(heard.frames[i].bytes.size() == sent);
          CHECK(heard.frames[i].header.message == sent);
          if (i < 4) CHECK(heard.tellings[i].header.bytes == sent);
          if (i < 4) CHECK(heard.tellings[i].bytes.size() == sent);
        }
      });
}

TEST_CASE("a data frame that is too long is refused with both lengths, and a posted one is dropped") {
  const std::vector<std::byte> bytes(frame_bytes + 1);
  speak_and_hear(
      [&](auto& end, recorder& heard) {
        const deadline by{end.now_ns() + 20'000 * ms};
        const frame_header header{.message = 1, .bytes = 1};
        CHECK(end.send(seat_id{1}, header, bytes, by, heard).error() ==
              failure{errc::out_of_range, 1, frame_bytes + 1, frame_bytes});
        // Whoever it is to.
        CHECK(end.send(no_seat, header, bytes, by, heard).code() == errc::out_of_range);
        const std::span<const std::byte> most(bytes.data(), max_post_bytes);
        end.post(seat_id{1}, header, std::span(bytes).first(max_post_bytes + 1));
        end.post(seat_id{1}, header, most);
      },
      [&](auto& /*end*/, recorder& heard) {
        CHECK(heard.frames.empty());
        CHECK(heard.tellings.size() == 2);
        CHECK(heard.tellings[0].bytes.size() == max_post_bytes);
      });
}

TEST_CASE("nothing is sent or posted to an empty seat, to itself, or to a seat that does not exist") {
  speak_and_hear(
      [&](auto& end, recorder& heard) {
        const deadline by{end.now_ns() + 20'000 * ms};
        const auto bytes = bytes_of("to nobody");
        for (const seat_id nobody : {end.self(), seat_id{2}, seat_id{max_seats}, no_seat}) {
          CAPTURE(to_index(nobody));
          CHECK_FALSE(end.is_connected(nobody));
          CHECK(end.send(nobody, {}, bytes, by, heard).error() ==
                failure{errc::peer_failed, to_index(nobody), bytes.size(), 0});
          end.post(nobody, {}, bytes);
          end.withdraw(nobody);
          end.give_up(nobody);
        }
        CHECK(end.is_connected(seat_id{1}));
      },
      [&](auto& end, recorder& heard) {
        CHECK(heard.frames.empty());
        CHECK(heard.tellings.size() == 1);
        CHECK(end.is_connected(seat_id{0}));
      });
}
