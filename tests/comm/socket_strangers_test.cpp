// Who calls without the secret, says what is no frame, or goes away without a word.
#include <llmmem/comm/socket_endpoint.hpp>

#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/socket_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::array both_kinds{socket_kind::local, socket_kind::tcp};

raw_hello hello_to(const socket_options& options, std::uint32_t from, detail::hello_purpose purpose) {
  raw_hello greeting;
  greeting.hello.purpose = purpose;
  greeting.hello.from = seat_id{from};
  greeting.hello.to = options.seat;
  greeting.hello.seats = options.seats;
  greeting.hello.frame_bytes = options.frame_bytes;
  greeting.hello.incarnation.fill(std::byte{0x42});
  greeting.hello.nonce.fill(std::byte{0x17});
  greeting.secret = options.secret;
  return greeting;
}

/// An endpoint, driven by a thread for as long as something else is done.
class driven_seat {
 public:
  explicit driven_seat(socket_world& world, std::uint32_t seat)
      : end_(*world.ends[seat]), heard_(world.heard[seat]), thread_([this] {
          while (!is_over_.load())
            static_cast<void>(end_.poll({end_.now_ns() + 5 * ms}, heard_));
        }) {}
  driven_seat(const driven_seat&) = delete;
  driven_seat& operator=(const driven_seat&) = delete;
  ~driven_seat() {
    is_over_ = true;
    end_.wake();
    thread_.join();
  }

 private:
  socket_endpoint& end_;
  recorder& heard_;
  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

std::vector<std::byte> framed(const detail::wire_header& header, std::span<const std::byte> bytes = {}) {
  std::vector<std::byte> all(detail::wire_header_bytes);
  detail::write_header(header, std::span<std::byte, detail::wire_header_bytes>(all.data(), all.size()));
  all.insert(all.end(), bytes.begin(), bytes.end());
  return all;
}

/// Seat 1 of two, by hand: both its lanes.
struct raw_seat {
  raw_caller data;
  raw_caller told;
  std::uint32_t told_sequence = 0;

  /// @param pid  the process of this machine that it says it is; 0: of another machine.
  explicit raw_seat(const socket_options& listener, std::byte life = std::byte{0x42}, pid_t pid = 0)
      : data(address_of(listener)), told(address_of(listener)) {
    auto hello = hello_to(listener, 1, detail::hello_purpose::data);
    hello.hello.incarnation.fill(life);
    if (pid != 0) {
      hello.hello.boot = detail::boot_of_machine();
      hello.hello.pid_space = detail::pid_space_of_process();
      hello.hello.pid = static_cast<std::uint32_t>(pid);
    }
    CHECK(hello.greet(data) == detail::hello_answer::welcome);
    hello.hello.purpose = detail::hello_purpose::told;
    CHECK(hello.greet(told) == detail::hello_answer::welcome);
    post(detail::frame_sort::beat);
  }
  void post(detail::frame_sort sort, std::span<const std::byte> bytes = {}) {
    CHECK(told.say(framed({{.bytes = static_cast<std::uint32_t>(bytes.size())},
                           detail::socket_lane::told,
                           sort,
                           told_sequence++},
                          bytes)));
  }
};

}  // namespace

TEST_CASE("a process without the secret is refused, counted, and kept from every seat") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2, {.secret = "right"});
    world.start(0);
    socket_options options = world.options(1);
    options.secret = "wrong";
    world.ends[1] = std::make_unique<socket_endpoint>(options);
    REQUIRE(world.until([&] { return world.ends[0]->stats().unauthenticated >= 4; }));
    CHECK(world.heard[0].arrivals.empty());
    CHECK(world.heard[1].arrivals.empty());
    CHECK(world.ends[0]->stats().connected == 0);
    // Where the right one comes, it is let in.
    world.ends[1].reset();
    world.start(1);
    REQUIRE(world.until([&] { return world.is_complete(); }));
  }
}

