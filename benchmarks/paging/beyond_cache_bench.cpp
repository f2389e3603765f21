// The cost of a paged allocator's operations when none of its data is in the processor's caches: two million
// blocks of 16 tokens, everything on, some 350 MB of metadata.
//
//   far_evict/who/n       n blocks handed out that all have to be evicted first, and their keys forgotten
//   far_match/who/n       the first n blocks of a cached prompt, chosen at random, found by tokens and shared
//   far_match_keys/who/n  the same by keys from outside
//
// `floor` is the cache misses, each waiting for the one before it, that an item alone cannot do without; a
// walk from line to line of 512 MB in random order. So `of floor` says how many times that the operation
// takes; one that has several items' misses under way at once may take less than 1.
//
//   far_match, far_match_keys   2: a line of the hash table names the block; its key, tokens, record and
//                               place in the eviction order lie in arrays by block and wait for no more
//   far_evict                   2: the oldest block's key names the line of the hash table

#include <llmmem/paged_allocator.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace {

using namespace llmmem;

constexpr std::uint64_t blocks = 2'000'000;
constexpr std::uint32_t block_tokens = 16;
constexpr std::uint64_t prompt_blocks = 32;
constexpr std::uint64_t prompts = blocks / prompt_blocks;

void require(bool succeeded) {
  if (!succeeded) std::abort();
}

