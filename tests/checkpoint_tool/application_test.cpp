#include "checkpoint_tool/application.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "support/program_run.hpp"
#include "support/saved_state.hpp"
#include "support/tool_folder.hpp"

using namespace checkpoint_tool;
using namespace llmmem_tests;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

const std::string hint = "\nrun checkpoint_tool --help for the options\n";

/// Puts a manifest in the place of a checkpoint's, its checksum right.
template <class Change>
void rewrite_manifest(const std::string& checkpoint, Change change) {
  const std::string path = checkpoint + "/MANIFEST.json";
  llmmem::checkpoint_manifest manifest = llmmem::read_manifest(content(path), path);
  change(manifest);
  overwrite(path, to_json(manifest));
}

constexpr const char* name_1 = "step-0000000001-g00000001";
constexpr const char* name_2 = "step-0000000002-g00000002";
constexpr const char* name_3 = "step-0000000003-g00000003";

/// Three checkpoints, the second of one rank, the others of three.
void save_three(const world_folder& world) {
  save_state(world / "run", 1, some_state(1), {.world = 3, .how = saved_as::columns});
  save_state(world / "run", 2, some_state(2));
  save_state(world / "run", 3, some_state(3), {.world = 3, .how = saved_as::rows});
}

/// `{"name": ..., "difference": "identical"}` of each tensor, of two checkpoints that have the same.
bool all_identical(const json& diff) {
  for (const json& each : diff["tensors"]) {
    if (each["difference"] != "identical") return false;
  }
  return diff["identical"] == true && diff["tensors"].size() >= 7;
}

}  // namespace

TEST_SUITE("list") {
  TEST_CASE("a listing has every checkpoint, the newest first, and marks the newest complete one") {
    const world_folder world(save_three);
    CHECK(world.text({"list", "DIR/run"}) ==
          "DIR/run\n"
          "  checkpoint                        step  generation  world  files      bytes\n"
          "  step-0000000003-g00000003            3           3      3      9   36.3 KiB  whole, the newest\n"
          "  step-0000000002-g00000002            2           2      1      3   12.3 KiB  whole\n"
          "  step-0000000001-g00000001            1           1      3      9   36.3 KiB  whole\n");
  }

  TEST_CASE("an incomplete checkpoint has a reason, remains are named, and the exit status reports both") {
    const world_folder world(save_three);
    fs::create_directory(world / "run/.tmp-step-0000000004-g00000004-77");
    fs::create_directory(world / "run/.trash-step-0000000000-g00000000");
    overwrite(world / "run/.latest-5", "");
    fs::remove(world / ("run/" + std::string(name_3) + "/adam-rank-00002-of-00003.safetensors"));
    flip(world / ("run/" + std::string(name_1) + "/MANIFEST.json"), 40);
    CHECK(
        world.text({"list", "DIR/run"}, exit_status::failure) ==
        "DIR/run\n  checkpoint                        step  generation  world  files      bytes\n  "
        "step-0000000003-g00000003            3           3      3      9   36.3 KiB  not whole: "
        "DIR/run/step-0000000003-g00000003/adam-rank-00002-of-00003.safetensors: cannot be opened: No such "
        "file or directory\n  step-0000000002-g00000002            2           2      1      3   12.3 KiB  "
        "whole, the newest\n  step-0000000001-g00000001            1           1      ?      ?          ?  "
        "not whole: DIR/run/step-0000000001-g00000001/MANIFEST.json: its checksum is wrong: it is damaged\n  "
        ".latest-5                   left by a crash\n  .tmp-step-0000000004-g00000004-77  in the making, or "
        "left by a crash\n  .trash-step-0000000000-g00000000  being removed, or left by a crash\n");
    const json all = json::parse(world.text({"--json", "list", "DIR/run"}, exit_status::failure));
    CHECK(all ==
          json{{"folder", "DIR/run"},
               {"left_over",
                {".latest-5", ".tmp-step-0000000004-g00000004-77", ".trash-step-0000000000-g00000000"}},
               {"checkpoints",
                {{{"name", name_3},
                  {"step", 3},
                  {"generation", 3},
                  {"world", 3},
                  {"files", 9},
                  {"bytes", 37167},
                  {"tensors", 10},
                  {"incremental", false},
                  {"chunks", 18},
                  {"new_chunks", 18},
                  {"own_bytes", 37167},
                  {"refers_to", json::array()},
                  {"whole", false},
                  {"newest_whole", false},
                  {"why", std::string("DIR/run/") + name_3 +
                              "/adam-rank-00002-of-00003.safetensors: cannot be opened: No such file "
                              "or directory"}},
                 {{"name", name_2},
                  {"step", 2},
                  {"generation", 2},
                  {"world", 1},
                  {"files", 3},
                  {"bytes", 12565},
                  {"tensors", 8},
                  {"incremental", false},
                  {"chunks", 6},
                  {"new_chunks", 6},
                  {"own_bytes", 12565},
                  {"refers_to", json::array()},
                  {"whole", true},
                  {"newest_whole", true},
                  {"why", nullptr}},
                 {{"name", name_1},
                  {"step", 1},
                  {"generation", 1},
                  {"world", nullptr},
                  {"files", nullptr},
                  {"bytes", nullptr},
                  {"tensors", nullptr},
                  {"incremental", nullptr},
                  {"chunks", nullptr},
                  {"new_chunks", nullptr},
                  {"own_bytes", nullptr},
                  {"refers_to", nullptr},
                  {"whole", false},
                  {"newest_whole", false},
                  {"why", std::string("DIR/run/") + name_1 +
                              "/MANIFEST.json: its checksum is wrong: it is damaged"}}}}});
  }

  TEST_CASE("an empty folder has no checkpoints, and a missing one is not created") {
    const world_folder world;
    fs::create_directory(world / "empty");
    CHECK(world.text({"list", "DIR/empty"}) == "DIR/empty\n  no checkpoints\n");
    CHECK(world.text({"list", "DIR/empty", "--json"}) ==
          "{\"folder\": \"DIR/empty\", \"checkpoints\": [], \"left_over\": []}\n");
    CHECK(world.why({"list", "DIR/missing"}) ==
          "checkpoint_tool: DIR/missing: cannot be opened: No such file or directory\n");
    CHECK(!fs::exists(world / "missing"));
    overwrite(world / "file", "x");
    CHECK(world.why({"list", "DIR/file"}) ==
          "checkpoint_tool: DIR/file: cannot be opened: Not a directory\n");
  }
}

