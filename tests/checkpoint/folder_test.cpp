#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/testing/crash_states.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <cerrno>
#include <cstdint>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/error_text.hpp"
#include "support/hooked_storage.hpp"
#include "support/incremental_world.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::crash_limits;
using llmmem::testing::power_cut;
using llmmem::testing::simulated_storage;
using llmmem::testing::simulated_storage_options;
using llmmem::testing::simulated_writes;
using llmmem::testing::storage_fault;
using llmmem::testing::sweep_power_cuts;

namespace {

simulated_storage_options tiny(bool rename_allowed = true) {
  simulated_storage_options options;
  options.sector_bytes = 8;
  options.rename_allowed = rename_allowed;
  return options;
}

/// Saves some steps, each acknowledged once it is committed, and tidies behind each.
void run(simulated_storage& storage, const checkpoint_world& world, std::vector<std::uint64_t> steps,
         acknowledged& told) {
  checkpoint_folder folder(storage);
  for (const std::uint64_t step : steps) {
    save_step(folder, world, step);
    told.step = step;
    static_cast<void>(folder.tidy(keep_last_and_every{}));
  }
}

/// A folder after some checkpoints, at rest.
simulated_storage settled(const checkpoint_world& world, std::vector<std::uint64_t> steps,
                          const simulated_storage_options& options) {
  simulated_storage storage(options);
  acknowledged told;
  run(storage, world, std::move(steps), told);
  return storage.after_crash(storage.all_survives());
}

/// Every name that is there, in order.
std::vector<std::string> names_in(simulated_storage& storage) {
  std::vector<std::string> names;
  for (const storage_entry& each : storage.list(""))
    names.push_back(each.name);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

TEST_SUITE("checkpoint_folder") {
  TEST_CASE("a search finds a checkpoint with the saved bytes") {
    const checkpoint_world world{.ranks = 3, .files = 2, .file_bytes = 1000, .write_bytes = 300};
    simulated_storage storage;
    acknowledged told;
    run(storage, world, {10, 20}, told);
    const checkpoint_search search = find_checkpoint(storage);
    REQUIRE(search.found);
    CHECK(search.found->id == checkpoint_id{20, 2});
    CHECK(search.skipped.empty());
    CHECK(search.message() == "step-0000000020-g00000002");
    CHECK(has_its_bytes(storage, world, *search.found));
    CHECK(names_in(storage) == std::vector<std::string>{"LATEST", "LOCK", "step-0000000010-g00000001",
                                                        "step-0000000020-g00000002"});
    CHECK(storage.files().at("LATEST").size() == std::string("step-0000000020-g00000002\n").size());
  }

  // The proof: two ranks with two files each, a first checkpoint, and a third with a second and an older one
  // there, cut off at every call, and after each cut every state that a device could be in.
  TEST_CASE(
      "after any crash, acknowledged checkpoints are complete, and so is every folder with a checkpoint's "
      "name") {
    const checkpoint_world world;
    for (const bool renames : {true, false}) {
      for (const bool is_first : {true, false}) {
        CAPTURE(renames);
        CAPTURE(is_first);
        const simulated_storage start =
            is_first ? simulated_storage(tiny(renames)) : settled(world, {10, 20}, tiny(renames));
        acknowledged told;
        std::uint64_t recovered = 0;
        const auto sweep = sweep_power_cuts(
            start,
            [&](simulated_storage& storage) {
              told.step = is_first ? std::nullopt : std::optional<std::uint64_t>(20);
              run(storage, world, {30}, told);
            },
            [&](simulated_storage& after) {
              const std::string lost = what_is_lost(after, world, told);
              if (!lost.empty()) FAIL(lost);
              const std::string torn =
                  what_is_torn(after, world, renames ? commit_method::rename : commit_method::manifest);
              if (!torn.empty()) FAIL(torn);
              recovered += find_checkpoint(after).found ? 1U : 0U;
            },
            llmmem_tests::is_watched
                ? crash_limits{.exhaustive_up_to = 3, .samples = 10, .seed = 1, .tears = 2}
                : crash_limits{.exhaustive_up_to = 14, .samples = 64, .seed = 1, .tears = 2});
        MESSAGE(sweep.power_cuts << " cuts, " << sweep.states << " states, " << recovered
                                 << " with a checkpoint");
        CHECK(sweep.power_cuts > 30);
        CHECK(recovered > 0);
      }
    }
  }

  TEST_CASE("after any crash the folder can be used further, and remains are removed") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    const simulated_storage start = settled(world, {10, 20}, tiny());
    acknowledged told;
    const auto sweep = sweep_power_cuts(
        start,
        [&](simulated_storage& storage) {
          told.step = 20;
          run(storage, world, {30}, told);
        },
        [&](simulated_storage& after) {
          run(after, world, {40}, told);
          REQUIRE(what_is_lost(after, world, acknowledged{40}).empty());
          for (const std::string& name : names_in(after))
            REQUIRE((!is_left_over(name) && name != ""));
          told.step = 30;  // at most: of this run
        },
        crash_limits{.exhaustive_up_to = 8, .samples = 16, .seed = 1, .tears = 1});
    CHECK(sweep.states > 100);
  }

  // A second crash, in the run that goes on after the first.
  TEST_CASE("a crash during the cleanup after a crash loses nothing") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage torn = settled(world, {10, 20}, tiny());
    torn.cut_power_at(torn.calls() + 16);
    acknowledged told;
    try {
      run(torn, world, {30}, told);
    } catch (const power_cut&) {
    }
    REQUIRE(!told.step);
    const simulated_storage start = torn.after_crash(torn.all_survives());
    sweep_power_cuts(
        start,
        [&](simulated_storage& storage) {
          told.step = 20;
          run(storage, world, {30}, told);
        },
        [&](simulated_storage& after) {
          const std::string lost =
              what_is_lost(after, world, told) + what_is_torn(after, world, commit_method::rename);
          if (!lost.empty()) FAIL(lost);
        },
        crash_limits{.exhaustive_up_to = 8, .samples = 16, .seed = 1, .tears = 1});
  }

