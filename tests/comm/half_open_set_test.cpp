/// Handshakes of two sets that call each other, and of strangers that speak by hand.
#include <llmmem/comm/detail/half_open_set.hpp>
#include <llmmem/comm/detail/socket_setup.hpp>

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/socket_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using detail::half_open_set;
using detail::hello_answer;
using detail::hello_purpose;
using detail::learned_absence;
using detail::ready_event;
using detail::socket_poller;
using step = detail::half_open_set::step;

namespace {

constexpr std::array both_kinds{socket_kind::local, socket_kind::tcp};

/// What a set came to with one connection.
struct outcome {
  std::uint32_t slot;
  half_open_set::progress made;
};

/// One set with its poller, driven by hand.
class one_set {
 public:
  explicit one_set(const socket_options& options)
      : halves(poller, options, detail::hello_of(detail::socket_setup(options)),
               detail::addresses_of(options)) {}

  /// Goes on with all connections until one comes to something, for 5 s at most.
  outcome proceed() {
    const std::uint64_t limit = detail::monotonic_ns() + 5'000 * ms;
    while (detail::monotonic_ns() < limit)
      if (const std::optional<outcome> found = look()) return *found;
    FAIL("nothing came of any connection");
    return {};
  }
  /// Goes on once.
  std::optional<outcome> look() {
    poller.begin();
    poller.clock().restart_timers();
    socket_poller::event_array events{};
    const auto found = poller.wait(poller.clock().now() + ms, -1, -1, events);
    for (std::size_t i = 0; i < found.events; ++i) {
      const ready_event event(events[i]);
      if (event.of == detail::socket_event::listener) {
        learned = halves.accept_some();
      } else if (halves.is_of(event)) {
        const half_open_set::progress made = halves.advance(event.index);
        if (made.to != step::waits) return outcome{event.index, made};
      }
    }
    return std::nullopt;
  }
  [[nodiscard]] socket_stats stats() const {
    socket_stats all;
    halves.add_to(all);
    return all;
  }

  socket_poller poller{true};
  half_open_set halves;
  std::optional<learned_absence> learned;
};

/// Seats 0 and 1, of which the test drives both.
struct two_sets {
  socket_world world;  // for its folder or ports
  std::array<socket_options, 2> options;
  std::unique_ptr<one_set> low;
  std::unique_ptr<one_set> high;

  explicit two_sets(socket_kind kind, socket_options given = {}, const std::string& other_secret = {})
      : world(kind, 2, std::move(given)), options{world.options(0), world.options(1)} {
    if (!other_secret.empty()) options[1].secret = other_secret;
    low = std::make_unique<one_set>(options[0]);
    high = std::make_unique<one_set>(options[1]);
  }
  /// Both in turn, until one comes to something.
  outcome proceed(one_set*& whose) {
    for (int i = 0; i < 5'000; ++i) {
      for (one_set* each : {low.get(), high.get()}) {
        const std::optional<outcome> found = each->look();
        whose = each;
        if (found) return *found;
      }
    }
    FAIL("nothing came of any connection");
    return {};
  }
};

}  // namespace

TEST_CASE("a caller is judged, and learns the verdict from the listener's hello") {
  for (const socket_kind kind : both_kinds) {
    for (const auto& [purpose, from] : {std::pair{hello_purpose::data, 1U}, {hello_purpose::knock, 0U}}) {
      two_sets sets(kind);
      one_set& caller = from == 1 ? *sets.high : *sets.low;
      one_set& listener = from == 1 ? *sets.low : *sets.high;
      const auto begun = caller.halves.call(seat_id{1 - from}, purpose);
      REQUIRE(begun.slot != half_open_set::no_slot);
      CHECK(caller.halves.is_lane_call(begun.slot) == (purpose == hello_purpose::data));
      CHECK(caller.halves.knocks() == (purpose == hello_purpose::knock ? 1 : 0));
      one_set* whose = nullptr;
      const outcome judged = sets.proceed(whose);
      REQUIRE(whose == &listener);
      REQUIRE(judged.made.to == step::judge);
      CHECK(listener.halves.theirs(judged.slot).from == seat_id{from});
      CHECK(listener.halves.theirs(judged.slot).purpose == purpose);
      CHECK(listener.halves.answer(judged.slot, hello_answer::busy));
      const outcome settled = sets.proceed(whose);
      REQUIRE(whose == &caller);
      CHECK(settled.slot == begun.slot);
      REQUIRE(settled.made.to == step::settled);
      CHECK(caller.halves.answered(settled.slot) == hello_answer::busy);
      CHECK(caller.halves.theirs(settled.slot).from == seat_id{1 - from});
      CHECK(caller.halves.called_seat(settled.slot) == seat_id{1 - from});
      caller.halves.close(settled.slot);
      CHECK(caller.halves.knocks() == 0);
      CHECK(listener.stats().accepted == 1);
      CHECK(listener.stats().unauthenticated == 0);
      // A socket that is taken stays open, and is not in the set any more.
      const detail::descriptor taken = listener.halves.take(judged.slot);
      CHECK(taken.is_open());
      CHECK(listener.halves.next_expired(0) == half_open_set::no_slot);
    }
  }
}

