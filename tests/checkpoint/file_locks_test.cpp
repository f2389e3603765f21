// Files that one process has alone.
#include <llmmem/tiering/persistent_file_space.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "support/error_text.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::string_view held =
    ": another process, or another object in this one, holds the file; end that, or use another path: each "
    "rank and each tier needs its own";

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
}
