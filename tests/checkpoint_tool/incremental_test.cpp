// Checkpoints that take chunks from earlier ones.
#include <llmmem/async_checkpointer.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "support/tool_folder.hpp"

using namespace checkpoint_tool;
using namespace llmmem_tests;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

/// Sums, weighted and not: enough to tell these chunks apart.
struct sum_digest {
  static constexpr bool detects_changes = true;
  [[nodiscard]] static std::array<std::uint64_t, 2> of(std::span<const std::byte> bytes) noexcept {
    std::array<std::uint64_t, 2> sum{};
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      sum[0] += static_cast<std::uint64_t>(bytes[i]);
      sum[1] += static_cast<std::uint64_t>(bytes[i]) * (i + 1);
    }
    return sum;
  }
};

struct sum_traits : llmmem::checkpointer_traits {
  using digest_type = sum_digest;
};

constexpr std::size_t row = 1024;  // floats: a chunk

/// Rows whose first element is changed before a save.
struct rows_changed {
  std::vector<std::size_t> weights{};  // of four
  std::vector<std::size_t> moments{};  // of two
};

/// Saves a run's steps 1, 2, ...: the first checkpoint is whole. Values tell the step that wrote them last.
void save_run(const std::string& path, const std::vector<rows_changed>& steps) {
  std::vector<float> weights(4 * row, 1.0F);
  std::vector<float> moments(2 * row, 1.0F);
  const std::array spans{std::as_bytes(std::span<const float>(weights)),
                         std::as_bytes(std::span<const float>(moments))};
  using llmmem::safetensors_type;
  llmmem::posix_storage<> storage(path);
  llmmem::solo_coordinator coordinator(storage, llmmem::keep_last_and_every{.last = 100});
  llmmem::async_checkpointer<sum_traits> saves(
      coordinator,
      {{.name = "weights", .type = safetensors_type::f32, .shape = {4, row}, .group = "model", .part = {}},
       {.name = "moments", .type = safetensors_type::f32, .shape = {2, row}, .group = "adam", .part = {}}},
      {.ring_bytes = 64 << 10, .chunk_bytes = 4096, .full_every = 100});
  std::uint64_t step = 0;
  for (const rows_changed& changed : steps) {
    ++step;
    for (const std::size_t each : changed.weights)
      weights[each * row] = static_cast<float>(10 * step);
    for (const std::size_t each : changed.moments)
      moments[each * row] = static_cast<float>(10 * step);
    const auto guard = saves.begin_snapshot(step, llmmem::host_state_view(spans));
    REQUIRE(guard.ticket().wait() == llmmem::commit_status::committed);
  }
}

/// Whole; a row of weights; another row of each; the first row again, and nothing else.
void save_four(const world_folder& world) {
  save_run(world / "run", {{}, {{1}, {}}, {{3}, {0}}, {{1}, {}}});
}

constexpr const char* name_1 = "step-0000000001-g00000001";
constexpr const char* name_2 = "step-0000000002-g00000002";
constexpr const char* name_4 = "step-0000000004-g00000004";

std::string in_run(const char* checkpoint, const char* file) {
  return std::string("run/") + checkpoint + "/" + file;
}

}  // namespace

TEST_CASE("a listing says how much of a checkpoint is new, and which checkpoints it refers to") {
  const world_folder world(save_four);
  CHECK(world.text({"list", "DIR/run"}) ==
        "DIR/run\n"
        "  checkpoint                        step  generation  world  files      bytes\n"
        "  step-0000000004-g00000004            4           4      1      2   32.0 KiB  whole, the newest; "
        "incremental: 1 of 8 chunks new (4.00 KiB), refers to g1, g3\n"
        "  step-0000000003-g00000003            3           3      1      2   32.0 KiB  whole; "
        "incremental: 2 of 8 chunks new (8.00 KiB), refers to g1, g2\n"
        "  step-0000000002-g00000002            2           2      1      2   32.0 KiB  whole; "
        "incremental: 1 of 8 chunks new (4.00 KiB), refers to g1\n"
        "  step-0000000001-g00000001            1           1      1      2   32.0 KiB  whole\n");
  const json all = world.json({"list", "DIR/run"})["checkpoints"];
  CHECK(all[0] == json::parse(R"({"name": "step-0000000004-g00000004", "step": 4, "generation": 4, "world": 1,
    "files": 2, "bytes": 32768, "tensors": 2, "incremental": true, "chunks": 8, "new_chunks": 1,
    "own_bytes": 4096, "refers_to": [1, 3], "whole": true, "newest_whole": true, "why": null})"));
  CHECK(all[3]["incremental"] == false);
  CHECK(all[3]["new_chunks"] == 8);
  CHECK(all[3]["own_bytes"] == 32768);
  CHECK(all[3]["refers_to"].empty());
}

