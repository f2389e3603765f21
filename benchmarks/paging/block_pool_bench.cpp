// The cost of allocating and freeing a block, compared with what a C++ author would use instead.
//
// 100,000 blocks, half of them live throughout, handed out in an order that random frees have mixed.
//
//   allocate_free/who/batch   `batch` blocks come and go: allocated together, freed in random order
//   turnover/who/batch        the live half turns over: a random batch of it is freed, as many are allocated
//
// Blocks are 64 KiB, what one layer of a KV block takes, and nobody writes to them but an allocator that
// keeps its lists inside. boost_pool_64 hands out 64-byte descriptors of blocks instead, which suits it
// better. `floor` is a stack of indices without any check: it shows what the harness costs.

#include <llmmem/paging/block_pool.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <memory_resource>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#ifdef LLMMEM_BENCH_BOOST
#include <boost/pool/pool.hpp>
#endif

#include "support/heap_counter.hpp"
#include "support/peers.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_benchmarks;

constexpr std::size_t blocks = 100'000;
constexpr std::size_t live_blocks = blocks / 2;
constexpr std::size_t block_bytes = 64 * 1024;
constexpr std::array<std::size_t, 3> batches{1, 32, 1000};

/// Every figure counts successful calls only.
void require(bool succeeded) {
  if (!succeeded) std::abort();
}

/// Our pool by handles: references, generations and every check.
class handle_pool {
 public:
  using name = block_handle;

  [[nodiscard]] name allocate() noexcept {
    const auto handle = pool_.allocate();
    require(handle.has_value());
    return *handle;
  }
  void free(name handle) noexcept { require(pool_.release(handle).has_value()); }
  void allocate(std::span<name> out) noexcept { require(pool_.allocate(out).has_value()); }
  void free(std::span<const name> handles) noexcept { require(pool_.release(handles).has_value()); }

  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return pool_.stats().metadata_bytes; }

 private:
  block_pool<> pool_{{.blocks = blocks}};
};

/// The minimum: a stack of indices.
class index_stack {
 public:
  using name = std::uint32_t;

  index_stack() : free_(blocks), top_(free_.data() + blocks) { std::iota(free_.rbegin(), free_.rend(), 1U); }

  [[nodiscard]] name allocate() noexcept { return *--top_; }
  void free(name index) noexcept { *top_++ = index; }

 private:
  std::vector<name> free_;
  name* top_;
};

/// A memory resource as its users call it: by its base, with the size of the block.
class pmr_pool {
 public:
  using name = void*;

  [[nodiscard]] name allocate() { return resource_->allocate(block_bytes); }
  void free(name block) { resource_->deallocate(block, block_bytes); }

 private:
  std::pmr::unsynchronized_pool_resource pool_{
      std::pmr::pool_options{.max_blocks_per_chunk = 0, .largest_required_pool_block = block_bytes}};
  std::pmr::memory_resource* resource_ = &pool_;
};

#ifdef LLMMEM_BENCH_BOOST
template <std::size_t Bytes>
class boost_pool {
 public:
  using name = void*;

  [[nodiscard]] name allocate() { return pool_.malloc(); }
  void free(name block) { pool_.free(block); }

 private:
  boost::pool<> pool_{Bytes, blocks};
};
#endif

class malloc_like {
 public:
  using name = void*;

  explicit malloc_like(const peer& which) : peer_(which) {}
  [[nodiscard]] name allocate() noexcept { return peer_.allocate(block_bytes); }
  void free(name block) noexcept { peer_.free(block); }

 private:
  peer peer_;
};

template <class Allocator>
using name_of = typename Allocator::name;

template <class Allocator>
void allocate_all(Allocator& from, std::span<name_of<Allocator>> out) {
  if constexpr (requires { from.allocate(out); }) {
    from.allocate(out);
  } else {
    for (auto& name : out)
      name = from.allocate();
  }
}

template <class Allocator>
void free_all(Allocator& to, std::span<const name_of<Allocator>> names) {
  if constexpr (requires { to.free(names); }) {
    to.free(names);
  } else {
    for (const auto name : names)
      to.free(name);
  }
}

/// An allocator with half its blocks live. Built on first use and kept, because with blocks of 64 KiB that
/// takes most of a row's time.
template <class Allocator>
class half_full {
 public:
  template <class... Args>
  explicit half_full(const Args&... args) : allocator(args...), live(blocks) {
    std::mt19937 random(1);
    allocate_all(allocator, std::span(live));
    std::shuffle(live.begin(), live.end(), random);
    free_all(allocator, std::span<const name_of<Allocator>>(live).subspan(live_blocks));
    live.resize(live_blocks);
  }

  Allocator allocator;
  std::vector<name_of<Allocator>> live;
};

