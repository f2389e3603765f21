// Several endpoints in one process, driven by one thread.
#include <llmmem/comm/socket_endpoint.hpp>

#include <doctest/doctest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>
#include <thread>

#include "support/error_text.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/socket_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::array both_kinds{socket_kind::local, socket_kind::tcp};

}  // namespace

TEST_CASE("endpoints find each other in any order of their starts, and each reports the others once") {
  for (const socket_kind kind : both_kinds) {
    for (const bool is_downwards : {false, true}) {
      socket_world world(kind, 4);
      for (std::uint32_t i = 0; i < 4; ++i) {
        world.start(is_downwards ? 3 - i : i);
        world.run_for(3 * ms);
      }
      REQUIRE(world.until([&] { return world.is_complete(); }));
      for (std::uint32_t i = 0; i < 4; ++i) {
        CHECK(std::set(world.heard[i].arrivals.begin(), world.heard[i].arrivals.end()).size() == 3);
        CHECK(world.heard[i].arrivals.size() == 3);
        CHECK(world.heard[i].deaths.empty());
      }
    }
  }
}

TEST_CASE("a frame arrives with its header and its bytes") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2);
    REQUIRE(world.join());
    const auto bytes = bytes_of("eight by");
    const frame_header header{1, 2, 3, 8, 4, 5, 6, 7};
    REQUIRE(world.ends[0]->send(seat_id{1}, header, bytes, world.in(1000 * ms), world.heard[0]));
    world.ends[0]->post(seat_id{1}, header, bytes);
    REQUIRE(world.until([&] { return world.heard[1].frames.size() + world.heard[1].tellings.size() == 2; }));
    CHECK(world.heard[1].frames[0] == heard_frame{seat_id{0}, header, bytes});
    CHECK(world.heard[1].tellings[0] == heard_frame{seat_id{0}, header, bytes});
  }
}