TEST_SUITE("show") {
  TEST_CASE("show lists everything in a checkpoint: files, tensors, the places of their pieces, extras") {
    const world_folder world;
    save_state(world / "run", 7, some_state(7), {.world = 2, .how = saved_as::columns});
    CHECK(world.text({"show", "DIR/run"}) ==
          "DIR/run/step-0000000007-g00000001\n"
          "  step 7, generation 1, 2 ranks; 7 tensors, 2 extras; 6 files of 24.3 KiB; checksums of every "
          "4.00 KiB\n"
          "  files\n"
          "    model-rank-00001-of-00002.safetensors  rank 0  4,176 bytes  CRC-32C c432c742\n"
          "    adam-rank-00001-of-00002.safetensors  rank 0  4,144 bytes  CRC-32C 1ece5346\n"
          "    extra-rank-00001-of-00002.safetensors  rank 0  4,109 bytes  CRC-32C dd00db4c\n"
          "    model-rank-00002-of-00002.safetensors  rank 1  4,184 bytes  CRC-32C 2b55d818\n"
          "    adam-rank-00002-of-00002.safetensors  rank 1  4,144 bytes  CRC-32C 7bb2e555\n"
          "    extra-rank-00002-of-00002.safetensors  rank 1  4,109 bytes  CRC-32C d337add2\n"
          "  tensors\n"
          "    embed.weight  F32 [6, 4]\n"
          "      model-rank-00001-of-00002.safetensors  6 runs of 2 elements, one every 4, from 0 on\n"
          "      model-rank-00002-of-00002.safetensors  6 runs of 2 elements, one every 4, from 2 on\n"
          "    layer.bias  BF16 [5]\n"
          "      model-rank-00001-of-00002.safetensors  1 element from 0 on\n"
          "      model-rank-00002-of-00002.safetensors  4 elements from 1 on\n"
          "    layer.weight  F16 [3, 4, 2]\n"
          "      model-rank-00001-of-00002.safetensors  3 runs of 4 elements, one every 8, from 0 on\n"
          "      model-rank-00002-of-00002.safetensors  3 runs of 4 elements, one every 8, from 4 on\n"
          "    adam.m  F32 [6, 4]\n"
          "      adam-rank-00001-of-00002.safetensors  6 runs of 2 elements, one every 4, from 0 on\n"
          "      adam-rank-00002-of-00002.safetensors  6 runs of 2 elements, one every 4, from 2 on\n"
          "    step  I64 []\n"
          "      model-rank-00002-of-00002.safetensors  all elements\n"
          "    nothing  F32 [0, 4]\n"
          "    packed  F4 [4, 3]\n"
          "      model-rank-00001-of-00002.safetensors  all elements\n"
          "  extras\n"
          "    rank.0/rng  U8 [13]\n"
          "      extra-rank-00001-of-00002.safetensors  all elements\n"
          "    rank.1/rng  U8 [13]\n"
          "      extra-rank-00002-of-00002.safetensors  all elements\n");
  }

  TEST_CASE("the JSON of show has the manifest's contents, with extras separate") {
    const world_folder world;
    auto state = some_state(7);
    state.resize(2);
    save_state(world / "run", 7, state, {.world = 2, .how = saved_as::columns, .chunk_bytes = 1 << 20});
    CHECK(world.json({"show", "DIR/run", "7"}) == json::parse(R"({"folder": "DIR/run",
    "name": "step-0000000007-g00000001",
    "step": 7,
    "generation": 1,
    "world": 2,
    "chunk_bytes": 1048576,
    "incremental": false, "chunks": 4, "new_chunks": 4, "own_bytes": 16516, "refers_to": [], "stored": [],
    "files": [
      {"name": "model-rank-00001-of-00002.safetensors", "rank": 0, "bytes": 4150, "crc32c": "5993f1dd", "new_chunks": 1, "chunks": ["5993f1dd"]},
      {"name": "extra-rank-00001-of-00002.safetensors", "rank": 0, "bytes": 4109, "crc32c": "dd00db4c", "new_chunks": 1, "chunks": ["dd00db4c"]},
      {"name": "model-rank-00002-of-00002.safetensors", "rank": 1, "bytes": 4148, "crc32c": "4dbd9848", "new_chunks": 1, "chunks": ["4dbd9848"]},
      {"name": "extra-rank-00002-of-00002.safetensors", "rank": 1, "bytes": 4109, "crc32c": "d337add2", "new_chunks": 1, "chunks": ["d337add2"]}],
    "tensors": [
      {"name": "embed.weight", "type": "F32", "shape": [6, 4], "pieces": [
        {"file": "model-rank-00001-of-00002.safetensors", "entry": "embed.weight", "begin": 0, "run": 2, "stride": 4, "count": 6},
        {"file": "model-rank-00002-of-00002.safetensors", "entry": "embed.weight", "begin": 2, "run": 2, "stride": 4, "count": 6}]},
      {"name": "layer.bias", "type": "BF16", "shape": [5], "pieces": [
        {"file": "model-rank-00001-of-00002.safetensors", "entry": "layer.bias", "begin": 0, "run": 3, "stride": 3, "count": 1},
        {"file": "model-rank-00002-of-00002.safetensors", "entry": "layer.bias", "begin": 3, "run": 2, "stride": 2, "count": 1}]}],
    "extras": [
      {"name": "rank.0/rng", "type": "U8", "shape": [13], "pieces": [
        {"file": "extra-rank-00001-of-00002.safetensors", "entry": "rank.0/rng", "begin": 0, "run": 13, "stride": 13, "count": 1}]},
      {"name": "rank.1/rng", "type": "U8", "shape": [13], "pieces": [
        {"file": "extra-rank-00002-of-00002.safetensors", "entry": "rank.1/rng", "begin": 0, "run": 13, "stride": 13, "count": 1}]}]})"));
  }

  TEST_CASE(
      "the user names a checkpoint by its step, which means the newest of that step, by its name, or by its "
      "path") {
    const world_folder world;
    save_state(world / "run", 5, some_state(1));
    save_state(world / "run", 5, some_state(2));
    save_state(world / "run", 6, some_state(3));
    const auto name = [&](const std::vector<std::string>& arguments) {
      return world.json(arguments)["name"].get<std::string>();
    };
    CHECK(name({"show", "DIR/run"}) == "step-0000000006-g00000003");
    CHECK(name({"show", "DIR/run/"}) == "step-0000000006-g00000003");
    CHECK(name({"show", "DIR/run", "5"}) == "step-0000000005-g00000002");
    CHECK(name({"show", "DIR/run/5"}) == "step-0000000005-g00000002");
    CHECK(name({"show", "DIR/run", "step-0000000005-g00000001"}) == "step-0000000005-g00000001");
    CHECK(name({"show", "DIR/run/step-0000000005-g00000001/"}) == "step-0000000005-g00000001");
    fs::rename(world / "run", world / "5");
    CHECK(name({"show", "DIR/5"}) == "step-0000000006-g00000003");
    CHECK(name({"show", "DIR/5/5"}) == "step-0000000005-g00000002");
  }

  TEST_CASE("an ambiguous or unknown name is reported with the existing checkpoints") {
    const world_folder world(save_three);
    fs::create_directory(world / "empty");
    CHECK(world.why({"show", "DIR/run", "9"}) ==
          "checkpoint_tool: DIR/run: has no checkpoint of step 9; it has steps 3, 2, 1\n");
    CHECK(world.why({"show", "DIR/run/step-0000000009-g00000001"}) ==
          "checkpoint_tool: DIR/run: has no checkpoint step-0000000009-g00000001; it has "
          "step-0000000003-g00000003, step-0000000002-g00000002, step-0000000001-g00000001\n");
    CHECK(world.why({"show", "DIR/empty", "9"}) ==
          "checkpoint_tool: DIR/empty: has no checkpoint of step 9; it has none\n");
    CHECK(world.why({"show", "DIR/empty"}) == "checkpoint_tool: DIR/empty: there is no checkpoint in it\n");
    CHECK(world.why({"show", "DIR/run", "newest"}, exit_status::wrong_usage) ==
          "checkpoint_tool: \"newest\" is neither a step nor a checkpoint's name, such as "
          "step-0000000012-g00000003" +
              hint);
    CHECK(world.why({"show", "DIR/run/3", "2"}, exit_status::wrong_usage) ==
          "checkpoint_tool: \"DIR/run/3\" names a checkpoint already; leave out \"2\"" + hint);
  }

  TEST_CASE("the default is the newest complete checkpoint; without one, each has its reason") {
    const world_folder world(save_three);
    fs::remove(world / ("run/" + std::string(name_3) + "/MANIFEST.json"));
    CHECK(world.json({"show", "DIR/run"})["name"] == name_2);
    for (const char* name : {name_1, name_2})
      fs::remove(world / ("run/" + std::string(name) + "/MANIFEST.json"));
    const std::string gone = "/MANIFEST.json: cannot be opened: No such file or directory";
    CHECK(world.why({"show", "DIR/run"}) ==
          std::string("checkpoint_tool: DIR/run: no checkpoint in it is whole; ") + name_3 + ": DIR/run/" +
              name_3 + gone + "; " + name_2 + ": DIR/run/" + name_2 + gone + "; " + name_1 + ": DIR/run/" +
              name_1 + gone + "\n");
  }

  TEST_CASE("names of tensors and files cannot write to a terminal") {
    const world_folder world;
    save_state(world / "run", 1,
               {{"evil\x1b[2Jname\n",
                 llmmem::safetensors_type::u8,
                 {1},
                 {std::byte{1}},
                 "mod\x1b"
                 "el"}},
               {.has_extras = false});
    const std::string shown = world.text({"show", "DIR/run"});
    CHECK(shown.find('\x1b') == std::string::npos);
    CHECK(shown.find("    evil\\x1b[2Jname\\x0a  U8 [1]\n      mod\\x1bel.safetensors  all elements\n") !=
          std::string::npos);
    const json all = world.json({"show", "DIR/run"});
    CHECK(all["tensors"][0]["name"] == "evil\x1b[2Jname\n");
    CHECK(all["files"][0]["name"] ==
          "mod\x1b"
          "el.safetensors");
    fs::remove(world /
               "run/step-0000000001-g00000001/mod\x1b"
               "el.safetensors");
    const outcome done = world.run({"diff", "DIR/run/1", "1"});
    CHECK(done.notes ==
          "checkpoint_tool: DIR/run/step-0000000001-g00000001/mod\\x1bel.safetensors: cannot be "
          "opened: No such file or directory\n");
  }
}

