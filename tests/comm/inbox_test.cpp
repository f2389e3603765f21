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
constexpr std::uint64_t price = comm::early_message_bytes;

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
    on_frame(one, frame);
    return into.what;
  }
};

}  // namespace

TEST_CASE("an early message that was abandoned halfway returns its budget") {
  filled_inbox box(100 + 2 * price);
  CHECK(box.takes(1, 100, 0, 60, std::byte{1}) == answer::take);
  CHECK(box.early_bytes() == 100 + price);
  CHECK(box.takes(2, 90, 0, 90, std::byte{2}) == answer::take);  // the first is not gone on with
  CHECK(box.early_bytes() == 90 + price);
  CHECK(box.takes(2, 10, 0, 5, std::byte{3}) == answer::take);
  CHECK(box.early_bytes() == 100 + 2 * price);
  box.forget(one);  // and of a sender that dies what came whole stays
  CHECK(box.early_bytes() == 90 + price);
  std::array<std::byte, 90> bytes{};
  box.await(one, 2, bytes);
  CHECK(box.outcome().what == kind::whole);
  CHECK(bytes[89] == std::byte{2});
  CHECK(box.early_bytes() == 0);
}

TEST_CASE("a rank waits for the rest of a message that is partly in store") {
  filled_inbox box(100 + price);
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

TEST_CASE("a frame that does not continue the previous one is torn, and no part of the message") {
  for (const bool is_awaited : {true, false}) {
    CAPTURE(is_awaited);
    filled_inbox box(100 + price);
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

TEST_CASE("a message of another length than its receiver expects is refused, awaited or in store") {
  for (const std::uint64_t length : {0U, 7U, 9U}) {
    for (const bool is_awaited : {true, false}) {
      CAPTURE(length);
      CAPTURE(is_awaited);
      filled_inbox box(100 + price);
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

TEST_CASE("a later frame with another length or tag than the first is torn, and writes nothing") {
  for (const bool is_awaited : {true, false}) {
    CAPTURE(is_awaited);
    filled_inbox box(1000 + price);
    std::array<std::byte, 9> bytes{};
    if (is_awaited) box.await(one, 1, bytes);
    CHECK(box.takes(1, 9, 0, 3, std::byte{1}) == answer::take);
    // Within the length that it tells itself, and beyond the message's.
    CHECK(box.takes(1, 1000, 3, 900, std::byte{7}) == answer::drop);
    CHECK(box.takes(1, 4, 3, 4, std::byte{7}) == answer::drop);
    CHECK(box.takes(2, 9, 3, 9, std::byte{7}) == answer::drop);
    CHECK(box.torn_frames() == 3);
    CHECK(box.takes(1, 9, 3, 9, std::byte{2}) == answer::take);
    if (!is_awaited) box.await(one, 1, bytes);
    CHECK(box.outcome().what == kind::whole);
    CHECK(bytes[3] == std::byte{2});
    CHECK(bytes[8] == std::byte{2});
  }
}

TEST_CASE(
    "early messages without bytes cost budget, and those of a tag are received in the order of arrival") {
  constexpr std::uint64_t most = 64 * 1024;
  filled_inbox box(most);
  std::uint32_t kept = 0;
  while (box.takes(kept % 7, kept % 2, 0, kept % 2, std::byte(kept)) == answer::take)
    ++kept;
  CHECK(box.early_bytes() <= most);
  CHECK(kept <= most / price);
  CHECK(kept >= most / (price + 1));
  for (std::uint32_t i = 0; i < kept; ++i) {
    const std::uint32_t number = i / 7 * 7 + (6 - i % 7);  // the tags in turn, the last one first
    if (number >= kept) continue;
    std::array<std::byte, 1> byte{std::byte{0}};
    CHECK(box.size_of_next(one, number % 7) == number % 2);
    box.await(one, number % 7, std::span(byte).first(number % 2));
    REQUIRE(box.outcome().what == kind::whole);
    if (number % 2 == 1) CHECK(byte[0] == std::byte(number));
  }
  CHECK(box.early_bytes() < 7 * (price + 1));
}

TEST_CASE("the memory of a burst of early messages is returned while a message of its tag is kept") {
  detail::early_queue queue;
  const auto push = [&](std::byte first) {
    queue.make_room();
    queue.push({.bytes = {first}});
  };
  for (std::size_t burst = 0; burst < 3; ++burst) {
    for (std::size_t i = 0; i < 1000; ++i)
      push(std::byte(i));
    for (std::size_t i = 0; i < 1000 - 1; ++i) {
      REQUIRE(queue.front().bytes.front() == std::byte(i));
      // A message is under way: its room stays, so that it needs no memory when it is whole.
      if (i % 7 == 0) queue.make_room();
      const std::size_t before = queue.capacity();
      queue.pop();
      REQUIRE(queue.capacity() <= before);
      REQUIRE(queue.capacity() >= 1000 - i);
      REQUIRE(queue.capacity() < 4 * (1000 - i - 1) + 4);
    }
    CHECK(queue.capacity() == 3);
    queue.pop();
    CHECK(queue.empty());
    CHECK(queue.capacity() == 1);
  }
}

TEST_CASE("a message beyond the budget waits, and a rank can ask for its length") {
  filled_inbox box(10 + price);
  CHECK(box.room() == 10);
  CHECK(box.takes(3, 11, 0, 11, std::byte{1}) == answer::ask_again);
  CHECK(box.takes(3, ~std::uint64_t{0}, 0, 11, std::byte{1}) == answer::ask_again);
  CHECK(box.takes(3, 11, 0, 11, std::byte{1}) == answer::ask_again);
  CHECK(box.size_of_next(one, 3) == 11U);
  CHECK(box.takes(3, 10, 0, 10, std::byte{1}) == answer::take);
  CHECK(box.room() == 0);
  CHECK(box.takes(3, 0, 0, 0, std::byte{1}) == answer::ask_again);
}
