// Real processes, some of which are killed, stopped and started again.
#include <llmmem/comm/socket_endpoint.hpp>

#include <doctest/doctest.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "support/socket_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::array both_kinds{socket_kind::local, socket_kind::tcp};

/// A process at a seat, which polls for ever and says back what it is told.
class seat_process {
 public:
  explicit seat_process(const socket_options& options)
      : seat_process(options, [](socket_endpoint&, recorder&) {}) {}
  /// `with(end, heard)` is called when all are connected, in the process.
  template <class With>
  seat_process(const socket_options& options, With with) {
    std::fflush(nullptr);
    id_ = ::fork();
    REQUIRE(id_ >= 0);
    if (id_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::alarm(100);
    int status = 0;
    try {
      socket_endpoint end(options);
      recorder heard;
      heard.on_told = [&](const heard_frame& told) {
        if (told.header.tag == 77) is_over_ = true;
        if (told.header.tag == 99) ::raise(SIGKILL);
        end.post(told.from, {.tag = told.header.tag + 1}, told.bytes);
      };
      bool is_begun = false;
      while (!is_over_) {
        static_cast<void>(end.poll({end.now_ns() + 50 * ms}, heard));
        heard.frames.clear();
        if (is_begun || end.stats().connected + 1 != end.seats()) continue;
        is_begun = true;
        with(end, heard);
      }
    } catch (const std::exception& failure) {
      std::fprintf(stderr, "seat: %s\n", failure.what());
      status = 1;
    }
    ::_exit(status);
  }
  seat_process(const seat_process&) = delete;
  seat_process& operator=(const seat_process&) = delete;
  seat_process(seat_process&& other) noexcept : id_(std::exchange(other.id_, -1)) {}
  ~seat_process() { kill(); }

  void send(int signal) const { REQUIRE(::kill(id_, signal) == 0); }
  void kill() {
    if (id_ <= 0) return;
    ::kill(id_, SIGKILL);
    static_cast<void>(wait());
  }
  int wait() {
    int status = 0;
    while (::waitpid(id_, &status, 0) < 0 && errno == EINTR) {
    }
    id_ = -1;
    return status;
  }

 private:
  pid_t id_ = -1;
  bool is_over_ = false;
};

/// How long after `kill` each of the endpoints of this process was told of `seat`, in nanoseconds.
std::vector<std::uint64_t> time_of_death(socket_world& world, std::uint32_t seat, seat_process& process) {
  const std::uint64_t began = detail::monotonic_ns();
  std::vector<std::uint64_t> times;
  for (recorder& each : world.heard) {
    each.deaths.clear();
    each.on_died = [&](seat_id) { times.push_back(detail::monotonic_ns() - began); };
  }
  process.kill();
  REQUIRE(world.until([&] { return times.size() == world.ends.size() - 1; }));
  for (std::uint32_t i = 0; i < world.heard.size(); ++i) {
    if (i != seat) CHECK(world.heard[i].deaths == std::vector{std::pair{seat, comm::death::certain}});
    world.heard[i].on_died = nullptr;
  }
  return times;
}

/// All endpoints but one are here.
[[nodiscard]] bool is_whole_but(const socket_world& world, std::uint32_t seat) {
  for (std::uint32_t i = 0; i < world.ends.size(); ++i)
    if (i != seat && world.ends[i]->stats().connected + 1 != world.ends.size()) return false;
  return true;
}

/// What a process does that has a child, which holds its connections open, and tells its number.
auto with_child(int told) {
  return [told](socket_endpoint&, recorder&) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(100);
      ::pause();
      ::_exit(0);
    }
    static_cast<void>(!::write(told, &child, sizeof(child)));
  };
}

}  // namespace

TEST_CASE(
    "all endpoints report a killed process as certainly dead, and fresh ones take its seat, repeatedly") {
  for (const socket_kind kind : both_kinds) {
    for (const std::uint32_t victim : {0U, 1U, 2U}) {
      socket_world world(kind, 3);
      for (std::uint32_t i = 0; i < 3; ++i)
        if (i != victim) world.start(i);
      std::vector<std::uint64_t> times;
      for (int life = 0; life < 5; ++life) {
        seat_process process(world.options(victim));
        REQUIRE(world.until([&] { return is_whole_but(world, victim); }));
        for (const std::uint64_t each : time_of_death(world, victim, process))
          times.push_back(each);
      }
      for (std::uint32_t i = 0; i < 3; ++i)
        if (i != victim) CHECK(world.heard[i].arrivals.size() == 6);
      std::sort(times.begin(), times.end());
      MESSAGE(std::string(kind == socket_kind::tcp ? "TCP" : "Unix"), ", seat ", victim,
              ": death told after ", static_cast<double>(times[times.size() / 2]) * 1e-6, " ms (median), ",
              static_cast<double>(times.back()) * 1e-6, " ms (most)");
    }
  }
}

