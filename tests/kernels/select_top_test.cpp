#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/select_top.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "support/seeds.hpp"
#include "support/top_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

}  // namespace

TEST_SUITE("select_top") {
  TEST_CASE("the selection is the beginning of the sorted list, in either order, on every executor") {
    std::uint64_t chosen = 0;
    for (const auto seed : seeds(300, 80)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const top_world world(random);
      for (const top_order order : {top_order::by_number, top_order::by_score}) {
        const std::vector<std::int32_t> expected = world.expected(order);
        CHECK(world.select(host_executor{}, order) == expected);
        CHECK(world.select(grid_executor({.blocks = 1}), order) == expected);
        chosen += static_cast<std::uint64_t>(std::ranges::count_if(expected, [](auto e) { return e >= 0; }));
      }
    }
    CHECK(chosen > 10'000);
  }

  TEST_CASE("the lowest numbers of equal scores are chosen; -infinity and NaN are not, and -0 equals 0") {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const std::vector<float> scores{-0.0F, 5, 0.0F, std::nanf(""), -infinity, 5, infinity, -3, 0.0F, 5};
    const auto select = [&](std::uint32_t k, top_order order) {
      std::vector<std::int32_t> out(k, -7);
      std::vector<std::byte> workspace(4 * std::size_t{k});
      select_top(host_executor{}, {.scores = scores.data(), .rows = 1, .stride = 10, .candidates = 10}, k,
                 out.data(), k, order, workspace)
          .value();
      return out;
    };
    using list = std::vector<std::int32_t>;
    CHECK(select(1, top_order::by_score) == list{6});
    CHECK(select(3, top_order::by_score) == list{6, 1, 5});
    CHECK(select(6, top_order::by_score) == list{6, 1, 5, 9, 0, 2});
    CHECK(select(6, top_order::by_number) == list{0, 1, 2, 5, 6, 9});
    CHECK(select(10, top_order::by_score) == list{6, 1, 5, 9, 0, 2, 8, 7, -1, -1});
    CHECK(select(10, top_order::by_number) == list{0, 1, 2, 5, 6, 7, 8, 9, -1, -1});
  }

  TEST_CASE(
      "ranks that choose first among their own scores and then among all choices get the choice of one "
      "rank") {
    for (const auto seed : seeds(60, 20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const top_world world(random, true);
      const std::vector<std::int32_t> expected = world.expected(top_order::by_score);
      const auto ranks = static_cast<std::uint32_t>(1 + random() % 4);
      top_world all = world;
      all.scores.clear();
      all.numbers.clear();
      std::vector<std::vector<float>> scores(world.rows);
      std::vector<std::vector<std::int32_t>> numbers(world.rows);
      for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        // Token t is of rank t mod ranks.
        top_world own = world;
        own.scores.clear();
        own.counts.clear();
        own.candidates = 0;
        std::vector<std::vector<float>> mine(world.rows);
        for (std::uint64_t row = 0; row < world.rows; ++row) {
          for (std::uint32_t t = rank; t < world.count(row); t += ranks)
            mine[row].push_back(world.scores[row * world.stride + t]);
          own.candidates = std::max(own.candidates, static_cast<std::uint32_t>(mine[row].size()));
          own.counts.push_back(static_cast<std::int32_t>(mine[row].size()));
        }
        own.stride = own.candidates;
        for (auto& row : mine) {
          row.resize(own.stride, 1e9F);  // behind its count
          own.scores.insert(own.scores.end(), row.begin(), row.end());
        }
        const std::vector<std::int32_t> chosen = own.select(host_executor{}, top_order::by_score);
        for (std::uint64_t row = 0; row < world.rows; ++row) {
          for (std::uint32_t i = 0; i < world.k; ++i) {
            const std::int32_t place = chosen[row * world.k + i];
            scores[row].push_back(place < 0 ? 1e9F : mine[row][static_cast<std::size_t>(place)]);
            numbers[row].push_back(
                place < 0 ? -1 : place * static_cast<std::int32_t>(ranks) + static_cast<std::int32_t>(rank));
          }
        }
      }
      all.counts.clear();
      all.candidates = world.k * ranks;
      all.stride = all.candidates;
      for (std::uint64_t row = 0; row < world.rows; ++row) {
        all.scores.insert(all.scores.end(), scores[row].begin(), scores[row].end());
        all.numbers.insert(all.numbers.end(), numbers[row].begin(), numbers[row].end());
      }
      CHECK(all.select(host_executor{}, top_order::by_score) == expected);
      CHECK(all.select(grid_executor{}, top_order::by_number) == world.expected(top_order::by_number));
    }
  }

  TEST_CASE("what does not fit is refused") {
    const float score = 1;
    std::int32_t out = 0;
    const top_scores well{.scores = &score, .rows = 1, .stride = 1, .candidates = 1};
    const auto told = [&](const top_scores& of, std::uint32_t k, std::int32_t* to, std::uint64_t stride,
                          top_order order = top_order::by_number) {
      const auto done = select_top(host_executor{}, of, k, to, stride, order);
      return done ? failure{} : done.error();
    };
    CHECK(told(well, 1, &out, 1) == failure{});
    CHECK(told(well, 1, nullptr, 1) == failure{errc::too_short, 0, 1, 0});
    CHECK(told(well, 1, &out, 1, top_order::by_score) == failure{errc::too_short, 0, 4, 0});
    top_scores of = well;
    of.scores = nullptr;
    CHECK(told(of, 1, &out, 1) == failure{errc::too_short, 0, 1, 0});
    of = well;
    of.candidates = (1U << 20U) + 1;
    CHECK(told(of, 1, &out, 1) == failure{errc::out_of_range, 0, (1U << 20U) + 1, 1U << 20U});
    of = well;
    of.rows = 2;
    of.candidates = 2;
    CHECK(told(of, 1, &out, 1) == failure{errc::size_mismatch, 0, 2, 1});
    of.candidates = 1;
    CHECK(told(of, 2, &out, 1) == failure{errc::size_mismatch, 0, 2, 1});
    CHECK(told(of, 0, nullptr, 0) == failure{});
    static_assert(select_top_workspace_bytes({.rows = ~std::uint64_t{0}}, 2, top_order::by_score) ==
                  ~std::uint64_t{0});
  }
}
