// Errors that say nothing about contents: a search retries, and never takes an older checkpoint for
// them.
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/recover.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <string>

#include "support/checkpoint_world.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;
using llmmem::testing::storage_fault;

namespace {

constexpr checkpoint_world small{.ranks = 1, .files = 1};
constexpr search_patience at_once{.tries = 3, .pause_ns = 0};
constexpr search_patience older_will_do{.tries = 3, .pause_ns = 0, .unread = unread_checkpoint::pass_over};

template <class Storage>
void save_two(Storage& storage) {
  checkpoint_folder folder(storage);
  save_step(folder, small, 10);
  save_step(folder, small, 20);
}

/// So many calls of a kind fail from now on.
void fail(simulated_storage& storage, storage_call call, std::uint64_t count, int number) {
  storage.set_faults({{.call = call, .every = 1, .count = count, .number = number}});
}

std::string refusal(simulated_storage& storage, const search_patience& patience) {
  try {
    return "found: " + find_checkpoint(storage, verification::checksums, patience).message();
  } catch (const unreadable_checkpoint& error) {
    return error.what();
  }
}

}  // namespace

TEST_SUITE("find_checkpoint, in passing trouble") {
  TEST_CASE("errors that pass before the last try change nothing, in any call") {
    simulated_storage storage;
    save_two(storage);
    for (const storage_call call : {storage_call::list, storage_call::open, storage_call::read}) {
      for (const int number : {EIO, EMFILE, ENFILE, ENOSPC, ENOMEM, ESTALE, EACCES, EINTR, EAGAIN}) {
        for (const std::uint64_t count : {1U, 2U}) {
          fail(storage, call, count, number);
          const checkpoint_search search = find_checkpoint(storage, verification::checksums, at_once);
          CAPTURE(to_string(call));
          CAPTURE(number);
          REQUIRE(search.found);
          CHECK(search.found->id == checkpoint_id{20, 2});
          CHECK(search.skipped.empty());
        }
      }
    }
  }

  TEST_CASE("a permanent error names the options, and nothing older is taken instead") {
    simulated_storage storage;
    save_two(storage);
    for (const storage_call call : {storage_call::open, storage_call::read}) {
      CAPTURE(to_string(call));
      fail(storage, call, storage_fault::forever, EIO);
      CHECK(refusal(storage, at_once) ==
            "simulated: step-0000000020-g00000002 cannot be read now, but is not proved damaged: "
            "simulated/step-0000000020-g00000002/MANIFEST.json: " +
                std::string(to_string(call)) +
                ": Input/output error; a planned fault; no older checkpoint was used instead. Resolve that "
                "and search again; to continue from an older one, move this one away, or search with "
                "unread_checkpoint::pass_over");
    }
    fail(storage, storage_call::list, storage_fault::forever, EACCES);
    CHECK_THROWS_WITH_AS(static_cast<void>(find_checkpoint(storage, verification::checksums, at_once)),
                         "simulated: the folder cannot be listed: Permission denied; a planned fault",
                         storage_error);
  }

  TEST_CASE(
      "a permanent error is an error even without an older checkpoint, because a run must not begin at step "
      "0") {
    simulated_storage storage;
    checkpoint_folder folder(storage);
    save_step(folder, small, 10);
    fail(storage, storage_call::open, storage_fault::forever, EMFILE);
    CHECK(refusal(storage, at_once).find("Too many open files") != std::string::npos);
  }

  TEST_CASE("with the caller's permission an older checkpoint is taken, and the skipped one is reported") {
    simulated_storage storage;
    save_two(storage);
    fail(storage, storage_call::open, 3, EIO);
    CHECK(
        refusal(storage, older_will_do) ==
        "found: step-0000000010-g00000001; passed over step-0000000020-g00000002: "
        "simulated/step-0000000020-g00000002/MANIFEST.json: cannot be opened: Input/output error; a planned "
        "fault");
  }

  TEST_CASE("damage is not retried, and is passed over") {
    simulated_storage storage;
    save_two(storage);
    storage.flip("step-0000000020-g00000002/rank0-0.bin", 3);
    const std::uint64_t before = storage.calls();
    CHECK(find_checkpoint(storage, verification::checksums, at_once).found->id == checkpoint_id{10, 1});
    const std::uint64_t once = storage.calls() - before;
    const search_patience long_patience{.tries = 100, .pause_ns = 0};
    CHECK(find_checkpoint(storage, verification::checksums, long_patience).found);
    CHECK(storage.calls() - before == 2 * once);
  }

  TEST_CASE("another of several sources has the checkpoint, or it is an error") {
    simulated_storage near({.name = "near"});
    simulated_storage far({.name = "far"});
    save_two(near);
    save_two(far);
    fail(near, storage_call::open, storage_fault::forever, EIO);
    const auto both = recover(verification::checksums, at_once, checkpoint_source("near", near),
                              checkpoint_source("far", far));
    REQUIRE(both.found);
    CHECK(both.name == "far");
    CHECK(both.found->id == checkpoint_id{20, 2});
    REQUIRE(both.skipped.size() == 1);
    CHECK(both.skipped[0].what == skip_reason::unread);
    far.remove("step-0000000020-g00000002/MANIFEST.json");
    const auto search = [&](const search_patience& patience) {
      return recover(verification::checksums, patience, checkpoint_source("near", near),
                     checkpoint_source("far", far));
    };
    CHECK_THROWS_AS(static_cast<void>(search(at_once)), unreadable_checkpoint);
    CHECK(search(older_will_do).found->id == checkpoint_id{10, 1});
  }
}

