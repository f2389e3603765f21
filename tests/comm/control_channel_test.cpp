/// Control messages over plain socket pairs, read frame by frame at the other end.
#include <llmmem/comm/detail/control_channel.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/socket_pair.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using detail::control_channel;
using detail::frame_sort;
using detail::socket_event;
using detail::socket_poller;

namespace {

constexpr std::uint32_t room = 3 * max_post_bytes;

struct read_frame {
  frame_sort sort;
  frame_header header;
  std::vector<std::byte> bytes;

  bool operator==(const read_frame&) const = default;
};

/// Takes frames from the test's end of a lane. Every byte must belong to a frame in its turn.
class lane_end {
 public:
  explicit lane_end(const socket_pair& pair) : pair_(pair) {}

  std::vector<read_frame> read(std::size_t most = std::size_t{1} << 24) {
    const std::vector<std::byte> more = pair_.hear_there(most);
    bytes_.insert(bytes_.end(), more.begin(), more.end());
    std::vector<read_frame> all;
    constexpr std::size_t head = detail::wire_header_bytes;
    while (bytes_.size() >= head) {
      const auto header = detail::read_header(std::span<const std::byte, head>(bytes_.data(), head),
                                              detail::socket_lane::told, sequence_, max_post_bytes);
      REQUIRE(header.has_value());
      const std::size_t whole = head + header->frame.bytes;
      if (bytes_.size() < whole) break;
      ++sequence_;
      const auto begin = bytes_.begin() + head;
      const auto end = bytes_.begin() + static_cast<std::ptrdiff_t>(whole);
      all.push_back({header->sort, header->frame, {begin, end}});
      bytes_.erase(bytes_.begin(), end);
    }
    return all;
  }

 private:
  const socket_pair& pair_;
  std::vector<std::byte> bytes_;
  std::uint32_t sequence_ = 0;
};

/// One lane of a channel for three seats.
struct one_lane {
  socket_poller poller{true};
  control_channel channel{poller, 3, room};
  socket_pair pair;
  lane_end end{pair};
  seat_id seat{1};

  explicit one_lane(int buffer_bytes = 0) : pair(buffer_bytes) {
    channel.reserve(seat);
    const std::uint64_t key = detail::event_key(socket_event::told, 0, 1);
    REQUIRE(poller.add(pair.here.get(), EPOLLIN, key));
    channel.open(seat, pair.here.get(), key);
  }
  /// Whether the poller reports that the lane can be written to.
  bool is_armed() {
    poller.begin();
    poller.clock().restart_timers();
    socket_poller::event_array events{};
    const auto found = poller.wait(0, -1, -1, events);
    return found.events == 1 && detail::ready_event(events[0]).is_writable;
  }
  bool post(std::uint64_t number, std::size_t bytes) {
    return channel.post(seat, {.message = number}, std::vector(bytes, std::byte(number)));
  }
};

std::vector<frame_sort> sorts_of(const std::vector<read_frame>& frames) {
  std::vector<frame_sort> sorts;
  std::ranges::transform(frames, std::back_inserter(sorts), &read_frame::sort);
  return sorts;
}

}  // namespace

TEST_CASE("a lane begins with a heartbeat, and sends each message at once while the socket has space") {
  one_lane lane;
  CHECK(sorts_of(lane.end.read()) == std::vector{frame_sort::beat});
  CHECK(lane.post(7, 3));
  const std::vector<read_frame> expected{
      {frame_sort::frame, {.message = 7, .bytes = 3}, std::vector(3, std::byte{7})}};
  CHECK(lane.end.read() == expected);
  CHECK_FALSE(lane.is_armed());
  socket_stats all;
  lane.channel.add_to(all);
  CHECK(all.beats_sent == 1);
  CHECK(all.posts_sent.frames == 1);
  CHECK(all.posts_sent.bytes == 3);
}

