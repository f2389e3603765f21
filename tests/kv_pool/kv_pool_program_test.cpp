// The program itself: processes that pass blocks, one of which is killed.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "support/child_process.hpp"
#ifdef LLMMEM_TESTS_REDIS
#include "support/redis_server.hpp"
#endif
#include "support/temporary_folder.hpp"

using namespace llmmem_tests;

namespace {

const std::string program = std::string(LLMMEM_EXAMPLES_DIR) + "/kv_pool";

struct finished {
  ending how;
  nlohmann::json out;
  std::string notes;
};

finished run(std::vector<std::string> arguments) {
  const temporary_folder folder;
  const std::string out = (folder.path() / "out").string();
  const std::string notes = (folder.path() / "notes").string();
  child_process child(program, arguments, out, notes);
  finished result{.how = child.wait(), .out = {}, .notes = contents_of(notes)};
  const std::string text = contents_of(out);
  if (!text.empty() && text.front() == '{') result.out = nlohmann::json::parse(text);
  return result;
}

const std::vector<std::string> small{"--json", "--requests", "60", "--block-bytes", "1024"};

std::uint64_t sum(const nlohmann::json& nodes, const char* role, const char* figure) {
  std::uint64_t total = 0;
  for (const auto& each : nodes)
    total += each["role"] == role ? each[figure].get<std::uint64_t>() : 0;
  return total;
}

}  // namespace

TEST_CASE("decode processes fetch the blocks that prefill processes compute") {
  const finished came = run(small);
  REQUIRE(came.how.status == 0);
  CHECK(came.out["answered"] == 60);
  CHECK(came.out["wrong_blocks"] == 0);
  CHECK(came.out["verified_blocks"].get<std::uint64_t>() > 500);
  const auto& nodes = came.out["nodes"];
  REQUIRE(nodes.size() == 4);
  CHECK(sum(nodes, "prefill", "requests") == 60);
  CHECK(sum(nodes, "decode", "requests") == 60);
  CHECK(sum(nodes, "prefill", "served_blocks") > 500);
  // What decode computes is its answers, and the ends of prompts that fill no block.
  CHECK(sum(nodes, "decode", "computed_tokens") <= 60 * (32 + 16));
}

TEST_CASE("a process computes what is costly to move") {
  auto asked = small;
  asked.insert(asked.end(), {"--costs", "link=1000000000,latency=2000000,compute=10000"});
  const finished came = run(asked);
  REQUIRE(came.how.status == 0);
  CHECK(came.out["answered"] == 60);
  CHECK(came.out["wrong_blocks"] == 0);
  // The latency of a fetch is the time of 200 tokens.
  CHECK(sum(came.out["nodes"], "decode", "costly_tokens") > 0);
  CHECK(sum(came.out["nodes"], "decode", "fetched_tokens") > 0);
  asked.back() = "link=1,latency=1,compute=1";
  const finished slow = run(asked);
  REQUIRE(slow.how.status == 0);
  CHECK(sum(slow.out["nodes"], "prefill", "served_blocks") == 0);
}

TEST_CASE("a killed prefill process loses its blocks and no answer, and its replacement serves again") {
  // From the middle request on all wait for the kill, and with --restart for the replacement: how busy the
  // machine is makes no difference.
  const finished killed = run({"--json", "--requests", "60", "--block-bytes", "1024", "--kill-at", "10"});
  REQUIRE(killed.how.status == 0);
  CHECK(killed.notes.find("killed prefill node 0 after") != std::string::npos);
  CHECK(killed.out["answered"] == 60);
  CHECK(killed.out["wrong_blocks"] == 0);
  CHECK(killed.out["nodes"][0]["killed"] == true);
  CHECK(killed.out["nodes"][0]["requests"].get<std::uint64_t>() <= 15);
  const finished restarted =
      run({"--json", "--requests", "60", "--block-bytes", "1024", "--kill-at", "1", "--restart"});
  REQUIRE(restarted.how.status == 0);
  CHECK(restarted.out["answered"] == 60);
  CHECK(restarted.out["wrong_blocks"] == 0);
  CHECK(restarted.out["nodes"][0]["starts"] == 2);
  CHECK(restarted.out["nodes"][0]["requests"].get<std::uint64_t>() >= 15);  // all that waited for it
}

TEST_CASE("processes read each other's blocks from shared memory and through UCX, also after one is killed") {
  std::vector<std::string> movers{"shared"};
#ifdef LLMMEM_TESTS_UCX
  movers.push_back("ucx");
#endif
  for (const std::string& mover : movers) {
    CAPTURE(mover);
    auto asked = small;
    asked.insert(asked.end(), {"--mover", mover, "--kill-at", "10", "--restart"});
    const finished came = run(asked);
    REQUIRE(came.how.status == 0);
    CHECK(came.out["mover"] == mover);
    CHECK(came.out["answered"] == 60);
    CHECK(came.out["wrong_blocks"] == 0);
    CHECK(sum(came.out["nodes"], "decode", "read_blocks") > 500);
    // What a reader asks for before its owner has put it into the index.
    CHECK(sum(came.out["nodes"], "prefill", "served_blocks") <
          sum(came.out["nodes"], "decode", "read_blocks"));
  }
}

#ifdef LLMMEM_TESTS_REDIS

