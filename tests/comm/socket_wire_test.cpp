// What goes over a socket, without sockets: proofs, headers, hellos, and lanes fed byte by byte.
#include <llmmem/comm/detail/socket_handshake.hpp>
#include <llmmem/comm/detail/socket_lanes.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/socket_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using detail::socket_handshake;

namespace {

std::string hex(const detail::sha256_words& words) {
  std::string text;
  for (const std::uint32_t word : words) {
    std::array<char, 9> digits{};
    std::snprintf(digits.data(), digits.size(), "%08x", word);
    text += digits.data();
  }
  return text;
}

std::string hmac(const std::string& key, const std::string& message) {
  const auto key_bytes = bytes_of(key);
  const auto message_bytes = bytes_of(message);
  return hex(detail::hmac_sha256(key_bytes).of(message_bytes));
}

detail::hmac_sha256 secret_of(const std::string& text) {
  return detail::hmac_sha256(std::as_bytes(std::span(text.data(), text.size())));
}

detail::wire_hello hello_of(std::uint32_t from, std::uint32_t to, detail::hello_purpose purpose) {
  detail::wire_hello hello;
  hello.purpose = purpose;
  hello.from = seat_id{from};
  hello.to = seat_id{to};
  hello.seats = 4;
  hello.frame_bytes = 65536;
  hello.incarnation.fill(static_cast<std::byte>(from + 1));
  hello.nonce.fill(static_cast<std::byte>(from + 100));
  hello.pid_space = 0x1122'3344'5566'7788;
  hello.pid = 4711;
  return hello;
}

/// Both sides of a handshake; `change(message, bytes)` may damage what is said. How it ends for each.
template <class Change>
std::pair<socket_handshake::turn, socket_handshake::turn> shake(const detail::wire_hello& caller,
                                                                const detail::wire_hello& listener,
                                                                Change change) {
  const auto key = secret_of("the secret");
  std::array<socket_handshake, 2> sides;
  sides[0].call(caller);
  sides[1].listen(listener);
  std::array<socket_handshake::turn, 2> turns{socket_handshake::turn::wait, socket_handshake::turn::wait};
  std::size_t speaks = 0;
  for (int message = 0; message < 4; ++message, speaks = 1 - speaks) {
    std::vector<std::byte> said(sides[speaks].says().begin(), sides[speaks].says().end());
    change(message, said);
    const std::size_t hears = 1 - speaks;
    // In two parts, as a stream may bring it.
    for (const std::size_t part : {said.size() / 3, said.size() - said.size() / 3}) {
      const auto into = sides[hears].wanted();
      REQUIRE(into.size() >= part);
      std::copy_n(said.begin(), part, into.begin());
      said.erase(said.begin(), said.begin() + static_cast<std::ptrdiff_t>(part));
      turns[hears] = sides[hears].took(part, key);
    }
    if (turns[hears] == socket_handshake::turn::refused) break;
    if (turns[hears] == socket_handshake::turn::judge) sides[hears].answer(detail::hello_answer::busy, key);
  }
  if (turns[0] == socket_handshake::turn::settled) CHECK(sides[0].answered() == detail::hello_answer::busy);
  return {turns[0], turns[1]};
}

}  // namespace

