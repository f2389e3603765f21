#include <llmmem/paging/sharded_free_list.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <set>
#include <span>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

TEST_CASE("a batch is taken completely, from any shards that have it, or not at all") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint32_t blocks = 1 + random.below(std::uint32_t{40});
    sharded_free_list list(blocks, 1 + random.below(std::uint32_t{5}));
    std::vector<block_id> held(blocks);
    for (std::uint32_t i = 0; i < blocks; ++i)
      held[i] = block_id{i + 1};
    std::set<block_id> free;
    for (int step = 0; step < 200; ++step) {
      const shard_id shard{random.below(std::uint32_t{7})};
      if (random.once_in(2)) {
        const std::size_t count = random.below(held.size() + 1);
        const std::vector<block_id> given(held.end() - static_cast<std::ptrdiff_t>(count), held.end());
        held.resize(held.size() - count);
        list.push(given, shard);
        free.insert(given.begin(), given.end());
      } else {
        std::vector<block_id> out(random.below(free.size() + 3));
        REQUIRE(list.try_take(out, shard) == (out.size() <= free.size()));
        if (out.size() > free.size()) continue;
        for (const block_id block : out)
          REQUIRE(free.erase(block) == 1);
        held.insert(held.end(), out.begin(), out.end());
      }
      REQUIRE(list.size() == free.size());
      std::set<block_id> listed;
      list.for_each([&](block_id block) { listed.insert(block); });
      REQUIRE(listed == free);
    }
  }
}

TEST_CASE("a thread's own shard comes first, with the last returned block") {
  sharded_free_list list(8, 2);
  list.push(std::array{block_id{1}, block_id{2}}, shard_id{0});
  list.push(std::array{block_id{3}, block_id{4}}, shard_id{1});
  list.push(std::array{block_id{5}}, shard_id{1});
  std::array<block_id, 4> out{};
  CHECK(list.try_take(out, shard_id{1}));
  CHECK(out == std::array{block_id{5}, block_id{3}, block_id{4}, block_id{1}});
}
