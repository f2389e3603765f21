/// The lanes of peers over plain socket pairs: one object sends to another, or the test writes by hand.
#include <llmmem/comm/detail/peer_lanes.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/socket_pair.hpp"
#include "support/socket_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using detail::frame_sort;
using detail::handler_call;
using detail::lane_event;
using detail::lane_flush;
using detail::peer_lanes;
using detail::socket_lane;
using detail::socket_poller;

namespace {

constexpr std::uint32_t most_bytes = 60'000;

/// Lanes of three seats, of which the other ends are the test's.
struct lanes_here {
  socket_poller poller{true};
  peer_lanes lanes{poller, 3, most_bytes};
  recorder heard;
  handler_call call{detail::refer_to(heard)};
  std::array<socket_pair, 3> data;
  std::array<socket_pair, 3> told;

  /// Gives the lanes their sockets; the pairs keep only the test's ends.
  void open(std::uint32_t seat) {
    lanes.reserve(seat_id{seat});
    lanes.open(seat_id{seat}, std::move(data[seat].here), std::move(told[seat].here));
  }
  bool say(std::uint32_t seat, socket_lane lane, frame_sort sort, std::uint32_t sequence,
           std::span<const std::byte> bytes = {}) {
    std::vector<std::byte> all(detail::wire_header_bytes);
    detail::write_header({{.bytes = static_cast<std::uint32_t>(bytes.size())}, lane, sort, sequence},
                         std::span<std::byte, detail::wire_header_bytes>(all.data(), all.size()));
    all.insert(all.end(), bytes.begin(), bytes.end());
    return (lane == socket_lane::data ? data : told)[seat].say_there(all);
  }
  /// The seats whose data lane epoll reports as readable.
  std::vector<std::uint32_t> reported() {
    poller.begin();
    poller.clock().restart_timers();
    socket_poller::event_array events{};
    const auto found = poller.wait(0, -1, -1, events);
    std::vector<std::uint32_t> seats;
    for (std::size_t i = 0; i < found.events; ++i) {
      const detail::ready_event event(events[i]);
      if (event.of == detail::socket_event::data && event.is_readable) seats.push_back(event.index);
    }
    return seats;
  }
};

}  // namespace

TEST_CASE("frames arrive complete and in order, although each may be cut anywhere and finished later") {
  std::size_t cut = 0;
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    lanes_here receiver;
    socket_poller poller(true);
    peer_lanes sender(poller, 2, most_bytes);
    socket_pair data(8192);
    socket_pair told;
    sender.reserve(seat_id{1});
    sender.open(seat_id{1}, std::move(data.here), std::move(told.here));
    receiver.data[0].here = std::move(data.there);
    receiver.open(0);
    const auto receive = [&] {
      receiver.heard.answer =
          random.once_in(4) ? frame_buffer::answer::ask_again : frame_buffer::answer::take;
      if (receiver.lanes.held().contains(seat_id{0})) {
        REQUIRE(receiver.lanes.ask(seat_id{0}, receiver.call) != lane_event::malformed);
      } else {
        const auto got = receiver.lanes.read_data(seat_id{0}, receiver.call);
        REQUIRE((got.event == lane_event::more || got.event == lane_event::drained));
      }
    };
    std::vector<heard_frame> sent;
    for (std::uint64_t number = 0; number < 60; ++number) {
      std::vector<std::byte> bytes(random.below(random.once_in(2) ? 100U : most_bytes));
      for (std::byte& each : bytes)
        each = static_cast<std::byte>(random.next());
      const frame_header header{.message = number, .bytes = static_cast<std::uint32_t>(bytes.size())};
      sent.push_back({seat_id{0}, header, bytes});
      while (sender.flush(seat_id{1}) != lane_flush::done)
        receive();
      detail::outgoing_frame frame = sender.begin_frame(seat_id{1}, header, bytes);
      while (!frame.is_complete()) {
        REQUIRE(sender.write(seat_id{1}, frame) >= 0);
        if (frame.is_begun() && !frame.is_complete() && random.once_in(3)) {
          sender.keep_rest(seat_id{1}, frame);
          bytes.assign(bytes.size(), std::byte{0});  // the lanes have a copy
          ++cut;
          break;
        }
        if (!frame.is_complete()) receive();
      }
    }
    for (int i = 0; i < 2000 && receiver.heard.frames.size() < sent.size(); ++i) {
      static_cast<void>(sender.flush(seat_id{1}));
      receive();
    }
    CHECK(receiver.heard.frames == sent);
    socket_stats out;
    socket_stats in;
    sender.add_to(out);
    receiver.lanes.add_to(in);
    CHECK(out.data_sent.frames == sent.size());
    CHECK(in.data_received.frames == sent.size());
    CHECK(out.data_sent.bytes == in.data_received.bytes);
  }
  CHECK(cut > 20);
}

