/// What becomes of durability when the system says that a sync failed: it is said once, and forgotten by the
/// system. The calls are made here, so that they fail when they are told to.
#include <llmmem/space/file.hpp>
#include <llmmem/tiering/chunk_index.hpp>
#include <llmmem/tiering/persistent_file_space.hpp>

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <string>

#include "support/temporary_folder.hpp"

using namespace llmmem;
using llmmem_tests::temporary_folder;

namespace {

/// Of one of the two calls: how many come, and which of them fail. As devices do, it forgets a failure.
struct planned_syncs {
  int calls = 0;
  int first_failure = 0;  // of `calls` from 1 on; 0: none
  int failures = 0;       // so many in a row
  int error = EIO;

  [[nodiscard]] int made(long number, int file) {
    ++calls;
    if (first_failure != 0 && calls >= first_failure && calls < first_failure + failures) {
      errno = error;
      return -1;
    }
    return static_cast<int>(::syscall(number, file));
  }
};
thread_local planned_syncs of_data;
thread_local planned_syncs of_folders;

/// Until it ends, calls fail from the next one on.
class failing {
 public:
  failing(planned_syncs& which, int failures, int error = EIO) : which_(which) {
    which_ = {.first_failure = 1, .failures = failures, .error = error};
  }
  failing(const failing&) = delete;
  failing& operator=(const failing&) = delete;
  ~failing() { which_ = {}; }

 private:
  planned_syncs& which_;
};

[[nodiscard]] std::uint64_t file_number(const std::string& path) {
  struct stat status{};
  REQUIRE(::stat(path.c_str(), &status) == 0);
  return status.st_ino;
}

[[nodiscard]] std::ptrdiff_t open_files() {
  const std::filesystem::directory_iterator held("/proc/self/fd");
  return std::distance(begin(held), end(held));
}

[[nodiscard]] chunk_index_options few() {
  return {.max_chunks = 8, .slack = 4};
}

constexpr int always = 1 << 30;

}  // namespace

// Before the system's own, which stand behind them in the order in which names are looked up.
extern "C" int fdatasync(int file) {
  return of_data.made(SYS_fdatasync, file);
}
extern "C" int fsync(int file) {
  return of_folders.made(SYS_fsync, file);
}

TEST_CASE("a file with a failed sync is never reported as durable again") {
  const temporary_folder folder;
  io_file file(folder.file("a"));
  CHECK(file.sync());
  {
    const failing once(of_data, 1);
    CHECK(file.sync().error() == failure{.code = errc::sync_failed, .index = EIO});
    CHECK(file.sync().error() == failure{.code = errc::sync_failed, .index = EIO});
    CHECK(of_data.calls == 1);
  }
  CHECK(file.sync().error().message() == file.path() +
                                             ": sync failed: Input/output error (errno 5); earlier writes "
                                             "may be lost: write them again to another file");
  // Another life of the file knows nothing of it: its pages are what the system says.
  CHECK(io_file(folder.file("a")).sync());
}

TEST_CASE("a sync that a signal interrupts is repeated") {
  const temporary_folder folder;
  io_file file(folder.file("a"));
  const failing thrice(of_data, 3, EINTR);
  CHECK(file.sync());
  CHECK(of_data.calls == 4);
}

TEST_CASE(
    "a persistent space with a failed sync reports it in every later call, and syncs no index of those "
    "bytes") {
  const temporary_folder folder;
  persistent_file_space<> space(folder.file("tier"), {.space = {.budget = 65536}});
  REQUIRE(space.index().keep({.key = key_from_id(1), .bytes = 1}));
  {
    const failing once(of_data, 1);
    CHECK(space.sync().code() == errc::sync_failed);
    CHECK(of_data.calls == 1);
    CHECK(space.sync().code() == errc::sync_failed);
    CHECK(of_data.calls == 1);
  }
  CHECK(space.sync().error() == failure{.code = errc::sync_failed, .index = EIO});
}

