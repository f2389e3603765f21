#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/socket_endpoint.hpp>

#include <doctest/doctest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "support/comm_job.hpp"
#include "support/seeds.hpp"
#include "support/socket_world.hpp"
#include "support/temporary_folder.hpp"

namespace {

using namespace llmmem;
using llmmem_tests::job_end;
using llmmem_tests::job_history;
using llmmem_tests::run_job;

constexpr int is_through = 0;
constexpr int has_not_joined = 3;
constexpr int has_lost_quorum = 4;
constexpr int has_thrown = 5;

/// A process of the job.
int live(std::uint32_t seat, std::uint32_t seats, const std::string& folder) {
  try {
    socket_endpoint end({.seat = seat_id{seat}, .seats = seats, .folder = folder});
    job_history history;
    const job_end how =
        run_job(end, history, {.steps = 60, .words = 20'000, .join_patience_ns = 2'000'000'000},
                [](std::uint64_t) { ::usleep(1000); });
    if (how.is_through) return is_through;
    return how.is_fresh ? has_not_joined : has_lost_quorum;
  } catch (const std::exception&) {
    return has_thrown;
  }
}

pid_t start(std::uint32_t seat, std::uint32_t seats, const std::string& folder) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(live(seat, seats, folder));
  return pid;
}

/// How two ranks end that have left a third one out, which stands still.
enum class others_end : std::uint8_t { leave, are_killed };

/// One of three. Seat 2 stands still in its 20th step.
int live_beside_zombie(const socket_options& options, others_end how) {
  try {
    socket_endpoint end(options);
    job_history history;
    std::uint64_t steps_alone = 0;
    const bool is_killed = how == others_end::are_killed;
    const job_end ended =
        run_job(end, history,
                {.steps = is_killed ? 1'000'000U : 60U, .words = 100, .join_patience_ns = 20'000'000'000},
                [&](std::uint64_t step) {
                  if (options.seat == seat_id{2} && step == 20) ::raise(SIGSTOP);
                  if (options.seat != seat_id{2} && !end.is_connected(seat_id{2})) ++steps_alone;
                  if (is_killed && steps_alone == 10) ::raise(SIGKILL);
                  ::usleep(500);
                });
    if (ended.is_through) return is_through;
    return ended.is_fresh ? has_not_joined : has_lost_quorum;
  } catch (const std::exception&) {
    return has_thrown;
  }
}

}  // namespace