TEST_CASE("HMAC-SHA256 gives the values of RFC 4231") {
  const auto times = [](std::size_t count, int byte) { return std::string(count, static_cast<char>(byte)); };
  CHECK(hmac(times(20, 0x0b), "Hi There") ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hmac("Jefe", "what do ya want for nothing?") ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hmac(times(20, 0xaa), times(50, 0xdd)) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string key;
  for (int i = 1; i <= 25; ++i)
    key += static_cast<char>(i);
  CHECK(hmac(key, times(50, 0xcd)) == "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK(hmac(times(131, 0xaa), "Test Using Larger Than Block-Size Key - Hash Key First") ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(hmac(times(131, 0xaa),
             "This is a test using a larger than block-size key and a larger than block-size data. The key "
             "needs to be hashed before being used by the HMAC algorithm.") ==
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST_CASE("bytes are equal in constant time only when all are") {
  std::vector<std::byte> a(32, std::byte{1});
  std::vector<std::byte> b = a;
  CHECK(detail::is_equal_in_constant_time(a, b));
  for (std::size_t i = 0; i < b.size(); ++i) {
    b[i] ^= std::byte{0x80};
    CHECK(!detail::is_equal_in_constant_time(a, b));
    b[i] = a[i];
  }
  b.pop_back();
  CHECK(!detail::is_equal_in_constant_time(a, b));
}

TEST_CASE("a header is read as it was written, and refused if any bit has changed") {
  const detail::wire_header header{
      {1ULL << 60, 2ULL << 50, 3ULL << 40, 4096, 5U << 30, 6U << 29, 60000, 50000},
      detail::socket_lane::data,
      detail::frame_sort::frame,
      77};
  std::array<std::byte, detail::wire_header_bytes> bytes{};
  detail::write_header(header, bytes);
  CHECK(detail::read_header(bytes, detail::socket_lane::data, 77, 4096) == header);
  CHECK(!detail::read_header(bytes, detail::socket_lane::told, 77, 4096));
  CHECK(!detail::read_header(bytes, detail::socket_lane::data, 78, 4096));
  CHECK(!detail::read_header(bytes, detail::socket_lane::data, 77, 4095));
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    CHECK(!detail::read_header(bytes, detail::socket_lane::data, 77, 4096));
    bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
  }
  for (const auto sort :
       {detail::frame_sort::beat, detail::frame_sort::leaving, detail::frame_sort::given_up}) {
    detail::wire_header own{{}, detail::socket_lane::told, sort, 1};
    detail::write_header(own, bytes);
    CHECK(detail::read_header(bytes, detail::socket_lane::told, 1, 4096) == own);
    own.frame.bytes = 1;
    detail::write_header(own, bytes);
    CHECK(!detail::read_header(bytes, detail::socket_lane::told, 1, 4096));
    own.frame.bytes = 0;
    own.lane = detail::socket_lane::data;
    detail::write_header(own, bytes);
    CHECK(!detail::read_header(bytes, detail::socket_lane::data, 1, 4096));
  }
  detail::write_header({{}, detail::socket_lane::told, static_cast<detail::frame_sort>(4), 1}, bytes);
  CHECK(!detail::read_header(bytes, detail::socket_lane::told, 1, 4096));
}

TEST_CASE("a hello is read as it was written, and refused if its seat does not exist") {
  const auto hello = hello_of(3, 1, detail::hello_purpose::told);
  std::array<std::byte, detail::wire_hello_bytes> bytes{};
  detail::write_hello(hello, bytes);
  CHECK(detail::read_hello(bytes, 4) == hello);
  CHECK(!detail::read_hello(bytes, 3));
  auto beyond = hello_of(4, 1, detail::hello_purpose::told);  // of the four seats that it names
  detail::write_hello(beyond, bytes);
  CHECK(!detail::read_hello(bytes, 64));
  beyond.seats = 5;
  detail::write_hello(beyond, bytes);
  CHECK(detail::read_hello(bytes, 64) == beyond);
  detail::write_hello(hello_of(1, 1, detail::hello_purpose::told), bytes);
  CHECK(!detail::read_hello(bytes, 4));
  detail::write_hello(hello_of(1, 2, static_cast<detail::hello_purpose>(3)), bytes);
  CHECK(!detail::read_hello(bytes, 4));
}

TEST_CASE("two processes with the secret connect, and any changed bit on the way ends the attempt") {
  using turn = socket_handshake::turn;
  const auto caller = hello_of(3, 1, detail::hello_purpose::data);
  const auto listener = hello_of(1, 0, detail::hello_purpose::data);
  CHECK(shake(caller, listener, [](int, auto&) {}) == std::pair{turn::settled, turn::judge});
  CHECK(shake(hello_of(0, 1, detail::hello_purpose::knock), listener, [](int, auto&) {}) ==
        std::pair{turn::settled, turn::judge});
  constexpr std::array<std::size_t, 4> sizes{detail::wire_hello_bytes, detail::wire_hello_bytes,
                                             detail::wire_proof_bytes, detail::wire_answer_bytes};
  for (int message = 0; message < 4; ++message) {
    for (std::size_t bit = 0; bit < 8 * sizes[static_cast<std::size_t>(message)]; ++bit) {
      CAPTURE(message);
      CAPTURE(bit);
      const auto ended = shake(caller, listener, [&](int which, std::vector<std::byte>& bytes) {
        if (which == message) bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
      });
      CHECK(ended.first != turn::settled);
      CHECK((message == 3 || ended.second != turn::judge));
    }
  }
}

TEST_CASE("a hello of the wrong direction, to another seat, or reflected to its sender is refused") {
  using turn = socket_handshake::turn;
  const auto listener = hello_of(1, 0, detail::hello_purpose::data);
  const auto ends = [&](const detail::wire_hello& caller) {
    return shake(caller, listener, [](int, auto&) {}).second;
  };
  CHECK(ends(hello_of(0, 1, detail::hello_purpose::data)) == turn::refused);
  CHECK(ends(hello_of(0, 1, detail::hello_purpose::told)) == turn::refused);
  CHECK(ends(hello_of(2, 1, detail::hello_purpose::knock)) == turn::refused);
  CHECK(ends(hello_of(3, 2, detail::hello_purpose::data)) == turn::refused);
  socket_handshake caller;
  caller.call(hello_of(3, 1, detail::hello_purpose::data));
  std::copy_n(caller.says().begin(), detail::wire_hello_bytes, caller.wanted().begin());
  CHECK(caller.took(detail::wire_hello_bytes, secret_of("s")) == turn::refused);
}

TEST_CASE(
    "a process that is refused for its version, or calls the wrong seat, learns the reason and which process "
    "is there") {
  const auto key = secret_of("s");
  using why = detail::socket_handshake::refusal;
  using turn = detail::socket_handshake::turn;
  for (const bool is_version : {false, true}) {
    detail::socket_handshake caller;
    detail::socket_handshake listener;
    caller.call(hello_of(2, 1, detail::hello_purpose::data));
    listener.listen(hello_of(is_version ? 1 : 0, 3, detail::hello_purpose::data));
    std::ranges::copy(caller.says(), listener.wanted().begin());
    if (is_version) listener.wanted()[4] ^= std::byte{1};
    CHECK(listener.took(detail::wire_hello_bytes, key) == turn::refused);
    CHECK(listener.why() == (is_version ? why::other_version : why::other_seat));
    REQUIRE(listener.has_farewell());
    REQUIRE(listener.says().size() == detail::wire_hello_bytes);
    std::ranges::copy(listener.says(), caller.wanted().begin());
    if (is_version) caller.wanted()[4] ^= std::byte{1};
    CHECK(caller.took(detail::wire_hello_bytes, key) == turn::refused);
    CHECK(caller.why() == listener.why());
    CHECK_FALSE(caller.has_farewell());
    // A handshake that is begun anew knows nothing of it.
    listener.listen(hello_of(0, 3, detail::hello_purpose::data));
    CHECK(listener.why() == why::none);
  }
}

TEST_CASE("a caller without the secret is refused, and so is a listener without it") {
  using turn = socket_handshake::turn;
  for (const bool is_caller_wrong : {true, false}) {
    const auto right = secret_of("right");
    const auto wrong = secret_of("wrong");
    socket_handshake caller;
    socket_handshake listener;
    caller.call(hello_of(3, 1, detail::hello_purpose::data));
    listener.listen(hello_of(1, 0, detail::hello_purpose::data));
    const auto pass = [](socket_handshake& from, socket_handshake& to, const detail::hmac_sha256& key) {
      std::copy_n(from.says().begin(), from.says().size(), to.wanted().begin());
      return to.took(from.says().size(), key);
    };
    CHECK(pass(caller, listener, right) == turn::say);
    CHECK(pass(listener, caller, is_caller_wrong ? wrong : right) == turn::say);
    if (is_caller_wrong) {
      CHECK(pass(caller, listener, right) == turn::refused);
      continue;
    }
    CHECK(pass(caller, listener, right) == turn::judge);
    listener.answer(detail::hello_answer::welcome, wrong);
    CHECK(pass(listener, caller, right) == turn::refused);
  }
}

TEST_CASE("frames arrive complete and in order, regardless of how their bytes are cut") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    std::vector<std::byte> stream;
    std::vector<heard_frame> sent;
    constexpr std::uint32_t most = 40'000;
    for (std::uint32_t i = 0; i < 20; ++i) {
      const std::uint32_t size = random.once_in(4) ? 0 : random.below(random.once_in(3) ? most : 500U) + 1;
      std::vector<std::byte> bytes(size);
      for (std::byte& each : bytes)
        each = static_cast<std::byte>(random.next());
      detail::wire_header header{
          {.message = i, .bytes = size}, detail::socket_lane::data, detail::frame_sort::frame, i};
      std::array<std::byte, detail::wire_header_bytes> head{};
      detail::write_header(header, head);
      stream.insert(stream.end(), head.begin(), head.end());
      stream.insert(stream.end(), bytes.begin(), bytes.end());
      sent.push_back({seat_id{1}, header.frame, bytes});
    }
    recorder heard;
    const auto handler = detail::refer_to(heard);
    detail::data_reader reader;
    detail::lane_count counted;
    bool has_come = false;
    reader.reserve();
    reader.restart(most);
    std::vector<std::byte> scratch(100);
    std::size_t at = 0;
    while (at < stream.size() || reader.is_held()) {
      heard.answer = random.once_in(5) ? frame_buffer::answer::ask_again : frame_buffer::answer::take;
      if (reader.is_held()) {
        REQUIRE(reader.ask_again(seat_id{1}, handler, counted, has_come) != detail::read_state::malformed);
        continue;
      }
      std::array<iovec, 2> places{};
      const std::size_t count = reader.places(places, scratch);
      std::size_t limit =
          std::min<std::size_t>(stream.size() - at, 1 + random.below(random.once_in(2) ? 80U : 50'000U));
      std::size_t filled = 0;
      for (std::size_t i = 0; i < count; ++i) {
        REQUIRE((i != 0 || places[i].iov_len > 0));
        const std::size_t part = std::min(limit, places[i].iov_len);
        std::copy_n(stream.begin() + static_cast<std::ptrdiff_t>(at), part,
                    static_cast<std::byte*>(places[i].iov_base));
        at += part;
        limit -= part;
        filled += part;
      }
      REQUIRE(reader.took(filled, seat_id{1}, handler, counted, has_come) != detail::read_state::malformed);
    }
    CHECK(heard.frames == sent);
    CHECK(counted.frames == 20);
  }
}

TEST_CASE("the waiting bytes are those added less those sent") {
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    random_numbers random(seed);
    detail::waiting_bytes waiting;
    waiting.reserve(1000);
    std::vector<std::byte> naive;
    for (int i = 0; i < 300; ++i) {
      if (random.once_in(2)) {
        std::vector<std::byte> more(random.below(std::uint64_t{waiting.free_bytes()} + 1));
        for (std::byte& each : more)
          each = static_cast<std::byte>(random.next());
        waiting.add(more);
        naive.insert(naive.end(), more.begin(), more.end());
      } else if (!naive.empty()) {
        const std::size_t gone = random.below(std::uint64_t{naive.size()}) + 1;
        waiting.went(gone);
        naive.erase(naive.begin(), naive.begin() + static_cast<std::ptrdiff_t>(gone));
      }
      REQUIRE(std::vector<std::byte>(waiting.waiting().begin(), waiting.waiting().end()) == naive);
      REQUIRE(waiting.free_bytes() == 1000 - naive.size());
    }
  }
}
