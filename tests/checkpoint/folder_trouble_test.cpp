// Troubles of one checkpoint, and a lock that somebody removed: the others go on.
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/error_text.hpp"
#include "support/hooked_storage.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;
using llmmem::testing::simulated_storage_options;

namespace {

constexpr checkpoint_world small{.ranks = 1, .files = 2};
constexpr keep_last_and_every two{.last = 2};

bool is_in(const std::vector<std::string>& all, const std::string& what) {
  return std::ranges::find(all, what) != all.end();
}

std::string text_of_file(simulated_storage& storage, const std::string& path) {
  std::string text;
  const auto files = storage.files();
  for (const std::byte each : files.at(path))
    text += static_cast<char>(each);
  return text;
}

}  // namespace

TEST_SUITE("checkpoint_folder, in trouble") {
  TEST_CASE("a checkpoint that cannot be renamed is reported, and all others are removed") {
    // As where a layer below has it (EXDEV), it is a mount (EBUSY), or somebody pinned it (EPERM).
    for (const int number : {EXDEV, EBUSY, EPERM}) {
      simulated_storage storage;
      const auto refuse = [&](storage_call what, const std::string& path) {
        if (what == storage_call::rename && path == folder_name({10, 1}))
          throw storage_error(what, path, number);
      };
      hooked_storage<decltype(refuse)> hooked(storage, refuse);
      checkpoint_folder<hooked_storage<decltype(refuse)>> folder(hooked);
      for (std::uint64_t step = 10; step <= 100; step += 10) {
        save_step(folder, small, step);
        const std::string told = text_of([&] { static_cast<void>(folder.tidy(two)); });
        CHECK((told.find("cannot be renamed") != std::string::npos) == (step >= 30));
      }
      CHECK(list_checkpoints(storage) == std::vector<checkpoint_id>{{100, 10}, {90, 9}, {10, 1}});
      CHECK(text_of_file(storage, "LATEST") == folder_name({100, 10}) + "\n");
      CHECK(storage.folders().size() == 3);
    }
  }

  TEST_CASE("one failing removal is reported and all others succeed, also if the manifest is removed first") {
    simulated_storage_options options;
    options.rename_allowed = false;
    simulated_storage storage(options);
    const auto refuse = [&](storage_call what, const std::string& path) {
      if (what == storage_call::remove && path == folder_name({10, 1}) + "/MANIFEST.json")
        throw storage_error(what, path, EPERM);
    };
    hooked_storage<decltype(refuse)> hooked(storage, refuse);
    checkpoint_folder<hooked_storage<decltype(refuse)>> folder(hooked);
    for (std::uint64_t step = 10; step <= 50; step += 10) {
      save_step(folder, small, step);
      static_cast<void>(text_of([&] { static_cast<void>(folder.tidy(two)); }));
    }
    CHECK(list_checkpoints(storage) == std::vector<checkpoint_id>{{50, 5}, {40, 4}, {10, 1}});
    CHECK(text_of_file(storage, "LATEST") == folder_name({50, 5}) + "\n");
  }

  TEST_CASE("a file that cannot be removed blocks no other, and is removed once it can be") {
    simulated_storage storage;
    bool is_pinned = true;
    const std::string pinned = ".trash-" + folder_name({10, 1}) + "/rank0-0.bin";
    const auto refuse = [&](storage_call what, const std::string& path) {
      if (is_pinned && what == storage_call::remove && path == pinned) throw storage_error(what, path, EPERM);
    };
    hooked_storage<decltype(refuse)> hooked(storage, refuse);
    checkpoint_folder<hooked_storage<decltype(refuse)>> folder(hooked);
    for (std::uint64_t step = 10; step <= 50; step += 10) {
      save_step(folder, small, step);
      CHECK((text_of([&] { static_cast<void>(folder.tidy(two)); }).find("rank0-0.bin: cannot be removed") !=
             std::string::npos) == (step >= 30));
    }
    std::uint64_t trash = 0;
    for (const auto& [path, bytes] : storage.files())
      trash += path.starts_with(".trash-") ? 1U : 0U;
    CHECK(trash == 1);  // the pinned one
    CHECK(list_checkpoints(storage) == std::vector<checkpoint_id>{{50, 5}, {40, 4}});
    is_pinned = false;
    CHECK(folder.tidy(two).empty());
    CHECK_FALSE(is_in(storage.folders(), ".trash-" + folder_name({10, 1})));
  }

  TEST_CASE("many problems are counted, not listed") {
    simulated_storage storage;
    const auto refuse = [&](storage_call what, const std::string& path) {
      if (what == storage_call::rename && path.starts_with("step-")) throw storage_error(what, path, EPERM);
    };
    hooked_storage<decltype(refuse)> hooked(storage, refuse);
    checkpoint_folder<hooked_storage<decltype(refuse)>> folder(hooked);
    for (std::uint64_t step = 10; step <= 90; step += 10)
      save_step(folder, small, step);
    CHECK(text_of([&] { static_cast<void>(folder.tidy(two)); }).ends_with("; and 3 more like it"));
  }

  TEST_CASE("files stay as long as the removal of their names is not durable") {
    simulated_storage storage;
    checkpoint_folder folder(storage);
    for (std::uint64_t step = 10; step <= 30; step += 10)
      save_step(folder, small, step);
    storage.set_faults({{.call = storage_call::sync_folder, .number = EIO}});
    CHECK(text_of([&] { static_cast<void>(folder.tidy(two)); }).find("cannot be synced") !=
          std::string::npos);
    // Whatever of the names a crash brings back is whole.
    CHECK(storage.files().contains(".trash-" + folder_name({10, 1}) + "/rank0-0.bin"));
    CHECK(storage.after_crash({}).files().contains(folder_name({10, 1}) + "/rank0-0.bin"));
  }
}

