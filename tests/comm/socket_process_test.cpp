// Which process holds a connection, by what the kernel says.
#include <llmmem/comm/detail/socket_process.hpp>

#include <doctest/doctest.h>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <thread>

using namespace llmmem;

namespace {

/// A connection over the loopback, both ends of which this process holds.
struct loopback {
  detail::descriptor calls;
  detail::descriptor called;

  explicit loopback(int family) {
    const detail::descriptor listener(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_storage address{};
    address.ss_family = static_cast<sa_family_t>(family);
    if (family == AF_INET6) {
      sockaddr_in6 own{};
      own.sin6_family = AF_INET6;
      own.sin6_addr = in6addr_loopback;
      std::memcpy(&address, &own, sizeof(own));
    } else {
      sockaddr_in own{};
      own.sin_family = AF_INET;
      own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      std::memcpy(&address, &own, sizeof(own));
    }
    socklen_t bytes = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    auto* const at = reinterpret_cast<sockaddr*>(&address);
    if (::bind(listener.get(), at, bytes) != 0) return;  // no such family here
    REQUIRE(::listen(listener.get(), 1) == 0);
    REQUIRE(::getsockname(listener.get(), at, &bytes) == 0);
    calls = detail::descriptor(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::connect(calls.get(), at, bytes) == 0);
    called = detail::descriptor(::accept(listener.get(), nullptr, nullptr));
    REQUIRE(called.is_open());
  }
};

}  // namespace

TEST_CASE("the process at the other end of a TCP connection is recognised, and no other process is") {
  const pid_t other = ::fork();
  if (other == 0) {
    ::pause();
    ::_exit(0);
  }
  REQUIRE(other > 0);
  const auto self = static_cast<std::uint32_t>(::getpid());
  for (const int family : {AF_INET, AF_INET6}) {
    CAPTURE(family);
    loopback both(family);
    if (!both.called.is_open()) continue;
    CHECK(detail::holds_other_end(self, both.called.get()));
    CHECK(detail::holds_other_end(self, both.calls.get()));
    CHECK_FALSE(detail::holds_other_end(static_cast<std::uint32_t>(other), both.called.get()));
    CHECK_FALSE(detail::holds_other_end(0, both.called.get()));
    both.calls.close();
    CHECK_FALSE(detail::holds_other_end(self, both.called.get()));
  }
  ::kill(other, SIGKILL);
  ::waitpid(other, nullptr, 0);
}

TEST_CASE("a Unix socket has no place in the list of TCP connections") {
  int ends[2] = {-1, -1};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  const detail::descriptor one(ends[0]);
  const detail::descriptor other(ends[1]);
  CHECK_FALSE(detail::holds_other_end(static_cast<std::uint32_t>(::getpid()), one.get()));
}

TEST_CASE(
    "a process with heartbeats that computes wants a core; one that sleeps, is stopped or has ended does "
    "not") {
  int ready[2] = {-1, -1};
  REQUIRE(::pipe(ready) == 0);
  struct kind {
    bool has_beats;
    bool beats_compute;
    bool others_compute;
  };
  const auto child = [&](const kind& of) {
    const pid_t pid = ::fork();
    if (pid != 0) return pid;
    const auto lives = [&](bool computes) {
      const char one = 1;
      static_cast<void>(!::write(ready[1], &one, 1));
      while (computes)
        ::sched_yield();
      ::pause();
    };
    std::thread beats([&] {
      if (of.has_beats) ::pthread_setname_np(::pthread_self(), detail::beat_thread_name);
      lives(of.beats_compute);
    });
    lives(of.others_compute);
    ::_exit(0);
  };
  for (const kind& of :
       {kind{true, true, false}, {true, false, true}, {true, false, false}, {false, true, true}}) {
    CAPTURE(of.has_beats);
    CAPTURE(of.beats_compute);
    CAPTURE(of.others_compute);
    const bool computes = of.beats_compute || of.others_compute;
    const pid_t pid = child(of);
    REQUIRE(pid > 0);
    const detail::descriptor process = detail::open_process(static_cast<std::uint32_t>(pid));
    if (!process.is_open()) continue;  // a system without pidfd_open
    CHECK(detail::pid_of(process) == static_cast<std::uint32_t>(pid));
    for (int i = 0; i < 2; ++i) {
      char one = 0;
      REQUIRE(::read(ready[0], &one, 1) == 1);
    }
    // It is on its way to sleep for a moment.
    for (int i = 0; !computes && i < 10'000 && detail::wants_core(process); ++i)
      ::usleep(100);
    CHECK(detail::wants_core(process) == (computes && of.has_beats));
    int status = 0;
    ::kill(pid, SIGSTOP);
    REQUIRE(::waitpid(pid, &status, WUNTRACED) == pid);
    CHECK_FALSE(detail::wants_core(process));
    ::kill(pid, SIGKILL);
    ::waitpid(pid, &status, 0);
    CHECK_FALSE(detail::wants_core(process));
  }
  CHECK_FALSE(detail::wants_core(detail::descriptor()));
  CHECK_FALSE(detail::wants_core(detail::descriptor(ready[0])));  // a descriptor of something else
  ::close(ready[1]);
}
