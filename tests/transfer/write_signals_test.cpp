// The signals that writing can raise end no process: a limit of file sizes is an error of the write.
#include <llmmem/detail/write_signals.hpp>
#include <llmmem/space/file.hpp>
#include <llmmem/space/memory_file.hpp>
#include <llmmem/tiering/chunk_index.hpp>
#include <llmmem/transfer/file_queue.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// While it lives, no file may pass that size; as `ulimit -f`.
class file_size_limit {
 public:
  explicit file_size_limit(std::uint64_t bytes) {
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before_) == 0);
    const rlimit now{bytes, before_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &now) == 0);
  }
  file_size_limit(const file_size_limit&) = delete;
  file_size_limit& operator=(const file_size_limit&) = delete;
  ~file_size_limit() { ::setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

[[nodiscard]] bool is_pending(int signal) {
  sigset_t pending;
  ::sigpending(&pending);
  return ::sigismember(&pending, signal) == 1;
}
[[nodiscard]] bool is_blocked(int signal) {
  sigset_t blocked;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  return ::sigismember(&blocked, signal) == 1;
}

constexpr std::uint64_t limit = 64 << 10;

}  // namespace

TEST_SUITE("signals of writes") {
  TEST_CASE("every call that extends a file refuses with EFBIG") {
    const temporary_folder folder;
    const file_size_limit limited(limit);
    io_file file(folder.file("file"));
    CHECK(file.reserve(0, 2 * limit).error().index == EFBIG);
    CHECK(file.resize(2 * limit).error().index == EFBIG);
    CHECK(file.resize(limit).has_value());
    CHECK(file.copy(limit, 0, 4096).error().index == EFBIG);
    memory_file memory("llmmem test");
    REQUIRE(memory.is_open());
    CHECK(memory.resize(2 * limit) == EFBIG);
    CHECK(memory.fill(2 * limit, 4096) == EFBIG);
    CHECK_FALSE(is_pending(SIGXFSZ));
    CHECK_FALSE(is_blocked(SIGXFSZ));
  }

  TEST_CASE("a transfer past the limit fails, regardless of which thread drives the queue") {
    const temporary_folder folder;
    const std::vector<std::byte> bytes(limit + 4096, std::byte{7});
    for (const auto driver : {transfer::driven_by::own_thread, transfer::driven_by::waiters}) {
      file_queue_options options;
      options.driver = driver;
      file_queue<> queue(options);
      io_file file(folder.file("file"), {.direct = direct_io::never});
      const file_size_limit limited(limit);
      const transfer_fence sent =
          queue.start(write_to(file, 0, bytes), transfer::urgency::write_back).value();
      const result<void> how = sent.conclude();
      REQUIRE_FALSE(how);
      CHECK(how.error().code == errc::write_failed);
      CHECK(how.error().index == EFBIG);
      CHECK_FALSE(is_pending(SIGXFSZ));
      CHECK_FALSE(is_blocked(SIGXFSZ));
    }
  }

  TEST_CASE("an index and a file space also refuse") {
    const temporary_folder folder;
    const file_size_limit limited(limit);
    chunk_index index(folder.file("index"), {.max_chunks = 4096});
    result<void> how;
    for (std::uint64_t i = 1; how && i < 2000; ++i)
      how = index.keep({.key = {i, i}, .bytes = 5});
    REQUIRE_FALSE(how);
    CHECK(how.error().index == EFBIG);
    CHECK(index.size() > 800);
    file_space<> space(folder.file("space"), {.budget = 4 * limit});
    CHECK_FALSE(space.try_allocate(2 * limit, 4096).has_value());
  }

  TEST_CASE("a signal that the caller blocks stays pending") {
    sigset_t own;
    sigset_t before;
    ::sigemptyset(&own);
    ::sigaddset(&own, SIGXFSZ);
    ::pthread_sigmask(SIG_BLOCK, &own, &before);
    ::raise(SIGXFSZ);
    {
      detail::write_signals_held held;
      ::raise(SIGPIPE);  // this one goes
      held.raised(EPIPE);
    }
    CHECK(is_pending(SIGXFSZ));
    CHECK_FALSE(is_pending(SIGPIPE));
    CHECK_FALSE(is_blocked(SIGPIPE));
    const timespec at_once{};
    CHECK(::sigtimedwait(&own, nullptr, &at_once) == SIGXFSZ);
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
}
