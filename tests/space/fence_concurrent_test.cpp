#include <llmmem/space/fence.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

using namespace llmmem;

TEST_CASE("writes before a point passed are visible to all that waited for it") {
  constexpr int rounds = 500;
  constexpr int readers = 3;
  host_timeline timeline;
  std::vector<std::uint64_t> data(rounds, 0);  // plain memory: only the fences order it
  std::vector<host_fence> fences;
  for (int i = 0; i < rounds; ++i)
    fences.push_back(timeline.issue());

  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < readers; ++r) {
    threads.emplace_back([&, r] {
      for (int i = 0; i < rounds; ++i) {
        const auto at = static_cast<std::size_t>(i);
        if (r == 0) {
          while (!fences[at].ready())
            std::this_thread::yield();
        } else {
          fences[at].wait();
        }
        if (data[at] != at + 1) ++wrong;
      }
    });
  }
  for (std::size_t i = 0; i < rounds; ++i) {
    data[i] = i + 1;
    timeline.pass(fences[i]).value();
  }
  for (auto& t : threads)
    t.join();
  CHECK(wrong == 0);
}

TEST_CASE("points issued by several threads are distinct, and the last one passes them all") {
  constexpr std::size_t each = 2000;
  host_timeline timeline;
  std::vector<std::vector<host_fence>> issued(4);
  std::vector<std::thread> threads;
  for (auto& mine : issued) {
    threads.emplace_back([&timeline, &mine] {
      for (std::size_t i = 0; i < each; ++i)
        mine.push_back(timeline.issue());
    });
  }
  for (auto& t : threads)
    t.join();
  CHECK(timeline.issued() == 4 * each);
  const host_fence last = timeline.issue();
  timeline.pass(last).value();
  for (const auto& mine : issued)
    CHECK(all_ready(std::span<const host_fence>(mine)));
}

TEST_CASE("points passed from several threads in any order end at the highest") {
  constexpr std::size_t count = 2000;
  host_timeline timeline;
  std::vector<host_fence> fences;
  for (std::size_t i = 0; i < count; ++i)
    fences.push_back(timeline.issue());
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = t; i < count; i += 4)
        timeline.pass(fences[i]).value();
    });
  }
  fences.back().wait();
  for (auto& t : threads)
    t.join();
  CHECK(timeline.passed() == count);
}
