// The cost of looking up a block, counting the access, and evicting another one if it is missing.
//
//   lookup_touch_evict/who/blocks   under LRU
//   lookup_arc/who/blocks           under ARC, and
//   lookup_s3fifo/who/blocks        under S3-FIFO, where libCacheSim is there to compare by
//
// A cache of `blocks` blocks serves the prompts of a trace (requests.hpp), round and round; an item is one
// block of a prompt. It is full before the clock starts, so every miss evicts.
//
// Ours is the prefix index, the block pool and its LRU as an engine drives them: a prompt's blocks are found
// and shared, the missing ones allocated together, inserted and marked cached, and all released, tail first.
// `llmmem_one_by_one` does all of that for each block by itself. The peers do what they can do: keep keys in
// LRU order.

#include <llmmem/eviction/arc.hpp>
#include <llmmem/eviction/lru.hpp>
#include <llmmem/eviction/s3fifo.hpp>
#include <llmmem/paging/block_pool.hpp>
#include <llmmem/paging/prefix_index.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/libcachesim.hpp"
#include "support/lru_peers.hpp"
#include "support/peers.hpp"
#include "support/requests.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_benchmarks;

/// Every figure counts successful calls only.
void require(bool succeeded) {
  if (!succeeded) std::abort();
}

template <class Eviction>
class prefix_cache {
 public:
  explicit prefix_cache(std::uint64_t blocks) : pool_({.blocks = blocks}), index_(blocks) {
    std::size_t longest = 0;
    for (const prompt& each : requests())
      longest = std::max(longest, each.keys.size());
    table_.resize(longest);
    fresh_.resize(longest);
    missing_.resize(longest);
  }

  /// Serves one prompt; returns how many of its blocks were there.
  std::uint64_t serve(const prompt& asked) {
    constexpr std::size_t ahead = 4;
    const std::span keys = asked.keys;
    std::size_t misses = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (i + ahead < keys.size()) index_.prefetch(keys[i + ahead]);
      if (const block_id found = index_.block_of(keys[i]); found != null_block) {
        share(found, keys[i]);
        table_[i] = found;
      } else {
        missing_[misses++] = i;
      }
    }
    allocate(std::span(fresh_).first(misses));
    for (std::size_t m = 0; m < misses; ++m) {
      const std::size_t i = missing_[m];
      table_[i] = fresh_[m];
      cache(keys[i], table_[i]);
    }
    require(pool_.release(std::span<const block_id>(table_).first(keys.size())).has_value());
    return keys.size() - misses;
  }

  /// The same for one block.
  bool serve(const block_key& key) {
    block_id block = index_.block_of(key);
    const bool found = block != null_block;
    if (found) {
      share(block, key);
    } else {
      allocate({&block, 1});
      cache(key, block);
    }
    require(pool_.release(block).has_value());
    return found;
  }

  [[nodiscard]] std::size_t metadata_bytes() const {
    return pool_.stats().metadata_bytes + index_.metadata_bytes();
  }

 private:
  void share(block_id block, const block_key& key) {
    require(pool_.share(block).has_value());
    pool_.touch(block, told(key));
  }

  /// Policies that remember evicted entries recognise them by their contents.
  [[nodiscard]] static access_hint told(const block_key& key) { return {.content = key.low}; }

  void allocate(std::span<block_id> out) {
    const auto forget = [this](std::span<const block_id> evicted) noexcept { index_.erase(evicted); };
    require(pool_.allocate(out, forget).has_value());
  }

  void cache(const block_key& key, block_id block) {
    index_.stage(key, block);
    index_.insert(block, block_tokens_);
    pool_.mark_cached(block, told(key));
  }

  block_pool<Eviction> pool_;
  prefix_index index_;
  std::uint32_t block_tokens_ = requests().block_tokens();
  std::vector<block_id> table_;
  std::vector<block_id> fresh_;
  std::vector<std::size_t> missing_;
};