TEST_CASE("a caller with another secret is refused, and both sides learn the other's seat") {
  for (const socket_kind kind : both_kinds) {
    two_sets sets(kind, {.secret = "right"}, "wrong");
    REQUIRE(sets.high->halves.call(seat_id{0}, hello_purpose::told).slot != half_open_set::no_slot);
    one_set* whose = nullptr;
    for (int i = 0; i < 2; ++i) {
      const outcome failed = sets.proceed(whose);
      REQUIRE(failed.made.to == step::failed);
      REQUIRE(failed.made.learned.has_value());
      CHECK(failed.made.learned->seat == (whose == sets.low.get() ? seat_id{1} : seat_id{0}));
      CHECK(failed.made.learned->why == seat_absence::other_secret);
      whose->halves.close(failed.slot);
    }
    CHECK(sets.low->stats().unauthenticated == 1);
  }
}

TEST_CASE("a call to an address where no process listens reports that, and a knock reports nothing") {
  for (const socket_kind kind : both_kinds) {
    two_sets sets(kind);
    sets.low->halves.remove_file();
    sets.low.reset();
    for (const hello_purpose purpose : {hello_purpose::data, hello_purpose::knock}) {
      const auto begun = sets.high->halves.call(seat_id{0}, purpose);
      std::optional<learned_absence> learned = begun.learned;
      if (begun.slot != half_open_set::no_slot) {  // TCP finds out later
        const outcome failed = sets.high->proceed();
        CHECK(failed.made.to == step::failed);
        learned = failed.made.learned;
        sets.high->halves.close(failed.slot);
      }
      REQUIRE(learned.has_value() == (purpose == hello_purpose::data));
      if (learned) {
        CHECK(learned->seat == seat_id{0});
        CHECK(learned->why == seat_absence::no_listener);
      }
    }
  }
}

TEST_CASE("a set keeps at most as many callers as allowed, and closes the others at once") {
  for (const socket_kind kind : both_kinds) {
    two_sets sets(kind, {.max_half_open = 3});
    std::vector<raw_caller> silent;
    for (int i = 0; i < 8; ++i) {
      silent.emplace_back(address_of(sets.options[0]));
      static_cast<void>(sets.low->look());
    }
    for (int i = 0; i < 1000 && sets.low->stats().accepted < 8; ++i)
      static_cast<void>(sets.low->look());
    CHECK(sets.low->stats().accepted == 8);
    CHECK(sets.low->stats().crowded_out == 5);
    int closed = 0;
    for (const raw_caller& each : silent) {
      pollfd asked{each.get(), POLLIN, 0};
      closed += ::poll(&asked, 1, 0) == 1 ? 1 : 0;
    }
    CHECK(closed == 5);
  }
}

