/// Evidence of death and what is concluded from it, by a clock that the test moves.
#include <llmmem/comm/detail/failure_detector.hpp>

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using detail::death_evidence;
using detail::death_verdict;
using detail::descriptor;
using detail::failure_detector;
using detail::incarnation_id;
using detail::listening_clock;
using detail::seat_state;

namespace {

constexpr seat_id peer{1};
constexpr std::uint64_t confirm = 1'000'000'000;
constexpr std::uint64_t start = 50'000'000'000;

incarnation_id life(int number) {
  incarnation_id id{};
  id.fill(static_cast<std::byte>(number));
  return id;
}

/// Stands for a pidfd: it can be read once the process has "exited".
struct process_double {
  descriptor held;

  descriptor make() {
    descriptor given(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    held = descriptor(::dup(given.get()));
    return given;
  }
  void exit() const {
    const std::uint64_t one = 1;
    CHECK(::write(held.get(), &one, sizeof(one)) == sizeof(one));
  }
};

struct one_peer {
  socket_options options;
  listening_clock clock;
  failure_detector detector;

  explicit one_peer(socket_options given = {})
      : options(with_times(std::move(given))), detector(clock, options, 2) {
    clock.begin(start);
    clock.restart_timers();
  }
  static socket_options with_times(socket_options of) {
    of.confirm_ns = confirm;
    of.soft_silence_ns = 100;
    of.hard_silence_ns = 500;
    return of;
  }
  void connect(descriptor process = {}, bool is_own = false, int number = 1) {
    detector.seat(peer, life(number), std::move(process), is_own);
  }
  void pass(std::uint64_t ns) { clock.look(clock.now() + ns, ns); }
  [[nodiscard]] socket_stats stats() const {
    socket_stats all;
    detector.add_to(all);
    return all;
  }
};

}  // namespace

TEST_CASE("the end of a connection counts as the options say, once its bytes are read or its time is over") {
  for (const on_reset reset : {on_reset::dead, on_reset::suspected}) {
    one_peer one({.reset = reset});
    const death_verdict expected =
        reset == on_reset::dead ? death_verdict::certain : death_verdict::suspected;
    one.connect();
    CHECK(one.detector.judge(peer, true) == death_verdict::undecided);  // no evidence
    one.detector.note(peer, death_evidence::reset);
    CHECK(one.detector.state(peer) == seat_state::ending);
    CHECK_FALSE(one.detector.is_known_dead(peer));
    CHECK(one.detector.judge(peer, true) == expected);
    CHECK(one.detector.judge(peer, false) == death_verdict::undecided);
    CHECK(one.clock.wait_until(~std::uint64_t{0}) <= start + confirm);
    one.pass(confirm - 1);
    CHECK(one.detector.judge(peer, false) == death_verdict::undecided);
    one.pass(1);
    CHECK(one.detector.judge(peer, false) == death_verdict::read_rest);
    CHECK(one.detector.judge_rest(peer) == expected);
  }
}

TEST_CASE("the end of a connection is no death while its process may exit, and a suspicion if it does not") {
  process_double process;
  one_peer one;
  one.connect(process.make());
  one.detector.note(peer, death_evidence::reset);
  CHECK(one.detector.judge(peer, true) == death_verdict::undecided);
  one.pass(confirm);
  CHECK(one.detector.judge(peer, true) == death_verdict::suspected);
  CHECK(one.detector.judge_suspect(peer) == death_verdict::suspected);
  // A last look: it has exited after all.
  process.exit();
  CHECK(one.detector.judge_suspect(peer) == death_verdict::read_rest);
  one.detector.note(peer, death_evidence::exited);
  CHECK(one.detector.is_known_dead(peer));
  CHECK(one.detector.judge_suspect(peer) == death_verdict::certain);
}

TEST_CASE(
    "an exit is certain at once over Unix sockets, and over TCP after the time for the remaining bytes") {
  for (const bool is_unix : {true, false}) {
    process_double process;
    one_peer one({.folder = is_unix ? "/tmp" : ""});
    one.connect(process.make());
    process.exit();
    one.detector.note(peer, death_evidence::exited);
    CHECK(one.detector.judge(peer, true) == death_verdict::certain);
    CHECK(one.detector.judge(peer, false) == (is_unix ? death_verdict::certain : death_verdict::undecided));
    one.pass(detail::drain_ns);
    CHECK(one.detector.judge(peer, false) == (is_unix ? death_verdict::certain : death_verdict::read_rest));
    CHECK(one.detector.judge_rest(peer) == death_verdict::certain);
  }
}

TEST_CASE(
    "a process that announces its leaving is certainly dead, even if its connection would only be suspect") {
  one_peer one({.reset = on_reset::suspected});
  one.connect();
  one.detector.note(peer, death_evidence::leaving);
  CHECK(one.detector.judge(peer, false) == death_verdict::undecided);
  one.detector.note(peer, death_evidence::reset);  // weaker: changes nothing
  CHECK(one.detector.is_known_dead(peer));
  CHECK(one.detector.judge(peer, true) == death_verdict::certain);
}

TEST_CASE("stronger evidence brings the time of the verdict forward") {
  one_peer one;
  one.connect();
  one.detector.note(peer, death_evidence::reset);
  one.pass(100);
  one.detector.note(peer, death_evidence::exited);
  CHECK(one.clock.wait_until(~std::uint64_t{0}) <= start + 100 + detail::drain_ns);
  one.pass(detail::drain_ns);
  CHECK(one.detector.judge(peer, false) == death_verdict::read_rest);
}

TEST_CASE("evidence against an empty or abandoned seat concludes nothing") {
  one_peer one;
  one.detector.note(peer, death_evidence::exited);
  CHECK(one.detector.state(peer) == seat_state::nobody);
  CHECK(one.detector.judge(peer, true) == death_verdict::undecided);
  one.connect();
  one.detector.give_up(peer);
  one.detector.note(peer, death_evidence::reset);
  CHECK(one.detector.state(peer) == seat_state::given_up);
  CHECK(one.detector.judge(peer, true) == death_verdict::undecided);
  CHECK(one.detector.judge_rest(peer) == death_verdict::undecided);
}

TEST_CASE("the end of a given-up seat is certain only if its process is unknown and resets count as deaths") {
  for (const on_reset reset : {on_reset::dead, on_reset::suspected}) {
    for (const bool has_process : {false, true}) {
      process_double process;
      one_peer one({.reset = reset});
      one.connect(has_process ? process.make() : descriptor());
      one.detector.give_up(peer);
      CHECK(one.detector.judge_given_up(peer) == (has_process               ? death_verdict::undecided
                                                  : reset == on_reset::dead ? death_verdict::certain
                                                                            : death_verdict::suspected));
    }
  }
}

TEST_CASE("a process that is dead or given up is rejected until another one has taken the seat") {
  one_peer one;
  CHECK_FALSE(one.detector.is_rejected(peer, incarnation_id{}));
  one.connect({}, false, 1);
  CHECK_FALSE(one.detector.is_rejected(peer, life(1)));
  one.detector.give_up(peer);
  CHECK(one.detector.is_rejected(peer, life(1)));
  one.connect({}, false, 2);
  CHECK(one.detector.is_rejected(peer, life(1)));
  CHECK_FALSE(one.detector.is_rejected(peer, life(2)));
  CHECK(one.detector.report_certain(peer));
  CHECK(one.detector.is_rejected(peer, life(2)));
}

TEST_CASE(
    "in any course of events a process is reported as suspected at most once, and then as dead at most "
    "once") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    one_peer one;
    std::uint64_t lives = 0;
    std::uint64_t suspected = 0;
    std::uint64_t died = 0;
    bool is_suspected = true;
    bool is_dead = true;
    for (int i = 0; i < 200; ++i) {
      switch (random.below(6U)) {
        case 0:
          one.connect({}, false, static_cast<int>(++lives));
          is_suspected = is_dead = false;
          break;
        case 1:
          one.detector.note(peer, static_cast<death_evidence>(random.below(3U)));
          break;
        case 2:
          one.detector.vacate(peer);
          break;
        case 3:
          if (lives == 0) break;
          REQUIRE(one.detector.report_suspected(peer) == (!is_suspected && !is_dead));
          suspected += !is_suspected && !is_dead ? 1 : 0;
          is_suspected = true;
          break;
        case 4:
          if (lives == 0) break;
          REQUIRE(one.detector.report_certain(peer) == !is_dead);
          died += is_dead ? 0 : 1;
          is_dead = true;
          break;
        default:
          one.pass(random.below(1000U));
      }
    }
    CHECK(one.stats().joined == lives);
    CHECK(one.stats().suspected == suspected);
    CHECK(one.stats().died == died);
  }
}

