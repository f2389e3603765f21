/// The processes in other seats, played by the test: it writes frames by hand, closes lanes and lets
/// processes "exit".
#include <llmmem/comm/detail/socket_peers.hpp>

#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/socket_pair.hpp"
#include "support/socket_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using detail::descriptor;
using detail::frame_sort;
using detail::handler_call;
using detail::ready_event;
using detail::socket_lane;

namespace {

using deaths = std::vector<std::pair<std::uint32_t, comm::death>>;

constexpr seat_id other{1};

socket_options options_of(socket_options given) {
  given.seats = 2;
  given.frame_bytes = 65536;
  given.post_queue_bytes = 2 * max_post_bytes;
  given.confirm_ns = 100 * ms;
  return given;
}

/// Whether the other process waits for a core, by the test's word. (What the kernel says is
/// socket_process_test's.)
bool is_starved = false;

/// The peers of seat 0 of two.
struct peers_here {
  socket_options options;
  detail::socket_poller poller{true};
  detail::control_channel control{poller, 2, options.post_queue_bytes};
  detail::call_schedule calls{poller.clock(), 2, options.first_call_ns, options.last_call_ns};
  detail::socket_peers peers{poller,  control, calls,
                             options, 2,       [](const descriptor&) noexcept { return is_starved; }};
  recorder heard;
  handler_call call{detail::refer_to(heard)};
  socket_pair data;
  socket_pair told;
  descriptor process;  // readable, as a pidfd, once it "exits"
  std::uint32_t data_sequence = 0;
  std::uint32_t told_sequence = 0;
  std::uint64_t now = 0;  // the test's time

  explicit peers_here(socket_options given = {}) : options(options_of(std::move(given))) {
    poller.begin();
    now = poller.clock().now();
    poller.clock().restart_timers();
    peers.reserve(other);
  }
  void connect(bool has_process = false, bool is_own = false) {
    descriptor given;
    if (has_process) {
      given = descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
      process = descriptor(::dup(given.get()));
    }
    detail::incarnation_id life{};
    life.fill(std::byte{9});
    peers.connect(other, std::move(data.here), std::move(told.here), std::move(given), life, is_own, call);
  }
  bool say(socket_lane lane, frame_sort sort, std::span<const std::byte> bytes = {}) {
    std::uint32_t& sequence = lane == socket_lane::data ? data_sequence : told_sequence;
    std::vector<std::byte> all(detail::wire_header_bytes);
    detail::write_header({{.bytes = static_cast<std::uint32_t>(bytes.size())}, lane, sort, sequence++},
                         std::span<std::byte, detail::wire_header_bytes>(all.data(), all.size()));
    all.insert(all.end(), bytes.begin(), bytes.end());
    return (lane == socket_lane::data ? data : told).say_there(all);
  }
  void exit() const {
    const std::uint64_t one = 1;
    CHECK(::write(process.get(), &one, sizeof(one)) == sizeof(one));
  }
  /// Handles everything that is ready, then lets that much time pass.
  void turn(std::uint64_t ns = 0) {
    // A lane's end is read by itself, after the bytes before it: an endpoint looks again, and so does this.
    for (int i = 0; i < 4; ++i) {
      detail::socket_poller::event_array events{};
      poller.begin();  // the poller measures the machine's time, the test its own
      const auto found = poller.wait(0, -1, -1, events);
      poller.clock().begin(now);
      for (std::size_t at = 0; at < found.events; ++at) {
        const ready_event event(events[at]);
        if (event.is_of(peers.generation(seat_id{event.index}))) peers.handle(event, call);
      }
    }
    pass(ns);
  }
  /// Lets that much time pass in which this endpoint listens, and runs the timers.
  void pass(std::uint64_t ns) {
    now += ns;
    poller.clock().look(now, ns);
    peers.run_timers(call);
  }
  /// The sorts of the control frames that have come to the other side.
  std::vector<frame_sort> told_there() {
    const std::vector<std::byte> more = told.hear_there();
    begun_there_.insert(begun_there_.end(), more.begin(), more.end());
    std::vector<frame_sort> sorts;
    constexpr std::size_t head = detail::wire_header_bytes;
    std::size_t at = 0;
    while (at + head <= begun_there_.size()) {
      const std::span<const std::byte, head> bytes(begun_there_.data() + at, head);
      const auto header = detail::read_header(bytes, socket_lane::told, heard_there_, max_post_bytes);
      REQUIRE(header.has_value());
      if (at + head + header->frame.bytes > begun_there_.size()) break;
      ++heard_there_;
      sorts.push_back(header->sort);
      at += head + header->frame.bytes;
    }
    begun_there_.erase(begun_there_.begin(), begun_there_.begin() + static_cast<std::ptrdiff_t>(at));
    return sorts;
  }
  [[nodiscard]] socket_stats stats() const {
    socket_stats all;
    peers.add_to(all);
    return all;
  }