  TEST_CASE("a failed call leaves no checkpoint of its step, and all earlier ones") {
    const checkpoint_world world{.ranks = 1, .files = 2};
    for (const bool renames : {true, false}) {
      const simulated_storage start = settled(world, {10, 20}, tiny(renames));
      for (const auto what :
           {storage_fault::kind::refused, storage_fault::kind::lost, storage_fault::kind::reported}) {
        for (const std::uint64_t count : {std::uint64_t{1}, storage_fault::forever}) {
          bool ended = false;
          for (std::uint64_t first = 1; !ended; ++first) {
            CAPTURE(first);
            simulated_storage storage = start.after_crash(start.all_survives());
            checkpoint_folder folder(storage);
            storage.set_faults({storage_fault{
                .call = {}, .first = first, .every = 1, .count = count, .number = ENOSPC, .what = what}});
            const std::uint64_t before = storage.calls();
            bool committed = false;
            bool uncertain = false;
            try {
              save_step(folder, world, 30);
              committed = true;
            } catch (const durability_uncertain&) {
              uncertain = true;
            } catch (const error&) {
            }
            ended = storage.calls() - before < first;
            if (ended) CHECK(committed);
            storage.set_faults({});
            const checkpoint_search search = find_checkpoint(storage);
            REQUIRE(search.found);
            // Where every call fails from the rename on, nobody can tell whether that was done.
            const bool is_untold = count == storage_fault::forever && uncertain;
            if (is_untold) {
              CHECK((search.found->id.step == 20 || search.found->id.step == 30));
            } else if (committed || uncertain) {
              CHECK(search.found->id.step == 30);
            } else {
              CHECK(search.found->id.step == 20);
            }
            CHECK(has_its_bytes(storage, world, *search.found));
            // Whatever became of it, the next one works; but for a folder that lost names: no sync of it
            // can be believed any more, and each says so.
            try {
              save_step(folder, world, 40);
              simulated_storage after = storage.after_crash();
              CHECK(what_is_lost(after, world, acknowledged{40}) == "");
            } catch (const error&) {
              CHECK(what == storage_fault::kind::lost);
              CHECK(!committed);
            }
          }
        }
      }
    }
  }

