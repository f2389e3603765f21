/// @file
/// Times one operation alone, between its setup and its undo.
#pragma once

#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdint>

#include "support/heap_counter.hpp"

namespace llmmem_benchmarks {

/// Times `run()` alone, between `before()` and `after()`; for `UseManualTime`. An item is one of
/// `state.range(0)`; the counter `heap_calls` has the calls of `operator new` in all runs together.
template <class Before, class Run, class After>
void measure(benchmark::State& state, Before&& before, Run&& run, After&& after) {
  std::uint64_t calls = 0;
  for ([[maybe_unused]] auto _ : state) {
    before();
    const heap_watch heap;
    const auto start = std::chrono::steady_clock::now();
    run();
    const auto end = std::chrono::steady_clock::now();
    calls += heap.calls();
    state.SetIterationTime(std::chrono::duration<double>(end - start).count());
    after();
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
  state.counters["heap_calls"] = static_cast<double>(calls);
}

}  // namespace llmmem_benchmarks
