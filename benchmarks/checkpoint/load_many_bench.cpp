/// @file
/// Many small tensors in one file: the cost of a load in addition to their bytes.
///
///   load_many/T        `load_checkpoint` of T tensors of 8 bytes, checksums, all at once
///   load_many_parts/T  the same tensors in 100 loads by one `checkpoint_loader`, as a reader with a window
///
/// The goal: 80,000 tensors take at most 8 times what 20,000 take.

#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/load.hpp>

#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "checkpoint/state.hpp"

namespace {

using namespace llmmem;

struct many_tensors {
  explicit many_tensors(std::uint32_t count) : values(count), got(count), storage(folder.path) {
    std::vector<state_tensor> tensors;
    std::vector<std::span<const std::byte>> spans;
    for (std::uint32_t i = 0; i < count; ++i) {
      values[i] = i;
      const std::string name =
          "layers." + std::to_string(i % 61) + ".experts." + std::to_string(i) + ".lora_A.weight";
      tensors.push_back(
          {.name = name, .type = safetensors_type::u64, .shape = {1}, .group = "model", .part = {}});
      spans.push_back(std::as_bytes(std::span(std::as_const(values)).subspan(i, 1)));
      wanted.push_back({.name = name, .part = {}, .type = {}, .shape = {}});
    }
    solo_coordinator coordinator(storage, keep_last_and_every{.last = 2});
    async_checkpointer<> saves(coordinator, tensors);
    const commit_ticket saved = saves.begin_snapshot(1, host_state_view(spans)).ticket();
    if (saved.wait() != commit_status::committed) throw std::runtime_error(saved.why());
    found = *find_checkpoint(storage, verification::sizes).found;
  }

  std::vector<std::uint64_t> values;
  std::vector<std::uint64_t> got;
  std::vector<wanted_tensor> wanted{};
  llmmem_benchmarks::bench_folder folder{};
  posix_storage<> storage;
  found_checkpoint found{};
};

void load_many(benchmark::State& state) {
  many_tensors of(static_cast<std::uint32_t>(state.range(0)));
  for (auto _ : state) {
    load_checkpoint(of.storage, of.found, of.wanted, [&](std::uint32_t i, std::uint64_t, auto bytes) {
      std::memcpy(&of.got[i], bytes.data(), bytes.size());
    });
  }
  if (of.got != of.values) state.SkipWithError("other bytes");
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void load_many_parts(benchmark::State& state) {
  many_tensors of(static_cast<std::uint32_t>(state.range(0)));
  const std::size_t part = of.wanted.size() / 100;
  for (auto _ : state) {
    checkpoint_loader loader(of.storage, of.found);
    for (std::size_t first = 0; first < of.wanted.size(); first += part) {
      loader.load(std::span(of.wanted).subspan(first, part), [&](std::uint32_t i, std::uint64_t, auto bytes) {
        std::memcpy(&of.got[first + i], bytes.data(), bytes.size());
      });
    }
  }
  if (of.got != of.values) state.SkipWithError("other bytes");
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

BENCHMARK(load_many)->Arg(20'000)->Arg(80'000)->Arg(1'000'000)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(load_many_parts)
    ->Arg(20'000)
    ->Arg(80'000)
    ->Arg(1'000'000)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
