// The cost of a paged allocator's operations, one by one, with everything on: the default hash, token
// verification, LRU, 50,000 blocks of 16 tokens unless said otherwise.
//
//   register/llmmem/n         n full blocks of one sequence made findable
//   evict/llmmem/n            n blocks handed out that all have to be evicted first, their keys forgotten
//   fork_write/llmmem/n       n forks of one sequence that each write a token: n copies on write
//   append_batch/llmmem/n     a decode step of n sequences, one token each
//   match_active/llmmem/n     the n blocks of a prompt that another sequence holds (kvbm: match_active_hit)
//   match_inactive/llmmem/n   the same, held by nobody (kvbm: match_inactive_hit)
//   match_keys/llmmem/n       the same by keys from outside
//   bulk_drop/llmmem/n        a sequence of n cached blocks released (kvbm: bulk_drop)
//   get_free_blocks/llmmem/n  vLLM's benchmark_block_pool.py: n blocks taken and given back
//
// An item is a block, or a sequence in append_batch. The shapes are those of vLLM's
// benchmarks/benchmark_block_pool.py and of kvbm-logical's benches/block_manager.rs, so that their figures
// can be compared with these. `match_active/llmmem_siphash` and `llmmem_xxh3` are the rows with other hashes:
// for processors without AES instructions, and for prompts that nobody attacks.
//
//   eviction_latency/llmmem_*/cached   one eviction out of a cache of so many blocks, each timed; percentiles
//                                      in nanoseconds, the clock's own cost (`clock`) in them

#include <llmmem/eviction/any.hpp>
#include <llmmem/hash/siphash.hpp>
#include <llmmem/paged_allocator.hpp>
#if __has_include(<xxhash.h>)
#include <llmmem/hash/xxh3.hpp>
#endif

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "support/timed.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_benchmarks;

constexpr std::uint32_t block_tokens = 16;
constexpr std::uint64_t pool_blocks = 50'000;

void require(bool succeeded) {
  if (!succeeded) std::abort();
}

[[nodiscard]] std::vector<token_id> prompt(std::uint64_t blocks, token_id first) {
  std::vector<token_id> tokens(static_cast<std::size_t>(blocks * block_tokens));
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = first + static_cast<token_id>(i);
  return tokens;
}

[[nodiscard]] std::uint64_t size(const benchmark::State& state) {
  return static_cast<std::uint64_t>(state.range(0));
}

