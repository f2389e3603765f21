#include <llmmem/paging/group_observer.hpp>

#include <doctest/doctest.h>
#include <llmmem/paging/cache_metrics.hpp>
#include <llmmem/paging/event_log.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <array>
#include <cstdint>
#include <map>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

std::vector<token_id> count_up(token_id first, std::size_t count) {
  std::vector<token_id> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Chunks of 4 tokens: full attention in blocks of 4, a window of 10 in blocks of 8.
const std::array groups{full_attention({"full", 1, 10, 4}), sliding_window({"local", 1, 10, 8}, 10)};

hybrid_options options(std::uint64_t pages) {
  return {.groups = groups,
          .budget_bytes = (pages + 1) * 80,
          .page_bytes = 80,
          .max_sequences = 4,
          .max_sequence_tokens = 100,
          .name = "kv"};
}

struct logged : hybrid_traits {
  using observer = event_log;
};
struct measured : hybrid_traits {
  using observer = each_group<cache_metrics<>>;
};

struct told {
  std::vector<stored_block> stored;
  std::vector<std::vector<token_id>> tokens;
  std::vector<std::size_t> group;
};
struct teller {
  told* to = nullptr;
  void on_cached(const stored_block& stored, std::size_t group) noexcept {
    to->stored.push_back(stored);
    to->tokens.emplace_back(stored.token_ids.begin(), stored.token_ids.end());
    to->group.push_back(group);
  }
  void on_dropped(block_id, const block_key&, std::size_t) noexcept {}
};
struct telling : hybrid_traits {
  using observer = teller;
  using verification = trust_hash;
};

}  // namespace

TEST_CASE("an observer receives the block, its tokens and the previous key, in its group's block size") {
  told all;
  hybrid_allocator<telling> cache(options(20), teller{&all});
  const auto sequence = cache.create({.salt = {3, 0}}).value();
  cache.append(sequence, count_up(0, 18)).value();
  cache.commit(sequence).value();
  REQUIRE(all.stored.size() == 6);
  CHECK(all.group == std::vector<std::size_t>{0, 0, 1, 0, 0, 1});
  CHECK(all.tokens[1] == count_up(4, 4));
  CHECK(all.tokens[5] == count_up(8, 8));
  CHECK(all.stored[0].parent == block_key{});
  CHECK(all.stored[1].parent == all.stored[0].key);
  CHECK(all.stored[2].parent == block_key{});
  CHECK(all.stored[2].key == all.stored[1].key);  // the same prefix
  CHECK(all.stored[3].parent == all.stored[2].key);
  CHECK(all.stored[5].parent == all.stored[2].key);
  CHECK(all.stored[5].tokens == 8);
  CHECK(all.stored[4].block == cache.table(sequence, 0)[3]);
}

TEST_CASE("a log of all groups has one order, and names the group of each event") {
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    hybrid_allocator<logged> cache(options(12), event_log({.events = 10'000, .shares = true}));
    std::map<std::pair<std::uint32_t, std::uint64_t>, block_id> followed;
    std::uint64_t next = 0;
    std::uint64_t shared = 0;
    std::vector<cache_event> events(100);
    for (int i = 0; i < 200; ++i) {
      const auto prompt = count_up(static_cast<token_id>(random.below(std::uint32_t{6}) * 100), 20);
      const auto sequence = cache.create().value();
      shared += cache.match(sequence, prompt).value().blocks;
      const auto rest = std::span(prompt).subspan(static_cast<std::size_t>(cache.tokens(sequence)));
      if (cache.append(sequence, rest)) {
        cache.commit(sequence).value();
        if (random.once_in(3) && cache.truncate(sequence, 18)) cache.append(sequence, count_up(7, 2)).value();
      }
      cache.release(sequence).value();
      for (;;) {
        const auto got = cache.observer().read(next, events).value();
        REQUIRE(got.lost == 0);
        if (got.count == 0) break;
        for (const cache_event& event : std::span(events).first(got.count)) {
          const auto key = std::pair{event.group, event.key.low};
          if (event.kind == cache_event_kind::stored) REQUIRE(followed.emplace(key, event.block).second);
          if (event.kind == cache_event_kind::shared) {
            REQUIRE(followed.at(key) == event.block);
            --shared;
          }
          if (event.kind == cache_event_kind::removed) REQUIRE(followed.erase(key) == 1);
        }
        next = got.next;
      }
      REQUIRE(shared == 0);
      std::map<std::pair<std::uint32_t, std::uint64_t>, block_id> now;
      const std::uint64_t number =
          cache.observer().snapshot(cache, [&](const stored_key& each, std::size_t group) {
            REQUIRE(each.tokens == groups[group].block_tokens);
            now.emplace(std::pair{static_cast<std::uint32_t>(group), each.key.low}, each.block);
          });
      REQUIRE(number == next);
      REQUIRE(now == followed);
    }
    REQUIRE(cache.stats().pages.evictions > 100);
  }
}

TEST_CASE("a group's observer receives that group's events only") {
  const hybrid_options how = options(20);
  hybrid_allocator<measured> cache(how, each_group<cache_metrics<>>(groups.size(), [&](std::size_t) {
                                     return cache_metrics<>({.blocks = block_ids(how) - 1});
                                   }));
  CHECK(block_ids(how) == cache.pool().block_ids());
  const auto prompt = count_up(0, 24);
  for (int i = 0; i < 2; ++i) {
    const auto sequence = cache.create().value();
    const auto hit = cache.match(sequence, prompt).value().tokens;
    cache.append(sequence, std::span(prompt).subspan(static_cast<std::size_t>(hit))).value();
    cache.commit(sequence).value();
    cache.release(sequence).value();
  }
  CHECK(cache.observer().of(0).histograms().reuse_gap.count() == 6);
  CHECK(cache.observer().of(1).histograms().reuse_gap.count() == 2);  // tokens 15 to 23
  cache.drop_idle();
  CHECK(std::as_const(cache).observer().of(0).histograms().lifetime.count() == 6);
  CHECK(std::as_const(cache).observer().of(1).histograms().lifetime.count() == 3);
}

TEST_CASE("at most as many group observers exist as groups") {
  const auto make = [](std::size_t) { return ignore_cache_events{}; };
  CHECK_THROWS_WITH_AS(each_group<ignore_cache_events>(17, make), "each_group: 17 groups; use 1 to 16",
                       length_error);
  CHECK_THROWS_WITH_AS(each_group<ignore_cache_events>(0, make), "each_group: 0 groups; use 1 to 16",
                       length_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(block_ids({.name = "kv"})), "kv: 0 groups; use 1 to 16",
                       length_error);
}
