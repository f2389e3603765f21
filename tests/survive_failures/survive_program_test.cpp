// The program itself: processes that are killed by it, by each other, and from outside.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "support/child_process.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem_tests;

namespace {

const std::string program = std::string(LLMMEM_EXAMPLES_DIR) + "/survive_failures";

std::vector<std::string> run_of(const std::vector<std::string>& more) {
  std::vector<std::string> all{"--layers", "1",         "--width", "16",     "--heads",
                               "2",        "--context", "8",       "--text", LLMMEM_SOURCE_DIR "/README.md",
                               "--json"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

/// `rank R pid P`, in the order in which they were started.
struct started_rank {
  std::uint32_t rank = 0;
  pid_t pid = 0;
};

std::vector<started_rank> starts_in(const std::string& notes) {
  std::vector<started_rank> all;
  for (const std::string& line : lines_of(notes)) {
    started_rank one;
    if (std::sscanf(line.c_str(), "rank %u pid %d", &one.rank, &one.pid) == 2) all.push_back(one);
  }
  return all;
}

/// The steps that a run's table has come to.
std::uint64_t step_in(const std::string& notes) {
  std::uint64_t step = 0;
  for (const std::string& line : lines_of(notes)) {
    char* end = nullptr;
    const std::uint64_t number = std::strtoull(line.c_str(), &end, 10);
    if (end != line.c_str()) step = std::max(step, number);
  }
  return step;
}

/// A run with its output in a folder.
class running {
 public:
  explicit running(const std::vector<std::string>& arguments)
      : child_(program, run_of(arguments), folder_.file("out"), folder_.file("notes")) {}

  [[nodiscard]] std::string notes() const { return contents_of(folder_.file("notes")); }
  /// The process that has the rank's seat.
  [[nodiscard]] pid_t pid_of(std::uint32_t rank) const {
    pid_t pid = 0;
    for (const started_rank& each : starts_in(notes()))
      if (each.rank == rank) pid = each.pid;
    return pid;
  }
  /// Waits until the table has the row of this step; it has twenty rows, whatever the number of steps.
  void wait_for_step(std::uint64_t step) const {
    for (int i = 0; i < 20'000 && step_in(notes()) < step; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    REQUIRE(step_in(notes()) >= step);
  }
  [[nodiscard]] ending wait() { return child_.wait(); }
  [[nodiscard]] std::string out() const { return contents_of(folder_.file("out")); }
  void send(int signal) const { child_.send(signal); }

 private:
  temporary_folder folder_{};
  child_process child_;
};

nlohmann::json result_of(running& run) {
  const ending how = run.wait();
  const std::string notes = run.notes();
  CAPTURE(notes);
  REQUIRE(how.status == 0);
  return nlohmann::json::parse(run.out());
}

}  // namespace

TEST_SUITE("survive_failures") {
  TEST_CASE("with every redundancy, the requested faults leave the weights unchanged") {
    std::set<std::string> digests;
    for (const std::string redundancy : {"mirror:2", "parity:3", "rs:2+2", "compute"}) {
      CAPTURE(redundancy);
      running run({"--steps", "240", "--faults", "4", "--redundancy", redundancy, "--restart-ms", "5",
                   "--silence-ms", "200"});
      const nlohmann::json result = result_of(run);
      CHECK(result["identical"] == true);
      CHECK(result["faults"] == 4);
      CHECK(result["redundancy"] == redundancy);
      CHECK(result["deaths"].size() >= 2);
      CHECK(result["steps_repeated"] <= result["deaths"].size());
      CHECK(result["joined"] <= result["deaths"].size());
      const auto starts = starts_in(run.notes());
      CHECK(starts.size() >= 4 + result["joined"].get<std::size_t>());
      for (const auto& death : result["deaths"]) {
        // It was told of when it was started.
        CHECK(std::ranges::any_of(starts, [&](const started_rank& each) {
          return each.pid == death["pid"] && each.rank == death["rank"];
        }));
        CHECK((death["signal"] == SIGKILL || death["signal"] == SIGSTOP));
      }
      for (const char* const part : {"detect", "agree", "fetch", "verify", "resume"})
        CHECK(result["recovery_ms"][part].get<double>() >= 0);
      digests.insert(result["digest"]);
    }
    running quiet({"--steps", "240", "--faults", "0"});
    const nlohmann::json result = result_of(quiet);
    CHECK(result["deaths"].empty());
    CHECK(result["recovery_ms"]["detect"].is_null());
    digests.insert(result["digest"]);
    CHECK(digests.size() == 1);
  }

  TEST_CASE("the weights stay the same after kills from outside at any moment, one rank after another") {
    for (const auto seed : seeds(2)) {
      CAPTURE(seed);
      random_numbers random(seed);
      running run({"--steps", "400", "--restart-ms", "5", "--silence-ms", "200"});
      std::set<pid_t> killed;
      for (std::uint64_t i = 1; i <= 4; ++i) {
        run.wait_for_step(80 * i);
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(20'000U)));
        const pid_t pid = run.pid_of(random.below(4U));
        REQUIRE(pid > 0);
        if (::kill(pid, i == 4 ? SIGSTOP : SIGKILL) == 0) killed.insert(pid);
      }
      const nlohmann::json result = result_of(run);
      CHECK(result["identical"] == true);
      CHECK(result["faults"] == 0);
      std::set<pid_t> died;
      for (const auto& death : result["deaths"])
        died.insert(death["pid"].get<pid_t>());
      for (const pid_t pid : killed)
        CHECK(died.contains(pid));
    }
  }

  TEST_CASE(
      "if more ranks die at once than the redundancy tolerates, the program ends with an error and leaves no "
      "process") {
    running run({"--steps", "4000"});
    run.wait_for_step(200);
    std::vector<pid_t> all;
    for (std::uint32_t rank = 0; rank < 4; ++rank)
      all.push_back(run.pid_of(rank));
    for (std::size_t rank = 0; rank < 3; ++rank)
      CHECK(::kill(all[rank], SIGKILL) == 0);
    CHECK(run.wait().status == 1);
    CHECK(run.out().empty());
    const std::string notes = run.notes();
    CAPTURE(notes);
    CHECK(notes.find(" is lost: ") != std::string::npos);
    CHECK(notes.find(
              "mirror:2 bears the loss of any 1 of a group at once. Take a redundancy that bears more") !=
          std::string::npos);
    for (const started_rank& each : starts_in(notes))
      CHECK(::kill(each.pid, 0) != 0);
  }

  TEST_CASE("the program continues to a complete result if its reports cannot be written") {
    for (const std::string notes : {"2>/dev/full", "2>&-", "0<&- 2>&-"}) {
      CAPTURE(notes);
      const temporary_folder folder;
      std::string line = "exec " + program;
      for (const std::string& each : run_of({"--ranks", "3", "--steps", "40", "--faults", "2", "--restart-ms",
                                             "5", "--silence-ms", "200"}))
        line += " '" + each + "'";
      child_process child("/bin/sh", {"-c", line + " " + notes}, folder.file("out"), folder.file("notes"));
      CHECK(child.wait().status == 0);
      CHECK(nlohmann::json::parse(contents_of(folder.file("out")))["identical"] == true);
    }
  }

  TEST_CASE("if only a fresh rank without a state is left, the program ends with an error") {
    running run({"--ranks", "3", "--steps", "20000", "--restart-ms", "20"});
    run.wait_for_step(1000);
    const pid_t first = run.pid_of(0);
    CHECK(::kill(first, SIGKILL) == 0);
    pid_t fresh = first;
    for (int i = 0; i < 20'000 && fresh == first; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      fresh = run.pid_of(0);
    }
    REQUIRE(fresh != first);
    // It lives all the while, and is not heard before the others are dead.
    CHECK(::kill(fresh, SIGSTOP) == 0);
    CHECK(::kill(run.pid_of(1), SIGKILL) == 0);
    CHECK(::kill(run.pid_of(2), SIGKILL) == 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(::kill(fresh, SIGCONT) == 0);
    CHECK(run.wait().status == 1);
    const std::string notes = run.notes();
    CAPTURE(notes);
    CHECK(notes.find(" is lost: ") != std::string::npos);
  }

  TEST_CASE("a program asked to end leaves no process and no folder behind") {
    for (const int signal : {SIGINT, SIGTERM}) {
      const temporary_folder temporary;
      REQUIRE(::setenv("TMPDIR", temporary.path().c_str(), 1) == 0);
      running run({"--steps", "20000"});
      REQUIRE(::unsetenv("TMPDIR") == 0);
      run.wait_for_step(1000);
      const auto has_sockets = [&] {  // beside the folder of this run's output
        return std::ranges::any_of(
            std::filesystem::directory_iterator(temporary.path()),
            [](const auto& each) { return each.path().filename().string().starts_with("llmmem-ranks-"); });
      };
      CHECK(has_sockets());
      run.send(signal);
      CHECK(run.wait().status == 1);
      const std::string notes = run.notes();
      CHECK(notes.find(signal == SIGINT ? "SIGINT ended it at step " : "SIGTERM ended it at step ") !=
            std::string::npos);
      for (const started_rank& each : starts_in(notes))
        CHECK(::kill(each.pid, 0) != 0);
      CHECK_FALSE(has_sockets());
    }
  }
}
