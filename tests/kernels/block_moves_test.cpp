#include <llmmem/kernels/block_moves.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "support/cache_world.hpp"
#include "support/comm_job.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem::testing::grid_executor;

/// What is in each block after all moves at once, each beginning with its own number.
std::vector<std::int64_t> after(std::span<const block_pair> moves, std::int64_t blocks) {
  std::vector<std::int64_t> now(static_cast<std::size_t>(blocks));
  std::iota(now.begin(), now.end(), 0);
  const std::vector<std::int64_t> before = now;
  for (const block_pair& each : moves) {
    if (each.from >= 0 && each.to >= 0)
      now[static_cast<std::size_t>(each.to)] = before[static_cast<std::size_t>(each.from)];
  }
  return now;
}

/// What a plan makes of them, each wave at once. A block that a wave both reads and writes is -1 from then
/// on.
std::vector<std::int64_t> carried_out(const block_move_plan& plan, std::int64_t blocks) {
  std::vector<std::int64_t> now(static_cast<std::size_t>(blocks));
  std::iota(now.begin(), now.end(), 0);
  for (std::uint64_t i = 0; i < plan.waves(); ++i) {
    const auto wave = plan.wave(plan.pairs, i);
    const std::vector<std::int64_t> before = now;
    for (const block_pair& each : wave) {
      const bool is_read =
          std::ranges::any_of(wave, [&](const block_pair& other) { return other.from == each.to; });
      now[static_cast<std::size_t>(each.to)] = is_read ? -1 : before[static_cast<std::size_t>(each.from)];
    }
    CHECK_FALSE(wave.empty());
  }
  return now;
}

struct move_world {
  std::vector<block_pair> moves{};
  std::vector<std::int64_t> scratch{};
  std::int64_t blocks = 0;

  explicit move_world(std::mt19937_64& random) : blocks(static_cast<std::int64_t>(2 + random() % 40)) {
    std::vector<std::int64_t> places(static_cast<std::size_t>(blocks));
    std::iota(places.begin(), places.end(), 0);
    std::ranges::shuffle(places, random);
    const std::size_t scratch_blocks = 1 + random() % std::min<std::size_t>(places.size() - 1, 4);
    scratch.assign(places.end() - static_cast<std::ptrdiff_t>(scratch_blocks), places.end());
    places.resize(places.size() - scratch_blocks);
    std::vector<std::int64_t> from = places;
    std::ranges::shuffle(from, random);
    const bool fans_out = random() % 3 == 0;
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (random() % 8 == 0) moves.push_back({-1, places[i]});
      if (random() % 4 == 0) continue;
      moves.push_back({fans_out ? from[random() % from.size()] : from[i], places[i]});
    }
  }
};

}  // namespace

