// Experts that a router draws for every batch, in virtual time: the value of a batch's plan for the next
// ones. 8 of 64 experts in each of 32 layers (`skewed_experts`), each computing for 1 ms and taking 4 ms over
// the link, as 100 MB do over 25 GB/s; a device that holds 100 of them; 8 batches to begin with, 24 to
// measure.
//
//   routed/asked/how    experts asked for when they are computed with
//   routed/routed/how   a layer's experts prefetched when its router has spoken, before the first of them
//   computes
//
// The counters are a batch's stall in ms, the GB brought up for it, the share of leases that found their
// expert, and the milliseconds of our own time that a batch takes. `oracle` plans the 24 batches as one
// iteration.

#include <llmmem/eviction/lru.hpp>
#include <llmmem/eviction/min.hpp>
#include <llmmem/eviction/wtinylfu.hpp>
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/schedule/shapes.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/simulated_space.hpp>
#include <llmmem/testing/virtual_clock.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace {

using namespace llmmem;
using llmmem::testing::simulated_space;
using llmmem::testing::virtual_clock;

constexpr std::size_t layers = 32;
constexpr std::size_t experts = 64;
constexpr std::size_t active = 8;
constexpr std::uint64_t expert_bytes = 4096;  // they stand for 100 MB
constexpr std::uint64_t held = 100;
constexpr std::uint64_t ms = 1'000'000;
constexpr link_model bus{
    .bytes_per_second = expert_bytes * 250, .latency_ns = 10'000, .duplex = link_duplex::half};
constexpr std::uint64_t warm_up = 8;
constexpr std::uint64_t measured = 24;

/// When a layer's experts are requested.
enum class asking : std::uint8_t { one_by_one, when_routed };

struct virtual_meter {
  virtual_clock* clock = nullptr;
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return clock->now().ns; }
};
struct virtual_traits : tiered_traits {
  using clock = virtual_meter;
};

/// The experts of one batch, in the order they compute.
std::vector<std::size_t> routed(std::uint64_t batch) {
  const auto trace =
      shapes::skewed_experts(layers, experts, active, expert_bytes, ms, 1'000'003 * (batch + 1));
  std::vector<std::size_t> order;
  for (const trace_event& each : trace.events()) {
    if (each.call == trace_call::acquire) order.push_back(to_index(each.chunk));
  }
  return order;
}

template <class Eviction>
class expert_device {
 public:
  using buffer_type = basic_tiered_buffer<virtual_traits, tier<simulated_space, Eviction>, tier<host_space>>;

  expert_device() {
    for (std::size_t i = 0; i < layers * experts; ++i) {
      chunks.push_back(buffer.create(expert_bytes).value());
      buffer.write(chunks.back()).value().end();
      buffer.evict(chunks.back()).value();
    }
    buffer.flush().value();
  }

  /// @param from  a buffer or a schedule, which grants the leases and progresses meanwhile.
  template <class From>
  void run(From& from, std::uint64_t batch, asking how) {
    const std::vector<std::size_t> order = routed(batch);
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (how == asking::when_routed && i % active == 0) {
        for (std::size_t k = i; k < i + active; ++k)
          buffer.prefetch(chunks[order[k]]).value();
      }
      const auto lease = from.read(chunks[order[i]]).value();
      for (int part = 0; part < 20; ++part) {
        clock.advance(ms / 20);
        from.progress();
      }
    }
  }

  virtual_clock clock;
  simulated_space device{clock, {.budget = 1 << 24, .link = {bus.bytes_per_second, bus.latency_ns}}};
  host_space host{{.budget = 1 << 25}};
  buffer_type buffer{virtual_meter{&clock},
                     {.max_chunks = layers * experts},
                     {device, held* expert_bytes},
                     {host, std::uint64_t{1} << 24}};
  std::vector<chunk_handle> chunks;
};

/// Runs `batch` for all batches, and reports on those that are measured.
template <class Device, class Batch>
void measure(benchmark::State& state, Device& on, Batch batch) {
  for (std::uint64_t i = 0; i < warm_up; ++i)
    batch(i);
  const auto before = on.buffer.stats();
  const std::uint64_t began = on.clock.now().ns;
  for (auto _ : state) {
    for (std::uint64_t i = warm_up; i < warm_up + measured; ++i)
      batch(i);
  }
  const auto after = on.buffer.stats();
  const auto each = [](std::uint64_t sum) { return static_cast<double>(sum) / measured; };
  const auto leases = static_cast<double>(layers * active);
  state.counters["stall_ms"] = each(on.clock.now().ns - began) / ms - leases;
  state.counters["GB"] =
      each(after.moved.links[0].onboard.bytes - before.moved.links[0].onboard.bytes) / expert_bytes / 10;
  state.counters["hits"] = each(after.tiers[0].hits - before.tiers[0].hits) / leases;
}

template <class Eviction>
void by_eviction(benchmark::State& state, asking how) {
  expert_device<Eviction> on;
  measure(state, on, [&](std::uint64_t batch) { on.run(on.buffer, batch, how); });
}

void by_schedule(benchmark::State& state, on_divergence what, asking how) {
  expert_device<min_eviction> on;
  prefetch_schedule schedule(on.buffer, {.links = {bus}, .divergence = what});
  for (const chunk_handle each : on.chunks)
    schedule.add(each);
  measure(state, on, [&](std::uint64_t batch) {
    schedule.begin_iteration();
    on.run(schedule, batch, how);
    schedule.end_iteration();
  });
}

void by_oracle(benchmark::State& state) {
  expert_device<min_eviction> on;
  prefetch_schedule schedule(on.buffer, {.links = {bus}});
  for (const chunk_handle each : on.chunks)
    schedule.add(each);
  // All batches are one iteration: recorded, followed once, and measured.
  for (int round = 0; round < 2; ++round) {
    schedule.begin_iteration();
    for (std::uint64_t batch = warm_up; batch < warm_up + measured; ++batch)
      on.run(schedule, batch, asking::one_by_one);
    schedule.end_iteration();
  }
  schedule.begin_iteration();
  measure(state, on, [&](std::uint64_t batch) {
    if (batch >= warm_up) on.run(schedule, batch, asking::one_by_one);
  });
  state.counters["stall_bound_ms"] =
      static_cast<double>(schedule.plan().steady.bound.stall_ns) / measured / ms;
}

template <class... Arguments>
void add(const std::string& name, Arguments... arguments) {
  benchmark::RegisterBenchmark(("routed/" + name).c_str(), arguments...)
      ->Iterations(1)
      ->Unit(benchmark::kMillisecond);
}

const int registered = [] {
  for (const asking how : {asking::one_by_one, asking::when_routed}) {
    const std::string asked = how == asking::one_by_one ? "asked/" : "routed/";
    add(asked + "lru", &by_eviction<lru_eviction>, how);
    add(asked + "wtinylfu", &by_eviction<wtinylfu_eviction>, how);
    add(asked + "repair", &by_schedule, on_divergence::repair, how);
    add(asked + "re_record", &by_schedule, on_divergence::re_record, how);
    add(asked + "fall_back", &by_schedule, on_divergence::fall_back, how);
    add(asked + "by_frequency", &by_schedule, on_divergence::by_frequency, how);
  }
  add("oracle", &by_oracle);
  return 0;
}();

}  // namespace
