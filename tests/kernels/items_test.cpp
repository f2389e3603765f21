#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem::testing::grid_executor;

/// Counts how often each item is done.
struct tally {
  std::span<std::uint32_t> counts;
  [[nodiscard]] std::uint64_t items() const noexcept { return counts.size(); }
  void run(std::uint64_t item) const noexcept { ++counts[item]; }
};
static_assert(item_work<tally>);

/// The largest of 32 numbers each, subtracted from all of them.
struct below_largest {
  static constexpr std::uint32_t numbers = 32;
  std::span<const std::uint32_t> in;
  std::span<std::uint32_t> out;
  std::uint32_t lane_count = 1;

  struct held {
    std::uint32_t number[numbers];
    std::uint32_t count;
  };
  using partial = std::uint32_t;

  [[nodiscard]] std::uint64_t items() const noexcept { return in.size() / numbers; }
  [[nodiscard]] std::uint32_t lanes() const noexcept { return lane_count; }
  [[nodiscard]] held take(std::uint64_t item, group_lane lane) const noexcept {
    held mine{};
    for (std::uint32_t i = lane.lane; i < numbers; i += lane.lanes)
      mine.number[mine.count++] = in[item * numbers + i];
    return mine;
  }
  [[nodiscard]] static partial measure(const held& mine) noexcept {
    return *std::max_element(mine.number, mine.number + mine.count);
  }
  [[nodiscard]] static partial combine(partial a, partial b) noexcept { return std::max(a, b); }
  void give(std::uint64_t item, group_lane lane, const held& mine, partial largest) const noexcept {
    for (std::uint32_t i = 0; i < mine.count; ++i)
      out[item * numbers + lane.lane + i * lane.lanes] += largest - mine.number[i];
  }
};
static_assert(group_work<below_largest>);

/// The same, and each lane takes what the other knows for more than what itself does.
struct lopsided : below_largest {
  [[nodiscard]] static partial combine(partial a, partial b) noexcept { return a + 2 * b; }
};

}  // namespace

