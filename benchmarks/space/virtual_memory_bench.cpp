// The cost of the calls of the host's virtual memory, on pages that were never accessed.
//
//   reserve_release             1 GiB of addresses
//   create_destroy/KiB          physical memory, without an address
//   map_unmap/KiB               one handle at one place
//   stitch/pieces               a new range out of so many handles of 2 MiB, taken apart again
//   grow_shrink/KiB             a growable_range by one step of 2 MiB, touched, and back

#include <llmmem/space/growable_range.hpp>
#include <llmmem/space/host_virtual.hpp>

#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

namespace {

using namespace llmmem;

constexpr std::uint64_t chunk = std::uint64_t{2} << 20;
constexpr std::uint64_t gib = std::uint64_t{1} << 30;

void require(bool succeeded) {
  if (!succeeded) std::abort();
}

void reserve_release(benchmark::State& state) {
  host_virtual_memory memory({.budget = gib});
  for (auto _ : state) {
    const auto range = memory.try_reserve(gib);
    require(range && memory.release(*range));
  }
}
BENCHMARK(reserve_release);

void create_destroy(benchmark::State& state) {
  host_virtual_memory memory({.budget = gib});
  const auto bytes = static_cast<std::uint64_t>(state.range(0)) << 10;
  for (auto _ : state) {
    const auto handle = memory.try_create(bytes);
    require(handle && memory.destroy(*handle));
  }
}
BENCHMARK(create_destroy)->Arg(64)->Arg(2048);

void map_unmap(benchmark::State& state) {
  host_virtual_memory memory({.budget = gib});
  const auto bytes = static_cast<std::uint64_t>(state.range(0)) << 10;
  const virtual_range range = memory.try_reserve(bytes).value();
  const physical_handle handle = memory.try_create(bytes).value();
  for (auto _ : state)
    require(memory.map(range, 0, std::span(&handle, 1)) && memory.unmap(range, 0, bytes));
}
BENCHMARK(map_unmap)->Arg(64)->Arg(2048);

void stitch_and_back(benchmark::State& state) {
  host_virtual_memory memory({.budget = gib});
  const auto pieces = static_cast<std::uint64_t>(state.range(0));
  std::vector<physical_handle> handles;
  for (std::uint64_t i = 0; i < 2 * pieces; ++i) {
    const auto made = memory.try_create(chunk).value();
    if (i % 2 == 0) handles.push_back(made);  // no two of them neighbours
  }
  for (auto _ : state) {
    const auto range = stitch(memory, handles);
    require(range && memory.unmap(*range, 0, pieces * chunk) && memory.release(*range));
  }
  state.counters["per_piece"] =
      benchmark::Counter(static_cast<double>(pieces),
                         benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(stitch_and_back)->Name("stitch")->Arg(2)->Arg(16)->Arg(128);

void grow_shrink(benchmark::State& state) {
  host_virtual_memory memory({.budget = gib});
  growable_range<host_virtual_memory> range(memory, gib, chunk);
  for (auto _ : state) {
    require(range.resize(chunk).has_value());
    for (std::uint64_t at = 0; at < chunk; at += system_page_bytes())
      range[at] = std::byte{1};
    require(range.resize(0).has_value());
  }
}
BENCHMARK(grow_shrink);

}  // namespace
