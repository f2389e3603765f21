#include <llmmem/tiering/persistent_file_space.hpp>

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "support/temporary_folder.hpp"

using namespace llmmem;
using llmmem_tests::temporary_folder;

namespace {

using space = persistent_file_space<>;
using bytes = std::vector<char>;
constexpr std::uint64_t kib = 1024;

[[nodiscard]] persistent_file_options of(
    std::uint64_t budget, std::uint64_t layout = 1,
    llmmem::tiering::other_layout on_other = llmmem::tiering::other_layout::refuse) {
  persistent_file_options options;
  options.space.budget = budget;
  options.space.queue.driver = llmmem::transfer::driven_by::waiters;
  options.layout = layout;
  options.on_other_layout = on_other;
  return options;
}

[[nodiscard]] bytes file_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void put_file(const std::string& path, const bytes& all) {
  std::ofstream(path, std::ios::binary).write(all.data(), static_cast<std::streamsize>(all.size()));
}

/// A file with a chunk of key 1 in its index and `text` at the beginning of its range.
void make(const std::string& path, const std::string& text) {
  space made(path, of(64 * kib));
  const auto range = made.try_allocate(64 * kib, 4096).value();
  const auto* const data = reinterpret_cast<const std::byte*>(text.data());
  made.copy_in_async(range.subrange(0, text.size()).value(), std::span(data, text.size()), {}).value().wait();
  REQUIRE(made.index().keep(
      {.key = key_from_id(1), .offset = space::offset_of(range.data), .bytes = text.size()}));
  made.deallocate(range);
}

[[nodiscard]] std::string read(space& from, std::size_t count) {
  const auto range = from.try_allocate(64 * kib, 1).value();
  std::string text(count, ' ');
  from.copy_out_async(std::span(reinterpret_cast<std::byte*>(text.data()), count),
                      range.subrange(0, count).value(), {})
      .value()
      .wait();
  return text;
}

}  // namespace

TEST_CASE("bytes written to a persistent file space are there when it is opened again") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  make(path, "as it was");
  {
    space again(path, of(64 * kib));
    CHECK(!again.recovery().is_new);
    CHECK(again.recovery().index.records == 3);
    REQUIRE(again.index().find(key_from_id(1)) != nullptr);
    CHECK(again.index().find(key_from_id(1))->bytes == 9);
    CHECK(read(again, 9) == "as it was");
    REQUIRE(again.sync());
  }
  CHECK(std::filesystem::file_size(path) == 64 * kib + 64 * kib);
  // A smaller budget cuts the file.
  const space smaller(path, of(32 * kib));
  CHECK(std::filesystem::file_size(path) == 64 * kib + 32 * kib);
  CHECK(smaller.index().find(key_from_id(1)) != nullptr);
}

TEST_CASE("a persistent file space hands out its only range once at a time") {
  const temporary_folder folder;
  space one(folder.file("tier"), of(64 * kib));
  CHECK(one.recovery().is_new);
  CHECK(one.recovery().message() == "0 chunks were restored; the file is new");
  CHECK(one.try_allocate(0, 1).code() == errc::zero_bytes);
  CHECK(one.try_allocate(1, 3).code() == errc::bad_alignment);
  CHECK(one.try_allocate(1, 128 * kib).error() == failure{errc::bad_granularity, 0, 64 * kib, 128 * kib});
  CHECK(one.try_allocate(64 * kib + 1, 1).error() ==
        failure{errc::out_of_bytes, 0, 64 * kib + 1, 64 * kib, ""});
  const auto first = one.try_allocate(10, 4096).value();
  CHECK(one.try_allocate(10, 1).error() == failure{errc::out_of_bytes, 0, 10, 0, ""});
  one.deallocate(first);
  CHECK(one.try_allocate(64 * kib, 1).value().data == first.data);
}

TEST_CASE("two processes cannot open one persistent file space, and the second gets an error") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  const space mine(path, of(64 * kib));
  const std::string text = path +
                           ": another process, or another object in this one, holds the file; end that, or "
                           "use another path: each rank and each tier needs its own";
  CHECK_THROWS_WITH_AS(space(path, of(64 * kib)), text.c_str(), io_error);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    int code = 1;
    try {
      const space theirs(path, of(64 * kib));
    } catch (const io_error& refused) {
      code = refused.what() == text ? 0 : 2;
    }
    ::_exit(code);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("a file that is not a tier is refused and stays as it is") {
  const temporary_folder folder;
  const std::string path = folder.file("precious");
  for (const std::size_t size : {1U, 12U, 100U, 100'000U}) {
    put_file(path, bytes(size, 'p'));
    CHECK_THROWS_WITH_AS(
        space(path, of(64 * kib)),
        (path + ": cannot be taken as a tier: it is another kind of file; take another path, or move it away")
            .c_str(),
        io_error);
    CHECK(file_bytes(path) == bytes(size, 'p'));
    CHECK(!std::filesystem::exists(path + ".index"));
  }
}

TEST_CASE("a file of another layout is refused, or given up on request") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  make(path, "of layout 1");
  const bytes before = file_bytes(path);
  CHECK_THROWS_WITH_AS(space(path, of(64 * kib, 2)),
                       (path + ": cannot be taken as a tier: its chunks are of layout 1, expected is 2; take "
                               "another path, or other_layout::start_over to drop them")
                           .c_str(),
                       io_error);
  CHECK(file_bytes(path) == before);
  {
    const space over(path, of(64 * kib, 2, llmmem::tiering::other_layout::start_over));
    CHECK(over.recovery().started_over);
    CHECK(over.index().size() == 0);
    CHECK(over.recovery().message() == "0 chunks were restored; it held another layout, which was given up");
  }
  const space again(path, of(64 * kib, 2));
  CHECK(!again.recovery().started_over);
  CHECK(again.index().size() == 0);
}

