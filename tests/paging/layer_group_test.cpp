#include <llmmem/model/presets.hpp>
#include <llmmem/paging/detail/hybrid_record.hpp>
#include <llmmem/paging/layer_group.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "support/hybrid_world.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

layer_group random_group(random_numbers& random) {
  return {.kind = layer_kind(random.below(std::uint32_t{4})),
          .reach = 1 + random.below(std::uint64_t{20}),
          .block_tokens = 1 + random.below(std::uint32_t{6}),
          .block_bytes = 1};
}

}  // namespace

TEST_CASE("skipped, dead and live tokens are those that the next token's attention implies, token by token") {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const layer_group group = random_group(random);
    for (std::uint64_t n = 0; n < 50; ++n) {
      std::uint64_t skipped = 0;
      while (skipped < n && !looks_at(group, n, skipped))
        ++skipped;
      REQUIRE(group.skipped_tokens(n) == skipped);
      std::uint64_t dead = 0;
      while ((dead + 1) * group.block_tokens <= skipped)
        ++dead;
      REQUIRE(group.dead_blocks(n) == dead);
      REQUIRE(group.live_blocks(n) == block_range{dead, (n + group.block_tokens - 1) / group.block_tokens});
      const std::uint64_t more = random.below(std::uint64_t{20});
      REQUIRE(group.blocks_to_append(n, more) == group.blocks_for(n + more) - group.blocks_for(n));
    }
  }
}

TEST_CASE("the length with so many dead blocks is the first one at which counting finds them") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const layer_group group = random_group(random);
    for (std::uint64_t blocks = 1; blocks < 6; ++blocks) {
      std::uint64_t length = 0;
      while (length < 200 && group.dead_blocks(length) < blocks)
        ++length;
      const std::uint64_t told = llmmem::detail::length_with_dead_blocks(group, blocks);
      REQUIRE((length == 200 ? told >= length : told == length));
    }
  }
  // A window or chunk larger than any sequence never frees a block.
  const std::uint64_t most = ~std::uint64_t{0};
  CHECK(llmmem::detail::length_with_dead_blocks(sliding_window({"w", 1, 1}, most), 2) == most);
  CHECK(llmmem::detail::length_with_dead_blocks(chunked_local({"c", 1, 1}, most), 2) == most);
}

TEST_CASE("a window of w tokens holds the token itself and w - 1 before it") {
  const layer_group one = sliding_window({"local", 1, 1, 1}, 1);
  CHECK(one.skipped_tokens(5) == 5);
  const layer_group four = sliding_window({"local", 1, 1, 1}, 4);
  CHECK(four.skipped_tokens(3) == 0);  // the token at 3 looks at 0 to 3
  CHECK(four.skipped_tokens(4) == 1);
  const layer_group blocks = sliding_window({"local", 1, 1, 4}, 4);
  CHECK(blocks.dead_blocks(6) == 0);  // the token at 6 looks at 3
  CHECK(blocks.dead_blocks(7) == 1);
}

TEST_CASE("a chunk forgets all earlier tokens at its first token") {
  const layer_group group = chunked_local({"chunked", 1, 1, 4}, 8);
  CHECK(group.skipped_tokens(7) == 0);
  CHECK(group.skipped_tokens(8) == 8);
  CHECK(group.hit_blocks(8).count() == 0);
  CHECK(group.hit_blocks(12) == block_range{2, 3});
}

TEST_CASE("only the last state is used, and a hit ends where one was kept") {
  const layer_group group = state_snapshots("mamba", 2, 300, 8);
  CHECK(group.block_bytes == 600);
  CHECK(group.live_blocks(8) == block_range{0, 1});
  CHECK(group.live_blocks(9) == block_range{1, 2});
  CHECK(group.live_blocks(16) == block_range{1, 2});
  CHECK(group.may_end_hit(16));
  CHECK(!group.may_end_hit(20));
  CHECK(group.hit_blocks(16) == block_range{1, 2});
}