TEST_CASE("a checkpoint is shown with the files that its chunks are in") {
  const world_folder world(save_four);
  CHECK(world.text({"show", "DIR/run"}) ==
        "DIR/run/step-0000000004-g00000004\n"
        "  step 4, generation 4, 1 rank; 2 tensors, 0 extras; 2 files of 32.0 KiB; checksums of every 4.00 "
        "KiB\n"
        "  incremental: 1 of 8 chunks new (4.00 KiB), refers to g1, g3\n"
        "  files\n"
        "    model.safetensors  rank 0  20,480 bytes  CRC-32C 489a175b  1 of 5 chunks new\n"
        "    adam.safetensors  rank 0  12,288 bytes  CRC-32C 39b8cca7  0 of 3 chunks new\n"
        "  chunks are in\n"
        "    step-0000000001-g00000001/model.safetensors  3 chunks\n"
        "    step-0000000004-g00000004/model.safetensors.changes  1 chunk\n"
        "    step-0000000003-g00000003/model.safetensors.changes  1 chunk\n"
        "    step-0000000001-g00000001/adam.safetensors  2 chunks\n"
        "    step-0000000003-g00000003/adam.safetensors.changes  1 chunk\n"
        "  tensors\n"
        "    weights  F32 [4, 1024]\n"
        "      model.safetensors  all elements\n"
        "    moments  F32 [2, 1024]\n"
        "      adam.safetensors  all elements\n");
  const json all = world.json({"show", "DIR/run"});
  CHECK(all["incremental"] == true);
  CHECK(all["chunks"] == 8);
  CHECK(all["new_chunks"] == 1);
  CHECK(all["refers_to"] == json{1, 3});
  CHECK(all["files"][0]["new_chunks"] == 1);
  CHECK(all["files"][1]["new_chunks"] == 0);
  CHECK(all["files"][1]["chunks"].size() == 3);
  REQUIRE(all["stored"].size() == 5);
  CHECK(all["stored"][0] == json::parse(R"({"generation": 1, "step": 1, "name": "model.safetensors",
    "bytes": 20480, "used_chunks": 3})"));
  CHECK(all["stored"][2]["name"] == "model.safetensors.changes");
}

TEST_CASE("verify names the damaged stored file for each checkpoint that needs its bytes") {
  const world_folder world(save_four);
  CHECK(world.text({"verify", "DIR/run"}) ==
        "step-0000000004-g00000004  whole: 2 files, 32.0 KiB read\n"
        "step-0000000003-g00000003  whole: 2 files, 32.0 KiB read\n"
        "step-0000000002-g00000002  whole: 2 files, 32.0 KiB read\n"
        "step-0000000001-g00000001  whole: 2 files, 32.0 KiB read\n");
  // Rows 0 to 2 of the first one, whose row 1 nobody else has, and all that the last one wrote: its row 1.
  for (const std::size_t at : {4096U, 8192U, 12288U})
    flip(world / in_run(name_1, "model.safetensors"), at);
  flip(world / in_run(name_4, "model.safetensors.changes"), 4095);
  const std::string damaged = " are damaged: they have not the CRC-32C that the manifest has\n";
  const std::string first = "  model.safetensors: in step-0000000001-g00000001/model.safetensors: bytes ";
  const std::string two = first + "4096 to 8192" + damaged + first + "12288 to 16384" + damaged;
  CHECK(world.text({"verify", "DIR/run"}, exit_status::failure) ==
        "step-0000000004-g00000004  DAMAGED\n" + first + "4096 to 8192" + damaged +
            "  model.safetensors: in step-0000000004-g00000004/model.safetensors.changes: bytes 0 to 4096" +
            damaged + first + "12288 to 16384" + damaged + "step-0000000003-g00000003  DAMAGED\n" + two +
            "step-0000000002-g00000002  DAMAGED\n" + two +
            "step-0000000001-g00000001  DAMAGED\n  model.safetensors: bytes 4096 to 16384" + damaged);
  const json all = world.json({"verify", "DIR/run", "4"}, exit_status::failure);
  const json& damage = all["checkpoints"][0]["damage"];
  REQUIRE(damage.size() == 3);
  CHECK(damage[1]["file"] == "model.safetensors");
  CHECK(damage[1]["stored"] == "step-0000000004-g00000004/model.safetensors.changes");
  CHECK(damage[1]["begin"] == 0);
  CHECK(damage[1]["end"] == 4096);
}

