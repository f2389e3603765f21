// The program itself, killed at random moments and gone on with.
#include <llmmem/checkpoint/names.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "support/child_process.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem_tests;

namespace {

const std::string program = std::string(LLMMEM_EXAMPLES_DIR) + "/train_gpt";
constexpr std::uint64_t steps = 40;

std::vector<std::string> run_of(const std::vector<std::string>& more) {
  std::vector<std::string> all{"--layers",
                               "2",
                               "--width",
                               "32",
                               "--heads",
                               "2",
                               "--context",
                               "16",
                               "--batch",
                               "2",
                               "--steps",
                               std::to_string(steps),
                               "--threads",
                               "1",
                               "--json",
                               "--text",
                               LLMMEM_SOURCE_DIR "/README.md"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

/// What a run said on its notes.
struct said {
  bool resumed = false;  // first of all
  std::uint64_t from = 0;
  std::uint64_t committed = 0;  // the highest step
  std::uint64_t copied = 0;     // likewise
};

said read_notes(const std::string& path) {
  said all;
  bool is_first = true;
  for (const std::string& line : lines_of(contents_of(path))) {
    if (line.rfind("resumed from step ", 0) == 0) {
      CHECK(is_first);
      all.resumed = true;
      all.from = std::strtoull(line.c_str() + 18, nullptr, 10);
    }
    if (line.rfind("committed ", 0) == 0)
      all.committed = std::max<std::uint64_t>(all.committed, std::strtoull(line.c_str() + 10, nullptr, 10));
    if (line.rfind("copied ", 0) == 0)
      all.copied = std::max<std::uint64_t>(all.copied, std::strtoull(line.c_str() + 7, nullptr, 10));
    is_first = false;
  }
  return all;
}

/// A run, once it has ended.
struct ended_run {
  ending end{};
  said notes{};

  /// That it went on from all that had been acknowledged. Killed before it could say so, it says nothing.
  void check_resumed(std::uint64_t acknowledged) const {
    if (notes.resumed) CHECK(notes.from >= acknowledged);
    if (acknowledged != 0 && notes.committed != 0) CHECK(notes.resumed);
  }
};

/// Runs the program, which leaves what it says in `folder`, and kills it somewhere in its first `longest_ms`;
/// without those, lets it come to its end.
ended_run run_in(const temporary_folder& folder, const std::vector<std::string>& arguments,
                 random_numbers& random, std::optional<std::uint64_t> longest_ms) {
  // One that is killed before it has begun must not be taken for the one before.
  for (const char* const name : {"out", "notes"})
    std::ofstream(folder.file(name), std::ios::trunc).flush();
  child_process child(program, arguments, folder.file("out"), folder.file("notes"));
  if (longest_ms) {
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(*longest_ms * 1000)));
    child.send(SIGKILL);
  }
  const ending end = child.wait();
  return {end, read_notes(folder.file("notes"))};
}

/// That the run which left its output in a folder came to the same losses and weights as another.
void check_result(const temporary_folder& folder, const nlohmann::json& uninterrupted) {
  const auto json = nlohmann::json::parse(contents_of(folder.file("out")));
  CHECK(json["losses"].size() == steps + 1);
  CHECK(json["losses"] == uninterrupted["losses"]);
  CHECK(json["digest"] == uninterrupted["digest"]);
}

/// Kills the run again and again, each time somewhere in its first `longest_ms`, until one comes through.
/// @return how many were killed.
std::uint64_t survive(const std::vector<std::string>& run, std::uint64_t seed, std::uint64_t kills,
                      std::uint64_t longest_ms, const nlohmann::json& uninterrupted) {
  const temporary_folder folder;
  auto arguments = run;
  arguments.insert(arguments.end(),
                   {"--checkpoint-dir", folder.file("checkpoints"), "--checkpoint-every", "1", "--resume"});
  random_numbers random(seed);
  std::uint64_t acknowledged = 0;
  std::uint64_t killed = 0;
  for (std::uint64_t i = 0; i <= kills; ++i) {
    const bool is_last = i == kills;
    const auto ended = run_in(folder, arguments, random, is_last ? std::nullopt : std::optional(longest_ms));
    CAPTURE(contents_of(folder.file("notes")));
    ended.check_resumed(acknowledged);
    acknowledged = std::max(acknowledged, ended.notes.committed);
    killed += ended.end.signal == SIGKILL ? 1 : 0;
    if (is_last) {
      REQUIRE(ended.end.status == 0);
      check_result(folder, uninterrupted);
    }
  }
  return killed;
}

/// Changes a byte in the middle of the weights of each checkpoint in a folder.
void damage_all(const std::string& folder) {
  for (const auto& each : std::filesystem::directory_iterator(folder)) {
    const auto weights = each.path() / "model.safetensors";
    if (!each.path().filename().string().starts_with("step-") || !std::filesystem::exists(weights)) continue;
    std::fstream file(weights, std::ios::binary | std::ios::in | std::ios::out);
    const auto middle = static_cast<std::streamoff>(std::filesystem::file_size(weights) / 2);
    char byte = 0;
    file.seekg(middle).get(byte);
    file.seekp(middle).put(static_cast<char>(byte ^ 1));
  }
}

bool has_step(const std::string& folder, std::uint64_t step) {
  for (const auto& each : std::filesystem::directory_iterator(folder)) {
    const auto id = llmmem::read_folder_name(each.path().filename().string());
    if (id && id->step == step) return true;
  }
  return false;
}

/// The same as `survive` with copies: before some runs the local folder is lost, before others damaged.
/// @return how many runs went on from a copy alone.
std::uint64_t survive_losses(const std::vector<std::string>& run, std::uint64_t seed, std::uint64_t kills,
                             std::uint64_t longest_ms, const nlohmann::json& uninterrupted) {
  const temporary_folder folder;
  const std::string local = folder.file("local");
  auto arguments = run;
  arguments.insert(arguments.end(), {"--checkpoint-dir", local, "--checkpoint-copy", folder.file("copy"),
                                     "--checkpoint-every", "1", "--resume"});
  random_numbers random(seed);
  std::uint64_t acknowledged = 0;  // by what is left
  std::uint64_t copied = 0;
  std::uint64_t from_copies = 0;
  for (std::uint64_t i = 0; i <= kills; ++i) {
    const bool is_last = i == kills;
    const std::uint64_t what = i == 0 ? 0 : random.below(3U);
    if (what != 0) {
      if (what == 1) std::filesystem::remove_all(local);
      if (what == 2 && std::filesystem::exists(local)) damage_all(local);
      acknowledged = copied;
    }
    CAPTURE(what);
    const auto ended = run_in(folder, arguments, random, is_last ? std::nullopt : std::optional(longest_ms));
    CAPTURE(contents_of(folder.file("notes")));
    ended.check_resumed(acknowledged);
    from_copies += ended.notes.resumed && what != 0 ? 1 : 0;
    acknowledged = std::max({acknowledged, ended.notes.committed, ended.notes.copied});
    copied = std::max(copied, ended.notes.copied);
    if (is_last) {
      REQUIRE(ended.end.status == 0);
      CHECK(has_step(folder.file("copy"), steps));  // by this run or by one that was killed
      check_result(folder, uninterrupted);
    }
  }
  return from_copies;
}

nlohmann::json uninterrupted_run(const std::vector<std::string>& run) {
  const temporary_folder folder;
  child_process child(program, run, folder.file("out"), folder.file("notes"));
  REQUIRE(child.wait().status == 0);
  return nlohmann::json::parse(contents_of(folder.file("out")));
}

}  // namespace