TEST_SUITE("verify") {
  TEST_CASE("verify finds complete checkpoints complete, all of them or one, and reads all their bytes") {
    const world_folder world(save_three);
    const outcome done = world.run({"verify", "DIR/run"});
    CHECK(done.status == exit_status::success);
    CHECK(done.out ==
          "step-0000000003-g00000003  whole: 9 files, 36.3 KiB read\n"
          "step-0000000002-g00000002  whole: 3 files, 12.3 KiB read\n"
          "step-0000000001-g00000001  whole: 9 files, 36.3 KiB read\n");
    CHECK(done.notes ==
          "checkpoint_tool: verifying step-0000000003-g00000003\n"
          "checkpoint_tool: verifying step-0000000002-g00000002\n"
          "checkpoint_tool: verifying step-0000000001-g00000001\n");
    CHECK(world.text({"verify", "DIR/run", "2", "--sizes"}) ==
          "step-0000000002-g00000002  whole by sizes: 3 files, no data read\n");
    CHECK(world.json({"verify", "DIR/run", "2"}) == json{{"folder", "DIR/run"},
                                                         {"how", "checksums"},
                                                         {"whole", true},
                                                         {"checkpoints",
                                                          {{{"name", name_2},
                                                            {"step", 2},
                                                            {"generation", 2},
                                                            {"whole", true},
                                                            {"files", 3},
                                                            {"read_bytes", 12565},
                                                            {"damage", json::array()}}}}});
  }

  TEST_CASE("every damage is reported with its file and bytes") {
    const world_folder world;
    save_state(world / "run", 1, some_state(1), {.chunk_bytes = 1000});
    const std::string one = "run/" + std::string(name_1);
    // Chunks 1 and 2, which adjoin, and the last one, which is short.
    flip(world / (one + "/model.safetensors"), 1500);
    flip(world / (one + "/model.safetensors"), 2000);
    flip(world / (one + "/model.safetensors"), 4263);
    overwrite(world / (one + "/adam.safetensors"), "short");
    fs::remove(world / (one + "/extra.safetensors"));
    const std::string damaged = " are damaged: they have not the CRC-32C that the manifest has\n";
    CHECK(world.text({"verify", "DIR/run"}, exit_status::failure) ==
          "step-0000000001-g00000001  DAMAGED\n"
          "  model.safetensors: bytes 1000 to 3000" +
              damaged + "  model.safetensors: bytes 4000 to 4264" + damaged +
              "  model.safetensors: its header: byte 1500: the JSON must end here\n  adam.safetensors: has 5 "
              "bytes, but the manifest says 4192\n  extra.safetensors: "
              "DIR/run/step-0000000001-g00000001/extra.safetensors: cannot be opened: No such file or "
              "directory\n");
    const json all = world.json({"verify", "DIR/run"}, exit_status::failure);
    CHECK(all["whole"] == false);
    const json& damage = all["checkpoints"][0]["damage"];
    REQUIRE(damage.size() == 5);
    CHECK(damage[0] == json{{"file", "model.safetensors"},
                            {"tensor", nullptr},
                            {"begin", 1000},
                            {"end", 3000},
                            {"stored", nullptr},
                            {"why",
                             "bytes 1000 to 3000 are damaged: they have not the CRC-32C that the manifest "
                             "has"}});
    CHECK(damage[1]["begin"] == 4000);
    CHECK(damage[1]["end"] == 4264);
    CHECK(damage[3]["begin"] == nullptr);
    // Sizes alone do not tell flipped bits in data.
    save_state(world / "other", 1, some_state(1), {.chunk_bytes = 1000});
    const std::string other = "other/" + std::string(name_1) + "/model.safetensors";
    flip(world / other, 4200);
    CHECK(world.text({"verify", "DIR/other", "--sizes"}) ==
          "step-0000000001-g00000001  whole by sizes: 3 files, no data read\n");
    CHECK(world.text({"verify", "DIR/other"}, exit_status::failure) ==
          "step-0000000001-g00000001  DAMAGED\n  model.safetensors: bytes 4000 to 4264" + damaged);
  }

  TEST_CASE("a manifest that is damaged, of another checkpoint or missing is reported") {
    const world_folder world(save_three);
    flip(world / ("run/" + std::string(name_3) + "/MANIFEST.json"), 100);
    fs::copy_file(world / ("run/" + std::string(name_1) + "/MANIFEST.json"),
                  world / ("run/" + std::string(name_2) + "/MANIFEST.json"),
                  fs::copy_options::overwrite_existing);
    fs::remove(world / ("run/" + std::string(name_1) + "/MANIFEST.json"));
    CHECK(world.text({"verify", "DIR/run"}, exit_status::failure) ==
          "step-0000000003-g00000003  DAMAGED\n  MANIFEST.json: "
          "DIR/run/step-0000000003-g00000003/MANIFEST.json: its checksum is wrong: it is "
          "damaged\nstep-0000000002-g00000002  DAMAGED\n  MANIFEST.json: "
          "DIR/run/step-0000000002-g00000002/MANIFEST.json: it is of step 1, generation 1, which differs "
          "from the folder's name\nstep-0000000001-g00000001  DAMAGED\n  MANIFEST.json: "
          "DIR/run/step-0000000001-g00000001/MANIFEST.json: cannot be opened: No such file or directory\n");
  }

  TEST_CASE("a header that contradicts the manifest is reported by tensor, also with sizes") {
    const world_folder world;
    save_state(world / "run", 1, some_state(1));
    rewrite_manifest(world / ("run/" + std::string(name_1)), [](llmmem::checkpoint_manifest& manifest) {
      for (llmmem::checkpoint_tensor& each : manifest.tensors) {
        if (each.name == "embed.weight") each.type = llmmem::safetensors_type::f64;
        if (each.name == "layer.bias") each.name = each.pieces[0].entry = "renamed";
      }
    });
    const std::string wrong =
        "step-0000000001-g00000001  DAMAGED\n"
        "  model.safetensors: tensor \"embed.weight\" is F32 [6, 4] in the file, the manifest says 24 "
        "elements of F64\n"
        "  model.safetensors: tensor \"layer.bias\" is in the file, and the manifest does not say so\n"
        "  model.safetensors: tensor \"renamed\" is not in the file, and the manifest says so\n";
    CHECK(world.text({"verify", "DIR/run", "--sizes"}, exit_status::failure) == wrong);
    CHECK(world.text({"verify", "DIR/run"}, exit_status::failure) == wrong);
    const json all = world.json({"verify", "DIR/run"}, exit_status::failure);
    CHECK(all["checkpoints"][0]["damage"][1] ==
          json{{"file", "model.safetensors"},
               {"tensor", "layer.bias"},
               {"begin", nullptr},
               {"end", nullptr},
               {"stored", nullptr},
               {"why", "is in the file, and the manifest does not say so"}});
  }

  TEST_CASE("a file that is not safetensors is reported with the place at which its header is wrong") {
    const world_folder world;
    save_state(world / "run", 1, some_state(1), {.has_extras = false});
    const std::string path = world / ("run/" + std::string(name_1) + "/adam.safetensors");
    const std::string good = content(path);
    std::string bad = good;
    bad[0] = '\xff';
    bad[6] = '\x01';
    overwrite(path, bad);
    CHECK(world.text({"verify", "DIR/run", "--sizes"}, exit_status::failure) ==
          "step-0000000001-g00000001  DAMAGED\n  adam.safetensors: its header: a header of 281474976714751 "
          "bytes, at most "
          "100000000 are allowed\n");
    bad = good;
    bad[8] = 'x';
    overwrite(path, bad);
    CHECK(world.text({"verify", "DIR/run", "--sizes"}, exit_status::failure) ==
          "step-0000000001-g00000001  DAMAGED\n  adam.safetensors: its header: byte 8: '{' must be here\n");
    bad = good;
    bad[1] = '\x20';  // a header of 8440 bytes
    overwrite(path, bad);
    CHECK(world.text({"verify", "DIR/run", "--sizes"}, exit_status::failure) ==
          "step-0000000001-g00000001  DAMAGED\n  adam.safetensors: its header would have 8448 bytes, the "
          "file has 4192\n");
  }

  TEST_CASE("incomplete pieces of a tensor are reported") {
    const world_folder world;
    save_state(world / "run", 1, some_state(1), {.world = 3, .how = saved_as::columns});
    const auto drop = [](llmmem::checkpoint_manifest& manifest) {
      for (llmmem::checkpoint_tensor& each : manifest.tensors) {
        if (each.name == "adam.m") each.pieces.erase(each.pieces.begin() + 1);
      }
    };
    rewrite_manifest(world / ("run/" + std::string(name_1)), drop);
    CHECK(
        world.text({"verify", "DIR/run"}, exit_status::failure) ==
        "step-0000000001-g00000001  DAMAGED\n"
        "  adam-rank-00002-of-00003.safetensors: tensor \"adam.m\" is in the file, and the manifest does not "
        "say so\n"
        "  tensor \"adam.m\" its pieces do not make all of it: make_reshard: no stored piece has element 2 "
        "of "
        "tensor 'adam.m', which rank 0 wants\n");
  }

  TEST_CASE("a checkpoint that a run removes meanwhile does not count as damaged") {
    const world_folder world(save_three);
    std::string gone = world / ("run/" + std::string(name_1));
    // What is noted before a checkpoint is read removes the oldest.
    const cookie_io_functions_t io{.read = nullptr,
                                   .write = [](void* path, const char*, std::size_t bytes) -> ssize_t {
                                     fs::remove_all(*static_cast<std::string*>(path));
                                     return static_cast<ssize_t>(bytes);
                                   },
                                   .seek = nullptr,
                                   .close = nullptr};
    const example::file_handle notes(::fopencookie(&gone, "w", io), &std::fclose);
    const example::file_handle out(std::tmpfile(), &std::fclose);
    REQUIRE(std::setvbuf(notes.get(), nullptr, _IONBF, 0) == 0);
    CHECK(run_application({"verify", world / "run"}, out.get(), notes.get()) == exit_status::success);
    CHECK(!fs::exists(gone));
    CHECK(std::ftell(out.get()) == static_cast<long>(2 * std::string_view("step-0000000003-g00000003  whole: "
                                                                          "9 files, 36.3 KiB read\n")
                                                             .size()));
  }

  TEST_CASE("a folder without checkpoints has nothing to verify") {
    const world_folder world;
    fs::create_directory(world / "empty");
    CHECK(world.why({"verify", "DIR/empty"}) == "checkpoint_tool: DIR/empty: there is no checkpoint in it\n");
  }
}

