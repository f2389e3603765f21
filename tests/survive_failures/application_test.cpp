#include "survive_failures/application.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "support/program_run.hpp"

using example::exit_status;
using llmmem_tests::outcome;
using llmmem_tests::run_captured;

namespace {

outcome run(const std::vector<std::string>& arguments) {
  return run_captured([&](std::FILE* out, std::FILE* notes) {
    return survive_failures::run_application(arguments, out, notes);
  });
}

}  // namespace

TEST_SUITE("survive_failures application") {
  TEST_CASE("impossible options are reported before anything starts, with valid ones") {
    const std::vector<std::pair<std::vector<std::string>, std::string>> wrong{
        {{"--redundancy", "parity:4"},
         "--redundancy parity:4 needs 5 ranks, but the world has 4: start 1 more, or use parity:3"},
        {{"--ranks", "3", "--redundancy", "rs:2+2"},
         "--redundancy rs:2+2 needs 4 ranks, but the world has 3: start 1 more, or use rs:1+2"},
        {{"--redundancy", "mirror:5"},
         "--redundancy mirror:5 needs 5 ranks, but the world has 4: start 1 more, or use mirror:4"},
        {{"--redundancy", "raid"},
         "--redundancy: redundancy: 'raid', character 1: not the beginning of a scheme; write mirror:F, "
         "parity:K, rs:K+M or compute"},
        {{"--ranks", "1"}, "--ranks \"1\": must be a whole number from 2 to 32"},
        {{"--ranks", "3", "--batch", "8"}, "--ranks 3 does not divide --batch 8; --batch 9 would do"},
        {{"--width", "65"}, "--heads 4 does not divide --width 65; --width 68 would do"},
        {{"--steps", "10", "--faults", "10"},
         "--faults 10 in --steps 10: each needs a step at least; ask for --steps 200"},
        {{"--transport", "pigeon"}, "--transport: 'pigeon' is unknown; there are socket, thread and sim"},
        {{"--silence-ms", "199"}, "--silence-ms \"199\": must be a whole number from 200 to 3600000"},
    };
    for (const auto& [arguments, text] : wrong) {
      CAPTURE(text);
      const outcome done = run(arguments);
      CHECK(done.status == exit_status::wrong_usage);
      CHECK(done.out.empty());
      CHECK(done.notes == "survive_failures: " + text + "\nrun survive_failures --help for the options\n");
    }
  }

  TEST_CASE("the report names the deaths, the recovery time, and that the weights are the same") {
    const outcome done =
        run({"--transport", "sim", "--ranks", "3", "--steps", "80", "--faults", "2", "--layers", "1",
             "--width", "8", "--heads", "2", "--context", "4", "--text", LLMMEM_SOURCE_DIR "/README.md"});
    CAPTURE(done.notes);
    REQUIRE(done.status == exit_status::success);
    CHECK(done.out.find("3 ranks, 80 steps, mirror:2: 2 faults, ") == 0);
    CHECK(done.out.find("\n  recovery     ") != std::string::npos);
    CHECK(done.out.find(": identical\n") != std::string::npos);
    CHECK(done.notes.find("died of SIGKILL") != std::string::npos);
  }
}
