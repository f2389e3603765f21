// The program itself, while calls on its checkpoints fail at random or end it: what it acknowledged is there,
// and the bits are right.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/child_process.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem_tests;

namespace {

const std::string programs = LLMMEM_EXAMPLES_DIR;
const std::string preload = LLMMEM_FAILING_CALLS;

std::string text_in(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Sets variables for programs that are started while it lives.
class environment {
 public:
  explicit environment(std::map<std::string, std::string> all) : all_(std::move(all)) {
    for (const auto& [name, value] : all_)
      ::setenv(name.c_str(), value.c_str(), 1);
  }
  environment(const environment&) = delete;
  environment& operator=(const environment&) = delete;
  ~environment() {
    for (const auto& [name, value] : all_)
      ::unsetenv(name.c_str());
  }

 private:
  std::map<std::string, std::string> all_;
};

/// The number after the last of these words at the beginning of a line; 0 if there is none.
std::uint64_t last_number(const std::string& text, const std::string& words) {
  std::uint64_t number = 0;
  for (std::size_t at = 0; at < text.size(); at = std::min(text.size(), text.find('\n', at)) + 1) {
    if (text.compare(at, words.size(), words) == 0)
      number = std::max<std::uint64_t>(number, std::strtoull(text.c_str() + at + words.size(), nullptr, 10));
  }
  return number;
}

struct run_end {
  int status = -1;
  std::string out{};
  std::string notes{};
};

run_end run(const temporary_folder& folder, const std::string& program,
            const std::vector<std::string>& arguments) {
  child_process child(programs + "/" + program, arguments, folder.file("out"), folder.file("notes"));
  const ending end = child.wait();
  return {end.status, text_in(folder.file("out")), text_in(folder.file("notes"))};
}

std::vector<std::string> training(const temporary_folder& folder, bool saves = true) {
  std::vector<std::string> all{"--layers",
                               "1",
                               "--width",
                               "16",
                               "--heads",
                               "2",
                               "--context",
                               "8",
                               "--batch",
                               "2",
                               "--threads",
                               "1",
                               "--json",
                               "--steps",
                               "8",
                               "--text",
                               LLMMEM_SOURCE_DIR "/README.md"};
  if (saves)
    all.insert(all.end(),
               {"--checkpoint-dir", folder.file("checkpoints"), "--checkpoint-every", "1", "--resume"});
  return all;
}

enum class storm : std::uint8_t { errors, kills, both };

/// What went wrong with one seed; empty if nothing.
std::string weather(storm what, std::uint64_t seed, const std::string& digest) {
  const temporary_folder folder;
  random_numbers random(seed * 3 + static_cast<std::uint64_t>(what));
  std::map<std::string, std::string> how{{"LD_PRELOAD", preload},
                                         {"FAILING_PATH", folder.file("checkpoints")}};
  if (what != storm::kills) {
    constexpr std::uint64_t permille[] = {3, 10, 30, 100, 300};
    how["FAILING_PERMILLE"] = std::to_string(permille[random.below(what == storm::both ? 3U : 5U)]);
    how["FAILING_FROM"] = std::to_string(random.below(3U) == 0 ? random.below(100U) : 0);
  }
  if (what != storm::errors) how["FAILING_KILL_AT"] = std::to_string(1 + random.below(900U));
  std::uint64_t acknowledged = 0;
  const std::uint64_t parts = 1 + random.below(3U);
  for (std::uint64_t part = 0; part <= parts; ++part) {
    run_end end;
    if (part == parts) {
      end = run(folder, "train_gpt", training(folder));
      if (end.status != 0)
        return "without failing calls it ends with " + std::to_string(end.status) + ": " + end.notes;
    } else {
      how["FAILING_SEED"] = std::to_string(seed * 10 + part);
      const environment set(how);
      end = run(folder, "train_gpt", training(folder));
    }
    if (end.status != 0 && end.status != 1 && end.status != 137)
      return "status " + std::to_string(end.status) + ": " + end.notes;
    const std::uint64_t from = last_number(end.notes, "resumed from step ");
    const bool has_begun = from != 0 || end.status == 0;
    if (has_begun && from < acknowledged)
      return "acknowledged " + std::to_string(acknowledged) + ", resumed from " + std::to_string(from);
    acknowledged = std::max(acknowledged, last_number(end.notes, "committed "));
    if (end.status == 0 && nlohmann::json::parse(end.out)["digest"] != digest) return "other bits";
  }
  const run_end verified = run(folder, "checkpoint_tool", {"verify", folder.file("checkpoints")});
  if (verified.status != 0) return "verify: " + verified.notes;
  return {};
}

}  // namespace

TEST_CASE(
    "while calls fail at random, what a training acknowledged is there afterwards, and its bits are right") {
  if (is_watched || !std::filesystem::exists(preload)) {
    MESSAGE("not tested: a sanitizer's program takes no preloaded library");
    return;
  }
  const temporary_folder folder;
  const run_end reference = run(folder, "train_gpt", training(folder, false));
  REQUIRE(reference.status == 0);
  const std::string digest = nlohmann::json::parse(reference.out)["digest"];
  std::uint64_t runs = 0;
  for (const std::uint64_t seed : seeds(16)) {
    for (const storm what : {storm::errors, storm::kills, storm::both}) {
      CAPTURE(seed);
      CAPTURE(static_cast<int>(what));
      CHECK(weather(what, seed, digest) == "");
      ++runs;
    }
  }
  MESSAGE(runs << " storms");
}
