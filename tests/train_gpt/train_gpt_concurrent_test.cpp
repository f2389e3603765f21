/// Threads share out the work and change nothing.
#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/tiny_gpt.hpp"
#include "train_gpt/worker_team.hpp"

using namespace train_gpt;
using llmmem_tests::tiny_training;

TEST_CASE("losses and weights have the same bits with 1, 2, 3 and 7 threads") {
  const gpt_shape shapes[] = {llmmem_tests::tiny_shape,
                              {.blocks = 1, .width = 48, .heads = 3, .context = 40, .batch = 1}};
  for (const gpt_shape& shape : shapes) {
    CAPTURE(shape.width);
    std::vector<double> losses;
    std::uint64_t digest = 0;
    for (const std::size_t threads : {1U, 2U, 3U, 7U}) {
      CAPTURE(threads);
      tiny_training<float> tiny(shape, threads);
      std::vector<double> these;
      for (std::uint64_t step = 0; step < 3; ++step)
        these.push_back(tiny.trainer.step(tiny.text.batch(shape, 1, step), step));
      if (threads == 1) {
        losses = these;
        digest = tiny.trainer.digest();
      }
      CHECK(these == losses);
      CHECK(tiny.trainer.digest() == digest);
    }
  }
}

TEST_CASE("slices cover every number once, with cuts at multiples of the grain") {
  for (const std::size_t threads : {1U, 2U, 5U}) {
    worker_team team(threads);
    CHECK(team.size() == threads);
    for (const std::size_t count : {0U, 1U, 4U, 5U, 63U, 64U, 1000U}) {
      for (const std::size_t grain : {1U, 4U, 16U}) {
        CAPTURE(threads);
        CAPTURE(count);
        CAPTURE(grain);
        std::vector<std::atomic<int>> seen(count);
        std::atomic<std::size_t> calls = 0;
        std::atomic<std::size_t> uneven = 0;
        team.slices(count, grain, [&](std::size_t first, std::size_t end, std::size_t worker) {
          ++calls;
          if (first % grain != 0 || (end % grain != 0 && end != count) || worker >= threads) ++uneven;
          for (std::size_t i = first; i < end; ++i)
            ++seen[i];
        });
        CHECK(calls <= threads);
        CHECK(uneven == 0);
        for (const auto& each : seen)
          REQUIRE(each == 1);
      }
    }
  }
}

TEST_CASE("the caller of a team can run other work before each part") {
  for (const std::size_t threads : {1U, 3U}) {
    worker_team team(threads);
    std::vector<int> done;
    const auto note = [](void* to) noexcept {
      auto& all = *static_cast<std::vector<int>*>(to);
      all.push_back(static_cast<int>(all.size()));
    };
    std::atomic<std::size_t> before = 0;
    team.before_slices(note, &done);
    for (const std::size_t count : {0U, 1U, 100U}) {
      const std::size_t calls = done.size();
      team.slices(count, 1,
                  [&](std::size_t, std::size_t, std::size_t) { before += done.size() == calls + 1; });
      CHECK(done.size() == calls + 1);
    }
    CHECK(before == 1 + threads);  // of a slice of one, and of a hundred in as many as there are threads
    team.before_slices(nullptr, nullptr);
    team.slices(100, 1, [](std::size_t, std::size_t, std::size_t) {});
    CHECK(done.size() == 3);
  }
}
