#include <llmmem/checkpoint/termination.hpp>

#include <doctest/doctest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <thread>

using namespace llmmem;

namespace {

/// How a child ends that does this.
template <class Work>
int ending_of(Work work) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGUSR1, SIG_DFL);
    work();
    ::_exit(7);
  }
  int told = 0;
  while (::waitpid(child, &told, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(told) ? WEXITSTATUS(told) : 100 + WTERMSIG(told);
}

}  // namespace

TEST_CASE("a signal is held back, reported once it arrived, and stays reported") {
  CHECK(ending_of([] {
          const termination_request termination(SIGUSR1);
          if (termination.is_requested()) ::_exit(1);
          ::kill(::getpid(), SIGUSR1);
          if (!termination.is_requested() || !termination.is_requested()) ::_exit(2);
        }) == 7);
}

TEST_CASE("threads that are started later do not die of the signal either") {
  CHECK(ending_of([] {
          const termination_request termination(SIGUSR1);
          std::thread([] { ::pthread_kill(::pthread_self(), SIGUSR1); }).join();
          ::kill(::getpid(), SIGUSR1);
          if (!termination.is_requested()) ::_exit(2);
        }) == 7);
}

TEST_CASE("a signal that was never reported ends the process when the request is destroyed") {
  CHECK(ending_of([] {
          const termination_request termination(SIGUSR1);
          ::kill(::getpid(), SIGUSR1);
        }) == 100 + SIGUSR1);
}

TEST_CASE("after the request the signal has its former effect") {
  CHECK(ending_of([] {
          {
            const termination_request termination(SIGUSR1);
          }
          ::kill(::getpid(), SIGUSR1);
        }) == 100 + SIGUSR1);
}

TEST_CASE("an invalid signal is refused") {
  std::string text;
  try {
    const termination_request termination(12345);
  } catch (const argument_error& failure) {
    text = failure.what();
  }
  CHECK(text == "termination_request: 12345 is not a signal that can be blocked");
}