TEST_CASE("a process of a job with another shape is refused even if it knows the secret") {
  for (const bool is_of_frames : {false, true}) {
    socket_world world(socket_kind::tcp, 2);
    world.start(0);
    socket_options options = world.options(1);
    if (is_of_frames) {
      options.frame_bytes *= 2;
    } else {
      options.seats = 3;
      options.addresses.push_back(free_addresses(1)[0]);
    }
    world.ends[1] = std::make_unique<socket_endpoint>(options);
    REQUIRE(world.until([&] { return world.ends[0]->stats().mismatched >= 2; }));
    CHECK(world.heard[0].arrivals.empty());
    CHECK(world.ends[1]->stats().mismatched >= 1);
  }
}

TEST_CASE(
    "the time and the number of callers that send nothing, garbage or too little are bounded, while frames "
    "continue") {
  for (const socket_kind kind : both_kinds) {
    for (const auto seed : seeds(2)) {
      CAPTURE(seed);
      random_numbers random(seed);
      socket_world world(kind, 2, {.max_half_open = 12, .handshake_ns = 150 * ms});
      REQUIRE(world.join());
      const socket_options options = world.options(0);
      std::vector<raw_caller> silent;
      std::uint64_t sent = 0;
      for (int round = 0; round < 60; ++round) {
        raw_caller caller(address_of(options));
        std::vector<std::byte> noise(random.below(200U));
        for (std::byte& each : noise)
          each = static_cast<std::byte>(random.next());
        if (!noise.empty() && caller.is_connected()) static_cast<void>(caller.say(noise));
        if (random.once_in(2)) silent.push_back(std::move(caller));
        const auto bytes = bytes_of("frame " + std::to_string(round));
        REQUIRE(world.ends[1]
                    ->send(seat_id{0}, {.message = sent++, .bytes = static_cast<std::uint32_t>(bytes.size())},
                           bytes, world.in(1000 * ms), world.heard[1])
                    .has_value());
        REQUIRE(world.until([&] { return world.heard[0].frames.size() == sent; }));
        CHECK(world.heard[0].frames.back().bytes == bytes);
      }
      for (int i = 0; i < 40; ++i) {
        silent.emplace_back(address_of(options));
        world.turn();
      }
      REQUIRE(world.until([&] { return world.ends[0]->stats().crowded_out >= 20; }));
      REQUIRE(world.until([&] { return world.ends[0]->stats().too_slow >= 12; }));
      world.run_for(200 * ms);
      for (const raw_caller& each : silent)
        if (each.is_connected()) CHECK(each.is_closed());
      CHECK(world.ends[0]->stats().unauthenticated >= 1);
      CHECK(world.heard[0].deaths.empty());
      CHECK(world.heard[1].deaths.empty());
      CHECK(world.ends[0]->stats().malformed == 0);
    }
  }
}

TEST_CASE("an endpoint listens to at most `max_half_open` callers at once") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2, {.max_half_open = 5});
    world.start(0);
    std::vector<raw_caller> silent;
    for (int i = 0; i < 20; ++i) {
      silent.emplace_back(address_of(world.options(0)));
      world.turn();
    }
    REQUIRE(world.until([&] { return world.ends[0]->stats().accepted == 20; }));
    CHECK(world.ends[0]->stats().crowded_out == 15);
  }
}

TEST_CASE("silent callers that call again and again lock no rank out") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2, {.max_half_open = 5});
    world.start(0);
    std::vector<raw_caller> silent;
    const auto crowd = [&] {
      silent.emplace_back(address_of(world.options(0)));
      if (silent.size() > 30) silent.erase(silent.begin());
    };
    for (int i = 0; i < 30; ++i) {
      crowd();
      world.turn();
    }
    CHECK(world.ends[0]->why_missing(seat_id{1}) == seat_absence::crowded);
    world.start(1);
    REQUIRE(world.until([&] {
      crowd();
      return world.is_complete();
    }));
  }
}

TEST_CASE("a caller that names a seat outside the job is a stranger even if it knows the secret") {
  for (const std::uint32_t seat : {2U, 63U, 200U}) {
    socket_world world(socket_kind::tcp, 2);
    world.start(0);
    const driven_seat drive(world, 0);
    const raw_caller caller(address_of(world.options(0)));
    CHECK(hello_to(world.options(0), seat, detail::hello_purpose::data).greet(caller) == std::nullopt);
  }
}

