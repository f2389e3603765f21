#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kept_tokens.hpp>
#include <llmmem/kernels/select_tokens.hpp>
#include <llmmem/kernels/select_top.hpp>
#include <llmmem/paging/named_forms.hpp>
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

#include "support/kept_world.hpp"
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

TEST_SUITE("select_tokens") {
  TEST_CASE("the first, the last and the best of the rest are kept, as sorting says, on every executor") {
    std::uint64_t kept = 0;
    std::uint64_t left_out = 0;
    for (const auto seed : seeds(120, 60)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const scored_world world(random);
      const std::vector<std::int32_t> expected = world.expected();
      CHECK(world.select(host_executor{}) == expected);
      CHECK(world.select(grid_executor({.blocks = 1})) == expected);
      const auto count =
          static_cast<std::uint64_t>(std::ranges::count_if(expected, [](auto e) { return e >= 0; }));
      kept += count;
      for (std::uint64_t s = 0; s < world.sequences; ++s)
        left_out += std::uint64_t{world.length(s)} * world.kv_heads;
      left_out -= count;
    }
    CHECK(kept > 2'000);
    CHECK(left_out > 2'000);
  }

  TEST_CASE("a group's heads join by sum or by the largest; a NaN is below -infinity, and still a token") {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    // Two query heads of one KV head.
    const std::vector<float> scores{1, 5,  nan, -infinity, 2, nan, 0,  //
                                    1, -5, 9,   -infinity, 2, nan, 1};
    using list = std::vector<std::int32_t>;
    const auto select = [&](const token_budget& budget, score_join join) {
      list out(budget.budget, -7);
      select_tokens(
          host_executor{},
          {.scores = scores.data(), .sequences = 1, .query_heads = 2, .tokens = 7, .stride = 7, .join = join},
          budget, out.data(), out.size())
          .value();
      return out;
    };
    CHECK(select({.budget = 3}, score_join::sum) == list{0, 4, 6});
    CHECK(select({.budget = 3}, score_join::largest) == list{1, 2, 4});
    CHECK(select({.budget = 5}, score_join::sum) == list{0, 1, 3, 4, 6});
    CHECK(select({.budget = 6}, score_join::sum) == list{0, 1, 2, 3, 4, 6});
    CHECK(select({.budget = 6}, score_join::largest) == list{0, 1, 2, 3, 4, 6});
    CHECK(select({.budget = 3, .sinks = 1, .recent = 1}, score_join::largest) == list{0, 2, 6});
    CHECK(select({.budget = 2, .sinks = 1, .recent = 1}, score_join::sum) == list{0, 6});
    CHECK(select({.budget = 9, .sinks = 4, .recent = 5}, score_join::sum) ==
          list{0, 1, 2, 3, 4, 5, 6, -1, -1});
  }

  TEST_CASE("a budget of 0, a sequence of one token, and what does not fit") {
    const float score = std::numeric_limits<float>::quiet_NaN();
    std::int32_t out[2] = {-7, -7};
    const token_scores well{.scores = &score, .sequences = 1, .tokens = 1, .stride = 1};
    const auto told = [&](const token_scores& of, const token_budget& budget, std::int32_t* to,
                          std::uint64_t stride = 9) {
      const auto done = select_tokens(host_executor{}, of, budget, to, stride);
      return done ? failure{} : done.error();
    };
    CHECK(told(well, {}, nullptr) == failure{});
    CHECK(told(well, {.budget = 2, .recent = 1}, out) == failure{});
    CHECK(out[0] == 0);
    CHECK(out[1] == -1);
    CHECK(told({}, {.budget = 1}, nullptr) == failure{});
    CHECK(told(well, {.budget = 1}, nullptr) == failure{errc::too_short, 0, 1, 0});
    CHECK(told(well, {.budget = 3, .sinks = 2, .recent = 2}, out) == failure{errc::out_of_range, 0, 4, 3});
    CHECK(told(well, {.budget = 3, .sinks = ~0U, .recent = 2}, out) ==
          failure{errc::out_of_range, 0, 0x1'0000'0001, 3});
    token_scores of = well;
    of.scores = nullptr;
    CHECK(told(of, {.budget = 1}, out) == failure{errc::too_short, 0, 1, 0});
    of = well;
    of.query_heads = 3;
    of.kv_heads = 2;
    CHECK(told(of, {.budget = 1}, out) == failure{errc::bad_granularity, 0, 3, 2});
    of.kv_heads = 0;
    CHECK(told(of, {.budget = 1}, out) == failure{errc::bad_granularity, 0, 3, 0});
    of = well;
    of.tokens = (1U << 20U) + 1;
    CHECK(told(of, {.budget = 1}, out) == failure{errc::out_of_range, 0, (1U << 20U) + 1, 1U << 20U});
    of = well;
    of.query_heads = 2;
    of.tokens = 2;
    CHECK(told(of, {.budget = 1}, out) == failure{errc::size_mismatch, 0, 2, 1});
    of.tokens = 1;
    of.kv_heads = 2;
    CHECK(told(of, {.budget = 2}, out, 1) == failure{errc::size_mismatch, 0, 2, 1});
  }
}

TEST_SUITE("kept_tokens") {
  TEST_CASE("each list's tokens are copied byte by byte, in every form, and nothing else is written") {
    std::uint64_t by_head = 0;
    for (const auto seed : seeds(200, 80)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      kept_world world(random);
      by_head += world.heads > 1 ? 1 : 0;
      const std::vector<std::byte> expected = world.expected();
      CHECK(world.copy(host_executor{}) == expected);
      CHECK(world.copy(grid_executor({.blocks = 2})) == expected);
    }
    CHECK(by_head > 10);
  }

  TEST_CASE("tokens without a place are left out and flagged; what does not fit is refused") {
    const kv_layout layout{.layers = 1, .heads = 2, .head_dim = 8, .block_tokens = 2};
    std::vector<std::byte> from(layout.total_bytes(3), std::byte{1});
    std::vector<std::byte> to(layout.total_bytes(3), poison);
    std::vector<std::int32_t> table{2, 1};
    std::vector<std::int32_t> fresh{0};
    std::vector<std::int32_t> lists{1, 4};  // a sequence of two blocks has no token 4
    padded_table_view old{
        .block_table = table.data(), .num_sequences = 1, .max_blocks = 2, .block_tokens = 2};
    padded_table_view blocks{
        .block_table = fresh.data(), .num_sequences = 1, .max_blocks = 1, .block_tokens = 2};
    kept_tokens kept{.listed = lists.data(), .sequences = 1, .budget = 2, .stride = 2};
    std::uint32_t flag = 0;
    kv_memory target{to.data(), 3, layout};
    kv_memory source{from.data(), 3, layout};
    std::uint32_t layer = 0;
    const auto told = [&] {
      const auto done = copy_kept_tokens(host_executor{}, target, blocks, source, old, kept, layer, &flag);
      return done ? failure{} : done.error();
    };
    CHECK(told() == failure{});
    CHECK(flag == 1);
    CHECK(std::ranges::count(to, std::byte{1}) == 2 * 2 * 8 * 2);
    flag = 0;
    lists = {1, 2};
    CHECK(told() == failure{});
    CHECK(flag == 0);
    fresh = {3};
    CHECK(told() == failure{});
    CHECK(flag == 1);
    layer = 1;
    CHECK(told() == failure{errc::out_of_range, 0, 1, 0});
    layer = 0;
    kept.heads = 3;
    CHECK(told() == failure{errc::size_mismatch, 0, 3, 2});
    kept.heads = 2;
    kept.stride = 1;
    CHECK(told() == failure{errc::size_mismatch, 0, 2, 1});
    kept = {.listed = nullptr, .sequences = 1, .budget = 2, .stride = 2};
    CHECK(told() == failure{errc::too_short, 0, 2, 0});
    kept.sequences = 2;
    CHECK(told() == failure{errc::size_mismatch, 0, 2, 1});
    kept.sequences = 1;
    kept.listed = lists.data();
    old.block_tokens = 4;
    CHECK(told() == failure{errc::block_tokens_differ, 0, 4, 2});
    old.block_tokens = 2;
    old.block_table = nullptr;
    CHECK(told() == failure{errc::too_short, 0, 1, 0});
    old.block_table = table.data();
    source.data = nullptr;
    CHECK(told().code == errc::too_short);
    source.data = from.data();
    source.layout.model = 5;
    CHECK(told().code == errc::layout_mismatch);
    const auto refused = [&](const kv_layout& form) {
      target.layout = source.layout = form;
      return told();
    };
    const kv_layout shape{.layers = 1, .heads = 2, .head_dim = 64, .block_tokens = 2};
    CHECK(refused(paging::in_form(shape, paging::named_form::int4_by_channel)) ==
          failure{errc::unsupported_layout, 14, 2, 1});
    CHECK(refused(paging::in_form(shape, paging::named_form::int4_by_channel))
              .message()
              .find("into an open block") != std::string::npos);
    kv_layout nvfp4 = paging::in_form(shape, paging::named_form::nvfp4);
    CHECK(nvfp4.key_scales.has_global == (refused(nvfp4) != failure{}));
    kv_layout indexed = shape;
    indexed.has_values = false;
    indexed.index_dim = 16;
    kept.heads = 2;
    kept.stride = 2;
    CHECK(refused(indexed) == failure{errc::unsupported_layout, 15, 1, 2});
    kv_layout part = shape;
    part.part.cp_size = 2;
    CHECK(refused(part) == failure{errc::unsupported_layout, 17, 1, 2});
  }
}
