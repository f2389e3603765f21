// A training run on a file and a schedule, killed by the system at random moments and resumed until it ends.
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/search.hpp>

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/killed_training.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t page = 4096;
constexpr std::uint64_t steps = 24;

std::vector<state_tensor> some_tensors() {
  const auto tensor = [](const char* name, std::vector<std::uint64_t> shape) {
    return state_tensor{
        .name = name, .type = safetensors_type::f32, .shape = std::move(shape), .group = "model", .part = {}};
  };
  return {tensor("norm", {17}), tensor("wte", {100, 101}), tensor("bias", {33}), tensor("head", {70, 70})};
}

/// What step `step` makes of one byte: each depends on all steps before, none may be left out or done twice.
std::byte next_of(std::byte old, std::uint64_t step, std::uint32_t tensor, std::uint64_t offset) {
  if (step == 0) return static_cast<std::byte>(offset * 7 + tensor);
  return static_cast<std::byte>(std::to_integer<std::uint64_t>(old) * 5 + step * 3 + tensor + offset);
}

/// Runs in a child process, which kills itself (SIGKILL: nothing of it runs on) at that call of `change`.
/// Returns whether it came to its end.
bool is_run_to_its_end(training_run run, std::uint64_t killed_at) {
  const ::pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::uint64_t calls = 0;
    run.change = [&](std::uint64_t step, std::uint32_t tensor, std::uint64_t offset,
                     std::span<std::byte> bytes) {
      const bool is_last = ++calls == killed_at;
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        if (is_last && i == bytes.size() / 2) ::kill(::getpid(), SIGKILL);
        bytes[i] = next_of(bytes[i], step, tensor, offset + i);
      }
    };
    bool is_good = false;
    try {
      is_good = train_from_disk(run, some_tensors());
    } catch (...) {
    }
    ::_exit(is_good ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  if (WIFSIGNALED(status)) CHECK(WTERMSIG(status) == SIGKILL);
  if (WIFEXITED(status)) CHECK(WEXITSTATUS(status) == 0);
  return WIFEXITED(status);
}

std::uint64_t newest_step(const std::string& path) {
  posix_storage<> storage(path);
  const checkpoint_search search = find_checkpoint(storage);
  return search.found ? search.found->id.step : 0;
}

std::vector<std::vector<std::byte>> final_bytes(const std::string& path) {
  posix_storage<> storage(path);
  const checkpoint_search search = find_checkpoint(storage);
  REQUIRE(search.found);
  CHECK(search.found->id.step == steps);
  std::vector<wanted_tensor> wanted;
  std::vector<std::vector<std::byte>> all;
  for (const state_tensor& each : some_tensors()) {
    wanted.push_back({.name = each.name, .part = {}, .type = each.type, .shape = each.shape});
    std::uint64_t bytes = 4;
    for (const std::uint64_t extent : each.shape)
      bytes *= extent;
    all.emplace_back(bytes);
  }
  load_checkpoint(storage, *search.found, wanted, [&](std::uint32_t i, std::uint64_t offset, auto bytes) {
    std::ranges::copy(bytes, all[i].begin() + static_cast<std::ptrdiff_t>(offset));
  });
  return all;
}

std::string text_of_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

TEST_SUITE("a training run in a file, killed and resumed") {
  TEST_CASE("a run killed at random moments ends with the bytes of an undisturbed run") {
    const temporary_folder folder;
    training_run run{.tier = folder.file("tier"),
                     .checkpoints = folder.file("whole"),
                     .memory_bytes = 8 * page,
                     .file_bytes = 64 * page,
                     .chunks = {.group_bytes = page, .split_bytes = 2 * page},
                     .steps = steps,
                     .save_every = 3,
                     .change = {}};
    CHECK(is_run_to_its_end(run, 0));
    const std::vector<std::vector<std::byte>> whole = final_bytes(run.checkpoints);
    // The file and its schedule change no byte either.
    for (std::uint32_t tensor = 0; tensor < whole.size(); ++tensor) {
      std::vector<std::byte> plain(whole[tensor].size());
      for (std::uint64_t step = 0; step <= steps; ++step) {
        for (std::size_t i = 0; i < plain.size(); ++i)
          plain[i] = next_of(plain[i], step, tensor, i);
      }
      CHECK(whole[tensor] == plain);
    }
    std::uint64_t kills = 0;
    std::uint64_t resumed = 0;
    for (const std::uint64_t seed : seeds(4, 1)) {
      CAPTURE(seed);
      random_numbers random(seed);
      run.checkpoints = folder.file("killed-" + std::to_string(seed));
      bool is_ended = false;
      for (int lives = 0; !is_ended; ++lives) {
        if (newest_step(run.checkpoints) != 0) ++resumed;
        // A step has ten calls or so. The patience of the test, not of the run, ends after some lives.
        is_ended = is_run_to_its_end(run, lives < 12 ? 1 + random.below(std::uint64_t{90}) : 0);
        if (!is_ended) ++kills;
      }
      CHECK(final_bytes(run.checkpoints) == whole);
    }
    CHECK(kills >= 3);
    CHECK(resumed >= 3);
    MESSAGE(kills << " kills, " << resumed << " resumed from a checkpoint");
  }

  TEST_CASE("docs/checkpoint_views.md shows exactly the run that was just killed, in at most 60 lines") {
    const std::string here = __FILE__;
    const std::string root = here.substr(0, here.rfind("tests/checkpoint/"));
    const std::string shown = text_of_file(root + "docs/checkpoint_views.md");
    const std::string code = text_of_file(root + "tests/checkpoint/killed_training.hpp");
    if (shown.empty() || code.empty()) {
      MESSAGE("skipped: the sources are not where they were compiled");
      return;
    }
    CHECK(shown.find("```cpp\n" + code + "```\n") != std::string::npos);
    CHECK(std::ranges::count(code, '\n') <= 60 + 17);  // 17 are of includes
  }
}