TEST_CASE("an index whose sync failed is written again, and then durable") {
  const temporary_folder folder;
  const std::string path = folder.file("index");
  chunk_index index(path, few());
  REQUIRE(index.keep({.key = key_from_id(1), .bytes = 1}));
  const std::uint64_t before = file_number(path);
  {
    const failing once(of_data, 1);
    CHECK(index.sync());
    CHECK(of_data.calls == 2);
  }
  const std::uint64_t second = file_number(path);
  CHECK(second != before);
  {
    // Its own sync, and that of what was to replace it.
    const failing twice(of_data, 2);
    CHECK(index.sync().error() == failure{.code = errc::sync_failed, .index = EIO});
    CHECK(file_number(path) == second);
    CHECK(!std::filesystem::exists(path + ".new"));
    REQUIRE(index.keep({.key = key_from_id(2), .bytes = 2}));
    // The old one is not asked again.
    CHECK(index.sync());
    CHECK(of_data.calls == 3);
  }
  CHECK(file_number(path) != second);
  const chunk_index again(path, few());
  CHECK(again.size() == 2);
}

TEST_CASE("an index whose name could not be synced is durable only under a synced name") {
  const temporary_folder folder;
  const std::string path = folder.file("index");
  chunk_index index(path, few());
  {
    const failing never(of_folders, always);
    const failing once(of_data, 1);
    CHECK(index.sync().error() == failure{.code = errc::sync_failed, .index = EIO});
    for (int i = 0; i < 5; ++i)
      CHECK(index.sync().error() == failure{.code = errc::sync_failed, .index = EIO});
    REQUIRE(index.keep({.key = key_from_id(1), .bytes = 1}));
  }
  const std::uint64_t unsure = file_number(path);
  {
    const failing none(of_folders, 0);
    CHECK(index.sync());
    CHECK(of_folders.calls == 1);
    // The folder has nothing to sync of a name that it was told to have synced before.
    CHECK(file_number(path) != unsure);
    const std::uint64_t durable = file_number(path);
    REQUIRE(index.keep({.key = key_from_id(2), .bytes = 2}));
    CHECK(index.sync());
    CHECK(of_folders.calls == 1);
    CHECK(file_number(path) == durable);
  }
  const chunk_index again(path, few());
  CHECK(again.size() == 2);
}

TEST_CASE("a journal rewritten without a sync of its folder is not reported as durable") {
  const temporary_folder folder;
  const std::string path = folder.file("index");
  chunk_index index(path, few());
  const std::uint64_t before = file_number(path);
  {
    // Too many records out of date: it is written anew by a change, which succeeds.
    const failing never(of_folders, always);
    for (std::uint64_t i = 0; file_number(path) == before; ++i)
      REQUIRE(index.keep({.key = key_from_id(1), .bytes = i}));
    CHECK(index.sync().code() == errc::sync_failed);
  }
  CHECK(index.sync());
}

TEST_CASE("the first sync of an index also syncs its name, because its previous owner may not have") {
  const temporary_folder folder;
  const std::string path = folder.file("index");
  {
    const chunk_index made(path, few());
  }
  chunk_index index(path, few());
  {
    const failing never(of_folders, always);
    CHECK(index.sync().code() == errc::sync_failed);
    CHECK(index.sync().code() == errc::sync_failed);
  }
  const failing none(of_folders, 0);
  CHECK(index.sync());
  CHECK(of_folders.calls == 1);
  CHECK(index.sync());
  CHECK(of_folders.calls == 1);
}

TEST_CASE("an index that cannot be made durable on creation is refused") {
  const temporary_folder folder;
  {
    const failing never(of_folders, always);
    CHECK_THROWS_AS(chunk_index(folder.file("one"), few()), io_error);
  }
  const failing never(of_data, always);
  CHECK_THROWS_AS(chunk_index(folder.file("two"), few()), io_error);
}

TEST_CASE("an index that is rewritten many times keeps one open file") {
  const temporary_folder folder;
  chunk_index index(folder.file("index"), few());
  const std::ptrdiff_t before = open_files();
  for (std::uint64_t i = 0; i < 200; ++i)
    REQUIRE(index.keep({.key = key_from_id(1), .bytes = i}));
  CHECK(index.journal_bytes() < 20 * 72);
  for (int i = 0; i < 20; ++i) {
    const failing once(of_data, i % 2 + 1);
    static_cast<void>(index.sync());
  }
  CHECK(open_files() == before);
  REQUIRE(index.sync());
  REQUIRE(index.find(key_from_id(1)) != nullptr);
  CHECK(index.find(key_from_id(1))->bytes == 199);
}
