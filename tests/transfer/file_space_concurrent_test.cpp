#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "support/random.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::temporary_folder;

TEST_CASE("threads allocate, copy and deallocate at the same time, and each finds its own bytes") {
  const temporary_folder folder;
  file_space_options options;
  options.budget = 1 << 20;
  file_space<> space(folder.file("data"), options);
  std::vector<std::thread> threads;
  std::vector<int> wrong(3);
  for (std::size_t me = 0; me < wrong.size(); ++me) {
    threads.emplace_back([&, me] {
      random_numbers random(me);
      for (int turn = 0; turn < 40; ++turn) {
        const std::uint64_t bytes = 1 + random.below(20'000U);
        const auto range = space.try_allocate(bytes, 1);
        if (!range) {
          ++wrong[me];
          continue;
        }
        const std::vector<std::byte> mine(bytes,
                                          static_cast<std::byte>(me * 64 + static_cast<std::size_t>(turn)));
        std::vector<std::byte> back(bytes);
        const auto written = space.copy_in_async(*range, mine, {});
        const auto read = space.copy_out_async(back, *range, std::span(&*written, 1));
        if (!read || !read->settled() || back != mine || space.used() < bytes) ++wrong[me];
        space.deallocate(*range);
      }
    });
  }
  for (std::thread& each : threads)
    each.join();
  CHECK(wrong == std::vector<int>(wrong.size()));
  CHECK(space.used() == 0);
}