TEST_SUITE("find_checkpoint, of a folder that is a symbolic link") {
  TEST_CASE("a linked checkpoint is found like others, and a dangling link is an error") {
    const temporary_folder folder;
    const std::filesystem::path root = folder.path() / "run";
    const std::filesystem::path elsewhere = folder.path() / "elsewhere";
    posix_storage<> storage(root.string());
    save_two(storage);
    std::filesystem::rename(root / "step-0000000020-g00000002", elsewhere);
    std::filesystem::create_directory_symlink(elsewhere, root / "step-0000000020-g00000002");
    CHECK(list_checkpoints(storage) == std::vector<checkpoint_id>{{20, 2}, {10, 1}});
    const checkpoint_search search = find_checkpoint(storage);
    REQUIRE(search.found);
    CHECK(search.found->id == checkpoint_id{20, 2});

    std::filesystem::rename(elsewhere, folder.path() / "not mounted");
    try {
      static_cast<void>(find_checkpoint(storage, verification::checksums, at_once));
      FAIL("an older one was taken");
    } catch (const unreadable_checkpoint& error) {
      CHECK(std::string(error.what()).find("the folder is a symbolic link without a target: mount") !=
            std::string::npos);
    }
  }

  TEST_CASE("the removal of a linked checkpoint removes only the link") {
    const temporary_folder folder;
    const std::filesystem::path root = folder.path() / "run";
    const std::filesystem::path elsewhere = folder.path() / "elsewhere";
    posix_storage<> storage(root.string());
    checkpoint_folder writer(storage);
    save_step(writer, small, 10);
    std::filesystem::rename(root / "step-0000000010-g00000001", elsewhere);
    std::filesystem::create_directory_symlink(elsewhere, root / "step-0000000010-g00000001");
    for (const std::uint64_t step : {20U, 30U})
      save_step(writer, small, step);
    CHECK(writer.tidy(keep_last_and_every{.last = 1}) == std::vector<checkpoint_id>{{10, 1}});
    CHECK_FALSE(std::filesystem::exists(std::filesystem::symlink_status(root / "step-0000000010-g00000001")));
    CHECK(std::filesystem::exists(elsewhere / "MANIFEST.json"));
    CHECK(std::filesystem::exists(elsewhere / "rank0-0.bin"));
  }

  TEST_CASE("while a link dangles, no older checkpoint is removed that it may refer to") {
    const temporary_folder folder;
    const std::filesystem::path root = folder.path() / "run";
    posix_storage<> storage(root.string());
    checkpoint_folder writer(storage);
    for (const std::uint64_t step : {10U, 20U, 30U, 40U})
      save_step(writer, small, step);
    std::filesystem::rename(root / "step-0000000020-g00000002", folder.path() / "not mounted");
    std::filesystem::create_directory_symlink("nowhere", root / "step-0000000020-g00000002");
    CHECK_THROWS_AS(static_cast<void>(writer.tidy(keep_last_and_every{.last = 2})), io_error);
    CHECK(std::filesystem::exists(root / "step-0000000010-g00000001"));
  }
}