TEST_CASE("missing stored files and those of another length are reported, also with sizes and in a listing") {
  const world_folder world(save_four);
  overwrite(world / in_run(name_1, "model.safetensors"), "short");
  fs::remove(world / in_run("step-0000000003-g00000003", "model.safetensors.changes"));
  const std::string gone =
      "DIR/run/step-0000000003-g00000003/model.safetensors.changes: cannot be opened: No such file or "
      "directory\n";
  CHECK(
      world.text({"verify", "DIR/run", "4", "--sizes"}, exit_status::failure) ==
      "step-0000000004-g00000004  DAMAGED\n  model.safetensors: step-0000000001-g00000001/model.safetensors: "
      "has 5 bytes, but the manifest says 20480\n  model.safetensors: " +
          gone);
  CHECK(world.text({"list", "DIR/run"}, exit_status::failure)
            .find("  not whole: DIR/run/step-0000000001-g00000001/model.safetensors: has 5 bytes, but the "
                  "manifest says 20480; incremental: 1 of 8 chunks new (4.00 KiB), refers to g1, g3\n") !=
        std::string::npos);
}

TEST_CASE("compare and convert read incremental checkpoints as full ones") {
  const world_folder world(save_four);
  CHECK(world.text({"diff", "DIR/run/3", "4"}, exit_status::failure) ==
        "a  DIR/run/step-0000000003-g00000003\n"
        "b  DIR/run/step-0000000004-g00000004\n"
        "  contents       weights  1 of 4,096 elements differ, the first is 1024; by 20 at most\n"
        "2 tensors: 1 identical, 1 of other contents, 0 of another type or shape, 0 only in a, 0 only in "
        "b\n");
  CHECK(world.text({"diff", "DIR/run/2", "3"}, exit_status::failure).find("  contents       moments  1 of") !=
        std::string::npos);
  for (const char* ranks : {"1", "3"}) {
    CAPTURE(ranks);
    const std::string to = std::string("DIR/of-") + ranks;
    static_cast<void>(world.text({"convert", "DIR/run", to, "--world", ranks}));
    CHECK(world.run({"verify", to}).status == exit_status::success);
    CHECK(world.json({"show", to})["incremental"] == false);
    CHECK(world.run({"diff", "DIR/run/4", to}).status == exit_status::success);
    CHECK(world.run({"diff", "DIR/run/3", to}).status == exit_status::failure);
  }
}

TEST_CASE("compact makes a full checkpoint of the newest one, as the next one, once") {
  const world_folder world(save_four);
  CHECK(world.text({"compact", "DIR/run"}) ==
        "DIR/run/step-0000000004-g00000005\n"
        "  of DIR/run/step-0000000004-g00000004, incremental: 1 of 8 chunks new (4.00 KiB), refers to g1, "
        "g3\n"
        "  2 files of 32.0 KiB, whole\n");
  CHECK(content(world / "run/LATEST") == "step-0000000004-g00000005\n");
  CHECK(world.run({"verify", "DIR/run"}).status == exit_status::success);
  CHECK(world.run({"diff", std::string("DIR/run/") + name_4, "step-0000000004-g00000005"}).status ==
        exit_status::success);
  const json shown = world.json({"show", "DIR/run"});
  CHECK(shown["generation"] == 5);
  CHECK(shown["incremental"] == false);
  CHECK(world.json({"compact", "DIR/run"}) == json::parse(R"({
    "from": {"folder": "DIR/run", "name": "step-0000000004-g00000005", "step": 4, "generation": 5,
             "incremental": false, "chunks": 8, "new_chunks": 8, "own_bytes": 32768, "refers_to": []},
    "to": {"folder": "DIR/run", "name": "step-0000000004-g00000005", "step": 4, "generation": 5},
    "new": false, "files": 2, "bytes": 32768})"));
  CHECK(world.text({"compact", "DIR/run"}) ==
        "DIR/run/step-0000000004-g00000005\n  is whole: there is nothing to fold\n");
  CHECK(world.json({"list", "DIR/run"})["checkpoints"].size() == 5);
}

TEST_CASE("a damaged, busy or missing checkpoint is not compacted") {
  const world_folder world(save_four);
  {
    llmmem::posix_storage<> storage(world / "run");
    const llmmem::checkpoint_folder folder(storage);
    CHECK(world.why({"compact", "DIR/run"}) ==
          "checkpoint_tool: DIR/run/LOCK: another process commits to this folder; stop it, or use another "
          "folder\n");
  }
  flip(world / in_run("step-0000000003-g00000003", "adam.safetensors.changes"), 7);
  CHECK(world.why({"compact", "DIR/run"})
            .starts_with("checkpoint_tool: DIR/run/step-0000000003-g00000003/adam.safetensors.changes: bytes "
                         "0 to 4096 are damaged: their CRC-32C is "));
  CHECK(world.json({"list", "DIR/run"})["checkpoints"].size() == 4);
  fs::create_directory(world / "empty");
  CHECK(world.why({"compact", "DIR/empty"}) == "checkpoint_tool: DIR/empty: there is no checkpoint in it\n");
}

