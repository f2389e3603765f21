/// Files that a ring was told of: what goes by its table, and what happens when they come and go.
#include <llmmem/tiering/persistent_file_space.hpp>
#include <llmmem/transfer/detail/file_table.hpp>
#include <llmmem/transfer/file_queue.hpp>
#if defined(LLMMEM_TESTS_URING)
#include <llmmem/transfer/uring_io.hpp>
#endif

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "support/error_text.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"
#include "support/without_flock.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// An engine's table of four, which refuses as a kernel does.
struct small_table {
  std::set<int> held;
  std::uint32_t calls = 0;

  [[nodiscard]] bool register_file(int descriptor) noexcept {
    ++calls;
    if (held.contains(descriptor)) return true;
    if (held.size() == 4) return false;
    held.insert(descriptor);
    return true;
  }
  void forget_file(int descriptor) noexcept {
    ++calls;
    held.erase(descriptor);
  }
  void forget_files() noexcept { held.clear(); }
};

}  // namespace

TEST_CASE("an engine receives the existing files, as far as they fit, and no others") {
  for (const std::uint64_t seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    detail::file_table files;
    small_table engine;
    std::set<int> named;
    for (int step = 0; step < 200; ++step) {
      const int descriptor = static_cast<int>(random.below(7U));
      switch (random.below(3U)) {
        case 0:
          files.add(descriptor);
          named.insert(descriptor);
          break;
        case 1:
          files.drop(descriptor);
          named.erase(descriptor);
          break;
        default:
          files.apply(engine);
          CHECK(files.told() == engine.held.size());
          // What found no place is not tried again before it is named again.
          for (const int held : engine.held)
            CHECK(named.contains(held));
          if (named.size() <= 4 && files.plain() == 0) CHECK(engine.held == named);
          CHECK(!files.has_changes());
          const std::uint32_t calls = engine.calls;
          files.apply(engine);
          CHECK(engine.calls == calls);
      }
    }
  }
  detail::file_table files;
  for (int descriptor = -2; descriptor < 70; ++descriptor)
    files.add(descriptor);
  CHECK(files.plain() == 6);
  // A number that is given up and comes back before anybody drove is the new file's.
  detail::file_table again;
  small_table engine;
  again.add(3);
  again.apply(engine);
  again.drop(3);
  again.add(3);
  again.apply(engine);
  CHECK(engine.calls == 3);
  CHECK(engine.held == std::set{3});
  // What found no place is left alone until it is named again.
  for (int descriptor = 4; descriptor < 8; ++descriptor)
    again.add(descriptor);
  again.apply(engine);
  CHECK(again.plain() == 1);
  again.drop(3);
  again.apply(engine);
  CHECK(engine.held == std::set{4, 5, 6});
  again.add(7);
  again.apply(engine);
  CHECK(engine.held == std::set{4, 5, 6, 7});
}

#if defined(LLMMEM_TESTS_URING)
namespace {

constexpr std::uint64_t file_bytes = 8192;

/// A file full of one value.
[[nodiscard]] std::unique_ptr<io_file> file_of(const std::string& path, std::byte value) {
  auto made = std::make_unique<io_file>(path);
  const std::vector<std::byte> memory(file_bytes, value);
  detail::write_whole(made->buffered(), memory, 0, path.c_str()).value();
  return made;
}

/// What one read by `descriptor` comes to: its first byte, or minus an error number.
[[nodiscard]] int read_by(uring_io& engine, int descriptor) {
  std::vector<std::byte> memory(4096);
  REQUIRE(
      engine.try_queue({.file = descriptor, .bytes = 4096, .offset = 4096, .data = memory.data(), .tag = 5}));
  std::array<io_completion, 4> done{};
  REQUIRE(engine.reap(done, {.least = 1}).value() == 1);
  CHECK(done[0].tag == 5);
  if (done[0].outcome < 0) return done[0].outcome;
  CHECK(done[0].outcome == 4096);
  return std::to_integer<int>(memory[0]);
}

[[nodiscard]] file_queue_options driven(transfer::driven_by driver) {
  return {.driver = driver};
}

[[nodiscard]] std::byte read_by(file_queue<uring_io>& queue, const io_file& file) {
  std::vector<std::byte> memory(file_bytes);
  queue.start(read_from(file, 0, memory)).value().wait();
  CHECK(std::ranges::count(memory, memory[0]) == static_cast<std::ptrdiff_t>(file_bytes));
  return memory[0];
}

}  // namespace

