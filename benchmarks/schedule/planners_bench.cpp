// The time of the planners of schedule/, which run offline, and of those that run in each step.
//
//   simulate_pipeline/devices/micro_batches   a 1F1B order
//
//   bubble_fill/items                         greedy, cut freely, on one device with room for all
//
//   bubble_fill_exact/items                   the same, the exact search
//
//   partition_alike/layers/devices            min_comm_partition of equal layers, 4 micro-batches
//
//   partition_random/layers/devices           of layers that differ by up to nine times
//
//   cross_mapping/devices                     two to a link
//
//   solve_placement, round_placement          three tiers; 80, 80 and 1 chunks
//
//   split_decode/sequences                    of 20 to 4,120 tokens, blocks for three of four
//
//   stagger/requests                          of 20 to 419 tokens and 1 to 400 steps

#include <llmmem/schedule/bubble_fill.hpp>
#include <llmmem/schedule/cross_mapping.hpp>
#include <llmmem/schedule/min_comm_partition.hpp>
#include <llmmem/schedule/pipeline_timeline.hpp>
#include <llmmem/schedule/placement.hpp>
#include <llmmem/schedule/split_decode.hpp>
#include <llmmem/schedule/stagger.hpp>

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using namespace llmmem;

std::uint64_t next_random(std::uint64_t& state) {
  state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  return state >> 33;
}

void simulate(benchmark::State& state) {
  const pipeline_shape shape{.devices = static_cast<std::uint32_t>(state.range(0)),
                             .micro_batches = static_cast<std::uint32_t>(state.range(1))};
  const auto order = one_f_one_b(shape);
  const pipeline_costs costs{.forward_ns = std::vector<std::uint64_t>(shape.devices, 10),
                             .backward_ns = std::vector<std::uint64_t>(shape.devices, 20),
                             .send_ns = 1};
  for (auto _ : state)
    benchmark::DoNotOptimize(simulate_pipeline(order, costs).makespan_ns);
  state.SetItemsProcessed(state.iterations() * state.range(0) * state.range(1) * 2);
}
BENCHMARK(simulate)->Name("simulate_pipeline")->Args({16, 128});

void fill(benchmark::State& state, bubble_search search) {
  const auto items = static_cast<std::size_t>(state.range(0));
  pipeline_timeline timeline{.tasks = {{}}, .makespan_ns = 30 * items};
  for (std::uint64_t now = 0; now < timeline.makespan_ns; now += 30)
    timeline.tasks[0].push_back({.task = {}, .start_ns = now, .finish_ns = now + 15});
  std::vector<bubble_work> work;
  std::uint64_t seed = 1;
  for (std::size_t i = 0; i < items; ++i) {
    const std::uint64_t release = next_random(seed) % (15 * items);
    const std::uint64_t longest = search == bubble_search::exact ? 60 : 20;
    work.push_back({.ns = 1 + next_random(seed) % longest, .release_ns = release});
  }
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        bubble_fill(timeline, work, {.cut = llmmem::schedule::preemption::free, .search = search}).filled_ns);
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK_CAPTURE(fill, greedy, bubble_search::greedy)->Name("bubble_fill")->Arg(1000);
BENCHMARK_CAPTURE(fill, exact, bubble_search::exact)->Name("bubble_fill_exact")->Arg(16);

