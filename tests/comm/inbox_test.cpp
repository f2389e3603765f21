// What becomes of messages that come before they are asked for, in part, or not as they were asked for.
#include <llmmem/comm/detail/inbox.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

using namespace llmmem;

namespace {

using answer = frame_buffer::answer;
using kind = detail::message_outcome::kind;

const seat_id one{1};

/// An inbox that two seats send to, byte for byte.
struct filled_inbox : detail::inbox {
  explicit filled_inbox(std::uint64_t early_bytes) : inbox(2, early_bytes) {}

  /// Bytes `from` to `to` of a message of seat 1, each of which is `fill`.
  answer takes(std::uint32_t tag, std::uint64_t message, std::uint64_t from, std::uint64_t to,
               std::byte fill) {
    const frame_header frame{
        .message = message, .offset = from, .bytes = static_cast<std::uint32_t>(to - from), .tag = tag};
    const frame_buffer into = buffer_for(one, frame);
    if (into.what != answer::take) return into.what;
    REQUIRE(into.bytes.size() == frame.bytes);
    std::ranges::fill(into.bytes, fill);
    arrived(one, frame);
    return into.what;
  }
};

}  // namespace

TEST_CASE("an early message that was given up halfway leaves the budget that it had") {
  filled_inbox box(100);
  CHECK(box.takes(1, 100, 0, 60, std::byte{1}) == answer::take);
  CHECK(box.early_bytes() == 100);
  CHECK(box.takes(2, 90, 0, 90, std::byte{2}) == answer::take);  // the first is not gone on with
  CHECK(box.early_bytes() == 90);
  CHECK(box.takes(2, 10, 0, 5, std::byte{3}) == answer::take);
  CHECK(box.early_bytes() == 100);
  box.forget(one);  // and of a sender that dies what came whole stays
  CHECK(box.early_bytes() == 90);
  std::array<std::byte, 90> bytes{};
  box.await(one, 2, bytes);
  CHECK(box.outcome().what == kind::whole);
  CHECK(bytes[89] == std::byte{2});
  CHECK(box.early_bytes() == 0);
}

TEST_CASE("a message that is in store in part is waited for until it is whole") {
  filled_inbox box(100);
  CHECK(box.takes(1, 8, 0, 4, std::byte{1}) == answer::take);
  std::array<std::byte, 8> bytes{};
  box.await(one, 1, bytes);
  CHECK(box.is_awaiting());
  CHECK(bytes[0] == std::byte{0});
  CHECK(box.takes(1, 8, 4, 8, std::byte{2}) == answer::take);
  CHECK_FALSE(box.is_awaiting());
  CHECK(box.outcome().what == kind::whole);
  CHECK(bytes[3] == std::byte{1});
  CHECK(bytes[4] == std::byte{2});
}

TEST_CASE("a frame that does not go on where the one before it ended is torn, and no part of the message") {
  for (const bool is_awaited : {true, false}) {
    CAPTURE(is_awaited);
    filled_inbox box(100);
    std::array<std::byte, 9> bytes{};
    if (is_awaited) box.await(one, 1, bytes);
    CHECK(box.takes(1, 9, 0, 3, std::byte{1}) == answer::take);
    CHECK(box.takes(1, 9, 6, 9, std::byte{3}) == answer::drop);
    CHECK(box.torn_frames() == 1);
    CHECK(box.takes(1, 9, 3, 6, std::byte{2}) == answer::take);
    CHECK(box.takes(1, 9, 3, 6, std::byte{4}) == answer::drop);
    CHECK(box.torn_frames() == 2);
    CHECK(box.takes(1, 9, 6, 9, std::byte{3}) == answer::take);
    if (!is_awaited) box.await(one, 1, bytes);
    CHECK(box.outcome().what == kind::whole);
    for (std::size_t i = 0; i < bytes.size(); ++i)
      CHECK(bytes[i] == std::byte(1 + i / 3));
  }
}

TEST_CASE("a message that is longer or shorter than what waits for it is refused, awaited or in store") {
  for (const std::uint64_t length : {0U, 7U, 9U}) {
    for (const bool is_awaited : {true, false}) {
      CAPTURE(length);
      CAPTURE(is_awaited);
      filled_inbox box(100);
      std::array<std::byte, 8> bytes{};
      if (is_awaited) box.await(one, 1, bytes);
      CHECK(box.takes(1, length, 0, length, std::byte{1}) == (is_awaited ? answer::drop : answer::take));
      if (!is_awaited) box.await(one, 1, bytes);
      CHECK_FALSE(box.is_awaiting());
      CHECK(box.outcome().what == kind::other_size);
      CHECK(box.outcome().bytes == length);
      CHECK(bytes == std::array<std::byte, 8>{});
      CHECK(box.early_bytes() == 0);
    }
  }
}