 private:
  std::uint32_t heard_there_ = 0;
  std::vector<std::byte> begun_there_;  // a frame of which not all has come
};

const deaths certain{{1U, comm::death::certain}};
const deaths suspected{{1U, comm::death::suspected}};

}  // namespace

TEST_CASE("a process that connects is reported, receives a heartbeat, and its frames are delivered") {
  peers_here here;
  CHECK_FALSE(here.peers.is_up(other));
  CHECK(here.peers.is_free(other));
  here.connect();
  CHECK(here.heard.arrivals == std::vector<std::uint32_t>{1});
  CHECK(here.peers.is_up(other));
  CHECK_FALSE(here.peers.is_up(seat_id{2}));  // a seat that does not exist
  CHECK_FALSE(here.peers.is_free(other));
  CHECK(here.told_there() == std::vector{frame_sort::beat});
  REQUIRE(here.say(socket_lane::told, frame_sort::frame, bytes_of("now")));
  REQUIRE(here.say(socket_lane::data, frame_sort::frame, bytes_of("bytes")));
  here.turn();
  CHECK(here.heard.tellings.size() == 1);
  REQUIRE(here.heard.frames.size() == 1);
  CHECK(here.heard.frames[0].bytes == bytes_of("bytes"));
  CHECK(here.stats().connected == 1);
}

