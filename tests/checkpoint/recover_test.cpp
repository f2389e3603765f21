#include <llmmem/checkpoint/copy.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/recover.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/error_text.hpp"
#include "support/hooked_storage.hpp"
#include "support/incremental_world.hpp"
#include "support/named_storage.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;
using llmmem::testing::storage_fault;

namespace {

const checkpoint_world world{.ranks = 1, .files = 2, .file_bytes = 40, .write_bytes = 16};

/// Two folders with the same checkpoints, or with others.
struct two_tiers {
  simulated_storage local{called("local")};
  simulated_storage durable{called("durable")};

  static void save_as(simulated_storage& storage, const checkpoint_id& id) {
    checkpoint_folder folder(storage);
    const checkpoint_draft draft = folder.begin_as(id);
    folder.commit(draft, write_rank(storage, world, draft, 0));
  }
  [[nodiscard]] auto recovered(verification how = verification::checksums) {
    return recover(how, checkpoint_source("local", local), checkpoint_source("durable", durable));
  }
  void damage(simulated_storage& storage, const checkpoint_id& id) {
    storage.flip(folder_name(id) + "/rank0-1.bin", 100);
  }
};

}  // namespace

TEST_SUITE("recover") {
  TEST_CASE("nothing is found where nothing is, and that is no error") {
    two_tiers tiers;
    const auto recovered = tiers.recovered();
    CHECK_FALSE(recovered.found);
    CHECK(recovered.message() == "no checkpoint");
    CHECK_FALSE(recovered.has_conflict());
    CHECK(text_of([&] { recovered.visit([](auto&) {}); }) ==
          "checkpoint_recovery: no checkpoint was found; check `found` first");
  }

  TEST_CASE("of equal generations the first named source is taken, and visited with the found checkpoint") {
    two_tiers tiers;
    for (simulated_storage* each : {&tiers.local, &tiers.durable})
      two_tiers::save_as(*each, {30, 3});
    const auto recovered = tiers.recovered();
    REQUIRE(recovered.found);
    CHECK(recovered.message() == "local: step-0000000030-g00000003");
    CHECK(recovered.source == 0);
    CHECK(recovered.visit([&](auto& storage) {
      return storage.path("") + (has_its_bytes(storage, world, *recovered.found) ? " whole" : "");
    }) == "local whole");
    const auto turned = recover(verification::sizes, checkpoint_source("durable", tiers.durable),
                                checkpoint_source("local", tiers.local));
    CHECK(turned.name == "durable");
    CHECK(turned.source == 0);
  }

  TEST_CASE("a checkpoint damaged in one source is taken from another, before anything older") {
    two_tiers tiers;
    for (simulated_storage* each : {&tiers.local, &tiers.durable}) {
      two_tiers::save_as(*each, {20, 2});
      two_tiers::save_as(*each, {30, 3});
    }
    tiers.damage(tiers.local, {30, 3});
    const auto recovered = tiers.recovered();
    CHECK(recovered.name == "durable");
    CHECK(recovered.source == 1);
    CHECK(recovered.found->id == checkpoint_id{30, 3});
    CHECK(recovered.visit([](auto& storage) { return storage.path(""); }) == "durable");
    REQUIRE(recovered.skipped.size() == 1);
    CHECK(recovered.skipped[0].what == skip_reason::damaged);
    CHECK(recovered.skipped[0].source == 0);
    CHECK(recovered.message().find("durable: step-0000000030-g00000003; passed over local: "
                                   "step-0000000030-g00000003: local/step-0000000030-g00000003/rank0-1.bin: "
                                   "bytes 0 to 16 are damaged: their CRC-32C is ") == 0);
    CHECK_FALSE(recovered.has_conflict());
    // The sizes are right: whoever asks for no more gets it from the first.
    CHECK(tiers.recovered(verification::sizes).name == "local");
    tiers.damage(tiers.durable, {30, 3});
    CHECK(tiers.recovered().message().find("local: step-0000000020-g00000002; passed over local: ") == 0);
  }

  TEST_CASE("the newest checkpoint is taken from any source") {
    two_tiers tiers;
    two_tiers::save_as(tiers.local, {20, 2});
    two_tiers::save_as(tiers.durable, {30, 3});
    CHECK(tiers.recovered().message() == "durable: step-0000000030-g00000003");
    two_tiers::save_as(tiers.local, {10, 4});  // back to an earlier step
    CHECK(tiers.recovered().message() == "local: step-0000000010-g00000004");
  }

  // The oracle: all copies by generation and source, the first that was not damaged.
  TEST_CASE(
      "the first complete checkpoint by generation and then by source is found, regardless of the others") {
    for (const auto seed : seeds(200)) {
      CAPTURE(seed);
      random_numbers random(seed);
      std::array<simulated_storage, 3> storages{
          simulated_storage{called("a")}, simulated_storage{called("b")}, simulated_storage{called("c")}};
      std::optional<std::pair<std::uint64_t, std::size_t>> expected;
      std::size_t damaged = 0;
      for (std::uint64_t generation = 6; generation > 0; --generation) {
        for (std::size_t i = 0; i < 3; ++i) {
          if (random.once_in(2)) continue;
          const checkpoint_id id{generation * 10, generation};
          two_tiers::save_as(storages[i], id);
          if (random.once_in(2)) {
            if (!expected) expected = {generation, i};
            continue;
          }
          if (!expected) ++damaged;
          const std::string file =
              folder_name(id) + "/" +
              std::array{"MANIFEST.json", "rank0-0.bin", "rank0-1.bin"}[random.below(3U)];
          if (random.once_in(2)) {
            storages[i].flip(file, random.below(8U * 40));
          } else {
            storages[i].remove(file);
          }
        }
      }
      const auto recovered =
          recover(verification::checksums, checkpoint_source("a", storages[0]),
                  checkpoint_source("b", storages[1]), checkpoint_source("c", storages[2]));
      REQUIRE(recovered.found.has_value() == expected.has_value());
      CHECK(recovered.skipped.size() == damaged);
      CHECK_FALSE(recovered.has_conflict());
      if (!expected) continue;
      CHECK(recovered.found->id.generation == expected->first);
      CHECK(recovered.source == expected->second);
      CHECK(recovered.visit([&](auto& storage) { return has_its_bytes(storage, world, *recovered.found); }));
    }
  }

  TEST_CASE("an unlistable source is reported, and is an error only if no other is left") {
    two_tiers tiers;
    two_tiers::save_as(tiers.local, {30, 3});
    two_tiers::save_as(tiers.durable, {20, 2});
    tiers.local.set_faults({storage_fault{.call = storage_call::list, .every = 1, .count = 100}});
    const auto recovered = tiers.recovered();
    CHECK(recovered.message() ==
          "durable: step-0000000020-g00000002; passed over local: local: the folder cannot be listed: "
          "Input/output error; a planned fault");
    REQUIRE(recovered.skipped.size() == 1);
    CHECK(recovered.skipped[0].what == skip_reason::source);
    tiers.durable.set_faults({storage_fault{.call = storage_call::list, .every = 1, .count = 100}});
    CHECK_THROWS_WITH_AS(
        static_cast<void>(tiers.recovered()),
        "recover: no source can be listed; local: local: the folder cannot be listed: Input/output error; a "
        "planned fault; durable: durable: the folder cannot be listed: Input/output error; a planned fault",
        io_error);
  }

  TEST_CASE("a generation used twice is reported, and the first named source counts") {
    {
      two_tiers tiers;
      two_tiers::save_as(tiers.local, {10, 3});
      two_tiers::save_as(tiers.durable, {30, 3});
      const auto recovered = tiers.recovered();
      CHECK(recovered.message() ==
            "local: step-0000000010-g00000003; passed over durable: step-0000000030-g00000003: it has the "
            "generation of step 10 in local: these belong to different runs");
      CHECK(recovered.has_conflict());
      tiers.damage(tiers.local, {10, 3});
      CHECK(tiers.recovered().found->id == checkpoint_id{30, 3});
      CHECK(tiers.recovered().skipped.size() == 1);
    }
    {  // The same name, and other bytes.
      two_tiers tiers;
      two_tiers::save_as(tiers.local, {30, 3});
      checkpoint_folder folder(tiers.durable);
      const checkpoint_draft draft = folder.begin_as({30, 3});
      auto manifest = write_rank(tiers.durable, world, {{31, 3}, draft.folder}, 0);
      manifest.step = 30;
      folder.commit(draft, manifest);
      const auto recovered = tiers.recovered();
      CHECK(
          recovered.message() ==
          "local: step-0000000030-g00000003; passed over durable: step-0000000030-g00000003: it has the same "
          "step and generation as another one, but other contents in local: these belong to different runs");
      CHECK(recovered.has_conflict());
    }
    {  // Not the newest, but it shows that the newest may be of the wrong run.
      two_tiers tiers;
      two_tiers::save_as(tiers.local, {5, 1});
      two_tiers::save_as(tiers.durable, {10, 1});
      two_tiers::save_as(tiers.durable, {20, 2});
      const auto recovered = tiers.recovered();
      CHECK(recovered.found->id == checkpoint_id{20, 2});
      CHECK(recovered.has_conflict());
      CHECK(recovered.message() ==
            "durable: step-0000000020-g00000002; passed over durable: step-0000000010-g00000001: it has the "
            "generation of step 5 in local: these belong to different runs");
    }
  }

  TEST_CASE("an incremental checkpoint and its plain copy are the same") {
    two_tiers tiers;
    random_numbers random(2);
    std::map<std::string, std::vector<std::byte>> saved;
    {
      checkpoint_folder local(tiers.local);
      save_step(local, world, 10);
      saved = save_incremental(local, *find_checkpoint(tiers.local).found, 20, random);
      checkpoint_folder durable(tiers.durable);
      copy_checkpoint(tiers.local, *find_checkpoint(tiers.local).found, durable);
    }
    auto recovered = tiers.recovered();
    CHECK(recovered.message() == "local: step-0000000020-g00000002");
    CHECK_FALSE(recovered.found->manifest.stored.empty());
    // What it takes chunks from is damaged: so is it.
    tiers.local.remove("step-0000000010-g00000001/rank0-0.bin");
    tiers.local.remove("step-0000000010-g00000001/rank0-1.bin");
    recovered = tiers.recovered();
    CHECK(recovered.name == "durable");
    CHECK(recovered.visit([&](auto& storage) { return contents_of_files(storage, *recovered.found); }) ==
          saved);
  }

  TEST_CASE("a search overtaken by a run starts again, and never takes an older checkpoint instead") {
    for (const auto how : {verification::sizes, verification::checksums}) {
      std::uint64_t moments = 0;
      for (std::uint64_t at = 1; at < 100; ++at) {
        CAPTURE(at);
        two_tiers tiers;
        two_tiers::save_as(tiers.durable, {20, 2});
        checkpoint_folder folder(tiers.local);
        folder.raise_generation(3);
        for (const std::uint64_t step : {40U, 50U})
          save_step(folder, world, step);
        std::uint64_t calls = 0;
        hooked_storage reader(tiers.local, [&](storage_call, const std::string&) {
          if (++calls != at) return;
          for (const std::uint64_t step : {60U, 70U, 80U}) {
            save_step(folder, world, step);
            static_cast<void>(folder.tidy(keep_last_and_every{}));
          }
        });
        const auto recovered =
            recover(how, checkpoint_source("local", reader), checkpoint_source("durable", tiers.durable));
        REQUIRE(recovered.found);
        CHECK(recovered.found->id.step >= 50);
        if (calls < at) break;
        ++moments;
      }
      CHECK(moments >= 4);
    }
  }

  TEST_CASE("sources may have different types, also a real folder, and the found checkpoint is loaded") {
    const temporary_folder place;
    posix_storage<> local(place.file("local"));
    simulated_storage durable(called("durable"));
    const auto sources = [&] {
      return recover(verification::checksums, checkpoint_source("local", local),
                     checkpoint_source("durable", durable));
    };
    two_tiers::save_as(durable, {20, 2});
    auto recovered = sources();
    CHECK(recovered.visit([&](auto& storage) {
      return std::is_same_v<std::remove_cvref_t<decltype(storage)>, simulated_storage>;
    }));
    checkpoint_folder folder(local);
    folder.raise_generation(2);
    save_step(folder, world, 30);
    recovered = sources();
    CHECK(recovered.message() == "local: step-0000000030-g00000003");
    CHECK(recovered.visit([&](auto& storage) {
      return has_its_bytes(storage, world, *recovered.found) &&
             load_checkpoint(storage, *recovered.found, {}, [](auto, auto, auto) {}).bytes == 0;
    }));
  }
}