TEST_CASE(
    "a run killed at any moment resumes from its last acknowledged save, to the same losses and weights") {
  const auto run = run_of({});
  const nlohmann::json uninterrupted = uninterrupted_run(run);
  std::uint64_t killed = 0;
  for (const auto seed : seeds(2)) {
    CAPTURE(seed);
    killed += survive(run, seed, 6, 150, uninterrupted);
  }
  MESSAGE(killed << " runs were killed");
  CHECK(killed > 0);
}

TEST_CASE(
    "a run in tiers resumes to the same losses and weights, although the tiers' files are lost with it") {
  const auto run = run_of({"--memory", "tiered", "--budget-mib", "1"});
  const nlohmann::json uninterrupted = uninterrupted_run(run_of({}));
  std::uint64_t killed = 0;
  for (const auto seed : seeds(2)) {
    CAPTURE(seed);
    killed += survive(run, seed, 4, 200, uninterrupted);
  }
  CHECK(killed > 0);
}

namespace {

/// Kills a run on ranks again and again, each time with settings that are drawn, until one comes through.
void survive_on_ranks(const std::vector<std::string>& ranks,
                      const std::vector<std::vector<std::string>>& settings, std::uint64_t least_seeds,
                      std::uint64_t kills) {
  const nlohmann::json uninterrupted = uninterrupted_run(run_of(ranks));
  std::uint64_t killed = 0;
  for (const auto seed : seeds(least_seeds)) {
    CAPTURE(seed);
    const temporary_folder folder;
    random_numbers random(seed);
    std::uint64_t acknowledged = 0;
    for (std::uint64_t i = 0; i <= kills; ++i) {
      auto arguments = run_of(ranks);
      arguments.insert(arguments.end(), {"--checkpoint-dir", folder.file("checkpoints"), "--checkpoint-every",
                                         "1", "--resume"});
      const auto& drawn = settings[random.below(static_cast<std::uint32_t>(settings.size()))];
      arguments.insert(arguments.end(), drawn.begin(), drawn.end());
      const auto ended =
          run_in(folder, arguments, random, i == kills ? std::nullopt : std::optional<std::uint64_t>(400));
      CAPTURE(contents_of(folder.file("notes")));
      ended.check_resumed(acknowledged);
      acknowledged = std::max(acknowledged, ended.notes.committed);
      killed += ended.end.signal == SIGKILL ? 1 : 0;
      if (i != kills) continue;
      REQUIRE(ended.end.status == 0);
      check_result(folder, uninterrupted);
    }
  }
  CHECK(killed > 0);
}

}  // namespace