TEST_SUITE("communicator_processes") {
  TEST_CASE(
      "processes that are killed at random and started again leave the others with the state of a quiet "
      "run") {
    std::uint32_t readmitted = 0;
    for (const auto seed : llmmem_tests::seeds(8)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto seats = static_cast<std::uint32_t>(2 + random() % 3);
      const llmmem_tests::temporary_folder folder;
      std::vector<pid_t> pids;
      for (std::uint32_t i = 0; i < seats; ++i)
        pids.push_back(start(i, seats, folder.path().string()));
      // Seat 0 lives; of the others some die, one after the other or at once, and come back.
      std::vector<bool> is_second(seats, false);
      for (std::uint32_t i = 1; i < seats; ++i) {
        if (random() % 2 == 0) ::usleep(static_cast<useconds_t>(20'000 + random() % 30'000));
        ::kill(pids[i], SIGKILL);
        int status = 0;
        CHECK(::waitpid(pids[i], &status, 0) == pids[i]);
        if (random() % 4 == 0) {
          pids[i] = -1;
          continue;
        }
        pids[i] = start(i, seats, folder.path().string());
        is_second[i] = true;
      }
      for (std::uint32_t i = 0; i < seats; ++i) {
        if (pids[i] < 0) continue;
        CAPTURE(i);
        int status = 0;
        CHECK(::waitpid(pids[i], &status, 0) == pids[i]);
        REQUIRE(WIFEXITED(status));
        const int how = WEXITSTATUS(status);
        CAPTURE(how);
        if (how == is_through && is_second[i]) ++readmitted;
        // One killed before all had met leaves nobody to begin with; one that comes too late finds nobody.
        CHECK((how == is_through || how == has_not_joined));
      }
    }
    CHECK(readmitted > 3);
  }

  TEST_CASE(
      "a rank that stood still never continues alone, regardless of how the others that left it out ended") {
    for ([[maybe_unused]] const auto seed : llmmem_tests::seeds(1)) {
      for (const bool is_tcp : {false, true}) {
        for (const others_end how : {others_end::leave, others_end::are_killed}) {
          CAPTURE(is_tcp);
          CAPTURE(static_cast<int>(how));
          const llmmem_tests::temporary_folder folder;
          socket_options options{.seats = 3,
                                 .beat_ns = 20'000'000,
                                 .soft_silence_ns = 100'000'000,
                                 .hard_silence_ns = 300'000'000};
          if (is_tcp) {
            options.addresses = llmmem_tests::free_addresses(3);
            options.secret = "of three";
          } else {
            options.folder = folder.path().string();
          }
          std::vector<pid_t> pids;
          for (std::uint32_t seat = 0; seat < 3; ++seat) {
            options.seat = seat_id{seat};
            pids.push_back(::fork());
            if (pids.back() == 0) {
              ::alarm(60);
              ::_exit(live_beside_zombie(options, how));
            }
          }
          int status = 0;
          REQUIRE(::waitpid(pids[2], &status, WUNTRACED) == pids[2]);
          REQUIRE(WIFSTOPPED(status));
          for (const std::size_t seat : {0U, 1U}) {
            REQUIRE(::waitpid(pids[seat], &status, 0) == pids[seat]);
            if (how == others_end::leave) CHECK((WIFEXITED(status) && WEXITSTATUS(status) == is_through));
          }
          ::kill(pids[2], SIGCONT);
          REQUIRE(::waitpid(pids[2], &status, 0) == pids[2]);
          REQUIRE(WIFEXITED(status));
          CHECK(WEXITSTATUS(status) == has_lost_quorum);
        }
      }
    }
  }

  TEST_CASE("ranks that starve while others compute are healthy, and none is killed for its silence") {
    // It takes half a minute of all cores: scripts/soak sets that.
    if (std::getenv("LLMMEM_SEED_FACTOR") == nullptr) return;
    const std::vector<std::string> addresses = llmmem_tests::free_addresses(3);
    std::vector<pid_t> spinners;
    for (int i = 0; i < 6; ++i) {
      spinners.push_back(::fork());
      if (spinners.back() != 0) continue;
      ::alarm(300);
      for (std::atomic<std::uint64_t> rounds{0};;)
        rounds.fetch_add(1, std::memory_order_relaxed);
    }
    std::vector<pid_t> pids;
    for (std::uint32_t seat = 0; seat < 3; ++seat) {
      pids.push_back(::fork());
      if (pids.back() != 0) continue;
      ::alarm(300);
      static_cast<void>(!::nice(19));
      socket_endpoint end({.seat = seat_id{seat},
                           .seats = 3,
                           .addresses = addresses,
                           .secret = "of three",
                           .silence = on_silence::kill_local,
                           .soft_silence_ns = 200'000'000,
                           .hard_silence_ns = 500'000'000});
      job_history history;
      const job_end how = run_job(
          end, history,
          {.steps = 60, .words = 1000, .patience_ns = 200'000'000'000, .join_patience_ns = 200'000'000'000},
          [](std::uint64_t) { ::usleep(1000); });
      ::_exit(how.is_through && how.last_world == 3 ? is_through : has_lost_quorum);
    }
    for (const pid_t pid : pids) {
      int status = 0;
      CHECK(::waitpid(pid, &status, 0) == pid);
      CHECK(WIFEXITED(status));
      CHECK(WEXITSTATUS(status) == is_through);
    }
    for (const pid_t pid : spinners) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }

  TEST_CASE("the silences of consecutive agreements add up, and the last one leaves the silent rank out") {
    const llmmem_tests::temporary_folder folder;
    const auto options = [&](std::uint32_t seat) {
      return socket_options{.seat = seat_id{seat},
                            .seats = 2,
                            .folder = folder.path().string(),
                            .beat_ns = 5'000'000,
                            .hard_silence_ns = 400'000'000};
    };
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::alarm(60);
      socket_endpoint end(options(1));
      communicator ranks(end);
      if (!ranks.join(ranks.after(10'000'000'000))) ::_exit(has_not_joined);
      ::raise(SIGSTOP);
      ::_exit(is_through);
    }
    socket_endpoint end(options(0));
    communicator ranks(end, {.name = "job"});
    const auto joined = ranks.join(ranks.after(10'000'000'000));
    CHECK(joined.has_value());
    int status = 0;
    CHECK(::waitpid(pid, &status, WUNTRACED) == pid);
    CHECK(WIFSTOPPED(status));
    std::uint32_t late = 0;
    result<comm::agreed> outcome = ranks.agree(1, ranks.after(100'000'000));
    for (; outcome.code() == errc::peer_timed_out && late < 100; ++late) {
      CHECK(outcome.error().message() ==
            "job: rank 1 did not respond before the deadline; call again with more time, or revoke() and "
            "agree()");
      ::usleep(100'000);  // does not count
      outcome = ranks.agree(1, ranks.after(100'000'000));
    }
    CHECK(late >= 3);
    CHECK(late <= 30);
    CHECK(outcome.has_value());
    CHECK(to_text(outcome->failed) == "seat 1");
    ::kill(pid, SIGKILL);
    ::waitpid(pid, &status, 0);
  }
}
