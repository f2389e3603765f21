// The cost of sharing a prefix cache between threads: the lock-free form, and paged_allocator alone and
// behind one mutex.
//
//   match_release/who/blocks        a cached prefix of `blocks` blocks of 16 tokens is matched and released
//   match_beside_writer/who/blocks  the same by each of two threads, while a third commits and evicts; an
//                                   item is one block matched, of both threads
//   allocate16/who/threads          `threads` threads allocate 16 blocks and free them; an item is one block
//
// 100,000 blocks. The prefixes are 256 prompts, one after the other in random order. `one_thread` is
// paged_allocator without any lock, which is what sharing is paid against; `mutex` is the same behind a
// std::mutex. The writer works through prompts of its own, a new one each time, and takes a turn and sleeps
// 20 us, so that it does not decide the rows by itself: on this side of a mutex it would.

#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_pool.hpp>
#include <llmmem/paging/shared_prefix_cache.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <vector>

namespace {

using namespace llmmem;

constexpr std::uint64_t blocks = 100'000;
constexpr std::uint32_t block_tokens = 16;
constexpr std::size_t prompts = 256;

/// Every figure counts successful calls only.
void require(bool succeeded) {
  if (!succeeded) std::abort();
}

std::vector<token_id> prompt_of(std::uint32_t number, std::size_t length) {
  std::mt19937 random(number);
  std::vector<token_id> tokens(length * block_tokens);
  for (token_id& token : tokens)
    token = static_cast<token_id>(random() % 50'000);
  return tokens;
}

/// Without locks, for one thread.
class one_thread {
 public:
  one_thread() : cache_({.blocks = blocks, .block_tokens = block_tokens, .max_sequences = 8}) {}

  std::uint64_t match_and_release(std::span<const token_id> tokens) {
    const auto sequence = cache_.create();
    const auto hit = cache_.match(*sequence, tokens);
    require(cache_.release(*sequence).has_value());
    return hit->blocks;
  }

  void serve(std::span<const token_id> tokens) {
    const auto sequence = cache_.create();
    const auto hit = cache_.match(*sequence, tokens);
    require(cache_.append(*sequence, tokens.subspan(hit->tokens)).has_value());
    require(cache_.commit(*sequence).has_value());
    require(cache_.release(*sequence).has_value());
  }

 private:
  paged_allocator<> cache_;
};

/// The same behind one mutex, held for as long as each call takes.
class one_mutex {
 public:
  std::uint64_t match_and_release(std::span<const token_id> tokens) {
    const std::scoped_lock lock(mutex_);
    return cache_.match_and_release(tokens);
  }
  void serve(std::span<const token_id> tokens) {
    const std::scoped_lock lock(mutex_);
    cache_.serve(tokens);
  }

 private:
  std::mutex mutex_;
  one_thread cache_;
};

class shared {
 public:
  shared() : cache_({.blocks = blocks, .block_tokens = block_tokens}) {}

  std::uint64_t match_and_release(std::span<const token_id> tokens) {
    std::array<block_id, 256> table;
    const shared_match hit = cache_.match(tokens, {}, table);
    require(cache_.release(std::span(table).first(hit.blocks)).has_value());
    return hit.blocks;
  }

  void serve(std::span<const token_id> tokens) {
    std::array<block_id, 256> table;
    const auto whole = std::span(table).first(tokens.size() / block_tokens);
    const shared_match hit = cache_.match(tokens, {}, whole);
    const auto fresh = whole.subspan(hit.blocks);
    require(cache_.allocate(fresh).has_value());
    require(cache_.commit(hit.end, tokens.subspan(hit.tokens), fresh).has_value());
    require(cache_.release(whole).has_value());
  }

 private:
  shared_prefix_cache<> cache_;
};

/// A cache that holds the prompts; built by the first thread of a row, dropped by the last.
template <class Cache>
struct workload {
  explicit workload(std::size_t length) {
    for (std::uint32_t i = 0; i < prompts; ++i) {
      asked.push_back(prompt_of(i, length));
      cache.serve(asked.back());
    }
    std::shuffle(asked.begin(), asked.end(), std::mt19937(1));
  }

  Cache cache;
  std::vector<std::vector<token_id>> asked;
};

template <class Cache>
void match_release(benchmark::State& state) {
  const auto length = static_cast<std::size_t>(state.range(0));
  workload<Cache> on(length);
  std::size_t at = 0;
  for ([[maybe_unused]] auto _ : state) {
    require(on.cache.match_and_release(on.asked[at]) == length);
    at = at + 1 == prompts ? 0 : at + 1;
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

/// Commits its own prompts, which evict earlier ones of its own, until it is stopped.
template <class Cache>
class writer {
 public:
  explicit writer(workload<Cache>& on)
      : thread_([this, &on] {
          for (std::uint32_t number = 1000; !stop_.load(std::memory_order_relaxed); ++number) {
            on.cache.serve(prompt_of(number, 32));
            served_.fetch_add(1, std::memory_order_relaxed);
            std::this_thread::sleep_for(std::chrono::microseconds(20));
          }
        }) {}
  ~writer() {
    stop_.store(true, std::memory_order_relaxed);
    thread_.join();
  }
  writer(const writer&) = delete;
  writer& operator=(const writer&) = delete;

  [[nodiscard]] std::uint64_t served() const { return served_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> stop_{false};
  std::atomic<std::uint64_t> served_{0};
  std::thread thread_;
};

/// Google Benchmark's threads share the state of a row through this.
template <class Cache>
void match_beside_writer(benchmark::State& state) {
  static std::optional<workload<Cache>> on;
  static std::optional<writer<Cache>> beside;
  const auto length = static_cast<std::size_t>(state.range(0));
  if (state.thread_index() == 0) {
    on.emplace(length);
    beside.emplace(*on);
  }
  std::size_t at = static_cast<std::size_t>(state.thread_index()) * 97;
  std::uint64_t found = 0;
  for ([[maybe_unused]] auto _ : state) {
    found += on->cache.match_and_release(on->asked[at]);
    at = at + 1 == prompts ? 0 : at + 1;
  }
  state.SetItemsProcessed(static_cast<std::int64_t>(found));
  if (state.thread_index() == 0) {
    state.counters["served"] = static_cast<double>(beside->served());
    beside.reset();
    on.reset();
  }
}

/// The pool alone: what paged_allocator allocates from.
class pool_one_thread {
 public:
  void allocate(std::span<block_id> out, std::uint32_t) { require(pool_.allocate(out).has_value()); }
  void free(std::span<const block_id> given, std::uint32_t) { require(pool_.release(given).has_value()); }

 private:
  block_pool<> pool_{{.blocks = blocks}};
};

class pool_one_mutex {
 public:
  void allocate(std::span<block_id> out, std::uint32_t thread) {
    const std::scoped_lock lock(mutex_);
    pool_.allocate(out, thread);
  }
  void free(std::span<const block_id> given, std::uint32_t thread) {
    const std::scoped_lock lock(mutex_);
    pool_.free(given, thread);
  }

 private:
  std::mutex mutex_;
  pool_one_thread pool_;
};

template <std::uint32_t Shards>
class pool_shared {
 public:
  void allocate(std::span<block_id> out, std::uint32_t thread) {
    require(cache_.allocate(out, shard_id{thread}).has_value());
  }
  void free(std::span<const block_id> given, std::uint32_t thread) {
    require(cache_.release(given, shard_id{thread}).has_value());
  }

 private:
  shared_prefix_cache<> cache_{{.blocks = blocks, .shards = Shards}};
};

template <class Pool>
void allocate16(benchmark::State& state) {
  static std::optional<Pool> pool;
  if (state.thread_index() == 0) pool.emplace();
  const auto thread = static_cast<std::uint32_t>(state.thread_index());
  std::array<block_id, 16> held{};
  for ([[maybe_unused]] auto _ : state) {
    pool->allocate(held, thread);
    benchmark::DoNotOptimize(held);
    pool->free(held, thread);
  }
  state.SetItemsProcessed(state.iterations() * 16);
  if (state.thread_index() == 0) pool.reset();
}

void lengths(benchmark::internal::Benchmark* row) {
  row->Arg(8)->Arg(32)->Arg(128);
}
void two_readers(benchmark::internal::Benchmark* row) {
  row->Arg(32)->Threads(2)->UseRealTime();
}

BENCHMARK(match_release<one_thread>)->Name("match_release/one_thread")->Apply(lengths);
BENCHMARK(match_release<one_mutex>)->Name("match_release/mutex")->Apply(lengths);
BENCHMARK(match_release<shared>)->Name("match_release/llmmem")->Apply(lengths);
BENCHMARK(match_beside_writer<one_mutex>)->Name("match_beside_writer/mutex")->Apply(two_readers);
BENCHMARK(match_beside_writer<shared>)->Name("match_beside_writer/llmmem")->Apply(two_readers);
BENCHMARK(allocate16<pool_one_thread>)->Name("allocate16/one_thread");
BENCHMARK(allocate16<pool_one_mutex>)->Name("allocate16/mutex")->ThreadRange(1, 2)->UseRealTime();
BENCHMARK(allocate16<pool_shared<8>>)->Name("allocate16/llmmem")->ThreadRange(1, 2)->UseRealTime();
BENCHMARK(allocate16<pool_shared<1>>)->Name("allocate16/llmmem_one_shard")->ThreadRange(1, 2)->UseRealTime();

}  // namespace