  TEST_CASE("a completed rename is a commit, regardless of its report") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage;
    checkpoint_folder folder(storage);
    save_step(folder, world, 10);
    storage.set_faults(
        {{.call = storage_call::rename, .number = ENOENT, .what = storage_fault::kind::reported}});
    save_step(folder, world, 20);
    simulated_storage after = storage.after_crash();
    CHECK(what_is_lost(after, world, acknowledged{20}) == "");

    // Where nobody can tell, that is what is said, and it does not count as one that stays.
    const storage_fault no_answer{.call = storage_call::rename, .what = storage_fault::kind::reported};
    storage.set_faults({no_answer, {.call = storage_call::list, .count = storage_fault::forever}});
    const std::string unknown = text_of([&] { save_step(folder, world, 30); });
    CHECK(
        unknown.ends_with("cannot be renamed: Input/output error; a planned fault; step-0000000030-g00000003 "
                          "may exist, whole, or not at all"));
    storage.set_faults({});
    CHECK(folder.tidy(keep_last_and_every{.last = 1}).empty());
    CHECK(list_checkpoints(storage).size() == 3);
  }

  TEST_CASE("a rename with an unknown outcome is reported as such, even without memory to check it") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage;
    bool is_short = false;
    const auto no_memory = [&](storage_call what, const std::string& /*path*/) {
      if (what == storage_call::list && is_short) throw std::bad_alloc();
    };
    hooked_storage<decltype(no_memory)> hooked(storage, no_memory);
    checkpoint_folder<hooked_storage<decltype(no_memory)>> folder(hooked);
    for (const std::uint64_t step : {10U, 20U, 30U}) {
      const checkpoint_draft draft = folder.begin(step);
      const checkpoint_manifest part = write_rank(storage, world, draft, 0);
      is_short = step == 30;
      if (is_short)
        storage.set_faults({{.call = storage_call::rename, .what = storage_fault::kind::reported}});
      if (is_short) {
        CHECK_THROWS_AS(folder.commit(draft, part), durability_uncertain);
      } else {
        folder.commit(draft, part);
      }
    }
    is_short = false;
    CHECK(folder.tidy(keep_last_and_every{.last = 1}).empty());  // it does not count
    CHECK(list_checkpoints(storage).size() == 3);
  }

  TEST_CASE("a draft that another process removed is not a commit") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage;
    const auto takes_it = [&](storage_call what, const std::string& from) {
      if (what == storage_call::rename && from.starts_with(".tmp")) storage.rename(from, "elsewhere");
    };
    hooked_storage<decltype(takes_it)> hooked(storage, takes_it);
    checkpoint_folder<hooked_storage<decltype(takes_it)>> folder(hooked);
    const checkpoint_draft draft = folder.begin(10);
    REQUIRE(draft.folder.starts_with(".tmp"));
    const checkpoint_manifest part = write_rank(storage, world, draft, 0);
    CHECK_THROWS_AS(folder.commit(draft, part), storage_error);
    CHECK(storage.list("elsewhere").size() == 2);  // manifest and all: the commit got as far as its name
    CHECK(list_checkpoints(storage).empty());
  }

  TEST_CASE("a checkpoint of uncertain durability does not count as a kept one") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage;
    checkpoint_folder folder(storage);
    for (const std::uint64_t step : {10U, 20U, 30U}) {
      if (step == 30) storage.set_faults({{.call = storage_call::sync_folder, .first = 2}});
      if (step == 30) {
        CHECK(text_of([&] { save_step(folder, world, step); }) ==
              "simulated: the folder cannot be synced: names in it may be lost: Input/output error; a "
              "planned fault; step-0000000030-g00000003 is complete, but a crash may remove it");
      } else {
        save_step(folder, world, step);
      }
    }
    storage.set_faults({});
    CHECK(folder.tidy(keep_last_and_every{.last = 1}).empty());
    CHECK(list_checkpoints(storage).size() == 3);
    save_step(folder, world, 40);
    CHECK(folder.tidy(keep_last_and_every{.last = 1}) == std::vector<checkpoint_id>{{10, 1}});
  }

  TEST_CASE("a second writer is refused, and one that lost its lock commits nothing") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage;
    checkpoint_folder folder(storage);
    CHECK(text_of([&] { const checkpoint_folder second(storage); }) ==
          "simulated/LOCK: another process commits to this folder; stop it, or use another folder");
    for (const bool renames : {true, false}) {
      simulated_storage shared(tiny(renames));
      checkpoint_folder first(shared);
      save_step(first, world, 10);
      const checkpoint_draft draft = first.begin(20);
      const checkpoint_manifest all = write_rank(shared, world, draft, 0);
      shared.remove("LOCK");
      const auto taken = shared.try_lock("LOCK");
      REQUIRE(taken);
      const std::string text =
          "simulated/LOCK: it was removed or replaced while this process held it, or its lease ran out: "
          "another "
          "one may commit to the folder now; nothing was committed";
      CHECK_THROWS_WITH_AS(first.commit(draft, all), text.c_str(), fenced);
      CHECK_THROWS_WITH_AS(static_cast<void>(first.begin(30)), text.c_str(), fenced);
      CHECK_THROWS_WITH_AS(static_cast<void>(first.tidy(keep_last_and_every{})), text.c_str(), fenced);
      CHECK(find_checkpoint(shared).found->id.step == 10);
    }
  }

  TEST_CASE(
      "a process that sleeps through the end of its lease in the middle of a commit acknowledges nothing") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    // Before which call of the commit another process takes the folder, and commits to it.
    for (const bool renames : {true, false}) {
      for (std::uint32_t sleeps_before = 0; sleeps_before < 12; ++sleeps_before) {
        CAPTURE(renames);
        CAPTURE(sleeps_before);
        simulated_storage shared(tiny(renames));
        std::optional<std::uint32_t> calls;
        std::optional<checkpoint_folder<simulated_storage>> second;
        const auto sleep = [&](storage_call, const std::string&) {
          if (!calls || second || (*calls)++ != sleeps_before) return;
          shared.remove("LOCK");
          second.emplace(shared);
          save_step(*second, world, 30);
        };
        hooked_storage sleepy(shared, sleep);
        checkpoint_folder first(sleepy);
        save_step(first, world, 10);
        const checkpoint_draft draft = first.begin(20);
        const checkpoint_manifest all = write_rank(sleepy, world, draft, 0);
        calls = 0;
        bool is_acknowledged = true;
        try {
          first.commit(draft, all);
        } catch (const error&) {
          is_acknowledged = false;
        }
        CHECK(is_acknowledged == !second.has_value());
        if (!second) continue;
        // What the other one committed is the newest, and no folder is the half of a checkpoint.
        CHECK(find_checkpoint(shared).found->id.step == 30);
        if (renames) CHECK(what_is_torn(shared, world, commit_method::rename) == "");
        CHECK_THROWS_AS(static_cast<void>(first.begin(40)), fenced);
      }
    }
  }

  TEST_CASE("the last few checkpoints stay, and one every so many steps permanently, always at least two") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage;
    checkpoint_folder folder(storage);
    for (std::uint64_t step = 10; step <= 100; step += 10) {
      save_step(folder, world, step);
      static_cast<void>(folder.tidy(keep_last_and_every{.last = 3, .every_steps = 40}));
    }
    std::vector<std::uint64_t> steps;
    for (const checkpoint_id& id : list_checkpoints(storage))
      steps.push_back(id.step);
    CHECK(steps == std::vector<std::uint64_t>{100, 90, 80, 40});
    static_cast<void>(folder.tidy(keep_last_and_every{.last = 0}));
    CHECK(list_checkpoints(storage).size() == 2);
  }

  TEST_CASE("a damaged checkpoint does not count, and is not removed") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage;
    checkpoint_folder folder(storage);
    for (const std::uint64_t step : {10U, 20U, 30U})
      save_step(folder, world, step);
    storage.flip("step-0000000030-g00000003/MANIFEST.json", 100);
    CHECK(folder.tidy(keep_last_and_every{.last = 2}).empty());
    const checkpoint_search search = find_checkpoint(storage);
    REQUIRE(search.found);
    CHECK(search.message() ==
          "step-0000000020-g00000002; passed over step-0000000030-g00000003: "
          "simulated/step-0000000030-g00000003/MANIFEST.json: its checksum is wrong: it is damaged");
  }

  TEST_CASE("while a manifest is unreadable, no checkpoint is removed that it may refer to") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    for (const int number : {EMFILE, EIO}) {
      simulated_storage storage;
      checkpoint_folder<simulated_storage> folder(storage);
      random_numbers random(3);
      for (const std::uint64_t step : {10U, 20U})
        save_step(folder, world, step);
      static_cast<void>(
          save_incremental(folder, open_checkpoint(storage, {20, 2}, verification::checksums), 1000, random));
      for (const std::uint64_t step : {1010U, 1020U, 1030U})
        save_step(folder, world, step);
      // The one of step 1000 stays, and with it that of step 20. Now its manifest cannot be opened.
      const keep_last_and_every keeps{.last = 2, .every_steps = 1000};
      const auto refuse_one = [&](storage_call what, const std::string& path) {
        if (what == storage_call::open && path == "step-0000001000-g00000003/MANIFEST.json")
          throw storage_error(what, path, number);
      };
      storage = storage.after_crash(storage.all_survives());
      {
        hooked_storage<decltype(refuse_one)> hooked(storage, refuse_one);
        checkpoint_folder<hooked_storage<decltype(refuse_one)>> same(hooked);
        CHECK(text_of([&] {
                static_cast<void>(same.tidy(keeps));
              }).ends_with("; no older checkpoint is removed while it may need one"));
      }
      checkpoint_folder<simulated_storage> again(storage);
      CHECK_NOTHROW(open_checkpoint(storage, {1000, 3}, verification::checksums));
      CHECK(list_checkpoints(storage).size() == 5);  // what is newer is tidied: step 1010 is not
      CHECK(again.tidy(keeps) == std::vector<checkpoint_id>{{10, 1}});
      CHECK_NOTHROW(open_checkpoint(storage, {1000, 3}, verification::checksums));
    }
  }

  TEST_CASE("a checkpoint's references stay even while one of its own files cannot be opened") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage;
    random_numbers random(5);
    {
      checkpoint_folder<simulated_storage> folder(storage);
      save_step(folder, world, 20);
      static_cast<void>(
          save_incremental(folder, open_checkpoint(storage, {20, 1}, verification::checksums), 1000, random));
      for (const std::uint64_t step : {1010U, 1020U})
        save_step(folder, world, step);
    }
    REQUIRE(open_checkpoint(storage, {1000, 2}, verification::sizes).manifest.stored.size() == 2);
    const auto refuse_one = [](storage_call what, const std::string& path) {
      if (what == storage_call::open && path.ends_with(".new") && path.starts_with("step-0000001000"))
        throw storage_error(what, path, EMFILE);
    };
    hooked_storage<decltype(refuse_one)> hooked(storage, refuse_one);
    checkpoint_folder<hooked_storage<decltype(refuse_one)>> folder(hooked);
    CHECK(folder.tidy(keep_last_and_every{.last = 2, .every_steps = 1000}).empty());
    CHECK_NOTHROW(open_checkpoint(storage, {1000, 2}, verification::checksums));
  }

  TEST_CASE("after a return to an earlier step, the newest checkpoint is one of that step") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage;
    checkpoint_folder folder(storage);
    for (const std::uint64_t step : {10U, 20U, 10U})
      save_step(folder, world, step);
    CHECK(find_checkpoint(storage).found->id == checkpoint_id{10, 3});
  }

  TEST_CASE("no generation is used twice, for any remains of a crash") {
    simulated_storage storage;
    storage.make_folder(".tmp-step-0000000010-g00000007-12345");
    storage.make_folder(".trash-step-0000000010-g00000004");
    storage.make_folder("step-0000000001-g00000002");
    storage.make_folder("step-1-g9");  // not as we write it: none of ours
    checkpoint_folder folder(storage);
    CHECK(folder.generation() == 7);
    CHECK(folder.begin(20).id.generation == 8);
    CHECK(names_in(storage).front() != ".trash-step-0000000010-g00000004");
  }

  TEST_CASE("a draft takes the given generation, unless anything with that generation exists") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    for (const bool renames : {true, false}) {
      CAPTURE(renames);
      simulated_storage storage(tiny(renames));
      checkpoint_folder folder(storage);
      const checkpoint_draft draft = folder.begin_as({70, 7});
      CHECK(draft.id == checkpoint_id{70, 7});
      CHECK(folder.generation() == 7);
      folder.commit(draft, write_rank(storage, world, draft, 0));
      CHECK(find_checkpoint(storage).found->id == checkpoint_id{70, 7});
      CHECK(text_of([&] { static_cast<void>(folder.begin_as({80, 7})); }) ==
            "simulated/step-0000000070-g00000007: generation 7 already exists; its number cannot be used "
            "again");
      const checkpoint_draft open = folder.begin_as({30, 3});
      CHECK(text_of([&] {
              static_cast<void>(folder.begin_as({30, 3}));
            }).find("generation 3 already exists") != std::string::npos);
      folder.abandon(open);
      CHECK(folder.begin_as({30, 3}).id == checkpoint_id{30, 3});
      storage.make_folder(".trash-step-0000000010-g00000009");
      CHECK(text_of([&] { static_cast<void>(folder.begin_as({10, 9})); }) ==
            "simulated/.trash-step-0000000010-g00000009: generation 9 already exists; its number cannot be "
            "used again");
      CHECK(folder.begin(80).id == checkpoint_id{80, 8});
    }
  }

  TEST_CASE("a draft that could not be removed no longer blocks a save once it can be") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    for (const bool renames : {true, false}) {
      CAPTURE(renames);
      simulated_storage storage(tiny(renames));
      checkpoint_folder folder(storage);
      const checkpoint_draft draft = folder.begin_as({70, 7});
      static_cast<void>(write_rank(storage, world, draft, 0));
      storage.set_faults({{.call = storage_call::remove, .every = 1, .count = storage_fault::forever}});
      folder.abandon(draft);
      // As long as it cannot be, that is what is told.
      CHECK(text_of([&] {
              static_cast<void>(folder.begin_as({70, 7}));
            }).ends_with("cannot be removed: Input/output error; a planned fault"));
      storage.set_faults({});
      const checkpoint_draft again = folder.begin_as({70, 7});
      folder.commit(again, write_rank(storage, world, again, 0));
      CHECK(find_checkpoint(storage).found->id == checkpoint_id{70, 7});
      CHECK(storage.folders() == std::vector<std::string>{"step-0000000070-g00000007"});
      CHECK_THROWS_AS(static_cast<void>(folder.begin_as({70, 7})), argument_error);
    }
  }

  TEST_CASE("generations continue after the given one, and never go back") {
    simulated_storage storage;
    checkpoint_folder folder(storage);
    folder.raise_generation(41);
    CHECK(folder.begin(10).id.generation == 42);
    folder.raise_generation(5);
    CHECK(folder.begin(20).id.generation == 43);
  }

  TEST_CASE("a held checkpoint stays until its hold ends") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage;
    checkpoint_folder folder(storage);
    for (const std::uint64_t step : {10U, 20U, 30U, 40U, 50U})
      save_step(folder, world, step);
    folder.hold({1, 3});
    CHECK(folder.tidy(keep_last_and_every{}) == std::vector<checkpoint_id>{{20, 2}});
    folder.hold({1});
    CHECK(folder.tidy(keep_last_and_every{}) == std::vector<checkpoint_id>{{30, 3}});
    folder.hold({});
    CHECK(folder.tidy(keep_last_and_every{}) == std::vector<checkpoint_id>{{10, 1}});
  }

  TEST_CASE("after the last generation a save is refused, instead of starting again at the first") {
    simulated_storage storage;
    storage.make_folder("step-0000000001-g18446744073709551615");
    checkpoint_folder folder(storage);
    CHECK(
        text_of([&] { static_cast<void>(folder.begin(20)); }) ==
        "simulated: a name in it has the last generation there is, 18446744073709551615; use another folder");
    CHECK(storage.folders() == std::vector<std::string>{"step-0000000001-g18446744073709551615"});
  }

  TEST_CASE("if the manifest comes last, drafts that a crash left are removed when the folder is opened") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage(tiny(false));
    {
      checkpoint_folder folder(storage);
      save_step(folder, world, 10);
      static_cast<void>(write_rank(storage, world, folder.begin(20), 0));
    }
    CHECK(list_checkpoints(storage).size() == 2);
    const checkpoint_folder folder(storage);
    CHECK(list_checkpoints(storage) == std::vector<checkpoint_id>{{10, 1}});
    CHECK(folder.generation() == 2);
  }

  TEST_CASE("an obstacle to LATEST blocks nothing else") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage;
    storage.make_folder("LATEST");
    checkpoint_folder folder(storage);
    for (const std::uint64_t step : {10U, 20U, 30U}) {
      save_step(folder, world, step);
      CHECK(text_of([&] { static_cast<void>(folder.tidy(keep_last_and_every{})); }) != "none");
    }
    CHECK(list_checkpoints(storage).size() == 2);
  }

  TEST_CASE("remains that cannot be removed prevent no commit") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage;
    storage.make_folder(".tmp-step-0000000010-g00000001-1");
    storage.set_faults(
        {{.call = storage_call::remove_folder, .first = 1, .every = 1, .count = 1, .number = ENOTEMPTY}});
    checkpoint_folder folder(storage);
    save_step(folder, world, 20);
    CHECK(find_checkpoint(storage).found->id == checkpoint_id{20, 2});
  }

  TEST_CASE("a manifest of another draft is refused") {
    simulated_storage storage;
    checkpoint_folder folder(storage);
    const checkpoint_draft draft = folder.begin(20);
    CHECK(text_of([&] { folder.commit(draft, {.generation = 1, .step = 10}); }) ==
          "checkpoint_folder: a manifest of step 10, generation 1 for the draft of step 20, generation 1");
  }

  TEST_CASE("an unwritable folder is refused with the system's reason") {
    simulated_storage storage;
    storage.set_faults(
        {{.call = {}, .first = 1, .every = 1, .count = storage_fault::forever, .number = EROFS}});
    CHECK(text_of([&] { const checkpoint_folder folder(storage); }) ==
          "simulated/LOCK: cannot be locked: Read-only file system; a planned fault");
  }
}