TEST_SUITE("diff") {
  TEST_CASE("the same state is identical in any two shardings") {
    const world_folder world;
    const saved_as all[] = {saved_as::flat, saved_as::rows, saved_as::columns, saved_as::replicated};
    for (const saved_as how : all) {
      for (const std::uint32_t ranks : {1U, 3U}) {
        save_state(world / "run", 1, some_state(1), {.world = ranks, .how = how, .has_extras = false});
      }
    }
    for (int i = 1; i <= 8; ++i) {
      CAPTURE(i);
      const std::string name = "step-0000000001-g0000000" + std::to_string(i);
      CHECK(all_identical(world.json({"diff", "DIR/run/" + name, "1"})));
    }
    CHECK(world.text({"diff", "DIR/run/step-0000000001-g00000004", "step-0000000001-g00000008"}) ==
          "a  DIR/run/step-0000000001-g00000004\n"
          "b  DIR/run/step-0000000001-g00000008\n"
          "7 tensors: 7 identical, 0 of other contents, 0 of another type or shape, 0 only in a, 0 only in "
          "b\n");
  }

  TEST_CASE("every difference is reported, with its amount, its first place and its maximum") {
    const world_folder world;
    auto state = some_state(1);
    save_state(world / "a", 1, state, {.has_extras = false});
    state[0].set(5, 100.25F);  // was 15
    state[0].set(23, -1.0F);   // was 33
    state[3].set(7, std::numeric_limits<float>::quiet_NaN());
    state[3].set(8, -std::numeric_limits<float>::infinity());
    state[4].bytes[0] ^= std::byte{1};
    state[6].bytes[1] ^= std::byte{0x50};  // the fourth of packed
    state[1].name = "layer.other";
    state[2].shape = {12, 2};
    save_state(world / "b", 2, state, {.world = 3, .how = saved_as::columns, .has_extras = false});
    CHECK(world.text({"diff", "DIR/a", "DIR/b"}, exit_status::failure) ==
          "a  DIR/a/step-0000000001-g00000001\n"
          "b  DIR/b/step-0000000002-g00000001\n"
          "  contents       adam.m  2 of 24 elements differ, the first is 7; 2 not finite\n"
          "  contents       embed.weight  2 of 24 elements differ, the first is 5; by 85.25 at most\n"
          "  only in a      layer.bias  BF16 [5]\n"
          "  only in b      layer.other  BF16 [5]\n"
          "  type or shape  layer.weight  F16 [3, 4, 2] in a, F16 [12, 2] in b\n"
          "  contents       packed  1 of 12 elements differ, the first is 3\n"
          "  contents       step  1 of 1 element differ, the first is 0\n"
          "8 tensors: 1 identical, 4 of other contents, 1 of another type or shape, 1 only in a, 1 only in "
          "b\n");
    const json both = world.json({"diff", "DIR/a/1", "DIR/b/2"}, exit_status::failure);
    CHECK(both["a"] == json{{"folder", "DIR/a"}, {"name", name_1}, {"step", 1}, {"generation", 1}});
    CHECK(both["b"] ==
          json{{"folder", "DIR/b"}, {"name", "step-0000000002-g00000001"}, {"step", 2}, {"generation", 1}});
    CHECK(both["identical"] == false);
    const json f32_shape = {{"type", "F32"}, {"shape", {6, 4}}};
    const auto of = [&](const char* name, const char* difference, json a, json b, json differing, json first,
                        json largest, json not_finite) {
      return json{{"name", name},       {"difference", difference}, {"a", std::move(a)},
                  {"b", std::move(b)},  {"differing", differing},   {"first", first},
                  {"largest", largest}, {"not_finite", not_finite}};
    };
    REQUIRE(both["tensors"].size() == 8);
    CHECK(both["tensors"][0] == of("adam.m", "contents", f32_shape, f32_shape, 2, 7, nullptr, 2));
    CHECK(both["tensors"][1] == of("embed.weight", "contents", f32_shape, f32_shape, 2, 5, 85.25, 0));
    CHECK(both["tensors"][2] ==
          of("layer.bias", "only_in_a", {{"type", "BF16"}, {"shape", {5}}}, nullptr, 0, nullptr, nullptr, 0));
    CHECK(both["tensors"][3]["difference"] == "only_in_b");
    CHECK(both["tensors"][3]["a"] == nullptr);
    CHECK(both["tensors"][4]["difference"] == "type_or_shape");
    CHECK(both["tensors"][5]["name"] == "nothing");
    CHECK(both["tensors"][5]["difference"] == "identical");
  }

  TEST_CASE("a damaged checkpoint is refused, not compared, with the file and its bytes") {
    const world_folder world(save_three);
    flip(world / ("run/" + std::string(name_2) + "/adam.safetensors"), 4180);
    const std::string said = world.why({"diff", "DIR/run/3", "2"});
    CHECK(
        said.starts_with("checkpoint_tool: DIR/run/step-0000000002-g00000002/adam.safetensors: bytes 4096 to "
                         "4192 are damaged: their CRC-32C is "));
    CHECK(said.ends_with(", but the manifest has 5d323096\n"));
  }
}

