// The plans of planners for well-known programs, and the time that they take.
//
//   plan/workload/planner   one plan of one iteration; the counters are what it predicts: the iteration, its
//   stall and the
//                           least stall there can be in ms, bytes over the link both ways and the fewest in
//                           GB
//   million/shape           next_use over a million accesses

#include <llmmem/model/presets.hpp>
#include <llmmem/schedule/planners.hpp>
#include <llmmem/schedule/shapes.hpp>
#include <llmmem/schedule/simulate.hpp>

#include <benchmark/benchmark.h>

#include <cstdint>
#include <string>
#include <vector>

namespace {

using namespace llmmem;

constexpr std::uint64_t mb = 1'000'000;
constexpr std::uint64_t gb = 1'000 * mb;
constexpr std::uint64_t ms = 1'000'000;
constexpr link_model pcie{.bytes_per_second = 25 * gb, .latency_ns = 10'000};
constexpr link_model nvme{.bytes_per_second = 6 * gb, .latency_ns = 80'000, .duplex = link_duplex::half};
constexpr std::uint64_t hbm = 4'800 * gb;

struct workload {
  std::string name;
  schedule_trace trace;
  schedule_machine machine;
};

std::vector<workload> workloads() {
  const auto over_pcie = [](std::uint64_t budget) {
    return schedule_machine{.budgets = {budget}, .links = {pcie}};
  };
  std::vector<workload> all;
  // 500 MB a layer, 20 ms over the link; tier 0 holds 20 of 80.
  all.push_back({"forward", shapes::forward(80, 500 * mb, 10 * ms), over_pcie(10 * gb)});
  all.push_back({"forward_balanced", shapes::forward(80, 500 * mb, 15 * ms), over_pcie(10 * gb)});
  all.push_back({"forward_backward", shapes::forward_backward(80, 500 * mb, 10 * ms), over_pcie(10 * gb)});
  all.push_back({"unequal", shapes::unequal(80, 200 * mb, 800 * mb, 10 * ms), over_pcie(10 * gb)});
  all.push_back({"experts", shapes::skewed_experts(32, 64, 8, 100 * mb, ms, 1), over_pcie(10 * gb)});
  all.push_back(
      {"training", shapes::training_step(40, 200 * mb, 200 * mb, 1'200 * mb, 40 * ms), over_pcie(16 * gb)});
  all.push_back({"training_nvme",
                 shapes::training_step(40, 200 * mb, 200 * mb, 1'200 * mb, 40 * ms),
                 {.budgets = {16 * gb, 32 * gb}, .links = {pcie, nvme}}});
  const schedule_machine with_drive{.budgets = {10 * gb, 20 * gb}, .links = {pcie, nvme}};
  all.push_back({"forward_nvme", shapes::forward(80, 500 * mb, 10 * ms), with_drive});
  all.push_back({"forward_backward_nvme", shapes::forward_backward(80, 500 * mb, 10 * ms), with_drive});
  all.push_back({"experts_nvme",
                 shapes::skewed_experts(32, 64, 8, 100 * mb, ms, 1),
                 {.budgets = {5 * gb, 10 * gb}, .links = {pcie, nvme}}});
  all.push_back({"llama3_8b", shapes::decode(models::llama3_8b, 2, hbm), over_pcie(8 * gb)});
  all.push_back({"llama3_70b", shapes::decode(models::llama3_70b, 2, hbm), over_pcie(80 * gb)});
  all.push_back({"mixtral_8x7b", shapes::decode(models::mixtral_8x7b, 2, hbm), over_pcie(40 * gb)});
  return all;
}

template <class Planner>
void plan(benchmark::State& state, const workload& work, const Planner& planner) {
  schedule_plan made;
  for (auto _ : state)
    made = planner(work.trace, work.machine);
  const plan_iteration& steady = made.steady;
  const auto in = [](std::uint64_t value, std::uint64_t unit) {
    return static_cast<double>(value) / static_cast<double>(unit);
  };
  state.counters["iteration_ms"] = in(steady.forecast.iteration_ns, ms);
  state.counters["stall_ms"] = in(steady.forecast.stalls.total(), ms);
  state.counters["stall_bound_ms"] = in(steady.bound.stall_ns, ms);
  state.counters["GB"] = in(steady.forecast.bytes(), gb);
  state.counters["GB_bound"] = in(steady.bound.bytes(), gb);
}

/// A million accesses to `chunks` equal chunks, of which a quarter fits: in a loop, or at random.
schedule_trace million(std::uint32_t chunks, bool at_random, bool written) {
  trace_recorder record;
  for (std::uint32_t i = 0; i < chunks; ++i)
    record.add_chunk(mb);
  std::uint64_t state = 1;
  for (std::uint32_t i = 0; i < 1'000'000; ++i) {
    state = state * 6'364'136'223'846'793'005U + 1'442'695'040'888'963'407U;
    const chunk_id chunk{at_random ? static_cast<std::uint32_t>((state >> 33) % chunks) : i % chunks};
    record.acquire(chunk, written && i % 3 == 0 ? access_mode::read_write : access_mode::read);
    record.compute(36'000);
    record.release(chunk);
  }
  return record.freeze();
}

void plan_million(benchmark::State& state, std::uint32_t chunks, bool at_random, bool written) {
  const auto trace = million(chunks, at_random, written);
  const schedule_machine machine{.budgets = {chunks * mb / 4}, .links = {pcie}};
  for (auto _ : state)
    benchmark::DoNotOptimize(schedule::next_use{}(trace, machine));
}

const int registered = [] {
  for (const workload& work : workloads()) {
    const auto row = [&](const std::string& name, auto planner) {
      benchmark::RegisterBenchmark(("plan/" + work.name + "/" + name).c_str(), [work, planner](
                                                                                   benchmark::State& state) {
        plan(state, work, planner);
      })->Unit(benchmark::kMillisecond);
    };
    row("on_demand", schedule::on_demand{});
    row("lookahead_2", schedule::lookahead{2});
    row("lookahead_8", schedule::lookahead{8});
    row("next_use_bytes", schedule::next_use{plan_objective::bytes});
    row("next_use", schedule::next_use{});
  }
  return 0;
}();

BENCHMARK_CAPTURE(plan_million, loop, 1'000, false, false)
    ->Name("million/loop")
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan_million, random, 10'000, true, false)
    ->Name("million/random")
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan_million, written, 10'000, true, true)
    ->Name("million/written")
    ->Unit(benchmark::kMillisecond);

}  // namespace