TEST_CASE("a sequence can be truncated to where the next token still finds what it attends to") {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const layer_group group = random_group(random);
    const std::uint64_t length = random.below(std::uint64_t{50});
    const std::uint64_t gone = random.below(group.dead_blocks(length) + 1);
    for (std::uint64_t n = 0; n <= length; ++n) {
      // Of the tokens that stay, those looked at, and those in the block that the next token goes on in.
      bool there = true;
      for (std::uint64_t other = 0; other < n; ++other) {
        const bool same_block =
            n % group.block_tokens != 0 && other / group.block_tokens == n / group.block_tokens;
        if (looks_at(group, n, other) || same_block) there = there && other / group.block_tokens >= gone;
      }
      // A state is kept where a block ends; the present one is where the sequence ends.
      if (group.kind == layer_kind::state_snapshots && n != length && n % group.block_tokens != 0)
        there = false;
      REQUIRE(group.can_cut(n, length, gone) == there);
    }
  }
}

TEST_CASE("block bytes follow from layers, tokens and the model's shape") {
  CHECK(full_attention({"full", 21, 8192, 16}).block_bytes == 2'752'512);
  CHECK(mla(models::deepseek_v3, 64).block_bytes == 64 * 70'272);
  static_assert(sliding_window({"local", 1, 2, 3}, 4).block_bytes == 6);
}

TEST_CASE("an impossible group is refused with its name") {
  CHECK_THROWS_WITH_AS(full_attention({"full", 1, 1, 0}).validate(),
                       "layer_group full: block_tokens is 0; a block holds at least 1 token", argument_error);
  CHECK_THROWS_WITH_AS(full_attention({"full", 0, 1, 16}).validate(),
                       "layer_group full: block_bytes is 0; give the bytes that its layers keep",
                       argument_error);
  CHECK_THROWS_WITH_AS(sliding_window({"local", 1, 1, 16}, 0).validate(),
                       "layer_group local: reach is 0; a window or chunk has at least 1 token",
                       argument_error);
}

TEST_CASE("the scan finds the longest length that every group can serve, as trying each does") {
  std::uint64_t hits = 0;
  for (const auto seed : seeds(2'000)) {
    CAPTURE(seed);
    random_numbers random(seed);
    std::vector<layer_group> groups;
    for (std::uint64_t g = 1 + random.below(std::uint64_t{3}); g > 0; --g)
      groups.push_back(random_group(random));
    const std::uint64_t length = 60;
    std::vector<std::vector<bool>> cached;
    for (const layer_group& each : groups) {
      cached.emplace_back(length / each.block_tokens);
      for (std::size_t i = 0; i < cached.back().size(); ++i)
        cached.back()[i] = !random.once_in(9);
    }
    std::uint64_t longest = 0;
    for (std::uint64_t n = 1; n <= length; ++n) {
      bool hit = true;
      bool needs_any = false;
      for (std::size_t g = 0; g < groups.size(); ++g) {
        if (n % groups[g].block_tokens != 0) hit = false;
        for (std::uint64_t other = 0; other < n && hit; ++other) {
          if (!looks_at(groups[g], n, other)) continue;
          needs_any = true;
          hit = cached[g][other / groups[g].block_tokens];
        }
      }
      if (hit && needs_any) longest = n;
    }
    llmmem::paging::hit_scan scan(groups);
    std::uint64_t found = 0;
    for (std::uint64_t n = 1; n <= length && !scan.is_exhausted(); ++n) {
      for (std::size_t g = 0; g < groups.size(); ++g) {
        if (n % groups[g].block_tokens == 0) scan.add(g, cached[g][n / groups[g].block_tokens - 1]);
      }
      if (scan.has_hit(n)) found = n;
    }
    REQUIRE(found == longest);
    hits += longest != 0 ? 1 : 0;
  }
  CHECK(hits > 500);
}