TEST_CASE("a process that leaves is certainly dead, after all its earlier frames") {
  for (const bool is_late : {false, true}) {
    peers_here here;
    here.connect();
    REQUIRE(here.say(socket_lane::data, frame_sort::frame, bytes_of("last")));
    REQUIRE(here.say(socket_lane::told, frame_sort::leaving));
    if (!is_late) {
      here.data.there.close();
      here.told.there.close();
    }
    here.turn();
    // While its lanes are open, more of it may be on its way.
    CHECK(here.heard.deaths == (is_late ? deaths{} : certain));
    here.turn(100 * ms);
    CHECK(here.heard.deaths == certain);
    CHECK(here.heard.frames.size() == 1);
    CHECK_FALSE(here.peers.is_up(other));
    CHECK(here.peers.is_free(other));
    here.turn(10'000 * ms);
    CHECK(here.heard.deaths == certain);
  }
}

TEST_CASE("a process that gave this one up is suspected, and ignored") {
  peers_here here;
  here.connect();
  REQUIRE(here.say(socket_lane::told, frame_sort::given_up));
  REQUIRE(here.say(socket_lane::told, frame_sort::frame, bytes_of("unheard")));
  here.turn();
  CHECK(here.heard.deaths == suspected);
  CHECK(here.heard.tellings.empty());
  CHECK(here.peers.is_free(other));
  // Its death is still reported.
  here.data.there.close();
  here.told.there.close();
  here.turn();
  CHECK(here.heard.deaths == deaths{{1U, comm::death::suspected}, {1U, comm::death::certain}});
}

TEST_CASE("a process that gave this one up and then left is suspected first, even if one poll reads both") {
  for (const bool has_exited : {false, true}) {
    CAPTURE(has_exited);
    peers_here here;
    here.connect(has_exited);
    REQUIRE(here.say(socket_lane::told, frame_sort::given_up));
    REQUIRE(here.say(socket_lane::told, frame_sort::leaving));
    here.data.there.close();
    here.told.there.close();
    if (has_exited) here.exit();
    here.turn();
    CHECK(here.heard.deaths == deaths{{1U, comm::death::suspected}, {1U, comm::death::certain}});
  }
}

TEST_CASE(
    "a process's notice that it gave this one up is reported before its end, even if its end is seen first") {
  const deaths both{{1U, comm::death::suspected}, {1U, comm::death::certain}};
  {
    peers_here here;  // the lane of data ends first
    here.connect();
    here.data.there.close();
    here.turn();
    REQUIRE(here.heard.deaths.empty());
    REQUIRE(here.say(socket_lane::told, frame_sort::given_up));
    REQUIRE(here.say(socket_lane::told, frame_sort::leaving));
    here.turn();
    here.turn(1'000'000'000);
    CHECK(here.heard.deaths == both);
  }
  {
    peers_here here;  // the process exits before what it said last is read
    here.connect(true);
    REQUIRE(here.say(socket_lane::told, frame_sort::given_up));
    here.told.there.close();
    here.data.there.close();
    here.exit();
    epoll_event exited{};
    exited.events = EPOLLIN;
    exited.data.u64 = detail::event_key(detail::socket_event::process, here.peers.generation(other), 1);
    here.peers.handle(ready_event(exited), here.call);
    CHECK(here.heard.deaths == suspected);
    here.turn(1'000'000'000);
    CHECK(here.heard.deaths == both);
  }
  {
    peers_here here;  // what is no frame comes in the same look
    here.connect(true);
    REQUIRE(here.say(socket_lane::told, frame_sort::given_up));
    REQUIRE(here.told.say_there(std::vector<std::byte>(detail::wire_header_bytes, std::byte{0xFF})));
    here.exit();
    here.turn();
    here.turn(1'000'000'000);
    CHECK(here.heard.deaths == both);
  }
}

TEST_CASE("the end of a connection counts as the options say if no process is known") {
  for (const on_reset reset : {on_reset::dead, on_reset::suspected}) {
    peers_here here({.reset = reset});
    here.connect();
    REQUIRE(here.say(socket_lane::data, frame_sort::frame, bytes_of("last")));
    here.data.there.close();
    here.turn();
    CHECK(here.heard.deaths.empty());  // the control lane may have more
    here.told.there.close();
    here.turn();
    CHECK(here.heard.deaths == (reset == on_reset::dead ? certain : suspected));
    CHECK(here.heard.frames.size() == 1);
  }
}

TEST_CASE("a process that exits is dead even if a child keeps its lanes open; a live one is suspected") {
  for (const bool exits : {true, false}) {
    peers_here here({.folder = "/tmp"});
    here.connect(true);
    REQUIRE(here.say(socket_lane::data, frame_sort::frame, bytes_of("last")));
    if (exits) {
      here.exit();
    } else {
      here.data.there.close();
      here.told.there.close();
    }
    here.turn();
    CHECK(here.heard.deaths == (exits ? certain : deaths{}));
    here.turn(99 * ms);
    CHECK(here.heard.deaths == (exits ? certain : deaths{}));
    here.turn(1 * ms);
    CHECK(here.heard.deaths == (exits ? certain : suspected));
    CHECK(here.heard.frames.size() == 1);
  }
}

TEST_CASE(
    "if a frame has no buffer when its sender dies, the handler is asked once more, and then it is dropped") {
  for (const bool has_room : {true, false}) {
    peers_here here;
    here.connect();
    here.heard.answer = frame_buffer::answer::ask_again;
    REQUIRE(here.say(socket_lane::data, frame_sort::frame, bytes_of("held")));
    here.turn();
    CHECK(here.peers.has_held());
    if (has_room) here.heard.answer = frame_buffer::answer::take;
    REQUIRE(here.say(socket_lane::told, frame_sort::leaving));
    here.turn();
    here.turn(100 * ms);
    CHECK(here.heard.deaths == certain);
    CHECK(here.heard.frames.size() == (has_room ? 1 : 0));
    CHECK_FALSE(here.peers.has_held());
  }
}

TEST_CASE("a sender of bytes that are not a frame is suspected, and informed of it") {
  for (const socket_lane lane : {socket_lane::data, socket_lane::told}) {
    peers_here here;
    here.connect();
    REQUIRE((lane == socket_lane::data ? here.data : here.told).say_there(std::vector(99, std::byte{0xFF})));
    here.turn();
    CHECK(here.heard.deaths == suspected);
    CHECK(here.told_there() == std::vector{frame_sort::beat, frame_sort::given_up});
    CHECK(here.stats().malformed == 1);
    CHECK(here.peers.is_rejected(other, [] {
      detail::incarnation_id life{};
      life.fill(std::byte{9});
      return life;
    }()));
  }
}

TEST_CASE(
    "a process that reads none of its control messages is suspected, and learns it when it reads again") {
  peers_here here;
  here.told = socket_pair(4096);
  here.connect();
  int told = 0;
  while (!here.control.has_overflowed(other)) {
    here.peers.post(other, {}, std::vector<std::byte>(max_post_bytes));
    ++told;
  }
  CHECK(here.poller.clock().is_due());
  here.turn();
  CHECK(here.heard.deaths == suspected);
  CHECK(here.stats().overflowed == 1);
  std::vector<frame_sort> sorts = here.told_there();
  for (int i = 0; i < 20; ++i) {
    here.turn();
    for (const frame_sort each : here.told_there())
      sorts.push_back(each);
  }
  CHECK(sorts.size() == static_cast<std::size_t>(told) + 1);  // one did not fit; a beat and a notice
  CHECK(sorts.back() == frame_sort::given_up);
}

TEST_CASE("a silent process is suspected after the hard limit, measured up to the last read") {
  peers_here here({.soft_silence_ns = 200 * ms, .hard_silence_ns = 500 * ms});
  here.connect();
  here.pass(300 * ms);
  CHECK(here.stats().silent == 1);
  CHECK(here.heard.deaths.empty());
  here.pass(199 * ms);
  CHECK(here.heard.deaths.empty());
  // A last look finds that it has said something.
  REQUIRE(here.say(socket_lane::told, frame_sort::beat));
  here.pass(10 * ms);
  CHECK(here.heard.deaths.empty());
  here.pass(600 * ms);
  CHECK(here.heard.deaths == suspected);
}

TEST_CASE("a process whose heartbeats wait for a core is not silent, if the kernel reports that") {
  struct {
    bool has_process;
    bool is_own;
    bool is_excused;
  } const cases[] = {{true, false, true}, {false, false, false}, {true, true, false}};
  for (const on_silence silence : {on_silence::suspect, on_silence::kill_local}) {
    for (const auto& each : cases) {
      CAPTURE(each.has_process);
      CAPTURE(each.is_own);
      peers_here here({.silence = silence, .hard_silence_ns = 500 * ms});
      here.connect(each.has_process, each.is_own);
      is_starved = true;  // a scheduler that stands still
      for (int i = 0; i < 100; ++i)
        here.pass(50 * ms);
      is_starved = false;
      const bool is_killed = each.has_process && !each.is_own && silence == on_silence::kill_local;
      CHECK(here.stats().killed == (is_killed && !each.is_excused ? 1 : 0));
      CHECK(here.heard.deaths.empty() == (each.is_excused || is_killed));
      if (!each.is_excused) continue;
      // What it stands still otherwise counts, from where its silence was.
      here.pass(350 * ms);
      CHECK(here.heard.deaths.empty());
      CHECK(here.stats().killed == 0);
      here.pass(50 * ms);
      CHECK(here.heard.deaths.empty() == is_killed);
      CHECK(here.stats().killed == (is_killed ? 1 : 0));
    }
  }
  // In turns with the time that it has a core and says nothing.
  peers_here here({.hard_silence_ns = 500 * ms});
  here.connect(true);
  std::uint64_t silent = 0;
  for (int i = 0; here.heard.deaths.empty() && i < 1000; ++i) {
    is_starved = i % 3 != 0;
    silent += is_starved && silent >= 125 * ms ? 0 : 10 * ms;
    here.pass(10 * ms);
  }
  is_starved = false;
  CHECK(silent == 500 * ms);
}

TEST_CASE("a given-up process is reported only if its death is certain") {
  peers_here here;
  here.peers.give_up(other);  // nobody is there
  here.peers.give_up(seat_id{5});
  here.connect();
  here.peers.give_up(other);
  CHECK_FALSE(here.peers.is_up(other));
  CHECK(here.told_there() == std::vector{frame_sort::beat, frame_sort::given_up});
  REQUIRE(here.say(socket_lane::data, frame_sort::frame, bytes_of("unheard")));
  here.turn();
  CHECK(here.heard.frames.empty());
  CHECK(here.heard.deaths.empty());
  REQUIRE(here.say(socket_lane::told, frame_sort::leaving));
  here.turn();
  CHECK(here.heard.deaths == certain);
}

TEST_CASE("a process that is already dead when it is given up is reported with the next timers") {
  peers_here here;
  here.connect();
  REQUIRE(here.say(socket_lane::told, frame_sort::leaving));
  here.turn();
  CHECK(here.heard.deaths.empty());  // it is ending
  here.peers.give_up(other);
  CHECK(here.poller.clock().is_due());
  here.turn();
  CHECK(here.heard.deaths == certain);
}

TEST_CASE("the seat of a dead process is called again after the first pause") {
  peers_here here;
  CHECK(here.calls.is_due(other));
  here.connect();
  REQUIRE(here.say(socket_lane::told, frame_sort::leaving));
  here.data.there.close();
  here.told.there.close();
  here.turn();
  REQUIRE(here.heard.deaths == certain);
  const std::uint64_t now = here.poller.clock().now();
  CHECK_FALSE(here.calls.is_due(other));
  here.poller.clock().begin(now + here.options.first_call_ns);
  CHECK(here.calls.is_due(other));
}

TEST_CASE("messages to an empty seat, and messages that are too long, are dropped and counted") {
  peers_here here;
  here.peers.post(other, {}, {});
  here.peers.post(seat_id{9}, {}, {});
  here.connect();
  here.peers.post(other, {}, std::vector<std::byte>(max_post_bytes + 1));
  CHECK(here.stats().dropped == 3);
  here.peers.post(other, {}, std::vector<std::byte>(max_post_bytes));
  CHECK(here.stats().dropped == 3);
  CHECK(here.told_there() == std::vector{frame_sort::beat, frame_sort::frame});
}

TEST_CASE("a write to a connection that is broken is evidence, and a verdict follows") {
  peers_here here;
  here.connect();
  here.data.there.close();
  here.told.there.close();
  detail::outgoing_frame frame = here.peers.begin_frame(other, {}, {});
  CHECK(here.peers.write(other, frame) < 0);
  CHECK_FALSE(here.peers.is_up(other));
  CHECK(here.heard.deaths.empty());
  here.turn();
  CHECK(here.heard.deaths == certain);
}

TEST_CASE("an endpoint that leaves informs all others, and closes their lanes") {
  peers_here here;
  here.connect();
  here.peers.leave();
  CHECK(here.told_there() == std::vector{frame_sort::beat, frame_sort::leaving});
  CHECK(here.told.is_closed_there());
  CHECK(here.data.is_closed_there());
  CHECK_FALSE(here.peers.is_up(other));
}
