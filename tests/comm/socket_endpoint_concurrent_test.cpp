// Endpoints with a thread each, as processes would have them.
#include <llmmem/comm/socket_endpoint.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/socket_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// What a seat sends to another: numbered, of a length and with bytes that follow from the numbers.
struct traffic {
  std::uint64_t seed;
  std::uint32_t most;

  [[nodiscard]] std::vector<std::byte> bytes(std::uint32_t from, std::uint32_t to,
                                             std::uint64_t number) const {
    random_numbers random(seed * 1'000'003 + from * 10'007 + to * 101 + number);
    const std::uint32_t limit = random.once_in(3) ? most : 300;
    std::vector<std::byte> made(random.below(limit + 1));
    for (std::byte& each : made)
      each = static_cast<std::byte>(random.next());
    return made;
  }
};

/// Checks each frame as it comes; sometimes it has no room yet.
class checker {
 public:
  checker(std::uint32_t self, traffic what, std::uint64_t seed) : self_(self), what_(what), random_(seed) {}

  frame_buffer buffer_for(seat_id from, const frame_header& header) noexcept {
    if (random_.once_in(7)) return {frame_buffer::answer::ask_again, {}};
    rooms_[to_index(from)].assign(header.bytes, std::byte{0});
    return {frame_buffer::answer::take, rooms_[to_index(from)]};
  }
  void on_frame(seat_id from, const frame_header& header) noexcept {
    const std::uint32_t i = to_index(from);
    is_right_ &= header.message == frames[i] && header.tag == i;
    is_right_ &= rooms_[i] == what_.bytes(i, self_, frames[i]);
    ++frames[i];
  }
  void on_message(seat_id from, const frame_header& header, std::span<const std::byte> bytes) noexcept {
    const std::uint32_t i = to_index(from);
    is_right_ &= header.message == tellings[i] && bytes.size() == (header.message * 37) % 4097;
    for (const std::byte each : bytes)
      is_right_ &= each == static_cast<std::byte>(i);
    ++tellings[i];
  }
  void on_death(seat_id, comm::death) noexcept { ++deaths; }
  void on_joined(seat_id) noexcept {}
  [[nodiscard]] bool keeps_waiting() const noexcept { return true; }
  [[nodiscard]] bool is_right() const noexcept { return is_right_; }

  std::array<std::uint64_t, 4> frames{};
  std::array<std::uint64_t, 4> tellings{};
  int deaths = 0;

 private:
  std::uint32_t self_;
  traffic what_;
  random_numbers random_;
  bool is_right_ = true;
  std::array<std::vector<std::byte>, 4> rooms_;
};

}  // namespace

