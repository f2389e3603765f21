#include <llmmem/eviction/any.hpp>
#include <llmmem/paging/journal.hpp>
#include <llmmem/paging/journal_what_if.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/journal_world.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using traced_cache = paged_allocator<what_if_traits>;
using traced_journal = llmmem::paging::journaled<traced_cache, memory_journal>;

struct workload {
  std::uint64_t seed;
  bool by_keys = false;
};

/// Requests that share prefixes, one after the other: a request begins when the one before has ended.
struct served {
  paged_stats stats;
  std::vector<std::byte> journal;
};

served serve(const workload& work, const std::string& policy, const paged_options& options) {
  traced_journal cache(options, memory_journal(1 << 20), policy,
                       make_eviction(policy, slot_count{options.blocks + 1}));
  random_numbers random(work.seed);
  for (int i = 0; i < 150; ++i) {
    const std::uint64_t family = random.below(std::uint64_t{6}) * random.below(std::uint64_t{2});
    std::vector<token_id> prompt;
    for (std::uint64_t k = 4 + random.below(std::uint64_t{16}); k > 0; --k)
      prompt.push_back(static_cast<token_id>(family * 100 + k % 4));
    std::vector<token_id> more(random.below(std::uint64_t{9}), 7);
    const auto id = cache.create().value();
    if (work.by_keys) {
      std::vector<block_key> keys;
      for (std::uint64_t k = 0; k < (prompt.size() + 3) / 4; ++k)
        keys.push_back(
            key_from_id(family * 1000 + k * 10 + (k == prompt.size() / 4 ? prompt.size() % 4 : 0)));
      const keyed_blocks keyed{.keys = keys, .tokens = prompt.size()};
      const auto hit = cache.match(id, keyed).value();
      cache.extend(id, prompt.size() - hit.tokens).value();
      cache.commit(id, keyed).value();
      cache.extend(id, more.size()).value();
    } else {
      const auto hit = cache.match(id, prompt).value();
      cache.append(id, std::span(prompt).subspan(hit.tokens)).value();
      cache.commit(id).value();
      cache.append(id, more).value();
      cache.commit(id).value();
    }
    cache.release(id).value();
  }
  const auto bytes = cache.sink().bytes();
  return {cache.stats(), std::vector<std::byte>(bytes.begin(), bytes.end())};
}

const paged_options small{.blocks = 14, .block_tokens = 4, .max_sequences = 4, .max_sequence_tokens = 40};

}  // namespace

TEST_CASE("a what-if result equals that of the run that it predicts") {
  // Recorded under one policy and asked of another: as if that one had served the requests itself.
  std::uint64_t differing = 0;
  for (const auto seed : seeds(12)) {
    CAPTURE(seed);
    for (const bool by_keys : {false, true}) {
      CAPTURE(by_keys);
      const served recorded = serve({seed, by_keys}, "fifo", small);
      for (const std::string_view policy : eviction_names) {
        if (policy == "min") continue;  // it is told more here
        CAPTURE(policy);
        const paged_stats real = serve({seed, by_keys}, std::string(policy), small).stats;
        const what_if_result asked = what_if(recorded.journal, std::array{policy}).at(0);
        CHECK(asked.hit_tokens == real.hit_tokens);
        CHECK(asked.hit_blocks == real.hit_blocks);
        CHECK(asked.requested_blocks == real.requested_blocks);
        CHECK(asked.skipped == 0);
        CHECK(asked.sequences == 150);
        differing += real.hit_tokens != recorded.stats.hit_tokens ? 1U : 0U;
      }
    }
  }
  CHECK(differing > 50);
}

TEST_CASE("a what-if with another size equals a recording with that size") {
  for (const auto seed : seeds(8)) {
    CAPTURE(seed);
    for (const bool by_keys : {false, true}) {
      const served recorded = serve({seed, by_keys}, "lru", small);
      for (const std::uint64_t blocks : {9U, 20U, 60U}) {
        CAPTURE(blocks);
        paged_options sized = small;
        sized.blocks = blocks;
        const std::array policy{std::string_view("lru")};
        const what_if_result asked = what_if(recorded.journal, policy, {.blocks = blocks}).at(0);
        CHECK(asked.hit_tokens == serve({seed, by_keys}, "lru", sized).stats.hit_tokens);
      }
      paged_options trimmed = small;
      trimmed.max_idle_blocks = 5;
      const std::array policy{std::string_view("lru")};
      const what_if_result asked = what_if(recorded.journal, policy, {.max_idle_blocks = 5}).at(0);
      CHECK(asked.hit_tokens == serve({seed, by_keys}, "lru", trimmed).stats.hit_tokens);
    }
  }
}

TEST_CASE("for prompts by keys no policy hits more than MIN, which knows the future") {
  std::uint64_t more = 0;
  for (const auto seed : seeds(10)) {
    CAPTURE(seed);
    const served recorded = serve({seed, true}, "lru", small);
    const auto all = what_if(recorded.journal, eviction_names);
    const auto min =
        std::find_if(all.begin(), all.end(), [](const auto& each) { return each.policy == "min"; });
    std::uint64_t best = 0;
    for (const what_if_result& each : all) {
      if (each.policy != "min") best = std::max(best, each.hit_tokens);
    }
    CHECK(min->hit_tokens + min->hit_tokens / 20 >= best);  // blocks of a chain are no independent items
    more += min->hit_tokens > best ? 1U : 0U;
  }
  CHECK(more > 3);
}

TEST_CASE("a sequence that finds no blocks is abandoned and counted, and those after it continue") {
  traced_journal cache({.blocks = 8, .block_tokens = 4, .max_sequences = 4}, memory_journal(10'000));
  const std::vector<token_id> prompt{1, 2, 3, 4, 5, 6, 7, 8};
  const auto first = cache.create().value();
  cache.append(first, prompt).value();
  const auto second = cache.create().value();
  cache.append(second, prompt).value();
  const auto twin = cache.fork(second).value();
  cache.append(twin, prompt).value();
  cache.release(second).value();
  cache.release(twin).value();
  cache.commit(first).value();
  cache.release(first).value();
  const auto third = cache.create().value();
  CHECK(cache.match(third, prompt).value().tokens == 8);
  cache.release(third).value();
  const std::array policy{std::string_view("lru")};
  const what_if_result asked = what_if(cache.sink().bytes(), policy, {.blocks = 3}).at(0);
  CHECK(asked.sequences == 4);
  CHECK(asked.skipped == 2);
  CHECK(asked.hit_tokens == 8);
  CHECK(asked.requested_tokens == 8);
  CHECK(asked.hit_ratio() == 1.0);
}

TEST_CASE("any journal can be replayed under every policy and size") {
  std::uint64_t skipped = 0;
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    journal_world<what_if_traits> world(seed);
    for (int i = 0; i < 200; ++i)
      world.step();
    for (const std::uint64_t blocks : {1U, 6U, 40U}) {
      for (const what_if_result& each : what_if(world.bytes(), eviction_names, {.blocks = blocks})) {
        CHECK(each.skipped <= each.sequences);
        CHECK(each.hit_tokens <= each.requested_tokens);
        skipped += each.skipped;
      }
    }
  }
  CHECK(skipped > 1'000);
}

TEST_CASE("an unknown policy is refused by its name") {
  const traced_journal cache({.blocks = 4}, memory_journal(1000));
  const std::array policy{std::string_view("best")};
  CHECK_THROWS_AS(what_if(cache.sink().bytes(), policy), argument_error);
  CHECK(what_if_result{}.hit_ratio() == 0.0);
}