TEST_CASE(
    "ranks with tiers and recomputation, killed at any moment, continue with other settings to the same "
    "bits") {
  // Threads and processes; what each run keeps, and where, is drawn.
  survive_on_ranks(
      {"--ranks", "2"},
      {{"--parallel", "zero3", "--memory", "tiered", "--budget-mib", "1", "--recompute", "full"},
       {"--parallel", "zero3", "--gather-ahead", "1", "--recompute", "selective"},
       {"--parallel", "zero1", "--transport", "socket"},
       {"--parallel", "zero2", "--memory", "tiered", "--budget-mib", "1", "--transport", "socket"},
       {"--parallel", "data"}},
      2, 5);
}

TEST_CASE("workers that train apart, killed at any moment of their rounds, continue to the same bits") {
  survive_on_ranks(
      {"--workers", "2", "--ranks", "2", "--batch", "4", "--local-steps", "7"},
      {{"--parallel", "data"},
       {"--parallel", "zero1", "--transport", "socket"},
       {"--parallel", "zero3", "--memory", "tiered", "--budget-mib", "1", "--schedule", "on_demand"}},
      1, 6);
}

TEST_CASE("a killed run whose local checkpoints are lost or damaged resumes from the last copied one") {
  const auto run = run_of({});
  const nlohmann::json uninterrupted = uninterrupted_run(run);
  std::uint64_t from_copies = 0;
  for (const auto seed : seeds(2)) {
    CAPTURE(seed);
    from_copies += survive_losses(run, seed, 6, 250, uninterrupted);
  }
  MESSAGE(from_copies << " runs went on from a copy");
  WARN(from_copies > 0);  // a slow machine may have had no time to make one
}