TEST_SUITE("convert") {
  TEST_CASE("three ranks become one, two, and one again, and nothing has changed") {
    const world_folder world;
    for (const saved_as how : {saved_as::flat, saved_as::rows, saved_as::columns, saved_as::replicated}) {
      save_state(world / "three", 9, some_state(9), {.world = 3, .how = how});
    }
    int number = 0;
    for (const char* partition : {"flat", "rows", "columns", "replicated"}) {
      CAPTURE(partition);
      ++number;
      const std::string from = "DIR/three/step-0000000009-g0000000" + std::to_string(number);
      const auto name = [&](const char* what) { return "DIR/" + std::string(what) + partition; };
      static_cast<void>(world.text({"convert", from, name("one-")}));
      static_cast<void>(
          world.text({"convert", name("one-"), name("two-"), "--world", "2", "--partition", partition}));
      static_cast<void>(world.text({"convert", name("two-"), name("again-")}));
      for (const char* what : {"one-", "two-", "again-"}) {
        CAPTURE(what);
        CHECK(world.run({"verify", name(what)}).status == exit_status::success);
        CHECK(all_identical(world.json({"diff", from, name(what)})));
      }
      CHECK(world.json({"show", name("two-")})["world"] == 2);
      // Files of one rank are the same bytes, whatever they came from.
      for (const char* file : {"model.safetensors", "adam.safetensors", "extra.safetensors"}) {
        const auto bytes = [&](const char* what) {
          return content(world / (std::string(what) + partition + "/step-0000000009-g00000001/" + file));
        };
        CHECK(!bytes("one-").empty());
        CHECK(bytes("one-") == bytes("again-"));
      }
    }
  }

  TEST_CASE("each partition has the parts that its name says") {
    const world_folder world;
    save_state(world / "one", 9, some_state(9), {.has_extras = false});
    const auto pieces = [&](const char* partition) {
      const std::string to = "DIR/" + std::string(partition);
      static_cast<void>(world.text({"convert", "DIR/one", to, "--world", "2", "--partition", partition}));
      std::string text;
      const json shown = world.json({"show", to});
      for (const json& tensor : shown["tensors"]) {
        if (tensor["name"] != "embed.weight" && tensor["name"] != "layer.bias") continue;
        for (const json& piece : tensor["pieces"]) {
          text += piece["file"].get<std::string>().substr(6, 10) + " ";
          for (const char* of : {"begin", "run", "stride", "count"})
            text += std::to_string(piece[of].get<int>()) + " ";
        }
        text += "| ";
      }
      return text;
    };
    CHECK(pieces("rows") ==
          "rank-00001 0 12 12 1 rank-00002 12 12 12 1 | rank-00001 0 3 3 1 rank-00002 3 2 2 1 | ");
    CHECK(pieces("columns") ==
          "rank-00001 0 2 4 6 rank-00002 2 2 4 6 | rank-00001 0 4 4 1 rank-00002 4 1 1 1 | ");
    CHECK(pieces("flat") == "rank-00001 0 24 24 1 | rank-00001 0 5 5 1 | ");
    CHECK(pieces("replicated") == "rank-00001 0 24 24 1 | rank-00001 0 5 5 1 | ");
  }

  TEST_CASE("one rank has Hugging Face's layout: one file per group, or shards and an index") {
    const world_folder world;
    save_state(world / "three", 9, some_state(9), {.world = 3});
    CHECK(world.text({"convert", "DIR/three", "DIR/one"}) ==
          "DIR/one/step-0000000009-g00000001\n"
          "  of DIR/three/step-0000000009-g00000001\n"
          "  1 rank, 10 tensors; 3 files of 12.3 KiB, 32.3 KiB read\n"
          "    model.safetensors  4,264 bytes\n"
          "    adam.safetensors  4,192 bytes\n"
          "    extra.safetensors  4,135 bytes\n");
    CHECK(content(world / "one/LATEST") == "step-0000000009-g00000001\n");
    auto large = some_state(9);
    large[0] = {"embed.weight", llmmem::safetensors_type::f32, {300, 1000}, {}};
    large[0].bytes.resize(1'200'000);
    large[3] = {"head.weight", llmmem::safetensors_type::f32, {300, 1000}, {}};
    large[3].bytes.resize(1'200'000, std::byte{7});
    save_state(world / "large", 9, large, {.world = 3, .how = saved_as::columns, .has_extras = false});
    const json done = world.json({"convert", "DIR/large", "DIR/shards", "--max-shard-mib", "1"});
    CHECK(
        done["from"] ==
        json{{"folder", "DIR/large"}, {"name", "step-0000000009-g00000001"}, {"step", 9}, {"generation", 1}});
    CHECK(done["to"]["folder"] == "DIR/shards");
    CHECK(done["world"] == 1);
    CHECK(done["tensors"] == 7);
    CHECK(done["bytes"] == 2'416'898);
    CHECK(done["files"] == json::parse(R"([{"name": "model-00001-of-00004.safetensors", "bytes": 1204096},
            {"name": "model-00002-of-00004.safetensors", "bytes": 4154},
            {"name": "model-00003-of-00004.safetensors", "bytes": 1204096},
            {"name": "model-00004-of-00004.safetensors", "bytes": 4110},
            {"name": "model.safetensors.index.json", "bytes": 442}])"));
    const json index =
        json::parse(content(world / "shards/step-0000000009-g00000001/model.safetensors.index.json"));
    CHECK(index["metadata"]["total_size"] == 2'400'072);
    CHECK(index["weight_map"]["head.weight"] == "model-00003-of-00004.safetensors");
    CHECK(all_identical(world.json({"diff", "DIR/large", "DIR/shards"})));
  }

  TEST_CASE("with a prefix the result has only those tensors, and no extras") {
    const world_folder world;
    save_state(world / "three", 9, some_state(9), {.world = 3});
    static_cast<void>(world.text({"convert", "DIR/three", "DIR/some", "--tensor-prefix", "layer."}));
    std::vector<std::string> names;
    const json shown = world.json({"show", "DIR/some"});
    for (const json& each : shown["tensors"])
      names.push_back(each["name"]);
    CHECK(names == std::vector<std::string>{"layer.bias", "layer.weight"});
    CHECK(shown["extras"].empty());
    CHECK(world.why({"convert", "DIR/three", "DIR/none", "--tensor-prefix", "x\"y"}) ==
          "checkpoint_tool: no tensor's name begins with \"x\\\"y\"; show names them\n");
    CHECK(!fs::exists(world / "none"));
  }

  TEST_CASE("a damaged checkpoint is not converted, and no checkpoint is left") {
    const world_folder world;
    save_state(world / "three", 9, some_state(9), {.world = 3});
    const std::string file = world / "three/step-0000000009-g00000001/adam-rank-00003-of-00003.safetensors";
    flip(file, 4100);
    const std::string said = world.why({"convert", "DIR/three", "DIR/one"});
    CHECK(
        said.starts_with("checkpoint_tool: DIR/three/step-0000000009-g00000001/"
                         "adam-rank-00003-of-00003.safetensors: bytes 4096 to "));
    CHECK(world.text({"list", "DIR/one"}) == "DIR/one\n  no checkpoints\n");
    // Mended, it goes into the same folder, which has nothing but a lock in it.
    flip(file, 4100);
    CHECK(world.run({"convert", "DIR/three", "DIR/one"}).status == exit_status::success);
    CHECK(world.why({"convert", "DIR/three", "DIR/three"}) ==
          "checkpoint_tool: DIR/three: is there and not empty: it has \"step-0000000009-g00000001\"; give a "
          "new "
          "folder\n");
  }
}