TEST_CASE("processes find each other's blocks by a directory in Redis, and without one only their own") {
  auto asked = small;
  asked.insert(asked.end(), {"--redis", "/nowhere/s"});
  const finished alone = run(asked);
  REQUIRE(alone.how.status == 0);
  CHECK(alone.out["answered"] == 60);
  CHECK(alone.out["directory"] == "redis");
  CHECK(sum(alone.out["nodes"], "decode", "fetched_tokens") == 0);
  CHECK(alone.notes.find("redis_directory (unix:/nowhere/s): the server cannot be reached (errno 2") !=
        std::string::npos);
  if (redis_program().empty()) {
    MESSAGE("skipped: no redis-server on PATH (Debian: redis-server)");
    return;
  }
  redis_server server;
  asked.back() = server.socket();
  const finished came = run(asked);
  REQUIRE(came.how.status == 0);
  CHECK(came.out["answered"] == 60);
  CHECK(came.out["wrong_blocks"] == 0);
  CHECK(sum(came.out["nodes"], "prefill", "served_blocks") > 500);
}

#endif

TEST_CASE("decode ranks of another split get each layer of a prompt, and every byte of it is right") {
  const finished came = run({"--json", "--requests", "12", "--block-bytes", "1024", "--prefill-split",
                             "tp=2,cp=2,interleave=4", "--decode-split", "tp=4,block=32"});
  REQUIRE(came.how.status == 0);
  CHECK(came.out["answered"] == 12);
  CHECK(came.out["wrong_blocks"] == 0);
  CHECK(came.out["decode_split"] == "tp=4,cp=1,interleave=1,block=32");
  const auto& nodes = came.out["nodes"];
  REQUIRE(nodes.size() == 8);
  for (const auto& each : nodes)
    CHECK(each["layers"] == 12 * 4);
  CHECK(sum(nodes, "prefill", "handover_bytes") == sum(nodes, "decode", "handover_bytes"));
  CHECK(sum(nodes, "decode", "computed_tokens") == 4 * 12 * 32);  // the answers, and no prompt
  // A prompt has 784 to 1,552 tokens of 1024 / 16 bytes, in blocks of 32 on each of four ranks.
  CHECK(sum(nodes, "decode", "handover_bytes") >= 12 * 784 * 64);
  CHECK(came.out["verified_blocks"].get<std::uint64_t>() >= 4 * 12 * 25);
}

TEST_CASE("decode ranks compute prompts while a prefill rank is missing, and receive them again later") {
  const std::vector<std::string> splits{"--prefill-split", "tp=2", "--decode-split", "block=32"};
  const auto run_split = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), splits.begin(), splits.end());
    return run(arguments);
  };
  const finished killed = run_split({"--json", "--requests", "60", "--block-bytes", "512", "--kill-at", "3"});
  REQUIRE(killed.how.status == 0);
  CHECK(killed.out["answered"] == 60);
  CHECK(killed.out["wrong_blocks"] == 0);
  CHECK(killed.out["nodes"][0]["killed"] == true);
  CHECK(killed.out["nodes"][2]["layers"].get<std::uint64_t>() <= 31 * 4);
  CHECK(sum(killed.out["nodes"], "decode", "computed_tokens") > 60 * 32);
  const finished restarted =
      run_split({"--json", "--requests", "40", "--block-bytes", "512", "--kill-at", "3", "--restart"});
  REQUIRE(restarted.how.status == 0);
  CHECK(restarted.out["answered"] == 40);
  CHECK(restarted.out["wrong_blocks"] == 0);
  CHECK(restarted.out["nodes"][0]["starts"] == 2);
  CHECK(restarted.out["nodes"][0]["requests"].get<std::uint64_t>() >= 20);
}

TEST_CASE("impossible options are refused with a sentence") {
  const auto refused = [](const std::vector<std::string>& arguments, const char* text) {
    const finished came = run(arguments);
    CHECK(came.how.status == 2);
    CHECK(came.notes.find(text) != std::string::npos);
  };
  refused({"--prefill", "0"}, "--prefill \"0\": must be a whole number from 1 to 16");
  refused({"--block-bytes", "100"}, "--block-bytes \"100\": must be a multiple of 64");
  refused({"--prefill-split", "tp=3"}, "--prefill-split \"tp=3\": tp=3 must divide the model's 8 heads");
  refused({"--decode-split", "tp=8,cp=4"}, "tp x cp are 32 processes, and at most 16 may have a role");
  refused({"--decode-split", "interleave=3"}, "block=16 is not a whole number of runs of interleave=3");
  refused({"--decode-split", "heads=3"}, "each part is tp=N, cp=N, interleave=N or block=N\n");
  refused({"--decode-split", "tp=2", "--prefill", "3"}, "--prefill is about the pool");
  refused({"--decode-split", "tp=2", "--block-bytes", "64"},
          "\"64\": must be a multiple of 512 for a handover");
  refused({"--redis", "/s", "--decode-split", "tp=2"}, "--redis is about the pool");
  refused({"--mover", "shared", "--decode-split", "tp=2"}, "--mover is about the pool");
  refused({"--mover", "pigeon"}, "--mover \"pigeon\": must be message, shared or ucx");
  refused({"--restart"}, "--restart is about a killed process; give --kill-at N");
}
