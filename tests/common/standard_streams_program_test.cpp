// The programs themselves, started with output that is full or closed.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "support/child_process.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem_tests;

namespace {

const std::vector<std::string> programs{
    "paged_sequence",      "allocation_trace --help", "cache_journal --help",    "checkpoint_tool --help",
    "layer_groups --help", "replay_trace --help",     "survive_failures --help", "train_gpt --help"};

struct ended_run {
  ending how;
  std::string out;
  std::string notes;
};

/// Of a program with the redirections of a shell.
ended_run run(const std::string& command, const std::string& redirections) {
  const temporary_folder folder;
  child_process child("/bin/sh",
                      {"-c", "exec " + std::string(LLMMEM_EXAMPLES_DIR) + "/" + command + " " + redirections},
                      folder.file("out"), folder.file("notes"));
  const ending how = child.wait();
  return {how, contents_of(folder.file("out")), contents_of(folder.file("notes"))};
}

}  // namespace

TEST_SUITE("standard_streams") {
  TEST_CASE("an unwritable result is reported as a failure, even if all else succeeded") {
    for (const std::string& command : programs) {
      CAPTURE(command);
      for (const std::string where : {">/dev/full", ">&-", "0<&- >&-"}) {
        CAPTURE(where);
        const ended_run done = run(command, where);
        CHECK(done.how.status == 1);
        CHECK(done.notes.find(where == ">/dev/full" ? "No space left on device" : "Bad file descriptor") !=
              std::string::npos);
      }
    }
  }

  TEST_CASE("the result is complete even if notes in addition to it are lost") {
    for (const std::string& command : programs) {
      CAPTURE(command);
      const ended_run whole = run(command, "");
      CHECK(whole.how.status == 0);
      CHECK(whole.out.size() > 100);
      for (const std::string where : {"2>/dev/full", "2>&-", "0<&- 2>&-"}) {
        CAPTURE(where);
        const ended_run done = run(command, where);
        CHECK(done.how.status == 0);
        CHECK(done.out == whole.out);
      }
    }
  }

  TEST_CASE("a training run continues if no reader takes its progress and its notes of saves") {
    const temporary_folder folder;
    const std::string command =
        "train_gpt --layers 1 --width 16 --heads 1 --context 8 --batch 1 --steps 3 --threads 1 "
        "--checkpoint-every 1 --text " LLMMEM_SOURCE_DIR "/README.md --checkpoint-dir ";
    const ended_run heard = run(command + folder.file("heard"), "");
    CHECK(heard.how.status == 0);
    CHECK(heard.notes.find("committed 3 ") != std::string::npos);
    for (const std::string where : {"2>/dev/full", "2>&-"}) {
      CAPTURE(where);
      const ended_run unheard = run(command + folder.file("unheard" + std::to_string(where.size())), where);
      CHECK(unheard.how.status == 0);
      CHECK_FALSE(unheard.out.empty());
    }
  }
}