TEST_CASE("a grandchild that holds the sockets of a killed process does not hide its death") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2);
    world.start(0);
    std::array<int, 2> told{};
    REQUIRE(::pipe(told.data()) == 0);
    pid_t grandchild = -1;
    {
      seat_process process(world.options(1), with_child(told[1]));
      REQUIRE(world.until([&] { return world.is_complete() || is_whole_but(world, 1); }));
      world.run_for(20 * ms);
      REQUIRE(::read(told[0], &grandchild, sizeof(grandchild)) == sizeof(grandchild));
      const auto times = time_of_death(world, 1, process);
      MESSAGE(std::string(kind == socket_kind::tcp ? "TCP" : "Unix"), ": death told after ",
              static_cast<double>(times[0]) * 1e-6, " ms");
    }
    REQUIRE(::kill(grandchild, 0) == 0);  // it is there, and holds them
    if (kind == socket_kind::local) {     // of TCP it holds the port, too
      const seat_process fresh(world.options(1));
      REQUIRE(world.until([&] { return world.heard[0].arrivals.size() == 2; }));
    }
    ::kill(grandchild, SIGKILL);
    ::close(told[0]);
    ::close(told[1]);
  }
}

TEST_CASE("a process that is given up just after its end was seen is reported as certainly dead") {
  socket_world world(socket_kind::tcp, 2);
  world.start(0);
  std::array<int, 2> told{};
  REQUIRE(::pipe(told.data()) == 0);
  pid_t grandchild = -1;
  // A child of it holds its connections, so that these have no end: for a moment more may come.
  seat_process process(world.options(1), with_child(told[1]));
  REQUIRE(world.until([&] { return is_whole_but(world, 1); }));
  REQUIRE(::fcntl(told[0], F_SETFL, O_NONBLOCK) == 0);
  REQUIRE(world.until([&] { return ::read(told[0], &grandchild, sizeof(grandchild)) > 0; }));
  process.kill();
  recorder& heard = world.heard[0];
  while (world.ends[0]->is_connected(seat_id{1}))
    static_cast<void>(world.ends[0]->poll({}, heard));
  REQUIRE(heard.deaths.empty());
  world.ends[0]->give_up(seat_id{1});
  CHECK(world.until([&] { return !heard.deaths.empty(); }));
  CHECK(heard.deaths == std::vector{std::pair{1U, comm::death::certain}});
  ::kill(grandchild, SIGKILL);
  ::close(told[0]);
  ::close(told[1]);
}

