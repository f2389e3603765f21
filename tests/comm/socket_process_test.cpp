// Which process holds a connection, by what the kernel says.
#include <llmmem/comm/detail/socket_process.hpp>

#include <doctest/doctest.h>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

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

TEST_CASE("a process that holds the other end of a TCP connection is known to, and no other one is") {
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
