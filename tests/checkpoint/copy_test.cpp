#include <llmmem/checkpoint/copy.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/testing/crash_states.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/error_text.hpp"
#include "support/incremental_world.hpp"
#include "support/named_storage.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::crash_limits;
using llmmem::testing::simulated_storage;
using llmmem::testing::simulated_storage_options;
using llmmem::testing::simulated_writes;
using llmmem::testing::storage_fault;
using llmmem::testing::sweep_power_cuts;

namespace {

found_checkpoint newest(simulated_storage& storage) {
  const checkpoint_search search = find_checkpoint(storage);
  REQUIRE(search.found);
  return *search.found;
}

/// A folder with one checkpoint of a step, at rest.
simulated_storage with_step(const checkpoint_world& world, std::uint64_t step,
                            const std::string& name = "local") {
  simulated_storage storage(called(name));
  checkpoint_folder folder(storage);
  save_step(folder, world, step);
  return storage.after_crash(storage.all_survives());
}

}  // namespace

TEST_SUITE("copy_checkpoint") {
  TEST_CASE("a copy has the name, the manifest and the bytes of its original, through a buffer of any size") {
    const checkpoint_world world{.ranks = 2, .files = 2, .file_bytes = 101, .write_bytes = 17};
    simulated_storage local = with_step(world, 30);
    const found_checkpoint original = newest(local);
    for (const std::uint64_t buffer : {2U, 3U, 16U, 17U, 34U, 35U, 100U, 101U, 202U, 1000U, 8192U, 30000U}) {
      for (const auto writes : {simulated_writes::at_once, simulated_writes::deferred}) {
        CAPTURE(buffer);
        simulated_storage_options options = called("durable");
        options.writes = writes;
        simulated_storage durable(options);
        checkpoint_folder folder(durable);
        const copy_report report = copy_checkpoint(local, original, folder, {.buffer_bytes = buffer});
        CHECK(report.bytes == 404);
        CHECK(report.copy.id == checkpoint_id{30, 1});
        const found_checkpoint copy = newest(durable);
        CHECK(copy.folder == original.folder);
        CHECK(copy.manifest == original.manifest);
        CHECK(report.copy.manifest == copy.manifest);
        CHECK(has_its_bytes(durable, world, copy));
      }
    }
  }

  TEST_CASE("empty files are copied, and a buffer that cannot be halved is refused") {
    const checkpoint_world world{.ranks = 1, .files = 2, .file_bytes = 0, .write_bytes = 8};
    simulated_storage local = with_step(world, 10);
    simulated_storage durable(called("durable"));
    checkpoint_folder folder(durable);
    CHECK(text_of([&] { copy_checkpoint(local, newest(local), folder, {.buffer_bytes = 1}); }) ==
          "copy_checkpoint: a buffer of 1 bytes cannot be halved; give it some megabytes");
    CHECK(text_of([&] {
            copy_checkpoint(local, newest(local), folder, {.buffer_bytes = std::uint64_t{1} << 63});
          }) == "copy_checkpoint: a buffer of 9223372036854775808 bytes exceeds the limit of 2^63 - 1");
    CHECK(durable.folders().empty());
    copy_checkpoint(local, newest(local), folder);
    CHECK(has_its_bytes(durable, world, newest(durable)));
  }

  TEST_CASE("an incremental checkpoint is copied as plain files, for any number of references") {
    for (const auto seed : seeds(60)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const checkpoint_world world{.ranks = 1 + random.below(2U),
                                   .files = 1 + random.below(2U),
                                   .file_bytes = random.below(200U),
                                   .write_bytes = 1 + random.below(20U)};
      simulated_storage local = with_step(world, 1);
      checkpoint_folder own(local);
      std::map<std::string, std::vector<std::byte>> saved;
      for (std::uint64_t step = 2; step <= 5; ++step)
        saved = save_incremental(own, newest(local), step, random);
      const found_checkpoint original = newest(local);
      simulated_storage durable(called("durable", !random.once_in(4)));
      checkpoint_folder folder(durable);
      copy_checkpoint(local, original, folder, {.buffer_bytes = 2 + random.below(60U)});
      const found_checkpoint copy = newest(durable);
      CHECK(copy.id == original.id);
      CHECK(copy.manifest.stored.empty());
      for (const checkpoint_file& each : copy.manifest.files)
        CHECK(each.runs.empty());
      CHECK(copy.manifest == folded_manifest(original.manifest));
      CHECK(contents_of_files(durable, copy) == saved);

      // The same within its own folder, after which the earlier ones are not needed.
      const copy_report folded = compact_checkpoint(own, original, {.buffer_bytes = 2 + random.below(60U)});
      CHECK(folded.copy.id == checkpoint_id{5, 6});
      for (const checkpoint_id& id : list_checkpoints(local)) {
        if (id.generation == 6) continue;
        for (const storage_entry& each : local.list(folder_name(id)))
          local.remove(folder_name(id) + "/" + each.name);
        local.remove_folder(folder_name(id));
      }
      CHECK(newest(local).id == checkpoint_id{5, 6});
      CHECK(contents_of_files(local, newest(local)) == saved);
    }
  }

  TEST_CASE("only the newest checkpoint is folded, because its copy becomes the newest") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage local(called("local"));
    checkpoint_folder folder(local);
    save_step(folder, world, 10);
    const found_checkpoint old = newest(local);
    save_step(folder, world, 20);
    CHECK(text_of([&] { compact_checkpoint(folder, old); }) ==
          "local/step-0000000010-g00000001: it is not the newest of its folder, but a copy of it would be; "
          "compact the newest, step-0000000020-g00000002");
    simulated_storage empty(called("empty"));
    checkpoint_folder none(empty);
    CHECK(text_of([&] { compact_checkpoint(none, old); }) ==
          "empty/step-0000000010-g00000001: it is not the newest of its folder, but a copy of it would be; "
          "compact the newest, of which there is none");
    CHECK(compact_checkpoint(folder, newest(local)).copy.id == checkpoint_id{20, 3});
  }

  TEST_CASE("a damaged checkpoint is never copied, for any bit") {
    const checkpoint_world world{.ranks = 1, .files = 2, .file_bytes = 25, .write_bytes = 8};
    const simulated_storage whole = with_step(world, 30);
    for (const std::uint64_t buffer : {2U, 16U, 40U, 1000U}) {
      for (std::uint64_t bit = 0; bit < 8 * 25; ++bit) {
        simulated_storage local = whole.after_crash(whole.all_survives());
        const found_checkpoint original = newest(local);
        local.flip(original.folder + "/rank0-1.bin", bit);
        simulated_storage durable(called("durable"));
        checkpoint_folder folder(durable);
        CHECK_THROWS_AS(copy_checkpoint(local, original, folder, {.buffer_bytes = buffer}), format_error);
        CHECK(durable.folders().empty());
        CHECK_FALSE(find_checkpoint(durable).found);
      }
    }
    simulated_storage local = whole.after_crash(whole.all_survives());
    const found_checkpoint original = newest(local);
    local.flip(original.folder + "/rank0-1.bin", 64);
    simulated_storage durable(called("durable"));
    checkpoint_folder folder(durable);
    const std::string text = text_of([&] { copy_checkpoint(local, original, folder); });
    CHECK(text.find("local/step-0000000030-g00000001/rank0-1.bin: bytes 8 to 16 are damaged: their CRC-32C "
                    "is ") == 0);
    local.truncate(original.folder + "/rank0-0.bin", 24);
    CHECK(text_of([&] { copy_checkpoint(local, original, folder); }) ==
          "local/step-0000000030-g00000001/rank0-0.bin: has 24 bytes, but the manifest says 25");
  }

  TEST_CASE("after any crash the copy is complete or absent, and complete if the call had returned") {
    const checkpoint_world world{.ranks = 2, .files = 1};
    const simulated_storage local = with_step(world, 30);
    for (const bool renames : {true, false}) {
      CAPTURE(renames);
      const simulated_storage start(called("durable", renames));
      acknowledged told;
      const auto sweep = sweep_power_cuts(
          start,
          [&](simulated_storage& durable) {
            told = {};
            simulated_storage from = local.after_crash(local.all_survives());
            checkpoint_folder folder(durable);
            copy_checkpoint(from, newest(from), folder, {.buffer_bytes = 20});
            told.step = 30;
          },
          [&](simulated_storage& after) {
            const std::string lost =
                what_is_lost(after, world, told) +
                what_is_torn(after, world, renames ? commit_method::rename : commit_method::manifest);
            if (!lost.empty()) FAIL(lost);
          },
          crash_limits{.exhaustive_up_to = 12, .samples = 64, .seed = 1, .tears = 2});
      MESSAGE(sweep.power_cuts << " cuts, " << sweep.states << " states");
      CHECK(sweep.power_cuts > 20);
      CHECK(told.step == 30);
    }
  }

  TEST_CASE("after any crash during a fold, its step is there with its bytes") {
    const checkpoint_world world{.ranks = 1, .files = 1, .file_bytes = 40, .write_bytes = 8};
    simulated_storage made = with_step(world, 1);
    random_numbers random(3);
    std::map<std::string, std::vector<std::byte>> saved;
    {
      checkpoint_folder own(made);
      saved = save_incremental(own, newest(made), 2, random);
    }
    const simulated_storage start = made.after_crash(made.all_survives());
    bool is_folded = false;
    sweep_power_cuts(
        start,
        [&](simulated_storage& storage) {
          is_folded = false;
          checkpoint_folder folder(storage);
          compact_checkpoint(folder, newest(storage), {.buffer_bytes = 16});
          is_folded = true;
        },
        [&](simulated_storage& after) {
          const checkpoint_search search = find_checkpoint(after);
          REQUIRE(search.found);
          REQUIRE(search.found->id.step == 2);
          REQUIRE((!is_folded || search.found->id.generation == 3));
          REQUIRE(contents_of_files(after, *search.found) == saved);
        },
        crash_limits{.exhaustive_up_to = 10, .samples = 32, .seed = 1, .tears = 1});
    CHECK(is_folded);
  }

  TEST_CASE("if any call of either side fails, no part of the copy is left, and the next copy works") {
    const checkpoint_world world{.ranks = 1, .files = 2};
    for (const bool in_source : {false, true}) {
      for (const bool renames : {true, false}) {
        bool ended = false;
        std::uint64_t failures = 0;
        for (std::uint64_t first = 1; !ended; ++first) {
          CAPTURE(in_source);
          CAPTURE(first);
          simulated_storage local = with_step(world, 30);
          simulated_storage durable(called("durable", renames));
          checkpoint_folder folder(durable);
          const found_checkpoint original = newest(local);
          (in_source ? local : durable)
              .set_faults({storage_fault{.call = {}, .first = first, .count = 1, .number = ENOSPC}});
          bool uncertain = false;
          try {
            copy_checkpoint(local, original, folder, {.buffer_bytes = 20});
            ended = true;
          } catch (const durability_uncertain&) {
            uncertain = true;
          } catch (const storage_error& error) {
            ++failures;
            CHECK(error.number() == ENOSPC);
          }
          local.set_faults({});
          durable.set_faults({});
          CHECK(find_checkpoint(durable).found.has_value() == (ended || uncertain));
          if (ended || uncertain) continue;
          CHECK(durable.folders().empty());
          copy_checkpoint(local, original, folder, {.buffer_bytes = 20});
          CHECK(has_its_bytes(durable, world, newest(durable)));
        }
        CHECK(failures >= (in_source ? 4 : 8));
      }
    }
  }

  TEST_CASE("an existing checkpoint is not copied again, in any form") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage local = with_step(world, 30);
    simulated_storage durable(called("durable"));
    checkpoint_folder folder(durable);
    copy_checkpoint(local, newest(local), folder);
    const std::uint64_t before = durable.fingerprint();
    CHECK(text_of([&] { copy_checkpoint(local, newest(local), folder); }) ==
          "durable/step-0000000030-g00000001: generation 1 already exists; its number cannot be used again");
    CHECK(durable.fingerprint() == before);
    copy_checkpoint(local, newest(local), folder, {.generation = copy_generation::next});
    CHECK(newest(durable).id == checkpoint_id{30, 2});
    CHECK(has_its_bytes(durable, world, newest(durable)));
  }

  TEST_CASE("the watch of a copy sees it grow, and can stop it anywhere") {
    const checkpoint_world world{.ranks = 2, .files = 1, .file_bytes = 100, .write_bytes = 30};
    simulated_storage local = with_step(world, 30);
    std::vector<std::uint64_t> seen;
    {
      simulated_storage durable(called("durable"));
      checkpoint_folder folder(durable);
      copy_checkpoint(local, newest(local), folder, {.buffer_bytes = 80}, [&](const copy_progress& progress) {
        CHECK(progress.bytes == 200);
        CHECK(progress.id == checkpoint_id{30, 1});
        seen.push_back(progress.copied);
        return copy_verdict::proceed;
      });
    }
    CHECK(seen == std::vector<std::uint64_t>{0, 40, 80, 100, 140, 180, 200});
    for (const std::uint64_t stop_at : seen) {
      simulated_storage durable(called("durable"));
      checkpoint_folder folder(durable);
      const auto stop = [&](const copy_progress& progress) {
        return progress.copied < stop_at ? copy_verdict::proceed : copy_verdict::stop;
      };
      CHECK_THROWS_WITH_AS(copy_checkpoint(local, newest(local), folder, {.buffer_bytes = 80}, stop),
                           ("local/step-0000000030-g00000001: its copy was stopped after " +
                            std::to_string(stop_at) + " of 200 bytes")
                               .c_str(),
                           copy_stopped);
      CHECK(durable.folders().empty());
      CHECK(durable.files().size() == 1);  // LOCK
    }
  }

  TEST_CASE("a checkpoint is copied from one real folder to another") {
    const temporary_folder place;
    const checkpoint_world world{.ranks = 2, .files = 2, .file_bytes = 300'001, .write_bytes = 65'536};
    posix_storage<> local(place.file("local"));
    posix_storage<> durable(place.file("durable"));
    {
      checkpoint_folder folder(local);
      save_step(folder, world, 7);
    }
    checkpoint_folder folder(durable);
    for (const std::uint64_t buffer : {std::uint64_t{9000}, std::uint64_t{8} << 20}) {
      copy_checkpoint(local, *find_checkpoint(local).found, folder,
                      {.generation = buffer == 9000 ? copy_generation::same : copy_generation::next,
                       .buffer_bytes = buffer});
      const checkpoint_search search = find_checkpoint(durable);
      REQUIRE(search.found);
      CHECK(has_its_bytes(durable, world, *search.found));
    }
    CHECK(list_checkpoints(durable) == std::vector<checkpoint_id>{{7, 2}, {7, 1}});
  }
}
