/// The heartbeats of a control channel, beside messages of its owner.
#include <llmmem/comm/detail/control_channel.hpp>

#include <doctest/doctest.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "support/socket_pair.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using detail::control_channel;
using detail::frame_sort;

namespace {

constexpr std::uint64_t beat_ms = 1'000'000;

}  // namespace

TEST_CASE("heartbeats and the owner's messages share one lane, and each arrives complete") {
  const detail::socket_poller poller(true);
  control_channel channel(poller, 2, 2 * max_post_bytes);
  const socket_pair pair;
  channel.reserve(seat_id{1});
  channel.start(beat_ms);
  channel.open(seat_id{1}, pair.here.get(), detail::event_key(detail::socket_event::told, 0, 1));
  std::vector<std::byte> bytes;
  std::uint32_t sequence = 0;
  std::uint64_t beats = 0;
  std::uint64_t messages = 0;
  std::uint64_t sent = 0;
  while (beats < 20 || messages < 200) {
    if (channel.post(seat_id{1}, {.message = sent}, std::vector(100, std::byte{5}))) ++sent;
    if (sent % 10 == 0) ::usleep(500);
    const std::vector<std::byte> more = pair.hear_there();
    bytes.insert(bytes.end(), more.begin(), more.end());
    constexpr std::size_t head = detail::wire_header_bytes;
    while (bytes.size() >= head) {
      const auto header = detail::read_header(std::span<const std::byte, head>(bytes.data(), head),
                                              detail::socket_lane::told, sequence, max_post_bytes);
      REQUIRE(header.has_value());
      if (bytes.size() < head + header->frame.bytes) break;
      ++sequence;
      if (header->sort == frame_sort::frame) REQUIRE(header->frame.message == messages++);
      if (header->sort == frame_sort::beat) ++beats;
      bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(head + header->frame.bytes));
    }
  }
  channel.stop();
  pair.drain_there();
  ::usleep(5'000);
  CHECK(pair.hear_there().empty());
}

TEST_CASE("no heartbeat goes to a closed lane, whose socket the owner may close") {
  const detail::socket_poller poller(true);
  control_channel channel(poller, 1, 2 * max_post_bytes);
  channel.reserve(seat_id{0});
  channel.start(beat_ms);
  for (int i = 0; i < 50; ++i) {
    socket_pair pair;
    channel.open(seat_id{0}, pair.here.get(), detail::event_key(detail::socket_event::told, 0, 0));
    ::usleep(500);
    channel.close(seat_id{0});
    pair.here.close();
  }
  socket_stats all;
  channel.add_to(all);
  CHECK(all.beats_sent >= 50);  // one at each beginning
}