void batches(benchmark::internal::Benchmark* bench) {
  bench->Arg(1)->Arg(32)->Arg(1'000);
}
void prefixes(benchmark::internal::Benchmark* bench) {
  bench->Arg(8)->Arg(32)->Arg(128);
}

using cache_type = paged_allocator<>;

struct siphash_traits : paged_traits {
  using hash = siphash13_128;
};
using siphash_cache = paged_allocator<siphash_traits>;
#if __has_include(<xxhash.h>)
struct xxh3_traits : paged_traits {
  using hash = xxh3_128;
};
using xxh3_cache = paged_allocator<xxh3_traits>;
#endif

[[nodiscard]] paged_options options(std::uint32_t sequences) {
  return {.blocks = pool_blocks, .block_tokens = block_tokens, .max_sequences = sequences};
}

void registering(benchmark::State& state) {
  cache_type cache(options(4));
  sequence_id writer{};
  token_id first = 0;
  measure(
      state,
      [&] {
        writer = cache.create().value();
        cache.append(writer, prompt(size(state), first += 1 << 14)).value();
      },
      [&] { benchmark::DoNotOptimize(cache.commit(writer)); },
      [&] {
        cache.release(writer).value();
        cache.drop_idle();
      });
}

void evicting(benchmark::State& state) {
  cache_type cache(options(64));
  token_id first = 0;
  // Every block is cached and idle before one is taken.
  const auto fill = [&] {
    while (const std::uint64_t free = cache.stats().free_blocks) {
      const sequence_id writer = cache.create().value();
      cache.append(writer, prompt(std::min<std::uint64_t>(free, 1'000), first += 1 << 14)).value();
      cache.commit(writer).value();
      cache.release(writer).value();
    }
  };
  sequence_id taker{};
  fill();
  measure(
      state, [&] { taker = cache.create().value(); },
      [&] { benchmark::DoNotOptimize(cache.extend(taker, size(state) * block_tokens)); },
      [&] {
        cache.release(taker).value();
        fill();
      });
  require(cache.stats().evictions > 0);
}

void forking(benchmark::State& state) {
  cache_type cache(options(1'100));
  const sequence_id parent = cache.create().value();
  const auto begun = prompt(8, 1);
  cache.append(parent, std::span(begun).first(8 * block_tokens - 3)).value();
  std::vector<sequence_id> forks(static_cast<std::size_t>(size(state)));
  const token_id token = 7;
  measure(
      state, [] {},
      [&] {
        for (sequence_id& each : forks) {
          each = *cache.fork(parent);
          benchmark::DoNotOptimize(cache.append(each, std::span(&token, 1)));
        }
      },
      [&] {
        for (const sequence_id each : forks)
          cache.release(each).value();
      });
}

void stepping(benchmark::State& state) {
  cache_type cache(options(1'100));
  const token_id token = 7;
  const auto begun = prompt(1, 1);
  std::vector<llmmem::paging::growth> batch;
  for (std::uint64_t i = 0; i < size(state); ++i) {
    batch.push_back({.sequence = cache.create().value(), .tokens = std::span(&token, 1)});
    cache.append(batch.back().sequence, std::span(begun).first(1 + i % block_tokens)).value();
  }
  std::vector<append_result> out(batch.size());
  std::uint64_t steps = 0;
  measure(
      state, [] {}, [&] { require(cache.append_batch(batch, out).has_value()); },
      [&] {
        if (++steps % 512 != 0) return;
        for (const llmmem::paging::growth& each : batch)
          cache.truncate(each.sequence, 1).value();
      });
}

template <class Cache, bool Active>
void matching(benchmark::State& state) {
  Cache cache(options(4));
  const auto tokens = prompt(size(state), 1);
  const sequence_id writer = cache.create().value();
  cache.append(writer, tokens).value();
  cache.commit(writer).value();
  if (!Active) cache.release(writer).value();
  sequence_id taker{};
  measure(
      state, [&] { taker = cache.create().value(); },
      [&] { benchmark::DoNotOptimize(cache.match(taker, std::span<const token_id>(tokens))); },
      [&] {
        require(cache.tokens(taker) == tokens.size());
        cache.release(taker).value();
      });
}

void matching_keys(benchmark::State& state) {
  cache_type cache(options(4));
  std::vector<block_key> keys;
  for (std::uint64_t i = 0; i < size(state); ++i)
    keys.push_back(key_from_id(i));
  const keyed_blocks prompt_of_keys{.keys = keys, .tokens = keys.size() * block_tokens};
  const sequence_id writer = cache.create().value();
  cache.extend(writer, prompt_of_keys.tokens).value();
  cache.commit(writer, prompt_of_keys).value();
  cache.release(writer).value();
  sequence_id taker{};
  measure(
      state, [&] { taker = cache.create().value(); },
      [&] { benchmark::DoNotOptimize(cache.match(taker, prompt_of_keys)); },
      [&] {
        require(cache.tokens(taker) == prompt_of_keys.tokens);
        cache.release(taker).value();
      });
}

void dropping(benchmark::State& state) {
  cache_type cache(options(4));
  const auto tokens = prompt(size(state), 1);
  sequence_id holder = cache.create().value();
  cache.append(holder, tokens).value();
  cache.commit(holder).value();
  measure(
      state, [] {}, [&] { benchmark::DoNotOptimize(cache.release(holder)); },
      [&] {
        holder = cache.create().value();
        cache.match(holder, std::span<const token_id>(tokens)).value();
      });
}

void taking(benchmark::State& state) {
  block_pool<> pool({.blocks = 100'000});
  std::vector<block_id> blocks(static_cast<std::size_t>(size(state)));
  for ([[maybe_unused]] auto _ : state) {
    require(pool.allocate(std::span(blocks)).has_value());
    require(pool.release(std::span<const block_id>(blocks)).has_value());
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

BENCHMARK(registering)->Name("register/llmmem")->Apply(batches)->UseManualTime();
BENCHMARK(evicting)->Name("evict/llmmem")->Apply(batches)->UseManualTime();
BENCHMARK(forking)->Name("fork_write/llmmem")->Apply(batches)->UseManualTime();
BENCHMARK(stepping)->Name("append_batch/llmmem")->Apply(batches)->UseManualTime();
BENCHMARK(matching<cache_type, true>)->Name("match_active/llmmem")->Apply(prefixes)->UseManualTime();
BENCHMARK(matching<cache_type, false>)->Name("match_inactive/llmmem")->Apply(prefixes)->UseManualTime();
BENCHMARK(matching<siphash_cache, true>)
    ->Name("match_active/llmmem_siphash")
    ->Apply(prefixes)
    ->UseManualTime();
#if __has_include(<xxhash.h>)
BENCHMARK(matching<xxh3_cache, true>)->Name("match_active/llmmem_xxh3")->Apply(prefixes)->UseManualTime();
#endif
BENCHMARK(matching_keys)->Name("match_keys/llmmem")->Apply(prefixes)->UseManualTime();
BENCHMARK(dropping)->Name("bulk_drop/llmmem")->Apply(prefixes)->UseManualTime();
BENCHMARK(taking)->Name("get_free_blocks/llmmem")->Arg(1)->Arg(10)->Arg(100)->Arg(500)->Arg(1'000);

// The worst case

[[nodiscard]] std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

void tell(benchmark::State& state, std::vector<std::uint64_t>& samples) {
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double share) {
    const auto i = static_cast<std::size_t>(share * static_cast<double>(samples.size() - 1));
    return static_cast<double>(samples[i]);
  };
  state.counters["p50"] = at(0.5);
  state.counters["p99"] = at(0.99);
  state.counters["p99.9"] = at(0.999);
  state.counters["max"] = static_cast<double>(samples.back());
}

template <class Eviction>
struct keyed_by : paged_traits {
  using eviction = Eviction;
  using verification = trust_hash;  // there are no tokens to compare
};

/// A full pool of cached, idle blocks: each step takes a block, which evicts another one, caches it and
/// releases it.
template <class Eviction>
void eviction_latency(benchmark::State& state) {
  const std::uint64_t blocks = size(state);
  auto cache = std::make_unique<paged_allocator<keyed_by<Eviction>>>(
      paged_options{.blocks = blocks, .block_tokens = block_tokens, .max_sequences = 1});
  std::uint64_t id = 0;
  const auto serve = [&](bool timed) -> std::uint64_t {
    const block_key key = key_from_id(++id);
    const keyed_blocks one{.keys = std::span(&key, 1), .tokens = block_tokens};
    const sequence_id writer = *cache->create();
    const std::uint64_t start = timed ? now_ns() : 0;
    benchmark::DoNotOptimize(cache->extend(writer, block_tokens));
    const std::uint64_t took = timed ? now_ns() - start : 0;
    benchmark::DoNotOptimize(cache->commit(writer, one));
    benchmark::DoNotOptimize(cache->release(writer));
    return took;
  };
  for (std::uint64_t i = 0; i < blocks; ++i)
    serve(false);
  require(cache->stats().idle_blocks == blocks);
  std::vector<std::uint64_t> samples;
  samples.reserve(200'000);
  for ([[maybe_unused]] auto _ : state) {
    for (int i = 0; i < 200'000; ++i)
      samples.push_back(serve(true));
  }
  require(cache->stats().evictions >= samples.size());
  tell(state, samples);
}

void clock_itself(benchmark::State& state) {
  std::vector<std::uint64_t> samples;
  samples.reserve(200'000);
  for ([[maybe_unused]] auto _ : state) {
    for (int i = 0; i < 200'000; ++i) {
      const std::uint64_t start = now_ns();
      samples.push_back(now_ns() - start);
    }
  }
  tell(state, samples);
}

void caches(benchmark::internal::Benchmark* bench) {
  bench->Arg(5'000)->Arg(50'000)->Arg(500'000)->Arg(5'000'000)->Iterations(1)->Unit(benchmark::kMillisecond);
}

BENCHMARK(clock_itself)->Name("eviction_latency/clock")->Iterations(1)->Unit(benchmark::kMillisecond);
BENCHMARK(eviction_latency<lru_eviction>)->Name("eviction_latency/llmmem_lru")->Apply(caches);
BENCHMARK(eviction_latency<arc_eviction>)->Name("eviction_latency/llmmem_arc")->Apply(caches);
BENCHMARK(eviction_latency<lfu_eviction>)->Name("eviction_latency/llmmem_lfu")->Apply(caches);
BENCHMARK(eviction_latency<hazard_eviction>)->Name("eviction_latency/llmmem_hazard")->Apply(caches);

}  // namespace