TEST_CASE("a lane with continuous data is polled as often as the others, awake or asleep") {
  for (const socket_kind kind : both_kinds) {
    for (const std::uint64_t spin_ns : {std::uint64_t{0}, std::uint64_t{20'000}}) {
      CAPTURE(spin_ns);
      socket_world world(kind, 3, {.spin_ns = spin_ns});
      REQUIRE(world.join());
      recorder& receiver = world.heard[1];
      std::uint64_t number = 0;
      const auto send = [&](std::uint32_t from) {
        const frame_header header{.message = number++, .bytes = 5};
        return world.ends[from]->send(seat_id{1}, header, bytes_of("bytes"), world.in(1000 * ms),
                                      world.heard[from]);
      };
      const auto comes = [&](std::uint32_t from) {
        receiver.frames.clear();
        REQUIRE(send(from));
        while (receiver.frames.empty() && world.ends[1]->poll(world.in(5000 * ms), receiver)) {
        }
        REQUIRE(receiver.frames.size() == 1);
        CHECK(receiver.frames[0].from == seat_id{from});
        CHECK(receiver.frames[0].header.message == number - 1);
      };
      for (const std::uint32_t from : {0U, 2U, 0U}) {
        for (int i = 0; i < 200; ++i)
          comes(from);
      }
      comes(2);
      comes(0);
      // Who sleeps is woken by it, and by what is told from elsewhere.
      receiver.frames.clear();
      const std::uint64_t began = detail::monotonic_ns();
      std::thread late([&] {
        ::usleep(20'000);
        CHECK(send(0));
        ::usleep(20'000);
        world.ends[2]->post(seat_id{1}, {}, {});
      });
      while (receiver.frames.empty() && world.ends[1]->poll(world.in(20'000 * ms), receiver)) {
      }
      while (receiver.tellings.empty() && world.ends[1]->poll(world.in(20'000 * ms), receiver)) {
      }
      late.join();
      CHECK(receiver.frames.size() == 1);
      CHECK(receiver.tellings.size() == 1);
      CHECK(detail::monotonic_ns() - began < 10'000 * ms);
      // For later, and then.
      receiver.frames.clear();
      receiver.answer = frame_buffer::answer::ask_again;
      REQUIRE(send(0));
      CHECK_FALSE(world.ends[1]->poll(world.in(20 * ms), receiver));
      receiver.answer = frame_buffer::answer::take;
      CHECK(world.ends[1]->poll(world.in(1000 * ms), receiver));
      CHECK(receiver.frames.size() == 1);
      // What was sent before a death comes before it; a fresh process is heard.
      receiver.frames.clear();
      REQUIRE(send(0));
      world.ends[0].reset();
      REQUIRE(world.until([&] { return !receiver.deaths.empty(); }));
      CHECK(receiver.deaths[0] == std::pair{0U, comm::death::certain});
      CHECK(receiver.frames.size() == 1);
      world.start(0);
      REQUIRE(world.until([&] { return world.is_complete(); }));
      comes(0);
    }
  }
}

TEST_CASE(
    "posted messages arrive while data are stuck, and data that were refused at first arrive complete") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2, {.frame_bytes = 65536, .socket_bytes = 4096});
    REQUIRE(world.join());
    recorder& receiver = world.heard[1];
    receiver.answer = frame_buffer::answer::ask_again;
    const std::vector<std::byte> bytes(65536, std::byte{7});
    // Until no more can go: nobody takes the first.
    error_code ended = errc::ok;
    for (std::uint32_t i = 0; i < 1000 && ended == errc::ok; ++i) {
      ended = world.ends[0]
                  ->send(seat_id{1}, {.message = i, .bytes = 65536}, bytes, world.in(10 * ms), world.heard[0])
                  .code();
      world.turn();
    }
    CHECK(ended == errc::peer_timed_out);
    world.ends[0]->post(seat_id{1}, {.tag = 9}, bytes_of("told"));
    REQUIRE(world.until([&] { return receiver.tellings.size() == 1; }));
    CHECK(receiver.tellings[0].header.tag == 9);
    CHECK(receiver.frames.empty());
    const std::size_t asked = receiver.asked;
    world.turn();
    world.turn();
    CHECK(receiver.asked == asked + 2);  // by each poll, once
    receiver.answer = frame_buffer::answer::take;
    const std::size_t begun =
        static_cast<std::size_t>(world.ends[0]->stats().data_sent.frames);  // and so to be finished
    REQUIRE(begun >= 1);
    REQUIRE(world.until([&] { return receiver.frames.size() == begun; }));
    for (std::size_t i = 0; i < begun; ++i)
      CHECK(receiver.frames[i].bytes == bytes);
  }
}

TEST_CASE("a frame that its sender abandoned midway is finished, and later frames stay in step") {
  for (const socket_kind kind : both_kinds) {
    for (const bool is_cancelled : {false, true}) {
      socket_world world(kind, 2, {.frame_bytes = 4U << 20, .socket_bytes = 4096});
      REQUIRE(world.join());
      std::vector<std::byte> bytes(4U << 20);
      for (std::size_t i = 0; i < bytes.size(); ++i)
        bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
      const std::vector<std::byte> before = bytes;
      result<void> sent;
      if (is_cancelled) {
        // The other side tells something while it is sent.
        world.ends[1]->post(seat_id{0}, {.tag = 1}, {});
        world.heard[0].is_going_on = false;
        sent = world.ends[0]->send(seat_id{1}, {.message = 1, .bytes = 4U << 20}, bytes,
                                   world.in(10'000 * ms), world.heard[0]);
        CHECK(sent.code() == errc::cancelled);
        world.heard[0].is_going_on = true;
      } else {
        sent = world.ends[0]->send(seat_id{1}, {.message = 1, .bytes = 4U << 20}, bytes, world.in(5 * ms),
                                   world.heard[0]);
        CHECK(sent.code() == errc::peer_timed_out);
      }
      CHECK(sent.error().index == 1);
      CHECK(sent.error().wanted == 4U << 20);
      CHECK(sent.error().found < 4U << 20);
      std::fill(bytes.begin(), bytes.end(), std::byte{0xEE});  // they may be written again
      const bool is_begun = world.ends[0]->stats().data_sent.frames == 1;
      REQUIRE((is_begun || is_cancelled));
      if (!is_begun) continue;
      CHECK(sent.error().found > 0);
      REQUIRE(world.until([&] { return world.heard[1].frames.size() == 1; }));
      CHECK(world.heard[1].frames[0].bytes == before);
      const auto more = bytes_of("and on it goes");
      REQUIRE(world.ends[0]->send(seat_id{1}, {.message = 2, .bytes = 14}, more, world.in(1000 * ms),
                                  world.heard[0]));
      REQUIRE(world.until([&] { return world.heard[1].frames.size() == 2; }));
      CHECK(world.heard[1].frames[1].bytes == more);
    }
  }
}

TEST_CASE("the endpoint does not write to a buffer that is withdrawn midway, and delivers later frames") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2, {.frame_bytes = 1U << 20, .socket_bytes = 4096});
    REQUIRE(world.join());
    const std::vector<std::byte> bytes(1U << 20, std::byte{5});
    static_cast<void>(
        world.ends[0]->send(seat_id{1}, {.bytes = 1U << 20}, bytes, world.in(2 * ms), world.heard[0]));
    REQUIRE(world.until([&] { return world.heard[1].asked == 1; }));
    static_cast<void>(world.ends[1]->poll({}, world.heard[1]));
    REQUIRE(world.heard[1].frames.empty());
    world.ends[1]->withdraw(seat_id{0});
    auto& room = world.heard[1].buffer_of(seat_id{0});
    std::fill(room.begin(), room.end(), std::byte{0xAB});
    // With a copy of what is sent next, which has the room anew.
    const std::vector<std::byte> untouched = room;
    REQUIRE(world.until([&] {
      return world.ends[0]
          ->send(seat_id{1}, {.message = 1, .bytes = 3}, bytes_of("new"), world.in(ms), world.heard[0])
          .has_value();
    }));
    CHECK(room == untouched);
    REQUIRE(world.until([&] { return world.heard[1].frames.size() == 1; }));
    CHECK(world.heard[1].frames[0].header.message == 1);
    CHECK(world.heard[1].frames[0].bytes == bytes_of("new"));
  }
}

TEST_CASE("a frame without a buffer is dropped, and the next one arrives") {
  socket_world world(socket_kind::local, 2);
  REQUIRE(world.join());
  const std::vector<std::byte> bytes(300'000, std::byte{5});
  world.heard[1].answer = frame_buffer::answer::drop;
  // Longer than a socket's buffer: its rest goes with later calls.
  static_cast<void>(
      world.ends[0]->send(seat_id{1}, {.bytes = 300'000}, bytes, world.in(2 * ms), world.heard[0]));
  REQUIRE(world.until([&] { return world.ends[1]->stats().data_received.frames == 1; }));
  CHECK(world.heard[1].frames.empty());
  world.heard[1].answer = frame_buffer::answer::take;
  REQUIRE(world.ends[0]->send(seat_id{1}, {.tag = 3}, {}, world.in(1000 * ms), world.heard[0]));
  REQUIRE(world.until([&] { return world.heard[1].frames.size() == 1; }));
  CHECK(world.heard[1].frames[0].header == frame_header{.tag = 3});
}

TEST_CASE("a handler may post from within its reports of messages, arrivals and deaths") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 3);
    for (std::uint32_t i = 0; i < 3; ++i) {
      recorder& mine = world.heard[i];
      mine.on_told = [&world, i](const heard_frame& heard) {
        if (heard.header.tag < 100)
          world.ends[i]->post(heard.from, {.tag = heard.header.tag + 1}, heard.bytes);
      };
      mine.on_came = [&world, i](seat_id seat) { world.ends[i]->post(seat, {.tag = 1000}, {}); };
      mine.on_died = [&world, i](seat_id) {
        if (i == 0) world.ends[0]->post(seat_id{1}, {.tag = 2000}, {});
      };
    }
    REQUIRE(world.join());
    REQUIRE(world.until([&] { return world.heard[0].tellings.size() == 2; }));
    world.ends[0]->post(seat_id{1}, {.tag = 1}, bytes_of("back and forth"));
    REQUIRE(world.until([&] {
      const auto& told = world.heard[1].tellings;
      return !told.empty() && told.back().header.tag == 99;
    }));
    CHECK(world.heard[1].tellings.back().bytes == bytes_of("back and forth"));
    world.ends[2].reset();
    REQUIRE(world.until([&] { return world.heard[1].tellings.back().header.tag == 2000; }));
  }
}

TEST_CASE("an endpoint sends nothing to an empty seat, and drops and counts messages posted to one") {
  socket_world world(socket_kind::local, 3);
  world.start(0);
  const auto sent = world.ends[0]->send(seat_id{2}, {}, {}, world.in(1000 * ms), world.heard[0]);
  CHECK(sent.error() == failure{errc::peer_failed, 2, 0, 0, ""});
  CHECK(!world.ends[0]->send(seat_id{0}, {}, {}, world.in(ms), world.heard[0]));
  CHECK(!world.ends[0]->send(seat_id{3}, {}, {}, world.in(ms), world.heard[0]));
  CHECK(!world.ends[0]->send(no_seat, {}, {}, world.in(ms), world.heard[0]));
  world.ends[0]->post(seat_id{1}, {}, {});
  world.ends[0]->post(no_seat, {}, {});
  world.ends[0]->give_up(no_seat);
  world.ends[0]->withdraw(no_seat);
  CHECK(world.ends[0]->stats().dropped == 2);
  CHECK(!world.ends[0]->is_connected(no_seat));
}

TEST_CASE("a frame longer than frame_bytes is refused with both numbers") {
  socket_world world(socket_kind::local, 2, {.frame_bytes = 4096});
  REQUIRE(world.join());
  const std::vector<std::byte> bytes(4097);
  const auto sent = world.ends[0]->send(seat_id{1}, {}, bytes, world.in(ms), world.heard[0]);
  CHECK(sent.error() == failure{errc::out_of_range, 1, 4097, 4096, ""});
  world.ends[0]->post(seat_id{1}, {}, bytes);
  CHECK(world.ends[0]->stats().dropped == 1);
}

TEST_CASE("a single endpoint waits until its deadline, or until it is woken") {
  socket_endpoint alone({.seats = 1});
  recorder heard;
  const std::uint64_t before = alone.now_ns();
  CHECK(!alone.poll(socket_world::in(5 * ms), heard));
  CHECK(alone.now_ns() - before >= 5 * ms);
  alone.wake();
  const std::uint64_t again = alone.now_ns();
  CHECK(!alone.poll(socket_world::in(60'000 * ms), heard));
  CHECK(alone.now_ns() - again < 30'000 * ms);
  CHECK(!alone.poll(socket_world::in(5 * ms), heard));  // once
}

TEST_CASE(
    "an endpoint announces its end: the others report its death after its frames, and a fresh one joins") {
  for (const socket_kind kind : both_kinds) {
    for (const std::uint32_t leaver : {0U, 1U}) {
      socket_world world(kind, 2);
      REQUIRE(world.join());
      const std::uint32_t other = 1 - leaver;
      const std::vector<std::byte> bytes(50'000, std::byte{3});
      REQUIRE(world.ends[leaver]->send(seat_id{other}, {.bytes = 50'000}, bytes, world.in(1000 * ms),
                                       world.heard[leaver]));
      world.ends[leaver]->post(seat_id{other}, {}, {});
      world.heard[other].on_died = [&](seat_id) { CHECK(world.heard[other].frames.size() == 1); };
      world.ends[leaver].reset();
      REQUIRE(world.until([&] { return !world.heard[other].deaths.empty(); }));
      CHECK(world.heard[other].tellings.size() == 1);
      CHECK(!world.ends[other]->is_connected(seat_id{leaver}));
      world.start(leaver);
      REQUIRE(world.until([&] { return world.is_complete(); }));
      CHECK(world.heard[other].arrivals.size() == 2);
      CHECK(world.heard[other].deaths == std::vector{std::pair{leaver, comm::death::certain}});
    }
  }
}

TEST_CASE("data that no call has received yet do not delay the report of a death") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2);
    REQUIRE(world.join());
    world.heard[1].answer = frame_buffer::answer::ask_again;
    REQUIRE(world.ends[0]->send(seat_id{1}, {.bytes = 3}, bytes_of("abc"), world.in(ms), world.heard[0]));
    REQUIRE(world.until([&] { return world.heard[1].asked != 0; }));
    world.ends[0].reset();
    REQUIRE(world.until([&] { return !world.heard[1].deaths.empty(); }));
    CHECK(world.heard[1].frames.empty());
  }
}

TEST_CASE("a given-up process receives earlier posts, reports a suspicion, and is ignored from then on") {
  for (const socket_kind kind : both_kinds) {
    for (const std::uint32_t giver : {0U, 1U}) {
      socket_world world(kind, 2);
      REQUIRE(world.join());
      const std::uint32_t other = 1 - giver;
      world.ends[giver]->post(seat_id{other}, {.tag = 1}, {});
      world.ends[giver]->give_up(seat_id{other});
      world.ends[other]->post(seat_id{giver}, {.tag = 2}, {});
      static_cast<void>(world.ends[other]->send(seat_id{giver}, {}, {}, world.in(ms), world.heard[other]));
      CHECK(!world.ends[giver]->is_connected(seat_id{other}));
      REQUIRE(world.until([&] { return !world.heard[other].deaths.empty(); }));
      CHECK(world.heard[other].tellings.size() == 1);
      CHECK(world.heard[other].deaths == std::vector{std::pair{giver, comm::death::suspected}});
      // Calls go on, and the same process does not come again.
      world.run_for(500 * ms);
      CHECK(world.heard[giver].deaths.empty());
      CHECK(world.heard[giver].tellings.empty());
      CHECK(world.heard[giver].frames.empty());
      CHECK(world.heard[giver].arrivals.size() == 1);
      CHECK(world.heard[other].arrivals.size() == 1);
      CHECK(world.heard[other].deaths.size() == 1);
      // A fresh one does, and the death of the old one is told as certain before.
      world.ends[other].reset();
      world.heard[other] = {};
      world.start(other);
      REQUIRE(world.until([&] { return world.is_complete(); }));
      CHECK(world.heard[giver].deaths == std::vector{std::pair{other, comm::death::certain}});
      CHECK(world.heard[giver].arrivals.size() == 2);
    }
  }
}

TEST_CASE(
    "a process that has announced its leaving is certainly dead, even if it is given up before the report") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2);
    REQUIRE(world.join());
    recorder& heard = world.heard[0];
    heard.answer = frame_buffer::answer::ask_again;  // so that the lane of data has no end as yet
    REQUIRE(world.ends[1]->send(seat_id{0}, {.bytes = 3}, bytes_of("abc"), world.in(ms), world.heard[1]));
    REQUIRE(world.until([&] { return heard.asked != 0; }));
    world.ends[1].reset();
    REQUIRE(world.until([&] { return !world.ends[0]->is_connected(seat_id{1}); }));
    REQUIRE(heard.deaths.empty());
    world.ends[0]->give_up(seat_id{1});
    REQUIRE(world.until([&] { return !heard.deaths.empty(); }));
    CHECK(heard.deaths == std::vector{std::pair{1U, comm::death::certain}});
    heard.answer = frame_buffer::answer::take;
    world.run_for(20 * ms);
    CHECK(heard.deaths.size() == 1);
    CHECK(heard.frames.empty());
    world.start(1);
    REQUIRE(world.until([&] { return world.is_complete(); }));
  }
}

TEST_CASE("a newcomer to the seat of a live process is refused until that process ends") {
  socket_world world(socket_kind::tcp, 2);
  REQUIRE(world.join());
  socket_endpoint newcomer(world.options_elsewhere(1));
  recorder heard;
  REQUIRE(world.until([&] {
    static_cast<void>(newcomer.poll(world.in(ms), heard));
    return world.ends[0]->stats().busy >= 3;
  }));
  CHECK(heard.arrivals.empty());
  CHECK(world.heard[0].arrivals.size() == 1);
  CHECK(world.ends[0]->is_connected(seat_id{1}));
  world.ends[1].reset();
  REQUIRE(world.until([&] {
    static_cast<void>(newcomer.poll(world.in(ms), heard));
    return !heard.arrivals.empty() && world.heard[0].arrivals.size() == 2;
  }));
  CHECK(world.heard[0].deaths == std::vector{std::pair{1U, comm::death::certain}});
}

TEST_CASE("a process that reads none of its posted messages is suspected when no more of them can wait") {
  for (const std::size_t size : {std::size_t{4096}, std::size_t{0}}) {
    socket_world world(socket_kind::local, 2,
                       {.post_queue_bytes = 16384, .socket_bytes = 4096, .hard_silence_ns = 0});
    REQUIRE(world.join());
    const std::vector<std::byte> bytes(size);
    for (int i = 0; i < 5000; ++i)
      world.ends[0]->post(seat_id{1}, {}, bytes);
    static_cast<void>(world.ends[0]->poll(world.in(1000 * ms), world.heard[0]));
    CHECK(world.heard[0].deaths == std::vector{std::pair{1U, comm::death::suspected}});
    CHECK(world.ends[0]->stats().overflowed == 1);
    // It takes what could wait, in step, and hears that it was given up.
    REQUIRE(world.until([&] { return !world.heard[1].deaths.empty(); }));
    CHECK(world.heard[1].deaths == std::vector{std::pair{0U, comm::death::suspected}});
    CHECK(world.heard[1].tellings.size() >= 3);
    CHECK(world.ends[1]->stats().malformed == 0);
  }
}

TEST_CASE("silence counts only while the endpoint listens, and after it has read all received bytes") {
  socket_world world(socket_kind::local, 2,
                     {.beat_ns = 5 * ms, .soft_silence_ns = 20 * ms, .hard_silence_ns = 60 * ms});
  REQUIRE(world.join());
  // Both compute for longer than the limit, and beat.
  ::usleep(200'000);
  world.run_for(100 * ms);
  CHECK(world.heard[0].deaths.empty());
  CHECK(world.heard[1].deaths.empty());
  CHECK(world.ends[0]->stats().beats_sent > 5);
}

TEST_CASE(
    "a process that sends no heartbeat is reported as silent from the soft limit on, and suspected at the "
    "hard one") {
  socket_world world(socket_kind::local, 2);
  socket_options options = world.options(1);
  options.beat_ns = 0;
  world.ends[1] = std::make_unique<socket_endpoint>(options);
  options = world.options(0);
  options.beat_ns = ms;
  options.soft_silence_ns = 30 * ms;
  options.hard_silence_ns = 400 * ms;
  options.silence = on_silence::kill_local;  // but not this very process
  world.ends[0] = std::make_unique<socket_endpoint>(options);
  REQUIRE(world.until([&] { return world.is_complete(); }));
  world.run_for(20 * ms);  // the last that was said is heard
  ::usleep(450'000);
  static_cast<void>(world.ends[0]->poll({}, world.heard[0]));
  CHECK(world.heard[0].deaths.empty());
  REQUIRE(world.until([&] { return world.ends[0]->stats().silent == 1; }));
  CHECK(world.heard[0].deaths.empty());
  REQUIRE(world.until([&] { return !world.heard[0].deaths.empty() && !world.heard[1].deaths.empty(); }));
  CHECK(world.heard[0].deaths[0] == std::pair{1U, comm::death::suspected});
  CHECK(world.heard[1].deaths[0] == std::pair{0U, comm::death::suspected});
  CHECK(world.ends[0]->stats().killed == 0);
}

TEST_CASE("each setup error says what is wrong, where, and how to resolve it") {
  const temporary_folder folder;
  const std::string path = folder.path().string();
  const auto text = [](const socket_options& options) {
    return text_of([&] { const socket_endpoint end(options); });
  };
  CHECK(text({.seats = 0}) == "socket_endpoint: 0 seats; use 1 to 256");
  CHECK(text({.seats = 257}) == "socket_endpoint: 257 seats; use 1 to 256");
  CHECK(text({.seat = seat_id{2}, .seats = 2}) == "socket_endpoint: seat 2 of 2; seats are numbered from 0");
  CHECK(text({.frame_bytes = 4095}) == "socket_endpoint: frame_bytes is 4095; use 4096 to 1073741824");
  CHECK(text({.post_queue_bytes = 8191}) ==
        "socket_endpoint: post_queue_bytes is 8191; use 8192 to 1073741824");
  CHECK(text({.socket_bytes = 1073741825}) ==
        "socket_endpoint: socket_bytes is 1073741825; use 0 to 1073741824");
  CHECK(text({.beat_ns = 10, .hard_silence_ns = 29}) ==
        "socket_endpoint: hard_silence_ns is 29; it must be at least three times beat_ns, 30");
  CHECK(text({.handshake_ns = 0}) ==
        "socket_endpoint: handshake_ns and first_call_ns must be more than 0, last_call_ns not less than "
        "first_call_ns");
  CHECK(text({.seats = 2}) ==
        "socket_endpoint: neither a folder nor addresses are given; give a folder for Unix sockets, or an "
        "address for each seat for TCP");
  CHECK(text({.seats = 2, .folder = path, .addresses = {"127.0.0.1:1", "127.0.0.1:2"}}) ==
        "socket_endpoint: a folder and addresses are given; give a folder for Unix sockets, or an address "
        "for each seat for TCP");
  CHECK(text({.seats = 3, .addresses = {"127.0.0.1:1", "127.0.0.1:2"}, .secret = "s"}) ==
        "socket_endpoint: 2 addresses for 3 seats; give one for each seat");
  CHECK(text({.seats = 2, .addresses = {"127.0.0.1:1", "127.0.0.1:2"}}) ==
        "socket_endpoint: the secret is empty, but over TCP any user may call; give all processes the same "
        "secret, 16 random bytes or more");
  for (const std::string bad : {"localhost:80", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536",
                                "127.0.0.1:8x", "::1:80", "[::1]", "[::1]80", "[]:80", ":80", ""}) {
    CAPTURE(bad);
    CHECK(text({.seats = 2, .addresses = {"127.0.0.1:1", bad}, .secret = "s"}) ==
          "socket_endpoint: the address of seat 1, '" + bad +
              "', is not a numeric host with a port from 1 to 65535, such as 127.0.0.1:4000 or [::1]:4000");
  }
  for (const std::string other : {"10.0.0.1:80", "0.0.0.0:80", "[::]:80", "[fe80::1]:80", "128.0.0.1:80"}) {
    CAPTURE(other);
    CHECK(text({.seats = 2, .addresses = {other, "127.0.0.1:1"}, .secret = "s"}) ==
          "socket_endpoint: the address of seat 0, '" + other +
              "', can be reached from other machines, and frames are not encrypted; in a trusted network, "
              "set reach to socket_reach::any_machine");
  }
  const std::string deep = path + "/" + std::string(120, 'x');
  CHECK(text({.seats = 2, .folder = deep}) ==
        "socket_endpoint: the path '" + deep + "/seat-0.sock' has " + std::to_string(deep.size() + 12) +
            " bytes, but that of a Unix socket has at most 107; use a folder with a shorter path");
  CHECK(text({.seats = 2, .folder = path + "/none"}) ==
        "socket_endpoint: folder '" + path + "/none/': No such file or directory (errno 2); create it first");
  REQUIRE(::mkdir((path + "/seat-0.sock").c_str(), 0700) == 0);
  CHECK(text({.seats = 2, .folder = path}) ==
        "socket_endpoint: '" + path +
            "/seat-0.sock' exists and is not a socket; remove it, or use another folder");
  const socket_endpoint first({.seat = seat_id{1}, .seats = 2, .folder = path});
  CHECK(text({.seat = seat_id{1}, .seats = 2, .folder = path}) ==
        "socket_endpoint: '" + path + "/seat-1.sock' is taken by process " + std::to_string(::getpid()) +
            "; end that process first, or use another seat");
  const auto addresses = free_addresses(2);
  const socket_endpoint second({.seats = 2, .addresses = addresses, .secret = "s"});
  CHECK(
      text({.seats = 2, .addresses = addresses, .secret = "s"}) ==
      "socket_endpoint: bind to '" + addresses[0] +
          "': Address already in use (errno 98); end the process that listens there, or use another address");
  std::string zero = path + "/a";
  zero += '\0';
  CHECK(text({.seats = 2, .folder = zero}) ==
        "socket_endpoint: the path '" + path + "/a' contains a zero byte");
}

TEST_CASE("a folder in which other users can make sockets is refused without a secret") {
  const temporary_folder own;
  const std::string path = own.path().string();
  const auto text = [&](const std::string& folder, const std::string& secret = {}) -> std::string {
    try {
      const detail::socket_setup setup({.seats = 2, .folder = folder, .secret = secret});
    } catch (const argument_error& error) {
      return error.what();
    }
    return {};
  };
  for (const mode_t mode : {0700U, 0755U}) {
    REQUIRE(::chmod(path.c_str(), mode) == 0);
    CHECK(text(path).empty());
  }
  for (const mode_t mode : {0770U, 0702U, 01777U}) {
    REQUIRE(::chmod(path.c_str(), mode) == 0);
    CHECK(text(path) == "socket_endpoint: the folder '" + path +
                            "' can be written to by other users, and the secret is empty; chmod go-w '" +
                            path + "', or give all processes the same secret, 16 random bytes or more");
    CHECK(text(path, "a secret").empty());
  }
  REQUIRE(::chmod(path.c_str(), 0700) == 0);
  // Another user's: the test's own folder, where it may give that away.
  const bool is_root = ::geteuid() == 0;
  if (is_root) REQUIRE(::chown(path.c_str(), 4321, static_cast<gid_t>(-1)) == 0);
  const std::string others = is_root ? path : "/";
  CHECK(text(others) == "socket_endpoint: the folder '" + others + "' belongs to user " +
                            (is_root ? "4321" : "0") + ", not to user " + std::to_string(::geteuid()) +
                            ", and the secret is empty; use a folder of this user, or give all processes the "
                            "same secret, 16 random bytes or more");
  CHECK(text(others, "a secret").empty());
  CHECK(text(path + "/none").empty());  // that there is none is told by what uses it
}

TEST_CASE("an endpoint waits for a locked folder at most as long as a handshake, and names the holder") {
  const temporary_folder folder;
  const std::string path = folder.path().string();
  const socket_options options{.seats = 2, .folder = path, .handshake_ns = 60 * ms};
  std::optional<llmmem::detail::descriptor> held;
  const auto lock = [&] {
    held.emplace(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    REQUIRE(::flock(held->get(), LOCK_EX) == 0);
  };
  lock();
  const std::uint64_t began = llmmem::detail::monotonic_ns();
  CHECK(text_of([&] { const socket_endpoint end(options); }) ==
        "socket_endpoint: folder '" + path + "/' has been locked for 60 ms by process " +
            std::to_string(::getpid()) +
            ", although the lock is needed only briefly to begin listening; end that process, or use another "
            "folder");
  const std::uint64_t took = llmmem::detail::monotonic_ns() - began;
  CHECK(took >= 60 * ms);
  CHECK(took < 5000 * ms);
  // One that lets go in time is waited for.
  std::thread late([&] {
    ::usleep(20'000);
    held.reset();
  });
  CHECK(text_of([&] {
          const socket_endpoint end({.seats = 2, .folder = path, .handshake_ns = 10'000 * ms});
        }) == "none");
  late.join();
  lock();
  CHECK(llmmem::detail::lock_holder(*held) == ::getpid());
  // Of another folder's lock nothing is said here.
  const temporary_folder another;
  const llmmem::detail::descriptor other(::open(another.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  CHECK(llmmem::detail::lock_holder(other) == 0);
}

TEST_CASE("an endpoint removes its socket's file at its end, and replaces one that a dead process left") {
  socket_world world(socket_kind::local, 2);
  const std::string file = world.folder() + "/seat-0.sock";
  world.start(0);
  CHECK(::access(file.c_str(), F_OK) == 0);
  world.ends[0].reset();
  CHECK(::access(file.c_str(), F_OK) != 0);
  {
    const llmmem::detail::descriptor left(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto where = llmmem::detail::unix_address(file);
    REQUIRE(::bind(left.get(), where.get(), where.size) == 0);
  }
  CHECK(::access(file.c_str(), F_OK) == 0);
  REQUIRE(world.join());
  // A file that is another's by now is left alone.
  REQUIRE(::unlink(file.c_str()) == 0);
  const llmmem::detail::descriptor another(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const llmmem::detail::descriptor place(::open(world.folder().c_str(), O_RDONLY | O_CLOEXEC));
  const auto where = llmmem::detail::unix_address(file);
  REQUIRE(::bind(another.get(), where.get(), where.size) == 0);
  struct ::stat seen{};
  REQUIRE(::stat(file.c_str(), &seen) == 0);
  world.ends[0].reset();
  CHECK(::access(file.c_str(), F_OK) == 0);
}