TEST_SUITE("items") {
  TEST_CASE("every item is processed once, for any size of launch") {
    for (const auto seed : llmmem_tests::seeds(100)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const std::uint64_t items = random() % 4 == 0 ? random() % 3 : random() % 3000;
      const launch_limits limits{.blocks = static_cast<std::uint32_t>(random() % 5)};
      std::vector<std::uint32_t> counts(items);
      grid_executor(limits).each(tally{counts}).value();
      CHECK(counts == std::vector<std::uint32_t>(items, 1));
      host_executor{}.each(tally{counts}).value();
      CHECK(counts == std::vector<std::uint32_t>(items, 2));
    }
  }

  TEST_CASE("a group of lanes gives the result of one lane, and each lane contributes its share once") {
    for (const auto seed : llmmem_tests::seeds(100)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      std::vector<std::uint32_t> in(random() % 300 * below_largest::numbers);
      std::ranges::generate(in, [&] { return static_cast<std::uint32_t>(random() % 1'000'000); });
      std::vector<std::uint32_t> expected(in.size());
      host_executor{}.each(below_largest{in, expected}).value();
      for (std::uint32_t lanes = 1; lanes <= 32; lanes *= 2) {
        CAPTURE(lanes);
        const launch_limits limits{.blocks = static_cast<std::uint32_t>(random() % 3)};
        std::vector<std::uint32_t> out(in.size());
        grid_executor(limits).each(below_largest{in, out, lanes}).value();
        CHECK(out == expected);
      }
      for (std::size_t i = 0; i < in.size(); i += below_largest::numbers) {
        const auto of_one = std::span(in).subspan(i, below_largest::numbers);
        const std::uint32_t largest = *std::ranges::max_element(of_one);
        for (std::size_t k = 0; k < of_one.size(); ++k)
          if (expected[i + k] != largest - of_one[k]) CHECK(expected[i + k] == largest - of_one[k]);
      }
    }
  }

  TEST_CASE("all lanes of a warp ask equally often, and only existing items are taken") {
    for (const auto seed : llmmem_tests::seeds(100)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      std::vector<std::uint32_t> in(random() % 70 * below_largest::numbers);
      std::ranges::generate(in, [&] { return static_cast<std::uint32_t>(random() % 1'000'000); });
      std::vector<std::uint32_t> expected(in.size());
      host_executor{}.each(below_largest{in, expected}).value();
      const std::uint32_t lanes = 1U << random() % 6;
      const item_launch launch =
          plan_items(in.size() / below_largest::numbers, lanes,
                     {.blocks = static_cast<std::uint32_t>(random() % 3)}, 32U << random() % 3);
      std::vector<std::uint32_t> out(in.size());
      const below_largest work{in, out, lanes};
      for (std::uint32_t block = 0; block < launch.blocks; ++block) {
        std::uint64_t of_warp = 0;
        for (std::uint32_t thread = 0; thread < launch.threads; ++thread) {
          // A lane that hears nothing new takes what it knows itself for the largest: only turns count here.
          std::uint64_t questions = 0;
          run_groups(work, share_of(launch, block, thread), [&](std::uint32_t known, std::uint32_t /*step*/) {
            ++questions;
            return known;
          });
          if (thread % warp_threads == 0) of_warp = questions;
          CHECK(questions == of_warp);
        }
      }
      if (lanes == 1) CHECK(out == expected);
    }
  }

  TEST_CASE("a combination that depends on the order is detected") {
    std::vector<std::uint32_t> in(64);
    in[35] = 1;
    std::vector<std::uint32_t> out(64);
    CHECK(grid_executor().each(lopsided{in, out, 4}).error() == failure{errc::lanes_differ, 1, 0, 1});
    CHECK(host_executor{}.each(lopsided{in, out}).has_value());
  }

  TEST_CASE("a launch has as many blocks as its items need, and at most the allowed number") {
    constexpr std::uint32_t threads = item_launch::default_threads;
    CHECK(plan_items(0, 32, {}) == item_launch{});
    CHECK(plan_items(1, 1, {}) == item_launch{1, 0});
    CHECK(plan_items(threads, 1, {}) == item_launch{1, 0});
    CHECK(plan_items(threads + 1, 1, {}) == item_launch{2, 0});
    CHECK(plan_items(threads + 1, 32, {}) == item_launch{33, 5});
    CHECK(plan_items(100'000, 32, {.blocks = 7}) == item_launch{7, 5});
    // More than a grid can have: threads take several.
    const item_launch most = plan_items(std::uint64_t{1} << 40, 1, {});
    CHECK(most == item_launch{0x7FFF'FFFF, 0});
    CHECK(share_of(most, 0x7FFF'FFFE, 255).first == std::uint64_t{0x7FFF'FFFF} * threads - 1);
    CHECK(share_of(most, 0, 0).stride == std::uint64_t{0x7FFF'FFFF} * threads);
  }

  TEST_CASE("bits and sums that several threads add to a word are all there") {
    std::vector<std::uint32_t> words(1000);
    std::vector<std::uint32_t> parities(1000, 0x100);
    std::vector<std::uint64_t> sums(1000, ~std::uint64_t{0});
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        for (std::size_t i = 0; i < words.size(); ++i) {
          join_bits(words[i], 0x11U << t);
          join_xor(parities[i], 0x11U << t | 0x200U);
          add_to(sums[i], std::uint64_t{1} << (32 + t) | 1U);
        }
      });
    for (std::thread& each : threads)
      each.join();
    CHECK(words == std::vector<std::uint32_t>(words.size(), 0xFF));
    CHECK(parities == std::vector<std::uint32_t>(words.size(), 0x1FF));
    // Modulo 2^64.
    CHECK(sums == std::vector<std::uint64_t>(words.size(), (std::uint64_t{0xF} << 32) + 3));
  }
}
