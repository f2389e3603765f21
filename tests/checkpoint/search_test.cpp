#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/search.hpp>
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
#include "support/manifests.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;
using llmmem::testing::simulated_storage_options;

namespace {

simulated_storage with_steps(const checkpoint_world& world, const std::vector<std::uint64_t>& steps) {
  simulated_storage storage;
  checkpoint_folder folder(storage);
  for (const std::uint64_t step : steps)
    save_step(folder, world, step);
  return storage.after_crash(storage.all_survives());
}

/// Hands calls on to another storage, and lets the world go on before those of a reader.
template <class Before>
class overtaken_storage {
 public:
  using output = simulated_storage::output;
  using input = simulated_storage::input;
  using lock_type = simulated_storage::lock_type;

  /// @param before  `void(number of the call, what it is)`
  overtaken_storage(simulated_storage& below, Before before) : below_(&below), before_(std::move(before)) {}

  void make_folder(const std::string& path) { below_->make_folder(path); }
  output create(const std::string& path, std::uint64_t bytes) { return below_->create(path, bytes); }
  input open(const std::string& path) {
    before_(++calls_, storage_call::open);
    return below_->open(path);
  }
  void rename(const std::string& from, const std::string& to) { below_->rename(from, to); }
  void replace(const std::string& from, const std::string& to) { below_->replace(from, to); }
  void link(const std::string& from, const std::string& to) { below_->link(from, to); }
  void remove(const std::string& path) { below_->remove(path); }
  void remove_folder(const std::string& path) { below_->remove_folder(path); }
  std::vector<storage_entry> list(const std::string& path) {
    before_(++calls_, storage_call::list);
    return below_->list(path);
  }
  void sync_folder(const std::string& path) { below_->sync_folder(path); }
  std::optional<lock_type> try_lock(const std::string& path) { return below_->try_lock(path); }
  std::uint64_t nonce() { return below_->nonce(); }
  [[nodiscard]] std::string path(const std::string& below) const { return below_->path(below); }
  [[nodiscard]] std::uint64_t calls() const noexcept { return calls_; }

 private:
  simulated_storage* below_;
  Before before_;
  std::uint64_t calls_ = 0;
};

}  // namespace