TEST_SUITE("prune") {
  TEST_CASE("a real run removes what the dry run named") {
    const world_folder world;
    for (const std::uint64_t step : {10U, 15U, 20U, 25U, 30U})
      save_state(world / "run", step, some_state(step));
    fs::create_directory(world / "run/.tmp-step-0000000035-g00000006-1");
    flip(world / "run/step-0000000025-g00000004/MANIFEST.json", 30);
    const auto expected = [](const char* goes, const char* summary) {
      return std::string("DIR/run\n") +
             "  step-0000000030-g00000005    12.3 KiB  stays\n"
             "  step-0000000025-g00000004         0 B  incomplete: left as it is, verify shows why\n"
             "  step-0000000020-g00000003    12.3 KiB  stays\n"
             "  step-0000000015-g00000002    12.3 KiB  " +
             goes +
             "\n"
             "  step-0000000010-g00000001    12.3 KiB  stays\n"
             "  .tmp-step-0000000035-g00000006-1             " +
             goes + "\n" + summary;
    };
    const std::vector<std::string> asked{"prune", "DIR/run", "--keep-last", "1", "--keep-every", "10"};
    auto dry = asked;
    dry.push_back("--dry-run");
    CHECK(world.text(dry) == expected("would go", "1 checkpoint would go, 12.3 KiB\n"));
    CHECK(world.json(dry)["dry_run"] == true);
    CHECK(fs::exists(world / "run/step-0000000015-g00000002"));
    CHECK(fs::exists(world / "run/.tmp-step-0000000035-g00000006-1"));
    CHECK(!fs::exists(world / "run/LATEST"));
    CHECK(world.text(asked) == expected("is gone", "1 checkpoint removed, 12.3 KiB\n"));
    CHECK(!fs::exists(world / "run/step-0000000015-g00000002"));
    CHECK(!fs::exists(world / "run/.tmp-step-0000000035-g00000006-1"));
    CHECK(fs::exists(world / "run/step-0000000025-g00000004"));
    CHECK(world.json({"prune", "DIR/run", "--keep-last", "2"}) ==
          json::parse(R"({"folder": "DIR/run", "dry_run": false, "freed_bytes": 12565, "left_over": [],
            "checkpoints": [
              {"name": "step-0000000030-g00000005", "step": 30, "generation": 5, "bytes": 12565, "needed_by": [], "fate": "stays"},
              {"name": "step-0000000025-g00000004", "step": 25, "generation": 4, "bytes": 0, "needed_by": [], "fate": "not_whole"},
              {"name": "step-0000000020-g00000003", "step": 20, "generation": 3, "bytes": 12565, "needed_by": [], "fate": "stays"},
              {"name": "step-0000000010-g00000001", "step": 10, "generation": 1, "bytes": 12565, "needed_by": [], "fate": "goes"}
            ]})"));
  }

  TEST_CASE("a dry run names exactly what a real run removes, for any options") {
    for (std::uint64_t last = 1; last <= 5; ++last) {
      for (const std::uint64_t every : {0U, 2U, 3U}) {
        CAPTURE(last);
        CAPTURE(every);
        const world_folder world;
        for (std::uint64_t step = 1; step <= 6; ++step)
          save_state(world / "run", step, {some_state()[4]}, {.has_extras = false});
        std::vector<std::string> asked{"prune", "DIR/run", "--keep-last", std::to_string(last)};
        if (every != 0) asked.insert(asked.end(), {"--keep-every", std::to_string(every)});
        const json did = prune_as_foretold(world, asked);
        for (const json& each : did["checkpoints"])
          CHECK(fs::exists(world / ("run/" + each["name"].get<std::string>())) == (each["fate"] == "stays"));
      }
    }
  }

  TEST_CASE("while another process commits only a dry run is possible") {
    const world_folder world(save_three);
    llmmem::posix_storage<> storage(world / "run");
    const llmmem::checkpoint_folder folder(storage);
    CHECK(world.run({"prune", "DIR/run", "--keep-last", "2", "--dry-run"}).status == exit_status::success);
    CHECK(world.why({"prune", "DIR/run", "--keep-last", "2"}) ==
          "checkpoint_tool: DIR/run/LOCK: another process commits to this folder; stop it, or use another "
          "folder\n");
    CHECK(fs::exists(world / ("run/" + std::string(name_1))));
  }
}

