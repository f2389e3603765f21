// The program itself, of whose processes more are killed at once than the redundancy bears.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "support/child_process.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem_tests;

namespace {

const std::string program = std::string(LLMMEM_EXAMPLES_DIR) + "/survive_failures";

std::vector<std::string> run_in(const temporary_folder& folder, const std::string& steps) {
  return {"--layers",
          "1",
          "--width",
          "16",
          "--heads",
          "2",
          "--context",
          "8",
          "--steps",
          steps,
          "--text",
          LLMMEM_SOURCE_DIR "/README.md",
          "--json",
          "--seed",
          "3",
          "--checkpoint-every",
          "20",
          "--checkpoint-dir",
          folder.file("saved")};
}

/// What the program has said up to now.
struct progress {
  std::uint64_t step = 0;
  std::uint64_t alive = 0;
  std::map<std::uint64_t, ::pid_t> pids{};  // the last that each rank had

  explicit progress(const std::string& notes) {
    for (const std::string& line : lines_of(notes)) {
      if (line.rfind("rank ", 0) == 0) {
        char* end = nullptr;
        const std::uint64_t rank = std::strtoull(line.c_str() + 5, &end, 10);
        pids[rank] = static_cast<::pid_t>(std::strtol(end + 5, nullptr, 10));
      } else if (line.size() > 20 && line.find("/4 ") != std::string::npos) {
        step = std::strtoull(line.c_str(), nullptr, 10);
        alive = static_cast<std::uint64_t>(line[line.find("/4 ") - 1] - '0');
      }
    }
  }
};

/// Waits until all live and have come to a step.
progress wait_for(const std::string& notes, std::uint64_t step) {
  for (int i = 0; i < 60'000; ++i) {
    const progress now(contents_of(notes));
    if (now.step >= step && now.alive == 4 && now.pids.size() == 4) return now;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  FAIL("it did not come to step " << step << ":\n" << contents_of(notes));
  return progress("");
}

nlohmann::json result_of(const temporary_folder& folder, child_process& child) {
  const ending end = child.wait();
  CAPTURE(contents_of(folder.file("notes")));
  REQUIRE(end.status == 0);
  const auto json = nlohmann::json::parse(contents_of(folder.file("out")));
  CHECK(json["identical"] == true);
  CHECK(json["digest"] == json["reference_digest"]);
  return json;
}

}  // namespace

TEST_CASE(
    "after three of four processes are killed at once, and then all, the job continues from its files") {
  const temporary_folder folder;
  child_process child(program, run_in(folder, "1200"), folder.file("out"), folder.file("notes"));
  const progress first = wait_for(folder.file("notes"), 120);
  for (const std::uint64_t rank : {0U, 1U, 3U})
    ::kill(first.pids.at(rank), SIGKILL);
  const progress second = wait_for(folder.file("notes"), 480);
  CHECK(second.pids.at(0) != first.pids.at(0));
  for (const auto& [rank, pid] : second.pids)
    ::kill(pid, SIGKILL);
  const nlohmann::json json = result_of(folder, child);
  CHECK(json["deaths"].size() == 7);
  REQUIRE(json["restored_from"].size() >= 2);
  for (const auto& each : json["restored_from"])
    CHECK(each.get<std::uint64_t>() % 20 == 0);
  CHECK(json["restored_from"].front() >= 80);
  CHECK(json["restored_from"].back() >= 440);
  CHECK(json["steps_lost"] <= 40 * json["restored_from"].size());

  child_process again(program, run_in(folder, "1210"), folder.file("out"), folder.file("notes"));
  CHECK(result_of(folder, again)["restored_from"] == nlohmann::json({1200}));
  CHECK(contents_of(folder.file("notes"))
            .rfind("continues from step 1200 in " + folder.file("saved") + "\n", 0) == 0);
}

TEST_CASE("a program killed with all its ranks continues from its newest checkpoint") {
  const temporary_folder folder;
  {
    child_process child(program, run_in(folder, "900"), folder.file("out"), folder.file("notes"));
    static_cast<void>(wait_for(folder.file("notes"), 300));
    child.send(SIGKILL);
    static_cast<void>(child.wait());
  }
  child_process again(program, run_in(folder, "900"), folder.file("out"), folder.file("notes"));
  const nlohmann::json json = result_of(folder, again);
  REQUIRE(json["restored_from"].size() == 1);
  CHECK(json["restored_from"].front() >= 80);
  CHECK(json["steps_lost"] == 0);
}