TEST_SUITE("find_checkpoint") {
  TEST_CASE("nothing is found where nothing is, and that is no error") {
    simulated_storage storage;
    const checkpoint_search search = find_checkpoint(storage);
    CHECK_FALSE(search.found);
    CHECK(search.skipped.empty());
    CHECK(search.message() == "no checkpoint");
    CHECK(list_checkpoints(storage).empty());
  }

  TEST_CASE("checkpoints are listed by generation, regardless of other files") {
    simulated_storage storage;
    for (const char* name :
         {"step-0000000030-g00000001", "step-0000000010-g00000003", "step-0000000020-g00000002",
          ".tmp-step-0000000040-g00000004-1", ".trash-step-0000000010-g00000000", "step-1-g9", "notes",
          "step-0000000099-g00000003"})
      storage.make_folder(name);
    static_cast<void>(storage.create("step-0000000050-g00000005", 1));  // a file
    static_cast<void>(storage.create("LATEST", 0));
    CHECK(list_checkpoints(storage) == std::vector<checkpoint_id>{{99, 3}, {10, 3}, {20, 2}, {30, 1}});
  }

  TEST_CASE("the newest complete checkpoint is found, regardless of damage to newer ones") {
    const checkpoint_world world{.ranks = 2, .files = 1, .file_bytes = 40, .write_bytes = 16};
    for (const auto seed : seeds(300)) {
      CAPTURE(seed);
      random_numbers random(seed);
      std::vector<std::uint64_t> steps;
      for (std::uint64_t i = 1 + random.below(5U); i > 0; --i)
        steps.push_back(10 * (1 + random.below(3U)));  // also back to earlier steps
      simulated_storage storage = with_steps(world, steps);
      std::vector<checkpoint_id> whole;
      std::vector<std::string> damaged;  // the newest first
      for (const checkpoint_id& id : list_checkpoints(storage)) {
        const std::string folder = folder_name(id) + "/";
        std::vector<std::string> files;
        for (const storage_entry& each : storage.list(folder_name(id)))
          files.push_back(folder + each.name);
        std::sort(files.begin(), files.end());
        const std::string file = files[random.below(files.size())];
        const std::uint64_t bytes = storage.files().at(file).size();
        const std::uint64_t what = random.below(8U);
        switch (what) {
          case 0:
            storage.flip(file, random.below(bytes * 8));
            break;
          case 1:
            storage.truncate(file, random.below(bytes));
            break;
          case 2:
            storage.grow(file, bytes + 1 + random.below(9U));
            break;
          case 3:
            storage.remove(file);
            break;
          case 4:
            storage.remove(file);
            storage.make_folder(file);
            break;
          default:
            whole.push_back(id);
            continue;
        }
        if (whole.empty()) damaged.push_back(folder_name(id));
      }
      const checkpoint_search search = find_checkpoint(storage);
      REQUIRE(search.found.has_value() == !whole.empty());
      if (search.found) {
        CHECK(search.found->id == whole.front());
        CHECK(has_its_bytes(storage, world, *search.found));
      }
      std::vector<std::string> skipped;
      for (const skipped_checkpoint& each : search.skipped) {
        CHECK(each.why.starts_with("simulated/" + each.folder + "/"));
        skipped.push_back(each.folder);
      }
      CHECK(skipped == damaged);
    }
  }

  TEST_CASE("a search says in one line what was found and why others were not") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage = with_steps(world, {10, 20, 30, 40});
    storage.remove("step-0000000040-g00000004/MANIFEST.json");
    storage.truncate("step-0000000030-g00000003/rank0-0.bin", 23);
    storage.flip("step-0000000020-g00000002/rank0-0.bin", 12 * 8);
    const auto folder_of = [](const std::string& name) {
      return "; passed over " + name + ": simulated/" + name;
    };
    const std::string newer = folder_of("step-0000000040-g00000004") +
                              "/MANIFEST.json: cannot be opened: No such file or directory" +
                              folder_of("step-0000000030-g00000003") +
                              "/rank0-0.bin: has 23 bytes, but the manifest says 24";
    const checkpoint_search search = find_checkpoint(storage);
    REQUIRE(search.found);
    const auto& file = search.found->manifest.files.at(0);
    CHECK(file.name == "rank0-0.bin");
    std::vector<std::byte> chunk = world_bytes(world, 20, 0, 0);
    chunk.erase(chunk.begin(), chunk.begin() + 12);
    const std::uint32_t right = crc32c(0, chunk);
    chunk[0] ^= std::byte{1};
    CHECK(search.message() == "step-0000000010-g00000001" + newer + folder_of("step-0000000020-g00000002") +
                                  "/rank0-0.bin: bytes 12 to 24 are damaged: their CRC-32C is " +
                                  hex8(crc32c(0, chunk)) + ", but the manifest has " + hex8(right));
    CHECK(find_checkpoint(storage, verification::sizes).message() == "step-0000000020-g00000002" + newer);
    storage.remove("step-0000000010-g00000001/MANIFEST.json");
    CHECK(find_checkpoint(storage).message().starts_with(
        "no checkpoint; passed over step-0000000040-g00000004"));
  }

  TEST_CASE("a manifest in the wrong folder does not count") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    for (const char* name : {"step-0000000010-g00000002", "step-0000000011-g00000001"}) {
      simulated_storage storage = with_steps(world, {10});
      storage.rename("step-0000000010-g00000001", name);
      CHECK(find_checkpoint(storage).message() ==
            std::string("no checkpoint; passed over ") + name + ": simulated/" + name +
                "/MANIFEST.json: it is of step 10, generation 1, which differs from the folder's name");
    }
  }

  TEST_CASE("a file too long for a manifest is not read") {
    simulated_storage storage;
    storage.make_folder("step-0000000010-g00000001");
    static_cast<void>(storage.create("step-0000000010-g00000001/MANIFEST.json", max_manifest_bytes + 1));
    CHECK(find_checkpoint(storage).message() ==
          "no checkpoint; passed over step-0000000010-g00000001: "
          "simulated/step-0000000010-g00000001/MANIFEST.json: has 268435457 bytes, more than 268435456");
  }

  TEST_CASE("a hostile manifest with a right checksum is passed over, and its names are not followed") {
    const checkpoint_world world{.ranks = 1, .files = 1};
    simulated_storage storage = with_steps(world, {10, 20});
    const std::string path = "step-0000000020-g00000002/MANIFEST.json";
    checkpoint_manifest manifest = open_checkpoint(storage, {20, 2}, verification::sizes).manifest;
    manifest.files[0].name = "../step-0000000010-g00000001/rank0-0.bin";
    const std::string text = sealed(json_of(manifest));
    storage.remove(path);
    auto output = storage.create(path, text.size());
    static_cast<void>(output.begin_write(0, std::as_bytes(std::span(text))));
    output.sync();
    const checkpoint_search search = find_checkpoint(storage);
    REQUIRE(search.found);
    CHECK(search.found->id == checkpoint_id{10, 1});
    CHECK(search.skipped.at(0).why == "simulated/" + path +
                                          ": file \"../step-0000000010-g00000001/rank0-0.bin\": the name "
                                          "must be plain: UTF-8, without '/', not beginning with '.'");
  }

  // Whoever commits and tidies may do so between any two calls of a reader. The reader finds one that was the
  // newest when it began, or a newer one; never an older one that is kept for looking back, never none.
  TEST_CASE("a checkpoint removed during the search does not make an older one the newest") {
    const checkpoint_world world{.ranks = 1, .files = 2};
    for (const bool renames : {true, false}) {
      for (const verification how : {verification::sizes, verification::checksums}) {
        std::uint64_t moments = 0;
        for (std::uint64_t at = 1;; ++at) {
          simulated_storage_options options;
          options.rename_allowed = renames;
          simulated_storage storage(options);
          checkpoint_folder folder(storage);
          const keep_last_and_every keeps{.last = 2, .every_steps = 40};
          for (const std::uint64_t step : {40U, 50U, 60U})  // 40 stays for good
            save_step(folder, world, step);
          overtaken_storage reader(storage, [&](std::uint64_t call, storage_call) {
            if (call != at) return;
            for (const std::uint64_t step : {70U, 81U, 90U}) {
              save_step(folder, world, step);
              static_cast<void>(folder.tidy(keeps));
            }
          });
          const checkpoint_search search = find_checkpoint(reader, how);
          CAPTURE(at);
          CAPTURE(renames);
          REQUIRE(search.found);
          CHECK(search.found->id.step >= 60);
          if (reader.calls() < at) break;
          ++moments;
        }
        CHECK(moments >= 4);  // the list, the manifest, two files
      }
    }
  }

  TEST_CASE("a half removed checkpoint with its name is passed over for newer ones") {
    // Where folders cannot be renamed, a folder keeps its name while its files go.
    const checkpoint_world world{.ranks = 1, .files = 2};
    simulated_storage_options options;
    options.rename_allowed = false;
    for (const char* file : {"/MANIFEST.json", "/rank0-0.bin", "/rank0-1.bin"}) {
      CAPTURE(file);
      simulated_storage storage(options);
      checkpoint_folder folder(storage);
      for (const std::uint64_t step : {10U, 20U})
        save_step(folder, world, step);
      overtaken_storage reader(storage, [&](std::uint64_t call, storage_call) {
        if (call != 2) return;  // the first was to list
        for (const std::uint64_t step : {30U, 40U})
          save_step(folder, world, step);
        for (const std::uint64_t going : {10U, 20U})
          storage.remove(folder_name({going, going / 10}) + file);
      });
      const checkpoint_search search = find_checkpoint(reader);
      REQUIRE(search.found);
      CHECK(search.found->id.step == 40);
    }
  }

  TEST_CASE("a search ends even if checkpoints appear and vanish faster than it reads them") {
    simulated_storage storage;
    std::uint64_t generation = 1;
    storage.make_folder(folder_name({1, 1}));
    overtaken_storage always(storage, [&](std::uint64_t, storage_call call) {
      if (call != storage_call::list) return;
      storage.rename(folder_name({1, generation}), folder_name({1, generation + 1}));
      ++generation;
    });
    CHECK_FALSE(find_checkpoint(always).found);
    CHECK(always.calls() < 100);
  }
}