TEST_CASE("wrong usage is reported with valid usage") {
  const world_folder world;
  const auto wrong = [&](const std::vector<std::string>& arguments) {
    return world.why(arguments, exit_status::wrong_usage);
  };
  const auto said = [](const std::string& text) { return "checkpoint_tool: " + text + hint; };
  CHECK(wrong({}) ==
        said("nothing to do; give a command: list, show, verify, diff, convert, copy, compact or prune"));
  CHECK(wrong({"--json"}) ==
        said("nothing to do; give a command: list, show, verify, diff, convert, copy, compact or prune"));
  CHECK(wrong({"list", "a", "verify", "b"}) == said("list and verify are two commands; give one"));
  CHECK(wrong({"list"}) == said("list needs DIR, a folder of checkpoints"));
  CHECK(wrong({"show"}) == said("show needs DIR, a folder of checkpoints"));
  CHECK(wrong({"verify", "--sizes"}) == said("verify needs DIR, a folder of checkpoints"));
  CHECK(wrong({"diff"}) == said("diff needs A and B, two checkpoints"));
  CHECK(wrong({"diff", "a"}) == said("diff needs B, the checkpoint to compare with"));
  CHECK(wrong({"convert"}) == said("convert needs FROM, a checkpoint, and TO, a new folder"));
  CHECK(wrong({"convert", "a"}) == said("convert needs TO, a new folder"));
  CHECK(wrong({"copy"}) == said("copy needs FROM, a checkpoint, and TO, a folder"));
  CHECK(wrong({"copy", "a"}) == said("copy needs TO, a folder"));
  CHECK(wrong({"compact"}) == said("compact needs DIR, a folder of checkpoints"));
  CHECK(wrong({"convert", "a", "b", "--world", "0"}) ==
        said("--world \"0\": must be a whole number from 1 to 65536"));
  CHECK(wrong({"convert", "a", "b", "--world", "2", "--partition", "diagonal"}) ==
        said("--partition \"diagonal\": no such partition; there are flat, rows, columns and replicated"));
  CHECK(wrong({"convert", "a", "b", "--partition", "rows"}) ==
        said("--partition is of several ranks; add --world M"));
  CHECK(wrong({"convert", "a", "b", "--max-shard-mib", "-1"}) ==
        said("--max-shard-mib \"-1\": must be a whole number from 1 to 1073741824"));
  CHECK(wrong({"prune"}) == said("prune needs DIR, a folder of checkpoints"));
  CHECK(wrong({"prune", "a"}) ==
        said("prune needs to know what stays; give --keep-last N or --keep-every K"));
  CHECK(wrong({"prune", "a", "--keep-last", "0"}) ==
        said("--keep-last \"0\": must be a whole number from 1 to 1000000000000"));
  CHECK(wrong({"prune", "a", "--keep-every", "all"}) ==
        said("--keep-every \"all\": must be a whole number from 1 to 1000000000000"));
  CHECK(wrong({"frobnicate"}).find("frobnicate") != std::string::npos);
  CHECK(wrong({"list", "a", "b"}).find("b") != std::string::npos);
  CHECK(wrong({"list", "a", "--sizes"}).find("--sizes") != std::string::npos);
}

TEST_CASE("the help text names every command, and a command's help its options") {
  const world_folder world;
  const std::string help = world.text({"--help"});
  for (const char* command :
       {"list", "show", "verify", "diff", "convert", "copy", "compact", "prune", "--json"})
    CHECK(help.find(command) != help.npos);
  const std::string of_convert = world.text({"convert", "--help"});
  for (const char* option : {"FROM", "TO", "--world", "--partition", "--max-shard-mib", "--tensor-prefix"})
    CHECK(of_convert.find(option) != of_convert.npos);
}