TEST_CASE("the process that a caller names is neither killed nor watched unless it has the connection") {
  struct bystander_process {
    pid_t id = ::fork();
    ~bystander_process() {
      ::kill(id, SIGKILL);
      ::waitpid(id, nullptr, 0);
    }
  } const bystander;
  if (bystander.id == 0) {
    ::pause();
    ::_exit(0);
  }
  REQUIRE(bystander.id > 0);
  socket_world world(socket_kind::tcp, 2,
                     {.silence = on_silence::kill_local,
                      .beat_ns = 5 * ms,
                      .soft_silence_ns = 20 * ms,
                      .hard_silence_ns = 50 * ms});
  world.start(0);
  std::optional<raw_seat> seat;
  {
    const driven_seat drive(world, 0);
    seat.emplace(world.options(0), std::byte{0x42}, bystander.id);
  }
  REQUIRE(world.until([&] { return !world.heard[0].deaths.empty(); }));
  CHECK(world.heard[0].deaths == std::vector{std::pair{1U, comm::death::suspected}});
  CHECK(::waitpid(bystander.id, nullptr, WNOHANG) == 0);
}

TEST_CASE(
    "bytes that are not a frame break the connection: the seat is suspected and informed, and its process "
    "ignored") {
  const auto header = [](std::uint32_t bytes, std::uint32_t sequence, detail::socket_lane lane,
                         detail::frame_sort sort = detail::frame_sort::frame) {
    return framed({{.bytes = bytes}, lane, sort, sequence});
  };
  constexpr auto data = detail::socket_lane::data;
  constexpr auto told = detail::socket_lane::told;
  const std::vector<std::pair<detail::socket_lane, std::vector<std::byte>>> bad{
      {data, std::vector<std::byte>(100, std::byte{0xFF})},
      {data, header(65537, 0, data)},  // longer than a frame may be
      {data, header(0xFFFF'FFFF, 0, data)},
      {data, header(1, 1, data)},  // one before it is missing
      {data, header(1, 0, told)},  // of the other lane
      {data, header(0, 0, data, detail::frame_sort::leaving)},
      {told, header(4097, 2, told)},
      {told, header(1, 3, told)},
      {told, header(1, 2, told, detail::frame_sort::beat)},
      {told, std::vector<std::byte>(detail::wire_header_bytes, std::byte{0})},
  };
  for (const socket_kind kind : both_kinds) {
    for (const auto& [lane, bytes] : bad) {
      socket_world world(kind, 2, {.frame_bytes = 65536});
      world.start(0);
      {
        const socket_options options = world.options(0);
        std::optional<raw_seat> seat;
        {
          const driven_seat drive(world, 0);
          seat.emplace(options);
        }
        REQUIRE(world.until([&] { return world.ends[0]->is_connected(seat_id{1}); }));
        seat->post(detail::frame_sort::frame, bytes_of("is heard"));
        REQUIRE(world.until([&] { return world.heard[0].tellings.size() == 1; }));
        CHECK((lane == data ? seat->data : seat->told).say(bytes));
        REQUIRE(world.until([&] { return !world.heard[0].deaths.empty(); }));
        CHECK(world.heard[0].deaths == std::vector{std::pair{1U, comm::death::suspected}});
        CHECK(world.ends[0]->stats().malformed == 1);
        CHECK(world.heard[0].asked == 0);
        // It is told so, on a connection that stays open.
        std::vector<std::byte> notice(detail::wire_header_bytes);
        const auto view = std::span<std::byte, detail::wire_header_bytes>(notice.data(), notice.size());
        for (std::uint32_t i = 0;; ++i) {
          REQUIRE(seat->told.hear(notice));
          const auto seen = detail::read_header(view, told, i, 0);
          REQUIRE(seen.has_value());
          if (seen->sort == detail::frame_sort::given_up) break;
        }
        // What else it says is read, and forgotten.
        static_cast<void>(seat->told.say(bytes));
        static_cast<void>(seat->data.say(bytes));
        world.run_for(20 * ms);
        CHECK(world.heard[0].tellings.size() == 1);
        CHECK(world.ends[0]->stats().malformed == 1);
        // The same process may not come again, a fresh one may.
        const driven_seat drive(world, 0);
        const raw_caller again(address_of(options));
        CHECK(hello_to(options, 1, detail::hello_purpose::data).greet(again) ==
              detail::hello_answer::unwanted);
        const raw_seat fresh(options, std::byte{0x43});
        while (world.ends[0]->stats().joined < 2)
          ::usleep(1000);
      }
    }
  }
}

TEST_CASE("a connection that ends without notice counts as configured if the process is unknown") {
  for (const on_reset reset : {on_reset::dead, on_reset::suspected}) {
    socket_world world(socket_kind::tcp, 2, {.reset = reset});
    world.start(0);
    std::optional<raw_seat> seat;
    {
      const driven_seat drive(world, 0);
      seat.emplace(world.options(0));
    }
    REQUIRE(world.until([&] { return world.ends[0]->is_connected(seat_id{1}); }));
    CHECK(seat->data.say(
        framed({{.bytes = 3}, detail::socket_lane::data, detail::frame_sort::frame, 0}, bytes_of("abc"))));
    seat.reset();
    REQUIRE(world.until([&] { return !world.heard[0].deaths.empty(); }));
    const comm::death how = reset == on_reset::dead ? comm::death::certain : comm::death::suspected;
    CHECK(world.heard[0].deaths == std::vector{std::pair{1U, how}});
    CHECK(world.heard[0].frames.size() == 1);  // what came before
  }
}

TEST_CASE("if a connection ends while its process lives, the process is suspected after some time to exit") {
  socket_world world(socket_kind::local, 2, {.confirm_ns = 50 * ms});
  world.start(0);
  std::optional<raw_seat> seat;
  {
    const driven_seat drive(world, 0);
    seat.emplace(world.options(0));
  }
  REQUIRE(world.until([&] { return world.ends[0]->is_connected(seat_id{1}); }));
  const std::uint64_t before = detail::monotonic_ns();
  seat.reset();
  REQUIRE(world.until([&] { return !world.heard[0].deaths.empty(); }));
  CHECK(detail::monotonic_ns() - before >= 50 * ms);
  CHECK(world.heard[0].deaths == std::vector{std::pair{1U, comm::death::suspected}});
}

TEST_CASE("a caller that ends before it sends anything on its lanes has no effect") {
  socket_world world(socket_kind::local, 2);
  world.start(0);
  {
    const driven_seat drive(world, 0);
    const socket_options options = world.options(0);
    const raw_caller data(address_of(options));
    const raw_caller told(address_of(options));
    CHECK(hello_to(options, 1, detail::hello_purpose::data).greet(data) == detail::hello_answer::welcome);
    CHECK(hello_to(options, 1, detail::hello_purpose::told).greet(told) == detail::hello_answer::welcome);
  }
  world.run_for(20 * ms);
  CHECK(world.heard[0].arrivals.empty());
  CHECK(world.heard[0].deaths.empty());
  {
    // So that it may come again.
    const driven_seat drive(world, 0);
    const raw_seat seat(world.options(0));
    while (world.ends[0]->stats().joined < 1)
      ::usleep(1000);
  }
}

TEST_CASE("a process with one of its two lanes blocks the seat at most for a handshake") {
  socket_world world(socket_kind::local, 2, {.handshake_ns = 200 * ms});
  world.start(0);
  const driven_seat drive(world, 0);
  const socket_options options = world.options(0);
  const raw_caller half(address_of(options));
  CHECK(hello_to(options, 1, detail::hello_purpose::data).greet(half) == detail::hello_answer::welcome);
  auto other = hello_to(options, 1, detail::hello_purpose::data);
  other.hello.incarnation.fill(std::byte{0x43});
  const raw_caller early(address_of(options));
  CHECK(other.greet(early) == detail::hello_answer::busy);
  ::usleep(400'000);
  const raw_caller late(address_of(options));
  CHECK(other.greet(late) == detail::hello_answer::welcome);
}
