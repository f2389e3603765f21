#include <llmmem/version/cow_range.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t page_bytes = 256;
constexpr std::uint64_t pages = 32;

/// A snapshot, and what each byte of each page must be in it.
struct errand {
  cow_snapshot snapshot;
  std::vector<std::byte> stamps;
};

/// Where the writer leaves errands for one reader.
class hatch {
 public:
  /// Whether it was taken.
  [[nodiscard]] bool offer(errand& more) {
    const std::lock_guard lock(mutex_);
    if (waiting_) return false;
    waiting_.emplace(std::move(more));
    return true;
  }
  [[nodiscard]] std::optional<errand> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(waiting_, std::nullopt);
  }

 private:
  std::mutex mutex_;
  std::optional<errand> waiting_;
};

[[nodiscard]] std::uint64_t wrong_bytes(std::span<const std::byte> page, std::byte stamp) {
  std::uint64_t wrong = 0;
  for (const std::byte each : page)
    wrong += each == stamp ? 0 : 1;
  return wrong;
}

}  // namespace

TEST_CASE("readers in other threads see complete snapshots while the writer changes the same pages") {
  for (const auto seed : seeds(6)) {
    CAPTURE(seed);
    random_numbers random(seed);
    std::vector<std::byte> range(pages * page_bytes);
    std::vector<std::byte> pool(pages * page_bytes * 3);
    cow_range state(range, pool, {.page_bytes = page_bytes, .max_snapshots = 6});
    std::vector<std::byte> stamps(pages);
    hatch hatches[2];
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> wrong{0};
    std::atomic<std::uint64_t> seen{0};
    std::vector<std::thread> readers;
    for (std::size_t r = 0; r < 2; ++r) {
      readers.emplace_back([&, r] {
        random_numbers own(seed * 100 + r);
        std::vector<std::byte> buffer(pages * page_bytes);
        while (!stop.load()) {
          auto work = hatches[r].take();
          if (!work) {
            std::this_thread::yield();
            continue;
          }
          for (int again = 0; again < 3; ++again) {
            for (std::uint64_t i = 0; i < pages; ++i) {
              const std::uint64_t page = own.below(pages);
              work->snapshot
                  .visit(page,
                         [&](std::span<const std::byte> bytes) {
                           wrong += wrong_bytes(bytes, work->stamps[page]);
                         })
                  .value();
            }
            work->snapshot.read(0, buffer).value();
            for (std::uint64_t page = 0; page < pages; ++page)
              wrong +=
                  wrong_bytes(std::span(buffer).subspan(page * page_bytes, page_bytes), work->stamps[page]);
            work->snapshot.changed_since(no_version, [&](std::uint64_t first, std::uint64_t count) {
              if (first != 0 || count != pages) ++wrong;
            });
          }
          const auto also = state.pin(work->snapshot.version());
          work->snapshot.release();
          ++seen;
        }
      });
    }
    std::optional<errand> next;
    for (int step = 0; step < 4000; ++step) {
      if (!next && random.once_in(4)) {
        if (auto taken = state.snapshot()) next.emplace(errand{*std::move(taken), stamps});
      }
      if (next) {
        for (hatch& each : hatches) {
          if (next && each.offer(*next)) next.reset();
        }
      }
      const std::uint64_t first = random.below(pages);
      const std::uint64_t count = 1 + random.below(std::uint64_t{3});
      const std::uint64_t end = first + count < pages ? first + count : pages;
      const auto given = state.write(first * page_bytes, (end - first) * page_bytes, [&](std::uint64_t) {
        next.reset();
        std::this_thread::yield();  // a reader will be done, and give its pages back
        return true;
      });
      const auto stamp = static_cast<std::byte>(step);
      std::memset(given->data(), std::to_integer<int>(stamp), given->size());
      for (std::uint64_t page = first; page < end; ++page)
        stamps[page] = stamp;
    }
    while (seen.load() == 0)
      std::this_thread::yield();
    stop = true;
    for (auto& each : readers)
      each.join();
    for (hatch& each : hatches)
      static_cast<void>(each.take());
    next.reset();
    CHECK(wrong.load() == 0);
    CHECK(seen.load() > 0);
    CHECK(state.stats().copied_pages > 0);
    CHECK(state.stats().used_pages == 0);
    CHECK(state.audit() == std::vector<std::string>{});
  }
}

TEST_CASE("a first write waits only for the reader of its page") {
  std::vector<std::byte> range(2 * page_bytes, std::byte{1});
  std::vector<std::byte> pool(2 * page_bytes);
  cow_range state(range, pool, {.page_bytes = page_bytes});
  const auto kept = state.snapshot().value();
  std::atomic<bool> inside{false};
  std::atomic<bool> left{false};
  std::atomic<bool> written{false};
  std::uint64_t wrong = 0;
  std::thread reader([&] {
    kept.visit(0,
               [&](std::span<const std::byte> bytes) {
                 inside = true;
                 for (int i = 0; i < 200; ++i) {
                   wrong += wrong_bytes(bytes, std::byte{1});
                   std::this_thread::yield();
                 }
                 left = !written.load();
               })
        .value();
  });
  while (!inside)
    std::this_thread::yield();
  state.write(page_bytes, 1).value()[0] = std::byte{3};  // another page: at once
  const auto given = state.write(0, page_bytes);
  written = true;
  std::memset(given->data(), 2, given->size());
  reader.join();
  CHECK(left.load());
  CHECK(wrong == 0);
  CHECK(state.stats().copied_pages == 2);
}
