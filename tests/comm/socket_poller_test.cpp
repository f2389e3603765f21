/// The event loop of a socket endpoint, over plain socket pairs.
#include <llmmem/comm/detail/socket_poller.hpp>

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "support/socket_pair.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using detail::event_key;
using detail::ready_event;
using detail::socket_event;
using detail::socket_poller;

namespace {

constexpr std::uint64_t poll_ms = 1'000'000;
/// A signal, or a system that is suspended, ends a wait early: a test that needs a whole one waits again.
constexpr int tries = 100;

/// The events of one wait.
struct waited {
  std::vector<ready_event> events;
  bool is_hot_ready;
};

waited wait_for(socket_poller& poller, std::uint64_t ns, int writable = -1, int hot = -1) {
  poller.begin();
  poller.clock().restart_timers();
  socket_poller::event_array all{};
  const auto found = poller.wait(poller.clock().now() + ns, writable, hot, all);
  waited result{{}, found.is_hot_ready};
  for (std::size_t i = 0; i < found.events; ++i)
    result.events.emplace_back(all[i]);
  return result;
}

}  // namespace

TEST_CASE("a key returns its kind, its index and the low bits of its generation") {
  for (const auto of : {socket_event::listener, socket_event::candidate, socket_event::process}) {
    for (const std::uint32_t generation : {0U, 1U, 0xFF'FFFFU, 0x100'0000U, 0xFFFF'FFFFU}) {
      for (const std::uint32_t index : {0U, 7U, 0xFFFF'FFFFU}) {
        epoll_event raw{};
        raw.events = EPOLLIN;
        raw.data.u64 = event_key(of, generation, index);
        const ready_event event(raw);
        CHECK(event.of == of);
        CHECK(event.index == index);
        CHECK(event.is_of(generation));
        CHECK_FALSE(event.is_of(generation + 1));
        CHECK(event.is_readable);
        CHECK_FALSE(event.is_writable);
      }
    }
  }
}

TEST_CASE("a broken socket counts as readable, so that its reader finds out") {
  epoll_event raw{};
  raw.events = EPOLLHUP | EPOLLERR;
  CHECK(ready_event(raw).is_readable);
  raw.events = EPOLLOUT;
  CHECK_FALSE(ready_event(raw).is_readable);
  CHECK(ready_event(raw).is_writable);
}

TEST_CASE("a wait reports ready sockets by their keys, as last registered") {
  socket_poller poller(true);
  socket_pair pair;
  const std::uint64_t key = event_key(socket_event::data, 3, 5);
  REQUIRE(poller.add(pair.here.get(), EPOLLIN, key));
  CHECK_FALSE(poller.add(pair.here.get(), EPOLLIN, key));  // it is there already
  CHECK(wait_for(poller, 0).events.empty());
  pair.say_there("x");
  auto found = wait_for(poller, 1000 * poll_ms);
  REQUIRE(found.events.size() == 1);
  CHECK(found.events[0].of == socket_event::data);
  CHECK(found.events[0].index == 5);
  CHECK(found.events[0].is_of(3));
  REQUIRE(poller.change(pair.here.get(), EPOLLOUT, event_key(socket_event::data, 4, 6)));
  found = wait_for(poller, 1000 * poll_ms);
  REQUIRE(found.events.size() == 1);
  CHECK(found.events[0].index == 6);
  CHECK(found.events[0].is_writable);
  poller.remove(pair.here.get());
  poller.remove(-1);
  CHECK(wait_for(poller, 0).events.empty());
  CHECK_FALSE(poller.change(pair.here.get(), EPOLLIN, key));
}

TEST_CASE("a wait ends at its deadline, or at the next timer if that comes first") {
  socket_poller poller(true);
  const auto takes = [&](std::uint64_t until, std::uint64_t timer) {
    poller.begin();
    poller.clock().restart_timers();
    poller.clock().due(poller.clock().now() + timer);
    const std::uint64_t began = poller.clock().now();
    socket_poller::event_array all{};
    CHECK(poller.wait(began + until, -1, -1, all).events == 0);
    CHECK(poller.clock().is_look_due() == poller.clock().is_due());  // it has looked
    return poller.clock().now() - began;
  };
  std::uint64_t longest = 0;
  for (int waits = 0; waits < tries && longest < 5 * poll_ms; ++waits)
    longest = takes(5 * poll_ms, 40 * poll_ms);
  CHECK(longest >= 5 * poll_ms);
  CHECK(takes(20'000 * poll_ms, 5 * poll_ms) < 10'000 * poll_ms);
}

TEST_CASE("a wait counts as listened for as long as it may have lasted, and at most 50 ms longer") {
  socket_poller poller(true);
  for (int waits = 0; waits < tries && poller.clock().listened() < 10 * poll_ms; ++waits)
    static_cast<void>(wait_for(poller, 10 * poll_ms));
  CHECK(poller.clock().listened() >= 10 * poll_ms);
  const std::uint64_t before = poller.clock().listened();
  poller.begin();
  ::usleep(120'000);  // as a process that is stopped just before it waits
  socket_poller::event_array all{};
  static_cast<void>(poller.wait(poller.clock().now(), -1, -1, all));
  CHECK(poller.clock().listened() - before == detail::timer_ns);
}

TEST_CASE("any thread can wake the present wait or the next") {
  socket_poller poller(false);
  const auto is_woken = [&] {
    for (int waits = 0; waits < tries && !poller.is_woken(); ++waits) {
      for (const ready_event& each : wait_for(poller, 20'000 * poll_ms).events)
        if (each.of == socket_event::wake) poller.note_wake();
    }
    const bool was = poller.is_woken();
    poller.forget_wake();
    CHECK_FALSE(poller.is_woken());
    return was;
  };
  poller.wake();
  poller.wake();  // twice is once
  CHECK(is_woken());
  CHECK(wait_for(poller, 0).events.empty());
  std::thread late([&] {
    ::usleep(10'000);
    poller.wake();
  });
  CHECK(is_woken());
  late.join();
}

TEST_CASE("a wait ends when a socket that epoll does not know can be written to") {
  socket_poller poller(true);
  socket_pair pair;
  pair.fill_here();
  CHECK(wait_for(poller, 2 * poll_ms, pair.here.get()).events.empty());
  std::thread late([&] {
    ::usleep(10'000);
    pair.drain_there();
  });
  // Each wait ends with the timers; the last one ends because there is room.
  while (pair.is_full_here())
    static_cast<void>(wait_for(poller, 20'000 * poll_ms, pair.here.get()));
  late.join();
  socket_pair other;
  REQUIRE(poller.add(other.here.get(), EPOLLIN, event_key(socket_event::told, 0, 1)));
  // What is with epoll is reported as well.
  pair.fill_here();
  other.say_there("y");
  const waited found = wait_for(poller, 1000 * poll_ms, pair.here.get());
  REQUIRE(found.events.size() == 1);
  CHECK(found.events[0].of == socket_event::told);
}

TEST_CASE("a hot socket ends a wait without epoll, together with the sockets that epoll reports") {
  socket_poller poller(true);
  socket_pair hot;
  socket_pair other;
  REQUIRE(poller.add(other.here.get(), EPOLLIN, event_key(socket_event::data, 0, 9)));
  CHECK_FALSE(wait_for(poller, 0, -1, hot.here.get()).is_hot_ready);
  hot.say_there("z");
  waited found = wait_for(poller, 1000 * poll_ms, -1, hot.here.get());
  CHECK(found.is_hot_ready);
  CHECK(found.events.empty());
  other.say_there("z");
  found = wait_for(poller, 1000 * poll_ms, -1, hot.here.get());
  CHECK(found.is_hot_ready);
  REQUIRE(found.events.size() == 1);
  CHECK(found.events[0].index == 9);
}
