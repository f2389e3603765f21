/// Training in tiers: the bits of plain memory, within the first tier's budget, and where plain memory fails.
#include <llmmem/testing/faulty_io.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "support/program_run.hpp"
#include "support/resident_bytes.hpp"
#include "support/temporary_folder.hpp"
#include "support/tiny_gpt.hpp"
#include "train_gpt/application.hpp"

using namespace train_gpt;
using llmmem_tests::outcome;
using llmmem_tests::run_captured;
using llmmem_tests::temporary_folder;

namespace {

outcome run(const std::vector<std::string>& arguments) {
  return run_captured(
      [&](std::FILE* out, std::FILE* notes) { return run_application(arguments, out, notes); });
}

constexpr const char* readme = LLMMEM_SOURCE_DIR "/README.md";

/// Some 5.5 MiB of state and activations, the largest set of leases of 1.5 MiB.
std::vector<std::string> medium(std::vector<std::string> more) {
  std::vector<std::string> all{"--layers", "3", "--width", "96", "--heads", "4",      "--context", "16",
                               "--batch",  "2", "--steps", "3",  "--json",  "--text", readme};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

nlohmann::json result_of(const std::vector<std::string>& arguments) {
  const outcome done = run(arguments);
  REQUIRE_MESSAGE(done.status == exit_status::success, done.notes);
  return nlohmann::json::parse(done.out);
}

}  // namespace

TEST_CASE(
    "losses and weights equal those in plain memory, bit for bit, and the first tier stays within its "
    "budget") {
  const auto plain = result_of(medium({}));
  CHECK(plain["peak_resident_bytes"] > 5 * 1024 * 1024);
  const std::vector<std::vector<std::string>> ways{
      {"--budget-mib", "2"},
      {"--budget-mib", "2", "--update", "after_backward"},
      {"--budget-mib", "2", "--schedule", "on_demand"},
      {"--budget-mib", "2", "--schedule", "lookahead"},
      {"--budget-mib", "2", "--host-mib", "1"},
      {"--budget-mib", "2", "--host-mib", "3", "--schedule", "on_demand"},
      {"--budget-mib", "64", "--host-mib", "64"}};
  for (const auto& way : ways) {
    CAPTURE(way);
    auto arguments = medium({"--memory", "tiered"});
    arguments.insert(arguments.end(), way.begin(), way.end());
    const auto tiered = result_of(arguments);
    CHECK(tiered["losses"] == plain["losses"]);
    CHECK(tiered["digest"] == plain["digest"]);
    const bool is_small = way[1] == "2";
    if (is_small) CHECK(tiered["peak_resident_bytes"] <= 2 * 1024 * 1024);
    std::uint64_t moved = 0;
    for (const auto& [link, bytes] : tiered["bytes_moved"].items())
      moved += bytes.get<std::uint64_t>();
    // Where all fits, the plan may bring the last tier up to date once, and that is all.
    CHECK((moved > 16 * 1024 * 1024) == is_small);
  }
}

TEST_CASE("a first tier smaller than the simultaneous leases is refused with both numbers") {
  const outcome done = run({"--memory", "tiered", "--budget-mib", "8", "--steps", "1", "--text", readme});
  CHECK(done.status == exit_status::failure);
  // The elements of the largest set of leases take 12,636,160 bytes.
  CHECK(
      done.notes ==
      "train_gpt: training_plan: a first tier of 8388608 bytes; a step leases 12648448 at once, in pages of "
      "16384; give it at least as many\n");
}

TEST_CASE("invalid options of tiers are refused by name") {
  const auto notes = [](const std::vector<std::string>& arguments) {
    const outcome done = run(arguments);
    CHECK(done.status == exit_status::wrong_usage);
    return done.notes.substr(0, done.notes.find('\n'));
  };
  CHECK(notes({"--memory", "tiered"}) ==
        "train_gpt: --memory tiered needs --budget-mib N, the MiB of the first tier");
  CHECK(notes({"--budget-mib", "4"}) ==
        "train_gpt: --budget-mib, --host-mib, --schedule and --tier-dir are of tiers; add --memory tiered");
  CHECK(notes({"--memory", "big"}) == "train_gpt: --memory: 'big' is unknown; there are plain and tiered");
  CHECK(notes({"--update", "never"}) ==
        "train_gpt: --update: 'never' is unknown; there are in_backward and after_backward");
  const outcome nowhere =
      run({"--memory", "tiered", "--budget-mib", "16", "--tier-dir", "/nowhere", "--text", readme});
  CHECK(nowhere.status == exit_status::failure);
  CHECK(nowhere.notes.find("/nowhere") != std::string::npos);
}

TEST_CASE("the plan foresees each call of a step, for any moment of the update") {
  for (const update_time when : {update_time::in_backward, update_time::after_backward}) {
    llmmem_tests::tiny_gpt<float> tiny;
    const std::uint64_t all = detail::rounded_bytes(tiny.shape);
    llmmem::host_space top({.budget = 40 * 4096});
    llmmem::host_space home({.budget = all});
    using buffer_type =
        llmmem::tiered_buffer<llmmem::tier<llmmem::host_space, llmmem::min_eviction>, llmmem::host_space>;
    buffer_type buffer({}, {top, 40 * 4096}, {home, all});
    tiered_pieces<float, buffer_type> pieces(buffer, tiny.shape, schedule_kind::next_use, when,
                                             {{.bytes_per_second = 1'000'000'000}});
    tiered_state<float, buffer_type> state(pieces);
    tiered_activations<float, buffer_type> activations(pieces);
    trainer training(tiny.model, tiny.team, state, activations, adam_options{}, when);
    training.initialise(1);
    for (std::uint64_t step = 0; step < 3; ++step)
      static_cast<void>(training.step(tiny.text.batch(tiny.shape, 1, step), step));
    const llmmem::prefetch_stats stats = pieces.schedule().stats();
    CHECK(stats.on_plan == 3 * pieces.schedule().trace().events().size());
    CHECK(stats.inserted + stats.skipped + stats.diverged + stats.recordings == 0);
    CHECK(stats.replans == 2);
  }
}

TEST_CASE("a failing file ends the run with its error, not with wrong weights") {
  using engine = llmmem::testing::faulty_io<llmmem::posix_io>;
  using file = llmmem::file_space<engine>;
  using buffer_type = llmmem::tiered_buffer<llmmem::host_space, file>;
  llmmem_tests::tiny_gpt<float> tiny;
  const temporary_folder folder;
  const std::uint64_t all = detail::rounded_bytes(tiny.shape);
  int failed = 0;
  for (std::uint64_t first = 1; first < 31; first += 3) {
    CAPTURE(first);
    const std::vector<llmmem::testing::planned_fault> plan{
        {.what = llmmem::testing::io_fault::error, .first = first, .every = 1, .count = 1000, .number = EIO}};
    file disk(folder.file("tier"), {.budget = all}, plan);
    const std::uint64_t budget = 40 * 4096;
    llmmem::host_space top({.budget = budget});
    buffer_type buffer({}, {top, budget}, {disk, all});
    tiered_pieces<float, buffer_type> pieces(buffer, tiny.shape, schedule_kind::next_use,
                                             update_time::after_backward,
                                             {{.bytes_per_second = 1'000'000'000}});
    tiered_state<float, buffer_type> state(pieces);
    tiered_activations<float, buffer_type> activations(pieces);
    trainer training(tiny.model, tiny.team, state, activations);
    try {
      training.initialise(1);
      for (std::uint64_t step = 0; step < 2; ++step)
        static_cast<void>(training.step(tiny.text.batch(tiny.shape, 1, step), step));
    } catch (const llmmem::io_error& why) {
      ++failed;
      CHECK(std::string(why.what()).find("Input/output error") != std::string::npos);
    }
    CHECK(buffer.audit().empty());
  }
  CHECK(failed == 10);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LLMMEM_TEST_SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define LLMMEM_TEST_SANITIZED
#endif
#endif

// A sanitizer's own memory is beyond any such limit.
#if !defined(LLMMEM_TEST_SANITIZED)
TEST_CASE("the trainer works in an address space too small for plain memory, with the same weights") {
  const std::vector<std::string> large{"--context", "8", "--batch", "1",      "--steps", "1",
                                       "--threads", "1", "--json",  "--text", readme};
  const auto limited = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = large;
    arguments.insert(arguments.end(), more.begin(), more.end());
    const temporary_folder folder;
    const std::string path = folder.file("out");
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      ::mallopt(M_ARENA_MAX, 1);
      std::uint64_t pages = 0;
      std::ifstream("/proc/self/statm") >> pages;
      const rlim_t most =
          pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) + (std::uint64_t{48} << 20);
      const rlimit limit{most, most};
      ::setrlimit(RLIMIT_AS, &limit);
      std::FILE* const out = std::fopen(path.c_str(), "w");
      std::FILE* const notes = std::fopen("/dev/null", "w");
      const exit_status status = run_application(arguments, out, notes);
      std::fclose(out);
      ::_exit(static_cast<int>(status));
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    std::ifstream in(path);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    return std::pair(WIFEXITED(status) ? WEXITSTATUS(status) : -1, text);
  };
  const auto [plain_status, nothing] = limited({});
  CHECK(plain_status == 1);
  const auto [status, text] = limited({"--memory", "tiered", "--budget-mib", "19"});
  REQUIRE(status == 0);
  const auto tiered = nlohmann::json::parse(text);
  const auto plain = result_of(large);
  CHECK(plain["peak_resident_bytes"] > 4 * tiered["peak_resident_bytes"].get<std::uint64_t>() - (1 << 20));
  CHECK(tiered["digest"] == plain["digest"]);
  CHECK(tiered["losses"] == plain["losses"]);
}

TEST_CASE("tools show the first tier's budget and the run's workspace, not every address of a piece") {
  const temporary_folder folder;
  const std::string path = folder.file("grown");
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::FILE* const nowhere = std::fopen("/dev/null", "w");
    llmmem_tests::forget_peak_resident_bytes();
    const std::uint64_t before = llmmem_tests::peak_resident_bytes();
    const exit_status status =
        run_application({"--memory", "tiered", "--budget-mib", "13", "--context", "8", "--batch", "1",
                         "--steps", "3", "--threads", "1", "--text", readme},
                        nowhere, nowhere);
    std::ofstream(path) << llmmem_tests::peak_resident_bytes() - before;
    ::_exit(static_cast<int>(status));
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WEXITSTATUS(status) == 0);
  std::uint64_t grown = 0;
  std::ifstream(path) >> grown;
  constexpr std::uint64_t budget = std::uint64_t{13} << 20;
  constexpr std::uint64_t workspace = std::uint64_t{4} << 20;  // heap, stacks, pages of the program
  CHECK(grown > budget / 2);
  CHECK(grown <= (budget + workspace) * 13 / 10);
}
#endif