void partition(benchmark::State& state, std::uint64_t spread) {
  std::vector<swap_layer> layers;
  std::uint64_t seed = 7;
  for (std::int64_t i = 0; i < state.range(0); ++i) {
    const auto some = [&](std::uint64_t least) {
      return least + least * spread * (next_random(seed) % 1000) / 1000;
    };
    layers.push_back({.parameter_bytes = some(100'000'000),
                      .input_bytes = 16'000'000,
                      .forward_ns = some(5'000'000),
                      .backward_ns = some(15'000'000)});
  }
  const swap_devices devices{.count = static_cast<std::uint32_t>(state.range(1)),
                             .bytes = 24'000'000'000,
                             .bytes_per_second = 12'000'000'000,
                             .latency_ns = 10'000};
  for (auto _ : state)
    benchmark::DoNotOptimize(min_comm_partition(layers, devices, 4).step_ns);
}
void partition_alike(benchmark::State& state) {
  partition(state, 0);
}
void partition_random(benchmark::State& state) {
  partition(state, 8);
}
BENCHMARK(partition_alike)
    ->Args({96, 1})
    ->Args({96, 4})
    ->Args({96, 8})
    ->Args({300, 8})
    ->Unit(benchmark::kMillisecond);
BENCHMARK(partition_random)
    ->Args({96, 1})
    ->Args({96, 4})
    ->Args({96, 8})
    ->Args({300, 1})
    ->Args({300, 4})
    ->Args({300, 8})
    ->Unit(benchmark::kMillisecond);

void mapping(benchmark::State& state) {
  const auto devices = static_cast<std::uint32_t>(state.range(0));
  std::vector<std::uint8_t> shares;
  for (std::uint32_t a = 0; a < devices; ++a) {
    for (std::uint32_t b = 0; b < devices; ++b)
      shares.push_back(a / 2 == b / 2 ? 1 : 0);
  }
  const auto overlap = overlap_by_distance(devices);
  for (auto _ : state)
    benchmark::DoNotOptimize(cross_mapping(devices, overlap, shares).contention);
}
BENCHMARK(mapping)->Name("cross_mapping")->Arg(8)->Arg(10)->Unit(benchmark::kMillisecond);

void split(benchmark::State& state) {
  std::vector<split_sequence> sequences;
  std::uint64_t seed = 3;
  std::uint64_t blocks = 0;
  for (std::int64_t i = 0; i < state.range(0); ++i) {
    const std::uint64_t tokens = 20 + next_random(seed) % (100 + next_random(seed) % 4000);
    sequences.push_back({.tokens = tokens, .blocks = tokens / 16 + 1});
    blocks += sequences.back().blocks;
  }
  const split_rates rates{.device = {.fixed_ns = 5'000'000, .token_ps = 39'000},
                          .host = {.fixed_ns = 800'000, .token_ps = 427'000},
                          .link_ns = 14'000};
  for (auto _ : state)
    benchmark::DoNotOptimize(split_decode(sequences, rates, blocks * 3 / 4).step_ns);
}
BENCHMARK(split)->Name("split_decode")->Arg(12)->Arg(50)->Arg(200)->Arg(1000)->Unit(benchmark::kMicrosecond);

void start_apart(benchmark::State& state) {
  std::vector<stagger_request> requests;
  std::uint64_t seed = 3;
  for (std::int64_t i = 0; i < state.range(0); ++i)
    requests.push_back({.prompt = 20 + next_random(seed) % 400, .steps = 1 + next_random(seed) % 400});
  for (auto _ : state)
    benchmark::DoNotOptimize(stagger(requests, 20 * 820).end_step);
}
BENCHMARK(start_apart)->Name("stagger")->Arg(100)->Arg(1000)->Unit(benchmark::kMicrosecond);

constexpr placement_facts large{.weight_bytes = 140'000'000'000,
                                .kv_bytes = 180'000'000'000,
                                .activation_bytes = 16'000'000,
                                .kv_read_bytes = 180'000'000'000,
                                .kv_written_bytes = 330'000'000,
                                .activation_moved_bytes = 1'300'000'000,
                                .device_bytes = 14'000'000'000,
                                .host_bytes = 200'000'000'000,
                                .nvme_bytes = 1'500'000'000'000,
                                .host_to_device = 12'000'000'000,
                                .device_to_host = 12'000'000'000,
                                .nvme_to_host = 2'000'000'000,
                                .host_to_nvme = 1'000'000'000,
                                .compute_ns = 4'700'000'000};

void solve(benchmark::State& state) {
  for (auto _ : state)
    benchmark::DoNotOptimize(solve_placement(large).times.compute_ns);
}
BENCHMARK(solve)->Name("solve_placement")->Unit(benchmark::kMicrosecond);

void round(benchmark::State& state) {
  const auto solved = solve_placement(large);
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        round_placement(large, solved, {.weights = 80, .kv = 80, .activations = 1}).times.compute_ns);
  }
}
BENCHMARK(round)->Name("round_placement")->Unit(benchmark::kMicrosecond);

}  // namespace
