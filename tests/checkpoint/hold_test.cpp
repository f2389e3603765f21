#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/hold.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/hooked_storage.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;
using llmmem::testing::simulated_storage_options;

namespace {

constexpr checkpoint_world small{.ranks = 1, .files = 1};
constexpr keep_last_and_every two{.last = 2};
constexpr search_patience at_once{.tries = 2, .pause_ns = 0};

template <class Storage>
bool is_there(Storage& storage, std::uint64_t step) {
  for (const checkpoint_id& each : list_checkpoints(storage)) {
    if (each.step == step) return true;
  }
  return false;
}

template <class Folder>
void save_and_tidy(Folder& folder, std::uint64_t step) {
  save_step(folder, small, step);
  static_cast<void>(folder.tidy(two));
}

}  // namespace

TEST_SUITE("checkpoint_hold") {
  TEST_CASE(
      "a checkpoint that a reader holds stays while the run prunes, and is removed after the hold ends") {
    for (const bool renames : {true, false}) {
      simulated_storage_options options;
      options.rename_allowed = renames;
      simulated_storage storage(options);
      checkpoint_folder folder(storage);
      save_and_tidy(folder, 10);
      {
        const held_checkpoint held = hold_newest(storage);
        REQUIRE(held.hold);
        CHECK(held.hold->is_held());
        CHECK(held.search.found->id.step == 10);
        for (const std::uint64_t step : {20U, 30U, 40U, 50U})
          save_and_tidy(folder, step);
        CHECK(is_there(storage, 10));
        CHECK_FALSE(is_there(storage, 20));
        CHECK(has_its_bytes(storage, small, *held.search.found));
      }
      static_cast<void>(folder.tidy(two));
      CHECK_FALSE(is_there(storage, 10));
      for (const storage_entry& each : storage.list(""))
        CHECK_FALSE(held_generation(each.name));
    }
  }

  TEST_CASE("a reader that comes at any call of the run has the checkpoint, or learns that it was removed") {
    std::uint64_t had = 0;
    std::uint64_t gone = 0;
    for (std::uint64_t at = 1;; ++at) {
      simulated_storage storage;
      checkpoint_folder first(storage);
      for (const std::uint64_t step : {10U, 20U, 30U})
        save_step(first, small, step);
      storage = storage.after_crash(storage.all_survives());
      std::uint64_t calls = 0;
      std::optional<checkpoint_hold> hold;
      const auto comes = [&](storage_call, const std::string&) {
        if (++calls != at) return;
        try {
          hold.emplace(storage, checkpoint_id{10, 1}, at_once);
        } catch (const io_error&) {  // gone, or being removed
          ++gone;
        }
      };
      hooked_storage<decltype(comes)> hooked(storage, comes);
      checkpoint_folder<hooked_storage<decltype(comes)>> folder(hooked);
      static_cast<void>(folder.tidy(two));
      CHECK(hold.has_value() == is_there(storage, 10));
      if (hold) {
        ++had;
        CHECK_NOTHROW(static_cast<void>(open_checkpoint(storage, {10, 1}, verification::checksums)));
      }
      if (calls < at) break;
    }
    CHECK(had > 5);
    CHECK(gone > 3);
  }

  TEST_CASE("a hold ends with its process, and its remains are removed") {
    const temporary_folder folder;
    posix_storage<> storage(folder.file("run"));
    checkpoint_folder run(storage);
    save_and_tidy(run, 10);
    int ready[2];
    int leave[2];
    REQUIRE(::pipe(ready) == 0);
    REQUIRE(::pipe(leave) == 0);
    const ::pid_t child = ::fork();
    if (child == 0) {
      posix_storage<> mine(folder.file("run"));
      const checkpoint_hold hold(mine, {10, 1});
      char byte = 0;
      ::close(leave[1]);
      static_cast<void>(!::write(ready[1], &byte, 1));
      static_cast<void>(!::read(leave[0], &byte, 1));
      ::_exit(0);  // as if killed: nothing is cleaned up
    }
    char byte = 0;
    REQUIRE(::read(ready[0], &byte, 1) == 1);
    for (const std::uint64_t step : {20U, 30U, 40U})
      save_and_tidy(run, step);
    CHECK(is_there(storage, 10));
    ::close(leave[1]);
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    static_cast<void>(run.tidy(two));
    CHECK_FALSE(is_there(storage, 10));
    for (const storage_entry& each : storage.list(""))
      CHECK_FALSE(held_generation(each.name));
  }

  TEST_CASE("a removed checkpoint cannot be held, and the attempt leaves nothing") {
    simulated_storage storage;
    checkpoint_folder folder(storage);
    save_step(folder, small, 10);
    CHECK_THROWS_WITH_AS(
        checkpoint_hold(storage, {9, 9}),
        "simulated/step-0000000009-g00000009: cannot be opened: No such file or directory; it was "
        "removed before it could be held",
        storage_error);
    for (const storage_entry& each : storage.list(""))
      CHECK_FALSE(held_generation(each.name));
    CHECK_FALSE(hold_newest(storage).search.skipped.size());
    storage.flip("step-0000000010-g00000001/rank0-0.bin", 3);
    CHECK_FALSE(hold_newest(storage).hold);
  }
}
