#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "support/comm_job.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem_tests::bytes_of_seed;
using llmmem_tests::job_end;
using llmmem_tests::job_history;
using llmmem_tests::run_job;

using ranks_of = communicator<thread_endpoint>;
constexpr std::uint64_t second = 1'000'000'000;

/// Runs `body(seat)` in a thread for each.
template <class Body>
void in_threads(std::uint32_t seats, Body body) {
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < seats; ++i)
    threads.emplace_back([&body, i] { body(seat_id{i}); });
  for (std::thread& each : threads)
    each.join();
}

}  // namespace

TEST_SUITE("thread_network") {
  TEST_CASE("messages of any length go around a ring, copied and read in place") {
    thread_network net(3, {.frame_bytes = 5000, .copied_bytes = 1000, .lane_bytes = 3000});
    in_threads(3, [&](seat_id self) {
      thread_endpoint end(net, self);
      ranks_of ranks(end);
      ranks.join(ranks.after(10 * second)).value();
      const rank_id next{(to_index(self) + 1) % 3};
      const rank_id before{(to_index(self) + 2) % 3};
      for (const auto seed : llmmem_tests::seeds(300)) {
        std::mt19937_64 random(seed);
        const std::size_t bytes = random() % 2 == 0 ? random() % 1200 : random() % 30'000;
        std::vector<std::byte> in(bytes);
        ranks
            .exchange(bytes_of_seed(bytes, seed + to_index(self)), next, in, before, 1,
                      ranks.after(10 * second))
            .value();
        if (in != bytes_of_seed(bytes, seed + to_index(before))) CHECK_MESSAGE(false, "seed ", seed);
      }
      ranks.agree(0, ranks.after(10 * second)).value();
    });
  }

  TEST_CASE(
      "ranks are killed and return to their seats, and all end with the state of a run without deaths") {
    std::atomic<std::uint64_t> killed{0};
    for (const auto seed : llmmem_tests::seeds(20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto seats = static_cast<std::uint32_t>(2 + random() % 3);
      const std::uint64_t steps = 30;
      thread_network net(seats);
      job_history history;
      std::vector<std::uint64_t> dies_at(seats, steps);
      for (std::uint32_t i = 1; i < seats; ++i)
        dies_at[i] = random() % 3 == 0 ? steps : random() % (steps / 2);
      in_threads(seats, [&](seat_id self) {
        for (std::uint32_t incarnation = 0;; ++incarnation) {
          try {
            thread_endpoint end(net, self);
            // Who comes back may find that the others are through; at first all are on their way.
            const std::uint64_t patience = incarnation == 0 ? 30 * second : second;
            const job_end how =
                run_job(end, history, {.steps = steps, .words = 5000, .join_patience_ns = patience},
                        [&](std::uint64_t step) {
                          if (incarnation == 0 && step == dies_at[to_index(self)]) net.kill(self);
                        });
            CHECK((how.is_through || (how.is_fresh && incarnation > 0)));
            return;
          } catch (const rank_killed&) {
            ++killed;
          }
        }
      });
      CHECK_FALSE(history.has_split());
    }
    CHECK(killed > 5);
  }

  TEST_CASE(
      "a sender to a process that does not listen waits until its deadline, and then owns its bytes again") {
    thread_network net(2, {.frame_bytes = 1 << 20, .copied_bytes = 100, .lane_bytes = 100});
    std::atomic<bool> is_over{false};
    in_threads(2, [&](seat_id self) {
      thread_endpoint end(net, self);
      ranks_of ranks(end);
      ranks.join(ranks.after(10 * second)).value();
      const rank_id other{1 - to_index(self)};
      if (self == seat_id{0}) {
        std::vector<std::byte> bytes(1000, std::byte{1});
        const auto late = ranks.send(bytes, other, 1, ranks.after(5'000'000));
        CHECK(late.error() == failure{errc::peer_timed_out, 1, 1000, 0});
        bytes.assign(1000, std::byte{2});  // nobody reads them any more
        is_over = true;
        ranks.send(std::vector<std::byte>(1000, std::byte{3}), other, 1, ranks.after(10 * second)).value();
      } else {
        while (!is_over) {
        }
        std::vector<std::byte> bytes(1000);
        ranks.recv(bytes, other, 1, ranks.after(10 * second)).value();
        CHECK(bytes == std::vector<std::byte>(1000, std::byte{3}));
      }
      ranks.agree(0, ranks.after(10 * second)).value();
    });
  }

  TEST_CASE("`wake` from another thread ends a wait") {
    thread_network net(1);
    thread_endpoint end(net, seat_id{0});
    std::thread waker([&] { end.wake(); });
    detail::any_frame_handler nobody;
    CHECK_FALSE(end.poll(no_deadline, nobody));
    waker.join();
    CHECK_FALSE(end.poll({0}, nobody));
  }

  TEST_CASE("an event during a callback ends the wait that follows it") {
    // Takes no data, and lets something happen while it is asked.
    struct meanwhile : llmmem::detail::any_frame_handler {
      frame_buffer buffer_for(seat_id, const frame_header&) noexcept {
        if (what) std::exchange(what, nullptr)();
        return {.what = frame_buffer::answer::ask_again};
      }
      void on_message(seat_id from, const frame_header&, std::span<const std::byte>) noexcept {
        teller = from;
      }
      std::function<void()> what{};
      std::optional<seat_id> teller{};
    };
    struct taker : llmmem::detail::any_frame_handler {
      frame_buffer buffer_for(seat_id, const frame_header& header) noexcept {
        return {frame_buffer::answer::take, std::span(bytes).first(header.bytes)};
      }
      std::array<std::byte, 100> bytes{};
    };
    thread_network net(3, {.copied_bytes = 50});
    thread_endpoint first(net, seat_id{0});
    thread_endpoint second_end(net, seat_id{1});
    thread_endpoint self(net, seat_id{2});
    taker others;
    meanwhile handler;
    while (first.poll({0}, others) || second_end.poll({0}, others) || self.poll({0}, handler)) {
    }
    const std::array<std::byte, 100> bytes{};
    // The lane of seat 0 is looked at before that of seat 1, whose frame is not taken.
    second_end.send(seat_id{2}, {}, std::span(bytes).first(50), no_deadline, others).value();
    const std::uint64_t begin = self.now_ns();
    const deadline by{begin + 20 * second};

    SUBCASE("told") {
      handler.what = [&] { first.post(seat_id{2}, {}, {}); };
      CHECK(self.poll(by, handler));
      CHECK(handler.teller == seat_id{0});
    }
    SUBCASE("woken") {
      handler.what = [&] { self.wake(); };
      CHECK_FALSE(self.poll(by, handler));
    }
    SUBCASE("killed") {
      handler.what = [&] { net.kill(seat_id{2}); };
      CHECK_THROWS_AS(static_cast<void>(self.poll(by, handler)), rank_killed);
    }
    SUBCASE("its own frame is taken") {
      handler.what = [&] { CHECK(first.poll({0}, others)); };
      CHECK(self.send(seat_id{0}, {}, bytes, by, handler).has_value());
    }
    CHECK_FALSE(handler.what);
    CHECK(self.now_ns() < by.ns);
  }

  TEST_CASE(
      "a process that gives up a frame while it is read waits for the read, and the frame counts as sent") {
    struct giver : llmmem::detail::any_frame_handler {
      [[nodiscard]] bool keeps_waiting() const noexcept {
        if (!is_being_read->load()) return true;
        *is_given_up = true;
        return false;
      }
      std::atomic<bool>* is_being_read = nullptr;
      std::atomic<bool>* is_given_up = nullptr;
    };
    struct reader : llmmem::detail::any_frame_handler {
      frame_buffer buffer_for(seat_id, const frame_header& header) noexcept {
        is_being_read = true;
        sender->wake();
        while (!is_given_up && sender->now_ns() < limit.ns)
          std::this_thread::yield();
        return {frame_buffer::answer::take, std::span(bytes).first(header.bytes)};
      }
      void on_frame(seat_id, const frame_header&) noexcept { has_read = true; }
      thread_endpoint* sender = nullptr;
      deadline limit{};
      std::array<std::byte, 100> bytes{};
      std::atomic<bool> is_being_read{false};
      std::atomic<bool> is_given_up{false};
      bool has_read = false;
    };
    thread_network net(2, {.copied_bytes = 10});
    thread_endpoint from(net, seat_id{0});
    thread_endpoint to(net, seat_id{1});
    llmmem::detail::any_frame_handler nobody;
    while (from.poll({0}, nobody) || to.poll({0}, nobody)) {
    }
    const deadline by{from.now_ns() + 20 * second};
    reader reads;
    reads.sender = &from;
    reads.limit = by;
    giver gives;
    gives.is_being_read = &reads.is_being_read;
    gives.is_given_up = &reads.is_given_up;
    std::thread other([&] {
      while (!reads.has_read && to.now_ns() < by.ns)
        static_cast<void>(to.poll(by, reads));
    });
    std::array<std::byte, 100> bytes{};
    bytes.fill(std::byte{7});
    const auto sent = from.send(seat_id{1}, {}, bytes, by, gives);
    bytes.fill(std::byte{8});
    other.join();
    CHECK(sent.has_value());
    CHECK(reads.is_given_up);
    CHECK(reads.bytes[99] == std::byte{7});
  }

  TEST_CASE("a process that takes a dead process's seat receives nothing that was meant for that process") {
    struct counter : llmmem::detail::any_frame_handler {
      frame_buffer buffer_for(seat_id, const frame_header& header) noexcept {
        ++heard;
        return {frame_buffer::answer::take, std::span(bytes).first(header.bytes)};
      }
      void on_message(seat_id, const frame_header&, std::span<const std::byte>) noexcept { ++heard; }
      void on_joined(seat_id) noexcept { ++arrivals; }
      std::array<std::byte, 100> bytes{};
      int heard = 0;
      int arrivals = 0;
    };
    thread_network net(2);
    thread_endpoint from(net, seat_id{0});
    auto to = std::make_unique<thread_endpoint>(net, seat_id{1});
    counter others;
    while (from.poll({0}, others) || to->poll({0}, others)) {
    }
    to.reset();
    to = std::make_unique<thread_endpoint>(net, seat_id{1});
    counter newcomer;
    const std::array<std::byte, 100> bytes{};
    CHECK(from.is_connected(seat_id{1}));  // it has not noticed yet
    CHECK(from.send(seat_id{1}, {}, bytes, {0}, others).code() == errc::peer_failed);
    from.post(seat_id{1}, {}, bytes);
    while (to->poll({0}, newcomer)) {
    }
    CHECK(newcomer.arrivals == 1);
    CHECK(newcomer.heard == 0);
    while (from.poll({0}, others)) {
    }
    CHECK(from.send(seat_id{1}, {}, bytes, {0}, others).has_value());
    from.post(seat_id{1}, {}, bytes);
    while (to->poll({0}, newcomer)) {
    }
    CHECK(newcomer.heard == 2);
  }

  TEST_CASE("a death is reported even if an earlier frame finds no buffer") {
    struct full : llmmem::detail::any_frame_handler {
      frame_buffer buffer_for(seat_id, const frame_header&) noexcept {
        return {.what = frame_buffer::answer::ask_again};
      }
      void on_death(seat_id, comm::death) noexcept { ++deaths; }
      int deaths = 0;
    };
    thread_network net(2);
    auto from = std::make_unique<thread_endpoint>(net, seat_id{0});
    thread_endpoint to(net, seat_id{1});
    full handler;
    while (from->poll({0}, handler) || to.poll({0}, handler)) {
    }
    const std::array<std::byte, 10> bytes{};
    from->send(seat_id{1}, {}, bytes, no_deadline, handler).value();
    from.reset();
    CHECK(to.poll({0}, handler));
    CHECK(handler.deaths == 1);
  }

  TEST_CASE(
      "a rank that is given up suspects the one that gave it up, once, after that rank's earlier messages") {
    struct listener : llmmem::detail::any_frame_handler {
      void on_message(seat_id, const frame_header&, std::span<const std::byte>) noexcept {
        CHECK(deaths.empty());
        ++tellings;
      }
      void on_death(seat_id seat, comm::death how) noexcept { deaths.emplace_back(to_index(seat), how); }
      std::vector<std::pair<std::uint32_t, comm::death>> deaths{};
      int tellings = 0;
    };
    thread_network net(2);
    auto giver = std::make_unique<thread_endpoint>(net, seat_id{0});
    thread_endpoint given(net, seat_id{1});
    listener handler;
    listener other;
    while (giver->poll({0}, other) || given.poll({0}, handler)) {
    }
    giver->post(seat_id{1}, {}, {});
    giver->give_up(seat_id{1});
    giver->give_up(seat_id{1});
    while (given.poll({0}, handler)) {
    }
    CHECK(handler.tellings == 1);
    CHECK(handler.deaths == std::vector{std::pair{0U, comm::death::suspected}});
    CHECK(given.send(seat_id{0}, {}, {}, {0}, handler).code() == errc::peer_failed);
    giver.reset();
    while (given.poll({0}, handler)) {
    }
    CHECK(handler.deaths.size() == 1);
    CHECK(other.deaths.empty());
  }

  TEST_CASE("impossible options are refused with what is wrong and how to resolve it") {
    CHECK_THROWS_WITH_AS(thread_network(0), "thread_network: 0 seats; 1 to 256 are allowed", argument_error);
    CHECK_THROWS_WITH_AS(thread_network(257), "thread_network: 257 seats; 1 to 256 are allowed",
                         argument_error);
    CHECK_THROWS_WITH_AS(thread_network(2, {.frame_bytes = 4095}),
                         "thread_network: frames of 4095 bytes; at least 4096 are needed", argument_error);
    thread_network net(2);
    CHECK_THROWS_WITH_AS(thread_endpoint(net, seat_id{2}),
                         "thread_endpoint: seat 2 of 2; seats are numbered from 0", argument_error);
    const thread_endpoint end(net, seat_id{1});
    CHECK_THROWS_WITH_AS(thread_endpoint(net, seat_id{1}),
                         "thread_network: seat 1 is taken; end that endpoint first", argument_error);
  }

  TEST_CASE("a frame whose buffer is too small is dropped, and nothing is written past the buffer") {
    struct narrow : llmmem::detail::any_frame_handler {
      frame_buffer buffer_for(seat_id, const frame_header&) noexcept {
        return {frame_buffer::answer::take, std::span(bytes).first(4)};
      }
      void on_frame(seat_id, const frame_header&) noexcept { ++arrivals; }
      std::array<std::byte, 8> bytes{};
      int arrivals = 0;
    };
    thread_network net(2);
    thread_endpoint from(net, seat_id{0});
    thread_endpoint to(net, seat_id{1});
    narrow handler;
    while (from.poll({0}, handler) || to.poll({0}, handler)) {
    }
    const std::array<std::byte, 8> ones{std::byte{1}, std::byte{1}, std::byte{1}, std::byte{1},
                                        std::byte{1}, std::byte{1}, std::byte{1}, std::byte{1}};
    from.send(seat_id{1}, {}, ones, no_deadline, handler).value();
    CHECK(to.poll({0}, handler));
    CHECK(handler.arrivals == 0);
    CHECK(handler.bytes == std::array<std::byte, 8>{});
    from.send(seat_id{1}, {}, std::span(ones).first(4), no_deadline, handler).value();
    CHECK(to.poll({0}, handler));
    CHECK(handler.arrivals == 1);
  }

  TEST_CASE(
      "unreceived copies have a budget, and frames sent before a death are received before its report") {
    struct order : llmmem::detail::any_frame_handler {
      frame_buffer buffer_for(seat_id, const frame_header& header) noexcept {
        return {frame_buffer::answer::take, std::span(bytes).first(header.bytes)};
      }
      void on_frame(seat_id, const frame_header&) noexcept { arrivals += deaths == 0 ? 1 : 0; }
      void on_death(seat_id, comm::death) noexcept { ++deaths; }
      std::array<std::byte, 100> bytes{};
      int arrivals = 0;
      int deaths = 0;
    };
    thread_network net(2, {.copied_bytes = 100, .lane_bytes = 150});
    auto from = std::make_unique<thread_endpoint>(net, seat_id{0});
    thread_endpoint to(net, seat_id{1});
    order handler;
    while (from->poll({0}, handler) || to.poll({0}, handler)) {
    }
    const std::array<std::byte, 100> bytes{};
    CHECK(from->send(seat_id{1}, {}, bytes, {0}, handler).has_value());
    CHECK(from->send(seat_id{1}, {}, bytes, {0}, handler).code() == errc::peer_timed_out);
    CHECK(to.poll({0}, handler));
    CHECK(from->send(seat_id{1}, {}, bytes, {0}, handler).has_value());
    from.reset();
    while (to.poll({0}, handler)) {
    }
    CHECK(handler.arrivals == 2);
    CHECK(handler.deaths == 1);
  }
}