TEST_CASE("damaged or missing local checkpoints are taken from the copy") {
  const nlohmann::json uninterrupted = uninterrupted_run(run_of({}));
  const temporary_folder folder;
  const auto arguments = run_of({"--checkpoint-dir", folder.file("local"), "--checkpoint-copy",
                                 folder.file("copy"), "--checkpoint-every", "20", "--resume"});
  for (int i = 0; i < 3; ++i) {
    child_process child(program, arguments, folder.file("out"), folder.file("notes"));
    REQUIRE(child.wait().status == 0);
    const std::string notes = contents_of(folder.file("notes"));
    CAPTURE(notes);
    check_result(folder, uninterrupted);
    if (i == 0) {
      CHECK(notes.find("committed 40 2\n") != std::string::npos);
      CHECK(notes.find("copied 40 2\n") != std::string::npos);
      damage_all(folder.file("local"));
      continue;
    }
    CHECK(notes.rfind("resumed from step 40\n", 0) == 0);
    const bool is_said = notes.find("train_gpt: passed over --checkpoint-dir: step-0000000040-g00000002: ") !=
                         std::string::npos;
    CHECK(is_said == (i == 1));
    std::filesystem::remove_all(folder.file("local"));
  }
}

TEST_CASE("two folders of two runs are refused, and named") {
  const temporary_folder folder;
  const auto run = [&](const std::vector<std::string>& more) {
    child_process child(program, run_of(more), folder.file("out"), folder.file("notes"));
    return child.wait().status;
  };
  REQUIRE(run({"--checkpoint-dir", folder.file("a"), "--checkpoint-every", "20"}) == 0);
  REQUIRE(run({"--checkpoint-dir", folder.file("b"), "--checkpoint-every", "40"}) == 0);
  REQUIRE(run({"--checkpoint-dir", folder.file("b"), "--checkpoint-every", "40"}) == 0);
  CHECK(run({"--checkpoint-dir", folder.file("a"), "--checkpoint-copy", folder.file("b"), "--resume"}) == 1);
  CHECK(contents_of(folder.file("notes"))
            .rfind("train_gpt: --checkpoint-dir and --checkpoint-copy have checkpoints of two runs: ", 0) ==
        0);
  CHECK(run({"--checkpoint-copy", folder.file("b")}) == 2);
  CHECK(
      contents_of(folder.file("notes"))
          .find("--checkpoint-every, --checkpoint-copy and --resume are of checkpoints; add --checkpoint-dir "
                "DIR") != std::string::npos);
}

TEST_CASE("a run asked to end saves its state, and resumes from there") {
  const auto run = run_of({"--checkpoint-every", "1000", "--resume"});
  const nlohmann::json uninterrupted = uninterrupted_run(run_of({}));
  const temporary_folder folder;
  auto arguments = run;
  arguments.emplace_back("--checkpoint-dir");
  arguments.push_back(folder.file("checkpoints"));
  child_process child(program, arguments, folder.file("out"), folder.file("notes"));
  for (int i = 0; i < 20'000 && contents_of(folder.file("notes")).find("step 3/") == std::string::npos; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  child.send(SIGTERM);
  const ending end = child.wait();
  CAPTURE(contents_of(folder.file("notes")));
  if (end.status != 0) {  // it was quicker than the signal
    CHECK(end.status == 1);
    CHECK(contents_of(folder.file("notes")).find("; continue with --resume") != std::string::npos);
    CHECK(contents_of(folder.file("out")).empty());
  }
  child_process next(program, arguments, folder.file("out"), folder.file("notes"));
  CHECK(next.wait().status == 0);
  check_result(folder, uninterrupted);
  CHECK(lines_of(contents_of(folder.file("notes"))).front().rfind("resumed from step ", 0) == 0);
}
