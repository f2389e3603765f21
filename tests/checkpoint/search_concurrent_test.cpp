// Readers look for the newest checkpoint while a writer commits and tidies. A program of its own, for the
// thread sanitizer.
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;
using llmmem::testing::simulated_storage_options;

namespace {

struct what_readers_saw {
  std::atomic<std::uint64_t> searches{0};
  std::atomic<std::uint64_t> read{0};  // of those found, which were still there to be read
  std::atomic<std::uint64_t> wrong{0};
};

/// What a search must find: no step before the last that was acknowledged when it began, with its bytes.
template <class Storage>
void search_once(Storage& storage, const checkpoint_world& world, std::uint64_t at_least, verification how,
                 what_readers_saw& saw) {
  const checkpoint_search search = find_checkpoint(storage, how);
  ++saw.searches;
  if (!search.found || search.found->id.step < at_least) {
    ++saw.wrong;
    return;
  }
  try {
    (has_its_bytes(storage, world, *search.found) ? saw.read : saw.wrong) += 1;
  } catch (const storage_error& error) {
    // Two newer ones may have come since, and this one gone.
    if (error.number() != ENOENT) ++saw.wrong;
  }
}

/// One process's storage writes, others read by their own.
template <class Storage, class ForReader>
void search_while_writing(Storage& storage, ForReader for_reader, std::uint64_t commits) {
  const checkpoint_world world{.ranks = 1, .files = 2, .file_bytes = 600, .write_bytes = 256};
  checkpoint_folder folder(storage);
  save_step(folder, world, 1);
  std::atomic<std::uint64_t> acknowledged{1};
  std::atomic<bool> ends{false};
  what_readers_saw saw;
  std::vector<std::thread> readers;
  for (const verification how : {verification::sizes, verification::checksums}) {
    readers.emplace_back([&, how] {
      decltype(auto) mine = for_reader();
      while (!ends.load())
        search_once(mine, world, acknowledged.load(), how, saw);
    });
  }
  for (std::uint64_t step = 2; step <= commits; ++step) {
    save_step(folder, world, step);
    acknowledged.store(step);
    // One of a hundred stays, so that there is an old one to be taken by mistake.
    static_cast<void>(folder.tidy(keep_last_and_every{.last = 2, .every_steps = 100}));
    while (saw.searches.load() < step / 4)  // on one core, too
      std::this_thread::yield();
  }
  ends.store(true);
  for (std::thread& each : readers)
    each.join();
  CHECK(saw.wrong == 0);
  CHECK(saw.searches >= commits / 4);
  CHECK(saw.read > 0);
  MESSAGE(saw.searches.load() << " searches, " << saw.read.load() << " of them read at once");
}

}  // namespace

TEST_SUITE("find_checkpoint, concurrently") {
  TEST_CASE("readers always find a complete checkpoint, the newest, while older ones are removed") {
    for (const bool renames : {true, false}) {
      CAPTURE(renames);
      simulated_storage_options options;
      options.rename_allowed = renames;
      simulated_storage storage(options);
      search_while_writing(storage, [&]() -> simulated_storage& { return storage; }, 250);
    }
  }

  TEST_CASE("readers also find the newest complete checkpoint in a folder of a real file system") {
    temporary_folder folder;
    posix_storage<> storage(folder.file("run"));
    search_while_writing(storage, [&] { return posix_storage<>(folder.file("run")); }, 150);
  }

  TEST_CASE("a file removed during its opening is reported as missing") {
    temporary_folder folder;
    posix_storage<> storage(folder.file("run"));
    std::atomic<bool> ends{false};
    std::thread other([&] {
      while (!ends.load()) {
        static_cast<void>(storage.create("file", 1));
        storage.remove("file");
      }
    });
    std::uint64_t opened = 0;
    std::uint64_t gone = 0;
    std::uint64_t wrong = 0;
    for (std::uint64_t i = 0; i < 20'000 || (i < 200'000 && (opened == 0 || gone == 0)); ++i) {
      try {
        static_cast<void>(storage.open("file"));
        ++opened;
      } catch (const storage_error& error) {
        ++(error.number() == ENOENT ? gone : wrong);
      }
    }
    ends.store(true);
    other.join();
    CHECK(wrong == 0);
    CHECK(opened > 0);
    CHECK(gone > 0);
  }
}
