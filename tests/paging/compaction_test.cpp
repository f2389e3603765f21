#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/compaction.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

[[nodiscard]] block_id id(std::uint64_t i) {
  return block_id{static_cast<std::uint32_t>(i)};
}

[[nodiscard]] compaction_facts random_facts(random_numbers& random) {
  compaction_facts facts;
  const std::uint64_t blocks = 1 + random.below(std::uint64_t{24});
  facts.blocks.assign(blocks + 1, block_use::free);
  facts.blocks[0] = block_use::idle;
  facts.tables.resize(1 + random.below(std::uint64_t{4}));
  for (std::uint64_t i = 1; i <= blocks; ++i) {
    const std::uint64_t owners = random.below(std::uint64_t{4});
    if (owners == 3) facts.blocks[i] = block_use::idle;
    if (owners == 0 || owners == 3) continue;
    facts.blocks[i] = owners == 1 ? block_use::owned : block_use::shared;
    for (std::uint64_t k = 0; k < owners; ++k)
      facts.tables[(i + k * 7) % facts.tables.size()].push_back(id(i));
  }
  for (auto& table : facts.tables) {
    for (std::size_t i = table.size(); i > 1; --i)
      std::swap(table[i - 1], table[random.below(std::uint64_t{i})]);
  }
  return facts;
}

/// The highest block in use after the best `moves` moves: all in use sorted, the highest replaced by holes.
[[nodiscard]] std::uint64_t best_end(const compaction_facts& facts, std::size_t moves) {
  std::set<std::uint64_t> used;
  std::set<std::uint64_t> holes;
  for (std::uint64_t i = 1; i < facts.blocks.size(); ++i) {
    if (facts.blocks[i] == block_use::free) holes.insert(i);
    if (facts.blocks[i] == block_use::owned || facts.blocks[i] == block_use::shared) used.insert(i);
  }
  for (std::size_t i = 0; i < moves; ++i) {
    if (used.empty() || holes.empty() || *holes.begin() > *used.rbegin()) break;
    used.erase(*used.rbegin());
    used.insert(*holes.begin());
    holes.erase(holes.begin());
  }
  return used.empty() ? 0 : *used.rbegin();
}

[[nodiscard]] std::uint64_t runs(const std::vector<std::vector<block_id>>& tables) {
  std::uint64_t count = 0;
  for (const auto& table : tables) {
    for (std::size_t i = 0; i < table.size(); ++i)
      count += i == 0 || to_index(table[i]) != to_index(table[i - 1]) + 1 ? 1U : 0U;
  }
  return count;
}

}  // namespace