TEST_CASE("the lane sends the rest of a frame from a copy, so the caller may reuse its bytes") {
  socket_poller poller(true);
  peer_lanes sender(poller, 2, most_bytes);
  socket_pair data(4096);
  socket_pair told;
  sender.reserve(seat_id{1});
  sender.open(seat_id{1}, std::move(data.here), std::move(told.here));
  std::vector<std::byte> bytes(most_bytes, std::byte{7});
  detail::outgoing_frame frame = sender.begin_frame(seat_id{1}, {}, bytes);
  while (sender.write(seat_id{1}, frame) > 0) {
  }
  REQUIRE(frame.is_begun());
  REQUIRE_FALSE(frame.is_complete());
  sender.keep_rest(seat_id{1}, frame);
  std::ranges::fill(bytes, std::byte{9});
  std::vector<std::byte> came;
  lane_flush how{};
  do {
    how = sender.flush(seat_id{1});
    const auto more = data.hear_there();
    came.insert(came.end(), more.begin(), more.end());
  } while (how == lane_flush::waits);
  CHECK(how == lane_flush::done);
  REQUIRE(came.size() == detail::wire_header_bytes + most_bytes);
  CHECK(std::all_of(came.begin() + detail::wire_header_bytes, came.end(),
                    [](std::byte each) { return each == std::byte{7}; }));
}

TEST_CASE("a lane whose handler has no buffer is held: neither read nor reported until there is one") {
  lanes_here here;
  here.open(1);
  here.heard.answer = frame_buffer::answer::ask_again;
  REQUIRE(here.say(1, socket_lane::data, frame_sort::frame, 0, bytes_of("abc")));
  CHECK(here.reported() == std::vector<std::uint32_t>{1});
  const auto got = here.lanes.read_data(seat_id{1}, here.call);
  CHECK(got.event == lane_event::drained);
  CHECK(got.bytes == detail::wire_header_bytes + 3);
  CHECK(here.lanes.held().contains(seat_id{1}));
  REQUIRE(here.say(1, socket_lane::data, frame_sort::frame, 1));
  CHECK(here.lanes.read_data(seat_id{1}, here.call).bytes == 0);
  CHECK(here.reported().empty());
  CHECK(here.lanes.ask(seat_id{1}, here.call) == lane_event::drained);
  CHECK(here.lanes.has_held());
  CHECK_FALSE(here.call.has_come);
  here.heard.answer = frame_buffer::answer::take;
  CHECK(here.lanes.ask(seat_id{1}, here.call) == lane_event::more);
  CHECK(here.call.has_come);
  CHECK_FALSE(here.lanes.has_held());
  CHECK(here.reported() == std::vector<std::uint32_t>{1});
  CHECK(here.heard.frames.size() == 1);
}

TEST_CASE("a held lane may have no frame once there is a buffer") {
  lanes_here here;
  here.open(1);
  here.heard.answer = frame_buffer::answer::ask_again;
  REQUIRE(here.say(1, socket_lane::data, frame_sort::frame, 0));
  REQUIRE(here.say(1, socket_lane::data, frame_sort::frame, 5));
  static_cast<void>(here.lanes.read_data(seat_id{1}, here.call));
  here.heard.answer = frame_buffer::answer::take;
  CHECK(here.lanes.ask(seat_id{1}, here.call) == lane_event::malformed);
}

TEST_CASE(
    "a closed lane has ended, and a lane with bytes that are not a frame is malformed, for both lanes") {
  for (const socket_lane lane : {socket_lane::data, socket_lane::told}) {
    for (const bool is_malformed : {false, true}) {
      lanes_here here;
      here.open(2);
      auto& pair = (lane == socket_lane::data ? here.data : here.told)[2];
      if (is_malformed) {
        REQUIRE(pair.say_there(std::vector(200, std::byte{0xEE})));
      } else {
        pair.there.close();
      }
      const auto read = [&] {
        return lane == socket_lane::data ? here.lanes.read_data(seat_id{2}, here.call)
                                         : here.lanes.read_told(seat_id{2}, here.call);
      };
      const auto got = read();
      CHECK(got.event == (is_malformed ? lane_event::malformed : lane_event::ended));
      CHECK((got.bytes != 0) == is_malformed);
      CHECK_FALSE(here.lanes.have_ended(seat_id{2}));
      here.lanes.end(seat_id{2}, lane);
      CHECK(read().event == lane_event::drained);  // it is not read any more
      here.lanes.end(seat_id{2}, lane == socket_lane::data ? socket_lane::told : socket_lane::data);
      CHECK(here.lanes.have_ended(seat_id{2}));
      CHECK(here.reported().empty());
    }
  }
}

