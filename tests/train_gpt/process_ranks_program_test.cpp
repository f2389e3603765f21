// The program itself, on ranks that are processes.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "support/child_process.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem_tests;

namespace {

const std::string program = std::string(LLMMEM_EXAMPLES_DIR) + "/train_gpt";

struct ended_run {
  ending how;
  std::string out;
  std::string notes;
};

ended_run run(const std::vector<std::string>& more) {
  std::vector<std::string> all{
      "--layers", "2",  "--width", "12", "--heads",   "2", "--context", "7",
      "--batch",  "12", "--steps", "3",  "--threads", "1", "--text",    LLMMEM_SOURCE_DIR "/README.md",
      "--json"};
  all.insert(all.end(), more.begin(), more.end());
  const temporary_folder folder;
  child_process child(program, all, folder.file("out"), folder.file("notes"));
  const ending how = child.wait();
  return {how, contents_of(folder.file("out")), contents_of(folder.file("notes"))};
}

nlohmann::json json_of(const std::vector<std::string>& more) {
  const ended_run done = run(more);
  CAPTURE(done.notes);
  REQUIRE(done.how.status == 0);
  return nlohmann::json::parse(done.out);
}

}  // namespace

TEST_SUITE("process_ranks") {
  TEST_CASE("ranks in processes get the bits of ranks in threads, and send and keep the same bytes") {
    for (const std::string ranks : {"2", "3", "4"}) {
      const auto threads = json_of({"--ranks", ranks, "--parallel", "data"});
      for (const std::string kind : {"data", "zero1", "zero2", "zero3"}) {
        CAPTURE(ranks);
        CAPTURE(kind);
        const auto processes = json_of({"--ranks", ranks, "--parallel", kind, "--transport", "socket"});
        CHECK(processes["losses"] == threads["losses"]);
        CHECK(processes["digest"] == threads["digest"]);
        const auto same_kind = json_of({"--ranks", ranks, "--parallel", kind, "--transport", "thread"});
        REQUIRE(processes["ranks"].size() == std::stoul(ranks));
        for (std::size_t i = 0; i < processes["ranks"].size(); ++i) {
          for (const char* const what : {"kept_state_bytes", "peak_state_bytes", "bytes_sent"})
            CHECK(processes["ranks"][i][what] == same_kind["ranks"][i][what]);
        }
      }
    }
  }

  TEST_CASE("each wrong option of processes has its own error") {
    const std::string hint = "\nrun train_gpt --help for the options\n";
    const ended_run unknown = run({"--ranks", "2", "--transport", "pigeon"});
    CHECK(unknown.how.status == 2);
    CHECK(unknown.notes == "train_gpt: --transport: 'pigeon' is unknown; there are thread and socket" + hint);
    const ended_run alone = run({"--transport", "socket"});
    CHECK(alone.how.status == 2);
    CHECK(alone.notes == "train_gpt: --transport is of ranks; add --ranks N" + hint);
  }
}
