/// Windows against a list of intervals.
#include <doctest/doctest.h>

#if defined(LLMMEM_TESTS_NCCL)
#include <llmmem/comm/detail/window_table.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

TEST_CASE(
    "a lookup finds the first window that shares a byte with the memory, as a byte by byte count does") {
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    random_numbers random(seed);
    std::vector<std::byte> memory(64);
    struct window {
      std::size_t begin;
      std::size_t size;
      ncclWindow_t* handle;
    };
    std::vector<window> oracle;
    detail::window_table windows;
    for (int step = 0; step < 60; ++step) {
      const std::size_t begin = random.below(std::uint64_t{60});
      const std::size_t size = 1 + random.below(std::uint64_t{64 - begin}) / 4;
      const std::span<const std::byte> range = std::span(memory).subspan(begin, size);
      std::uint64_t shared = 0;
      for (const window& each : oracle) {
        for (std::size_t at = begin; at < begin + size && shared == 0; ++at) {
          if (at < each.begin || at >= each.begin + each.size) continue;
          shared = std::min(begin + size, each.begin + each.size) - at;
        }
      }
      REQUIRE(windows.shared_bytes(range) ==
              (shared == 0 ? std::nullopt : std::optional<std::uint64_t>(shared)));
      const auto same = std::ranges::find(oracle, begin, &window::begin);
      REQUIRE(windows.find(range) == (same == oracle.end() ? nullptr : same->handle));
      if (shared == 0) {
        oracle.push_back({begin, size, windows.add(range)});
        REQUIRE(*oracle.back().handle == nullptr);
      } else if (same != oracle.end() && random.once_in(2)) {
        windows.erase(range);
        oracle.erase(same);
      }
      REQUIRE(windows.size() == oracle.size());
    }
    windows.clear();
    REQUIRE(windows.size() == 0);
    REQUIRE_FALSE(windows.shared_bytes(memory));
  }
}

TEST_CASE("a handle keeps its address while other windows come and go, and all handles are visited") {
  std::vector<std::byte> memory(200);
  detail::window_table windows;
  std::vector<ncclWindow_t*> handles;
  for (std::size_t i = 0; i < 100; ++i)
    handles.push_back(windows.add(std::span(memory).subspan(2 * i, 2)));
  for (std::size_t i = 0; i < 100; ++i)
    *handles[i] = reinterpret_cast<ncclWindow_t>(i + 1);
  for (std::size_t i = 0; i < 100; i += 2)
    windows.erase(std::span(memory).subspan(2 * i, 2));
  windows.erase(std::span(memory).subspan(1));  // no window begins there
  std::vector<std::uintptr_t> seen;
  windows.for_each([&](ncclWindow_t each) { seen.push_back(reinterpret_cast<std::uintptr_t>(each)); });
  REQUIRE(seen.size() == 50);
  for (std::size_t i = 0; i < 50; ++i)
    CHECK(seen[i] == 2 * i + 2);
}
#else
TEST_CASE("NCCL or the CUDA Toolkit is not here: window_table was not tested" *
          doctest::description("skipped")) {
  MESSAGE("llmmem::nccl was not found");
}
#endif
