#include <llmmem/version/delta.hpp>
#include <llmmem/version/double_buffer.hpp>
#include <llmmem/version/latest.hpp>
#include <llmmem/version/stash.hpp>
#include <llmmem/version/versioned.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

using namespace llmmem;

namespace {

using words = std::vector<std::uint64_t>;

/// One thread publishes, two read: a version is whole, and is the one its number says.
template <class State>
void publish_and_read(State& state) {
  constexpr std::uint64_t versions = 2000;
  std::atomic<std::uint64_t> wrong{0};
  std::atomic<std::uint64_t> seen{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r) {
    readers.emplace_back([&] {
      std::uint64_t before = 0;
      while (!stop.load()) {
        auto pin = seen.load() % 3 == 0 ? state.pin(state.oldest()) : state.snapshot();
        if (!pin) {
          std::this_thread::yield();
          continue;
        }
        for (const std::uint64_t each : **pin)
          wrong += each == to_number(pin->version()) ? 0 : 1;
        const std::uint64_t newest = to_number(state.newest());
        wrong += newest != 0 && newest < before ? 1 : 0;
        before = newest != 0 ? newest : before;
        ++seen;
      }
    });
  }
  for (std::uint64_t version = 1; version <= versions;) {
    const auto given = state.publish_in_place([&](words& into, const words*) noexcept {
      for (std::uint64_t& each : into)
        each = version;
    });
    if (given) {
      ++version;
    } else {
      std::this_thread::yield();
    }
  }
  while (seen.load() < 10)
    std::this_thread::yield();
  stop = true;
  for (auto& each : readers)
    each.join();
  CHECK(wrong.load() == 0);
  CHECK(to_number(state.newest()) == versions);
  CHECK(state.stats().pinned == 0);
  CHECK(state.audit() == std::vector<std::string>{});
}

}  // namespace

TEST_CASE("readers see complete versions while another thread publishes, under any retention") {
  versioned<words> newest({.versions = 3}, words(64));
  publish_and_read(newest);
  versioned<words, double_buffer> two({}, words(64));
  publish_and_read(two);
  versioned<words, stash<3>> three({}, words(64));
  publish_and_read(three);
  versioned<words, delta> differences({.versions = 6, .bytes = 4096, .views = 2}, words(64));
  publish_and_read(differences);
}