/// A full cache of idle prompts whose blocks are far apart, and its prompts by number.
class far_cache {
 public:
  far_cache() : cache_({.blocks = blocks, .block_tokens = block_tokens, .max_sequences = 1'024}) {
    scatter();
    for (std::uint64_t i = 0; i < prompts; ++i)
      write(i);
  }

  [[nodiscard]] paged_allocator<>& cache() { return cache_; }

  [[nodiscard]] std::span<const token_id> tokens(std::uint64_t prompt) {
    for (std::size_t i = 0; i < tokens_.size(); ++i)
      tokens_[i] = static_cast<token_id>(prompt * 31 + i);
    return tokens_;
  }
  [[nodiscard]] keyed_blocks keys(std::uint64_t prompt) {
    for (std::size_t i = 0; i < keys_.size(); ++i)
      keys_[i] = key_from_id(prompt * prompt_blocks + i);
    return {.keys = keys_, .tokens = prompt_blocks * block_tokens};
  }
  [[nodiscard]] std::uint64_t any_prompt() { return random_() % prompts; }

  void write(std::uint64_t prompt) {
    const sequence_id writer = cache_.create().value();
    cache_.append(writer, tokens(prompt)).value();
    cache_.commit(writer).value();
    cache_.release(writer).value();
  }
  /// Every prompt by external keys instead.
  void name_by_keys() {
    cache_.drop_idle();
    for (std::uint64_t i = 0; i < prompts; ++i) {
      const sequence_id writer = cache_.create().value();
      cache_.extend(writer, prompt_blocks * block_tokens).value();
      cache_.commit(writer, keys(i)).value();
      cache_.release(writer).value();
    }
  }

 private:
  /// Frees all blocks in an order that places consecutive allocations far apart.
  void scatter() {
    std::vector<sequence_id> takers(1'000);
    for (sequence_id& each : takers)
      each = cache_.create().value();
    for (std::uint64_t i = 0; i < blocks / takers.size(); ++i) {
      std::shuffle(takers.begin(), takers.end(), random_);
      for (const sequence_id each : takers)
        cache_.extend(each, block_tokens).value();
    }
    for (const sequence_id each : takers)
      cache_.release(each).value();
  }

  paged_allocator<> cache_;
  std::vector<token_id> tokens_ = std::vector<token_id>(prompt_blocks * block_tokens);
  std::vector<block_key> keys_ = std::vector<block_key>(prompt_blocks);
  std::minstd_rand random_{1};
};

/// A walk in which each step's line is known only after the previous one has arrived.
class chain_of_misses {
 public:
  chain_of_misses() : lines_(std::size_t{1} << 23) {
    std::vector<std::uint32_t> order(lines_.size());
    std::iota(order.begin(), order.end(), 0U);
    std::shuffle(order.begin(), order.end(), std::minstd_rand(1));
    for (std::size_t i = 0; i < order.size(); ++i)
      lines_[order[i]].next = order[(i + 1) % order.size()];
  }
  void walk(std::uint64_t steps) {
    for (std::uint64_t i = 0; i < steps; ++i)
      at_ = lines_[at_].next;
    benchmark::DoNotOptimize(at_);
  }

 private:
  struct alignas(64) line {
    std::uint32_t next;
  };
  std::vector<line> lines_;
  std::uint32_t at_ = 0;
};

template <class Before, class Run, class After>
void measure(benchmark::State& state, Before&& before, Run&& run, After&& after) {
  for ([[maybe_unused]] auto _ : state) {
    before();
    const auto start = std::chrono::steady_clock::now();
    run();
    const auto end = std::chrono::steady_clock::now();
    state.SetIterationTime(std::chrono::duration<double>(end - start).count());
    after();
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

// Built on first use and kept, because filling one takes longer than any row.
enum class filling { by_tokens, by_keys, for_evictions };
template <filling Filling>
[[nodiscard]] far_cache& cache_of() {
  static const auto shared = [] {
    auto made = std::make_unique<far_cache>();
    if (Filling == filling::by_keys) made->name_by_keys();
    return made;
  }();
  return *shared;
}

void evicting(benchmark::State& state) {
  far_cache& all = cache_of<filling::for_evictions>();
  const auto count = static_cast<std::uint64_t>(state.range(0));
  static std::uint64_t next = prompts;
  sequence_id taker{};
  measure(
      state, [&] { taker = all.cache().create().value(); },
      [&] { benchmark::DoNotOptimize(all.cache().extend(taker, count * block_tokens)); },
      [&] {
        all.cache().release(taker).value();
        while (all.cache().stats().free_blocks >= prompt_blocks)
          all.write(next++);
      });
  require(all.cache().stats().evictions > 0);
}

template <filling Filling>
void matching(benchmark::State& state) {
  far_cache& all = cache_of<Filling>();
  const auto count = static_cast<std::size_t>(state.range(0));
  sequence_id taker{};
  std::span<const token_id> tokens;
  keyed_blocks keyed;
  measure(
      state,
      [&] {
        const std::uint64_t prompt = all.any_prompt();
        taker = all.cache().create().value();
        tokens = all.tokens(prompt).first(count * block_tokens);
        keyed = all.keys(prompt);
        keyed = {.keys = keyed.keys.first(count), .tokens = count * block_tokens};
      },
      [&] {
        benchmark::DoNotOptimize(Filling == filling::by_keys ? all.cache().match(taker, keyed)
                                                             : all.cache().match(taker, tokens));
      },
      [&] {
        require(all.cache().tokens(taker) == count * block_tokens);
        all.cache().release(taker).value();
      });
}

void walking(benchmark::State& state) {
  static chain_of_misses misses;
  constexpr std::uint64_t needed = 2;
  for ([[maybe_unused]] auto _ : state)
    misses.walk(needed * static_cast<std::uint64_t>(state.range(0)));
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void counts(benchmark::internal::Benchmark* bench) {
  bench->Arg(1)->Arg(32);
}

BENCHMARK(evicting)->Name("far_evict/llmmem")->Apply(counts)->UseManualTime();
BENCHMARK(walking)->Name("far_evict/floor")->Apply(counts);
BENCHMARK(matching<filling::by_tokens>)->Name("far_match/llmmem")->Apply(counts)->UseManualTime();
BENCHMARK(walking)->Name("far_match/floor")->Apply(counts);
BENCHMARK(matching<filling::by_keys>)->Name("far_match_keys/llmmem")->Apply(counts)->UseManualTime();
BENCHMARK(walking)->Name("far_match_keys/floor")->Apply(counts);

}  // namespace