TEST_CASE("a lane that is drained or muted delivers nothing, and a muted one still shows notices") {
  for (const bool is_drained : {false, true}) {
    lanes_here here;
    here.open(0);
    if (is_drained) {
      here.lanes.drain(seat_id{0});
    } else {
      here.lanes.mute(seat_id{0});
    }
    REQUIRE(here.say(0, socket_lane::data, frame_sort::frame, 0, bytes_of("abc")));
    REQUIRE(here.say(0, socket_lane::told, frame_sort::frame, 0, bytes_of("abc")));
    REQUIRE(here.say(0, socket_lane::told, frame_sort::leaving, 1));
    CHECK(here.lanes.read_data(seat_id{0}, here.call).bytes != 0);
    CHECK(here.lanes.read_told(seat_id{0}, here.call).bytes != 0);
    CHECK(here.heard.frames.empty());
    CHECK(here.heard.tellings.empty());
    CHECK_FALSE(here.call.has_come);
    CHECK(here.lanes.is_leaving(seat_id{0}) == !is_drained);
  }
}

TEST_CASE("a lane that is read 64 consecutive times becomes hot until another lane does") {
  lanes_here here;
  here.open(0);
  here.open(1);
  std::array<std::uint32_t, 2> sequence{};
  const auto read_times = [&](std::uint32_t seat, int times) {
    for (int i = 0; i < times; ++i) {
      REQUIRE(here.say(seat, socket_lane::data, frame_sort::frame, sequence[seat]++));
      REQUIRE(here.lanes.read_data(seat_id{seat}, here.call).bytes != 0);
    }
  };
  CHECK(here.lanes.last_from() == no_seat);
  read_times(0, 63);
  CHECK(here.lanes.hot() == no_seat);
  CHECK(here.lanes.hot_socket() == -1);
  read_times(0, 1);
  CHECK(here.lanes.hot() == seat_id{0});
  CHECK(here.lanes.hot_socket() == here.lanes.data_socket(seat_id{0}));
  REQUIRE(here.say(0, socket_lane::data, frame_sort::frame, sequence[0]++));
  REQUIRE(here.say(1, socket_lane::data, frame_sort::frame, sequence[1]++));
  CHECK(here.reported() == std::vector<std::uint32_t>{1});
  CHECK(here.lanes.read_data(seat_id{1}, here.call).bytes != 0);
  read_times(1, 63);
  CHECK(here.lanes.hot() == seat_id{1});
  CHECK(here.lanes.last_from() == seat_id{1});
  CHECK(here.reported() == std::vector<std::uint32_t>{0});
  here.lanes.end(seat_id{1}, socket_lane::data);
  CHECK(here.lanes.hot_socket() == -1);
  here.lanes.close(seat_id{1});
  CHECK(here.lanes.hot() == no_seat);
}

TEST_CASE("a broken lane reports it at the next write, and drops the waiting bytes") {
  lanes_here here;
  here.data[0] = socket_pair(4096);
  here.open(0);
  const std::vector<std::byte> bytes(most_bytes);
  detail::outgoing_frame frame = here.lanes.begin_frame(seat_id{0}, {}, bytes);
  while (here.lanes.write(seat_id{0}, frame) > 0) {
  }
  here.lanes.keep_rest(seat_id{0}, frame);
  CHECK(here.lanes.flush(seat_id{0}) == lane_flush::waits);
  here.data[0].there.close();
  CHECK(here.lanes.write(seat_id{0}, frame) < 0);
  CHECK(here.lanes.flush(seat_id{0}) == lane_flush::broken);
  CHECK(here.lanes.flush(seat_id{0}) == lane_flush::done);
}

TEST_CASE(
    "a close notifies the peer, and the seat's next process has another generation and counts from zero") {
  lanes_here here;
  here.open(2);
  REQUIRE(here.say(2, socket_lane::data, frame_sort::frame, 0));
  CHECK(here.lanes.read_data(seat_id{2}, here.call).bytes != 0);
  const std::uint32_t generation = here.lanes.generation(seat_id{2});
  REQUIRE(here.say(2, socket_lane::data, frame_sort::frame, 1));
  here.lanes.shut_down(seat_id{2});
  CHECK(here.data[2].is_closed_there());
  here.lanes.close(seat_id{2});
  CHECK_FALSE(here.lanes.is_open(seat_id{2}));
  CHECK(here.lanes.generation(seat_id{2}) == generation + 1);
  CHECK(here.told[2].is_closed_there());
  here.data[2] = socket_pair();
  here.told[2] = socket_pair();
  here.open(2);
  REQUIRE(here.say(2, socket_lane::data, frame_sort::frame, 0));
  CHECK(here.lanes.read_data(seat_id{2}, here.call).event != lane_event::malformed);
}