TEST_CASE(
    "frames of all sizes between all endpoints arrive complete and in order over the smallest buffers") {
  for (const socket_kind kind : {socket_kind::local, socket_kind::tcp}) {
    for (const auto seed : seeds(3)) {
      CAPTURE(seed);
      constexpr std::uint32_t seats = 3;
      constexpr std::uint64_t count = 60;
      const traffic what{seed, 100'000};
      // TCP waits for its timers when a window is smaller than a packet of the loopback.
      const std::uint32_t buffer = kind == socket_kind::local ? 1 : 65536;
      socket_world world(kind, seats, {.frame_bytes = 100'000, .socket_bytes = buffer, .beat_ns = 2 * ms});
      REQUIRE(world.join());
      std::atomic<std::uint32_t> done{0};
      std::atomic<bool> is_right{true};
      std::vector<std::thread> threads;
      for (std::uint32_t i = 0; i < seats; ++i) {
        threads.emplace_back([&, i] {
          socket_endpoint& end = *world.ends[i];
          checker mine(i, what, seed + i);
          random_numbers random(seed * 7 + i);
          const deadline limit = socket_world::in(60'000 * ms);
          std::array<std::uint64_t, seats> sent{};
          std::array<std::uint64_t, seats> said{};
          std::uint64_t left = (seats - 1) * count;
          while (left != 0) {
            const std::uint32_t to = random.below(seats);
            if (to == i || sent[to] == count) continue;
            const auto bytes = what.bytes(i, to, sent[to]);
            const frame_header header{
                .message = sent[to], .bytes = static_cast<std::uint32_t>(bytes.size()), .tag = i};
            if (!end.send(seat_id{to}, header, bytes, limit, mine)) break;
            ++sent[to];
            --left;
            if (said[to] < 20) {
              const std::vector<std::byte> word((said[to] * 37) % 4097, static_cast<std::byte>(i));
              end.post(seat_id{to}, {.message = said[to]++}, word);
            }
          }
          bool is_done = false;
          while (done.load() != seats && end.now_ns() < limit.ns) {
            bool is_all = left == 0;
            for (std::uint32_t from = 0; from < seats; ++from)
              is_all &= from == i || (mine.frames[from] == count && mine.tellings[from] == 20);
            if (is_all && !is_done) {
              is_done = true;
              ++done;
            }
            static_cast<void>(end.poll({end.now_ns() + ms}, mine));
          }
          if (!is_done || !mine.is_right() || mine.deaths != 0) is_right = false;
        });
      }
      for (std::thread& each : threads)
        each.join();
      CHECK(done.load() == seats);
      CHECK(is_right.load());
    }
  }
}

TEST_CASE("`wake` from another thread ends a poll that waits, or the next one") {
  socket_world world(socket_kind::local, 2);
  REQUIRE(world.join());
  world.run_for(5 * ms);
  for (int i = 0; i < 50; ++i) {
    std::thread waker([&] { world.ends[0]->wake(); });
    const std::uint64_t before = detail::monotonic_ns();
    const bool has_come = world.ends[0]->poll(socket_world::in(20'000 * ms), world.heard[0]);
    CHECK(!has_come);
    CHECK(detail::monotonic_ns() - before < 10'000 * ms);
    waker.join();
  }
}

TEST_CASE("two endpoints that send long frames to each other at the same time both finish") {
  for (const socket_kind kind : {socket_kind::local, socket_kind::tcp}) {
    socket_world world(kind, 2, {.frame_bytes = 8U << 20});
    REQUIRE(world.join());
    std::array<std::size_t, 2> came{};
    std::vector<std::thread> threads;
    for (std::uint32_t i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {
        const std::vector<std::byte> bytes(8U << 20, static_cast<std::byte>(i));
        recorder& mine = world.heard[i];
        const deadline limit = socket_world::in(30'000 * ms);
        for (std::uint64_t n = 0; n < 3; ++n)
          if (!world.ends[i]->send(seat_id{1 - i}, {.message = n, .bytes = 8U << 20}, bytes, limit, mine))
            return;
        while (mine.frames.size() < 3 && world.ends[i]->now_ns() < limit.ns)
          static_cast<void>(world.ends[i]->poll(limit, mine));
        came[i] = mine.frames.size();
      });
    }
    for (std::thread& each : threads)
      each.join();
    CHECK(came == std::array<std::size_t, 2>{3, 3});
    CHECK(world.heard[0].frames[2].bytes == std::vector<std::byte>(8U << 20, std::byte{1}));
  }
}

TEST_CASE(
    "two handlers that send to each other and have no buffer at first are asked again while they wait") {
  struct reluctant : recorder {
    frame_buffer buffer_for(seat_id from, const frame_header& header) noexcept {
      if (!std::exchange(has_refused, true)) return {frame_buffer::answer::ask_again, {}};
      return recorder::buffer_for(from, header);
    }
    bool has_refused = false;
  };
  for (const socket_kind kind : {socket_kind::local, socket_kind::tcp}) {
    constexpr std::uint32_t length = 8U << 20;  // more than lies between them
    socket_world world(kind, 2, {.frame_bytes = length});
    REQUIRE(world.join());
    std::array<error_code, 2> sent{};
    std::array<reluctant, 2> heard;
    std::vector<std::thread> threads;
    threads.reserve(2);
    for (std::uint32_t i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {
        const std::vector<std::byte> bytes(length, static_cast<std::byte>(i));
        const deadline limit = socket_world::in(20'000 * ms);
        socket_endpoint& end = *world.ends[i];
        sent[i] = end.send(seat_id{1 - i}, {.message = length}, bytes, limit, heard[i]).code();
        // One whose sending was done before it was asked for room: the next poll asks again, not this one.
        while (heard[i].frames.empty() && end.now_ns() < limit.ns)
          static_cast<void>(end.poll(socket_world::in(ms), heard[i]));
      });
    }
    for (std::thread& each : threads)
      each.join();
    for (std::uint32_t i = 0; i < 2; ++i) {
      CAPTURE(i);
      CHECK(sent[i] == errc::ok);
      CHECK(heard[i].deaths.empty());
      REQUIRE(heard[i].frames.size() == 1);
      CHECK(heard[i].frames[0].bytes == std::vector<std::byte>(length, static_cast<std::byte>(1 - i)));
    }
  }
}

TEST_CASE("a lack of memory while a seat connects is thrown, and the seat connects once there is memory") {
  for (const std::uint32_t short_one : {0U, 1U}) {
    for (std::uint64_t first = 1; first <= 4; ++first) {
      socket_world world(socket_kind::local, 2);
      world.start();
      std::atomic<int> thrown{0};
      std::atomic<bool> is_over{false};
      std::atomic<bool> is_connected{false};
      socket_endpoint& end = *world.ends[short_one];
      detail::any_frame_handler nothing;
      std::thread poor([&] {
        while (!is_over) {
          try {
            static_cast<void>(end.poll({end.now_ns() + ms}, nothing));
          } catch (const std::bad_alloc&) {
            ++thrown;
          }
          is_connected = end.is_connected(seat_id{1 - short_one});
        }
      });
      {
        const short_heap heap(first, heap_refusal::once);
        const deadline limit = socket_world::in(20'000 * ms);
        while (!is_connected && detail::monotonic_ns() < limit.ns)
          static_cast<void>(world.ends[1 - short_one]->poll(socket_world::in(ms), nothing));
      }
      CHECK(is_connected);
      CHECK(thrown == 1);
      is_over = true;
      poor.join();
      REQUIRE(world.until([&] { return world.is_complete(); }));
      world.ends[0]->post(seat_id{1}, {.tag = 1}, {});
      REQUIRE(world.until([&] { return world.heard[1].tellings.size() == 1; }));
    }
  }
}