TEST_CASE("frames that a process sent before it was killed still arrive") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2);
    world.start(0);
    seat_process process(world.options(1), [](socket_endpoint& end, recorder& heard) {
      const std::vector<std::byte> bytes(40'000, std::byte{9});
      for (std::uint64_t i = 0; i < 3; ++i)
        static_cast<void>(end.send(seat_id{0}, {.message = i, .bytes = 40'000}, bytes, no_deadline, heard));
      for (std::uint32_t i = 0; i < 10; ++i)
        end.post(seat_id{0}, {.tag = i}, {});
      ::raise(SIGKILL);
    });
    std::size_t frames = 0;
    std::size_t tellings = 0;
    world.heard[0].on_died = [&](seat_id) {
      frames = world.heard[0].frames.size();
      tellings = world.heard[0].tellings.size();
    };
    // Not a look until it is dead.
    REQUIRE(world.until([&] { return !world.heard[0].arrivals.empty(); }));
    ::usleep(50'000);
    REQUIRE(world.until([&] { return !world.heard[0].deaths.empty(); }));
    CHECK(world.heard[0].deaths == std::vector{std::pair{1U, comm::death::certain}});
    CHECK(frames == 3);
    CHECK(tellings == 10);
  }
}

TEST_CASE(
    "frames without a buffer when their sender died are received if the handler has one when the death is "
    "noticed") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2);
    world.start(0);
    world.heard[0].answer = frame_buffer::answer::ask_again;
    const seat_process process(world.options(1), [](socket_endpoint& end, recorder& heard) {
      const std::vector<std::byte> bytes(40'000, std::byte{9});
      for (std::uint64_t i = 0; i < 3; ++i)
        static_cast<void>(end.send(seat_id{0}, {.message = i, .bytes = 40'000}, bytes, no_deadline, heard));
    });
    REQUIRE(world.until([&] { return world.heard[0].asked != 0; }));
    world.run_for(20 * ms);
    world.ends[0]->post(seat_id{1}, {.tag = 99}, {});
    ::usleep(50'000);
    world.heard[0].answer = frame_buffer::answer::take;
    REQUIRE(world.until([&] { return !world.heard[0].deaths.empty(); }));
    CHECK(world.heard[0].frames.size() == 3);
  }
}

TEST_CASE("a stopped process is suspected, does not return, and is certainly dead once it ends") {
  socket_world world(socket_kind::local, 3,
                     {.beat_ns = 5 * ms, .soft_silence_ns = 50 * ms, .hard_silence_ns = 300 * ms});
  world.start(0);
  world.start(2);
  seat_process process(world.options(1));
  REQUIRE(world.until([&] { return is_whole_but(world, 1); }));
  process.send(SIGSTOP);
  REQUIRE(world.until([&] { return !world.heard[0].deaths.empty() && !world.heard[2].deaths.empty(); }));
  for (const std::size_t i : {0U, 2U}) {
    CHECK(world.heard[i].deaths == std::vector{std::pair{1U, comm::death::suspected}});
    CHECK(world.ends[i]->stats().connected == 1);
  }
  process.send(SIGCONT);
  world.run_for(300 * ms);
  for (const std::size_t i : {0U, 2U}) {
    CHECK(world.heard[i].deaths.size() == 1);
    CHECK(world.heard[i].arrivals.size() == 2);
  }
  process.kill();
  REQUIRE(
      world.until([&] { return world.heard[0].deaths.size() == 2 && world.heard[2].deaths.size() == 2; }));
  CHECK(world.heard[0].deaths[1] == std::pair{1U, comm::death::certain});
  const seat_process fresh(world.options(1));
  REQUIRE(world.until([&] { return is_whole_but(world, 1); }));
}

TEST_CASE("a stopped process is killed if the options say so, and is then certainly dead") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2,
                       {.silence = on_silence::kill_local,
                        .beat_ns = 5 * ms,
                        .soft_silence_ns = 50 * ms,
                        .hard_silence_ns = 300 * ms});
    world.start(0);
    seat_process process(world.options(1));
    REQUIRE(world.until([&] { return is_whole_but(world, 1); }));
    process.send(SIGSTOP);
    REQUIRE(world.until([&] { return !world.heard[0].deaths.empty(); }));
    CHECK(world.heard[0].deaths == std::vector{std::pair{1U, comm::death::certain}});
    CHECK(world.ends[0]->stats().killed == 1);
    const int status = process.wait();
    CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
  }
}

TEST_CASE("a process that ends normally is certainly dead, and its seat is free at once") {
  for (const socket_kind kind : both_kinds) {
    socket_world world(kind, 2);
    world.start(0);
    seat_process process(world.options(1));
    REQUIRE(world.until([&] { return is_whole_but(world, 1); }));
    world.ends[0]->post(seat_id{1}, {.tag = 77}, {});
    REQUIRE(world.until([&] { return !world.heard[0].deaths.empty(); }));
    CHECK(process.wait() == 0);
    CHECK(world.heard[0].deaths == std::vector{std::pair{1U, comm::death::certain}});
    CHECK(world.heard[0].tellings.size() == 1);
    const seat_process fresh(world.options(1));
    REQUIRE(world.until([&] { return is_whole_but(world, 1); }));
  }
}

TEST_CASE("a forked child may destroy its copy of the endpoint, and no process notices") {
  socket_world world(socket_kind::local, 2);
  REQUIRE(world.join());
  std::fflush(nullptr);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::alarm(20);
    world.ends[1].reset();
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  world.run_for(300 * ms);
  CHECK(world.heard[0].deaths.empty());
  world.ends[1]->post(seat_id{0}, {.tag = 1}, {});
  REQUIRE(world.until([&] { return world.heard[0].tellings.size() == 1; }));
}
