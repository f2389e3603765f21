// The cost of an allocation and its free, on recorded traces of training and serving.
//
//   arena/who/program   one replay of the whole trace after another, with a quarter more than its peak of
//                       live bytes; per_pair is the time for each allocation and its free
//
// The arenas map real pages of the host in chunks of 2 MiB, but nothing accesses them, so that the trace may
// be larger than the machine. malloc gets the same calls without accesses: its cost is `mmap` for nearly
// every request. The first replay, which fills the caches, is not timed.

#include <llmmem/arena/caching_split.hpp>
#include <llmmem/arena/size_class.hpp>
#include <llmmem/arena/stitched.hpp>
#include <llmmem/model/presets.hpp>
#include <llmmem/space/host_virtual.hpp>

#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "allocation_trace/programs.hpp"
#include "allocation_trace/trace.hpp"

namespace {

using namespace llmmem;
using memory = host_virtual_memory;

allocation_trace::trace trace_of(std::string_view program) {
  allocation_trace::program_options options{.model = find_model("llama2-7b")};
  options.steps = 8;
  return allocation_trace::play(program, allocation_trace::generate_lengths(1, 1000), options);
}

/// Replays once, and frees the program's remaining allocations.
template <class Allocate, class Free, class Handle>
void replay(const allocation_trace::trace& from, std::vector<Handle>& handles, std::vector<char>& live,
            Allocate allocate, Free free) {
  for (const auto& each : from.events()) {
    if (each.bytes != 0) {
      handles[each.id] = allocate(each.bytes);
    } else {
      free(handles[each.id]);
    }
    live[each.id] = each.bytes != 0 ? 1 : 0;
  }
  for (std::size_t id = 0; id < live.size(); ++id) {
    if (live[id] != 0) free(handles[id]);
  }
}

void count(benchmark::State& state, const allocation_trace::trace& from) {
  state.counters["per_pair"] =
      benchmark::Counter(static_cast<double>(from.allocations()),
                         benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

template <class Arena>
void arena(benchmark::State& state, std::string_view program) {
  constexpr std::uint64_t chunk = std::uint64_t{2} << 20;
  const auto from = trace_of(program);
  const std::uint64_t budget = from.peak_live_bytes() * 5 / 4 / chunk * chunk;
  const auto chunks = static_cast<std::uint32_t>(budget / chunk);
  memory beneath(host_mapper({.granularity = chunk}), {.budget = budget,
                                                       .max_ranges = 1 << 14,
                                                       .max_handles = chunks + (1 << 14),
                                                       .max_mappings = 2 * chunks + (1 << 14)});
  const arena_options options{.max_blocks = 1 << 17};
  Arena a = [&] {
    if constexpr (std::is_same_v<Arena, stitched_arena<memory>>) {
      // Under Linux's usual limit of 65,530 mappings.
      return Arena(beneath, stitched_options{.arena = options, .max_stitched_chunks = 16384});
    } else {
      return Arena(beneath, options);
    }
  }();
  std::vector<arena_handle> handles(from.allocations());
  std::vector<char> live(from.allocations());
  const auto once = [&] {
    replay(
        from, handles, live, [&](std::uint64_t bytes) { return a.allocate(bytes).value().handle; },
        [&](const arena_handle& handle) { a.free(handle).value(); });
  };
  once();
  const virtual_stats before = beneath.stats();
  for (auto _ : state)
    once();
  const virtual_stats after = beneath.stats();
  count(state, from);
  state.counters["maps_per_1000"] =
      1000.0 * static_cast<double>(after.map_calls - before.map_calls) /
      static_cast<double>(from.allocations() * static_cast<std::uint64_t>(state.iterations()));
}

void malloc_free(benchmark::State& state, std::string_view program) {
  const auto from = trace_of(program);
  std::vector<void*> handles(from.allocations());
  std::vector<char> live(from.allocations());
  for (auto _ : state) {
    replay(
        from, handles, live,
        [](std::uint64_t bytes) {
          void* const got = std::malloc(bytes);
          if (got == nullptr) std::abort();
          benchmark::DoNotOptimize(got);
          return got;
        },
        [](void* gone) { std::free(gone); });
  }
  count(state, from);
}

[[maybe_unused]] const int registered = [] {
  for (const std::string_view program : {"train", "train-recompute", "serve-exact"}) {
    const auto add = [&](const char* who, auto run) {
      benchmark::RegisterBenchmark((std::string("arena/") + who + "/" + std::string(program)).c_str(), run,
                                   program)
          ->Unit(benchmark::kMillisecond);
    };
    add("size_class", [](benchmark::State& s, std::string_view p) { arena<size_class_arena<memory>>(s, p); });
    add("caching_split",
        [](benchmark::State& s, std::string_view p) { arena<caching_split_arena<memory>>(s, p); });
    add("stitched", [](benchmark::State& s, std::string_view p) { arena<stitched_arena<memory>>(s, p); });
    add("malloc", [](benchmark::State& s, std::string_view p) { malloc_free(s, p); });
  }
  return 0;
}();

}  // namespace
