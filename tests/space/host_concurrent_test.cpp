#include <llmmem/space/host.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

using namespace llmmem;

TEST_CASE("concurrent allocations never overlap nor exceed the budget") {
  constexpr std::uint64_t budget = 256 * 1024;
  host_space space{host_options{.budget = budget}};
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&space, &mistakes = wrong[t], t] {
      std::mt19937_64 random(t);
      const auto mark = static_cast<std::byte>(t + 1);
      std::vector<host_space::range_type> live;
      for (int step = 0; step < 500; ++step) {
        if (live.size() < 8 && random() % 2 == 0) {
          if (const auto range = space.try_allocate(1 + random() % 20'000, 64)) {
            std::memset(range->data, static_cast<int>(mark), range->bytes);
            live.push_back(*range);
          }
        } else if (!live.empty()) {
          for (const std::byte b : live.back().span())
            mistakes += b != mark ? 1 : 0;
          space.deallocate(live.back());
          live.pop_back();
        }
        if (space.used() > budget) ++mistakes;
      }
      for (const auto& range : live)
        space.deallocate(range);
    });
  }
  for (auto& t : threads)
    t.join();
  for (const int mistakes : wrong)
    CHECK(mistakes == 0);
  CHECK(space.used() == 0);
  CHECK(space.stats().peak <= budget);
}

TEST_CASE("a copy after a fence waits for it, and then sees the earlier writes") {
  host_space space{host_options{.budget = 4096}};
  const auto range = space.try_allocate(64, 64).value();
  std::vector<std::byte> source(64);
  std::vector<std::byte> back(64);
  for (int round = 1; round <= 50; ++round) {
    host_timeline timeline;
    const std::array written{timeline.issue()};
    std::thread writer([&] {
      std::this_thread::yield();
      std::memset(source.data(), round, source.size());
      timeline.pass(written[0]).value();
    });
    CHECK(space.copy_in_async(range, source, written).value().ready());
    CHECK(space.copy_out_async(back, range, {}).value().ready());
    writer.join();
    REQUIRE(back == source);
  }
}