TEST_CASE("a connection whose time is over is reported once, and the clock wakes for the others") {
  two_sets sets(socket_kind::local, {.handshake_ns = 100 * ms});
  one_set& low = *sets.low;
  const raw_caller early(address_of(sets.options[0]));
  while (low.stats().accepted < 1)
    static_cast<void>(low.look());
  ::usleep(50'000);
  const raw_caller late(address_of(sets.options[0]));
  while (low.stats().accepted < 2)
    static_cast<void>(low.look());
  const std::uint64_t began = low.poller.clock().now();
  low.poller.clock().begin(began + 60 * ms);
  low.poller.clock().restart_timers();
  const std::uint32_t first = low.halves.next_expired(0);
  REQUIRE(first != half_open_set::no_slot);
  CHECK(low.halves.learn(first) == std::nullopt);  // it did not say who it is
  low.halves.close(first);
  CHECK(low.halves.next_expired(first + 1) == half_open_set::no_slot);
  CHECK(low.poller.clock().wait_until(~std::uint64_t{0}) <= began + 100 * ms);
  CHECK(low.stats().too_slow == 1);
  CHECK(early.is_closed());
  low.poller.clock().begin(began + 200 * ms);
  CHECK(low.halves.next_expired(0) != half_open_set::no_slot);
}

TEST_CASE("a call that is not answered in time reports that some process is there") {
  two_sets sets(socket_kind::local);
  one_set& high = *sets.high;
  high.poller.begin();
  const auto begun = high.halves.call(seat_id{0}, hello_purpose::data);
  REQUIRE(begun.slot != half_open_set::no_slot);
  CHECK(high.halves.learn(begun.slot)->why == seat_absence::unreachable);  // not even accepted as yet
  for (int i = 0; i < 5; ++i)
    static_cast<void>(high.look());  // seat 0 does not look
  CHECK(high.halves.learn(begun.slot)->why == seat_absence::foreign);
  high.poller.clock().begin(high.poller.clock().now() + 3'000 * ms);
  CHECK(high.halves.next_expired(0) == begun.slot);
  CHECK(high.halves.learn(begun.slot)->why == seat_absence::no_answer);
}

TEST_CASE("bytes that are not a hello mark a stranger, for any seat") {
  for (const socket_kind kind : both_kinds) {
    two_sets sets(kind);
    const raw_caller caller(address_of(sets.options[0]));
    REQUIRE(caller.say(std::vector(detail::wire_hello_bytes, std::byte{0xAB})));
    const outcome failed = sets.low->proceed();
    CHECK(failed.made.to == step::failed);
    REQUIRE(failed.made.learned.has_value());
    CHECK(failed.made.learned->seat == no_seat);
    CHECK(failed.made.learned->why == seat_absence::foreign);
    CHECK(sets.low->stats().unauthenticated == 1);
    sets.low->halves.close(failed.slot);
    CHECK(caller.is_closed());
  }
}

TEST_CASE(
    "a caller with another version, or for the wrong seat, receives the listener's hello before it is "
    "closed") {
  for (const bool is_version : {false, true}) {
    two_sets sets(socket_kind::local);
    std::array<std::byte, detail::wire_hello_bytes> hello{};
    const seat_id wanted{is_version ? 0U : 7U};
    detail::write_hello({.from = seat_id{1}, .to = wanted, .seats = 2, .frame_bytes = 1U << 20}, hello);
    if (is_version) hello[4] ^= std::byte{1};
    const raw_caller caller(address_of(sets.options[0]));
    REQUIRE(caller.say(hello));
    const outcome failed = sets.low->proceed();
    CHECK(failed.made.to == step::failed);
    REQUIRE(failed.made.learned.has_value());
    CHECK(failed.made.learned->seat == (is_version ? no_seat : seat_id{1}));
    CHECK(failed.made.learned->why == (is_version ? seat_absence::other_version : seat_absence::other_seat));
    CHECK(sets.low->stats().other_version == (is_version ? 1 : 0));
    std::array<std::byte, detail::wire_hello_bytes> farewell{};
    REQUIRE(caller.hear(farewell));
    detail::wire_reader reader(farewell);
    CHECK(reader.take<std::uint32_t>() == detail::wire_magic);
    CHECK(reader.take<std::uint16_t>() == detail::wire_version);
    sets.low->halves.close(failed.slot);
  }
}

TEST_CASE("only the set that made the file of a Unix socket removes it") {
  two_sets sets(socket_kind::local);
  const std::string path = address_of(sets.options[0]).text;
  struct ::stat seen{};
  CHECK(::stat(path.c_str(), &seen) == 0);
  // Another process has taken the seat meanwhile.
  auto before = std::move(sets.low);
  REQUIRE(::unlink(path.c_str()) == 0);
  sets.low = std::make_unique<one_set>(sets.options[0]);
  before->halves.remove_file();
  CHECK(::stat(path.c_str(), &seen) == 0);
  sets.low->halves.remove_file();
  CHECK(::stat(path.c_str(), &seen) != 0);
}