TEST_SUITE("checkpoint_folder, whose lock was removed") {
  TEST_CASE("after a lost lock the save in progress fails, and the next one commits and keeps others out") {
    for (const bool renames : {true, false}) {
      simulated_storage_options options;
      options.rename_allowed = renames;
      simulated_storage storage(options);
      checkpoint_folder folder(storage);
      save_step(folder, small, 10);
      const checkpoint_draft draft = folder.begin(20);
      const checkpoint_manifest all = write_rank(storage, small, draft, 0);
      storage.remove("LOCK");  // a script that cleans up
      CHECK_THROWS_AS(folder.commit(draft, all), fenced);
      folder.abandon(draft);
      save_step(folder, small, 30);
      static_cast<void>(folder.tidy(two));
      CHECK(find_checkpoint(storage).found->id == checkpoint_id{30, 3});
      CHECK_THROWS_AS(checkpoint_folder<simulated_storage>{storage}, io_error);
    }
  }

  TEST_CASE("a process that took over and ended stops this one only if it has committed") {
    simulated_storage storage;
    checkpoint_folder folder(storage);
    save_step(folder, small, 10);
    storage.remove("LOCK");
    {
      checkpoint_folder other(storage);
      CHECK_THROWS_AS(static_cast<void>(folder.begin(20)), fenced);  // it has the lock
      static_cast<void>(other.begin(15));
    }
    save_step(folder, small, 20);
    CHECK(find_checkpoint(storage).found->id == checkpoint_id{20, 3});  // the other's draft had 2
    storage.remove("LOCK");
    {
      checkpoint_folder other(storage);
      save_step(other, small, 25);
    }
    CHECK_THROWS_AS(static_cast<void>(folder.begin(30)), fenced);
    CHECK_THROWS_AS(static_cast<void>(folder.begin(30)), fenced);
    CHECK(find_checkpoint(storage).found->id.step == 25);
  }

  TEST_CASE("an uncertain commit of this object does not count as another's takeover") {
    simulated_storage storage;
    checkpoint_folder folder(storage);
    const checkpoint_draft draft = folder.begin(10);
    const checkpoint_manifest all = write_rank(storage, small, draft, 0);
    storage.set_faults({{.call = storage_call::sync_folder, .first = 2, .number = EIO}});
    CHECK_THROWS_AS(folder.commit(draft, all), durability_uncertain);
    storage.remove("LOCK");
    CHECK_NOTHROW(save_step(folder, small, 20));
  }
}
