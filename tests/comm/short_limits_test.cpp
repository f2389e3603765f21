/// Limits of the system as inputs: endpoints of a process that may open no further file, or start no thread.
#include <llmmem/comm/socket_endpoint.hpp>

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>

#include "support/socket_world.hpp"
#include "support/without_flock.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Allows so many more descriptors than are open.
void allow_files(::rlim_t more) {
  const int lowest = ::dup(STDIN_FILENO);
  ::close(lowest);
  ::rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = static_cast<::rlim_t>(lowest) + more;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

/// Two endpoints of one process that meet, and one message.
struct two_ends {
  explicit two_ends(socket_kind kind) : world(kind, 2) {}

  void start() {
    world.start(0);
    world.start(1);
  }
  bool meet(std::uint64_t for_ns) {
    const deadline limit = socket_world::in(for_ns);
    static_cast<void>(world.until([&] { return world.is_complete() || detail::monotonic_ns() >= limit.ns; }));
    return world.is_complete();
  }
  bool talk() {
    world.ends[0]->post(seat_id{1}, {.tag = 1}, {});
    return world.until([&] { return world.heard[1].tellings.size() == 1; });
  }

  socket_world world;
};

}  // namespace

TEST_CASE("with any limit of open files, endpoints say that it is too low, or meet, also once it is raised") {
  for (const socket_kind kind : {socket_kind::local, socket_kind::tcp}) {
    std::uint64_t refused = 0;
    std::uint64_t late = 0;
    std::uint64_t met = 0;
    for (::rlim_t more = 0; met == 0; ++more) {
      CAPTURE(more);
      REQUIRE(more < 64);
      told_child child([&](auto tell, auto) {
        two_ends ends(kind);
        try {
          allow_files(more);
          ends.start();
        } catch (const error& refusal) {
          return tell(refusal.what());
        }
        const bool is_there = ends.meet(30 * ms);
        allow_files(1'000);
        tell(!is_there && !ends.meet(10'000 * ms) ? "never"
             : !ends.talk()                       ? "mute"
             : is_there                           ? "met"
                                                  : "late");
      });
      const std::string told = child.next();
      CAPTURE(told);
      if (told == "met") {
        ++met;
      } else if (told == "late") {
        ++late;
      } else {
        CHECK(told.find("Too many open files") != std::string::npos);
        ++refused;
      }
    }
    MESSAGE(refused << " limits refused, " << late << " met when the limit was raised");
    CHECK(refused > 0);
  }
}

TEST_CASE("where no thread can be started, an endpoint works without, or says so") {
  for (const socket_kind kind : {socket_kind::local, socket_kind::tcp}) {
    told_child child([&](auto tell, auto) {
      two_ends ends(kind);
      if (!refuse_call(__NR_clone3, EAGAIN) || !refuse_call(__NR_clone, EAGAIN)) return tell("not allowed");
      try {
        ends.start();
      } catch (const error& refusal) {
        return tell(refusal.what());
      }
      tell(ends.meet(10'000 * ms) && ends.talk() ? "met" : "never");
    });
    const std::string told = child.next();
    CAPTURE(told);
    CHECK((told == "met" || told == "not allowed" || told.find("thread") != std::string::npos));
  }
}
