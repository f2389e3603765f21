// The cost of a replay of a whole trace (requests.hpp) through the paged allocator.
//
//   replay/who/blocks   an item is one block of a prompt; every pass begins with an empty cache
//
// Ours is the real thing: create, match by keys, extend, commit, extend by the answer, release. `llmmem` has
// the LRU built in, `llmmem_any_eviction` the same one chosen by name, `llmmem_journaled` writes down every
// operation into a sink that throws it away. `llmmem_arc` and `llmmem_any_arc` are the same for a policy
// other than an LRU. The peers do the lookups alone, without sequences, block tables,
// answers and references.

#include <llmmem/eviction/any.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/journal.hpp>

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "support/heap_counter.hpp"
#include "support/lru_peers.hpp"
#include "support/peers.hpp"
#include "support/requests.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_benchmarks;

struct keyed_traits : paged_traits {
  using verification = trust_hash;  // there are no tokens to compare
};

struct any_traits : keyed_traits {
  using eviction = any_eviction;
};

struct arc_traits : keyed_traits {
  using eviction = arc_eviction;
};

struct journaled_traits : keyed_traits {
  using fence = recorded_fence;
};

/// Counts the bytes of a journal.
class counting_sink {
 public:
  [[nodiscard]] bool write(std::span<const std::byte> bytes) noexcept {
    bytes_ += bytes.size();
    return true;
  }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  std::uint64_t bytes_ = 0;
};

using journaled_cache = llmmem::paging::journaled<paged_allocator<journaled_traits>, counting_sink>;

/// Every figure counts successful calls only.
void require(bool succeeded) {
  if (!succeeded) std::abort();
}

/// Passes the whole trace repeatedly through `serve(cache, prompt)`, which returns how many blocks were
/// there, each time with a new cache from `make`. Returns the last cache.
auto replay(benchmark::State& state, auto make, auto serve) {
  std::uint64_t hits = 0;
  std::uint64_t calls = 0;
  decltype(make()) cache;
  for ([[maybe_unused]] auto _ : state) {
    state.PauseTiming();
    cache = make();
    const heap_watch heap;
    state.ResumeTiming();
    for (const prompt& asked : requests())
      hits += serve(*cache, asked);
    calls += heap.calls();
  }
  const std::uint64_t items = static_cast<std::uint64_t>(state.iterations()) * requests().block_refs();
  state.SetItemsProcessed(static_cast<std::int64_t>(items));
  state.counters["hit_ratio"] = static_cast<double>(hits) / static_cast<double>(items);
  state.counters["heap_calls"] = static_cast<double>(calls) / static_cast<double>(items);
  return cache;
}

template <class Cache>
std::uint64_t serve(Cache& cache, const prompt& asked) {
  const keyed_blocks blocks{.keys = asked.keys, .tokens = asked.input_tokens};
  const auto sequence = cache.create();
  const auto hit = cache.match(*sequence, blocks);
  require(hit && cache.extend(*sequence, asked.input_tokens - hit->tokens));
  require(cache.commit(*sequence, blocks) && cache.extend(*sequence, asked.output_tokens));
  require(cache.release(*sequence).has_value());
  return hit->blocks;
}

[[nodiscard]] paged_options options_of(const benchmark::State& state) {
  return {.blocks = static_cast<std::uint64_t>(state.range(0)),
          .block_tokens = requests().block_tokens(),
          .max_sequences = 4,
          .max_sequence_tokens = requests().longest_tokens()};
}

template <class Traits>
void paged(benchmark::State& state) {
  using cache_type = paged_allocator<Traits>;
  const paged_options options = options_of(state);
  const auto cache = replay(state, [&] { return std::make_unique<cache_type>(options); }, serve<cache_type>);
  state.counters["bytes_a_block"] =
      static_cast<double>(cache->stats().metadata_bytes) / static_cast<double>(options.blocks);
}

void any_arc(benchmark::State& state) {
  using cache_type = paged_allocator<any_traits>;
  const paged_options options = options_of(state);
  replay(
      state,
      [&] {
        return std::make_unique<cache_type>(options, make_eviction("arc", slot_count{options.blocks + 1}));
      },
      serve<cache_type>);
}

void recorded(benchmark::State& state) {
  const paged_options options = options_of(state);
  const auto cache = replay(
      state, [&] { return std::make_unique<journaled_cache>(options, counting_sink()); },
      serve<journaled_cache>);
  state.counters["journal_bytes"] =
      static_cast<double>(cache->sink().bytes()) / static_cast<double>(requests().block_refs());
}

template <class Lru>
void peer_lru(benchmark::State& state) {
  replay(
      state, [&] { return std::make_unique<Lru>(static_cast<std::size_t>(state.range(0))); },
      [](Lru& cache, const prompt& asked) {
        std::uint64_t hits = 0;
        for (const block_key& key : asked.keys)
          hits += cache.access(key.low) ? 1U : 0U;
        return hits;
      });
}

void floor(benchmark::State& state) {
  const auto blocks = static_cast<std::size_t>(state.range(0));
  replay(
      state, [&] { return std::make_unique<dense_lru>(blocks, requests().distinct_blocks()); },
      [](dense_lru& cache, const prompt& asked) {
        std::uint64_t hits = 0;
        for (const std::uint32_t number : asked.numbers)
          hits += cache.access(number) ? 1U : 0U;
        return hits;
      });
}

void both_sizes(benchmark::internal::Benchmark* rows) {
  keep_freed_memory();
  rows->Arg(10'000)->Arg(50'000)->Unit(benchmark::kMillisecond);
}

BENCHMARK(paged<keyed_traits>)->Name("replay/llmmem")->Apply(both_sizes);
BENCHMARK(paged<any_traits>)->Name("replay/llmmem_any_eviction")->Apply(both_sizes);
BENCHMARK(paged<arc_traits>)->Name("replay/llmmem_arc")->Apply(both_sizes);
BENCHMARK(any_arc)->Name("replay/llmmem_any_arc")->Apply(both_sizes);
BENCHMARK(recorded)->Name("replay/llmmem_journaled")->Apply(both_sizes);
BENCHMARK(peer_lru<list_map_lru>)->Name("replay/list_map")->Apply(both_sizes);
BENCHMARK(peer_lru<reusing_list_map_lru>)->Name("replay/list_map_reusing")->Apply(both_sizes);
BENCHMARK(floor)->Name("replay/floor")->Apply(both_sizes);

}  // namespace