TEST_CASE("silence is measured in listened time from the last byte") {
  one_peer one;
  one.connect();
  one.pass(99);
  CHECK_FALSE(one.detector.look_at_silence(peer));
  CHECK(one.stats().silent == 0);
  one.pass(1);
  CHECK_FALSE(one.detector.look_at_silence(peer));
  CHECK(one.stats().silent == 1);
  one.clock.begin(one.clock.now() + 10'000);  // nobody listened
  one.pass(399);
  CHECK_FALSE(one.detector.is_silent(peer));
  one.pass(1);
  CHECK(one.detector.is_silent(peer));
  CHECK(one.detector.look_at_silence(peer));
  one.detector.heard(peer);
  CHECK_FALSE(one.detector.is_silent(peer));
  CHECK_FALSE(one.detector.look_at_silence(peer));
  CHECK(one.stats().silent == 0);
}

TEST_CASE("without a hard limit no silence is too long") {
  socket_options options = one_peer::with_times({});
  options.hard_silence_ns = 0;
  listening_clock clock;
  failure_detector detector(clock, options, 2);
  detector.seat(peer, life(1), {}, false);
  clock.look(1'000'000'000'000, ~std::uint64_t{0});
  CHECK_FALSE(detector.look_at_silence(peer));
}

TEST_CASE("only a known process of another endpoint may be killed, and only if the options allow it") {
  for (const on_silence silence : {on_silence::suspect, on_silence::kill_local}) {
    for (const bool is_own : {false, true}) {
      for (const bool has_process : {false, true}) {
        process_double process;
        one_peer one({.silence = silence});
        one.connect(has_process ? process.make() : descriptor(), is_own);
        CHECK(one.detector.may_kill(peer) == (silence == on_silence::kill_local && has_process && !is_own));
      }
    }
  }
}

TEST_CASE("the pidfd shows that a killed process no longer exists") {
  const pid_t child = ::fork();
  if (child == 0) {
    for (;;)
      ::pause();
  }
  one_peer one({.silence = on_silence::kill_local});
  one.connect(detail::open_process(static_cast<std::uint32_t>(child)));
  if (one.detector.process(peer).is_open()) {
    one.detector.kill(peer);
    CHECK(one.detector.state(peer) == seat_state::ending);
    CHECK(one.stats().killed == 1);
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
    CHECK(one.detector.judge_suspect(peer) == death_verdict::read_rest);
  } else {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
}
