// The cost of snapshots by copy on write for their writer, on one core. 64 MiB of state, no reader.
//
//   first_write/who/page_bytes   every page written once after a snapshot; an item is 64 KiB of state.
//                                floor is the copy alone
//   next_write/who/page_bytes    a page that was written already since; an item is a write
//   snapshot/who                 taken and released, nothing written between; an item is a snapshot

#include <llmmem/version/cow_range.hpp>

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using namespace llmmem;

constexpr std::uint64_t state_bytes = std::uint64_t{64} << 20;
constexpr std::int64_t items = static_cast<std::int64_t>(state_bytes / (64 * 1024));

void first_write(benchmark::State& run) {
  const auto page_bytes = static_cast<std::uint64_t>(run.range(0));
  std::vector<std::byte> range(state_bytes, std::byte{1});
  std::vector<std::byte> pool(state_bytes, std::byte{1});
  cow_range state(range, pool, {.page_bytes = page_bytes});
  for (auto _ : run) {
    const auto kept = state.snapshot();
    for (std::uint64_t at = 0; at < state_bytes; at += page_bytes)
      benchmark::DoNotOptimize(state.write(at, page_bytes)->data());
    benchmark::DoNotOptimize(kept.has_value());
  }
  run.SetItemsProcessed(run.iterations() * items);
}

void copy_alone(benchmark::State& run) {
  const auto page_bytes = static_cast<std::uint64_t>(run.range(0));
  std::vector<std::byte> range(state_bytes, std::byte{1});
  std::vector<std::byte> pool(state_bytes, std::byte{1});
  for (auto _ : run) {
    for (std::uint64_t at = 0; at < state_bytes; at += page_bytes) {
      std::memcpy(pool.data() + at, range.data() + at, page_bytes);
      benchmark::ClobberMemory();
    }
  }
  run.SetItemsProcessed(run.iterations() * items);
}

void next_write(benchmark::State& run) {
  const auto page_bytes = static_cast<std::uint64_t>(run.range(0));
  std::vector<std::byte> range(state_bytes, std::byte{1});
  std::vector<std::byte> pool(state_bytes, std::byte{1});
  cow_range state(range, pool, {.page_bytes = page_bytes});
  const auto kept = state.snapshot();
  benchmark::DoNotOptimize(state.write(0, state_bytes)->data());
  std::uint64_t at = 0;
  for (auto _ : run) {
    benchmark::DoNotOptimize(state.write(at, 64)->data());
    at = (at + 65 * 64) & (state_bytes - 1);
    at = at > state_bytes - 64 ? 0 : at;
  }
  run.SetItemsProcessed(run.iterations());
}

void snapshot(benchmark::State& run) {
  std::vector<std::byte> range(state_bytes, std::byte{1});
  cow_range state(range, {});
  for (auto _ : run)
    benchmark::DoNotOptimize(state.snapshot()->version());
  run.SetItemsProcessed(run.iterations());
}

BENCHMARK(first_write)->Name("first_write/llmmem")->RangeMultiplier(4)->Range(1024, 1 << 20);
BENCHMARK(copy_alone)->Name("first_write/floor")->RangeMultiplier(4)->Range(1024, 1 << 20);
BENCHMARK(next_write)->Name("next_write/llmmem")->Arg(4096)->Arg(65536);
BENCHMARK(snapshot)->Name("snapshot/llmmem");

}  // namespace