TEST_CASE("bytes that the socket refuses wait, and leave complete and in order as the peer reads") {
  std::size_t waits = 0;
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    one_lane lane(4096);
    static_cast<void>(lane.end.read());
    std::vector<read_frame> sent;
    std::vector<read_frame> read;
    std::size_t unread = 0;
    const auto read_some = [&](std::size_t most) {
      for (read_frame& each : lane.end.read(most)) {
        unread -= detail::wire_header_bytes + each.bytes.size();
        read.push_back(std::move(each));
      }
    };
    for (int i = 0; i < 300; ++i) {
      const std::size_t size = random.below(std::uint64_t{max_post_bytes});
      const std::size_t whole = detail::wire_header_bytes + size;
      if (unread + whole <= room) {  // beyond that it may overflow
        const std::uint64_t number = sent.size();
        REQUIRE(lane.post(number, size));
        sent.push_back({frame_sort::frame,
                        {.message = number, .bytes = static_cast<std::uint32_t>(size)},
                        std::vector(size, std::byte(number))});
        unread += whole;
      }
      waits += lane.pair.is_full_here() ? 1U : 0U;
      if (random.once_in(2)) read_some(random.below(std::uint64_t{10'000}));
      if (lane.is_armed()) lane.channel.flush(lane.seat);
    }
    for (int i = 0; i < 100 && unread != 0; ++i) {
      read_some(std::size_t{1} << 24);
      lane.channel.flush(lane.seat);
    }
    CHECK(read == sent);
    CHECK_FALSE(lane.is_armed());
  }
  CHECK(waits > 100);
}

TEST_CASE("the poller reports a writable lane exactly while bytes wait for it") {
  one_lane lane;
  lane.pair.drain_there();
  lane.pair.fill_here();
  CHECK(lane.post(1, 100));
  CHECK_FALSE(lane.is_armed());  // it is full
  lane.pair.drain_there();
  CHECK(lane.is_armed());
  lane.channel.flush(lane.seat);
  CHECK_FALSE(lane.is_armed());
}

TEST_CASE("a lane that overflows accepts only one more notice, for which space is reserved") {
  one_lane lane;
  static_cast<void>(lane.end.read());
  lane.pair.fill_here();
  std::uint64_t fitted = 0;
  while (lane.post(fitted, max_post_bytes))
    ++fitted;
  CHECK(fitted >= 1);
  CHECK(lane.channel.has_overflowed(lane.seat));
  CHECK_FALSE(lane.post(1000, 0));
  lane.channel.leave(lane.seat);  // is dropped
  lane.channel.give_up(lane.seat);
  CHECK_FALSE(lane.channel.has_overflowed(lane.seat));
  lane.pair.drain_there();  // the bytes that filled the socket
  std::vector<frame_sort> sorts;
  lane.channel.flush(lane.seat);
  for (int i = 0; i < 10; ++i) {
    const auto more = sorts_of(lane.end.read());
    sorts.insert(sorts.end(), more.begin(), more.end());
    lane.channel.flush(lane.seat);
  }
  std::vector expected(fitted, frame_sort::frame);
  expected.push_back(frame_sort::given_up);
  CHECK(sorts == expected);
}

TEST_CASE("a process that leaves announces it after the waiting messages") {
  one_lane lane;
  static_cast<void>(lane.end.read());
  lane.pair.fill_here();
  CHECK(lane.post(1, 10));
  lane.pair.drain_there();
  lane.channel.leave(lane.seat);
  CHECK(sorts_of(lane.end.read()) == std::vector{frame_sort::frame, frame_sort::leaving});
}

TEST_CASE("a seat without a lane receives nothing, and a reopened lane starts again") {
  one_lane lane;
  CHECK(lane.channel.post(seat_id{2}, {}, {}));
  lane.channel.give_up(seat_id{0});
  lane.pair.drain_there();
  lane.pair.fill_here();
  CHECK(lane.post(1, 100));
  lane.channel.close(lane.seat);
  lane.pair.drain_there();
  lane.channel.flush(lane.seat);
  CHECK(lane.post(2, 100));
  CHECK(lane.pair.hear_there().empty());
  socket_pair fresh;
  const std::uint64_t key = detail::event_key(socket_event::told, 1, 1);
  REQUIRE(lane.poller.add(fresh.here.get(), EPOLLIN, key));
  lane.channel.open(lane.seat, fresh.here.get(), key);
  lane_end end(fresh);  // counts frames from 0
  CHECK(lane.post(3, 0));
  CHECK(sorts_of(end.read()) == std::vector{frame_sort::beat, frame_sort::frame});
}

TEST_CASE("a lane whose peer no longer exists accepts and drops messages; its reader finds the end") {
  one_lane lane;
  lane.pair.there.close();
  CHECK(lane.post(1, 10));
  lane.channel.flush(lane.seat);
  CHECK(lane.post(2, 10));
  CHECK_FALSE(lane.channel.has_overflowed(lane.seat));
}
