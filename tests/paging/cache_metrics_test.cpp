#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/cache_metrics.hpp>
#include <llmmem/paging/event_log.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <map>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

struct measured : paged_traits {
  using observer = cache_metrics<>;
};
using measured_cache = paged_allocator<measured>;

/// The definition: every event of every block kept, and counted at the end.
struct naive_metrics {
  struct life {
    std::vector<std::uint64_t> uses;  // the first: when it was stored
  };
  std::map<block_id, life> living;
  std::uint64_t one_in = 1;
  cache_histograms out;

  [[nodiscard]] bool is_sampled(block_id block) const { return to_index(block) % one_in == 0; }
  void drop(block_id block, std::uint64_t now) {
    const auto it = living.find(block);
    if (it == living.end()) return;
    const std::vector<std::uint64_t>& uses = it->second.uses;
    add(out.lifetime, now - uses.front());
    add(out.residency, uses.back() - uses.front());
    add(out.idle, now - uses.back());
    for (std::size_t i = 1; i < uses.size(); ++i)
      add(out.reuse_gap, uses[i] - uses[i - 1]);
    living.erase(it);
  }
  static void add(duration_histogram& to, std::uint64_t duration) {
    std::size_t bucket = 0;
    while (bucket < to.bounds.size() && duration > to.bounds[bucket])
      ++bucket;
    ++to.counts[bucket];
    to.sum += duration;
  }
};

stored_block stored_in(block_id block) {
  static const prefix_context context;
  return {.block = block, .context = &context};
}

}  // namespace