TEST_SUITE("block_moves") {
  TEST_CASE("waves give the result of simultaneous moves, and no wave reads what it writes") {
    for (const auto seed : llmmem_tests::seeds(500)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const move_world world(random);
      const block_move_plan plan =
          plan_block_moves(world.moves, static_cast<std::uint64_t>(world.blocks), world.scratch);
      std::vector<std::int64_t> expected = after(world.moves, world.blocks);
      std::vector<std::int64_t> got = carried_out(plan, world.blocks);
      for (const std::int64_t each : world.scratch)
        expected[static_cast<std::size_t>(each)] = got[static_cast<std::size_t>(each)] = 0;
      CHECK(got == expected);
    }
  }

  TEST_CASE("the bytes of all layers move as planned, by every executor") {
    for (const auto seed : llmmem_tests::seeds(60)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const move_world world(random);
      const auto blocks = static_cast<std::uint64_t>(world.blocks);
      const kv_layout layout = llmmem_tests::any_layout(random);
      const block_move_plan plan = plan_block_moves(world.moves, blocks, world.scratch);
      const auto before = llmmem_tests::bytes_of_seed(layout.total_bytes(blocks), random());
      std::vector<std::byte> expected = before;
      const auto copied = [&](std::vector<std::byte>& to) { return kv_memory{to.data(), blocks, layout}; };
      std::vector<std::byte> source = before;
      std::vector<block_pair> real;
      std::ranges::copy_if(world.moves, std::back_inserter(real),
                           [](const block_pair& each) { return each.from >= 0 && each.to >= 0; });
      copy_kv_blocks(host_executor{}, copied(expected), copied(source), real).value();
      const auto check = [&](const auto& run) {
        std::vector<std::byte> memory = before;
        move_kv_blocks(run, copied(memory), plan, plan.pairs).value();
        // What is in scratch blocks is lost: as before, for the comparison.
        std::vector<block_pair> back;
        for (const std::int64_t each : world.scratch)
          back.push_back({each, each});
        copy_kv_blocks(host_executor{}, copied(memory), copied(source), back).value();
        CHECK(memory == expected);
      };
      check(host_executor{});
      check(grid_executor());
    }
  }

  TEST_CASE("the number of waves is the minimum that chains, cycles and scratch blocks allow") {
    const auto waves = [](const std::vector<block_pair>& moves, const std::vector<std::int64_t>& scratch) {
      return plan_block_moves(moves, 20, scratch).waves();
    };
    CHECK(waves({}, {}) == 0);
    CHECK(waves({{3, 3}, {-1, 4}, {4, -1}}, {}) == 0);
    CHECK(waves({{1, 5}, {2, 6}, {2, 7}}, {}) == 1);
    const std::vector<block_pair> chain{{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}};
    CHECK(waves(chain, {}) == 5);
    CHECK(waves(chain, {10, 11, 12}) == 5);
    CHECK(waves(chain, {10, 11, 12, 13}) == 3);
    const std::vector<block_pair> two_cycles{{0, 1}, {1, 2}, {2, 0}, {3, 4}, {4, 3}};
    CHECK(waves(two_cycles, {10}) == 1 + 3 + 1 + 2);
    CHECK(waves(two_cycles, {10, 11}) == 1 + 3);
    CHECK(waves(two_cycles, {10, 11, 12, 13, 14}) == 2);
    CHECK(waves({{0, 1}, {1, 0}, {2, 2}}, {10, 11}) == 2);
  }

  TEST_CASE("an impossible plan is refused with what is wrong and how to resolve it") {
    const auto plan = [](const std::vector<block_pair>& moves, const std::vector<std::int64_t>& scratch) {
      return plan_block_moves(moves, 8, scratch);
    };
    CHECK_THROWS_WITH_AS(plan({{1, 2}, {3, 8}}, {}),
                         "plan_block_moves: move 1 names block 8, but there are 8, numbered from 0",
                         argument_error);
    CHECK_THROWS_AS(plan({{8, 1}}, {}), argument_error);
    CHECK_THROWS_WITH_AS(plan({{1, 2}, {3, 2}}, {}),
                         "plan_block_moves: move 1 writes block 2, which another move writes; give each "
                         "block at most one move",
                         argument_error);
    CHECK_THROWS_AS(plan({{2, 2}, {3, 2}}, {}), argument_error);
    CHECK_THROWS_WITH_AS(
        plan({{1, 2}}, {2}),
        "plan_block_moves: scratch block 2 is named by a move; give a block that no move names",
        argument_error);
    CHECK_THROWS_AS(plan({{1, 2}}, {1}), argument_error);
    CHECK_THROWS_AS(plan({{1, 2}}, {5, 5}), argument_error);
    CHECK_THROWS_WITH_AS(plan({{1, 2}}, {5, -1}),
                         "plan_block_moves: scratch entry 1 names block -1, but there are 8, numbered from 0",
                         argument_error);
    CHECK_THROWS_WITH_AS(
        plan({{4, 5}, {1, 2}, {2, 1}}, {}),
        "plan_block_moves: block 2 is in a cycle of moves, and there is no scratch block; give one "
        "that no move names",
        argument_error);
    const block_move_plan fine = plan({{1, 2}}, {});
    CHECK(move_kv_blocks(host_executor{}, {}, fine, {}).error() == failure{errc::size_mismatch, 0, 1, 0});
  }
}
