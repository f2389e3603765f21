#include "checkpoint_tool/progress.hpp"

#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>

#include "support/program_run.hpp"

using llmmem_tests::run_captured;

TEST_CASE("progress is reported at intervals, with the amount done and the total") {
  const auto told = [](std::chrono::seconds every) {
    return run_captured([&](std::FILE*, std::FILE* notes) {
             checkpoint_tool::progress meter(notes, "verifying step-1", 3 << 20, every);
             meter.add(1 << 20);
             meter.add(1 << 19);
             CHECK(meter.done() == (3U << 19));
             return example::exit_status::success;
           })
        .notes;
  };
  CHECK(told(std::chrono::seconds(0)) ==
        "checkpoint_tool: verifying step-1: 1.00 MiB of 3.00 MiB\n"
        "checkpoint_tool: verifying step-1: 1.50 MiB of 3.00 MiB\n");
  CHECK(told(std::chrono::seconds(1000)).empty());
}