TEST_CASE("a copy has its original's name, and is full") {
  const world_folder world(save_four);
  CHECK(world.text({"copy", "DIR/run", "DIR/other"}) ==
        "DIR/other/step-0000000004-g00000004\n"
        "  of DIR/run/step-0000000004-g00000004, incremental: 1 of 8 chunks new (4.00 KiB), refers to g1, "
        "g3\n"
        "  2 files of 32.0 KiB, whole\n");
  CHECK(world.text({"copy", "DIR/run/1", "DIR/other"}) ==
        "DIR/other/step-0000000001-g00000001\n"
        "  of DIR/run/step-0000000001-g00000001\n"
        "  2 files of 32.0 KiB, whole\n");
  CHECK(content(world / "other/LATEST") == "step-0000000004-g00000004\n");
  CHECK(world.run({"diff", "DIR/run/4", "DIR/other/4"}).status == exit_status::success);
  CHECK(world.run({"diff", "DIR/run/1", "DIR/other/1"}).status == exit_status::success);
  CHECK(world.run({"verify", "DIR/other"}).status == exit_status::success);
  CHECK(world.why({"copy", "DIR/run/4", "DIR/other"}) ==
        "checkpoint_tool: DIR/other/step-0000000004-g00000004: generation 4 already exists; its number "
        "cannot be used again\n");
  flip(world / in_run(name_2, "model.safetensors.changes"), 0);
  CHECK(world.run({"copy", "DIR/run/2", "DIR/other"}).status == exit_status::failure);
  CHECK(world.json({"list", "DIR/other"})["checkpoints"].size() == 2);
}

TEST_CASE("references of a remaining checkpoint stay, and a dry run says so") {
  const world_folder world;
  save_run(world / "run", {{}, {{1}, {}}, {{1}, {}}, {{2}, {}}});
  const std::vector<std::string> asked{"prune", "DIR/run", "--keep-last", "2"};
  const auto expected = [](const char* goes, const char* summary) {
    return std::string("DIR/run\n") +
           "  step-0000000004-g00000004    4.00 KiB  stays\n"
           "  step-0000000003-g00000003    4.00 KiB  stays; g4 refers to it\n"
           "  step-0000000002-g00000002    4.00 KiB  " +
           goes +
           "\n"
           "  step-0000000001-g00000001    32.0 KiB  stays; g4, g3 refer to it\n" +
           summary;
  };
  auto dry = asked;
  dry.push_back("--dry-run");
  CHECK(world.text(dry) == expected("would go", "1 checkpoint would go, 4.00 KiB\n"));
  CHECK(world.text(asked) == expected("is gone", "1 checkpoint removed, 4.00 KiB\n"));
  CHECK(!fs::exists(world / (std::string("run/") + name_2)));
  CHECK(world.run({"verify", "DIR/run"}).status == exit_status::success);
  // Whole ones behind them: then the earlier ones can go.
  static_cast<void>(world.text({"compact", "DIR/run"}));
  save_run(world / "run", {{}});
  const json did = prune_as_foretold(world, asked);
  CHECK(did["checkpoints"].size() == 5);
  CHECK(did["freed_bytes"] == 40960);
  CHECK(did["checkpoints"][4]["fate"] == "goes");
  CHECK(did["checkpoints"][4]["needed_by"].empty());
  CHECK(world.json({"list", "DIR/run"})["checkpoints"].size() == 2);
}

TEST_CASE("references of an incomplete checkpoint also stay, and a dry run says so") {
  const world_folder world;
  save_run(world / "run", {{}, {{1}, {}}, {{2}, {}}});  // the third refers to both
  save_run(world / "run", {{}, {}, {}});
  fs::remove(world / in_run("step-0000000003-g00000003", "model.safetensors.changes"));
  prune_as_foretold(world, {"prune", "DIR/run", "--keep-last", "2"});
  CHECK(fs::exists(world / (std::string("run/") + name_1)));
  CHECK(fs::exists(world / (std::string("run/") + name_2)));
}

TEST_CASE("a dry run names exactly what a real run removes, for any references between checkpoints") {
  for (std::uint64_t last = 1; last <= 5; ++last) {
    for (const char* every : {"2", "3"}) {
      CAPTURE(last);
      CAPTURE(every);
      const world_folder world;
      save_run(world / "run", {{}, {{0}, {}}, {{1}, {}}, {{0}, {0}}, {{1}, {}}, {{0}, {0}}});
      prune_as_foretold(world,
                        {"prune", "DIR/run", "--keep-last", std::to_string(last), "--keep-every", every});
      CHECK(world.run({"verify", "DIR/run"}).status == exit_status::success);
    }
  }
}