TEST_CASE("the bounds are 1, 2 and 5 of each power of ten from a millisecond to 5000 seconds") {
  CHECK(duration_histogram::bounds.front() == 1'000);
  CHECK(duration_histogram::bounds[4] == 20'000);
  CHECK(duration_histogram::bounds.back() == 5'000'000'000);
}

TEST_CASE("a duration counts in the first bucket whose bound is at least as large") {
  duration_histogram histogram;
  for (const std::uint64_t each : {0U, 1000U, 1001U, 5'000'000U})
    histogram.add(each);
  histogram.add(5'000'000'001);
  CHECK(histogram.counts[0] == 2);
  CHECK(histogram.counts[1] == 1);
  CHECK(histogram.counts[11] == 1);
  CHECK(histogram.counts.back() == 1);
  CHECK(histogram.count() == 5);
  CHECK(histogram.sum == 5'005'002'002);
}

TEST_CASE("lifetime is the sum of residency and idle time, and reuse gaps are between uses") {
  measured_cache cache({.blocks = 2, .block_tokens = 4}, cache_metrics<>({.blocks = 2}));
  const std::vector<token_id> prompt{1, 2, 3, 4};
  const auto at = [&](std::uint64_t now) { cache.observer().clock().set(now); };
  const auto serve = [&] {
    const auto sequence = cache.create().value();
    const auto hit = cache.match(sequence, prompt).value();
    cache.append(sequence, std::span(prompt).subspan(hit.tokens)).value();
    cache.commit(sequence).value();
    cache.release(sequence).value();
  };
  at(100);
  serve();
  at(1'600);  // 1.5 ms on
  serve();
  at(31'600);
  serve();
  at(81'600);
  CHECK(cache.drop_idle() == 1);
  const cache_histograms& seen = cache.observer().histograms();
  CHECK(seen.lifetime.sum == 81'500);
  CHECK(seen.residency.sum == 31'500);
  CHECK(seen.idle.sum == 50'000);
  CHECK(seen.reuse_gap.sum == 31'500);
  CHECK(seen.reuse_gap.count() == 2);
  CHECK(seen.reuse_gap.counts[1] == 1);  // 1.5 ms
  CHECK(seen.reuse_gap.counts[5] == 1);  // 30 ms
  CHECK(seen.idle.counts[5] == 1);       // 50 ms, the bound itself
}

TEST_CASE("sampled histograms cover the whole history of every n-th block, moves included") {
  std::uint64_t measured_lives = 0;
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    naive_metrics naive;
    naive.one_in = naive.out.sample_one_in = 1 + random.below(std::uint64_t{4});
    cache_metrics<> metrics({.blocks = 20, .sample_one_in = naive.one_in});
    std::map<block_id, bool> cached;  // by block: whether its beginning was seen
    std::uint64_t now = 0;
    for (int i = 0; i < 400; ++i) {
      metrics.clock().set(now += random.below(std::uint64_t{1} << random.below(std::uint64_t{34})));
      const block_id block{1 + random.below(std::uint32_t{20})};
      const block_id other{1 + random.below(std::uint32_t{20})};
      if (!cached.contains(block)) {
        metrics.on_cached(stored_in(block));
        if (naive.is_sampled(block)) naive.living[block].uses.push_back(now);
        cached[block] = true;
      } else if (random.once_in(3)) {
        metrics.on_dropped(block, {});
        naive.drop(block, now);
        cached.erase(block);
      } else if (random.once_in(4) && !cached.contains(other)) {
        metrics.on_moved(block, other);
        auto life = naive.living.extract(block);
        if (!life.empty() && naive.is_sampled(other)) {
          life.key() = other;
          naive.living.insert(std::move(life));
        } else if (!life.empty()) {  // its gaps have been counted, its end will not be
          const auto& uses = life.mapped().uses;
          for (std::size_t k = 1; k < uses.size(); ++k)
            naive_metrics::add(naive.out.reuse_gap, uses[k] - uses[k - 1]);
        }
        cached[other] = true;
        cached.erase(block);
      } else {
        metrics.on_shared(block, {});
        if (const auto it = naive.living.find(block); it != naive.living.end())
          it->second.uses.push_back(now);
      }
    }
    for (const auto& [block, seen] : cached) {
      metrics.on_dropped(block, {});
      naive.drop(block, now);
    }
    CHECK(metrics.histograms() == naive.out);
    measured_lives += naive.out.lifetime.count();
  }
  CHECK(measured_lives > 2'000);
}

TEST_CASE("a clock that goes back is ignored") {
  llmmem::paging::set_clock clock;
  clock.set(5);
  clock.set(3);
  CHECK(clock.now() == 5);
}

TEST_CASE("a log and metrics observe one cache together") {
  struct both : paged_traits {
    using observer = llmmem::paging::observers<event_log, cache_metrics<>>;
  };
  paged_allocator<both> cache({.blocks = 2, .block_tokens = 1},
                              paging::observers(event_log({.events = 4}), cache_metrics<>({.blocks = 2})));
  cache.observer().get<1>().clock().set(7);
  const auto sequence = cache.create().value();
  cache.append(sequence, std::vector<token_id>{5}).value();
  cache.commit(sequence).value();
  cache.release(sequence).value();
  cache.drop_idle();
  CHECK(cache.observer().get<0>().end() == 2);
  CHECK(cache.observer().get<1>().histograms().lifetime.count() == 1);
}

TEST_CASE("metrics of zero blocks, of too many, or with an invalid sampling are refused") {
  CHECK_THROWS_WITH_AS(cache_metrics<>({.blocks = 0}), "cache_metrics: 0 blocks; use 1 to 2147483646",
                       length_error);
  CHECK_THROWS_WITH_AS(cache_metrics<>({.blocks = 2'147'483'647, .name = "m"}),
                       "m: 2147483647 blocks; use 1 to 2147483646", length_error);
  CHECK_THROWS_WITH_AS(cache_metrics<>({.blocks = 1, .sample_one_in = 0}),
                       "cache_metrics: one sample in 0 blocks; at least 1 is needed", length_error);
}

TEST_CASE("allocations are distinguished by their origin, and matches by what was asked") {
  paged_allocator<> cache({.blocks = 3, .block_tokens = 2});
  const std::vector<token_id> prompt{1, 2, 3, 4, 5};
  for (int i = 0; i < 2; ++i) {
    const auto sequence = cache.create().value();
    const auto hit = cache.match(sequence, prompt).value();
    cache.append(sequence, std::span(prompt).subspan(hit.tokens)).value();
    cache.commit(sequence).value();
    cache.release(sequence).value();
  }
  paged_stats stats = cache.stats();
  CHECK(stats.requested_blocks == 4);
  CHECK(stats.hit_blocks == 2);
  CHECK(stats.allocations == 4);
  CHECK(stats.evicting_allocations == 0);

  const auto other = cache.create().value();
  cache.append(other, std::vector<token_id>(6, 9)).value();
  stats = cache.stats();
  CHECK(stats.allocations == 7);
  CHECK(stats.evicting_allocations == 2);
  cache.release(other).value();
  const auto keyed = cache.create().value();
  const std::vector<block_key> keys{key_from_id(1), key_from_id(2)};
  CHECK(cache.match(keyed, {.keys = keys, .tokens = 3}).value().tokens == 0);
  CHECK(cache.stats().requested_blocks == 6);
  cache.drop_idle();
  CHECK(cache.stats().evicting_allocations == 2);
}

TEST_CASE("measurements allocate nothing") {
  cache_metrics<> metrics({.blocks = 4});
  const stored_block stored = stored_in(block_id{1});
  const std::uint64_t before = heap_allocations();
  metrics.on_cached(stored);
  metrics.on_shared(block_id{1}, {});
  metrics.on_dropped(block_id{1}, {});
  CHECK(heap_allocations() == before);
}
