// Files that one process has alone, and file systems that have no locks.
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/tiering/persistent_file_space.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>

#include "support/error_text.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::string_view held =
    ": another process, or another object in this one, holds the file; end that, or use another path: each "
    "rank and each tier needs its own";

/// Runs in a child process, where flock fails with that number; gives what it returned, 77 where the system
/// does not let a process say so.
template <class Work>
int without_flock(int number, Work work) {
  const ::pid_t child = ::fork();
  if (child == 0) {
    sock_filter program[] = {
        {BPF_LD | BPF_W | BPF_ABS, 0, 0, 0},  // the call's number
        {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, __NR_flock},
        {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(number)},
        {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
    };
    const sock_fprog filter{.len = 4, .filter = program};
    const bool is_set = ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
                        ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
    ::_exit(is_set ? work() : 77);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_SUITE("files that one process has alone") {
  TEST_CASE("a second space of one path is refused, in this process and in another") {
    const temporary_folder folder;
    const std::string path = folder.file("tier");
    {
      const file_space<> first(path, {.budget = 1 << 20});
      CHECK(text_of([&] { const file_space<> second(path, {.budget = 1 << 20}); }) ==
            path + std::string(held));
      CHECK(text_of([&] { const persistent_file_space<> second(path, {.space = {.budget = 1 << 20}}); }) ==
            path + std::string(held));
      const ::pid_t child = ::fork();
      if (child == 0)
        ::_exit(text_of([&] { const file_space<> mine(path, {.budget = 1 << 20}); }) ==
                        path + std::string(held)
                    ? 0
                    : 1);
      int status = 1;
      CHECK(::waitpid(child, &status, 0) == child);
      CHECK(status == 0);
    }
    const file_space<> next(path, {.budget = 1 << 20});
  }

  TEST_CASE("several objects may open a path if the caller allows it, or if it is a device") {
    const temporary_folder folder;
    const file_options shared{.locks = file_locks::caller};
    const file_space<> first(folder.file("tier"), {.budget = 1 << 20, .file = shared});
    const file_space<> second(folder.file("tier"), {.budget = 1 << 20, .file = shared});
    const file_space<> full("/dev/full", {.budget = 1 << 20, .file = {.direct = direct_io::never}});
    const file_space<> again("/dev/full", {.budget = 1 << 20, .file = {.direct = direct_io::never}});
  }

  TEST_CASE("if a file system has no locks, a space that needs one names the option, which then works") {
    const temporary_folder folder;
    for (const int number : {ENOLCK, ENOSYS, EOPNOTSUPP}) {
      const int how = without_flock(number, [&] {
        const auto is_told = [](const std::string& text) {
          return text.ends_with(
              "; the file system has no locks: mount it with locks, or set `locks` to file_locks::caller and "
              "ensure that no other process has the file");
        };
        posix_storage<> storage(folder.file("run"));
        if (!is_told(text_of([&] { static_cast<void>(storage.try_lock("LOCK")); }))) return 1;
        posix_storage<> trusted(folder.file("run"), {.locks = file_locks::caller});
        const auto lock = trusted.try_lock("LOCK");
        if (!lock || !lock->is_held()) return 2;
        const std::string tier = folder.file("tier");
        if (!is_told(text_of([&] { const persistent_file_space<> one(tier, {.space = {.budget = 65536}}); })))
          return 3;
        const file_options shared{.locks = file_locks::caller};
        const persistent_file_space<> one(tier, {.space = {.budget = 65536, .file = shared}});
        const file_space<> scratch(folder.file("scratch"), {.budget = 65536});
        return 0;
      });
      if (how == 77) {
        MESSAGE("not tested: the system lets no process filter its calls");
      } else {
        CHECK(how == 0);
      }
    }
  }
}