TEST_CASE("requests of a registered file use the ring's table until the file is forgotten") {
  const temporary_folder folder;
  for (const uring_issuer issuer : {uring_issuer::any_thread, uring_issuer::one_thread}) {
    uring_io engine({.depth = 4, .issuer = issuer});
    if (!engine.caps().registers_files) {
      MESSAGE("skipped: " << std::string(engine.caps().files_reason));
      return;
    }
    CHECK(engine.caps().files_reason.empty());
    auto file = file_of(folder.file("a"), std::byte{7});
    const int descriptor = file->buffered();
    CHECK(!engine.register_file(-1));
    CHECK(!engine.register_file(12345));  // no such file: the kernel refuses it
    CHECK(read_by(engine, descriptor) == 7);
    REQUIRE(engine.register_file(descriptor));
    CHECK(engine.register_file(descriptor));
    CHECK(read_by(engine, descriptor) == 7);
    // Only the table knows the file now.
    file.reset();
    CHECK(read_by(engine, descriptor) == 7);
    CHECK(read_by(engine, -1) == -EBADF);
    engine.forget_file(descriptor);
    CHECK(read_by(engine, descriptor) == -EBADF);
    engine.forget_file(descriptor);
    engine.forget_file(-1);

    file = file_of(folder.file("a"), std::byte{7});
    REQUIRE(engine.register_file(file->buffered()));
    engine.forget_files();
    CHECK(!engine.caps().registers_files);
    CHECK(engine.caps().files_reason == "the table of files was given up");
    CHECK(!engine.register_file(file->buffered()));
    CHECK(read_by(engine, file->buffered()) == 7);
    engine.forget_files();
  }
}

TEST_CASE("files beyond a ring's table use their descriptors, and take places that become free") {
  const temporary_folder folder;
  uring_io engine({.depth = 4, .files = 2});
  if (!engine.caps().registers_files) return;
  std::vector<std::unique_ptr<io_file>> files;
  for (int i = 0; i < 4; ++i)
    files.push_back(file_of(folder.file(std::to_string(i)), static_cast<std::byte>(i)));
  CHECK(engine.register_file(files[0]->buffered()));
  CHECK(engine.register_file(files[1]->buffered()));
  CHECK(!engine.register_file(files[2]->buffered()));
  for (int i = 0; i < 4; ++i)
    CHECK(read_by(engine, files[static_cast<std::size_t>(i)]->buffered()) == i);
  engine.forget_file(files[0]->buffered());
  CHECK(engine.register_file(files[3]->buffered()));
  const int last = files[3]->buffered();
  files[3].reset();
  CHECK(read_by(engine, last) == 3);
  for (int i = 0; i < 3; ++i)
    CHECK(read_by(engine, files[static_cast<std::size_t>(i)]->buffered()) == i);
}