/// Measures `serve(prompt)`, which returns how many of its blocks were there.
void measure(benchmark::State& state, auto serve) {
  const prompts& all = requests();
  for (const prompt& each : all)
    serve(each);
  std::uint64_t blocks = 0;
  std::uint64_t hits = 0;
  std::size_t next = 0;
  const heap_watch heap;
  for ([[maybe_unused]] auto _ : state) {
    const prompt& asked = all[next];
    hits += serve(asked);
    blocks += asked.keys.size();
    next = next + 1 == all.size() ? 0 : next + 1;
  }
  const auto items = static_cast<double>(blocks);
  state.counters["heap_calls"] = static_cast<double>(heap.calls()) / items;
  state.counters["hit_ratio"] = static_cast<double>(hits) / items;
  state.SetItemsProcessed(static_cast<std::int64_t>(blocks));
}

template <class Eviction>
void report_metadata(benchmark::State& state, const prefix_cache<Eviction>& cache) {
  state.counters["bytes_a_block"] =
      static_cast<double>(cache.metadata_bytes()) / static_cast<double>(state.range(0));
}

template <class Eviction>
void by_prompt(benchmark::State& state) {
  prefix_cache<Eviction> cache(static_cast<std::uint64_t>(state.range(0)));
  measure(state, [&](const prompt& asked) { return cache.serve(asked); });
  report_metadata(state, cache);
}

void one_by_one(benchmark::State& state) {
  prefix_cache<lru_eviction> cache(static_cast<std::uint64_t>(state.range(0)));
  measure(state, [&](const prompt& asked) {
    std::uint64_t hits = 0;
    for (const block_key& key : asked.keys)
      hits += cache.serve(key) ? 1U : 0U;
    return hits;
  });
  report_metadata(state, cache);
}

template <class Lru>
void peer_lru(benchmark::State& state) {
  Lru cache(static_cast<std::size_t>(state.range(0)));
  measure(state, [&](const prompt& asked) {
    std::uint64_t hits = 0;
    for (const block_key& key : asked.keys)
      hits += cache.access(key.low) ? 1U : 0U;
    return hits;
  });
}

#ifdef LLMMEM_BENCH_LIBCACHESIM
template <libcachesim_policy Policy>
void libcachesim(benchmark::State& state) {
  libcachesim_cache cache(Policy, static_cast<std::uint64_t>(state.range(0)));
  measure(state, [&](const prompt& asked) {
    std::uint64_t hits = 0;
    for (const block_key& key : asked.keys)
      hits += cache.access(key.low) ? 1U : 0U;
    return hits;
  });
}
#endif

void floor(benchmark::State& state) {
  dense_lru cache(static_cast<std::size_t>(state.range(0)), requests().distinct_blocks());
  measure(state, [&](const prompt& asked) {
    std::uint64_t hits = 0;
    for (const std::uint32_t number : asked.numbers)
      hits += cache.access(number) ? 1U : 0U;
    return hits;
  });
}

void both_sizes(benchmark::internal::Benchmark* rows) {
  keep_freed_memory();
  rows->Arg(10'000)->Arg(50'000);
}

// Which trace the figures belong to, for the JSON and the table.
[[maybe_unused]] const bool source_told = [] {
  benchmark::AddCustomContext("trace", requests_source());
  return true;
}();

BENCHMARK(by_prompt<lru_eviction>)->Name("lookup_touch_evict/llmmem")->Apply(both_sizes);
BENCHMARK(one_by_one)->Name("lookup_touch_evict/llmmem_one_by_one")->Apply(both_sizes);
BENCHMARK(peer_lru<list_map_lru>)->Name("lookup_touch_evict/list_map")->Apply(both_sizes);
BENCHMARK(peer_lru<reusing_list_map_lru>)->Name("lookup_touch_evict/list_map_reusing")->Apply(both_sizes);
BENCHMARK(floor)->Name("lookup_touch_evict/floor")->Apply(both_sizes);
#ifdef LLMMEM_BENCH_LIBCACHESIM
BENCHMARK(libcachesim<libcachesim_policy::lru>)->Name("lookup_touch_evict/libcachesim")->Apply(both_sizes);
BENCHMARK(by_prompt<arc_eviction>)->Name("lookup_arc/llmmem")->Apply(both_sizes);
BENCHMARK(libcachesim<libcachesim_policy::arc>)->Name("lookup_arc/libcachesim")->Apply(both_sizes);
BENCHMARK(by_prompt<s3fifo_eviction>)->Name("lookup_s3fifo/llmmem")->Apply(both_sizes);
BENCHMARK(libcachesim<libcachesim_policy::s3fifo>)->Name("lookup_s3fifo/libcachesim")->Apply(both_sizes);
#endif

}  // namespace