TEST_CASE("plans name each block once, move used blocks to free ones, and count the effect") {
  for (const auto seed : seeds(500)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const compaction_facts facts = random_facts(random);
    const compaction_goal goal{
        .what = random.once_in(2) ? compaction_goal::kind::pack : compaction_goal::kind::straighten,
        .max_moves = random.once_in(2) ? random.below(std::uint64_t{6}) : ~std::uint64_t{0}};
    const compaction_plan plan = plan_compaction(facts, goal);
    REQUIRE(plan.moves.size() <= goal.max_moves);
    std::set<block_id> named;
    std::vector<std::vector<block_id>> after = facts.tables;
    std::uint64_t entries = 0;
    for (const block_move& move : plan.moves) {
      REQUIRE(named.insert(move.source).second);
      REQUIRE(named.insert(move.destination).second);
      REQUIRE(facts.blocks[to_index(move.destination)] == block_use::free);
      REQUIRE(facts.blocks[to_index(move.source)] != block_use::free);
      REQUIRE(facts.blocks[to_index(move.source)] != block_use::idle);
      for (std::size_t t = 0; t < after.size(); ++t) {
        for (std::size_t i = 0; i < after[t].size(); ++i) {
          if (facts.tables[t][i] != move.source) continue;
          after[t][i] = move.destination;
          ++entries;
        }
      }
    }
    CHECK(plan.table_entries == entries);
    CHECK(plan.runs_before == runs(facts.tables));
    CHECK(plan.runs_after == runs(after));
    CHECK(plan.bytes(4'096) == plan.moves.size() * 4'096);
    if (goal.what == compaction_goal::kind::pack) {
      CHECK(plan.highest_before == best_end(facts, 0));
      CHECK(plan.highest_after == best_end(facts, plan.moves.size()));
      // One move more would change nothing, or would cost more than allowed.
      CHECK((plan.moves.size() == goal.max_moves ||
             best_end(facts, plan.moves.size() + 1) == plan.highest_after));
    } else {
      CHECK(plan.runs_after <= plan.runs_before);
    }
  }
}

TEST_CASE("packing stops at the given line") {
  compaction_facts facts;
  facts.blocks.assign(11, block_use::free);
  facts.blocks[0] = block_use::idle;
  for (const std::size_t used : {3U, 7U, 9U, 10U})
    facts.blocks[used] = block_use::owned;
  const compaction_plan plan = plan_compaction(facts, {.end = 7});
  CHECK(plan.moves == std::vector<block_move>{{id(10), id(1)}, {id(9), id(2)}});
  CHECK(plan.highest_after == 7);
}

TEST_CASE("compaction makes the blocks of a sequence that grew between others adjacent") {
  paged_allocator<> cache({.blocks = 16, .block_tokens = 1});
  const sequence_id one = cache.create().value();
  const sequence_id two = cache.create().value();
  for (int i = 0; i < 4; ++i) {
    REQUIRE(cache.extend(one, 1));
    REQUIRE(cache.extend(two, 1));
  }
  const compaction_plan plan =
      plan_compaction(cache.compaction_facts_now(), {.what = compaction_goal::kind::straighten});
  CHECK(plan.runs_before == 8);
  CHECK(plan.runs_after == 2);
  CHECK(plan.moves.size() == 8);
  const auto copied = [](std::span<const block_move>) noexcept { return true; };
  CHECK(cache.compact(plan.moves, copied).value() == 8);
  const std::span<const block_id> table = cache.blocks(one);
  for (std::size_t i = 1; i < table.size(); ++i)
    CHECK(to_index(table[i]) == to_index(table[i - 1]) + 1);
  CHECK(cache.audit() == std::vector<std::string>{});
}

TEST_CASE("an outdated plan is refused completely") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 1, .name = "kv"});
  const sequence_id one = cache.create().value();
  REQUIRE(cache.extend(one, 4));
  const sequence_id two = cache.create().value();
  REQUIRE(cache.extend(two, 2));
  REQUIRE(cache.truncate(one, 1));
  const compaction_plan plan = plan_compaction(cache.compaction_facts_now(), {});
  REQUIRE(plan.moves == std::vector<block_move>{{id(6), id(2)}, {id(5), id(3)}});
  bool asked = false;
  const auto copy = [&](std::span<const block_move>) noexcept { return asked = true; };
  SUBCASE("a source is free") {
    REQUIRE(cache.truncate(two, 1));
    CHECK(cache.compact(plan.moves, copy).error().message() ==
          "kv: move 0 of the plan, block 6 to 2, is not possible: the source must be in use and the "
          "destination free; make a new plan");
  }
  SUBCASE("a destination is in use") {
    REQUIRE(cache.extend(one, 2));
    CHECK(cache.compact(plan.moves, copy).code() == errc::stale_plan);
  }
  SUBCASE("a block is named twice") {
    const std::vector<block_move> twice{{id(6), id(2)}, {id(5), id(2)}};
    CHECK(cache.compact(twice, copy).code() == errc::stale_plan);
  }
  SUBCASE("a block does not exist") {
    const std::vector<block_move> none{{id(6), id(9)}};
    CHECK(cache.compact(none, copy).code() == errc::stale_plan);
  }
  CHECK_FALSE(asked);
  CHECK(cache.audit() == std::vector<std::string>{});
}

TEST_CASE("if the copy stops, moved blocks stay moved and the rest stays in place") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 1});
  const sequence_id one = cache.create().value();
  REQUIRE(cache.extend(one, 4));
  const sequence_id two = cache.create().value();
  REQUIRE(cache.extend(two, 4));
  REQUIRE(cache.truncate(one, 0));
  const compaction_plan plan = plan_compaction(cache.compaction_facts_now(), {});
  REQUIRE(plan.moves.size() == 4);
  int groups = 0;
  CHECK(cache.compact(
                 plan.moves, [&](std::span<const block_move>) noexcept { return ++groups < 3; }, 1)
            .value() == 2);
  const std::span<const block_id> table = cache.blocks(two);
  CHECK(std::vector(table.begin(), table.end()) == std::vector{id(5), id(6), id(2), id(1)});
  CHECK(cache.audit() == std::vector<std::string>{});
}

TEST_CASE("packing lets a pool shrink while sequences run") {
  paged_allocator<> cache({.blocks = 8, .block_tokens = 2});
  const std::vector<token_id> prompt{1, 2, 3, 4, 5, 6};
  const sequence_id gone = cache.create().value();
  REQUIRE(cache.extend(gone, 8));
  const sequence_id stays = cache.create().value();
  REQUIRE(cache.append(stays, prompt));
  REQUIRE(cache.commit(stays));
  REQUIRE(cache.release(gone));
  const compaction_plan plan = plan_compaction(cache.compaction_facts_now(), {});
  REQUIRE(cache.compact(plan.moves, [](std::span<const block_move>) noexcept { return true; }));
  CHECK(cache.resize(3).value() == 0);
  CHECK(cache.cached_tokens(prompt) == 6);
  CHECK(cache.audit() == std::vector<std::string>{});
}