TEST_CASE("a damaged first page, or a missing index, loses the chunks and is reported") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  make(path, "text");
  const bytes whole = file_bytes(path);
  const bytes index = file_bytes(path + ".index");
  for (std::size_t bit = 0; bit < 48 * 8; ++bit) {
    CAPTURE(bit);
    bytes damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    put_file(path, damaged);
    put_file(path + ".index", index);
    if (bit / 8 >= 4 && bit / 8 < 12) {
      CHECK_THROWS_AS(space(path, of(64 * kib)), io_error);
      continue;
    }
    {
      const space opened(path, of(64 * kib));
      CHECK(opened.recovery().header_damaged);
      CHECK(opened.index().size() == 0);
    }
    const space again(path, of(64 * kib));
    CHECK(!again.recovery().header_damaged);
    CHECK(!again.recovery().index_missing);
  }
  put_file(path, whole);
  std::filesystem::remove(path + ".index");
  const space opened(path, of(64 * kib));
  CHECK(opened.recovery().message() ==
        "0 chunks were restored; its index was missing, all chunks were given up");
}

TEST_CASE("the index of another file is refused") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  make(path, "one");
  make(folder.file("other"), "two");
  std::filesystem::copy_file(folder.file("other.index"), path + ".index",
                             std::filesystem::copy_options::overwrite_existing);
  CHECK_THROWS_WITH_AS(space(path, of(64 * kib)),
                       (path + ".index: cannot be taken as the index of a tier: it belongs to another file; "
                               "bring its own back, or remove it to start empty")
                           .c_str(),
                       io_error);
}

TEST_CASE("a folder that cannot be written to is refused by the file's path") {
  const temporary_folder folder;
  const std::string inside = folder.file("closed");
  using std::filesystem::perms;
  std::filesystem::create_directory(inside);
  std::filesystem::permissions(folder.path(), perms::all);
  std::filesystem::permissions(
      inside, perms::owner_read | perms::owner_exec | perms::others_read | perms::others_exec);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    constexpr uid_t nobody = 65534;  // root is refused nothing
    if (::geteuid() == 0 && ::setuid(nobody) != 0) ::_exit(3);
    int code = 1;
    try {
      const space made(inside + "/tier", of(64 * kib));
    } catch (const io_error& refused) {
      code = refused.what() == inside + "/tier: cannot be opened: Permission denied (errno 13)" ? 0 : 2;
    }
    ::_exit(code);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("a budget without space on the device is refused, and keeps the existing contents") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  make(path, "as it was");
  const bytes before = file_bytes(path);
  rlimit old{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit little = old;
  little.rlim_cur = 64 * kib + 80 * kib;
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &little) == 0);
  bool is_refused = false;
  try {
    const space larger(path, of(128 * kib));
  } catch (const error&) {
    is_refused = true;
  }
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &old) == 0);
  std::signal(SIGXFSZ, old_handler);
  CHECK(is_refused);
  CHECK(file_bytes(path) == before);
  space again(path, of(64 * kib));
  CHECK(read(again, 9) == "as it was");
}

TEST_CASE("an index with a damaged durable end loses the chunks and reports how many bytes") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  make(path, "text");
  {
    space opened(path, of(64 * kib));
    REQUIRE(opened.index().keep({.key = key_from_id(2), .bytes = 1}));
    REQUIRE(opened.sync());
  }
  bytes index = file_bytes(path + ".index");
  index[index.size() - 30] ^= 1;
  put_file(path + ".index", index);
  {
    const space opened(path, of(64 * kib));
    CHECK(opened.recovery().message() ==
          "0 chunks were restored; the end of the index was damaged: 1 records that had been durable could "
          "not be read, 72 bytes there are not records; 1 chunks were dropped, because a damaged record may "
          "have "
          "been theirs");
  }
  make(path, "text");
  index = file_bytes(path + ".index");
  index.resize(index.size() - 30);
  put_file(path + ".index", index);
  const space opened(path, of(64 * kib));
  CHECK(opened.recovery().message() ==
        "0 chunks were restored; 42 bytes at the end of the index were an incomplete record");
}

TEST_CASE("an emptied index counts as missing") {
  const temporary_folder folder;
  const std::string path = folder.file("tier");
  make(path, "text");
  put_file(path + ".index", {});
  const space opened(path, of(64 * kib));
  CHECK(opened.recovery().message() ==
        "0 chunks were restored; its index was missing, all chunks were given up");
}