TEST_CASE("a ring without a table of files reports why, and works") {
  const temporary_folder folder;
  const auto file = file_of(folder.file("a"), std::byte{7});
  {
    uring_io none({.depth = 4, .files = 0});
    CHECK(!none.caps().registers_files);
    CHECK(none.caps().files_reason == "no table of files was requested");
    CHECK(!none.register_file(file->buffered()));
    CHECK(read_by(none, file->buffered()) == 7);
  }
  // In a process of its own: liburing raises a limit that may be raised, and nobody raises the other again.
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const rlimit little{.rlim_cur = 40, .rlim_max = 40};
    if (::setrlimit(RLIMIT_NOFILE, &little) != 0) ::_exit(2);
    uring_io refused({.depth = 4, .files = 64});
    const bool is_plain = !refused.caps().registers_files && !refused.register_file(file->buffered());
    const bool says_so =
        refused.caps().files_reason == "the limit on descriptors (ulimit -n) is below the table's entries";
    ::_exit(is_plain && says_so && read_by(refused, file->buffered()) == 7 ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK_THROWS_WITH_AS(uring_io({.files = 65}), "uring_io: a table of 65 files; it must be 0 to 64",
                       argument_error);
}

TEST_CASE("a forgotten file is not mistaken for the next one with its number") {
  const temporary_folder folder;
  for (const transfer::driven_by driver : {transfer::driven_by::own_thread, transfer::driven_by::waiters}) {
    for (const uring_issuer issuer : {uring_issuer::any_thread, uring_issuer::one_thread}) {
      file_queue<uring_io> queue(driven(driver), uring_options{.depth = 4, .issuer = issuer});
      if (!queue.caps().registers_files) return;
      int number = -1;
      for (int i = 0; i < 100; ++i) {
        CAPTURE(i);
        const auto file = file_of(folder.file(std::to_string(i % 2)), static_cast<std::byte>(i));
        if (number != -1) REQUIRE(file->buffered() == number);
        number = file->buffered();
        queue.register_file(*file);
        REQUIRE(read_by(queue, *file) == static_cast<std::byte>(i));
        CHECK(queue.stats().files_registered == (file->opened_direct() < 0 ? 1U : 2U));
        if (i % 3 == 0) file->reject_direct();
        queue.forget_file(*file);
        CHECK(queue.stats().files_registered == 0);
      }
      CHECK(queue.stats().files_plain == 0);
    }
  }
}

TEST_CASE("a queue's files beyond its engine's table use their descriptors, and are counted") {
  const temporary_folder folder;
  file_queue<uring_io> queue({}, uring_options{.depth = 4, .files = 1});
  if (!queue.caps().registers_files) return;
  const auto one = file_of(folder.file("1"), std::byte{1});
  const auto two = file_of(folder.file("2"), std::byte{2});
  queue.register_file(*one);
  queue.register_file(*two);
  CHECK(read_by(queue, *one) == std::byte{1});
  CHECK(read_by(queue, *two) == std::byte{2});
  CHECK(queue.stats().files_registered == 1);
  CHECK(queue.stats().files_plain == (one->opened_direct() < 0 ? 1U : 3U));
}

TEST_CASE("a file registered on one thread may be used on another, by a ring for one thread") {
  const temporary_folder folder;
  file_space<uring_io> space(folder.file("space"),
                             {.budget = file_bytes, .queue = driven(transfer::driven_by::waiters)},
                             uring_options{.depth = 4, .issuer = uring_issuer::one_thread});
  std::thread([&] {
    const auto range = space.try_allocate(file_bytes, 4096).value();
    const std::vector<std::byte> memory(file_bytes, std::byte{9});
    CHECK(space.copy_in_async(range, memory, {}).value().settled());
    if (space.queue().caps().registers_files) CHECK(space.queue().stats().files_registered != 0);
  }).join();
}

TEST_CASE("a space with a registered file releases it, so that the next one may lock it at once") {
  const temporary_folder folder;
  for (const transfer::driven_by driver : {transfer::driven_by::own_thread, transfer::driven_by::waiters}) {
    for (int i = 0; i < 100; ++i) {
      CAPTURE(i);
      persistent_file_options options{.space = {.budget = 65536}};
      options.space.queue.driver = driver;
      persistent_file_space<uring_io> space(folder.file("tier"), options,
                                            uring_options{.depth = 4, .issuer = uring_issuer::one_thread});
      const auto range = space.try_allocate(4096, 4096).value();
      const std::vector<std::byte> memory(4096, std::byte{9});
      CHECK(space.copy_in_async(range, memory, {}).value().settled());
    }
  }
}

TEST_CASE("a kernel that refuses a ring is asked what for: memory, files, or a container's profile") {
  struct refusal {
    int number;
    const char* mend;
  };
  for (const refusal& each :
       {refusal{
            ENOMEM,
            "the memory that the process may lock is used up: raise the limit (ulimit -l, RLIMIT_MEMLOCK), "
            "use a smaller depth, or use posix_io"},
        refusal{EMFILE, "the process has too many open files: raise the limit (ulimit -n), or use posix_io"},
        refusal{EPERM,
                "a container's seccomp profile or kernel.io_uring_disabled may forbid it: use posix_io"}}) {
    told_child child([&](auto tell, auto) {
      if (!refuse_call(__NR_io_uring_setup, each.number)) return tell("not allowed");
      tell(text_of([] { const uring_io engine(uring_options{.depth = 4}); }));
    });
    const std::string told = child.next();
    if (told == "not allowed") continue;
    CHECK(told == "uring_io: the kernel refused a ring of 4 requests: " +
                      std::generic_category().message(each.number) + " (errno " +
                      std::to_string(each.number) + "); " + each.mend);
  }
}
#endif