/// Consecutive permutations of 0 to `batch` - 1: the order in which each batch is freed.
std::vector<std::uint32_t> shuffled_batches(std::size_t batch) {
  std::mt19937 random(2);
  std::vector<std::uint32_t> order((std::size_t{1} << 16) / batch * batch);
  for (auto first = order.begin(); first != order.end(); first += static_cast<std::ptrdiff_t>(batch)) {
    const auto last = first + static_cast<std::ptrdiff_t>(batch);
    std::iota(first, last, 0U);
    std::shuffle(first, last, random);
  }
  return order;
}

/// The live set in random order, cut to whole batches.
std::vector<std::uint32_t> shuffled_live(std::size_t batch) {
  std::mt19937 random(3);
  std::vector<std::uint32_t> order(live_blocks);
  std::iota(order.begin(), order.end(), 0U);
  std::shuffle(order.begin(), order.end(), random);
  order.resize(live_blocks / batch * batch);
  return order;
}

/// Both measurements return the calls of `operator new` that the timed loop made.
template <class Allocator>
std::uint64_t allocate_free(benchmark::State& state, half_full<Allocator>& from, std::size_t batch) {
  const std::vector<std::uint32_t> order = shuffled_batches(batch);
  std::vector<name_of<Allocator>> given(batch);
  std::vector<name_of<Allocator>> returned(batch);
  std::size_t at = 0;
  const heap_watch heap;
  if (batch == 1) {
    for ([[maybe_unused]] auto _ : state) {
      auto name = from.allocator.allocate();
      benchmark::DoNotOptimize(name);
      from.allocator.free(name);
    }
  } else {
    for ([[maybe_unused]] auto _ : state) {
      allocate_all(from.allocator, std::span(given));
      for (std::size_t i = 0; i < batch; ++i)
        returned[i] = given[order[at + i]];
      benchmark::ClobberMemory();
      free_all(from.allocator, std::span<const name_of<Allocator>>(returned));
      at = at + batch == order.size() ? 0 : at + batch;
    }
  }
  return heap.calls();
}

template <class Allocator>
std::uint64_t turnover(benchmark::State& state, half_full<Allocator>& from, std::size_t batch) {
  const std::vector<std::uint32_t> order = shuffled_live(batch);
  std::vector<name_of<Allocator>> names(batch);
  std::size_t at = 0;
  const heap_watch heap;
  if (batch == 1) {
    for ([[maybe_unused]] auto _ : state) {
      auto& name = from.live[order[at]];
      from.allocator.free(name);
      name = from.allocator.allocate();
      at = at + 1 == order.size() ? 0 : at + 1;
    }
  } else {
    for ([[maybe_unused]] auto _ : state) {
      for (std::size_t i = 0; i < batch; ++i)
        names[i] = from.live[order[at + i]];
      benchmark::ClobberMemory();
      free_all(from.allocator, std::span<const name_of<Allocator>>(names));
      allocate_all(from.allocator, std::span(names));
      for (std::size_t i = 0; i < batch; ++i)
        from.live[order[at + i]] = names[i];
      at = at + batch == order.size() ? 0 : at + batch;
    }
  }
  return heap.calls();
}

/// Both rows of one allocator at every batch. `args` build it.
template <class Allocator, class... Args>
void add_rows(const std::string& who, const Args&... args) {
  const auto shared = std::make_shared<std::optional<half_full<Allocator>>>();
  const auto add = [&](const std::string& group, std::size_t batch, auto measure) {
    const std::string name = group + "/" + who + "/" + std::to_string(batch);
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
      if (!*shared) shared->emplace(args...);
      const std::uint64_t heap_calls = measure(state, **shared, batch);
      const auto items = static_cast<std::int64_t>(state.iterations()) * static_cast<std::int64_t>(batch);
      state.SetItemsProcessed(items);
      if constexpr (!std::is_same_v<Allocator, malloc_like>) {
        state.counters["heap_calls"] = static_cast<double>(heap_calls) / static_cast<double>(items);
      }
      if constexpr (requires { (**shared).allocator.metadata_bytes(); }) {
        state.counters["bytes_a_block"] =
            static_cast<double>((**shared).allocator.metadata_bytes()) / static_cast<double>(blocks);
      }
    });
  };
  for (const std::size_t batch : batches) {
    add("allocate_free", batch, allocate_free<Allocator>);
    add("turnover", batch, turnover<Allocator>);
  }
}

[[maybe_unused]] const bool rows_added = [] {
  add_rows<handle_pool>("llmmem");
  add_rows<index_stack>("floor");
  add_rows<pmr_pool>("pmr");
#ifdef LLMMEM_BENCH_BOOST
  add_rows<boost_pool<block_bytes>>("boost_pool");
  add_rows<boost_pool<64>>("boost_pool_64");
#endif
  for (const peer& each : peers())
    add_rows<malloc_like>(each.name, each);
  return true;
}();

}  // namespace
